"""Run short-lived programs of the host with a deadline that holds.

``subprocess.run(timeout=...)`` ends only the program itself and then waits for every process with its output pipe: a
stuck download helper of ``apt-get`` would hang the caller for ever.  Here the program leads a session of its own, which
is killed as a whole at the deadline.
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
    """The exit status (negative: the signal) and the output of a program that has ended."""

    status: int
    out: str
    err: str

    def tail(self, lines: int = 4) -> str:
        """Return the last lines for an error message: of standard error if there was any, else of standard output."""
        output = [line.strip() for line in (self.err.strip() or self.out.strip()).splitlines() if line.strip()]
        return "; ".join(output[-lines:]) or f"exit status {self.status}, no output"


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
    except BaseException:  # an interrupt must not leave a download running
        _end(process)
        raise
    return Completed(process.returncode, out, err)


def _end(process: subprocess.Popen[str]) -> None:
    """Kill the session, reap its leader and close the pipes, which a process that left the session may keep open."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait(timeout=10)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
