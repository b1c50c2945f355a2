"""Open descriptors that are neither plain files nor sockets."""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import struct
import subprocess
from pathlib import Path

from . import kind, refused
from .asking import error_of, fdinfo, flags, libc, place, readable, status, system

NONBLOCK, CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC


def peek(fd: int) -> int:
    """Bytes that wait in a pipe."""
    return struct.unpack("i", fcntl.ioctl(fd, 0x541B, b"\0" * 4))[0]


@kind("an eventfd with a count")
def eventfd_count():
    fd = os.eventfd(7)
    return lambda: (fdinfo(fd), flags(fd))


@kind("an eventfd that counts as a semaphore")
def eventfd_semaphore():
    fd = os.eventfd(1 << 20, os.EFD_SEMAPHORE | os.EFD_NONBLOCK)

    def show():
        taken = [os.eventfd_read(fd) for _ in range(2)]
        for one in taken:
            os.eventfd_write(fd, one)
        return taken, fdinfo(fd), flags(fd)

    return show


@kind("an eventfd at its limit, non-blocking")
def eventfd_full():
    fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    os.eventfd_write(fd, 2**64 - 2)
    return lambda: (error_of(lambda: os.eventfd_write(fd, 1)), fdinfo(fd), flags(fd))


@kind("a pipe with bytes in it")
def pipe_with_bytes():
    r, w = os.pipe()
    os.write(w, b"in between" * 100)

    def show():
        data = os.read(r, 5000)
        os.write(w, data)
        return data.decode(), flags(r), flags(w)

    return show


@kind("a pipe with an enlarged buffer (F_SETPIPE_SZ)")
def pipe_enlarged():
    r, w = os.pipe()
    fcntl.fcntl(w, fcntl.F_SETPIPE_SZ, 1 << 18)
    os.write(w, b"x" * 200_000)
    return lambda: (fcntl.fcntl(r, fcntl.F_GETPIPE_SZ), peek(r))


@kind("a pipe that is full")
def pipe_full():
    r, w = os.pipe2(NONBLOCK | CLOEXEC)
    while error_of(lambda: os.write(w, b"y" * 4096)) == "none":
        pass
    return lambda: (peek(r), error_of(lambda: os.write(w, b"y" * 4096)), flags(w))


@kind("a pipe in packet mode (O_DIRECT)", refused("FILE_UNSUPPORTED", "O_DIRECT"), advice="Close it.")
def pipe_of_packets():
    r, w = os.pipe2(os.O_DIRECT | NONBLOCK)
    for word in (b"one", b"three", b"seven"):
        os.write(w, word)

    def show():
        packets = [os.read(r, 100) for _ in range(3)]
        for packet in packets:
            os.write(w, packet)
        return [packet.decode() for packet in packets], flags(r)

    return show, lambda: (os.close(r), os.close(w))


@kind("a pipe whose write end was closed, with bytes in it")
def pipe_at_its_end():
    r, w = os.pipe()
    os.write(w, b"last words")
    os.close(w)
    return lambda: (peek(r), bool(select.select([r], [], [], 0)[0]))


@kind("a pipe whose read end was closed")
def pipe_broken():
    r, w = os.pipe()
    os.close(r)
    return lambda: error_of(lambda: os.write(w, b"x"))


@kind("a duplicated pipe descriptor (dup)")
def pipe_duplicated():
    r, w = os.pipe()
    again = os.dup2(w, 700)
    fcntl.fcntl(again, fcntl.F_SETFL, NONBLOCK)

    def show():
        os.write(again, b"a")
        return os.read(r, 1).decode(), flags(w), flags(again)

    return show


@kind("a pipe that signals its owner (O_ASYNC)")
def pipe_with_owner():
    r, w = os.pipe()
    fcntl.fcntl(r, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(r, fcntl.F_SETSIG, signal.SIGURG)
    return lambda: (fcntl.fcntl(r, fcntl.F_GETOWN), fcntl.fcntl(r, fcntl.F_GETSIG), flags(r), flags(w))


@kind("a named FIFO, open at both ends, with bytes in it")
def fifo_open():
    path = place("fifo") / "pipe"
    os.mkfifo(path, 0o640)
    r = os.open(path, os.O_RDONLY | NONBLOCK)
    w = os.open(path, os.O_WRONLY)
    os.write(w, b"waiting")
    return lambda: (peek(r), flags(r), flags(w), oct(path.stat().st_mode))


@kind("a FIFO that was deleted while it is open")
def fifo_deleted():
    path = place("fifo") / "pipe"
    os.mkfifo(path)
    fd = os.open(path, os.O_RDWR)
    os.write(fd, b"waiting")
    path.unlink()
    return lambda: (peek(fd), flags(fd))


@kind("an epoll object that watches a pipe")
def epoll_on_pipe():
    r, w = os.pipe()
    poll = select.epoll()
    poll.register(r, select.EPOLLIN | select.EPOLLPRI)
    os.write(w, b"x")
    return lambda: (poll.poll(5) == [(r, select.EPOLLIN)], sorted(fdinfo(poll.fileno()).items()))


@kind("an edge-triggered epoll object, its event already reported")
def epoll_edge():
    r, w = os.pipe()
    poll = select.epoll()
    poll.register(r, select.EPOLLIN | select.EPOLLET)
    os.write(w, b"x")
    poll.poll(1)

    def show():
        poll.poll(0)  # CRIU may show the edge once more, as a program must expect of any edge
        quiet = poll.poll(0)
        os.write(w, b"y")
        loud = poll.poll(1)
        os.read(r, 1)
        return quiet == [], loud == [(r, select.EPOLLIN)], fdinfo(poll.fileno())

    return show


def fired_once():
    """Return a pipe that can be read, and an epoll object that has reported it once and for all."""
    r, w = os.pipe()
    poll = select.epoll()
    poll.register(r, select.EPOLLIN | select.EPOLLONESHOT)
    os.write(w, b"x")
    poll.poll(1)
    return r, poll


@kind("a one-shot epoll object that has fired, its file still ready (trio's sockets)")
def epoll_oneshot():
    _, poll = fired_once()
    return lambda: (poll.poll(0), fdinfo(poll.fileno())), poll.close


@kind(
    "a one-shot epoll object that has fired, its file no longer ready",
    refused("FILE_UNSUPPORTED", "EPOLLONESHOT"),
    advice="Register it again, or close the file.",
)
def epoll_oneshot_unready():
    r, poll = fired_once()
    os.read(r, 1)
    return lambda: (poll.poll(0), fdinfo(poll.fileno())), poll.close


@kind("an epoll object that watches another epoll object")
def epoll_nested():
    r, w = os.pipe()
    inner, outer = select.epoll(), select.epoll()
    inner.register(r, select.EPOLLIN)
    outer.register(inner.fileno(), select.EPOLLIN)
    os.write(w, b"x")
    return lambda: outer.poll(5) == [(inner.fileno(), select.EPOLLIN)]


@kind("an epoll object that watches a closed descriptor")
def epoll_of_closed():
    r, w = os.pipe()
    again = os.dup(r)
    poll = select.epoll()
    poll.register(r, select.EPOLLIN)
    os.close(r)
    os.write(w, b"x")
    return lambda: (len(poll.poll(0)), os.fstat(again).st_size)


@kind("a descriptor with a high number")
def high_number():
    r, w = os.pipe()
    fd = fcntl.fcntl(r, fcntl.F_DUPFD_CLOEXEC, 950)
    os.write(w, b"far")
    return lambda: (fd, peek(fd), flags(fd))


@kind("a signalfd")
def signalfd():
    mask = struct.pack("Q", 1 << (signal.SIGUSR2 - 1))
    fd = libc("syscall", 289, -1, mask, 8, NONBLOCK)
    return lambda: (fdinfo(fd), flags(fd))


@kind("a pidfd of the kernel itself")
def pidfd_of_itself():
    fd = os.pidfd_open(os.getpid())

    def show():
        signal.pidfd_send_signal(fd, 0)
        return fdinfo(fd)["Pid"] == str(os.getpid()), flags(fd)

    return show


@kind("a pidfd of a child that has ended and was waited for")
def pidfd_of_dead():
    pid = os.fork()
    if pid == 0:
        os._exit(3)
    fd = os.pidfd_open(pid)
    os.waitpid(pid, 0)
    return lambda: (fdinfo(fd)["Pid"], bool(readable(fd, within=0)))


@kind("a memfd")
def memfd():
    fd = os.memfd_create("zoo", os.MFD_CLOEXEC)
    os.write(fd, b"memory")
    return lambda: (os.pread(fd, 100, 0).decode(), fdinfo(fd)["pos"], flags(fd), Path(f"/proc/self/fd/{fd}").readlink())


@kind("a sealed memfd")
def memfd_sealed():
    fd = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
    os.write(fd, b"for good")
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK)
    return lambda: (
        fcntl.fcntl(fd, fcntl.F_GET_SEALS),
        error_of(lambda: os.write(fd, b"x")),
        os.pread(fd, 9, 0).decode(),
    )


@kind("a memfd, opened a second time for reading only")
def memfd_twice():
    fd = os.memfd_create("twice")
    os.write(fd, b"one and the same")
    second = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)

    def show():
        os.pwrite(fd, b"O", 0)
        return os.pread(second, 3, 0).decode(), flags(second), os.fstat(fd).st_ino == os.fstat(second).st_ino

    return show


@kind("secret memory (memfd_secret)", refused("FILE_UNSUPPORTED", "secret"), advice="Close it.")
def memfd_secret():
    fd = system("memfd_secret", 0)
    os.ftruncate(fd, 4096)
    return lambda: flags(fd), lambda: os.close(fd)


@kind("an inotify watch on a directory (watchdog, watchfiles)")
def inotify():
    directory = place("watched")
    fd = libc("inotify_init1", NONBLOCK)
    libc("inotify_add_watch", fd, str(directory).encode(), 0x100)

    def show():
        os.close(os.open(directory / "new", os.O_CREAT | os.O_RDWR, 0o600))
        os.unlink(directory / "new")
        return bool(os.read(fd, 4096))

    return show, lambda: os.close(fd)


def watches(fd: int) -> list[str]:
    """The watches of an inotify instance, as Linux shows them."""
    return sorted(line for line in Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines() if "inotify" in line)


@kind("inotify watches with numbers that are not consecutive, on trees, files and links, with flags")
def inotify_many():
    directory = place("watched")
    (directory / "a" / "deep").mkdir(parents=True)
    (directory / "file").write_text("x")
    (directory / "link").symlink_to("file")
    fd = libc("inotify_init1", NONBLOCK)
    for name, mask in (
        (".", 0xFFF), ("a", 0x84000100), ("file", 0x2), ("a/deep", 0x200), ("link", 0x02000004)
    ):  # fmt: skip
        libc("inotify_add_watch", fd, str(directory / name).encode(), ctypes.c_uint32(mask))
    libc("inotify_rm_watch", fd, 3)
    libc("inotify_add_watch", fd, b"/etc", 0x100)
    os.read(fd, 100)
    return lambda: (watches(fd), error_of(lambda: os.read(fd, 100))), lambda: os.close(fd)


@kind("an inotify instance that an epoll object and a forked child have, too")
def inotify_shared():
    directory = place("watched")
    fd = libc("inotify_init1", NONBLOCK)
    libc("inotify_add_watch", fd, str(directory).encode(), 0x100)
    other, watched = os.dup(fd), select.epoll()
    watched.register(fd, select.EPOLLIN | select.EPOLLET)
    if not (child := os.fork()):
        signal.pause()

    def show():
        (directory / "new").touch()
        (directory / "new").unlink()
        seen = watched.poll(20) == [(fd, select.EPOLLIN)], os.read(other, 100)
        return seen, watches(fd) == watches(other), watched.poll(0)

    def undo():
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        watched.close()
        os.close(other)
        os.close(fd)

    return show, undo


@kind("an inotify watch with an event that was not read yet", refused("FILE_UNSUPPORTED", "inotify"), advice="Read it.")
def inotify_unread():
    directory = place("watched")
    fd = libc("inotify_init1", NONBLOCK)
    libc("inotify_add_watch", fd, str(directory).encode(), 0x100)
    (directory / "new").touch()
    return lambda: watches(fd), lambda: os.close(fd)


@kind("a command that follows a file (tail -f)")
def follows():
    path = place("followed") / "log"
    path.touch()
    process = subprocess.Popen(["tail", "-f", str(path)], stdout=subprocess.PIPE)

    def show():
        with path.open("a") as file:
            file.write("line\n")
        return process.stdout.readline()

    def undo():
        process.kill()
        process.communicate()

    return show, undo


@kind("an inotify object without a watch")
def inotify_empty():
    fd = libc("inotify_init1", NONBLOCK)
    return lambda: (fdinfo(fd), error_of(lambda: os.read(fd, 100))), lambda: os.close(fd)


@kind("a fanotify group", refused("FILE_UNSUPPORTED", "fanotify"), advice="Close it.")
def fanotify():
    # As an ordinary user may: with reports by file id.
    fd = system("fanotify_init", 0x200 | 0x2, os.O_RDONLY)
    return lambda: flags(fd), lambda: os.close(fd)


@kind("an io_uring", refused("FILE_UNSUPPORTED", "io_uring"), advice="Close it.")
def io_uring():
    fd = system("io_uring_setup", 4, ctypes.create_string_buffer(120))
    return lambda: flags(fd), lambda: os.close(fd)


@kind("a userfaultfd", refused("FILE_UNSUPPORTED", "userfaultfd"), advice="Close it.")
def userfaultfd():
    fd = system("userfaultfd", 1 | NONBLOCK)
    fcntl.ioctl(fd, 0xC018AA3F, struct.pack("QQQ", 0xAA, 0, 0))
    return lambda: flags(fd), lambda: os.close(fd)


@kind("a performance counter (perf_event_open)", refused("FILE_UNSUPPORTED", "perf_event"), advice="Close it.")
def perf_event():
    attributes = struct.pack("IIQQQQ", 1, 112, 1, 0, 0, 0) + struct.pack("Q", 1 | 1 << 5 | 1 << 6) + b"\0" * 64
    fd = system("perf_event_open", ctypes.create_string_buffer(attributes), 0, -1, -1, 0)
    return lambda: flags(fd), lambda: os.close(fd)


@kind("a BPF map", refused("FILE_UNSUPPORTED", "bpf"), advice="Close it.")
def bpf_map():
    fd = system("bpf", 0, ctypes.create_string_buffer(struct.pack("IIII", 2, 4, 4, 1) + b"\0" * 112), 128)
    return lambda: flags(fd), lambda: os.close(fd)


@kind("a Landlock ruleset that is not enforced yet", refused("FILE_UNSUPPORTED", "landlock"), advice="Close it.")
def landlock_ruleset():
    fd = system("landlock_create_ruleset", ctypes.create_string_buffer(struct.pack("Q", 1)), 8, 0)
    return lambda: flags(fd), lambda: os.close(fd)


@kind("/dev/null, /dev/zero, /dev/full, /dev/urandom, open")
def usual_devices():
    fds = [os.open(f"/dev/{name}", os.O_RDWR) for name in ("null", "zero", "full", "urandom")]

    def show():
        full = error_of(lambda: os.write(fds[2], b"x"))
        return os.read(fds[0], 1).decode(), os.read(fds[1], 2), full, len(os.read(fds[3], 8)), [flags(fd) for fd in fds]

    return show


@kind("an unusual device (/dev/fuse)", refused("FILE_UNSUPPORTED", "/dev/fuse"), advice="Close it.")
def unusual_device():
    fd = os.open("/dev/fuse", os.O_RDWR)
    return lambda: flags(fd), lambda: os.close(fd)


@kind("the process's own files in /proc, open")
def own_proc_files():
    files = [open(f"/proc/self/{name}") for name in ("status", "maps", f"task/{os.getpid()}/comm")]

    def show():
        texts = []
        for file in files:
            file.seek(0)
            texts.append(file.read().split()[0])
        return texts[0], texts[2]

    return show


@kind("system-wide files in /proc and /sys, open")
def machine_files():
    files = [open("/proc/meminfo"), open("/proc/stat"), open("/sys/devices/system/cpu/online")]

    def show():
        texts = []
        for file in files:
            file.seek(0)
            texts.append(file.read().split()[0])
        return texts

    return show


@kind("an open namespace file (/proc/self/ns/net)", alone="may be refused", advice="Close it.")
def namespace_file():
    fd = os.open("/proc/self/ns/net", os.O_RDONLY)
    return lambda: os.readlink(f"/proc/self/fd/{fd}"), lambda: os.close(fd)


@kind("an O_PATH descriptor of a directory")
def path_only():
    directory = place("path")
    (directory / "file").write_text("named")
    fd = os.open(directory, os.O_PATH)
    return lambda: (Path(f"/proc/self/fd/{fd}/file").read_text(), error_of(lambda: os.read(fd, 1)), flags(fd))


@kind("standard input, output and error")
def standard_streams():
    return lambda: ([flags(fd) for fd in range(3)], status("FDSize")["FDSize"] != "")


@kind("a descriptor received from itself through a socket, equal by kcmp")
def received_from_itself():
    import socket

    a, b = socket.socketpair()
    r, w = os.pipe()
    socket.send_fds(a, [b"here"], [w])
    _, (received,), _, _ = socket.recv_fds(b, 10, 1)
    fcntl.fcntl(received, fcntl.F_SETFL, NONBLOCK)

    def show():
        os.write(received, b"r")
        return os.read(r, 1).decode(), flags(w), flags(received)

    return show
