"""Who asks for kernels while they are not all there: at a server's start they still come, at its end they go.

A front end that is told of no kernel for a notebook starts one, and takes a kernel that is missing in a listing for
ended; the notebook's own, with all its variables, would then sleep on out of its user's sight.  And jupyter_server
drops the session of a kernel that it does not find.
"""

from __future__ import annotations

import asyncio

from tornado.web import HTTPError

#: Seconds after which a request is answered by what there is: a disk may never answer.
_PATIENCE = 60.0


class Presence:
    """Whether a server's kernels are all there; the extension says so."""

    #: The adoption of an earlier server's kernels, once it has begun.
    coming: asyncio.Task[None] | None = None
    #: Whether the server stops.
    going = False

    @property
    def is_certain(self) -> bool:
        """Whether a kernel that is not there is none of ours."""
        return not self.going and (self.coming is None or self.coming.done())

    async def certain(self) -> None:
        """Wait for an adoption that is under way; the adoption itself does not.

        Raises 503 on the way down, which front ends take for a server that is away: they ask again later.
        """
        if self.going:
            raise HTTPError(503, "The server is stopping.")
        if not self.is_certain and self.coming is not None and self.coming is not asyncio.current_task():
            await asyncio.wait({self.coming}, timeout=_PATIENCE)
