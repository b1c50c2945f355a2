"""What a user reads on the spawn page beside the spawner's own words.

JupyterHub shows there what ``Spawner.progress``, an asynchronous generator, yields; a page asks for it once, as soon as
it is open.  `listen` puts ours among a spawner's own, and `tell` has something to say.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

_TOLD = "_gpu_ckpt_told"
#: Seconds between two looks whether there is something new to say.
_LOOK = 0.2

Progress = Callable[[], AsyncIterator[dict[str, Any]]]


class ToldMixin:
    """Goes before a spawner: then a page that was opened before there was anything to tell shows it too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        listen(self)


def listen(spawner: Any) -> None:
    """Pages that are opened from now on show what is told."""
    if not hasattr(spawner, _TOLD):
        setattr(spawner, _TOLD, [])
        spawner.progress = _together(spawner.progress, getattr(spawner, _TOLD))


def tell(spawner: Any, message: str) -> None:
    """Show ``message`` on the page of the spawn under way, and write it to the log: a spawn by REST has no page."""
    listen(spawner)
    spawner.log.info("%s: %s", spawner._log_name, message)
    getattr(spawner, _TOLD).append(message)


def forget(spawner: Any) -> None:
    """A new spawn begins: what was told of the one before is no news."""
    getattr(spawner, _TOLD, []).clear()


def _together(theirs: Progress, told: list[str]) -> Progress:
    async def progress() -> AsyncIterator[dict[str, Any]]:
        shown = 0
        async with contextlib.aclosing(theirs()) as events:  # type: ignore[type-var]
            next_one: asyncio.Future[dict[str, Any]] | None = None
            try:
                while True:
                    while shown < len(told):
                        yield {"progress": 5, "message": told[shown]}
                        shown += 1
                    if next_one is None:
                        next_one = asyncio.ensure_future(anext(events))
                    await asyncio.wait({next_one}, timeout=_LOOK)
                    if next_one.done():
                        try:
                            event = next_one.result()
                        except StopAsyncIteration:
                            break
                        finally:
                            next_one = None
                        yield event
            finally:
                if next_one is not None:  # the page was closed; a generator that runs cannot be
                    next_one.cancel()
                    await asyncio.gather(next_one, return_exceptions=True)
        for message in told[shown:]:
            yield {"progress": 5, "message": message}

    return progress
