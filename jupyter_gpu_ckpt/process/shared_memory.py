"""Deleted files that the stopped processes of an ordinary user share: given a name before a dump.

An ordinary user's CRIU cannot open a mapping whose file was deleted: the locks of multiprocessing's queues and pools,
its shared values, torch's shared tensors.  While all processes are stopped, each such file is copied to a new one with
a name, in a file system in memory that is the capsule's own, and every process maps (and has open) the new file in its
place.  The named files are copied into the image, and back before CRIU restores the processes.

Stopping the processes ends their waits (futex(2) knows a lock by its file); they begin anew, in the new file.

Memory without a file (a memfd, MAP_ANONYMOUS) an ordinary user's CRIU saves by itself, but not all of it as it is: it
reads the memory of the first process, from the first mapping on, as many bytes as are mapped anywhere, whatever is
there, and takes a mapped memfd and its descriptors for two things (``dump_one_shmem`` in its shmem.c,
``vma_get_mapfile_user`` in its proc_parse.c, release 4.2).  What would not come back as it was is given a name, too.
Of a private mapping of a memfd it saves the pages that the process has written only, so all of them are written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.files import clone
from jupyter_gpu_ckpt.process import file_facts, syscalls
from jupyter_gpu_ckpt.process.injection import Injection
from jupyter_gpu_ckpt.process.ptrace import ProcessMemory
from jupyter_gpu_ckpt.process.unsavable import Unsavable

#: In a kernel's directory: where the named files are.
DIRECTORY = "shared-memory"
#: The beginning of their names in an image, beside CRIU's own files.
IN_IMAGE = "shared-memory-"

_DELETED = " (deleted)"
#: Linux shows them as deleted files, but they are refused by their kind.
_NOT_FILES = ("/[aio]", "/anon_hugepage", "/SYSV", "/secretmem")
#: Memory without a file; Linux shows it as deleted files.
_ANONYMOUS, MEMFD = "/dev/zero", "/memfd:"
_GET_SEALS, _SEAL_SEAL, _SEAL_WRITE = 1034, 0x1, 0x8
_SHARED_MEMORY = "/dev/shm/"  # noqa: S108 - read, not written
#: ``VmFlags`` of a mapping that is the same when it is made anew.
_PLAIN = frozenset(["rd", "wr", "sh", "mr", "mw", "me", "ms", "sd", "nr", "ac", "dw"])
#: Other ``VmFlags`` in words; of one without words only that it is a setting.
_NAMES = {
    "dd": "left it out of core dumps (madvise, MADV_DONTDUMP)",
    "dc": "kept it from forked processes (madvise, MADV_DONTFORK)",
    "wf": "kept it from forked processes (madvise, MADV_WIPEONFORK)",
    "gu": "guard pages in it (madvise, MADV_GUARD_INSTALL)",
    "hg": "asked for huge pages in it (madvise, MADV_HUGEPAGE)",
    "nh": "refused huge pages in it (madvise, MADV_NOHUGEPAGE)",
    "lf": "locked it in memory (mlock)",
    "lo": "locked it in memory (mlock)",
    "mg": "had equal pages in it merged (madvise, MADV_MERGEABLE)",
    "rr": "said how it reads it (madvise, MADV_RANDOM)",
    "sl": "sealed it (mseal)",
    "sr": "said how it reads it (madvise, MADV_SEQUENTIAL)",
}
_UNNAMED = "a setting for it that is not proven to come back"
#: Flags of an open file that a new descriptor of it can be given (open(2)): the access mode, O_LARGEFILE, O_NOFOLLOW
#: and O_CLOEXEC.
_FLAGS = os.O_ACCMODE | 0o100000 | os.O_NOFOLLOW | os.O_CLOEXEC
#: PyTorch's shared memory.  It writes one byte to make a file as long as it is to be, and then only maps it: nobody
#: uses the position that its descriptors, which processes share, have from then on (MapAllocator.cpp of 2.13).
_TORCH, _TORCH_POSITION = re.compile(_SHARED_MEMORY + r"torch_\d+_\d+_\d+$"), 1
_AT_FDCWD = -100
_CHUNK = 1 << 20
#: Pages that mincore(2) is asked for at a time: its answer, a byte for each, lies on a stack for a moment.
_ASKED = 1024
#: Bytes of memory without a file that may get a name because it is nearly all holes.
_SPARSE = 16 << 20
#: Bytes of a file of another file system that are copied into memory at most.
_LARGE = 256 << 20


class UnsavableSharedMemory(Unsavable):
    """A deleted file that stopped processes use cannot be given a name; ``strerror`` has it, and the reason."""

    field = "deleted_mapping"


class _Mapped(NamedTuple):
    pid: int
    mapping: procfs.MemoryMapping


class _Opened(NamedTuple):
    pid: int
    number: int
    flags: int
    position: int


class _File:
    """A deleted file, and its uses by the stopped processes."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.mapped: list[_Mapped] = []
        self.opened: list[_Opened] = []

    def pids(self) -> set[int]:
        return {use.pid for use in self.mapped} | {use.pid for use in self.opened}

    @property
    def is_memory(self) -> bool:
        """Return whether the shared memory never was a file."""
        return self.path == _ANONYMOUS or self.path.startswith(MEMFD)

    def unmovable(self, why: str) -> UnsavableSharedMemory:
        return UnsavableSharedMemory(errno.ENOTSUP, f"{self.path}: {why}")


class SharedMemory:
    """The named files of one capsule, below ``directory``, which `mount` has made."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._is_mounted = False

    def mount(self) -> None:
        """Mount the file system of the named files, once."""
        if not self._is_mounted:
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
            flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
            syscalls.mount("tmpfs", self.directory, "tmpfs", flags, "mode=0700,size=100%")
            self._is_mounted = True

    def give_names(self, pids: list[int]) -> None:
        """Give a name to each deleted file that stopped processes map as shared memory.

        Raises `UnsavableSharedMemory`, `OSError`; *after failure* the processes use the files that they had.
        """
        files = _deleted_files(pids)
        if not files:
            return
        names = _living_names(pids)
        for key, file in files.items():
            if file.is_memory and _criu_saves(file) and not _is_better_named(file):
                continue
            _check(file)
            if key in names:
                _use(file, names[key])
            else:
                self._move(file)

    def _move(self, file: _File) -> None:
        self.mount()
        path = f"{self.directory}/{max(map(int, os.listdir(self.directory)), default=-1) + 1}"
        try:
            _copy(file, path)
            _use(file, path)
        except BaseException as error:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise file.unmovable("there is too little memory to copy it") from error
            raise

    def save(self, pids: Iterable[int], target: str) -> None:
        """Copy the named files that the processes use to the directory ``target``; remove those that nobody uses."""
        if not self._is_mounted:
            return
        used: set[str] = set()
        for pid in pids:
            with contextlib.suppress(*procfs.GONE):
                used |= {mapping.name for mapping in procfs.maps(pid)} | {name for _, name in procfs.links(pid)}
        for name in os.listdir(self.directory):
            path = f"{self.directory}/{name}"
            if path in used:
                _copy_file(path, f"{target}/{IN_IMAGE}{name}")
            else:
                os.unlink(path)

    def load(self, source: str) -> None:
        """Copy the named files of an image back, before its processes are restored."""
        for name in os.listdir(source):
            if name.startswith(IN_IMAGE):
                self.mount()
                _copy_file(f"{source}/{name}", f"{self.directory}/{int(name.removeprefix(IN_IMAGE))}")


def _copy_file(source: str, target: str) -> None:
    made = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(source, "rb", buffering=0) as content:
            os.truncate(made, os.stat(content.fileno()).st_size)
            _copy_content(content.fileno(), made)
    finally:
        os.close(made)


def _copy_content(source: int, target: int) -> None:
    for begin, end in clone.data_ranges(source):
        offsets = range(begin, end, _CHUNK)
        _write(target, begin, (os.pread(source, min(_CHUNK, end - at), at) for at in offsets))


def _deleted_path(name: str, inode: int) -> str:
    """Return the path of deleted memory that CRIU may not save; empty for other files (`procfs.path_of_deleted`).

    Raises `UnsavableSharedMemory`: the file's server does not answer.
    """
    in_dev = name.startswith((_SHARED_MEMORY, _ANONYMOUS + _DELETED)) or not name.startswith("/dev/")
    if not in_dev or name.startswith(_NOT_FILES):
        return ""
    # No other server than Linux has most of such memory; a child process asks for the rest.
    is_there = procfs.is_there if name.startswith((_SHARED_MEMORY, _ANONYMOUS, MEMFD)) else file_facts.is_there
    try:
        return procfs.path_of_deleted(name, inode, is_there)
    except TimeoutError as error:
        raise UnsavableSharedMemory(errno.ENOTSUP, f"{name}: its file server does not answer") from error


def _living_names(pids: list[int]) -> dict[tuple[str, int], str]:
    """Return the path of each file that some process maps by its name or that is in /dev/shm, by device and inode.

    A file that Linux shows as deleted may have another name: see `agent.mappings`.
    """
    found = {}
    with contextlib.suppress(OSError), os.scandir(_SHARED_MEMORY) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                found[key_of(entry.stat(follow_symlinks=False))] = entry.path
    for pid in pids:
        with contextlib.suppress(*procfs.GONE):
            for each in procfs.maps(pid):
                with contextlib.suppress(TimeoutError):  # what another process has mapped may be known by another name
                    if each.inode and each.permissions[3] == "s" and file_facts.is_there(each.name, each.inode):
                        found[each.device, each.inode] = each.name
    return found


def key_of(facts: os.stat_result) -> tuple[str, int]:
    """Device and inode as proc_pid_maps(5) shows them."""
    return f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}", facts.st_ino


def _key_of(path: str) -> tuple[str, int]:
    """Return the same as `key_of`, by a path, without waiting for a file server."""
    major, minor, inode = file_facts.identity(path)
    return f"{major:02x}:{minor:02x}", inode


def _deleted_files(pids: list[int]) -> dict[tuple[str, int], _File]:
    """Return the deleted files that some of the processes map as shared memory, by device and inode."""
    found: dict[tuple[str, int], _File] = {}
    for pid in pids:
        with contextlib.suppress(*procfs.GONE):
            for mapping in procfs.maps(pid):
                path = _deleted_path(mapping.name, mapping.inode) if mapping.permissions[3] == "s" else ""
                if path:
                    file = found.setdefault((mapping.device, mapping.inode), _File(path))
                    file.mapped.append(_Mapped(pid, mapping))
    for pid in pids if found else ():
        with contextlib.suppress(*procfs.GONE):
            for number, name in procfs.links(pid):
                key = _key_of(f"/proc/{pid}/fd/{number}") if name.endswith(_DELETED) else ("", 0)
                if key in found and _deleted_path(name, key[1]):
                    facts = procfs.fdinfo(pid, number)
                    found[key].opened.append(_Opened(pid, number, int(facts["flags"], 8), int(facts["pos"])))
    return found


def own_pages(pids: Iterable[int]) -> None:
    """Have stopped processes own the pages of their private mappings of memfds, as if they had written each of them.

    Raises `UnsavableSharedMemory`, `OSError`.
    """
    for pid in pids:
        with contextlib.suppress(*procfs.GONE):
            mappings = [each for each in procfs.maps(pid) if each.name.startswith(MEMFD) and each.permissions[3] == "p"]
            if not mappings:
                continue
            if sum(each.end - each.start for each in mappings) > _available_memory() / 2:
                what = f"{procfs.described(pid)} maps privately: there is too little memory to copy it"
                raise UnsavableSharedMemory(errno.ENOTSUP, f"{mappings[0].name.removesuffix(_DELETED)}, which {what}")
            with Injection.into(pid) as injection:
                for mapping in mappings:
                    at = mapping.start
                    for data in _read(injection.memory, mapping.start, mapping.end - mapping.start):
                        if data.strip(b"\0"):
                            injection.memory.write(at, data)
                        at += len(data)


def _criu_saves(file: _File) -> bool:
    """Return whether CRIU saves memory without a file as it is: see the head of this module."""
    size = _size_mapped(file)
    if file.opened:
        with _borrowed(file.opened[0]) as descriptor:
            if not _seals(descriptor) & _SEAL_WRITE or os.fstat(descriptor).st_size > size:
                return False
    return all(_is_mapped_whole(file, pid, size) for pid in {use.pid for use in file.mapped})


def _is_mapped_whole(file: _File, pid: int, size: int) -> bool:
    """Return whether a process has all bytes up to ``size`` from its first mapping on, and none is behind the end."""
    mapped = sorted(mapping for use, mapping in file.mapped if use == pid)
    start = at = mapped[0].start
    for mapping in mapped:
        if mapping.start != at or mapping.offset != at - start:
            break
        at = mapping.end
    if at - start < size:
        return False
    try:
        with ProcessMemory(pid) as memory:
            return bool(memory.read(start + size - 1, 1))
    except procfs.GONE:  # it was killed
        return True
    except OSError:
        return False


def may_be_sealed(descriptor: int) -> bool:
    """Return whether a memfd has seals, or may get some, and so cannot be given a name; not if it cannot change."""
    seals = _seals(descriptor)
    return seals != _SEAL_SEAL and not seals & _SEAL_WRITE


def _seals(descriptor: int) -> int:
    return fcntl.fcntl(descriptor, _GET_SEALS)


@contextlib.contextmanager
def _borrowed(use: _Opened) -> Iterator[int]:
    with syscalls.pidfd_of(use.pid) as pidfd, syscalls.borrowed(pidfd, use.number) as descriptor:
        yield descriptor


def _check(file: _File) -> None:
    """Raise `UnsavableSharedMemory` for a use that would not be the same in a new file."""
    for use in file.opened if file.is_memory else ():
        with _borrowed(use) as descriptor:
            if _seals(descriptor) != _SEAL_SEAL:
                raise file.unmovable("it is sealed, or can be (memfd_create, MFD_ALLOW_SEALING)")
    for pid, mapping in file.mapped:
        if unusual := _flags(pid, mapping.start) - _PLAIN:
            raise file.unmovable(f"{procfs.described(pid)} has {_NAMES.get(min(unusual), _UNNAMED)}")
    any_position = _is_opened_once(file.opened)
    unused = (0, _TORCH_POSITION) if _TORCH.match(file.path) else (0,)
    for pid, number, flags, position in file.opened:
        known = any_position or position in unused
        if flags & ~_FLAGS or not known or "lock" in procfs.fdinfo(pid, number):
            raise file.unmovable(f"its descriptor {number} is in use in more ways than as memory")


def _is_opened_once(uses: list[_Opened]) -> bool:
    """Return whether all descriptors of a file have one position, and have it still when they are made anew.

    They are one process's, which opened the file once: `_reopen` duplicates one new descriptor if it is for writing,
    too.  Those of mmap.mmap are duplicates of the program's own.
    """
    if len(uses) < 2:
        return True
    pid, first, flags, _ = uses[0]
    if flags & os.O_ACCMODE != os.O_RDWR or any(use.pid != pid for use in uses):
        return False
    try:
        return all(syscalls.call("kcmp", pid, pid, syscalls.KCMP_FILE, first, use.number) == 0 for use in uses[1:])
    except OSError:
        return False


def _flags(pid: int, start: int) -> set[str]:
    return set(_details(pid, start).get("VmFlags", "").split())


def _details(pid: int, start: int) -> dict[str, str]:
    """Return the fields that proc_pid_smaps(5) has of the mapping at ``start``; ``VmFlags`` is the last."""
    _, _, rest = procfs.read(f"/proc/{pid}/smaps").partition(f"{start:08x}-")
    _, _, rest = rest.partition("\n")
    return procfs.fields(rest[: rest.find("\n", rest.find("VmFlags:"))])


def _copy(file: _File, path: str) -> None:
    """Make the named file with the content of the deleted one, read through what is mapped and open of it."""
    made = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        source = f"/proc/{file.opened[0].pid}/fd/{file.opened[0].number}" if file.opened else ""
        size = os.stat(source).st_size if source else _size_mapped(file)
        if source:
            with contextlib.suppress(PermissionError), open(source, "rb", buffering=0) as content:
                _require_space(file, sum(end - begin for begin, end in clone.data_ranges(content.fileno())))
                os.truncate(made, size)
                _copy_content(content.fileno(), made)
                return
        present = [*_present(file, size)]
        _require_space(file, sum(end - begin for _, begin, end in present))
        os.truncate(made, size)
        for (pid, mapping), begin, end in present:
            with ProcessMemory(pid) as memory:
                _write(made, mapping.offset + begin, _read(memory, mapping.start + begin, end - begin))
    finally:
        os.close(made)


def _size_mapped(file: _File) -> int:
    return max(mapping.offset + mapping.end - mapping.start for _, mapping in file.mapped)


def _require_space(file: _File, bytes: int) -> None:
    """Raise `UnsavableSharedMemory` where so many bytes are not to be copied into memory."""
    foreign = not file.is_memory and not file.path.startswith(_SHARED_MEMORY)
    if bytes > _available_memory() / 2 or (bytes > _LARGE and foreign):
        raise file.unmovable("it is too large to be copied into memory")


def _is_better_named(file: _File) -> bool:
    """Return whether memory that CRIU saves is nearly all holes, which it would make pages of, and can be named."""
    size = _size_mapped(file)
    if size < _SPARSE or 2 * sum(end - begin for _, begin, end in _present(file, size)) > size:
        return False
    try:
        _check(file)
    except UnsavableSharedMemory:
        return False
    return True


def _present(file: _File, size: int) -> Iterator[tuple[_Mapped, int, int]]:
    """Yield which parts of a file's mappings have content up to ``size``, each once, as offsets in a mapping.

    Memory that never was a file has it where it has pages: to read another page, of zeros, would make it.
    """
    mapped = {(each.mapping.offset, each.mapping.end - each.mapping.start): each for each in file.mapped}
    for (offset, length), each in mapped.items():
        length = min(length, max(0, size - offset))
        if not file.is_memory:
            yield each, 0, length
            continue
        with Injection.into(each.pid) as injection:
            for begin, end in _present_in(injection, each.mapping, length):
                yield each, begin, end


def _present_in(injection: Injection, mapping: procfs.MemoryMapping, length: int) -> list[tuple[int, int]]:
    """Return where pages begin and end in a mapping of shared memory; all of it where some are swapped out.

    mincore(2) does not know these.
    """
    found: list[tuple[int, int]] = []
    for at in range(0, length, _ASKED * mmap.PAGESIZE):
        pages = -(-min(length - at, _ASKED * mmap.PAGESIZE) // mmap.PAGESIZE)
        with injection.on_stack(bytes(pages)) as address:
            if injection.call("mincore", mapping.start + at, pages * mmap.PAGESIZE, address) < 0:
                return [(0, length)]
            present = injection.memory.read(address, pages)
        for each in re.finditer(rb"[^\0]+", present):
            begin, end = (at + page * mmap.PAGESIZE for page in each.span())
            if found and found[-1][1] == begin:
                begin = found.pop()[0]
            found.append((begin, min(end, length)))
    # Last: the stopped processes bring none back.
    return [(0, length)] if _details(injection.pid, mapping.start).get("Swap", "0 kB") != "0 kB" else found


def _available_memory() -> int:
    return int(procfs.fields(procfs.read("/proc/meminfo"))["MemAvailable"].split()[0]) * 1024


def _read(memory: ProcessMemory, start: int, length: int) -> Iterator[bytes]:
    """Yield the bytes at ``start``, up to the end of the file, behind which there are no pages."""
    while length > 0:
        try:
            data = memory.read(start, min(length, _CHUNK))
        except OSError as error:
            if error.errno == errno.EIO:
                return
            raise
        if not data:
            return
        yield data
        start, length = start + len(data), length - len(data)


def _write(target: int, offset: int, chunks: Iterator[bytes]) -> None:
    for data in chunks:
        if data.strip(b"\0"):  # else it stays a hole
            written = 0
            while written < len(data):  # where little space is left, Linux writes a part of it
                written += os.pwrite(target, data[written:], offset + written)
        offset += len(data)


def _use(file: _File, path: str) -> None:
    """Map and open the file ``path`` in every process that uses ``file``."""
    with contextlib.ExitStack() as stack:
        inside: dict[int, tuple[Injection, int]] = {}
        for pid in sorted(file.pids()):  # all have it open before any process uses it
            injection = stack.enter_context(Injection.into(pid))
            with injection.on_stack(os.fsencode(path) + b"\0") as address:
                made = injection.call("openat", _AT_FDCWD, address, os.O_RDWR | os.O_CLOEXEC)
            if made < 0:
                raise file.unmovable(os.strerror(-made))
            stack.callback(injection.call, "close", made)
            inside[pid] = injection, made
        for pid, mapping in file.mapped:
            _map(file, mapping, *inside[pid])
        for use in file.opened:
            _reopen(file, use, path, *inside[use.pid])


def _map(file: _File, mapping: procfs.MemoryMapping, injection: Injection, made: int) -> None:
    letters = zip("rwx", mapping.permissions, (mmap.PROT_READ, mmap.PROT_WRITE, mmap.PROT_EXEC), strict=False)
    protection = sum(bit for letter, found, bit in letters if letter == found)
    flags = mmap.MAP_SHARED | 0x10  # MAP_FIXED
    length = mapping.end - mapping.start
    done = injection.call("mmap", mapping.start, length, protection, flags, made, mapping.offset)
    if done != mapping.start:
        raise file.unmovable(os.strerror(-done))


def _reopen(file: _File, use: _Opened, path: str, injection: Injection, made: int) -> None:
    """Let the descriptor of ``use`` be one of the new file."""
    flags, opened = use.flags, made
    if flags & os.O_ACCMODE != os.O_RDWR:
        with injection.on_stack(os.fsencode(path) + b"\0") as address:
            opened = injection.call("openat", _AT_FDCWD, address, flags & os.O_ACCMODE | os.O_CLOEXEC)
    done = injection.call("lseek", opened, use.position, os.SEEK_SET) if opened >= 0 else opened
    done = injection.call("dup3", opened, use.number, flags & os.O_CLOEXEC) if done >= 0 else done
    if opened not in (made, -1) and opened >= 0:
        injection.call("close", opened)
    if done < 0:
        raise file.unmovable(os.strerror(-done))
