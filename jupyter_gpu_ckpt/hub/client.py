"""Drain one user's server over HTTP, with a deadline.  Needs only tornado, which the hub and its culler have."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any
from urllib.parse import quote

from tornado.httpclient import AsyncHTTPClient, HTTPClientError, HTTPRequest

from ..errors import ServerRefused, ServerSilent
from ..terminal_text import printable
from ..units import size

#: Seconds between two polls, at first and at most; for a drain, whatever a server estimates; and for one request.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
_LONGEST_DRAIN = 24 * 3600.0
_REQUEST = 20.0
#: Kernels of one server: the hub keeps what became of each.
_MOST_KERNELS = 1000
#: Those of them that a log or a page names, at most.
MOST_SHOWN = 20
#: Seconds for which a token of `server_token` is valid.
TOKEN_SECONDS = 3600


@dataclass(frozen=True)
class KernelOutcome:
    """The bytes of one kernel's verified image, or an error's code and hint."""

    kernel_id: str
    bytes: int
    code: str | None
    hint: str


@dataclass(frozen=True)
class Outcome:
    """The result of a drain: all kernels of the server, and whether it can be stopped without loss."""

    drained: bool
    kernels: tuple[KernelOutcome, ...]

    def __str__(self) -> str:
        """Return a text for a log or the spawn page: codes and hints, nothing that the user wrote."""
        if self.drained:
            return f"{len(self.kernels)} kernels asleep, {size(sum(kernel.bytes for kernel in self.kernels))}"
        shown = [f"kernel {kernel.kernel_id}: {kernel.code} ({kernel.hint})" for kernel in self.failed[:MOST_SHOWN]]
        more = len(self.failed) - len(shown)
        return "; ".join([*shown, *([f"and {more} more"] if more else [])])

    @property
    def failed(self) -> list[KernelOutcome]:
        """Return the kernels without a verified image."""
        return [kernel for kernel in self.kernels if kernel.code is not None]


def _outcome(result: Any) -> Outcome:
    """Parse a result.  It is not trusted: a server runs its user's code, and this is logged and shown on pages."""
    with _understood("reply to the drain"):
        if len(result["kernels"]) > _MOST_KERNELS:
            raise ValueError("more kernels than a server has")
        return Outcome(
            result["drained"] is True,
            tuple(
                KernelOutcome(
                    kernel_id=printable(str(kernel["kernel_id"]), 80),
                    bytes=int(kernel["bytes"]),
                    code=None if kernel["code"] is None else printable(str(kernel["code"]), 40),
                    hint=printable(str(kernel["hint"]), 300),
                )
                for kernel in result["kernels"]
            ),
        )


def _job(reply: Any) -> tuple[str | None, Outcome | None]:
    """Parse a job: the path of one that runs, or the outcome.  Raises `ServerRefused` for one that failed."""
    with _understood("reply to the drain"):
        if reply["status"] == "running":
            return f"gpu-ckpt/jobs/{quote(str(reply['id']), safe='')}", None
        if (result := reply["result"]) is None:
            error = reply["error"] or {}
            code, hint = printable(str(error.get("code")), 40), error.get("hint")
            hint = None if hint is None else printable(str(hint), 300)
            raise ServerRefused(f"The drain failed: {code}.", hint=hint)
    return None, _outcome(result)


@contextlib.contextmanager
def _understood(what: str) -> Iterator[None]:
    """Raise `ServerRefused` where the body fails at what a server has sent, for it may be anything."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ServerRefused(f"The server's {what} cannot be understood.") from error


class ServerClient:
    """One user's server.

    ``url``: its address with its base URL, through the hub's proxy, or from the hub itself directly.  ``token`` needs
    the scope ``access:servers`` for this server.  ``ssl_options``: the hub's certificates, if it talks to its servers
    by TLS.  ``slack``: seconds beyond the server's estimate, for the network and a proxy that restarts meanwhile.
    """

    def __init__(self, url: str, token: str, *, ssl_options: Any = None, slack: float = 30.0) -> None:
        self.url = url.rstrip("/")
        self.slack = slack
        self._headers = {"Authorization": f"token {token}"}
        self._ssl = ssl_options

    async def estimate(self) -> float:
        """Request the seconds that a drain takes at most.  Raises `ServerRefused`, `ServerSilent`."""
        reply = await self._request("GET", "gpu-ckpt/drain", time.monotonic() + self.slack)
        with _understood("estimate of the drain"):
            return min(_LONGEST_DRAIN, max(0.0, float(reply["seconds"])))

    async def last_activity(self) -> float:
        """Request the time of the server's last use by others, in seconds since the epoch.

        Raises `ServerRefused`, `ServerSilent`.
        """
        reply = await self._request("GET", "api/status", time.monotonic() + self.slack)
        with _understood("last activity"):
            at = datetime.fromisoformat(str(reply["last_activity"]).replace("Z", "+00:00"))
            return (at if at.tzinfo is not None else at.replace(tzinfo=timezone.utc)).timestamp()

    async def drain(self, estimate: float | None = None) -> Outcome:
        """Checkpoint every kernel and verify its image.  A second request joins a drain that runs.

        Raises `ServerRefused`, `ServerSilent`; the drain continues on the server then, and nothing is lost.
        """
        timeout = (await self.estimate() if estimate is None else estimate) + self.slack
        deadline = time.monotonic() + timeout
        path, outcome = _job(await self._request("POST", "gpu-ckpt/drain", deadline))
        pause = _FIRST_PAUSE
        while path is not None:
            if time.monotonic() + pause > deadline:
                raise ServerSilent(f"The server was not drained within {timeout:.0f} s.")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            path, outcome = _job(await self._request("GET", path, deadline))
        assert outcome is not None
        return outcome

    async def _request(self, method: str, path: str, deadline: float, document: Any = None) -> Any:
        """Send ``document`` and return the reply's; if the server or the proxy is unavailable, retry until then."""
        pause, body = _FIRST_PAUSE, "" if method == "POST" else None
        if document is not None:
            body = json.dumps(document)
        while True:
            timeout = max(0.1, min(_REQUEST, deadline - time.monotonic()))
            request = HTTPRequest(
                f"{self.url}/{path}",
                method=method,
                headers=self._headers,
                body=body,
                connect_timeout=timeout,
                request_timeout=timeout,
                follow_redirects=False,
                ssl_options=self._ssl,
            )
            try:
                return json.loads((await AsyncHTTPClient().fetch(request)).body)
            except HTTPClientError as error:
                if error.code < 500:
                    raise ServerRefused(f"The server answers {error.code}.", hint=_HINTS.get(error.code)) from error
                code: int | str = error.code
            except (OSError, ValueError, RecursionError) as error:
                code = type(error).__name__
            if time.monotonic() + pause > deadline:
                raise ServerSilent(f"The server does not answer ({code}).")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


async def server_token(hub_url: str, token: str, user: str, name: str) -> str:
    """Request a token for one server of ``user`` from the hub; it is valid for `TOKEN_SECONDS`.

    A server's user reads every token that is sent to the server, so it must open nothing else.  ``token``: the
    service's own, with the scope ``tokens``; only the hub gets it.  Raises `ServerRefused`, `ServerSilent`.
    """
    hub = ServerClient(hub_url, token)
    document = {
        "note": "gpu-ckpt: drains the server before it is culled",
        "scopes": [f"access:servers!server={user}/{name}"],
        "expires_in": TOKEN_SECONDS,
    }
    path = f"api/users/{quote(user, safe='')}/tokens"
    try:
        return str((await hub._request("POST", path, time.monotonic() + hub.slack, document))["token"])
    except (ServerRefused, KeyError, TypeError) as error:
        message = "The hub does not give its culler a token for the server."
        hint = "The culler's role needs the scope tokens for its user: jupyter_gpu_ckpt.hub.roles.culler_role has it."
        raise ServerRefused(message, hint=hint) from error


_HINTS = {
    403: "The server does not accept a token with the scope access:servers for it.",
    404: "The server's environment needs jupyter_gpu_ckpt[server].",
    424: "The server is not running.",
}
