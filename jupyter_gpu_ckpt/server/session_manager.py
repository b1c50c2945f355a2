"""The server's session manager: it answers once it is certain which kernels there are (`presence`)."""

# mypy: allow-untyped-calls
# (jupyter_server does not annotate what is overridden here)

from __future__ import annotations

from typing import Any

from jupyter_server.services.sessions.sessionmanager import SessionManager

from .readiness import Presence


class CheckpointSessionManager(SessionManager):
    """What the extension installs where the user named no session manager."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.presence = Presence()

    async def list_sessions(self) -> list[dict[str, Any]]:
        """Called from REST."""
        await self.presence.certain()
        found: list[dict[str, Any]] = await super().list_sessions()
        return found

    async def session_exists(self, path: str) -> bool:
        """Called from REST before a session is created, and by the adoption itself."""
        await self.presence.certain()
        return bool(await super().session_exists(path))

    async def get_session(self, **kwargs: Any) -> dict[str, Any]:
        """Called from REST."""
        await self.presence.certain()
        found: dict[str, Any] = await super().get_session(**kwargs)
        return found
