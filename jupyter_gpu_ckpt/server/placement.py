"""Publish what sleeping kernels need of a node (`node.requirements`), for the hub that places this user's next server.

The hub cannot read images.  ``$JUPYTER_GPU_CKPT_PLACEMENT`` names a directory that this server shares with it; without
it nothing is written.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path

from ..files.atomic import write_atomically
from ..image.store import Store
from ..kernel.orphans import newest_images
from ..node.requirements import FILE, of, to_json
from .monitor import Changed, Listener
from .periodic_task import PeriodicTask


def publish(directory: Path, store: Store) -> None:
    """Write the needs of every kernel that sleeps in ``store``, atomically.  Raises `OSError`.

    The group may read it: a directory with the set-group-id bit and the hub's group gives it to the hub alone.
    """
    manifests = [orphan.image.manifest for orphan in newest_images(store).values() if orphan.image]
    text = to_json(of(each.fingerprint) for each in sorted(manifests, key=lambda each: each.created))
    write_atomically(directory / FILE, text, durable=True, mode=0o640)


class Publisher(Listener):
    """A listener of `monitor.KernelMonitor` that publishes when a kernel fell asleep or woke up."""

    def __init__(
        self, store: Store, directory: str, log: logging.Logger | logging.LoggerAdapter[logging.Logger]
    ) -> None:
        self._store, self._directory, self._log = store, directory, log
        self._changed = asyncio.Event()
        self._task = PeriodicTask("gpu-ckpt-placement", self._run)
        #: A thread of the task that `stop` cancels may still publish, and must not overwrite the last version.
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start, and publish at once.  Called from the extension, on its event loop."""
        if self._directory:
            self._changed.set()
            self._task.start()

    async def stop(self) -> None:
        """Publish for the last time.  Called from the extension when its kernels are detached."""
        if self._task.started:
            await self._task.stop()
            await asyncio.to_thread(self._publish)

    def changed(self, change: Changed) -> None:
        self._changed.set()

    async def _run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await asyncio.to_thread(self._publish)

    def _publish(self) -> None:
        try:
            with self._lock:
                publish(Path(self._directory), self._store)
        except OSError as error:
            self._log.warning("The needs of the sleeping kernels were not published for the hub: %s", error.strerror)
        except Exception:
            self._log.exception("The needs of the sleeping kernels were not published for the hub.")
