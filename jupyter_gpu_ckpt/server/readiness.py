"""Delay listings while kernels are missing: at a server's start, until they are attached, and at its stop.

A front end that finds no kernel for a notebook starts another, and the notebook's own kernel, with all its variables,
would sleep on out of its user's sight.  And jupyter_server drops the session of a kernel that it does not find.
"""

# mypy: allow-untyped-calls
# (jupyter_server does not annotate what is overridden here)

from __future__ import annotations

import asyncio
from typing import Any

from jupyter_server.services.sessions.sessionmanager import SessionManager
from tornado.web import HTTPError

#: Seconds after which a request is answered with the kernels there are: a disk may never answer.
_TIMEOUT = 60.0


class Readiness:
    """Readiness of a server: whether all its kernels are attached; set by the extension."""

    #: Attaches an earlier server's kernels; None before that.
    attaching: asyncio.Task[None] | None = None
    stopping = False

    @property
    def is_ready(self) -> bool:
        """Return whether a kernel that is missing now does not exist."""
        return not self.stopping and (self.attaching is None or self.attaching.done())

    async def wait(self) -> None:
        """Wait until kernels are attached, but in the task that attaches them.  Raises 503 while the server stops."""
        if self.stopping:
            raise HTTPError(503, "The server is stopping.")
        if not self.is_ready and self.attaching is not None and self.attaching is not asyncio.current_task():
            await asyncio.wait({self.attaching}, timeout=_TIMEOUT)


class CheckpointSessionManager(SessionManager):
    """The default session manager of servers with the extension."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.readiness = Readiness()

    async def list_sessions(self) -> Any:
        """Called from REST; answers once kernels are attached."""
        await self.readiness.wait()
        return await super().list_sessions()

    async def session_exists(self, path: str) -> Any:
        """Called from REST and `persistence`; answers once kernels are attached."""
        await self.readiness.wait()
        return await super().session_exists(path)

    async def get_session(self, **kwargs: Any) -> Any:
        """Called from REST; answers once kernels are attached."""
        await self.readiness.wait()
        return await super().get_session(**kwargs)
