"""Each kind of state that is proven to be restored, in a real process, real dump and restore; and each refusal.

All kinds that do not disturb each other share one trip, so that a new kind costs no time: what it is before and after
is compared for each by itself.
"""

from __future__ import annotations

import ast
import contextlib
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from round_trip import Subject, image

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.criu import tasks
from jupyter_gpu_ckpt.criu.criu import Criu
from jupyter_gpu_ckpt.errors import CriuError
from jupyter_gpu_ckpt.process import inventory as process_state
from jupyter_gpu_ckpt.process import sockets, syscalls

ROOT = os.geteuid() == 0

#: For all code that the subject runs.
PRELUDE = """
import array, ctypes, errno, fcntl, mmap, os, re, resource, select, signal, socket, struct, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def call(number, *arguments):
    words = [ctypes.c_void_p(each & (1 << 64) - 1) if isinstance(each, int) else each for each in arguments]
    result = libc.syscall(ctypes.c_long(number), *words)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def prctl(*arguments):
    return call(157, *arguments, *[0] * (5 - len(arguments)))
def info(fd):
    with open(f"/proc/self/fdinfo/{fd}") as file:
        return file.read()
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
def memory(size=1 << 16, protection=3, flags=0x22, fd=-1):
    # Alone between two pages that nobody may touch, so that Linux joins it with no other mapping.
    page = mmap.PAGESIZE
    start = libc.mmap(None, size + 2 * page, 0, 0x22, -1, 0) + page
    at = libc.mmap(start, size, protection, flags | 0x10, fd, 0)
    assert at == start, os.strerror(ctypes.get_errno())
    return at
def advise(at, size, advice):
    assert libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(size), advice) == 0, os.strerror(ctypes.get_errno())
def flags_of(at):
    rights = inside = None
    with open("/proc/self/smaps") as file:
        for line in file:
            head = re.match(r"([0-9a-f]+)-([0-9a-f]+) (\\S+)", line)
            if head:
                inside, rights = int(head[1], 16) <= at < int(head[2], 16), head[3]
            elif inside and line.startswith("VmFlags:"):
                return rights, sorted(line.split()[1:])
def watched(fd):
    return sorted(" ".join(line.split()[:6]) for line in info(fd).splitlines() if line.startswith("tfd:"))
def in_thread(work):
    ready, found = threading.Event(), {}
    def run():
        found["tid"] = threading.get_native_id()
        found["work"] = work()
        ready.set()
        time.sleep(1 << 20)
    threading.Thread(target=run, daemon=True).start()
    assert ready.wait(60)
    return found["tid"]
def in_child(work):
    ready, report = os.pipe()
    pid = os.fork()
    if pid == 0:
        work()
        os.write(report, b"1")
        signal.pause()
    os.close(report)
    assert os.read(ready, 1)
    os.close(ready)
def here(work):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(work()))
    thread.start()
    thread.join()
    return answers[0]
"""


def option(
    level: int, number: int, value: str, *, family: str = "AF_INET", kind: str = "SOCK_STREAM"
) -> tuple[str, str]:
    """A socket that listens (of TCP) or is bound, with one option set."""
    lines = [f"s = socket.socket(socket.{family}, socket.{kind})"]
    if family == "AF_INET":
        lines.append("s.bind(('127.0.0.1', 0))")
    lines.append(f"s.setsockopt({level}, {number}, {value})")
    if family == "AF_INET" and kind == "SOCK_STREAM":
        lines.append("s.listen(3)")
    return "\n".join(lines), f"answer = s.getsockopt({level}, {number}, 64)"


def udp(level: int, number: int, value: str, kind: str = "SOCK_DGRAM") -> tuple[str, str]:
    return option(level, number, value, kind=kind)


def local(number: int, value: str, kind: str = "SOCK_STREAM") -> tuple[str, str]:
    return option(1, number, value, family="AF_UNIX", kind=kind)


def mapping(flags: str, after: str = "") -> tuple[str, str]:
    return f"at = memory({flags})\n{after}", "answer = flags_of(at)"


def device(name: str, how: str = "os.O_RDWR") -> tuple[str, str]:
    return f"fd = os.open('/dev/{name}', {how})", "answer = os.readlink(f'/proc/self/fd/{fd}'), os.fstat(fd).st_rdev"


FILE = "fd = os.open('FILE', os.O_RDWR | os.O_CREAT); os.write(fd, b'hello')"

#: A memfd of 16 pages, each with another letter.
MEMFD = "fd = os.memfd_create('x'); [os.pwrite(fd, bytes([65 + n]) * 4096, n * 4096) for n in range(16)]"

#: What each kind is: how it is made, and how it is read.  ``FILE`` is a path of its own.
KINDS: dict[str, tuple[str, str]] = {
    # -- threads
    "affinity": (
        "tid = in_thread(lambda: os.sched_setaffinity(0, {max(os.sched_getaffinity(0))}))",
        "answer = os.sched_getaffinity(tid)",
    ),
    "nice": ("tid = in_thread(lambda: os.setpriority(0, 0, 7))", "answer = os.getpriority(0, tid)"),
    "SCHED_BATCH": (
        "tid = in_thread(lambda: os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0)))",
        "answer = os.sched_getscheduler(tid)",
    ),
    "SCHED_IDLE": (
        "tid = in_thread(lambda: os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)))",
        "answer = os.sched_getscheduler(tid)",
    ),
    "time slice": (
        "attributes = struct.pack('=IIQiIQQQII', 56, 0, 0, 0, 0, 5_000_000, 0, 0, 0, 0)\n"
        "tid = in_thread(lambda: call(314, 0, attributes, 0))",
        "buffer = ctypes.create_string_buffer(56); call(315, tid, buffer, 56, 0); answer = buffer.raw",
    ),
    "I/O priority": ("tid = in_thread(lambda: call(251, 1, 0, 2 << 13 | 6))", "answer = call(252, 1, tid)"),
    "timer slack": ("prctl(29, 123456)", "answer = prctl(30)"),
    "death signal": ("prctl(1, 10)", "v = ctypes.c_int(); prctl(2, ctypes.byref(v)); answer = v.value"),
    "personality": ("libc.personality(0x0040000)", "answer = libc.personality(0xFFFFFFFF)"),
    "name of a thread": (
        "tid = in_thread(lambda: prctl(15, b'worker'))",
        "answer = open(f'/proc/self/task/{tid}/comm').read()",
    ),
    "NUMA policy": (
        "nodes = ctypes.c_ulong(1); tid = in_thread(lambda: call(238, 2, ctypes.byref(nodes), 64))",
        "answer = open(f'/proc/self/task/{tid}/numa_maps').readline().split()[1]",
    ),
    "speculation": (
        "if prctl(52) & 1: tid = in_thread(lambda: prctl(53, 0, 4))\nelse: raise OSError('no such control')",
        "answer = [l for l in open(f'/proc/self/task/{tid}/status') if l.startswith('Speculation_Store')]",
    ),
    "signals that wait": (
        "def send():\n    for n in range(3): signal.pthread_kill(threading.get_ident(), 40)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {40}); send()",
        "answer = 0\nwhile signal.sigtimedwait({40}, 0): answer += 1\nsend()",
    ),
    # -- the process
    "machine check policy": ("prctl(33, 1, 1)", "answer = prctl(34)"),
    "memory merge": ("prctl(67, 1)", "answer = prctl(68)"),
    "core dump filter": (
        "open('/proc/self/coredump_filter', 'w').write('0x7')",
        "answer = open('/proc/self/coredump_filter').read()",
    ),
    "autogroup": (
        "open('/proc/self/autogroup', 'w').write('7')",
        "answer = open('/proc/self/autogroup').read().split()[-1]",
    ),
    "out of memory score": (
        "open('/proc/self/oom_score_adj', 'w').write('500')",
        "answer = open('/proc/self/oom_score_adj').read()",
    ),
    "no huge pages": ("prctl(41, 1)", "answer = prctl(42)"),
    "subreaper": ("prctl(36, 1)", "v = ctypes.c_int(); prctl(37, ctypes.byref(v)); answer = v.value"),
    "no new privileges": ("prctl(38, 1)", "answer = prctl(39)"),
    "umask": ("os.umask(0o137)", "answer = os.umask(0o137)"),
    "limits": (
        "resource.setrlimit(resource.RLIMIT_CORE, (7, 9))",
        "answer = resource.getrlimit(resource.RLIMIT_CORE)",
    ),
    "interval timer": (
        "signal.setitimer(signal.ITIMER_REAL, 90_000, 500)",
        "answer = round(signal.getitimer(signal.ITIMER_REAL)[0], -4), signal.getitimer(signal.ITIMER_REAL)[1]",
    ),
    "POSIX timers": (
        "timers = [ctypes.c_void_p() for n in range(4)]\n"
        "for clock, timer in enumerate(timers): assert libc.timer_create(clock, None, ctypes.byref(timer)) == 0",
        "answer = open('/proc/self/timers').read()",
    ),
    "a child that has ended": (
        "pid = os.fork()\nif pid == 0: os._exit(3)\nos.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)",
        "answer = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)[3:]",
    ),
    # -- files
    "/dev/null": device("null"),
    "/dev/zero": device("zero"),
    "/dev/full": device("full"),
    "/dev/random": device("random", "os.O_RDONLY"),
    "/dev/urandom": device("urandom", "os.O_RDONLY"),
    "directory": ("fd = os.open('/usr', os.O_RDONLY | os.O_DIRECTORY)", "answer = sorted(os.listdir(fd))"),
    "O_PATH": ("fd = os.open('/usr', os.O_PATH)", "answer = os.readlink(f'/proc/self/fd/{fd}'), fcntl.fcntl(fd, 3)"),
    "position": (f"{FILE}; os.lseek(fd, 2, 0); other = os.dup(fd)", "answer = os.lseek(other, 0, 1)"),
    "deleted file": (f"{FILE}; os.unlink('FILE')", "answer = os.pread(fd, 9, 0)"),
    "flock": (f"{FILE}; fcntl.flock(fd, 2)", "answer = [l.split()[1:4] for l in info(fd).splitlines() if 'lock' in l]"),
    "POSIX lock": (
        f"{FILE}; fcntl.lockf(fd, 2, 10, 5)",
        "answer = [l.split()[1:5] + l.split()[7:] for l in info(fd).splitlines() if 'lock' in l]",
    ),
    "OFD lock": (
        f"{FILE}; fcntl.fcntl(fd, 37, struct.pack('hhqqi4x', 1, 0, 5, 10, 0))",
        "answer = [l.split()[1:4] for l in info(fd).splitlines() if 'lock' in l]",
    ),
    "file's owner for signals": (
        "a, b = socket.socketpair(); fcntl.fcntl(a, 8, os.getpid()); fcntl.fcntl(a, 10, 40)",
        "answer = fcntl.fcntl(a, 9), fcntl.fcntl(a, 11)",
    ),
    "pipe": (
        "r, w = os.pipe(); os.write(w, b'hello'); fcntl.fcntl(w, 1031, 1 << 18); os.set_blocking(r, False)",
        "n = array.array('i', [0]); fcntl.ioctl(r, 0x541B, n)\n"
        "answer = n[0], fcntl.fcntl(w, 1032), os.get_blocking(r), os.get_blocking(w)",
    ),
    "FIFO": (
        "os.mkfifo('FILE'); fd = os.open('FILE', os.O_RDWR); os.write(fd, b'hi')",
        "n = array.array('i', [0]); fcntl.ioctl(fd, 0x541B, n); answer = n[0]",
    ),
    "eventfd": (
        "fd = call(290, 5, 0)",
        "answer = [l for l in info(fd).splitlines() if 'eventfd-c' in l or 'flags' in l]",
    ),
    "semaphore": (
        "fd = call(290, 5, 0o4001); again = os.dup(fd); os.set_inheritable(again, True)",
        "os.eventfd_write(fd, 1) if False else None\n"
        "answer = [os.read(again, 8), os.read(fd, 8)], os.get_inheritable(fd), os.get_inheritable(again)\n"
        "os.write(fd, struct.pack('Q', 2))",
    ),
    "eventfd that is full": (
        "fd = call(290, 0, 0o4000); os.write(fd, struct.pack('Q', (1 << 64) - 2))",
        "answer = [l for l in info(fd).splitlines() if 'eventfd-c' in l]",
    ),
    "semaphore in epoll": (
        "e = select.epoll(); fd = call(290, 1, 1); e.register(fd, select.EPOLLIN | select.EPOLLET)",
        "answer = watched(e.fileno()), e.poll(0)\ne.modify(fd, select.EPOLLIN | select.EPOLLET)",
    ),
    "epoll": (
        "e = select.epoll(); a, b = socket.socketpair(); a.send(b'x'); e.register(b, select.EPOLLIN)\n"
        "inner = select.epoll(); e.register(inner.fileno(), select.EPOLLIN)",
        "answer = watched(e.fileno()), e.poll(0)",
    ),
    "used-up registrations": (
        "e = select.epoll(); pairs = [socket.socketpair() for _ in range(100)]; (r, w), once = os.pipe(), 1 << 30\n"
        "for a, _ in pairs[:80]: e.register(a, select.EPOLLOUT | once)\n"
        "while e.poll(0): pass\n"
        "for a, b in pairs[80:90]: e.register(a, select.EPOLLIN | once); b.send(b'x')\n"
        "for a, b in pairs[90:]: e.register(a, select.EPOLLIN | select.EPOLLET); b.send(b'x')\n"
        "e.register(r, select.EPOLLIN); os.write(w, b'x'); pairs[0][1].close()",
        # The end of a connection is not reported; what others have to report is, whatever was taken meanwhile.
        "events = sorted(e.poll(0)); answer = [len(events), {kind for _, kind in events}, watched(e.fileno())]\n"
        "for a, b in pairs[80:90]: e.modify(a, select.EPOLLIN | once)\n"
        "for a, b in pairs[90:]: b.send(b'x')",
    ),
    "epoll's parameters": (
        "e = select.epoll(); fcntl.ioctl(e.fileno(), 0x40088A01, struct.pack('IHBB', 100, 8, 0, 0))",
        "answer = fcntl.ioctl(e.fileno(), 0x80088A02, bytes(8))",
    ),
    "signalfd": (
        "fd = call(289, -1, struct.pack('Q', 1 << 11), 8, 0x800)",
        "answer = [l for l in info(fd).splitlines() if 'sigmask' in l or 'flags' in l]",
    ),
    "timerfd": (
        "fd = call(283, 1, 0x800); call(286, fd, 0, struct.pack('qqqq', 0, 0, 9000, 0), None)",
        "answer = info(fd).split('clockid')[1].split('it_value')[0]",
    ),
    "timerfd that has gone off": (
        "def tick(clock, flags):\n"
        "    fd = call(283, clock, 0x800)\n"
        "    first = time.clock_gettime_ns(clock) + 10**6 if flags else 10**6\n"
        "    call(286, fd, flags, struct.pack('qqqq', 0, 10**8, *divmod(first, 10**9)), None)\n"
        "    assert select.select([fd], [], [], 9)[0]\n"
        "    return fd\n"
        "fds = [tick(0, 0), tick(1, 0), tick(1, 1), tick(0, 3)]",
        "answer = []\n"
        "for fd in fds:\n"
        "    ticks = [(select.select([fd], [], [], 9)[0] == [fd], struct.unpack('Q', os.read(fd, 8))[0] >= 1)\n"
        "             for n in range(3)]\n"
        "    answer.append((ticks, re.findall('(clockid|flags|it_interval): (.*)', info(fd))))\n"
        "    assert select.select([fd], [], [], 9)[0]",
    ),
    "memfd": (
        "fd = os.memfd_create('x', 3); os.write(fd, b'hello'); fcntl.fcntl(fd, 1033, 6)",
        "answer = os.pread(fd, 9, 0), fcntl.fcntl(fd, 1034)",
    ),
    "mapped memfd": (
        f"{MEMFD}; at = memory(1 << 16, 3, 1, fd)",
        "n = os.pread(fd, 1, 0)[0] % 200 + 1; ctypes.memset(at, n, 1)\n"
        "answer = os.pread(fd, 1, 0)[0] - n, ctypes.string_at(at + 4096, 2), os.pread(fd, 2, 8192)",
    ),
    "mapped memfd that has been closed": (
        f"{MEMFD}; at = memory(1 << 16, 3, 1, fd); os.close(fd)",
        "answer = ctypes.string_at(at + 4096, 2)",
    ),
    "memfd mapped beyond its end": (
        f"{MEMFD}; os.ftruncate(fd, 100); at = memory(1 << 16, 3, 1, fd); os.close(fd)",
        "answer = ctypes.string_at(at, 101)",
    ),
    "windows of a memfd": (
        f"{MEMFD}; at = memory(8192, 3, 1, fd); libc.mmap(at + 4096, 4096, 0, 0x11, fd, 9 * 4096)",
        "libc.mprotect(ctypes.c_void_p(at + 4096), ctypes.c_size_t(4096), 1)\n"
        "answer = ctypes.string_at(at, 1), ctypes.string_at(at + 4096, 1), os.pread(fd, 1, 5 * 4096)\n"
        "libc.mprotect(ctypes.c_void_p(at + 4096), ctypes.c_size_t(4096), 0)",
    ),
    "windows of a memfd that has been closed": (
        f"{MEMFD}; at = memory(8192, 3, 1, fd); libc.mmap(at, 4096, 1, 0x11, fd, 9 * 4096); os.close(fd)",
        "answer = ctypes.string_at(at, 1), ctypes.string_at(at + 4096, 1)",
    ),
    "private mapping of a memfd": (
        f"{MEMFD}; at = memory(1 << 16, 1, 2, fd); other = memory(1 << 16, 3, 2, fd); ctypes.memset(other, 7, 1)",
        "answer = ctypes.string_at(at + 3 * 4096, 2), ctypes.string_at(other, 2), os.pread(fd, 2, 0)",
    ),
    "shared memory whose beginning is gone": (
        "at = memory(flags=0x21); ctypes.memset(at + 40960, 65, 9)\n"
        "libc.munmap(ctypes.c_void_p(at), ctypes.c_size_t(8192))",
        "answer = ctypes.string_at(at + 40960, 10)",
    ),
    "shared memory whose middle is gone": (
        "at = memory(flags=0x21); ctypes.memset(at, 66, 9); ctypes.memset(at + 40960, 65, 9)\n"
        "libc.munmap(ctypes.c_void_p(at + 8192), ctypes.c_size_t(8192))",
        "answer = ctypes.string_at(at, 10), ctypes.string_at(at + 40960, 10)",
    ),
    "pidfd": ("fd = os.pidfd_open(os.getpid())", "answer = re.findall(r'^(?:NS)?[Pp]id:.*', info(fd), re.M)"),
    "network namespace": ("fd = os.open('/proc/self/ns/net', 0)", "answer = os.readlink(f'/proc/self/fd/{fd}')"),
    # -- sockets
    "TCP that listens": (
        "s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(37)",
        "answer = s.getsockname(), s.getsockopt(6, 11, 104)[28:32]",
    ),
    "TCP over IPv6": (
        "s = socket.socket(socket.AF_INET6); s.setsockopt(41, 26, 1); s.setsockopt(41, 67, 8)\n"
        "s.bind(('::1', 0)); s.listen(1)",
        "answer = s.getsockname(), s.getsockopt(41, 26), s.getsockopt(41, 67)",
    ),
    "UDP": (
        "s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('127.0.0.1', 0))\n"
        "c = socket.socket(type=socket.SOCK_DGRAM); c.connect(s.getsockname())",
        "answer = s.getsockname(), c.getsockname(), c.getpeername()",
    ),
    "multicast": (
        "s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('', 0)); s.settimeout(5)\n"
        "s.setsockopt(0, 35, socket.inet_aton('239.1.2.3') + socket.inet_aton('127.0.0.1')); s.setsockopt(0, 34, 1)\n"
        "c = socket.socket(type=socket.SOCK_DGRAM); c.setsockopt(0, 32, socket.inet_aton('127.0.0.1'))",
        "c.sendto(b'hi', ('239.1.2.3', s.getsockname()[1])); answer = s.recv(9)",
    ),
    "multicast of one source": (
        "s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('', 0)); s.settimeout(5)\n"
        "lo = socket.inet_aton('127.0.0.1'); s.setsockopt(0, 39, socket.inet_aton('232.1.2.3') + lo + lo)\n"
        "c = socket.socket(type=socket.SOCK_DGRAM); c.setsockopt(0, 32, lo)",
        "c.sendto(b'hi', ('232.1.2.3', s.getsockname()[1])); answer = s.recv(9)",
    ),
    "netlink": (
        "s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); s.bind((0, 1))",
        "answer = s.getsockname()[1]",
    ),
    "unix stream": (
        "a, b = socket.socketpair(); a.send(b'hello'); b.shutdown(socket.SHUT_WR)",
        "answer = b.recv(9, socket.MSG_PEEK), a.recv(9, socket.MSG_DONTWAIT)",
    ),
    "unix datagrams": (
        "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); a.send(b'one'); a.send(b'two')",
        "answer = b.recv(9, socket.MSG_PEEK)",
    ),
    "unix packets": (
        "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET); a.send(b'one'); a.send(b'two')",
        "answer = b.recv(9, socket.MSG_PEEK)",
    ),
    "unix with a path": (
        "s = socket.socket(socket.AF_UNIX); s.bind('FILE'); s.listen(3)",
        "c = socket.socket(socket.AF_UNIX); c.connect('FILE'); answer = s.accept()[0] is not None",
    ),
    "unix with an abstract name": (
        "s = socket.socket(socket.AF_UNIX); s.bind('\\0' + 'FILE'); s.listen(3)",
        "answer = s.getsockname()",
    ),
    "SO_KEEPALIVE": option(1, 9, "1"),
    "SO_LINGER": option(1, 13, "struct.pack('ii', 1, 5)"),
    "SO_RCVBUF": option(1, 8, "40000"),
    "SO_RCVLOWAT": option(1, 18, "9"),
    "SO_RCVTIMEO": option(1, 20, "struct.pack('ll', 5, 0)"),
    "SO_PRIORITY": option(1, 12, "4"),
    "SO_REUSEPORT": option(1, 15, "1"),
    "SO_TIMESTAMP": udp(1, 29, "1"),
    "SO_TIMESTAMPNS": udp(1, 35, "1"),
    "SO_TIMESTAMPING": udp(1, 37, "0x18"),
    "SO_MAX_PACING_RATE": option(1, 47, "1_000_000"),
    "SO_INCOMING_CPU": option(1, 49, "0"),
    "SO_ZEROCOPY": option(1, 60, "1"),
    "SO_TXREHASH": option(1, 74, "0"),
    "SO_RXQ_OVFL": udp(1, 40, "1"),
    "TCP_NODELAY": option(6, 1, "1"),
    "TCP_DEFER_ACCEPT": option(6, 9, "7"),
    "TCP_FASTOPEN": option(6, 23, "5"),
    "TCP_KEEPIDLE": option(6, 4, "77"),
    "TCP_SYNCNT": option(6, 7, "3"),
    "TCP_LINGER2": option(6, 8, "9"),
    "TCP_WINDOW_CLAMP": option(6, 10, "5000"),
    "TCP_USER_TIMEOUT": option(6, 18, "5000"),
    "TCP_MAXSEG": option(6, 2, "600"),
    "TCP_CONGESTION": option(6, 13, "b'reno'"),
    "TCP_NOTSENT_LOWAT": option(6, 25, "5000"),
    "TCP_SAVE_SYN": option(6, 27, "1"),
    "TCP_INQ": option(6, 36, "1"),
    "IP_TOS": option(0, 1, "16"),
    "IP_TTL": option(0, 2, "33"),
    "IP_RECVERR": udp(0, 11, "1"),
    "IP_PKTINFO": udp(0, 8, "1"),
    "IP_MTU_DISCOVER": option(0, 10, "2"),
    "IP_BIND_ADDRESS_NO_PORT": option(0, 24, "1"),
    "IP_MINTTL": option(0, 21, "3"),
    "IP_OPTIONS": option(0, 4, "b'\\x01\\x01\\x01\\x00'"),
    "IP_MULTICAST_TTL": udp(0, 33, "5"),
    "IP_MULTICAST_LOOP": udp(0, 34, "0"),
    "IP_MULTICAST_IF": udp(0, 32, "socket.inet_aton('127.0.0.1')"),
    "IP_MULTICAST_ALL": udp(0, 49, "0"),
    "UDP_GRO": udp(17, 104, "1"),
    "UDP_SEGMENT": udp(17, 103, "500"),
    "UDPLITE_SEND_CSCOV": udp(136, 10, "20", "SOCK_DGRAM, 136"),
    "UDPLITE_RECV_CSCOV": udp(136, 11, "16", "SOCK_DGRAM, 136"),
    "SO_WIFI_STATUS": udp(1, 41, "1"),
    "SO_NOFCS": udp(1, 43, "1"),
    "SO_LOCK_FILTER": udp(1, 44, "1"),
    "IP_TOS of IPv6": option(0, 1, "16", family="AF_INET6"),
    "IP_TTL of IPv6": option(0, 2, "33", family="AF_INET6"),
    "IP_PKTINFO of IPv6": option(0, 8, "1", family="AF_INET6", kind="SOCK_DGRAM"),
    "IPV6_2292PKTINFO": option(41, 2, "1", family="AF_INET6", kind="SOCK_DGRAM"),
    "IPV6_2292HOPLIMIT": option(41, 8, "1", family="AF_INET6", kind="SOCK_DGRAM"),
    "IPV6_FLOWINFO": option(41, 11, "1", family="AF_INET6", kind="SOCK_DGRAM"),
    "SO_TIMESTAMPNS_NEW": udp(1, 64, "1"),
    "SO_TIMESTAMP_NEW": udp(1, 63, "1"),
    "SO_TIMESTAMPING_NEW": udp(1, 65, "0x18"),
    "IPV6_DSTOPTS": option(41, 59, "bytes([0, 0, 1, 4, 0, 0, 0, 0])", family="AF_INET6", kind="SOCK_DGRAM"),
    "IPV6_2292RTHDR": option(41, 5, "1", family="AF_INET6", kind="SOCK_DGRAM"),
    "TCP_FASTOPEN_KEY": option(6, 33, "bytes(range(16))"),
    "TCP_QUICKACK": option(6, 12, "0"),
    "NETLINK_EXT_ACK": option(270, 11, "1", family="AF_NETLINK", kind="SOCK_RAW"),
    "NETLINK_GET_STRICT_CHK": option(270, 12, "1", family="AF_NETLINK", kind="SOCK_RAW"),
    "SO_REUSEADDR of unix": local(2, "1", "SOCK_DGRAM"),
    "SO_PASSCRED": local(16, "1"),
    "SO_PASSPIDFD": local(76, "1"),
    "SO_PASSRIGHTS": local(83, "0"),
    "SO_PEEK_OFF": local(42, "3"),
    "SO_TIMESTAMP of unix": local(29, "1", "SOCK_DGRAM"),
    # -- memory
    "private memory": mapping(""),
    "shared memory": (
        "at = memory(flags=0x21); ctypes.memset(at, 65, 9)",
        "answer = flags_of(at), ctypes.string_at(at, 9)",
    ),
    "memory that nobody may touch": mapping("protection=0"),
    "MAP_NORESERVE": mapping("flags=0x4022"),
    "MAP_DROPPABLE": mapping("flags=0x28"),
    "mlock": mapping("", "assert libc.mlock(ctypes.c_void_p(at), 1 << 16) == 0"),
    "mlock2": mapping("", "call(325, at, 1 << 16, 1)"),
    "MADV_HUGEPAGE": mapping("1 << 22", "advise(at, 1 << 22, 14)"),
    "MADV_NOHUGEPAGE": mapping("1 << 22", "advise(at, 1 << 22, 15)"),
    "MADV_MERGEABLE": mapping("", "advise(at, 1 << 16, 12)"),
    "MADV_DONTFORK": mapping("", "advise(at, 1 << 16, 10)"),
    "MADV_WIPEONFORK": mapping("", "advise(at, 1 << 16, 18)"),
    "MADV_DONTDUMP": mapping("", "advise(at, 1 << 16, 16)"),
    "MADV_SEQUENTIAL": mapping("", "advise(at, 1 << 16, 2)"),
    "MADV_RANDOM": mapping("", "advise(at, 1 << 16, 1)"),
    "MADV_GUARD_INSTALL": (
        "at = memory(); ctypes.memset(at, 65, 1 << 16); advise(at + 8192, 4096, 102)",
        "pages = os.open('/proc/self/pagemap', 0)\n"
        "answer = flags_of(at), [os.pread(pages, 8, (at >> 12) * 8 + 8 * n)[7] >> 2 & 1 for n in range(4)]\n"
        "os.close(pages)",
    ),
    "mseal": (
        "at = memory(); call(462, at, 1 << 16, 0)",
        "answer = flags_of(at), libc.mprotect(ctypes.c_void_p(at), 4096, 1)",
    ),
    "mbind": (
        "at = memory(); nodes = ctypes.c_ulong(1); call(237, at, 1 << 16, 2, ctypes.byref(nodes), 64)",
        "v = ctypes.c_int(); call(239, ctypes.byref(v), None, 0, at, 2); answer = v.value",
    ),
    "a file's memory": (
        f"{FILE}; os.ftruncate(fd, 1 << 16); at = memory(flags=1, fd=fd); os.close(fd)",
        "answer = flags_of(at), ctypes.string_at(at, 5)",
    ),
    "program code": mapping("protection=7"),
    "membarrier": ("call(324, 16, 0, 0)", "answer = call(324, 8, 0, 0)"),
}

#: Those that change what the others may do.
ALONE: dict[str, tuple[str, str]] = {
    "memory that denies writing code": ("prctl(65, 1)", "answer = prctl(66)"),
    "memory locked as it is mapped": (
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.getrlimit(resource.RLIMIT_MEMLOCK)[1],) * 2)\n"
        "assert libc.mlockall(2) == 0, os.strerror(ctypes.get_errno())",
        "answer = flags_of(memory(4096))",
    ),
    "inotify": (
        "fd = call(294, 0x800); call(254, fd, b'/usr', 0x84000002)",
        "answer = re.findall(r'inotify wd:\\S+.*', info(fd))",
    ),
    "CPUID that faults": ("call(158, 0x1012, 0)", "answer = call(158, 0x1011)"),
}
if ROOT:
    ALONE["seccomp"] = (
        "filter = ctypes.create_string_buffer(struct.pack('=HBBIHBBIHBBIHBBI', 0x20, 0, 0, 0, 0x15, 0, 1, 135,\n"
        "    6, 0, 0, 0x50000 | errno.EXDEV, 6, 0, 0, 0x7FFF0000))\n"
        "program = ctypes.create_string_buffer(struct.pack('=HxxxxxxQ', 4, ctypes.addressof(filter)))\n"
        "prctl(38, 1); prctl(22, 2, program)",
        "answer = libc.personality(0xFFFFFFFF), os.strerror(ctypes.get_errno())",
    )
    KINDS["unix whose path was deleted"] = (
        "s = socket.socket(socket.AF_UNIX); s.bind('FILE'); s.listen(3); os.unlink('FILE')",
        "answer = s.getsockname(), s.getsockopt(1, 30)",
    )
    KINDS["capabilities"] = ("prctl(24, 21)", "answer = [l for l in open('/proc/self/status') if l.startswith('Cap')]")


class Trip:
    """The kinds of state before and after a dump and a restore of the one process that had them all."""

    def __init__(self, criu: Criu, kinds: dict[str, tuple[str, str]]) -> None:
        self.impossible: dict[str, str] = {}
        self.before: dict[str, str] = {}
        self.after: dict[str, str] = {}
        home = Path(tempfile.mkdtemp(prefix="gc-"))
        try:
            with Capsule.create(home) as capsule:
                subject = Subject(capsule)
                assert subject.tell(PRELUDE + "spaces = {}") == "None"
                for number, (name, (make, read)) in enumerate(kinds.items()):
                    code = make.replace("FILE", f"{home}/file-{number}")
                    answer = subject.tell(f"exec({code!r}, spaces.setdefault({name!r}, dict(globals())))")
                    if answer != "None":
                        self.impossible[name] = answer
                        continue
                    self.before[name] = self._read(subject, name, read.replace("FILE", f"{home}/file-{number}"))
                inner, pipes = capsule.inner_pid, capsule.pipes
                assert capsule.inspect()["refusals"] == []
                criu.dump(capsule, image(home), timeout=60)
                state = capsule.inspect()
                assert state["refusals"] == []
                assert tasks.missing(image(home), state["inventory"]) == []
                notes = state["notes"]
                note_death_signals(home, inner, notes)
            with Capsule.create(home) as capsule:
                criu.restore(capsule, image(home), pid=inner, pipes=pipes, timeout=60, notes=notes)
                for number, (name, (_, read)) in enumerate(kinds.items()):
                    if name in self.before:
                        self.after[name] = self._read(subject, name, read.replace("FILE", f"{home}/file-{number}"))
        finally:
            shutil.rmtree(home)

    @staticmethod
    def _read(subject: Subject, name: str, read: str) -> str:
        return subject.tell(f"exec({read!r}, spaces[{name!r}]); answer = spaces[{name!r}].pop('answer')")

    def require(self, name: str) -> None:
        """Assert that ``name`` is after the trip as before."""
        if name in self.impossible:
            pytest.skip(f"cannot be made here: {self.impossible[name][:60]}")
        assert self.after[name] == self.before[name]
        assert "Error" not in self.before[name]


def note_death_signals(home: Path, inner: int, notes: dict[str, Any]) -> None:
    for tid, number in tasks.remove_death_signals(image(home)).items():
        threads = notes.setdefault(str(inner), {}).setdefault("threads", {})
        threads.setdefault(str(tid), {})["death_signal"] = number


@pytest.fixture(scope="module")
def trip(criu_binary):
    return Trip(Criu(criu_binary.argv), KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_of_state_comes_back(trip, name):
    trip.require(name)


@pytest.mark.parametrize("name", ALONE)
def test_a_kind_of_state_that_rules_others_comes_back(criu, name):
    Trip(criu, {name: ALONE[name]}).require(name)


# -- what is refused

#: How each is made, and the words by which it is refused while the kernel runs.
REFUSED: dict[str, tuple[str, str]] = {
    "io_uring": (
        "buffer = ctypes.create_string_buffer(120); fd = call(425, 4, buffer)",
        "an io_uring instance (descriptor ",
    ),
    "userfaultfd": ("fd = call(323, 1)", "a userfaultfd (descriptor "),
    "Landlock ruleset": ("fd = call(444, struct.pack('Q', 1), 8, 0)", "a Landlock ruleset (descriptor "),
    "secret memory": ("fd = call(447, 0)", "secret memory (memfd_secret, descriptor "),
    "asynchronous I/O": (
        "buffer = ctypes.create_string_buffer(8); call(206, 4, buffer)",
        "an asynchronous I/O context (io_setup)",
    ),
    "message queue": (
        "fd = call(240, b'gpu-ckpt-test', 0o102, 0o600, None); call(241, b'gpu-ckpt-test')",
        "message queue",
    ),
    "packet pipe": ("r, w = os.pipe2(os.O_DIRECT)", "a pipe in packet mode"),
    "pidfd of another": ("fd = os.pidfd_open(1)", "a pidfd of a process that does not come along"),
    "robust mutex in a file": (
        "fd = os.open('robust', os.O_RDWR | os.O_CREAT); os.ftruncate(fd, 4096); at = memory(4096, 3, 1, fd)\n"
        "kind = ctypes.create_string_buffer(16); libc.pthread_mutexattr_init(kind)\n"
        "libc.pthread_mutexattr_setrobust(kind, 1); libc.pthread_mutexattr_setpshared(kind, 1)\n"
        "mutex = ctypes.c_void_p(at); libc.pthread_mutex_init(mutex, kind); assert libc.pthread_mutex_lock(mutex) == 0",
        "a lock in the mapped file ",
    ),
    "used-up registration": (
        "e = select.epoll(); r, w = os.pipe(); e.register(r, select.EPOLLIN | select.EPOLLONESHOT)\n"
        "os.write(w, b'x'); e.poll(); os.read(r, 1)",
        "a registration that was used up (EPOLLONESHOT)",
    ),
    "connection that waits": (
        "s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(3); c = socket.create_connection(s.getsockname())",
        "1 connection to port ",
    ),
    "SCM_RIGHTS": (
        "a, b = socket.socketpair(); a.send(b'x'); socket.send_fds(a, [b'y'], [0])",
        "1 descriptor sent through a unix socket (SCM_RIGHTS)",
    ),
    "SCM_CREDENTIALS": (
        "a, b = socket.socketpair(); b.setsockopt(1, 16, 1); a.send(b'x')",
        "credentials sent through a unix socket (SCM_CREDENTIALS)",
    ),
    "out-of-band data": (
        "a, b = socket.socketpair(); a.send(b'x'); a.send(b'y', socket.MSG_OOB)",
        "out-of-band data in a unix socket",
    ),
    "datagram that waits": (
        "s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('127.0.0.1', 0)); s.sendto(b'', s.getsockname())",
        "a datagram in a UDP socket that is not received yet",
    ),
    "corked": (
        "s = socket.socket(type=socket.SOCK_DGRAM); s.connect(('127.0.0.1', 9)); s.setsockopt(17, 1, 1); s.send(b'x')",
        "a UDP socket that collects a datagram (UDP_CORK) (descriptor ",
    ),
    "corked UDP-Lite of IPv6": (
        "s = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM, 136); s.setsockopt(136, 1, 1)",
        "a UDP socket that collects a datagram (UDP_CORK) (descriptor ",
    ),
    "half a datagram": (
        "s = socket.socket(type=socket.SOCK_DGRAM); s.connect(('127.0.0.1', 9)); s.send(b'x', socket.MSG_MORE)",
        "a datagram in a UDP socket that is not sent yet (MSG_MORE) (descriptor ",
    ),
    "device that is not there": (
        "s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); s.setsockopt(1, 62, 1 << 20)",
        "a socket that is bound to a network device (number 1048576) that is not there any more (descriptor ",
    ),
    "connection that waits at a path": (
        "s = socket.socket(socket.AF_UNIX); s.bind('waits'); s.listen(3)\n"
        "c = socket.socket(socket.AF_UNIX); c.connect('waits')",
        "connections to a unix socket that are not accepted yet",
    ),
    "empty message": (
        "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "for word in (b'one', b'', b'three'): a.send(word)",
        "an empty message in a unix socket",
    ),
    "virtual socket": ("s = socket.socket(socket.AF_VSOCK)", "AF_VSOCK"),
    "MPTCP": ("s = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)", "an MPTCP socket"),
    "System V shared memory": (
        "n = libc.shmget(0, 4096, 0o1600); libc.shmat.restype = ctypes.c_void_p; at = libc.shmat(n, None, 0)\n"
        "libc.shmctl(n, 0, None)",
        "System V shared memory",
    ),
    "dnotify": (
        "os.mkdir('noticed'); fd = os.open('noticed', 0); fcntl.fcntl(fd, 1026, 0x80000004)",
        "a notification on the directory /",
    ),
    "directory of a thread": (
        "tid = in_thread(lambda: (call(272, 0x200), os.chdir('/usr')))",
        "a thread with directories of its own",
    ),
    "descriptors of a thread": ("tid = in_thread(lambda: call(272, 0x400))", "a thread with descriptors of its own"),
}
if ROOT:
    REFUSED["mount"] = (
        "os.mkdir('mounted'); assert libc.mount(b'tmpfs', b'mounted', b'tmpfs', 0, None) == 0",
        "a file system that it has mounted itself (/",
    )
    REFUSED["root directory"] = (
        "os.mkdir('root'); in_child(lambda: os.chroot('root'))",
        "a root directory of its own (/",
    )
    REFUSED["another user in part"] = (
        "in_child(lambda: os.setresuid(0, 1234, 0))",
        "real, effective and saved user or group ids that are not the same",
    )
    REFUSED["raw socket"] = ("s = socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)", "a raw socket")
    REFUSED["thread of another user"] = ("tid = in_thread(lambda: call(117, 1000, 1000, 1000))", "another user")
    REFUSED["packet socket"] = ("s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)", "a packet socket")
    REFUSED["repair"] = ("s = socket.socket(); s.setsockopt(6, 19, 1)", "a TCP socket under repair (TCP_REPAIR)")
    REFUSED["device"] = ("fd = os.open('/dev/fuse', os.O_RDWR)", "the device /dev/fuse (descriptor ")
    REFUSED["performance counter"] = (
        "buffer = ctypes.create_string_buffer(128); struct.pack_into('IIQ', buffer, 0, 1, 128, 0)\n"
        "fd = call(298, buffer, 0, -1, -1, 0)",
        "a performance counter",
    )
else:
    REFUSED["enlarged shared memory"] = (
        "at = mmap.mmap(-1, 4096); at.resize(1 << 16)",
        "shared memory that was enlarged beyond its end",
    )
    REFUSED["memfd that can be sealed"] = (
        "fd = os.memfd_create('x', 3); os.ftruncate(fd, 4096); at = memory(4096, 3, 1, fd)",
        "a mapped memfd that is sealed, or can be (x, descriptor ",
    )
    REFUSED["deleted path"] = (
        "s = socket.socket(socket.AF_UNIX); s.bind('deleted'); s.listen(3); os.unlink('deleted')",
        "a unix socket whose file ",
    )


@pytest.fixture(scope="module")
def refusals():
    """Return the refusals of one process that has everything that is refused."""
    home = Path(tempfile.mkdtemp(prefix="gc-"))
    impossible = {}
    try:
        with Capsule.create(home) as capsule:
            subject = Subject(capsule)
            assert subject.tell(PRELUDE + "spaces = {}") == "None"
            for name, (make, _) in REFUSED.items():
                answer = subject.tell(f"exec({make!r}, spaces.setdefault({name!r}, dict(globals())))")
                if answer != "None":
                    impossible[name] = answer
            yield [refusal["what"] for refusal in capsule.inspect()["refusals"]], impossible
    finally:
        shutil.rmtree(home)


@pytest.mark.parametrize("name", REFUSED)
def test_a_kind_of_state_is_refused_by_its_name(refusals, name):
    found, impossible = refusals
    if name in impossible:
        pytest.skip(f"cannot be made here: {impossible[name][:60]}")
    assert [what for what in found if REFUSED[name][1] in what], found


def test_a_datagram_that_leaves_in_a_moment_is_not_refused(monkeypatch):
    left = iter([700, 700, 0])
    monkeypatch.setattr(syscalls, "unsent_bytes", lambda fd: next(left))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_UDP) as sock:
        assert sockets.refusal(sock, 0) == ""


def test_a_protocol_above_tcp_is_refused_by_its_name():
    class Encrypted(socket.socket):
        def getsockopt(self, level, number, *buffer):
            return b"tls\0\0" if (level, number) == (6, 31) else super().getsockopt(level, number, *buffer)

    with Encrypted(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as sock:
        assert sockets.refusal(sock, 0) == "a TCP socket with another protocol of Linux above it (TCP_ULP tls)"


EMPTY = "an empty message in a unix socket that is not received yet"


@pytest.mark.parametrize("kind", ["SOCK_DGRAM", "SOCK_SEQPACKET"])
@pytest.mark.parametrize(
    ("words", "end", "empty"),
    [
        (["one", "two"], "", False),
        (["one", "two"], "a.close()", False),
        ([], "a.close()", False),
        (["one", "", "three"], "", True),
        (["one", "", "three"], "a.close()", True),
        (["", "two"], "a.close()", True),
        (["one", ""], "", True),
        (["x" * 70_000, "two"], "", False),
    ],
)
def test_an_empty_message_is_found_wherever_it_is_until_it_is_received(capsule, kind, words, end, empty):
    subject = Subject(capsule)
    subject.tell(f"{PRELUDE}a, b = socket.socketpair(socket.AF_UNIX, socket.{kind})")
    subject.tell(f"for word in {words}: a.send(word.encode())\n{end}")
    for _ in range(2):  # Linux shows it but once
        found = [refusal["what"].partition(" (")[0] for refusal in capsule.inspect()["refusals"]]
        assert found == ([EMPTY] if empty else [])
    received = subject.tell(f"answer = [b.recv(100_000).decode() for word in {words}], b.getsockopt(1, 42)")
    assert received == repr((words, -1))
    assert capsule.inspect()["refusals"] == []


@pytest.mark.skipif(not ROOT, reason="an ordinary user may mount nothing")
def test_what_the_host_mounts_is_not_taken_for_the_kernels(directory):
    shared, place = directory / "shared", directory / "shared" / "later"
    place.mkdir(parents=True)
    mount("--bind", shared, shared)
    try:
        mount("--make-shared", shared)
        with Capsule.create(directory) as capsule:
            Subject(capsule)
            mount("-t", "tmpfs", "tmpfs", place)
            seen = Path(f"/proc/{capsule.host_pid}/mountinfo")
            assert f" {place} " in seen.read_text()
            mount("--make-private", place)  # as runtimes of containers do: nothing says any more where it came from
            assert capsule.inspect()["refusals"] == []
    finally:
        subprocess.run(["umount", "--recursive", shared], check=True)


def mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *arguments], check=True)


@pytest.mark.parametrize(
    ("line", "own"),
    [
        ("50 20 0:50 / /made rw - tmpfs tmpfs rw", True),
        ("50 20 0:50 / /arrived rw master:1 - tmpfs tmpfs rw", False),
        ("50 20 0:50 / /both rw shared:7 master:1 - tmpfs tmpfs rw", False),
        ("50 20 0:50 / /shared rw shared:7 - tmpfs tmpfs rw", True),
        ("30 20 0:30 / /net/home/ada rw - nfs4 server:/home/ada rw", False),
        ("50 30 0:51 / /net/home/ada rw - nfs4 server:/home/ada rw", False),
        ("50 20 0:51 / /mnt rw - nfs4 server:/home/ada rw", True),
        ("50 20 0:60 / /of_host rw - tmpfs tmpfs rw", False),
        ("50 20 0:60 /part /of_host rw - tmpfs tmpfs rw", True),
    ],
)
def test_a_mount_of_the_kernel_is_distinguished_from_others(line, own):
    before = ["20 1 8:1 / / rw shared:1 - ext4 /dev/sda rw", "30 20 0:30 / /net rw - nfs4 server:/ rw"]
    outside = [*before, "77 20 0:60 / /of_host rw - tmpfs tmpfs rw"]
    now, was, host = ("\n".join(lines) for lines in ([*before, line], before, outside))
    found = process_state.own_mounts(*map(procfs.parse_mounts, (now, was, host)))
    assert [mount.point for mount in found] == ([line.split()[4]] if own else [])


#: What only a stopped process shows.
REFUSED_STOPPED: dict[str, tuple[str, str]] = {
    "exit status": (
        "pid = os.fork()\nif pid == 0: os._exit(128)\nos.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)",
        "with the exit status 128",
    ),
    "program in memory": (
        "fd = os.memfd_create('program'); os.write(fd, open('/bin/sleep', 'rb').read())\n"
        "pid = os.fork()\nif pid == 0: os.execve(fd, ['sleep', '1000'], {})\n"
        "while 'memfd' not in os.readlink(f'/proc/{pid}/exe'): pass",
        "a program that runs from memory (memfd: program, process ",
    ),
    "session keyring": ("call(250, 1, None)", "a session keyring of its own"),
    "process keyring": ("call(248, b'user', b'gpu-ckpt', b'x', 1, -2)", "a keyring of its own"),
    "thread keyring": ("call(248, b'user', b'gpu-ckpt', b'x', 1, -1)", "a keyring of a thread"),
    "protection key": ("key = call(330, 0, 0); call(329, memory(), 4096, 3, key)", "memory with a protection key"),
    "segments": ("call(154, 1, struct.pack('IIII', 5, 0x1000, 0xFFFFF, 0x51), 16)", "segments of its own (modify_ldt)"),
    "Landlock": (
        "prctl(38, 1); fd = call(444, struct.pack('Q', 1), 8, 0); call(446, fd, 0); os.close(fd)",
        "a confinement by Landlock",
    ),
    "Landlock of a thread": (
        "def confine():\n    prctl(38, 1)\n    fd = call(444, struct.pack('Q', 1 << 13), 8, 0)\n"
        "    call(446, fd, 0)\n    os.close(fd)\nin_thread(confine)",
        "a confinement by Landlock",
    ),
}
if ROOT:
    REFUSED_STOPPED["Landlock without no_new_privs"] = (
        "fd = call(444, struct.pack('Q', 1 << 13), 8, 0); call(446, fd, 0); os.close(fd)",
        "a confinement by Landlock",
    )
else:
    REFUSED_STOPPED["user keyring"] = ("call(248, b'user', b'gpu-ckpt', b'x', 1, -4)", "keys in the user's keyring")


@pytest.mark.parametrize("name", REFUSED_STOPPED)
def test_what_only_a_stopped_process_shows_is_refused_by_its_name(criu, capsule, home, name):
    subject = Subject(capsule)
    make, words = REFUSED_STOPPED[name]
    answer = subject.tell(PRELUDE + make)
    if answer != "None":
        pytest.skip(f"cannot be made here: {answer[:60]}")
    criu.dump(capsule, image(home), timeout=60)
    assert [refusal["what"] for refusal in capsule.inspect()["refusals"]] == [next_of(words, capsule)]
    capsule.resume_processes()
    assert subject.tell("answer = 41 + 1") == "42"


@pytest.fixture
def capsule_of_a_login_that_has_ended(directory):
    """A capsule whose session keyring is revoked, as that of a server is when its user has logged out."""

    def create() -> Capsule:
        syscalls.call("keyctl", 1, 0)  # a session keyring of this thread
        syscalls.call("keyctl", 3, -3)  # revoked
        with pytest.raises(OSError):
            syscalls.call("keyctl", 0, -3)
        return Capsule.create(directory)

    with ThreadPoolExecutor(1) as thread, thread.submit(create).result() as capsule:
        yield capsule


@pytest.mark.parametrize("name", [None, *(name for name in REFUSED_STOPPED if "keyring" in name)])
def test_keys_are_seen_where_a_login_has_ended(criu, capsule_of_a_login_that_has_ended, home, name):
    capsule = capsule_of_a_login_that_has_ended
    subject = Subject(capsule)
    if name is not None:
        assert subject.tell(PRELUDE + REFUSED_STOPPED[name][0]) == "None"
    criu.dump(capsule, image(home), timeout=60)
    found = [refusal["what"] for refusal in capsule.inspect()["refusals"]]
    assert found == ([] if name is None else [next_of(REFUSED_STOPPED[name][1], capsule)])


def test_how_a_child_ended_comes_back_or_is_refused(criu, capsule, home):
    subject = Subject(capsule)
    subject.tell(
        f"{PRELUDE}children = []\n"
        "for number in (9, 15, 0):\n"
        "    pid = os.fork()\n"
        "    if pid == 0: signal.pause() if number else os._exit(7)\n"
        "    if number: os.kill(pid, number)\n"
        "    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT); children.append(pid)"
    )
    ask = "answer = [os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)[3:] for pid in children]"
    before = subject.tell(ask)
    inner, pipes = capsule.inner_pid, capsule.pipes
    criu.dump(capsule, image(home), timeout=60)
    assert capsule.inspect()["refusals"] == []
    capsule.close()
    with Capsule.create(home) as second:
        criu.restore(second, image(home), pid=inner, pipes=pipes, timeout=60)
        assert subject.tell(ask) == before
        shutil.rmtree(image(home))
        criu.dump(second, image(home), timeout=60)
        found = [refusal["what"] for refusal in second.inspect()["refusals"]]
        pipes = second.pipes
        if found:
            assert not ROOT
            assert {" ".join(what.split()[5:]) for what in found} == {"of which Linux does not tell how it ended"}
            return
    with Capsule.create(home) as third:
        criu.restore(third, image(home), pid=inner, pipes=pipes, timeout=60)
        assert subject.tell(ask) == before


#: Signals that end a process by themselves, and can be sent to one.
ENDING = set(range(1, 65)) - {17, 18, 19, 20, 21, 22, 23, 28, 32, 33}


def test_the_ends_of_children_that_are_not_refused_come_back(criu, capsule, home):
    """Every exit status and signal, of children that nobody has waited for."""
    subject = Subject(capsule)
    subject.tell(
        f"{PRELUDE}resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); children = dict()\n"
        f"for how in [*range(-64, 0), *range(256)]:\n"
        f"    if how < 0 and -how not in {ENDING}: continue\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        if how >= 0: os._exit(how)\n"
        "        if -how not in (9, 19): signal.signal(-how, signal.SIG_DFL)\n"
        "        os.kill(os.getpid(), -how); signal.pause()\n"
        "    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT); children[how] = pid"
    )
    ask = "answer = {how: list(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)[3:]) for how, pid in children.items()}"
    before, pids = ast.literal_eval(subject.tell(ask)), ast.literal_eval(subject.tell("answer = children"))
    inner, pipes = capsule.inner_pid, capsule.pipes
    criu.dump(capsule, image(home), timeout=60)
    refused = " ".join(refusal["what"] for refusal in capsule.inspect()["refusals"])
    capsule.close()
    with Capsule.create(home) as second:
        criu.restore(second, image(home), pid=inner, pipes=pipes, timeout=60)
        after = ast.literal_eval(subject.tell(ask))
    changed = [how for how in before if before[how] != after[how]]
    assert [how for how in before if f"(process {pids[how]})" in refused] == changed
    assert changed == [-64, *range(128, 256)]


def next_of(words: str, capsule: Capsule) -> str:
    return next(refusal["what"] for refusal in capsule.inspect()["refusals"] if words in refusal["what"])


def test_an_administrator_may_allow_a_kernel_to_lose_its_confinement(criu, capsule, home):
    subject = Subject(capsule)
    subject.tell(PRELUDE + REFUSED_STOPPED["Landlock"][0])
    criu.dump(capsule, image(home), timeout=60)
    assert capsule.inspect(allow_unconfined=True)["refusals"] == []


@contextlib.contextmanager
def stopped_child(code):
    """A process of this one's own that has run ``code``, all of its threads in a group stop."""
    argv = [sys.executable, "-I", "-S", "-c", f"{PRELUDE}{code}\nos.kill(os.getpid(), signal.SIGSTOP)"]
    with subprocess.Popen(argv) as child:
        try:
            os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            assert child.poll() is None
            yield child.pid
        finally:
            child.kill()


@pytest.mark.skipif(not ROOT, reason="only root may change its user")
@pytest.mark.parametrize("confined", [False, True])
def test_a_process_that_changed_its_user_is_refused_only_where_it_is_confined(confined):
    confine = REFUSED_STOPPED["Landlock without no_new_privs"][0] + "\n" if confined else ""
    change = "os.setresgid(1000, 1000, 1000); os.setresuid(1000, 1000, 1000); prctl(4, 1)"
    with stopped_child(confine + change) as pid:
        found = process_state.inspect(pid, stopped=True)
    expected = ["a confinement by Landlock"] if confined else []
    assert [refusal["what"] for refusal in found.refusals] == expected


def forbid(monkeypatch, name, unless):
    """Have Linux forbid system call ``name``, where ``unless`` does not say of its arguments that it may be made."""
    real = syscalls.call

    def call(made, *arguments):
        if made == name and not unless(*arguments):
            raise PermissionError(errno.EPERM, f"{name}: {os.strerror(errno.EPERM)}")
        return real(made, *arguments)

    monkeypatch.setattr(syscalls, "call", call)


@pytest.mark.parametrize("name", ["kcmp", "ioprio_get"])
def test_a_call_that_the_host_forbids_to_all_refuses_no_kernel(monkeypatch, name):
    with stopped_child("in_thread(lambda: None)") as pid:
        forbid(monkeypatch, name, unless=lambda *arguments: False)
        found = process_state.inspect(pid, stopped=False)
    assert found.refusals == []
    assert found.unasked == [name]
    assert found.inventory[str(pid)]["threads"]


SMAPS = """7f0000000000-7f0000001000 r--s 00000000 00:01 7                          NAME
Size:                  4 kB
VmFlags: FLAGS
"""


@pytest.mark.parametrize(
    ("name", "flags", "refused"),
    [
        ("/usr/bin/python", "rd ex mr mw me dw sd", []),
        ("/usr/lib/libc.so", "rd ex mr mw me bt", []),
        ("/pmem/data", "rd wr sh mr mw me ms mm sf sd", []),
        ("/[aio] (deleted)", "rd wr sh mr mw me ms de sd", []),
        ("/dev/gadget", "rd wr sh mr mw me ms mm", ["memory of a device"]),
        ("", "rd wr mr mw me ac mm", ["memory of a device"]),
        ("/usr/bin/python", "rd mr zz", ["memory with the flag 'zz' (/proc/PID/smaps)"]),
    ],
)
def test_the_flags_of_a_mapping_are_judged_by_what_is_mapped(monkeypatch, name, flags, refused):
    real = procfs.read
    smaps = SMAPS.replace("NAME", name).replace("FLAGS", flags)
    monkeypatch.setattr(procfs, "read", lambda path: smaps if path.endswith("/smaps") else real(path))
    monkeypatch.setattr(process_state._Process, "injected", lambda *_: None)
    found = process_state.inspect(os.getpid(), stopped=True)
    assert [each["what"] for each in found.refusals if each["what"].startswith("memory")] == refused
    assert found.inventory[str(os.getpid())]["mappings"] == [[0x7F0000000000, 0x7F0000001000]]


def test_an_inspection_of_a_socket_keeps_its_peek_offset():
    near, far = socket.socketpair()
    with near, far:
        far.setsockopt(socket.SOL_SOCKET, 16, 1)  # SO_PASSCRED
        far.setsockopt(socket.SOL_SOCKET, 42, 3)  # SO_PEEK_OFF
        near.send(b"abcdef")
        assert "SCM_CREDENTIALS" in sockets.refusal(far, 0)
        assert far.getsockopt(socket.SOL_SOCKET, 42) == 3


def test_a_descriptor_that_is_no_socket_is_not_kept(tmp_path):
    with open(tmp_path / "file", "w") as file:
        pidfd, before = os.pidfd_open(os.getpid()), len(os.listdir("/proc/self/fd"))
        try:
            with pytest.raises(OSError, match="Socket operation"):
                syscalls.socket_of(pidfd, file.fileno())
            assert len(os.listdir("/proc/self/fd")) == before
        finally:
            os.close(pidfd)


def test_a_call_that_is_forbidden_about_one_process_is_named(monkeypatch):
    with stopped_child("in_thread(lambda: None)") as pid:
        forbid(monkeypatch, "kcmp", unless=lambda *arguments: arguments[0] == os.getpid())
        (refusal,) = process_state.inspect(pid, stopped=False).refusals
    assert "(kcmp: Operation not permitted)" in refusal["what"]
    assert "DUMPABLE" not in str(refusal)


def test_a_death_signal_is_not_in_the_image(criu, capsule, home):
    subject = Subject(capsule)
    subject.tell(PRELUDE + f"prctl(1, {int(signal.SIGTERM)})")
    criu.dump(capsule, image(home), timeout=60)
    assert tasks.remove_death_signals(image(home)) == {capsule.inner_pid: signal.SIGTERM}
    assert tasks.remove_death_signals(image(home)) == {}


def test_a_connection_that_nobody_outside_has_accepted_is_seen_in_the_image(criu, capsule, home):
    subject = Subject(capsule)
    subject.tell(f"{PRELUDE}a, b = socket.socketpair()")
    criu.dump(capsule, image(home), timeout=60)
    assert not tasks.has_external_peer(image(home))
    capsule.resume_processes()
    shutil.rmtree(image(home))
    with socket.socket(socket.AF_UNIX) as outside:
        outside.bind(str(home / "outside"))
        outside.listen()
        subject.tell(f"c = socket.socket(socket.AF_UNIX); c.connect({str(home / 'outside')!r})")
        criu.dump(capsule, image(home), timeout=60)
        assert tasks.has_external_peer(image(home))


def test_what_a_dump_lacks_is_named(criu, capsule, home):
    Subject(capsule)
    criu.dump(capsule, image(home), timeout=60)
    inventory = capsule.inspect()["inventory"]
    mine = inventory[str(capsule.inner_pid)]
    assert tasks.missing(image(home), inventory) == []
    at = max(end for _, end in mine["mappings"])
    mine["threads"].append(77)
    mine["descriptors"].append(88)
    mine["mappings"].append([at + 4096, at + 8192])
    pid = capsule.inner_pid
    assert tasks.missing(image(home), {**inventory, "99": mine}) == [
        f"thread 77 of process {pid}",
        f"descriptor 88 of process {pid}",
        f"memory at {at + 4096:#x} of process {pid}",
        "process 99",
    ]


def test_a_plain_process_has_nothing_to_be_noted(criu, capsule, home):
    Subject(capsule)
    assert capsule.inspect()["notes"] == {}
    criu.dump(capsule, image(home), timeout=60)
    state = capsule.inspect()
    assert state["notes"] == {}
    assert state["refusals"] == []


def test_what_this_machine_lacks_is_named_and_what_a_process_must_not_run_without_keeps_it_from_running(
    criu, capsule, home
):
    subject = Subject(capsule)
    subject.tell(PRELUDE)
    inner, pipes = capsule.inner_pid, capsule.pipes
    criu.dump(capsule, image(home), timeout=60)
    notes = capsule.inspect()["notes"].get(str(inner), {})
    capsule.close()
    lacking = {**notes, "threads": {str(inner): {"affinity": [4000]}}}
    with Capsule.create(home) as second:
        restored = criu.restore(second, image(home), pid=inner, pipes=pipes, timeout=60, notes={str(inner): lacking})
        assert [text.split(":")[0] for text in restored.changed] == [
            f"CPU affinity [4000] of thread {inner} (process {inner})"
        ]
        assert subject.tell("answer = 6 * 7") == "42"
    without = {**notes, "threads": {str(inner): {"speculation": [[99, 1]]}}}  # a misfeature that no Linux knows
    with Capsule.create(home) as third, pytest.raises(CriuError, match="speculation control of thread"):
        criu.restore(third, image(home), pid=inner, pipes=pipes, timeout=60, notes={str(inner): without})


@pytest.mark.parametrize("number_is_reused", [False, True])
def test_a_descriptor_that_is_closed_in_the_middle_of_an_inspection_is_no_finding(monkeypatch, number_is_reused):
    ours, theirs = socket.socketpair()
    number = ours.detach()

    def closed_before(pidfd: int, wanted: int) -> int:
        if wanted == number and closing:
            closing.clear()
            os.close(number)
            if number_is_reused:
                os.dup2(null.fileno(), number)
        return original(pidfd, wanted)

    closing, original = [True], syscalls.pidfd_getfd
    monkeypatch.setattr(syscalls, "pidfd_getfd", closed_before)
    with theirs, open("/dev/null") as null:
        found = process_state.inspect(os.getpid(), stopped=False)
        assert not closing, "the descriptor was inspected"
        if number_is_reused:
            os.close(number)
    assert [each["what"] for each in found.refusals if "cannot be reached" in each["what"]] == []
