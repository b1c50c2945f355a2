"""Memory: mappings of all kinds, their permissions and advice, and what was written into them."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import tempfile
from multiprocessing import shared_memory
from pathlib import Path

from . import IMPOSSIBLE, kind, refused
from .asking import error_of, libc, place, smaps, system

PAGE = mmap.PAGESIZE
PRIVATE, SHARED, ANONYMOUS, FIXED = 0x02, 0x01, 0x20, 0x10


def map_raw(length: int, protection: int = 3, how: int = PRIVATE | ANONYMOUS, fd: int = -1, offset: int = 0) -> int:
    """An address, from mmap(2) itself."""
    where = libc("mmap", None, ctypes.c_size_t(length), protection, how, fd, ctypes.c_long(offset))
    return where & (2**64 - 1)


def protect(address: int, length: int, protection: int) -> None:
    libc("mprotect", ctypes.c_void_p(address), ctypes.c_size_t(length), protection)


def advise(address: int, length: int, advice: int) -> None:
    libc("madvise", ctypes.c_void_p(address), ctypes.c_size_t(length), advice)


def poke(address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))


def peek(address: int, length: int) -> str:
    return ctypes.string_at(address, length).decode()


@kind("a gigabyte of mostly untouched memory")
def thin():
    address = map_raw(1 << 30)
    for number in range(0, 1 << 30, 1 << 26):
        poke(address + number, b"island")
    return lambda: ([peek(address + n, 6) for n in range(0, 1 << 30, 1 << 26)], smaps(address))


@kind("64 MiB of random bytes")
def random_bytes():
    data = bytearray(os.urandom(1 << 20) * 64)
    return lambda: hashlib.sha256(data).hexdigest()


@kind("a terabyte of reserved addresses (PROT_NONE)")
def reserved():
    address = map_raw(1 << 40, 0, PRIVATE | ANONYMOUS | 0x4000)
    return lambda: smaps(address), lambda: libc("munmap", ctypes.c_void_p(address), ctypes.c_size_t(1 << 40))


@kind("pages with different permissions next to each other")
def permissions():
    address = map_raw(4 * PAGE)
    poke(address, b"read only")
    poke(address + PAGE, b"guard")
    for page, protection in enumerate((1, 0, 3, 7)):
        protect(address + page * PAGE, PAGE, protection)
    return lambda: ([smaps(address + page * PAGE)["permissions"] for page in range(4)], peek(address, 9))


@kind("a stack that grows downwards (MAP_GROWSDOWN)")
def grows_down():
    address = map_raw(4 * PAGE, 3, PRIVATE | ANONYMOUS | 0x100)
    poke(address + 3 * PAGE, b"down")
    return lambda: (peek(address + 3 * PAGE, 4), "gd" in smaps(address + 3 * PAGE)["VmFlags"])


@kind("locked pages (mlock)")
def locked():
    address = map_raw(4 * PAGE)
    libc("mlock", ctypes.c_void_p(address), ctypes.c_size_t(4 * PAGE))
    return lambda: smaps(address), lambda: libc("munlock", ctypes.c_void_p(address), ctypes.c_size_t(4 * PAGE))


@kind("all memory locked, present and future (mlockall)", user=IMPOSSIBLE, alone="changes the whole process")
def all_locked():
    if os.getuid() != 0:
        raise PermissionError("more than the limit of locked memory")
    libc("mlockall", 3)

    def show():
        return "lo" in smaps(map_raw(PAGE))["VmFlags"]

    return show, lambda: libc("munlockall")


@kind("pages with madvise flags: DONTFORK, DONTDUMP, WIPEONFORK, MERGEABLE, HUGEPAGE")
def advice():
    kinds = {10: "dc", 16: "dd", 18: "wf", 12: "mg", 14: "hg"}
    address = map_raw(16 * PAGE)
    usable = []
    for number, what in enumerate(kinds):
        if error_of(lambda n=number, w=what: advise(address + 2 * n * PAGE, PAGE, w)) == "none":
            usable.append(number)
    return lambda: [smaps(address + 2 * number * PAGE)["VmFlags"] for number in usable]


@kind("memory in huge pages (madvise)")
def huge():
    address = map_raw(8 << 20)
    advise(address, 8 << 20, 14)
    poke(address, b"h" * (8 << 20))
    return lambda: (hashlib.sha256(ctypes.string_at(address, 8 << 20)).hexdigest(), smaps(address)["VmFlags"])


@kind(
    "memory with a protection key",
    refused("UNPROVEN_STATE", "protection key"),
    alone="may not exist here",
    advice="Unmap it.",
)
def protection_key():
    try:
        key = libc("pkey_alloc", 0, 0)
    except OSError as error:
        raise PermissionError("this processor has none") from error
    address = map_raw(PAGE)
    libc("pkey_mprotect", ctypes.c_void_p(address), ctypes.c_size_t(PAGE), 3, key)
    return lambda: smaps(address).get("ProtectionKey"), lambda: libc(
        "munmap", ctypes.c_void_p(address), ctypes.c_size_t(PAGE)
    )


@kind("sealed memory (mseal)", alone="cannot be undone")
def sealed():
    address = map_raw(PAGE)
    poke(address, b"for good")
    system("mseal", ctypes.c_void_p(address), PAGE, 0)
    return lambda: (peek(address, 8), error_of(lambda: protect(address, PAGE, 1)))


@kind("memory with a name (PR_SET_VMA_ANON_NAME)", alone="may not exist here")
def named():
    address, name = map_raw(PAGE), b"zoo heap\0"
    where = ctypes.create_string_buffer(name)
    try:
        libc("prctl", 0x53564D41, 0, ctypes.c_ulong(address), ctypes.c_ulong(PAGE), ctypes.addressof(where))
    except OSError as error:
        raise PermissionError("this system has none") from error
    return lambda: smaps(address)["name"]


@kind("anonymous shared memory")
def anonymous_shared():
    memory = mmap.mmap(-1, 4 * PAGE)
    memory[:6] = b"shared"

    def show():
        pid = os.fork()
        if pid == 0:
            memory[100:105] = b"child"
            os._exit(0)
        os.waitpid(pid, 0)
        return memory[:6].decode(), memory[100:105].decode()

    return show


@kind("a file mapped privately, with modified pages")
def file_private():
    path = place("map") / "file"
    path.write_bytes(b"original" * 1024)
    with open(path, "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    memory[:7] = b"changed"
    return lambda: (memory[:8].decode(), memory[8:16].decode(), path.read_bytes()[:8].decode())


@kind("a file mapped shared, at an offset")
def file_shared():
    path = place("map") / "file"
    path.write_bytes(b"x" * 4 * PAGE)
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), PAGE, offset=2 * PAGE)
    memory[:4] = b"seen"

    def show():
        memory[10:12] = b"ok"
        return path.read_bytes()[2 * PAGE : 2 * PAGE + 12].decode(), len(memory)

    return show


@kind("a file mapped read-only")
def file_read_only():
    path = place("map") / "file"
    path.write_bytes(b"read" * 2048)
    with open(path, "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return lambda: (memory[:8].decode(), len(memory), memory.size())


@kind("a mapped file that was deleted")
def file_deleted():
    path = place("map") / "file"
    path.write_bytes(b"gone" * 2048)
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    path.unlink()

    def show():
        memory[:4] = b"GONE"
        return memory[:8].decode(), len(memory)

    return show, memory.close


@kind(
    "a deleted file mapped twice, shared",
)
def file_deleted_twice():
    path = place("map") / "file"
    path.write_bytes(b"twin" * 2048)
    with open(path, "r+b") as file:
        one, two = mmap.mmap(file.fileno(), 0), mmap.mmap(file.fileno(), 0)
    path.unlink()

    def show():
        one[:4] = b"SEEN"
        return two[:8].decode()

    return show, lambda: (one.close(), two.close())


@kind("a mapped memfd")
def memfd_mapped():
    fd = os.memfd_create("mapped")
    os.ftruncate(fd, PAGE)
    memory = mmap.mmap(fd, PAGE)

    def show():
        memory[0] = number = memory[0] % 200 + 1  # another one each time
        return os.pread(fd, 1, 0)[0] == number

    return show


@kind("a mapped memfd whose descriptor is closed")
def memfd_mapped_closed():
    fd = os.memfd_create("mapped")
    os.ftruncate(fd, PAGE)
    address = map_raw(PAGE, 3, SHARED, fd)
    os.close(fd)
    poke(address, b"held")
    return lambda: (peek(address, 4), smaps(address)["permissions"])


@kind("multiprocessing.shared_memory")
def shared_memory_block():
    memory = shared_memory.SharedMemory(create=True, size=1 << 20)
    memory.buf[:5] = b"block"

    def show():
        again = shared_memory.SharedMemory(memory.name)
        try:
            again.buf[10:12] = b"ok"
            return bytes(memory.buf[:12]).decode(errors="replace"), memory.size
        finally:
            again.close()

    return show


@kind(
    "multiprocessing.shared_memory that was unlinked and is still used",
)
def shared_memory_unlinked():
    memory = shared_memory.SharedMemory(create=True, size=1 << 20)
    memory.buf[:5] = b"block"
    memory.unlink()
    return lambda: bytes(memory.buf[:5]).decode(), memory.close


@kind("POSIX shared memory (shm_open)")
def posix_shared_memory():
    path = Path(tempfile.mktemp(prefix="zoo-posix-", dir="/dev/shm"))
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.ftruncate(fd, PAGE)
    memory = mmap.mmap(fd, PAGE)
    os.close(fd)
    memory[:5] = b"posix"
    return lambda: (memory[:5].decode(), path.read_bytes()[:5].decode()), lambda: path.unlink(missing_ok=True)


@kind("System V shared memory", refused("UNPROVEN_STATE", "System V"), advice="Detach it.")
def sysv_shared_memory():
    identity = system("shmget", 0, 1 << 16, 0o1600)
    address = libc("shmat", identity, None, 0) & (2**64 - 1)
    poke(address, b"system five")

    def undo():
        libc("shmdt", ctypes.c_void_p(address))
        system("shmctl", identity, 0, 0)

    return lambda: (peek(address, 11), smaps(address)["permissions"]), undo


@kind("a page of the C heap, and the end of the data segment")
def heap():
    library = ctypes.CDLL(None)
    library.malloc.restype = library.sbrk.restype = ctypes.c_void_p
    block = library.malloc(ctypes.c_size_t(100))
    poke(block, b"in the heap")
    return lambda: (peek(block, 11), block, library.sbrk(0) > block)  # glibc gives back what is free above it


@kind("machine code generated at run time (JIT)")
def machine_code():
    address = map_raw(PAGE)
    poke(address, bytes.fromhex("b82a000000c3"))  # mov eax, 42; ret
    protect(address, PAGE, 5)
    function = ctypes.CFUNCTYPE(ctypes.c_int)(address)
    return lambda: (function(), smaps(address)["permissions"])


@kind("a mapping of /dev/zero")
def dev_zero():
    fd = os.open("/dev/zero", os.O_RDWR)
    private, shared = map_raw(PAGE, 3, PRIVATE, fd), map_raw(PAGE, 3, SHARED, fd)
    os.close(fd)
    poke(private, b"private")
    poke(shared, b"shared")
    return lambda: (peek(private, 7), peek(shared, 6))


@kind("a mapping that was moved and enlarged (mremap)")
def moved():
    memory = mmap.mmap(-1, PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:5] = b"moved"
    memory.resize(64 * PAGE)
    return lambda: (memory[:5].decode(), len(memory))


@kind(
    "shared memory that was enlarged beyond its end (mmap.resize)",
    user=refused("UNPROVEN_STATE", "shared memory"),
    alone="may be refused",
    advice="Close it.",
)
def moved_beyond():
    memory = mmap.mmap(-1, PAGE)
    memory[:5] = b"moved"
    memory.resize(64 * PAGE)
    return lambda: (memory[:5].decode(), len(memory)), memory.close


@kind("memory bound to a node (mbind)", alone="may be refused")
def numa():
    address = map_raw(PAGE)
    mask = ctypes.c_ulong(1)
    system("mbind", ctypes.c_void_p(address), PAGE, 2, ctypes.byref(mask), 2, 0)

    def show():
        mode = ctypes.c_int()
        system("get_mempolicy", ctypes.byref(mode), None, 0, ctypes.c_void_p(address), 2)
        return mode.value

    return show, lambda: libc("munmap", ctypes.c_void_p(address), ctypes.c_size_t(PAGE))


@kind("ten thousand small mappings")
def many_mappings():
    address = map_raw(20_000 * PAGE)
    for page in range(0, 4000, 2):
        protect(address + page * PAGE, PAGE, 1)
    return lambda: [smaps(address + page * PAGE)["permissions"] for page in (0, 1, 3998, 3999)], (
        lambda: libc("munmap", ctypes.c_void_p(address), ctypes.c_size_t(20_000 * PAGE))
    )


@kind("a deep stack that has shrunk again")
def deep_stack():
    def down(n: int) -> int:
        return 0 if n == 0 else 1 + down(n - 1)

    return lambda: down(800)
