"""The one way this package runs a short-lived program of the host: with a deadline, and to its real end.

``subprocess.run(timeout=...)`` ends only the program itself and then waits for everybody who still holds its output
pipe: one stuck download helper of ``apt-get`` would hang the caller for ever.  Here the program leads a session of its
own, and at the deadline the whole session is ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

#: Programs that read no personal configuration and answer in English: their output is parsed.
CLEAN_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}


@dataclass(frozen=True)
class Completed:
    """How a program ended: exit status (negative: the signal), and what it wrote."""

    status: int
    out: str
    err: str

    def tail(self, lines: int = 4) -> str:
        """The last words, for an error message: standard error if there was any, else standard output."""
        said = [line.strip() for line in (self.err.strip() or self.out.strip()).splitlines() if line.strip()]
        return "; ".join(said[-lines:]) or f"exit status {self.status}, no output"


def run(
    argv: Sequence[str | os.PathLike[str]],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Completed:
    """Run ``argv`` to its end, at most ``timeout_s`` seconds; standard input is empty.

    ``env`` replaces the environment (`CLEAN_ENVIRONMENT` by default).  Raises `TimeoutError` at the deadline, after the
    program and its descendants in the same session were killed, and `OSError` when it cannot be started at all.
    """
    words = [os.fspath(word) for word in argv]
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(CLEAN_ENVIRONMENT if env is None else env),
        cwd=cwd,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _end(process)
        raise TimeoutError(f"{Path(words[0]).name} did not end within {timeout_s:g} s") from None
    except BaseException:  # an interrupt of the user must not leave a download running
        _end(process)
        raise
    return Completed(process.returncode, out, err)


def _end(process: subprocess.Popen[str]) -> None:
    """Kill the session and reap its leader; the pipes are closed unread, since a descendant that left may hold them."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait(timeout=10)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
