"""Commands whose kernels do not come up behind a gate: remembered while this process lives, so that each tries once.

Such a kernel ends before its first answer, and works where it is started plainly: one that cannot listen on a unix
socket of this length (xeus), say, or one that its namespaces keep from something.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ..errors import KernelUnfit

#: A kernel's name and its command line without the path of the connection file.
Key = tuple[str, ...]

_known: dict[Key, KernelUnfit] = {}
_lock = threading.Lock()


def key(kernel_name: str, cmd: Sequence[str], connection_file: str) -> Key:
    """What tells kernels of one kernelspec from others."""
    return (kernel_name, *(word.replace(connection_file, "{connection_file}") for word in cmd))


def remember(of: Key, error: KernelUnfit) -> None:
    """Kernels of this key are to be started plainly from now on."""
    with _lock:
        _known[of] = error


def known(of: Key) -> KernelUnfit | None:
    """Why kernels of this key are to be started plainly; None where they are not."""
    with _lock:
        return _known.get(of)
