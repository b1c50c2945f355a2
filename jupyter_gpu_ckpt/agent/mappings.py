"""Find mappings of deleted files, and re-home the shared ones: move them to anonymous memory.

CRIU without root cannot open a mapping whose file was deleted ("Can't open mapped ... (deleted)").  The common case
is a POSIX semaphore: `multiprocessing.Lock`, and so every tqdm bar, unlinks ``/dev/shm/sem.*`` as soon as it is
mapped.  An anonymous shared mapping with the same bytes at the same address does the same.

Why re-homing is safe
---------------------
- *Sharing.*  A file that still has another name is mapped by that.  A mapping is left alone when another living process
  maps the same file (their common lock would break), when this process has the file open as a descriptor (it may pass
  it to a child, or read data written through the mapping), or maps the same part of it twice.
- *Atomicity.*  The new pages are put in place by one mremap(2): another thread that touches the address meanwhile
  waits in its page fault and then sees the new page.  There is no moment without a mapping.
- *Writers.*  libc is called through `ctypes.PyDLL`, which keeps the GIL, so no Python code uses the semaphore in
  between.  Native code without the GIL (or a thread that got the GIL between two calls) could write between copy and
  exchange; therefore the old pages are kept under a second address and compared afterwards.  If they changed, the old
  mapping is put back and all is tried again, a few times. What remains is a write to the old page before *and*
  another to the new page after the exchange, within the same few microseconds; between cells, on semaphores that only
  Python code uses, neither happens.
- *Waiters.*  A thread blocked in ``sem_wait`` sleeps on the old page (a futex of a shared mapping is identified by its
  file), where no post would wake it any more.  So each is woken there with ``sem_post`` on the second address; it then
  reads the semaphore again at its own address, which is the new page now, and sleeps on that.  Other kinds of
  locks in shared memory (process-shared pthread mutexes) are not woken; libraries that use them keep a descriptor or a
  second process, and are left alone.

Private mappings (a library that pip replaced while it was loaded) are only reported.  Their writable data could not be
compared after the exchange: private pages have no second address, and native threads may write there at any time.  The
user has to restart the kernel.

Linux, 64 bit.  Sources: proc_pid_maps(5), mremap(2) (``old_size`` 0 duplicates a shared mapping), futex(2), glibc's
sem_wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from typing import Any, NamedTuple

#: Bytes copied in one quiesce at most (three times as many are needed for a moment); larger files are reported.
COPY_LIMIT = 256 << 20

_ATTEMPTS = 3
_DELETED, _LINE_BREAK = " (deleted)", "\\012"  # as Linux writes them
_SHARED_MEMORY = "/dev/shm/"  # noqa: S108
_WRITTEN = "written to while it was copied"
_SEMAPHORE = f"{_SHARED_MEMORY}sem."  # where glibc keeps named semaphores
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value
# Linux shows them as deleted files, but they are memory without a file, which CRIU saves by itself.
_NOT_FILES = ("/dev/zero", "/memfd:", "/[aio]", "/anon_hugepage")


class Mapping(NamedTuple):
    """One line of /proc/PID/maps; ``path`` without the kernel's " (deleted)"."""

    start: int
    end: int
    perms: str
    offset: int
    file: tuple[str, int]  # device, inode
    path: str
    deleted: bool

    @property
    def shared(self) -> bool:
        return self.perms[3] == "s"

    @property
    def size(self) -> int:
        return self.end - self.start

    def overlaps(self, other: Mapping) -> bool:
        """Return whether both map a common part of the same file."""
        overlap = self.offset < other.offset + other.size and other.offset < self.offset + self.size
        return overlap and self.file == other.file


def read(pid: str = "self", *, all: bool = True) -> list[Mapping]:
    """Return the file mappings of a process; not ``all``: those of deleted files and of shared memory.

    The driver alone maps hundreds of others.
    """
    found = []
    # Names of files may have other ends of lines in them.
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape", newline="\n") as lines:
        for line in lines:
            if not all and not any(part in line for part in (_DELETED, _SHARED_MEMORY, _LINE_BREAK)):
                continue
            fields = line.rstrip("\n").split(None, 5)
            if len(fields) < 6 or fields[4] == "0":
                continue
            start, end = (int(word, 16) for word in fields[0].split("-"))
            path = fields[5]
            if _LINE_BREAK in path:  # one, or these characters
                path = path.replace(_LINE_BREAK, "\n")
                with contextlib.suppress(OSError):  # unmapped meanwhile
                    path = os.readlink(f"/proc/{pid}/map_files/{start:x}-{end:x}")
            # An existing file may have such a name, too.
            deleted = path.endswith(_DELETED) and not _is_there(path, int(fields[4]))
            if deleted:
                path = path.removesuffix(_DELETED)
            found.append(Mapping(start, end, fields[1], int(fields[2], 16), (fields[3], int(fields[4])), path, deleted))
    return found


def _is_there(path: str, inode: int) -> bool:
    try:
        return os.stat(path).st_ino == inode
    except OSError:
        return False


def deleted(mappings: list[Mapping]) -> list[Mapping]:
    """Return those of deleted files, without Linux's own unnamed memory."""
    return [mapping for mapping in mappings if mapping.deleted and not mapping.path.startswith(_NOT_FILES)]


class Rehomed(NamedTuple):
    """The number of mappings re-homed; those that there are since, not ``all`` of `read`; and `still_deleted`."""

    done: int
    mapped: list[Mapping]
    still_deleted: list[dict[str, Any]]


def rehome() -> Rehomed:
    """Re-home every shared mapping of a deleted file that may be moved; see `still_deleted` for the others."""
    everything = read(all=False)
    if any(mapping.shared for mapping in deleted(everything)):
        everything = read()
    shared = [mapping for mapping in deleted(everything) if mapping.shared]
    names = _living_names() if shared else {}
    reasons: dict[str, str] = {}
    done, copied = 0, 0
    elsewhere, opened = (_mapped_elsewhere({mapping.file for mapping in shared}), _open_files()) if shared else ((), ())
    for mapping in shared:
        path = mapping.path
        if mapping.file in names:
            reason = _map_by_name(mapping, names[mapping.file])
        elif path.startswith("/SYSV") or (path.startswith("/dev/") and not path.startswith(_SHARED_MEMORY)):
            reason = "not a file's memory"
        elif mapping.file in elsewhere:
            reason = "another process maps it"
        elif mapping.file in opened:
            reason = "open as a descriptor"
        elif any(mapping.overlaps(other) for other in everything if other is not mapping):
            reason = "mapped twice"
        elif copied + mapping.size > COPY_LIMIT:
            reason = "too large"
        else:
            reason = _exchange(mapping)
        if reason:
            reasons[path] = reason
        else:
            done, copied = done + 1, copied + mapping.size
    mapped = read(all=False) if shared else everything
    return Rehomed(done, mapped, still_deleted(mapped, reasons))


def still_deleted(mappings: list[Mapping], reasons: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Return the deleted files among these mappings, an entry for each.

    ``path``, ``kind`` (shared, private), ``size`` in bytes and the ``reason`` why it stays.
    """
    files: dict[str, dict[str, Any]] = {}
    for mapping in deleted(mappings):
        kind = "shared" if mapping.shared else "private"
        entry = files.setdefault(mapping.path, {"path": mapping.path, "kind": kind, "size": 0, "reason": ""})
        entry["size"] += mapping.size
        entry["reason"] = (reasons or {}).get(mapping.path, "not tried" if mapping.shared else "private")
    return list(files.values())


def living_shared_memory(mappings: list[Mapping]) -> list[str]:
    """Return the mapped, existing files of /dev/shm, which must be there, unchanged, at the restore."""
    return sorted({found.path for found in mappings if found.path.startswith(_SHARED_MEMORY) and not found.deleted})


def _living_names() -> dict[tuple[str, int], str]:
    """Return the path of each file in /dev/shm, by device and inode.

    glibc makes a named semaphore under a temporary name, links it to its own, and deletes the first, which Linux shows
    of the mapping for ever.  Other processes can open it by its own name (multiprocessing's do that when spawned).
    """
    found = {}
    with contextlib.suppress(OSError), os.scandir("/dev/shm") as entries:  # noqa: S108
        for entry in entries:
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                found[f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}", status.st_ino] = entry.path
    return found


def _map_by_name(mapping: Mapping, path: str) -> str:
    """Map the same file under a name that it still has; return the reason why not, or ``""``."""
    protection = sum(bit for bit, letter in ((1, "r"), (2, "w"), (4, "x")) if letter in mapping.perms)
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        return f"{path}: {error.strerror}"
    try:
        status = os.stat(file)
        if (f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}", status.st_ino) != mapping.file:
            return f"{path}: replaced meanwhile"
        flags = mmap.MAP_SHARED | _MAP_FIXED
        at = _libc().mmap(mapping.start, mapping.size, protection, flags, file, mapping.offset)
        return "" if at == mapping.start else _failed("mmap")
    finally:
        os.close(file)


def _mapped_elsewhere(files: set[tuple[str, int]]) -> set[tuple[str, int]]:
    """Return which of these files another process maps; those of other users are unreadable, and cannot share."""
    own = os.readlink("/proc/self")  # not getpid(): /proc may be that of an outer PID namespace
    found = set()
    for pid in os.listdir("/proc"):
        if pid.isdigit() and pid != own:
            with contextlib.suppress(OSError):
                found |= files & {mapping.file for mapping in read(pid)}
    return found


def _open_files() -> set[tuple[str, int]]:
    """Return device (as /proc/self/maps writes it) and inode of every descriptor of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            status = os.stat(f"/proc/self/fd/{name}")
            found.add((f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}", status.st_ino))
    return found


def _libc() -> Any:
    libc = ctypes.PyDLL(None, use_errno=True)  # PyDLL: calls keep the GIL
    address, size, flag = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for name, result, arguments in (
        ("mmap", address, [address, size, flag, flag, flag, ctypes.c_long]),
        ("mremap", address, [address, size, size, flag, address]),
        ("mprotect", flag, [address, size, flag]),
        ("munmap", flag, [address, size]),
        ("memcpy", address, [address, address, size]),
        ("memcmp", flag, [address, address, size]),
        ("pread", ctypes.c_ssize_t, [flag, address, size, ctypes.c_long]),
        ("sem_post", flag, [address]),
    ):
        function = getattr(libc, name)
        function.restype, function.argtypes = result, arguments
    return libc


def _exchange(mapping: Mapping) -> str:
    """Replace ``mapping`` by anonymous shared memory with the same content; return the reason why not, or ``""``."""
    # /proc/self/mem, because pages behind the end of the file give a short read there, and SIGBUS by their address.
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return f"/proc/self/mem: {error.strerror}"
    try:
        for _ in range(_ATTEMPTS):
            if (reason := _exchange_once(_libc(), memory, mapping)) != _WRITTEN:
                return reason
        return _WRITTEN
    finally:
        os.close(memory)


def _exchange_once(libc: Any, memory: int, mapping: Mapping) -> str:
    size, move = mapping.size, _MREMAP_MAYMOVE | _MREMAP_FIXED
    protection = sum(bit for bit, letter in ((1, "r"), (2, "w"), (4, "x")) if letter in mapping.perms)
    owned = []  # our addresses, unmapped at the end

    def anonymous(flags: int) -> int:
        address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags | mmap.MAP_ANONYMOUS, -1, 0)
        if address == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), "mmap")
        owned.append(address)
        return int(address)

    try:
        fresh, kept, again = anonymous(mmap.MAP_SHARED), anonymous(mmap.MAP_PRIVATE), anonymous(mmap.MAP_PRIVATE)
        old = libc.mremap(mapping.start, 0, size, _MREMAP_MAYMOVE, None)
        if old == _MAP_FAILED:
            return _failed("mremap")
        owned.append(old)
        length = libc.pread(memory, kept, size, old)
        if length < 0:
            return _failed("read")
        libc.memcpy(fresh, kept, length)
        if libc.mprotect(fresh, size, protection):
            return _failed("mprotect")
        if libc.mremap(fresh, size, size, move, mapping.start) == _MAP_FAILED:
            return _failed("mremap")
        owned.remove(fresh)
        if libc.pread(memory, again, size, old) != length or libc.memcmp(kept, again, length):
            if libc.mremap(old, size, size, move, mapping.start) == _MAP_FAILED:
                return _failed("mremap")
            owned.remove(old)
            return _WRITTEN
        if mapping.path.startswith(_SEMAPHORE) and "w" in mapping.perms:
            for _ in os.listdir("/proc/self/task"):  # no more threads than these can be waiting
                libc.sem_post(old)
        return ""
    except OSError as error:
        return f"{error.strerror}: {os.strerror(error.errno or 0)}"
    finally:
        for address in owned:
            libc.munmap(address, size)


def _failed(call: str) -> str:
    return f"{call}: {os.strerror(ctypes.get_errno())}"
