"""The server's session manager, which answers once all kernels are attached (`readiness`)."""

# mypy: allow-untyped-calls
# (jupyter_server does not annotate what is overridden here)

from __future__ import annotations

from typing import Any

from jupyter_server.services.sessions.sessionmanager import SessionManager

from .readiness import Readiness


class CheckpointSessionManager(SessionManager):
    """The default session manager of servers with the extension."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.readiness = Readiness()

    async def list_sessions(self) -> list[dict[str, Any]]:
        """Called from REST."""
        await self.readiness.wait()
        found: list[dict[str, Any]] = await super().list_sessions()
        return found

    async def session_exists(self, path: str) -> bool:
        """Called from REST before a session is created, and by `persistence`."""
        await self.readiness.wait()
        return bool(await super().session_exists(path))

    async def get_session(self, **kwargs: Any) -> dict[str, Any]:
        """Called from REST."""
        await self.readiness.wait()
        found: dict[str, Any] = await super().get_session(**kwargs)
        return found
