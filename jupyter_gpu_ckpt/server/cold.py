"""The cold tier of a server: archives the content of old images, and removes archived content of images that are gone.

The work (`transfer.archive`) runs in a process of its own: hashing and encrypting take no time from the server's
threads, and the process can be ended at any moment; files that are archived by then are not sent again.  It reads its
options from standard input, for a URL may contain a password; at the end of that pipe, the end of the server, it ends
too.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

from filelock import FileLock, Timeout

from ..errors import GpuCkptError, ImageBusy, ImageNotFound
from ..image.keys import Keyring
from ..image.store import Store
from ..transfer.archive import archive_old, due, removed, sweep
from ..transfer.remote import Remote
from .periodic_task import PeriodicTask

#: Seconds between two rounds, at most; a quarter of the archiving age if that is shorter.
INTERVAL = 600.0
#: Niceness of its process (nice(1)).
_NICE = 10


class ColdTier:
    """Archives what is older than ``after`` seconds below ``url``; does nothing without a URL."""

    def __init__(
        self, store: Store, url: str, after: float, log: logging.Logger | logging.LoggerAdapter[logging.Logger]
    ) -> None:
        self._store, self._url, self._after, self._log = store, url, after, log
        self._task = PeriodicTask("gpu-ckpt-cold-tier", self._run)

    def start(self) -> None:
        """Called from the extension, on its event loop."""
        if self._url:
            self._task.start()

    async def stop(self) -> None:
        """Stop, and abandon a transfer that is under way: a later server continues it."""
        await self._task.stop()

    async def _run(self) -> None:
        while True:
            try:
                if await asyncio.to_thread(lambda: due(self._store, self._after) or removed(self._store)):
                    await self._round()
            except Exception:
                self._log.exception("Old images could not be archived; the next round tries again.")
            await asyncio.sleep(min(INTERVAL, max(self._after / 4, 0.1)))

    async def _round(self) -> None:
        sender = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert sender.stdin is not None and sender.stdout is not None
        options = {"images": str(self._store.named), "keys": str(self._store.keys.directory)}
        try:
            sender.stdin.write(json.dumps({**options, "url": self._url, "after": self._after}).encode() + b"\n")
            async for line in sender.stdout:
                self._log_outcome(**json.loads(line))
            if status := await sender.wait():
                self._log.warning("Old images could not be archived: the archiving process ended (%d).", status)
        finally:
            if sender.returncode is None:
                sender.kill()
                await sender.wait()

    def _log_outcome(self, image: str, freed: int | None = None, code: str = "") -> None:
        if code:
            self._log.warning("Image %s could not be archived: %s", image or "?", code)
        elif freed is None:
            self._log.info("The archived content of image %s was removed: the image is gone.", image)
        else:
            self._log.info("Image %s was archived: %d bytes freed.", image, freed)


def main() -> None:
    """Archive what is due and sweep up after images that are gone; print a line of JSON for each image."""
    options = json.loads(sys.stdin.readline())
    threading.Thread(target=_exit_with_server, daemon=True).start()
    os.nice(_NICE)
    store = Store(Path(options["images"]), Keyring(Path(options["keys"])))
    try:
        with FileLock(store.root / ".cold.lock", timeout=0, mode=0o600):
            remote = Remote(options["url"])
            for id, error in sweep(store, remote):
                _report(id, error)
            for image, outcome in archive_old(store, remote, options["after"]):
                if not isinstance(outcome, ImageBusy | ImageNotFound):  # else its kernel is in use
                    _report(image.id, outcome)
    except Timeout:  # another server of this user does it
        pass
    except GpuCkptError as error:
        _report("", error)


def _report(image: str, outcome: GpuCkptError | int | None) -> None:
    result = {"code": outcome.code} if isinstance(outcome, GpuCkptError) else {"freed": outcome}
    print(json.dumps({"image": image, **result}), flush=True)


def _exit_with_server() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
