"""Device files of a GPU that a stopped process has inherited by a fork: of no use to it, and nothing that CRIU saves.

CUDA does not work in a child that its process has forked; what the child has of it are open and mapped files.  Their
numbers and addresses stay taken: libraries close the one at their end, and nobody else may be given the other.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.process.injection import Injection

_AT_FDCWD = -100
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000


def replace(pid: int, paths: Collection[str]) -> None:
    """Have a stopped process ``/dev/null`` open instead of files, and memory without access where they are mapped.

    Cannot be undone.  *After failure* some are replaced.  Raises `OSError`.
    """
    with Injection.into(pid) as injection:
        for mapping in procfs.maps(pid):
            if mapping.name in paths:
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
                done = injection.call("mmap", mapping.start, mapping.end - mapping.start, 0, flags, -1, 0)
                _require(done, mapping.name)
        opened = [(number, name) for number, name in procfs.links(pid) if name in paths]
        if not opened:
            return
        with injection.on_stack(b"/dev/null\0") as address:
            null = injection.call("openat", _AT_FDCWD, address, os.O_RDWR | os.O_CLOEXEC)
        _require(null, "/dev/null")
        try:
            for number, name in opened:
                flags = int(procfs.fdinfo(pid, number)["flags"], 8)
                _require(injection.call("dup3", null, number, flags & os.O_CLOEXEC), name)
        finally:
            injection.call("close", null)


def _require(result: int, name: str) -> None:
    if result < 0:
        raise OSError(-result, os.strerror(-result), name)
