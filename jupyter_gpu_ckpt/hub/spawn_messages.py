"""Messages on the spawn page, merged with those that ``Spawner.progress``, an asynchronous generator, yields."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

_MESSAGES = "_gpu_ckpt_messages"
#: Seconds between two checks for new messages.
_POLL = 0.2

Progress = Callable[[], AsyncIterator[dict[str, Any]]]


class SpawnMessagesMixin:
    """Put before a spawner class: then a page that was opened before the first message shows it, too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        install(self)


def install(spawner: Any) -> None:
    """Make pages that are opened from now on show the messages."""
    if not hasattr(spawner, _MESSAGES):
        setattr(spawner, _MESSAGES, [])
        spawner.progress = _merged(spawner.progress, getattr(spawner, _MESSAGES))


def add(spawner: Any, message: str) -> None:
    """Show ``message`` on the page of the running spawn, and log it: a spawn by REST has no page."""
    install(spawner)
    spawner.log.info("%s: %s", spawner._log_name, message)
    getattr(spawner, _MESSAGES).append(message)


def clear(spawner: Any) -> None:
    """Remove the messages of the spawn before, when a new one begins."""
    getattr(spawner, _MESSAGES, []).clear()


def _merged(progress: Progress, messages: list[str]) -> Progress:
    async def merged() -> AsyncIterator[dict[str, Any]]:
        shown = 0
        async with contextlib.aclosing(progress()) as events:  # type: ignore[type-var]
            upcoming: asyncio.Future[dict[str, Any]] | None = None
            try:
                while True:
                    while shown < len(messages):
                        yield {"progress": 5, "message": messages[shown]}
                        shown += 1
                    if upcoming is None:
                        upcoming = asyncio.ensure_future(anext(events))
                    await asyncio.wait({upcoming}, timeout=_POLL)
                    if upcoming.done():
                        try:
                            event = upcoming.result()
                        except StopAsyncIteration:
                            break
                        finally:
                            upcoming = None
                        yield event
            finally:
                if upcoming is not None:  # the page was closed; a generator that runs cannot be
                    upcoming.cancel()
                    await asyncio.gather(upcoming, return_exceptions=True)
        for message in messages[shown:]:
            yield {"progress": 5, "message": message}

    return merged
