"""Publishes what the sleeping kernels need of a node, for the hub that places this user's next server.

The hub cannot read images, and shall not: they are their owner's alone, and hold everything a kernel knew.  So the side
that may read them says the little that a scheduler needs (`node.requirements`), in a directory that it shares with the
hub.  Whoever starts the server names that directory in ``$JUPYTER_GPU_CKPT_PLACEMENT``; without it nothing is written.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import threading
from pathlib import Path

from ..image.store import Store
from ..kernel.adoption import newest_images
from ..node.requirements import FILE, of, to_json
from .monitor import Changed, Failed, Stepped
from .periodic_task import Background


def publish(directory: Path, store: Store) -> None:
    """Write what every kernel asleep in ``store`` needs; whole or not at all.  Raises `OSError`.

    The group may read it: a directory with the set-group-id bit and the hub's group gives it to the hub alone.
    """
    images = sorted(
        (one.image for one in newest_images(store).values() if one.image), key=lambda one: one.manifest.created
    )
    text = to_json(of(image.manifest.fingerprint) for image in images)
    handle, draft = tempfile.mkstemp(prefix=f".{FILE}.", dir=directory)
    try:
        with open(handle, "w") as file:
            file.write(text)
            os.fchmod(file.fileno(), 0o640)
            file.flush()
            os.fsync(file.fileno())
        Path(draft).replace(directory / FILE)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


class Publisher:
    """A listener of `watch.Watcher` that publishes when a kernel went to sleep or woke up."""

    def __init__(
        self, store: Store, directory: str, log: logging.Logger | logging.LoggerAdapter[logging.Logger]
    ) -> None:
        self._store, self._directory, self._log = store, directory, log
        self._news = asyncio.Event()
        self._publishing = Background("gpu-ckpt-placement", self._run)
        #: What `stop` cancels may still be publishing, and must not have the last word.
        self._turn = threading.Lock()

    def start(self) -> None:
        """Begin, with what there is now.  Called from the extension, on its event loop."""
        if self._directory:
            self._news.set()
            self._publishing.start()

    async def stop(self) -> None:
        """Publish for the last time.  Called from the extension when its kernels have left."""
        if self._publishing.begun:
            await self._publishing.stop()
            await asyncio.to_thread(self._publish)

    def changed(self, change: Changed) -> None:
        """The state of a kernel."""
        self._news.set()

    def stepped(self, step: Stepped) -> None:
        """Nothing that a node is chosen by."""

    def failed(self, failure: Failed) -> None:
        """The state that it was left in is told by `changed`."""

    async def _run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            await asyncio.to_thread(self._publish)

    def _publish(self) -> None:
        try:
            with self._turn:
                publish(Path(self._directory), self._store)
        except OSError as error:
            self._log.warning("The hub cannot be told what the sleeping kernels need: %s", error.strerror)
        except Exception:
            self._log.exception("The hub cannot be told what the sleeping kernels need.")
