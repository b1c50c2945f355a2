"""Device memory at the rate of the bus: blocks that leave and return by the kernel's own hands, beside the driver.

A library that the kernel preloads (`cuda/native`) serves its larger allocations from memory whose addresses stay
valid while their physical memory is gone.  The driver then suspends the small rest.  The library's transfers are calls
of CUDA by the kernel itself, and no other thread may make one meanwhile; so: the driver locks (whoever calls CUDA waits
at its door), all threads are parked (`freezer`), the driver unlocks, the blocks leave, the driver locks again, the
threads go on, and stop at that door.  The way back is the mirror.

What did not go through the library is the driver's, and so is everything where this cannot be had: correctness never
depends on it.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import json
import logging
import os
import shutil
import socket
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import procfs
from ..capsule.capsule import Capsule
from ..errors import CapsuleError, CapsuleGone, CudaError, GpuCkptError, GpuFull, ProtocolVersion
from ..paths import data_directory
from ..units import size
from .driver import OUT_OF_MEMORY, Cuda, CudaState

_log = logging.getLogger(__name__)

#: The library's socket in a kernel's runtime directory.
SOCKET = "kernel-fast"
#: In the capsule's directory in memory, the directory of what is away (`arena.h`), or a link to one on a disk.
BLOCKS = "gpu-ckpt-blocks"
#: Environment variable of a kernel that tells its library where that is.
VARIABLE = "JUPYTER_GPU_CKPT_FAST_SOCKET"
#: Seconds that all threads of a kernel are given to be where they can be parked.
PATIENCE = 5.0
#: Seconds for what the library answers at once.
_ANSWER = 10.0
#: Bytes per second that the library reaches at least, else the driver is to do it: it is held up, or the host is.
_SLOWEST = 0.5e9
#: Where setuptools leaves the library.
_NATIVE = Path(__file__).with_name("native")
#: How the name of a copy of it ends (`preload`).
_LIBRARY = "_fastpath.so"
#: The library writes to locks of the C library (`door.h`): a kernel gets it where it says that it knows those.
_TRY = "import ctypes, sys; sys.exit(0 if ctypes.CDLL(sys.argv[1]).gpu_ckpt_knows_rwlocks() else 3)"
_UNKNOWN_LOCKS = 3
_C_LIBRARY = "CS_GNU_LIBC_VERSION"
#: Bytes of device memory that a context takes, and the driver moves in any case; of a large one.
_CONTEXT = 2 << 30
#: Precedes the library's version and its state in its memory (`control.c`).
_MARK = b"gpu-ckpt state:\0"
_SHOWN = struct.Struct("=ii")
#: Of the words on that socket (`control.c`).
_VERSION = 1
#: Bytes of a unix socket's name, with the zero at its end (unix(7)).
_NAME = 108


class _State(enum.IntEnum):
    """What the library shows of itself in its memory."""

    ON_DEVICE = 0
    #: In the library's own memory, or in files of the capsule's.
    AWAY_IN_MEMORY = 1
    AWAY_IN_FILES = 2
    #: Threads are relieved of the driver's lock (`door.h`): they must not go on until they have it again.
    RELIEVED = 3


class _Refused(Exception):
    """The library did not do what was asked; ``number``: what the driver answered it, if it did."""

    def __init__(self, message: str, number: int = 0) -> None:
        super().__init__(message)
        self.number = number


class _Silent(_Refused):
    """The library did not answer: it may still be doing what was asked."""


@dataclass(frozen=True)
class Amounts:
    """``blocks`` the library serves, of so many ``bytes``; ``away``: bytes of them that are in host memory now."""

    blocks: int = 0
    bytes: int = 0
    away: int = 0


def _in_memory(_: int) -> None:
    """A `FastPath.leave` whose blocks always go to host memory."""


class FastPath:
    """The blocks of the kernel in one capsule; without a library in it there are none, and nothing is done."""

    def __init__(self, capsule: Capsule, cuda: Cuda) -> None:
        self._capsule, self._cuda = capsule, cuda

    def amounts(self, timeout_s: float = _ANSWER) -> Amounts:
        """What there is now.  Raises `CudaError` when a library does not answer, `ProtocolVersion`.

        It serves one connection after the other: an answer means that it is done with what an earlier one asked.
        """
        try:
            with self._library(timeout_s) as library:
                return library.ask("status") if library else Amounts()
        except _Refused as error:
            raise CudaError(str(error), left="the kernel's blocks are where they were") from error

    def why_slow(self, on_device: int) -> str:
        """Why most of so many bytes of the kernel's device memory will be the driver's to move; "" if they will not."""
        try:
            if not any(mapping.name.endswith(_LIBRARY) for mapping in procfs.maps(self._capsule.host_pid)):
                return preload().why or 'the kernel was started with fast_path = "off"'
            others = on_device - self.amounts().bytes
        except (OSError, CudaError, ProtocolVersion):  # it ends, or is busy: whoever asks hears of that otherwise
            return ""
        if others < max(_CONTEXT, on_device // 2):
            return ""
        return f"{size(others)} are not of cudaMalloc (PyTorch: expandable_segments), or small pieces"

    def away(self) -> bool:
        """Whether blocks are in host memory, and the kernel's threads must not run on; without asking the library.

        Raises `CudaError` where the process is gone.
        """
        return self._state() in (_State.AWAY_IN_MEMORY, _State.AWAY_IN_FILES)

    def _state(self) -> _State:
        """What the library shows, which may not be able to answer.

        Raises `CudaError` where the process is gone, `ProtocolVersion`.
        """
        try:
            version, state = _shown(self._capsule.host_pid)
        except PermissionError:  # who cannot be looked into cannot be parked, either: nothing of it ever left
            return _State.ON_DEVICE
        except OSError as error:
            raise CudaError("The kernel's memory cannot be looked at: it has ended.") from error
        _require_version(version)
        return _State(state)

    def blocks(self) -> int | None:
        """A descriptor, the caller's own, of the directory that has the blocks that are away, in chunks (`arena.h`).

        None while nothing is away, or where the library took anonymous memory.  Raises `CapsuleError`, `OSError`.
        """
        if self._state() is not _State.AWAY_IN_FILES:
            return None
        with self._arena() as arena:
            return os.open(BLOCKS, os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=arena)

    def new_blocks(self, elsewhere: Path | None = None) -> int:
        """The same, empty, in a capsule whose kernel has nothing away, or that has none yet.  Raises likewise.

        ``elsewhere``: an empty directory to take for it, for what host memory is too small.
        """
        with self._arena() as arena:
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISDIR(_kind(BLOCKS, arena)):
                    shutil.rmtree(f"/proc/self/fd/{arena}/{BLOCKS}")
                else:
                    os.unlink(BLOCKS, dir_fd=arena)
            if elsewhere is None:
                os.mkdir(BLOCKS, 0o700, dir_fd=arena)
            else:
                os.symlink(elsewhere, BLOCKS, dir_fd=arena)
            return os.open(BLOCKS, os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=arena)

    def elsewhere(self) -> Path | None:
        """Where blocks are that are away, and not in memory.  Raises `CapsuleError`, `OSError`."""
        if self._state() is not _State.AWAY_IN_FILES:
            return None
        with self._arena() as arena:
            return Path(os.readlink(BLOCKS, dir_fd=arena)) if stat.S_ISLNK(_kind(BLOCKS, arena)) else None

    def in_memory(self) -> int:
        """Bytes of blocks that are in the capsule's own memory, and in no process's; 0 of a kernel that has ended."""
        with contextlib.suppress(CudaError, CapsuleError, CapsuleGone, ProtocolVersion, OSError):
            if self._state() is _State.AWAY_IN_FILES:
                with self._arena() as arena:
                    there = os.fstatvfs(arena)
                    return (there.f_blocks - there.f_bfree) * there.f_frsize
        return 0

    @contextlib.contextmanager
    def _arena(self) -> Iterator[int]:
        arena = self._capsule.arena()
        try:
            yield arena
        finally:
            os.close(arena)

    def leave(self, *, lock_s: float, timeout_s: float, place: Callable[[int], Path | None] = _in_memory) -> int:
        """All blocks to host memory, of a kernel that is ``LOCKED`` and is so again; the bytes, 0 if it cannot be.

        Then they are where they were, and the driver's.  ``place``: asked with their bytes for a directory on a disk,
        where host memory is too small; what it raises means that they do not leave.

        *After failure* the kernel may be unlocked, and blocks away:
        `come_back` brings it all back.
        """
        pid = self._capsule.host_pid
        try:
            amounts = self.amounts()
            if not amounts.blocks or amounts.away:
                return amounts.away
            elsewhere = place(amounts.bytes)
            try:
                os.close(self.new_blocks(elsewhere))
            except (CapsuleError, OSError) as error:  # then the library takes memory that CRIU gets to see
                if elsewhere is not None:
                    raise CapsuleError("The kernel cannot be shown where its blocks go.") from error
            self._capsule.park(PATIENCE)
        except ProtocolVersion:
            raise
        except GpuCkptError as error:
            _log.info("Device memory is left to the CUDA driver: %s", error)
            return 0
        if elsewhere is None:
            timeout_s = min(timeout_s, _ANSWER + amounts.bytes / _SLOWEST)
        may_run = True  # else a thread could touch memory that is away: only the driver's lock keeps it from that
        try:
            self._cuda.unlock(pid)
            try:
                with self._library(timeout_s) as library:
                    if library:
                        library.ask("leave")
                        may_run = False
                        library.ask("free")
            except _Silent as error:
                # No lock now: the library, still at it, would wait at the driver's door, and for ever.
                self._note_where_it_is()
                may_run = may_run and self._state() is not _State.RELIEVED
                raise _told(error) from error
            except _Refused as error:
                _log.info("Device memory is left to the CUDA driver: %s", error)
            if not self.away():  # whoever was let into the driver's lock has to leave it first
                self._capsule.unpark()
            self._cuda.lock(pid, lock_s)
            may_run = True
        finally:
            if may_run:
                self._capsule.unpark()
        return self.amounts().away

    def come_back(self, *, lock_s: float, timeout_s: float) -> None:
        """All blocks back to the device, and the kernel unlocked: ``LOCKED -> RUNNING``; or mends what was left half.

        *After failure* nothing is lost: the kernel is suspended (`GpuFull` for want of room), or its threads are parked
        and the library may still be at it; another `come_back` goes on from there.
        """
        pid = self._capsule.host_pid
        if not self.away():
            if self._state() is _State.RELIEVED:
                self.amounts(timeout_s)
            if self._cuda.state(pid) is CudaState.LOCKED:
                self._cuda.unlock(pid)
            self._capsule.unpark()
            return
        self._capsule.park(PATIENCE, insist=True)
        if self._cuda.state(pid) is CudaState.LOCKED:
            self._cuda.unlock(pid)
        try:
            with self._library(timeout_s) as library:
                if library is None:
                    raise _Silent("The kernel's library for device memory cannot be reached.")
                library.ask("return")
        except _Silent as error:
            self._note_where_it_is()
            raise _told(error) from error
        except _Refused as error:
            self._cuda.lock(pid, lock_s)
            self._capsule.unpark()
            self._capsule.shield()
            self._cuda.checkpoint(pid, timeout_s=timeout_s)
            raise _told(error) from error
        self._capsule.unpark()

    def _note_where_it_is(self) -> None:
        """For who looks into it: the system calls (proc_pid_syscall(5)) in which the library's threads are held up."""
        pid = self._capsule.host_pid
        with contextlib.suppress(*procfs.GONE):
            for tid in procfs.threads(pid):
                with contextlib.suppress(OSError):
                    if (name := self._thread_name(tid)).startswith("gpu-ckpt"):
                        call = procfs.read(f"/proc/{pid}/task/{tid}/syscall").strip()
                        _log.warning("%s (thread %s) is in %s", name, tid, call)

    def _thread_name(self, tid: int) -> str:
        """The name of one of the kernel's threads; empty once it has ended."""
        try:
            return procfs.stat(self._capsule.host_pid, tid).name
        except OSError:
            return ""

    @contextlib.contextmanager
    def _library(self, timeout_s: float) -> Iterator[_Library | None]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            try:
                directory = os.open(self._capsule.directory, os.O_DIRECTORY | os.O_CLOEXEC)
                try:  # through the directory's descriptor: our own path to it may be longer than a socket's name
                    connection.connect(f"/proc/self/fd/{directory}/{SOCKET}")
                finally:
                    os.close(directory)
            except (FileNotFoundError, ConnectionRefusedError):  # it has no library, or that has never served anything
                yield None
                return
            except OSError as error:
                raise _Silent(f"The kernel's library for device memory cannot be asked: {error.strerror}.") from error
            library = _Library(connection)
            library.require_version()
            yield library


class _Library:
    """The library's side of one connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def require_version(self) -> None:
        """Raises `ProtocolVersion` for a library of another release, which the kernel has for as long as it lives."""
        _require_version(self._answer("status").get("version"))

    def ask(self, verb: str) -> Amounts:
        answer = self._answer(verb)
        try:
            amounts, result = Amounts(answer["blocks"], answer["bytes"], answer["away"]), answer["cuda"]
        except KeyError as error:
            raise _Silent(f"The kernel's library for device memory did not answer {verb!r}.") from error
        if result != 0:
            raise _Refused(f"The CUDA driver refused to {verb} the kernel's blocks.", result)
        return amounts

    def _answer(self, verb: str) -> dict[str, Any]:
        try:
            self._connection.sendall(f"{verb}\n".encode())
            text = b""
            while not text.endswith(b"\n") and (more := self._connection.recv(4096)):
                text += more
            answer = json.loads(text)
        except (OSError, ValueError) as error:
            raise _Silent(f"The kernel's library for device memory did not answer {verb!r}.") from error
        return answer if isinstance(answer, dict) else {}


def _require_version(version: object) -> None:
    if version != _VERSION:
        raise ProtocolVersion(
            f"The kernel's library for device memory speaks version {version} of its protocol, this release version "
            f"{_VERSION}.",
            left="the kernel and its device memory are where they were",
            version=version,
        )


def _kind(name: str, directory: int) -> int:
    return os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode


def _shown(pid: int) -> tuple[int, int]:
    """Version and state of the library in a process: in what is mapped of it, after its mark.  Raises `OSError`."""
    mappings = procfs.maps(pid)
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for mapping in mappings:
            is_library = mapping.name.removesuffix(" (deleted)").endswith(_LIBRARY)
            if is_library and mapping.permissions.startswith("rw"):
                found = os.pread(memory.fileno(), mapping.end - mapping.start, mapping.start)
                at = found.find(_MARK)
                if at >= 0:
                    version, state = _SHOWN.unpack_from(found, at + len(_MARK))
                    return version, state
    return _VERSION, _State.ON_DEVICE


def _told(error: _Refused) -> CudaError:
    left = "the kernel's device memory is where it was, on the GPU or in host memory"
    if error.number == OUT_OF_MEMORY:
        return GpuFull("There is too little GPU memory for the kernel's blocks.", left=left)
    return CudaError(str(error), left=left, cuda_result=error.number)


# -- preloading


@dataclass(frozen=True)
class Preload:
    """The library a kernel can preload, or ``why`` there is none.

    ``unknown_locks``: there is one, which does not know the C library's read-write locks.
    """

    path: Path | None
    why: str = ""
    unknown_locks: bool = False


@functools.cache
def preload(built_in: Path = _NATIVE) -> Preload:
    """The library, where a copy of it stays: an image names it among the files its kernel has mapped.

    So one of another release must not take its place.  `freezer` knows it by the end of its name.
    """
    built = sorted(built_in.glob("_fastpath*.so"))
    if not built:
        return Preload(None, "it was not built: there was no C compiler when the package was installed")
    content = built[0].read_bytes()
    place = data_directory("native") / f"{hashlib.sha256(content).hexdigest()[:32]}{_LIBRARY}"
    try:
        if not place.exists() or place.read_bytes() != content:
            place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as file:
                file.write(content)
            Path(file.name).rename(place)
    except OSError as error:
        return Preload(None, f"it cannot be copied to {place.parent}: {error.strerror}")
    # One that is damaged, or for another machine, must not be what keeps a kernel from starting.
    command = [sys.executable, "-I", "-S", "-c", _TRY, str(place)]
    try:
        tried = subprocess.run(command, env={"LD_PRELOAD": str(place)}, capture_output=True, timeout=_ANSWER)
    except (OSError, subprocess.SubprocessError) as error:
        return Preload(None, f"it cannot be tried: {type(error).__name__}")
    if tried.returncode == _UNKNOWN_LOCKS:
        why = f"it does not know the read-write locks of this C library ({os.confstr(_C_LIBRARY)})"
        return Preload(None, why, unknown_locks=True)
    if tried.returncode or tried.stderr:
        return Preload(None, f"it cannot be preloaded (status {tried.returncode})")
    return Preload(place)


def has_driver() -> bool:
    """Whether this host has NVIDIA's driver: without one there is nothing to serve."""
    return Path("/proc/driver/nvidia").exists()


def environment(directory: Path, env: dict[str, str]) -> dict[str, str]:
    """What to add to a kernel's environment so that it has the library; nothing where that cannot be."""
    found = preload() if has_driver() else Preload(None)
    name = str(directory / SOCKET)
    if found.path is None or len(os.fsencode(name)) >= _NAME:
        return {}
    others = env.get("LD_PRELOAD", "")
    return {VARIABLE: name, "LD_PRELOAD": f"{found.path}:{others}" if others else str(found.path)}
