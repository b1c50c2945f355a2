"""The cold tier of a server: now and then the content of old images is sent away (`image.archive`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from ..errors import GpuCkptError
from ..image.archive import archive_old
from ..image.remote import Remote
from ..image.store import Store

#: Seconds between two looks, if images are archived after long; a quarter of that time if it is shorter.
INTERVAL = 600.0


class ColdTier:
    """Archives what is older than ``after`` seconds below ``url``; does nothing without a URL."""

    def __init__(
        self, store: Store, url: str, after: float, log: logging.Logger | logging.LoggerAdapter[logging.Logger]
    ) -> None:
        self._store, self._url, self._after, self._log = store, url, after, log
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin.  Called from the extension, on its event loop."""
        if self._url and self._task is None:
            self._task = asyncio.create_task(self._run(), name="gpu-ckpt-cold-tier")

    async def stop(self) -> None:
        """Begin nothing any more; a transfer under way goes on in its thread, and is of no harm half done."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _run(self) -> None:
        while True:
            await asyncio.to_thread(self._round)
            await asyncio.sleep(min(INTERVAL, max(self._after / 4, 0.1)))

    def _round(self) -> None:
        try:
            freed = archive_old(self._store, Remote(self._url), self._after)
        except GpuCkptError as error:
            self._log.warning("Old images could not be archived: %s", error.code)
        except Exception:
            self._log.exception("Old images could not be archived; the next look tries again.")
        else:
            for id, count in freed.items():
                self._log.info("Image %s was archived: %d bytes freed.", id, count)
