"""The arbiter of jupyterhub-idle-culler (2.0 or later): an idle server is culled once its kernels are safe.

In the culler's configuration file::

    from jupyter_gpu_ckpt.hub.cull_arbiter import Arbiter
    c.IdleCuller.cull_arbiter_hook = Arbiter("http://127.0.0.1:8000")

A server older than ``IdleCuller.max_age`` is culled whatever an arbiter says; there the server's own stop checkpoints.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any
from urllib.parse import urlsplit

from traitlets.log import get_logger

from ..errors import GpuCkptError
from .client import Outcome, ServerClient

#: Seconds by which the proxy's clock, which dates activity, may differ from ours.
_CLOCKS = 2.0


@dataclass
class _Asked:
    """When we asked a server, in seconds since the epoch: the proxy takes our own requests for its user's activity."""

    began: float
    ended: float


class Arbiter:
    """Allows the cull of a server that is idle and whose kernels sleep in proved images.

    Parameters
    ----------
    proxy_url:
        Where the hub's proxy listens, such as ``http://127.0.0.1:8000``; by default the public address that the hub
        tells its services, if it is configured.
    token:
        By default the service's own, ``JUPYTERHUB_API_TOKEN``; it needs the scope ``access:servers``.
    wait:
        Seconds that one question of the culler, which asks for one user after the other, may take.  A server that
        needs more goes on leaving meanwhile, and is looked at again in the culler's next round.
    """

    def __init__(self, proxy_url: str | None = None, token: str | None = None, *, wait: float = 20.0) -> None:
        self.proxy_url = (proxy_url or _public_address()).rstrip("/")
        self.wait = wait
        #: Why a server was not culled, by its path; for those that were asked and stayed.
        self.kept: dict[str, str] = {}
        self._token = token
        self._parking: dict[str, asyncio.Task[Outcome]] = {}
        self._asked: dict[str, _Asked] = {}

    async def __call__(
        self, *, inactive: timedelta | None, inactive_limit: float, server: dict[str, Any], **_: Any
    ) -> bool:
        """Called from the culler in each round for each running server; True: stop it.

        After failure the server is kept, with those of its kernels asleep that could leave; the log says why.
        """
        path: str = server["url"]
        client = ServerClient(self.proxy_url + path, self._token or os.environ["JUPYTERHUB_API_TOKEN"])
        last = None if inactive is None else await self._last_used(client, path, inactive)
        task = self._parking.get(path)
        if task is not None and task.done() and (last is None or last > self._asked[path].ended + _CLOCKS):
            del self._parking[path]  # it was used since: what was found then is not so any more
            task = None
        if last is None or time.time() - last < inactive_limit:
            return False
        if task is None:
            task = self._parking[path] = asyncio.create_task(self._park(client, path))
        await asyncio.wait({task}, timeout=self.wait)
        if not task.done():
            self._keep(path, "its kernels are still leaving")
            return False
        del self._parking[path]
        try:
            outcome = task.result()
        except GpuCkptError as error:
            self._keep(path, str(error))
            return False
        if not outcome.parked:
            self._keep(path, str(outcome))
            return False
        self.kept.pop(path, None)
        self._asked.pop(path, None)
        get_logger().info("Server %s may be culled: %s", path, outcome)
        return True

    async def _last_used(self, client: ServerClient, path: str, inactive: timedelta) -> float | None:
        """When somebody other than us used the server, in seconds since the epoch; None if that cannot be told."""
        now = time.time()
        last, asked = now - inactive.total_seconds(), self._asked.get(path)
        if asked is not None and asked.began - _CLOCKS <= last <= asked.ended + _CLOCKS:
            # It may have been us: the server itself knows better.
            began = now
            try:
                last = _seconds(await client.idle_since())
            except GpuCkptError as error:
                self._keep(path, str(error))
                return None
            finally:
                asked.ended = time.time()
                asked.began = min(asked.began, began)
        elif asked is not None and path not in self._parking:
            del self._asked[path]
        return last

    async def _park(self, client: ServerClient, path: str) -> Outcome:
        asked = self._asked.setdefault(path, _Asked(time.time(), float("inf")))
        asked.ended = float("inf")
        try:
            return await client.park()
        finally:
            asked.ended = time.time()

    def _keep(self, path: str, reason: str) -> None:
        if self.kept.get(path) != reason:
            get_logger().warning("Server %s is not culled: %s", path, reason)
        self.kept[path] = reason


def _public_address() -> str:
    parts = urlsplit(os.environ.get("JUPYTERHUB_PUBLIC_HUB_URL", ""))
    if not parts.netloc:
        raise ValueError("Arbiter needs the proxy's address: Arbiter('http://127.0.0.1:8000').")
    return f"{parts.scheme}://{parts.netloc}"


def _seconds(moment: str) -> float:
    """Seconds since the epoch of an ISO 8601 moment, which without a zone is UTC."""
    at = datetime.fromisoformat(moment.replace("Z", "+00:00"))
    return (at if at.tzinfo is not None else at.replace(tzinfo=timezone.utc)).timestamp()
