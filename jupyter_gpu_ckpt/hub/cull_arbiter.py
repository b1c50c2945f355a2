"""An arbiter for jupyterhub-idle-culler (2.0 or later): cull an idle server only once its kernels are checkpointed.

In the culler's configuration file::

    from jupyter_gpu_ckpt.hub.cull_arbiter import Arbiter
    c.IdleCuller.cull_arbiter_hook = Arbiter("http://127.0.0.1:8000")

A server older than ``IdleCuller.max_age`` is culled without the arbiter; then the server's own stop checkpoints.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import unquote, urlsplit

from traitlets.log import get_logger

from ..errors import GpuCkptError
from .client import TOKEN_SECONDS, Outcome, ServerClient, server_token

#: Seconds by which the proxy's clock, which dates activity, may differ from ours.
_CLOCK_DIFFERENCE = 2.0


@dataclass
class _OwnRequests:
    """Times of our own requests to a server, seconds since the epoch: the proxy counts them as its user's activity."""

    began: float
    ended: float
    #: When the last drain began.
    drain_began: float = 0.0


class Arbiter:
    """Allows the cull of a server that is idle and whose kernels sleep in verified images.

    ``proxy_url``: where the hub's proxy listens, such as ``http://127.0.0.1:8000``; by default the public address that
    the hub tells its services, if it is configured.  ``token``: by default the service's own, ``JUPYTERHUB_API_TOKEN``;
    it needs the scope ``tokens``, and only the hub gets it: each server gets one that opens this server alone.
    ``wait``: seconds that one call of the culler, which handles one server after the other, may take.  A drain that
    takes longer continues, and is joined in the culler's next round.
    """

    def __init__(self, proxy_url: str | None = None, token: str | None = None, *, wait: float = 20.0) -> None:
        self.proxy_url = (proxy_url or _public_address()).rstrip("/")
        self.wait = wait
        #: Why a server is not culled, by its path.
        self.refusals: dict[str, str] = {}
        self._token = token
        self._drains: dict[str, asyncio.Task[Outcome]] = {}
        self._requests: dict[str, _OwnRequests] = {}
        #: The request for the token of each server, and when it is to be replaced (`time.monotonic`).
        self._tokens: dict[str, tuple[asyncio.Task[str], float]] = {}

    async def __call__(
        self, *, inactive: timedelta | None, inactive_limit: float, server: dict[str, Any], **_: Any
    ) -> bool:
        """Return whether to cull a server; else the log says why not.  Called from the culler in each round."""
        path: str = server["url"]
        last = None if inactive is None else await self._last_used(server, inactive)
        task = self._drains.get(path)
        if task is not None and task.done():
            # Since the drain began, not since it ended: it may have come to another kernel when this one was woken.
            tolerance = min(_CLOCK_DIFFERENCE, inactive_limit / 2)
            if last is None or last > self._requests[path].drain_began - tolerance:
                del self._drains[path]  # used since: that drain is out of date
                task = None
        if last is None or time.time() - last < inactive_limit:
            return False
        if task is None:
            task = self._drains[path] = asyncio.create_task(self._drain(server))
        await asyncio.wait({task}, timeout=self.wait)
        if not task.done():
            return self._refuse(path, "its kernels are being checkpointed")
        del self._drains[path]
        try:
            outcome = task.result()
        except GpuCkptError as error:
            self._tokens.pop(path, None)  # its user may have deleted it
            return self._refuse(path, str(error))
        if not outcome.drained:
            return self._refuse(path, str(outcome))
        self.refusals.pop(path, None)
        self._requests.pop(path, None)
        get_logger().info("Server %s may be culled: %s", path, outcome)
        return True

    async def _client(self, server: dict[str, Any]) -> ServerClient:
        """Return a client with a token for this server alone.  Raises `ServerRefused`, `ServerSilent`."""
        path: str = server["url"]
        now = time.monotonic()
        self._tokens = {path: known for path, known in self._tokens.items() if known[1] > now}
        if path not in self._tokens:
            base, user, name = _owner(path, server["name"])
            own = self._token or os.environ["JUPYTERHUB_API_TOKEN"]
            request = asyncio.create_task(server_token(f"{self.proxy_url}{base}hub", own, user, name))
            self._tokens[path] = request, now + TOKEN_SECONDS / 2
        # A drain and a question may wait for the same token.
        return ServerClient(self.proxy_url + path, await asyncio.shield(self._tokens[path][0]))

    async def _last_used(self, server: dict[str, Any], inactive: timedelta) -> float | None:
        """Return when the server was last used by others, in seconds since the epoch; None if that is unknown."""
        path: str = server["url"]
        now = time.time()
        last, own = now - inactive.total_seconds(), self._requests.get(path)
        if own is not None and own.began - _CLOCK_DIFFERENCE <= last <= own.ended + _CLOCK_DIFFERENCE:
            # It may have been one of our requests, which the server itself does not count.
            try:
                last = await (await self._client(server)).last_activity()
            except GpuCkptError as error:
                self._tokens.pop(path, None)
                self._refuse(path, str(error))
                return None
            finally:
                own.ended = time.time()
                own.began = min(own.began, now)
        elif own is not None and path not in self._drains:
            del self._requests[path]
        return last

    async def _drain(self, server: dict[str, Any]) -> Outcome:
        own = self._requests.setdefault(server["url"], _OwnRequests(time.time(), float("inf")))
        own.ended, own.drain_began = float("inf"), time.time()
        try:
            return await (await self._client(server)).drain()
        finally:
            own.ended = time.time()

    def _refuse(self, path: str, reason: str) -> bool:
        if self.refusals.get(path) != reason:
            get_logger().warning("Server %s is not culled: %s", path, reason)
        self.refusals[path] = reason
        return False


def _owner(path: str, name: str) -> tuple[str, str, str]:
    """Return the hub's base URL, the user's name and the server's, from the path and the name of a server."""
    parts = path.rstrip("/").split("/")
    if name:
        parts.pop()
    *base, _, user = parts  # "user", and the user's name
    return "/".join([*base, ""]), unquote(user), name


def _public_address() -> str:
    parts = urlsplit(os.environ.get("JUPYTERHUB_PUBLIC_HUB_URL", ""))
    if not parts.netloc:
        raise ValueError("Arbiter needs the proxy's address: Arbiter('http://127.0.0.1:8000').")
    return f"{parts.scheme}://{parts.netloc}"
