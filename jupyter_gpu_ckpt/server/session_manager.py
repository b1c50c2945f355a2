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

    # Called from REST; `session_exists` also from `persistence`.

    async def list_sessions(self) -> Any:
        await self.readiness.wait()
        return await super().list_sessions()

    async def session_exists(self, path: str) -> Any:
        await self.readiness.wait()
        return await super().session_exists(path)

    async def get_session(self, **kwargs: Any) -> Any:
        await self.readiness.wait()
        return await super().get_session(**kwargs)
