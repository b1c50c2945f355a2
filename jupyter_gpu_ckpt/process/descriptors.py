"""Limits of open files (RLIMIT_NOFILE): descriptors that a kernel needs to accept connections, and CRIU beside its own.

libzmq ends a process that cannot accept a connection to a unix socket because it has no descriptor left (``EMFILE`` in
``ipc_listener_t::accept``, 4.3.5; over TCP it waits).  So nobody connects to a kernel before it has some.

CRIU gives each process that it restores descriptors of its own meanwhile, with numbers above all others, and cannot
restore one whose numbers leave none below CRIU's own limit (``choose_service_fd_base`` in its servicefd.c).
"""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Iterator

from .. import procfs

#: Descriptors that a kernel takes to accept the gate's connections, and a few for itself.
NEEDED = 8
#: With so many, threads of the kernel do not take all while it is connected to.
_AMPLE = 256
#: Seconds between looks at a kernel that has too few.
_PAUSE = 0.02
#: Descriptors of CRIU in a process that it restores, with those that it leaves free; they end at such a multiple.
_OF_CRIU, _ALIGNED = 32, 128


def free(pid: int) -> int:
    """Return how many more descriptors a process may have.  Raises `OSError`."""
    limit = resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return _AMPLE
    return limit - sum(number < limit for number in procfs.descriptors(pid))


def may_connect(pid: int) -> bool:
    """Return whether a process can accept a connection; also if nobody knows."""
    try:
        return free(pid) >= NEEDED
    except OSError:
        return True


@contextlib.contextmanager
def headroom(pid: int, wait_s: float) -> Iterator[None]:
    """Let a process have descriptors for the connections that the body makes to it.

    Where it has few its soft limit is raised meanwhile.  Raises `LimitReached`, before the body is run, if it cannot be
    and the process does not close files within ``wait_s`` seconds.
    """
    from ..errors import LimitReached  # here: a capsule's init, which a wake waits for, does without

    deadline = time.monotonic() + wait_s
    with contextlib.ExitStack() as raised:
        try:
            if free(pid) < _AMPLE:
                raised.enter_context(_raised_limit(pid))
            while free(pid) < NEEDED:
                if time.monotonic() > deadline:
                    limit = resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]
                    message = f"The kernel has opened all files that it may ({limit}), and can accept no connection."
                    raise LimitReached(message, limit=limit)
                time.sleep(_PAUSE)
        except OSError:  # it has ended, which the body notices; or it is another user's
            pass
        yield


def raise_limit() -> None:
    """Raise the soft limit of this process, which becomes CRIU, to its hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def limit_of_criu() -> int:
    """Return the limit that CRIU has where this process starts it: the largest there is, if it may raise its own."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    largest = int(procfs.sysctl("fs.nr_open") or hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, largest))
    except (OSError, ValueError):
        return hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return largest


def needed_limit(highest: int) -> int:
    """Return the limit that CRIU must have to restore a process with the number ``highest`` in use, and none above."""
    return -(-(highest + _OF_CRIU) // _ALIGNED) * _ALIGNED


#: The highest number of a descriptor that every process has: standard error.
STANDARD = 2


def highest_number(limit: int) -> int:
    """Return the highest number with which a process can be restored where CRIU has this limit."""
    return limit // _ALIGNED * _ALIGNED - _OF_CRIU


@contextlib.contextmanager
def _raised_limit(pid: int) -> Iterator[None]:
    """Raise the soft limit of a process to its hard limit, or both a little where the caller may, for the body."""
    soft, hard = before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    more = (soft + _AMPLE, soft + _AMPLE)
    raised = before
    for wanted in [(hard, hard)] if hard == resource.RLIM_INFINITY or hard >= soft + _AMPLE else [more, (hard, hard)]:
        with contextlib.suppress(OSError, ValueError):  # ValueError: only root may raise a hard limit
            resource.prlimit(pid, resource.RLIMIT_NOFILE, wanted)
            raised = wanted
            break
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            if resource.prlimit(pid, resource.RLIMIT_NOFILE) == raised:  # else the program has set another
                resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
