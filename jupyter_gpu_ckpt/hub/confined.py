"""A look at what another user wrote, in a process that has that user's rights and no others.

Root who reads a user's files meets whatever the user put there.  In a child that has become that user there is nothing
to be gained from it: a link leads nowhere the user could not go, a file system of the user's own that hangs, hangs the
child, and memory and time have limits.  A file server that does not trust root (``root_squash``) is met as well: the
user may read there what root may not.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

#: Bytes of address space and seconds of computing that the child has, and bytes of what it answers.
MEMORY = 2 << 30
COMPUTING = 60
MOST_BYTES = 32 << 20


class Unanswered(Exception):
    """There is no answer; the text says why."""


def ask(call: Callable[[], Any], *, identity: tuple[int, int] | None, seconds: float) -> Any:
    """What ``call`` returns, as JSON, from a child process; to be believed no more than the user is.

    Parameters
    ----------
    call:
        What the child does.  An `OSError` of it is told in the system's words, any other error by its name.
    identity:
        Uid and gid that the child takes on, without further groups; None to stay who we are.
    seconds:
        How long to wait.  A child that is not done is killed.

    Raises `Unanswered`.  To be called where there are no other threads: it forks.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        _answer(call, identity, writing)
    os.close(writing)
    try:
        text = _read(reading, time.monotonic() + seconds)
    finally:
        os.close(reading)
        _end(child)
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise Unanswered("it could not be looked at within the limits of memory and time")
    if "refused" in answer:
        raise Unanswered(str(answer["refused"])[:100])
    return answer.get("answer")


def _answer(call: Callable[[], Any], identity: tuple[int, int] | None, writing: int) -> None:
    """In the child; does not return."""
    try:
        for kind, most in (
            (resource.RLIMIT_AS, MEMORY),
            (resource.RLIMIT_CPU, COMPUTING),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(kind, (most, most))
        if identity is not None:
            os.setgroups([])
            os.setgid(identity[1])
            os.setuid(identity[0])
        try:
            answer = {"answer": call()}
        except OSError as error:
            answer = {"refused": error.strerror or "error"}
        except Exception as error:
            answer = {"refused": type(error).__name__}
        with open(writing, "w") as file:
            json.dump(answer, file)
    except BaseException:
        os._exit(1)
    os._exit(0)


def _read(reading: int, deadline: float) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([reading], [], [], left)[0]:
            raise Unanswered("it took too long to look at")
        piece = os.read(reading, 1 << 16)
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
        size += len(piece)
        if size > MOST_BYTES:
            raise Unanswered("there is too much of it")


def _end(child: int) -> None:
    """Kill it.  One that hangs in a file system that does not answer is not waited for."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(child, signal.SIGKILL)
        deadline = time.monotonic() + 1.0
        while os.waitpid(child, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.001)
