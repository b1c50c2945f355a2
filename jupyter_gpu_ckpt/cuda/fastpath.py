"""Device memory at the rate of the bus: the kernel itself swaps its allocations out and in, beside the driver.

A library that the kernel preloads (`cuda/native`) serves its larger allocations from memory whose addresses stay valid
while the physical memory is freed.  The driver then suspends only the small rest.  The library's copies are CUDA calls
of the kernel itself, and no other thread may make one meanwhile; so: the driver locks (threads that call CUDA wait),
all threads are frozen (`freezer`), the driver unlocks, the allocations are swapped out, the driver locks again, the
threads run on, and wait at that lock.  The way back is the mirror image.

The library also has a gate that the kernel's calls pass (`launch_gate.h`).  It is closed before the driver locks: the
calls of a suspended kernel wait there, where they are counted and an interrupt reaches them, and not in the driver.

The processes that the kernel starts preload the library, too, and each that uses CUDA is treated in the same way.

The driver handles allocations that the library does not serve, and all of them where the library is missing: it makes
suspending faster, and nothing depends on it.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import stat
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .. import procfs
from ..capsule.capsule import Capsule
from ..capsule.namespaces import HOST_MEMORY
from ..errors import (
    CapsuleError,
    CapsuleGone,
    CudaError,
    GpuCkptError,
    GpuFull,
    LimitReached,
    ProtocolVersion,
    UnsupportedCuda,
)
from ..files.atomic import write_atomically
from ..paths import data_directory
from ..process import descriptors
from ..units import size
from .cuda import OUT_OF_MEMORY, Cuda, CudaState
from .held_memory import MOST, HeldMemory

_log = logging.getLogger(__name__)

#: The library's socket in a kernel's runtime directory.
SOCKET = "kernel-fast"
#: In the capsule's host memory: the directory of extents (`host_memory.h`), or a link to one on a disk.
EXTENTS = "gpu-ckpt-extents"
#: In the same place: an empty file while frozen threads alone keep the kernel from memory that is swapped out.
FROZEN = "gpu-ckpt-frozen"
#: In the same place: extents as they were at a save, by links, until they are in the save point.
LINKED = "gpu-ckpt-linked"
#: Environment variable that gives a kernel's library the path of its socket.
VARIABLE = "JUPYTER_GPU_CKPT_FAST_SOCKET"
#: The same for the processes that the kernel starts: each appends a hyphen and its pid to that path.
CHILDREN_VARIABLE = "JUPYTER_GPU_CKPT_FAST_CHILDREN"
#: Options of the address sanitizer, and the one that has it check whether it is the first of the libraries.
_ASAN, _ANY_ORDER = "ASAN_OPTIONS", "verify_asan_link_order"
#: Seconds in which all threads of a kernel must reach a place where they can be frozen.
FREEZE_SECONDS = 5.0
#: The same where the alternative is that another process which it forks meanwhile prevents a checkpoint.
_FORKING_SECONDS = 0.5
#: Seconds for a reply that takes no copying; and for one that is done without.
_REPLY_SECONDS = 10.0
_SHORT_SECONDS = 1.0
#: Bytes per second that the library reaches at least; if not, it is stuck, or the host is.
_SLOWEST = 0.5e9
#: Where setuptools puts the library.
_NATIVE = Path(__file__).with_name("native")
#: How the name of a copy of it ends (`preload`).
_LIBRARY = "_fastpath.so"
#: The library writes to private words of the C library's locks (`rwlock_release.h`): preloaded only if it knows them.
_TRY = "import ctypes, sys; sys.exit(0 if ctypes.CDLL(sys.argv[1]).gpu_ckpt_knows_rwlocks() else 3)"
_UNKNOWN_LOCKS = 3
_C_LIBRARY = "CS_GNU_LIBC_VERSION"
#: Bytes of device memory that are more than a context, which the driver suspends in any case.
MUCH = 2 << 30
#: Precedes what the library publishes in its memory (`published.h`).
_MARK = b"gpu-ckpt state:\0"
_PUBLISHED = struct.Struct("=iiiiq16si")
#: Bits of the launch gate's state: it is closed, opens by itself, and was passed by no call since a mirror began.
_GATE_CLOSED, _GATE_LEASED, _GATE_WATCHED = 2, 4, 8
#: Says that a kernel shares GPUs (`memory_wait.c`).
_SHARES_VARIABLE = "JUPYTER_GPU_CKPT_SHARES_GPUS"
#: Version of the protocol on that socket (`control.c`).
_VERSION = 9
#: Seconds that the launch gate may be leased at the most.
_LONGEST_LEASE = 86400.0
#: Moments of a swap in the library's reply, by their names there.
_MOMENTS = ("prepared", "first_examined", "opened", "examined", "copied", "checked", "closed")
#: Bytes of a unix socket's name, with the zero at its end (unix(7)).
_NAME = 108
#: Why the kernel has no library; and a child.
_WITHOUT = (
    'the kernel was started with fast_path = "off"',
    'it has no library (linked statically, with an environment of its own, or fast_path = "kernel")',
)
_UNCHANGED = "the kernel's device memory is where it was, on the GPU or in host memory"


#: Returns a directory on the disk for so many bytes of allocations, of which host memory has some; or None.
ChooseDirectory = Callable[[int, int], Path | None]


class _State(enum.IntEnum):
    """The state that the library publishes in its memory."""

    ON_DEVICE = 0
    #: Swapped out to the library's own memory.
    IN_ANONYMOUS_MEMORY = 1
    #: Swapped out to files in the capsule's host memory, or on a disk.
    IN_EXTENTS = 2
    #: Readers are dropped from the driver's lock (`rwlock_release.h`): their threads must not run until counted again.
    READERS_DROPPED = 3


class _Published(NamedTuple):
    version: int
    state: int
    launch_gate: int
    touches: int
    wanted: int
    wanted_on: bytes
    mirrored: int


#: Where processes had the mark, by pid; another process that gets the pid does not have it there.
_marks = dict[int, int]()
_MOST_MARKS = 4096

#: Of a kernel without the library.
_NOTHING = _Published(_VERSION, _State.ON_DEVICE, 0, 0, 0, b"", 0)


class _Refused(Exception):
    """The library could not do what was requested; ``number``: the driver's error, if it has one."""

    def __init__(self, message: str, number: int = 0) -> None:
        super().__init__(message)
        self.number = number


class _NoReply(_Refused):
    """The library did not reply: it may still be doing what was requested."""


@dataclass(frozen=True)
class Amounts:
    """Number and bytes of the allocations that the library serves; ``swapped_out``: bytes that are in host memory.

    ``kept``: bytes of host memory with a copy of what is on the device, so that the next suspend moves less.
    ``mirrors``: whether that copy is being made.
    ``managed``: number of allocations of managed memory, at least, which the library does not serve.  ``shared``:
    number of those of which it, or the program, has given other processes a handle.  ``touches``: number of calls
    that found the launch gate closed, since it was closed the last time.  ``known``: whether the library has a digest
    of all that is in host memory, so that `FastPath.swap_in_frozen` can prove that it is the same.
    """

    allocations: int = 0
    bytes: int = 0
    swapped_out: int = 0
    kept: int = 0
    mirrors: int = 0
    managed: int = 0
    shared: int = 0
    touches: int = 0
    known: int = 0


class FastPath:
    """The allocations of the kernel in one capsule, or of its process ``child``.

    None if that has no library, and then nothing is done.  A child's are swapped out to its own anonymous memory.  Its
    library may also be another release's, which counts as none: the kernel's own would be that, too, had an owner of
    that release swapped anything out.  A child's threads stay frozen after `swap_in`, until those of all run.

    ``keep_bytes``: how much host memory the kernel's allocations may have while they are on the device.
    """

    def __init__(self, capsule: Capsule, cuda: Cuda, child: int | None = None, *, keep_bytes: int = 0) -> None:
        self._capsule, self._cuda, self._child = capsule, cuda, child
        self._keep_bytes = keep_bytes if child is None else 0
        #: Of the last swap: the seconds from the library's request until each of its moments (`copies.h`).  And of a
        #: swap out how long ``freeze`` took, all before that request, and ``lock``, after the memory was free.
        self.parts = dict[str, float]()

    @property
    def _pid(self) -> int:
        return self._capsule.host_pid if self._child is None else self._child

    def amounts(self, timeout_s: float = _REPLY_SECONDS) -> Amounts:
        """Return the present amounts.  Raises `CudaError` when a library does not reply, `ProtocolVersion`.

        The library serves one connection after the other: a reply means that it has finished all earlier requests.
        """
        try:
            with self._library(timeout_s) as library:
                return library.request("status") if library else Amounts()
        except _Refused as error:
            raise CudaError(str(error), left=_UNCHANGED) from error

    def why_slow(self, on_device: int) -> str:
        """Return why the driver has to move most of the kernel's ``on_device`` bytes; "" if the library moves them."""
        try:
            if _published(self._pid) is _NOTHING:
                return preload().why or _WITHOUT[self._child is not None]
            others = on_device - self.amounts().bytes
        except (OSError, CudaError, ProtocolVersion):  # the process ends, or is busy: the caller's next step reports it
            return ""
        if others < max(MUCH, on_device // 2):
            return ""
        return f"{size(others)} are shared with others, or in small allocations"

    def swapped_out(self) -> bool:
        """Return whether allocations are in host memory, so that the kernel's threads must not run.

        Reads the process's memory, without a request to the library.  Raises `CudaError` if the process has ended.
        """
        return self._state() in (_State.IN_ANONYMOUS_MEMORY, _State.IN_EXTENTS)

    def _state(self) -> _State:
        return _State(self._published().state)

    def _published(self) -> _Published:
        """Return what the library publishes.  Raises `CudaError` if the process has ended, `ProtocolVersion`."""
        try:
            published = _published(self._pid)
        except PermissionError:  # threads that cannot be read cannot be frozen, either: nothing was ever swapped out
            return _NOTHING
        except OSError as error:
            raise CudaError("The kernel's memory cannot be read: its process has ended.") from error
        if self._child is not None and published.version != _VERSION:
            return _NOTHING
        _require_version(published.version)
        return published

    def touches(self) -> int:
        """Return how many calls found the launch gate closed, since it was closed the last time.

        Reads the process's memory, without a request to the library.  Raises `CudaError` if the process has ended,
        `ProtocolVersion`.
        """
        return self._published().touches

    def wanted(self) -> int:
        """Return the bytes of allocations that wait for free memory on a shared GPU.  As `touches`."""
        return self._published().wanted

    def wanted_on(self) -> str:
        """Return the UUID of the GPU where a new context waits for memory, "" if none does.  As `touches`."""
        bytes = self._published().wanted_on
        return f"GPU-{uuid.UUID(bytes=bytes)}" if any(bytes) else ""

    def mirrored(self) -> bool:
        """Return whether host memory has a copy of all that can be kept there; False with another release's library.

        Raises `CudaError` if the process has ended.
        """
        try:
            published = self._published()
        except ProtocolVersion:
            return False
        return bool(published.mirrored) and published.launch_gate == _GATE_WATCHED

    def launch_gate_is_closed(self) -> bool:
        """Return whether calls wait at the launch gate.  As `touches`."""
        return bool(self._published().launch_gate & _GATE_CLOSED)

    def keeps_calls(self) -> bool:
        """Return whether calls wait at the launch gate until somebody opens it; False with another release's library.

        Raises `CudaError` if the process has ended.
        """
        try:
            return self._published().launch_gate & (_GATE_CLOSED | _GATE_LEASED) == _GATE_CLOSED
        except ProtocolVersion:
            return False

    def freeze_for_driver(self, *, from_forking: bool = False) -> None:
        """Freeze the threads of a locked kernel that must not run while the driver has suspended it.

        Those that wait in the driver's code; without the launch gate (no library, or one that did not close it) all
        that could call the driver.  Raises `CapsuleError` when one cannot be frozen in `FREEZE_SECONDS`; all run on.

        ``from_forking``: the others, too, if they can be frozen at once: what is forked while the driver closes the
        device files of the process inherits some of them.
        """
        if not self.keeps_calls():
            self._capsule.freeze_callers(FREEZE_SECONDS, child=self._child)
            return
        self._capsule.freeze_threads_in_driver(child=self._child)
        if from_forking:
            with contextlib.suppress(CapsuleError):
                self._capsule.freeze_callers(_FORKING_SECONDS, child=self._child)

    def drop_zero_pages(self) -> None:
        """Give back the pages of zeros of a context that the driver has suspended: an image is smaller by them.

        Nothing is done where the library is missing, busy, or another release's.
        """
        try:
            with self._library(_REPLY_SECONDS) as library:
                if library is not None:
                    library.request("drop_zeros")
        except (_Refused, ProtocolVersion) as error:
            _log.info("Zeros of the suspended context stay in memory: %s", error)

    def close_launch_gate(self, lease_s: float = 0.0) -> None:
        """Have calls of the kernel that use the GPU wait before they enter the driver.

        The gate opens when `swap_in` has succeeded, or after ``lease_s`` seconds if nothing is swapped out then: give
        them as long as the owner's end could leave the kernel with its memory on the device.  Nothing is done where
        the library is missing, busy, or another release's: the driver's lock does without the gate.
        """
        timeout_s = _REPLY_SECONDS if self._keep_bytes else _SHORT_SECONDS  # a mirror has to end before the lock
        try:
            with self._library(timeout_s) as library:
                if library is not None:
                    library.request(f"close {round(min(lease_s, _LONGEST_LEASE) * 1000)}")
        except (_Refused, ProtocolVersion) as error:
            _log.info("The kernel's calls are left to the CUDA driver's lock: %s", error)

    def open_launch_gate(self) -> None:
        """Let calls of the kernel continue whose memory is on the device; nothing is done if they do.

        *After failure* (`CudaError`) they wait at the gate; the library is busy, or cannot be reached.
        """
        if self._try_to_open(_REPLY_SECONDS):
            return
        if self.keeps_calls():
            raise CudaError("The kernel's library for device memory does not let calls continue.", left=_UNCHANGED)

    def _try_to_open(self, timeout_s: float) -> bool:
        try:
            with self._library(timeout_s) as library:
                if library is None:
                    return not self.launch_gate_is_closed()
                library.request("open")
        except _Refused as error:
            _log.info("The kernel's launch gate is not opened: %s", error)
            return False
        return True

    def open_extents(self) -> int | None:
        """Open the directory of the extents that are swapped out; the caller closes the descriptor.

        None while nothing is swapped out, or if the library used anonymous memory.  Raises `CapsuleError`, `OSError`.
        """
        if self._state() is not _State.IN_EXTENTS:
            return None
        with self._host_memory() as memory:
            return os.open(EXTENTS, os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=memory)

    def create_extents(self, directory: Path | None = None) -> int:
        """Open an empty directory for extents, while nothing is swapped out.  Raises `CapsuleError`, `OSError`.

        ``directory``: an empty one on a disk to use instead of host memory, if that is too small.
        """
        with self._host_memory() as memory:
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISDIR(_mode(EXTENTS, memory)):
                    shutil.rmtree(_below(memory, EXTENTS))
                else:
                    os.unlink(EXTENTS, dir_fd=memory)
            if directory is None:
                os.mkdir(EXTENTS, 0o700, dir_fd=memory)
            else:
                os.symlink(directory, EXTENTS, dir_fd=memory)
            return os.open(EXTENTS, os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=memory)

    def link_extents(self) -> int:
        """Link the extents that are swapped out into a directory of their own, and open that; `unlink_extents` ends it.

        They stay as they are however the kernel continues: the library never writes to an extent that has another name
        (`host_memory_is_intact`).  Raises `CapsuleError`, `OSError`; then there are no links.
        """
        with contextlib.ExitStack() as resources:
            memory = resources.enter_context(self._host_memory())
            shutil.rmtree(_below(memory, LINKED), ignore_errors=True)
            extents = os.open(EXTENTS, os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=memory)
            resources.callback(os.close, extents)
            os.mkdir(LINKED, 0o700, dir_fd=memory)
            linked = os.open(LINKED, os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=memory)
            try:
                for name in os.listdir(extents):
                    os.link(name, name, src_dir_fd=extents, dst_dir_fd=linked)
            except BaseException:
                unlink_extents(linked)
                raise
        return linked

    def remove_links(self) -> None:
        """Remove the links that an owner has left who was killed.  Never raises: they cost memory, and no more."""
        if self._has_host_memory():
            with contextlib.suppress(CapsuleError), self._host_memory() as memory:
                shutil.rmtree(_below(memory, LINKED), ignore_errors=True)

    def disk_directory(self) -> Path | None:
        """Return the directory of extents on a disk; None if there are none.  Raises `CapsuleError`, `OSError`."""
        if self._state() is not _State.IN_EXTENTS:
            return None
        with self._host_memory() as memory:
            return Path(os.readlink(EXTENTS, dir_fd=memory)) if stat.S_ISLNK(_mode(EXTENTS, memory)) else None

    def host_memory_bytes(self) -> int:
        """Return the bytes of extents in the capsule's host memory, which no process has; 0 if the kernel has ended."""
        return self._host_memory_bytes(swapped_out=True)

    def kept_bytes(self) -> int:
        """Return the bytes of extents that are a copy of what is on the device; 0 if the kernel has ended."""
        return self._host_memory_bytes(swapped_out=False) if self._keep_bytes and self._has_host_memory() else 0

    def _host_memory_bytes(self, *, swapped_out: bool) -> int:
        with contextlib.suppress(CudaError, CapsuleError, CapsuleGone, ProtocolVersion, OSError):
            if (self._state() is _State.IN_EXTENTS) is swapped_out:
                with self._host_memory() as memory:
                    found = os.fstatvfs(memory)
                    return (found.f_blocks - found.f_bfree) * found.f_frsize
        return 0

    @contextlib.contextmanager
    def _host_memory(self) -> Iterator[int]:
        memory = self._capsule.host_memory()
        try:
            yield memory
        finally:
            os.close(memory)

    def swap_out(
        self,
        *,
        lock_s: float,
        timeout_s: float,
        choose_directory: ChooseDirectory = lambda _, __: None,
        held: HeldMemory | None = None,
    ) -> int:
        """Copy all allocations to host memory and free them.  Return the bytes moved, 0 if the library cannot.

        The process is ``LOCKED`` before and after.  With 0, the allocations are unchanged, and left to the driver.
        ``choose_directory`` gets their bytes, and those of host memory that a copy of them has already; it returns a
        directory on a disk if host memory is too small.  If it raises, nothing is swapped out.  Each allocation is
        freed as soon as its copy is complete, and others have its memory meanwhile; unless ``held`` gets what can stay
        on the GPU until the swap in.  *After failure* the kernel may be unlocked, and allocations swapped out:
        `swap_in` repairs that, if the GPU has the memory.
        """
        pid = self._pid
        try:
            amounts, directory = self._prepare(choose_directory)
        except ProtocolVersion:
            raise
        except GpuCkptError as error:
            _log.info("Device memory is left to the CUDA driver: %s", error)
            return 0
        if not amounts.allocations or amounts.swapped_out:
            return amounts.swapped_out
        timeout_s = _copy_timeout(amounts, directory, timeout_s)
        may_run = True  # else a thread could use freed memory: only the driver's lock prevents that
        try:
            self._cuda.unlock(pid)
            try:
                with self._library(timeout_s) as library:
                    if library and held is None:
                        may_run = False
                        library.request("move_out")
                    elif library and held is not None:
                        library.request("copy_out")
                        may_run = False
                        library.hold(held)
                        library.request("free")
            except _NoReply as error:
                # Do not lock: the library, still working, would wait for the driver's lock forever.
                self._log_blocked_threads()
                may_run = may_run and self._state() is not _State.READERS_DROPPED
                raise _cuda_error(error) from error
            except _Refused as error:
                _log.info("Device memory is left to the CUDA driver: %s", error)
            moved = time.monotonic()
            if not self.swapped_out():  # threads that own the driver's lock must release it before it can be locked
                self._capsule.unfreeze_threads(child=self._child)
            self._cuda.lock(pid, lock_s)
            self.parts["lock"] = time.monotonic() - moved
            may_run = True
        finally:
            if may_run:
                self._capsule.unfreeze_threads(child=self._child)
        return self.amounts().swapped_out

    def _prepare(self, choose_directory: ChooseDirectory) -> tuple[Amounts, Path | None]:
        """Create the directory for a kernel's allocations, on a disk if it is returned, and freeze its threads.

        A copy that the library keeps stays where it is, unless host memory is too small for all.  Nothing is done if
        there are no allocations, or if they are swapped out already.
        """
        amounts = self._keep(self._keep_bytes)
        if not amounts.allocations or amounts.swapped_out:
            return amounts, None
        directory = choose_directory(amounts.bytes, amounts.kept) if self._child is None else None
        if directory is not None:
            self._keep(0)
        try:
            if self._child is None and (directory is not None or not amounts.kept):
                os.close(self.create_extents(directory))
        except (CapsuleError, OSError) as error:  # then the library uses anonymous memory, which CRIU dumps
            if directory is not None:
                raise CapsuleError("The kernel cannot be given a directory for its device memory.") from error
        began = time.monotonic()
        self._capsule.freeze_threads(FREEZE_SECONDS, child=self._child)
        self.parts["freeze"] = time.monotonic() - began
        return amounts, directory

    def begin_mirror(self) -> Amounts:
        """Have the library copy what has changed on the device to host memory that is kept, while the kernel is idle.

        The first call of the kernel that uses the GPU ends that.  Return the amounts; nothing is begun without a limit
        for what is kept, or where the library refuses.  Raises as `amounts`, `CapsuleError`, `OSError`.
        """
        amounts = self.amounts()
        if not self._keep_bytes or not amounts.allocations or amounts.swapped_out or amounts.mirrors:
            return amounts
        amounts = self._keep(self._keep_bytes)
        if not amounts.kept:
            os.close(self.create_extents())
        try:
            with self._library(_REPLY_SECONDS) as library:
                return library.request("mirror") if library else amounts
        except _NoReply as error:
            raise CudaError(str(error), left=_UNCHANGED) from error
        except _Refused as error:
            _log.info("Device memory is not copied ahead of a suspend: %s", error)
            return amounts

    def give_up_copy(self) -> None:
        """Free host memory that is kept for the next suspend, and keep none before.  Raises as `amounts`."""
        self._keep(0)

    def _keep(self, bytes: int) -> Amounts:
        """Set how much host memory may be kept, end a mirror, and return the amounts then.  Raises as `amounts`."""
        try:
            with self._library(_REPLY_SECONDS) as library:
                return library.request(f"keep {bytes}") if library else Amounts()
        except _Refused as error:
            raise CudaError(str(error), left=_UNCHANGED) from error

    def swap_out_frozen(self, *, timeout_s: float, choose_directory: ChooseDirectory) -> int:
        """Swap out, as `swap_out` does, a kernel that the driver does not lock: ``RUNNING`` before and after.

        Frozen, its threads keep their memory from being used while it is swapped out, also when the owner goes.  The
        library tries its calls before anything is moved: a frozen thread may hold a lock of the driver.  With 0 nothing
        was changed, and the threads run on.  Raises what ``choose_directory`` raises.
        """
        try:
            amounts, directory = self._prepare(choose_directory)
        except (CapsuleError, CudaError) as error:
            _log.info("A kernel that the CUDA driver does not lock cannot be frozen: %s", error)
            return 0
        if not amounts.allocations or amounts.swapped_out:
            return amounts.swapped_out
        may_run = True
        try:
            with self._library(_copy_timeout(amounts, directory, timeout_s)) as library:
                if library is not None:
                    library.request("copy_out")
                    may_run = False
                    self._mark_frozen()
                    library.request("free")
        except _NoReply as error:
            self._log_blocked_threads()
            may_run = may_run and self._state() is not _State.READERS_DROPPED
            raise _cuda_error(error) from error
        except _Refused as error:
            _log.info("A kernel that the CUDA driver does not lock cannot be swapped out: %s", error)
            may_run = not self.swapped_out()
        finally:
            if may_run:
                self._continue()
        return self.amounts().swapped_out

    def is_frozen(self) -> bool:
        """Return whether frozen threads alone keep the kernel from its swapped-out memory.  Raises as `swapped_out`."""
        if not self.swapped_out():
            return False
        try:
            with self._host_memory() as memory:
                os.stat(FROZEN, dir_fd=memory)
        except (FileNotFoundError, CapsuleError):
            return False
        return True

    def _mark_frozen(self) -> None:
        try:
            with self._host_memory() as memory:
                os.close(os.open(FROZEN, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=memory))
        except (CapsuleError, OSError) as error:  # the next owner could not know that the kernel is suspended
            raise _Refused("The kernel cannot be marked as frozen.") from error

    def _has_host_memory(self) -> bool:
        """Return whether the capsule's host memory is mounted: a use of it would mount it, which the kernel sees."""
        return (self._capsule.directory / HOST_MEMORY).exists()

    def _continue(self) -> None:
        """Let the threads of a kernel run whose memory is on the device; a child's run later, with all others."""
        if self._child is not None:
            return
        if self._has_host_memory():
            with contextlib.suppress(CapsuleError, OSError), self._host_memory() as memory:
                os.unlink(FROZEN, dir_fd=memory)
        self._capsule.unfreeze_threads(child=self._child)

    def swap_in(self, *, lock_s: float, timeout_s: float, wait_s: float = 0.0, held: HeldMemory | None = None) -> None:
        """Bring all allocations back to the device and unlock the kernel: ``LOCKED -> RUNNING``.

        ``wait_s``: seconds to wait for each allocation's memory while others leave the device; the rest is copied
        meanwhile.  ``held``: what has stayed there since `swap_out`, and is copied there; it holds nothing afterwards.
        Also repairs the state in which `swap_out` or an earlier `swap_in` failed.  *After failure* nothing is lost: the
        kernel is suspended (`GpuFull` if the GPU has too little memory), or its threads are frozen and the library may
        still be working; another `swap_in` continues from there.
        """
        pid = self._pid
        if not self.swapped_out():
            if self._state() is _State.READERS_DROPPED:
                self.amounts(timeout_s)
            # First, so that nobody is kept at the gate should this owner end.  A library that is busy may need the
            # unlock, and opens a gate that was leased.
            opened = self._try_to_open(_SHORT_SECONDS)
            if self._cuda.state(pid) is CudaState.LOCKED:
                self._cuda.unlock(pid)
            self._continue()
            if not opened:
                self.open_launch_gate()
            return
        self._capsule.freeze_threads(FREEZE_SECONDS, insist=True, child=self._child)
        if self._cuda.state(pid) is CudaState.LOCKED:
            self._cuda.unlock(pid)
        try:
            verb = f"swap_in {round(wait_s * 1000)}" if wait_s else "swap_in"
            self._request_swap_in(verb, timeout_s + wait_s, held)
        except _NoReply as error:
            self._log_blocked_threads()
            raise _cuda_error(error) from error
        except _Refused as error:
            if not self.is_frozen():  # else the kernel stays so
                self._suspend_again(lock_s, timeout_s)
            raise _cuda_error(error) from error
        self._continue()

    def swap_in_frozen(self, *, timeout_s: float, proves: bool = False) -> None:
        """Bring all allocations back to the device, ``LOCKED -> RUNNING``; threads that are frozen stay so.

        ``proves``: that they are what they were, by digests that the GPU computes of what has arrived; only where
        `Amounts.known`.  `swap_in` lets the threads run.  *After failure* the kernel must be ended, or `swap_in` be
        called.  Raises `CudaError`, also where it cannot prove that.
        """
        self._cuda.unlock(self._pid)
        try:
            self._request_swap_in("swap_in_checked" if proves else "swap_in", timeout_s)
        except (_NoReply, _Refused) as error:
            raise _cuda_error(error) from error

    def _request_swap_in(self, verb: str, timeout_s: float, held: HeldMemory | None = None) -> None:
        with self._library(timeout_s) as library:
            if library is None:
                raise _NoReply("The kernel's library for device memory cannot be reached.")
            library.request(verb, held)

    def _suspend_again(self, lock_s: float, timeout_s: float) -> None:
        """Have the driver suspend a kernel whose allocations could not be swapped in; the lock alone will do."""
        pid = self._pid
        self._cuda.lock(pid, lock_s)
        self._capsule.unfreeze_threads(child=self._child)
        self.freeze_for_driver()
        try:
            self._cuda.checkpoint(pid, timeout_s=timeout_s)
        except (UnsupportedCuda, CudaError) as error:
            if "cuda_result" not in error.details or self._cuda.state(pid) is not CudaState.LOCKED:
                raise
            _log.info("Only the CUDA driver's lock keeps the kernel from its memory: %s", error)
            self._capsule.unfreeze_threads(child=self._child)

    def _log_blocked_threads(self) -> None:
        """Log the system calls in which the library's threads wait (proc_pid_syscall(5)), for the diagnosis."""
        pid = self._pid
        with contextlib.suppress(*procfs.GONE):
            for tid in procfs.threads(pid):
                with contextlib.suppress(OSError):
                    if (name := procfs.stat(pid, tid).name).startswith("gpu-ckpt"):
                        call = procfs.read(f"/proc/{pid}/task/{tid}/syscall").strip()
                        _log.warning("%s (thread %s) is in %s", name, tid, call)

    @contextlib.contextmanager
    def _library(self, timeout_s: float) -> Iterator[_Library | None]:
        with contextlib.ExitStack() as resources:
            try:  # for the connection, and for the extents
                resources.enter_context(descriptors.headroom(self._pid, _SHORT_SECONDS))
            except LimitReached as error:
                raise _Refused(error.message) from error
            connection = resources.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            connection.settimeout(timeout_s)
            try:
                directory = os.open(self._capsule.directory, os.O_DIRECTORY | os.O_CLOEXEC)
                try:  # through the directory's descriptor: its path may be longer than a socket's name can be
                    connection.connect(f"/proc/self/fd/{directory}/{self._socket()}")
                finally:
                    os.close(directory)
            except (FileNotFoundError, ConnectionRefusedError):  # no library, or no call of CUDA yet
                yield None
                return
            except OSError as error:
                message = f"The kernel's library for device memory cannot be reached: {error.strerror}."
                raise _NoReply(message) from error
            library = _Library(connection, self.parts)
            # Another release's library stays in its kernel as long as that lives.
            version = library.exchange("status").get("version") if self._is_own(connection) else None
            if self._child is not None and version != _VERSION:
                yield None
                return
            _require_version(version)
            yield library

    def _socket(self) -> str:
        """Return the name of the library's socket.  Raises `CapsuleError` if the child has ended."""
        return SOCKET if self._child is None else f"{SOCKET}-{self._capsule.pid_inside(self._child)}"

    def _is_own(self, connection: socket.socket) -> bool:
        """Return whether the process itself listens, not one in a pid namespace of its own that has the same pid."""
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return self._child in (None, struct.unpack("3i", credentials)[0])


class _Library:
    """The library's end of one connection; ``parts`` gets the moments of swaps."""

    def __init__(self, connection: socket.socket, parts: dict[str, float]) -> None:
        self._connection, self._parts = connection, parts

    def request(self, verb: str, held: HeldMemory | None = None) -> Amounts:
        """Request ``verb`` (`control.c`), with what is held; return the amounts afterwards."""
        reply = self.exchange(verb, held)
        try:
            swappable = (reply["allocations"], reply["bytes"], reply["swapped_out"])
            others = ("kept", "mirrors", "managed", "shared", "touches", "known")
            amounts = Amounts(*swappable, *(reply.get(name, 0) for name in others))
            result = reply["cuda"]
        except KeyError as error:
            raise _NoReply(f"The kernel's library for device memory did not reply to {verb!r}.") from error
        moments = reply.get("parts", {})
        self._parts |= {name: seconds for name in _MOMENTS if isinstance(seconds := moments.get(name), float)}
        if result != 0:
            raise _Refused(f"The CUDA driver refused a call of {verb!r} for the kernel's device memory.", result)
        return amounts

    def hold(self, held: HeldMemory) -> None:
        """Have the device keep what was copied and is about to be freed."""
        reply, received = self._exchange(f"hold {held.most}", [])
        held.put(received, int(reply.get("held", 0)))
        if len(received) != reply.get("exported"):  # this process could not have all: how much it has nobody knows
            held.close()

    def exchange(self, verb: str, held: HeldMemory | None = None) -> dict[str, Any]:
        """Return the library's whole reply.  What is ``held`` is the library's then."""
        try:
            return self._exchange(verb, held.descriptors if held is not None else [])[0]
        finally:
            if held is not None:
                held.close()

    def _exchange(self, verb: str, sent: list[int]) -> tuple[dict[str, Any], list[int]]:
        """Send a request with descriptors; return the reply, and those that come with it."""
        received: list[int] = []
        try:
            socket.send_fds(self._connection, [f"{verb}\n".encode()], sent)
            text = b""
            while not text.endswith(b"\n"):
                more, files, _, _ = socket.recv_fds(self._connection, 4096, MOST, socket.MSG_CMSG_CLOEXEC)
                received += files
                if not more:
                    break
                text += more
            reply = json.loads(text)
        except (OSError, ValueError) as error:
            for each in received:
                os.close(each)
            raise _NoReply(f"The kernel's library for device memory did not reply to {verb!r}.") from error
        return (reply if isinstance(reply, dict) else {}), received


def _require_version(version: object) -> None:
    if version != _VERSION:
        message = f"The kernel's library for device memory speaks version {version} of its protocol, this release "
        message += f"version {_VERSION}."
        raise ProtocolVersion(message, left="the kernel and its device memory are where they were", version=version)


def unlink_extents(linked: int) -> None:
    """Remove a directory of `FastPath.link_extents`, also of a capsule that has ended, and close it.  Never raises."""
    with contextlib.suppress(OSError):
        for name in os.listdir(linked):
            os.unlink(name, dir_fd=linked)
        os.rmdir(f"../{LINKED}", dir_fd=linked)
    os.close(linked)


def _below(directory: int, name: str) -> Path:
    return Path(f"/proc/self/fd/{directory}/{name}")


def _mode(name: str, directory: int) -> int:
    return os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode


def _published(pid: int) -> _Published:
    """Read what the library in a process publishes, behind its mark; `_NOTHING` without one.  Raises `OSError`."""
    found = None
    with contextlib.suppress(OSError, KeyError):  # where it was: to look through thousands of mappings takes 3 ms
        found = procfs.published_at(pid, _marks[pid], _MARK, _PUBLISHED.size)
    if found is None and (at := _find_mark(pid)) is not None:
        found = procfs.published_at(pid, at, _MARK, _PUBLISHED.size)
    return _NOTHING if found is None else _Published(*_PUBLISHED.unpack(found))


def _find_mark(pid: int) -> int | None:
    """Return the address of the mark in the library's memory, and note it; None without a library."""
    mappings = (mapping for mapping in procfs.maps(pid, named=_LIBRARY) if mapping.permissions.startswith("rw"))
    library = [mapping for mapping in mappings if mapping.name.removesuffix(" (deleted)").endswith(_LIBRARY)]
    at = procfs.address_of(pid, library, _MARK, _PUBLISHED.size)
    if at is not None:
        if len(_marks) >= _MOST_MARKS:
            _marks.clear()
        _marks[pid] = at
    return at


def _copy_timeout(amounts: Amounts, directory: Path | None, timeout_s: float) -> float:
    """Return the seconds for a copy of all allocations; a disk gets all of ``timeout_s``."""
    return timeout_s if directory is not None else min(timeout_s, _REPLY_SECONDS + amounts.bytes / _SLOWEST)


def _cuda_error(error: _Refused) -> CudaError:
    if error.number == OUT_OF_MEMORY:
        return GpuFull("There is too little GPU memory for the kernel's allocations.", left=_UNCHANGED)
    return CudaError(str(error), left=_UNCHANGED, cuda_result=error.number)


# -- preloading


@dataclass(frozen=True)
class Preload:
    """The library that a kernel can preload, or ``why`` it cannot.

    ``unknown_locks``: because it does not know this C library's read-write locks.
    """

    path: Path | None
    why: str = ""
    unknown_locks: bool = False


def built(directory: Path = _NATIVE) -> Path | None:
    """Return the library as the package was built with it; None where it was built without a C compiler."""
    return min(directory.glob("_fastpath*.so"), default=None)


@functools.cache
def preload(built_in: Path = _NATIVE) -> Preload:
    """Return the library's copy that kernels preload, named by its content.

    An image names it among the files that its kernel has mapped, so another release must not replace it.  `freezer`
    recognizes it by the end of its name.
    """
    if (library := built(built_in)) is None:
        return Preload(None, "it was not built: there was no C compiler when the package was installed")
    content = library.read_bytes()
    path = data_directory("native") / f"{hashlib.sha256(content).hexdigest()[:32]}{_LIBRARY}"
    try:
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomically(path, content, durable=False)
    except OSError as error:
        return Preload(None, f"it cannot be copied to {path.parent}: {error.strerror}")
    # A damaged library, or one for another machine, must not prevent a kernel from starting.
    command = [sys.executable, "-I", "-S", "-c", _TRY, str(path)]
    try:
        tried = subprocess.run(command, env={"LD_PRELOAD": str(path)}, capture_output=True, timeout=_REPLY_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        return Preload(None, f"it cannot be tried: {type(error).__name__}")
    if tried.returncode == _UNKNOWN_LOCKS:
        why = f"it does not know the read-write locks of this C library ({os.confstr(_C_LIBRARY)})"
        return Preload(None, why, unknown_locks=True)
    if tried.returncode or tried.stderr:
        return Preload(None, f"it cannot be preloaded (status {tried.returncode})")
    return Preload(path)


def has_driver() -> bool:
    """Return whether this host has NVIDIA's driver; the library is useless without it."""
    return Path("/proc/driver/nvidia").exists()


def environment(
    directory: Path, env: Mapping[str, str], *, children: bool = True, shares_gpus: bool = False
) -> dict[str, str]:
    """Return the variables that make a kernel preload the library; none where it cannot be used.

    ``children``: whether the processes that the kernel starts preload it, too, which inherit these variables.
    ``shares_gpus``: an allocation that finds no free memory waits for its owner's answer before it fails.
    """
    found = preload() if has_driver() else Preload(None)
    name = str(directory / SOCKET)
    if found.path is None or len(os.fsencode(name)) >= _NAME:
        return {}
    others = [each for each in re.split("[ :]", env.get("LD_PRELOAD", "")) if each not in ("", str(found.path))]
    variables = {VARIABLE: name, "LD_PRELOAD": ":".join([str(found.path), *others])}
    variables[CHILDREN_VARIABLE] = name if children else ""
    if children:
        # A program that was built with -fsanitize=address refuses to run with another library before the sanitizer's.
        options = [each for each in env.get(_ASAN, "").split(":") if each and not each.startswith(_ANY_ORDER)]
        variables[_ASAN] = ":".join([*options, f"{_ANY_ORDER}=0"])
    if shares_gpus:
        variables[_SHARES_VARIABLE] = "1"
    return variables
