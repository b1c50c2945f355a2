"""Asks one user's server to park, from a hub or one of its services: over HTTP, with a deadline of its own.

Needs tornado alone, which the hub and its culler have anyhow.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

from tornado.httpclient import AsyncHTTPClient, HTTPClientError, HTTPRequest, HTTPResponse

from ..errors import ServerRefused, ServerSilent
from ..terminal_text import printable
from ..units import size

#: Seconds between two looks at the job: at first, and once it has shown to be a long one.
_FIRST_LOOK, _LATER_LOOKS = 0.1, 2.0

#: Seconds that parking may take at most, whatever a server says.
_LONGEST = 24 * 3600.0

#: Seconds for one request; the verbs themselves are jobs, which are asked for.
_REQUEST = 20.0


@dataclass(frozen=True)
class KernelOutcome:
    """What became of one kernel: an image and its bytes, or an error's code and hint."""

    kernel_id: str
    image: str | None
    bytes: int
    code: str | None
    hint: str


@dataclass(frozen=True)
class Outcome:
    """What a server answered: every one of its kernels, and whether it can be stopped without a loss."""

    parked: bool
    kernels: tuple[KernelOutcome, ...]

    def __str__(self) -> str:
        """For a log or the spawn page: codes and hints, nothing of the user's."""
        if self.parked:
            return f"{len(self.kernels)} kernels asleep, {size(sum(kernel.bytes for kernel in self.kernels))}"
        kept = (kernel for kernel in self.kernels if kernel.code is not None)
        return "; ".join(f"kernel {one.kernel_id}: {one.code} ({one.hint})" for one in kept)


def _outcome(result: Any) -> Outcome:
    """Believed in form only: a server runs its user's code, and this comes into logs and onto pages."""
    try:
        return Outcome(
            result["drained"] is True,
            tuple(
                KernelOutcome(
                    kernel_id=printable(str(told["kernel_id"]), 80),
                    image=None if told["image"] is None else printable(str(told["image"]), 80),
                    bytes=int(told["bytes"]),
                    code=None if told["code"] is None else printable(str(told["code"]), 40),
                    hint=printable(str(told["hint"]), 300),
                )
                for told in result["kernels"]
            ),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ServerRefused("The server's word on parking cannot be understood.") from error


@dataclass(frozen=True)
class DrainEstimate:
    """What parking would need: kernels that are awake, bytes, seconds at most by the host's measured rates."""

    kernels: int
    bytes: int
    seconds: float


class ServerClient:
    """One user's server.

    Parameters
    ----------
    url:
        The server's address with its base URL: through the hub's proxy, or, from the hub itself, its own.
    token:
        One with the scope ``access:servers`` for this server.
    ssl_options:
        The hub's certificates, where it talks to its servers by TLS.
    slack:
        Seconds beyond what the server says parking takes, for the way there and a proxy that restarts meanwhile.
    """

    def __init__(self, url: str, token: str, *, ssl_options: Any = None, slack: float = 30.0) -> None:
        self.url = url.rstrip("/")
        self.slack = slack
        self._headers = {"Authorization": f"token {token}"}
        self._ssl = ssl_options

    async def need(self) -> DrainEstimate:
        """What parking would need now.  Raises `ServerRefused`, `ServerSilent`."""
        told = await self._until_answered("GET", "gpu-ckpt/drain", time.monotonic() + self.slack)
        try:
            return DrainEstimate(
                int(told["kernels"]), int(told["bytes"]), min(_LONGEST, max(0.0, float(told["seconds"])))
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ServerRefused("The server did not say what parking needs.") from error

    async def idle_since(self) -> str:
        """When the server says that it was last used (ISO 8601); neither this question nor `park` counts as use.

        Raises `ServerRefused`, `ServerSilent`.
        """
        told = await self._until_answered("GET", "api/status", time.monotonic() + self.slack)
        return str(told["last_activity"])

    async def park(self, need: DrainEstimate | None = None) -> Outcome:
        """Have every kernel sleep in a proved image.  Asked twice, the second joins the first.

        ``need`` as `need` told it; without it, it is asked first.

        Raises `ServerRefused`, `ServerSilent`; what was begun goes on then, and nothing is lost.
        """
        need = need or await self.need()
        deadline = time.monotonic() + need.seconds + self.slack
        job = await self._until_answered("POST", "gpu-ckpt/drain", deadline)
        pause = _FIRST_LOOK
        while job["status"] == "running":
            if time.monotonic() + pause > deadline:
                raise ServerSilent(f"The server was not parked within {need.seconds + self.slack:.0f} s.")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LATER_LOOKS)
            job = await self._until_answered("GET", f"gpu-ckpt/jobs/{job['id']}", deadline)
        if job["result"] is None:
            error = job["error"] or {}
            raise ServerRefused(f"Parking failed: {error.get('code')}.", hint=error.get("hint"))
        return _outcome(job["result"])

    async def _until_answered(self, method: str, path: str, deadline: float) -> Any:
        """The document.  A server or a proxy that is away for a moment is asked again until ``deadline``."""
        pause = _FIRST_LOOK
        while True:
            try:
                return json.loads((await self._fetch(method, path, deadline)).body)
            except HTTPClientError as error:
                if error.code < 500:
                    raise _refusal(error.code) from error
                code: int | str = error.code
            except (OSError, ValueError) as error:
                code = type(error).__name__
            if time.monotonic() + pause > deadline:
                raise ServerSilent(f"The server does not answer ({code}).")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LATER_LOOKS)

    async def _fetch(self, method: str, path: str, deadline: float) -> HTTPResponse:
        patience = max(0.1, min(_REQUEST, deadline - time.monotonic()))
        request = HTTPRequest(
            f"{self.url}/{path}",
            method=method,
            headers=self._headers,
            body="" if method == "POST" else None,
            connect_timeout=patience,
            request_timeout=patience,
            follow_redirects=False,
            ssl_options=self._ssl,
        )
        return await AsyncHTTPClient().fetch(request)


def _refusal(status: int) -> ServerRefused:
    hints = {
        403: "The token needs the scope access:servers for this server.",
        404: "The server's environment needs jupyter_gpu_ckpt[server].",
        424: "The server is not running.",
    }
    return ServerRefused(f"The server answers {status}.", hint=hints.get(status))
