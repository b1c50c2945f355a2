"""Commands whose kernels do not start behind a gate, remembered as long as this process lives: each is tried once.

Such a kernel ends before its first answer, and works if started plainly: for example one that cannot listen on a unix
socket of this length (xeus), or needs something that its namespaces do not have.
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
    """Return what the kernels of one kernelspec have in common."""
    return (kernel_name, *(word.replace(connection_file, "{connection_file}") for word in cmd))


def remember(of: Key, error: KernelUnfit) -> None:
    """Remember that kernels of this key are to be started plainly."""
    with _lock:
        _known[of] = error


def known(of: Key) -> KernelUnfit | None:
    """Return why kernels of this key are to be started plainly; None if they are not."""
    with _lock:
        return _known.get(of)
