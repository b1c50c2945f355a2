"""The server's session manager: whoever asks for a notebook's kernel while kernels still come back, waits for them.

A front end that is told of no kernel for a notebook starts one; the notebook's own, with all its variables, would then
sleep on without a notebook.
"""

# mypy: allow-untyped-calls
# (jupyter_server does not annotate what is overridden here)

from __future__ import annotations

import asyncio
from typing import Any

from jupyter_server.services.sessions.sessionmanager import SessionManager


class CheckpointSessionManager(SessionManager):
    """What the extension installs where the user named no session manager."""

    #: The adoption of an earlier server's kernels; set by the extension when it begins.
    coming: asyncio.Task[None] | None = None

    async def list_sessions(self) -> list[dict[str, Any]]:
        """Called from REST."""
        await until_back(self.coming)
        found: list[dict[str, Any]] = await super().list_sessions()
        return found

    async def session_exists(self, path: str) -> bool:
        """Called from REST before a session is created, and by the adoption itself."""
        await until_back(self.coming)
        return bool(await super().session_exists(path))

    async def get_session(self, **kwargs: Any) -> dict[str, Any]:
        """Called from REST."""
        await until_back(self.coming)
        found: dict[str, Any] = await super().get_session(**kwargs)
        return found


#: Seconds after which a request is answered by what there is: a disk may never answer.
_PATIENCE = 60.0


async def until_back(coming: asyncio.Task[None] | None) -> None:
    """Wait for an adoption that is under way; the adoption itself does not."""
    if coming is not None and not coming.done() and coming is not asyncio.current_task():
        await asyncio.wait({coming}, timeout=_PATIENCE)
