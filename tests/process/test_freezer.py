"""Threads of real processes are stopped and continued: they compute, allocate, start and end, wait, are stopped."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from waiting import until

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.capsule import criu_guard
from jupyter_gpu_ckpt.lifecycle import preflight
from jupyter_gpu_ckpt.process.freezer import _LIBZMQ, _SHARED_CODE, FrozenThreads, _Shared
from jupyter_gpu_ckpt.process.ptrace import Tracee
from jupyter_gpu_ckpt.process.syscalls import NUMBERS

#: Each kind of thread counts its beats in a word of its own of a file, and signals are counted in the last one.
KINDS = ("computes", "allocates", "hashes", "comes", "waits", "locks")
SIGNALS = len(KINDS)
SUBJECT = """
import ctypes, fcntl, hashlib, mmap, os, signal, struct, sys, threading, time

PR_SET_PTRACER = 0x59616D61
ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(-1 & 2**64 - 1), 0, 0, 0)  # the tracer need not be a parent
file, lock, kinds = sys.argv[1], sys.argv[2], sys.argv[3].split(",")
words = memoryview(mmap.mmap(os.open(file, os.O_RDWR), 64)).cast("Q")
block = b"x" * 100_000

def loop(place, step):
    def run():
        while True:
            step()
            words[place] += 1
    threading.Thread(target=run, daemon=True).start()

def computes():
    sum(k * k for k in range(300))

def allocates():
    [bytes(800 + 37 * k) for k in range(100)]

def hashes():
    hashlib.sha256(block).digest()

def comes(place=3):
    words[place] += 1
    threading.Thread(target=comes, daemon=True).start()

def waits():
    time.sleep(0.002)

def locks():
    with open(lock) as held:
        fcntl.flock(held, fcntl.LOCK_EX)

reading, writing = os.pipe()
os.set_blocking(writing, False)
signal.signal(signal.SIGRTMIN, lambda *_: None)
signal.set_wakeup_fd(writing, warn_on_full_buffer=True)  # a byte for each that arrives

def counts():
    while True:
        words[6] += len(os.read(reading, 4096))

threading.Thread(target=counts, daemon=True).start()
for place, step in enumerate((computes, allocates, hashes, comes, waits, locks)):
    for _ in range(kinds.count(step.__name__)):
        step() if step is comes else loop(place, step)
if len(sys.argv) > 4:
    ctypes.CDLL(sys.argv[5]).begin_thread(sys.argv[4].encode())
# more
print("goes", flush=True)
sys.stdin.read()
os._exit(0)
"""

#: A library with a thread of its own, as the CUDA driver has, which Python did not begin.  It publishes which it is, as
#: the library for device memory does (`own_threads.c`): that says something in a file of that library's name.
THREAD = """
#define _GNU_SOURCE
#include <poll.h>
#include <pthread.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
struct { char mark[16]; int tids[256]; } own_threads = {.mark = "gpu-ckpt thread"};
static char called[16];
static volatile int is_called;
static void *waits(void *unused) {
    own_threads.tids[7] = syscall(SYS_gettid);
    pthread_setname_np(pthread_self(), called);
    is_called = 1;
    for (;;) poll(NULL, 0, -1);
    return unused;
}
void begin_thread(const char *name) {
    pthread_t thread;
    strncpy(called, name, sizeof called - 1);
    pthread_create(&thread, NULL, waits, NULL);
    while (!is_called) usleep(100);
}
"""


def library(path: Path, source: str) -> Path:
    """Compile ``source`` to a library at ``path``."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler on this machine")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", path], input=source, text=True, check=True
    )
    return path


FREEZES = """
import sys, time
from jupyter_gpu_ckpt.process.freezer import FrozenThreads
frozen = FrozenThreads(int(sys.argv[1]))
frozen.freeze_all(time.monotonic() + 60)
print(len(frozen._frozen), flush=True)
sys.stdin.read()
"""


class Process:
    """The running subject."""

    def __init__(self, process: subprocess.Popen[str], words: mmap.mmap, lock: Path) -> None:
        self.process = process
        self.pid = process.pid
        self.lock = lock
        self._words = words

    def beats(self, place: int) -> int:
        return int(struct.unpack_from("=Q", self._words, 8 * place)[0])

    def states(self) -> list[str]:
        """The letters of proc(5): R and S run or wait, T is stopped, t held by a tracer."""
        found = []
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found.append((task / "stat").read_text().rpartition(")")[2].split()[0])
        return found

    def states_by_name(self) -> dict[str, str]:
        """The same, by the threads' names; of several of one name one."""
        lines = [(task / "stat").read_text() for task in Path(f"/proc/{self.pid}/task").iterdir()]
        parts = [line.partition("(")[2].rpartition(")") for line in lines]
        return {name: rest.split()[0] for name, _, rest in parts}

    def frozen(self, seconds: float = 30, *, insist: bool = False) -> FrozenThreads:
        frozen = FrozenThreads(self.pid)
        frozen.freeze_all(time.monotonic() + seconds, insist=insist)
        return frozen

    def continues(self, *kinds: str) -> None:
        before = {kind: self.beats(KINDS.index(kind)) for kind in kinds}
        for kind in kinds:
            until(lambda: self.beats(KINDS.index(kind)) > before[kind] + 2, f"{kind} continues")  # noqa: B023
        until(lambda: "t" not in self.states(), "nobody is held")


@contextlib.contextmanager
def running(
    directory: Path, *kinds: str, name: str = "", of: str = "libthread.so", more: str = ""
) -> Iterator[Process]:
    """The subject; ``name``: of a thread that the library ``of`` begins; ``more``: what else it does before it goes."""
    file, lock = directory / "words", directory / "lock"
    file.write_bytes(bytes(64))
    lock.touch()
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            SUBJECT.replace("# more\n", more),
            str(file),
            str(lock),
            ",".join(kinds),
            *([name, str(library(directory / of, THREAD))] if name else []),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "goes\n"
        with open(file, "r+b") as opened, mmap.mmap(opened.fileno(), 64) as words:
            yield Process(process, words, lock)
    finally:
        process.kill()
        process.communicate()


def stays_at_rest(subject: Process) -> None:
    """All are held; and who was held cannot have counted."""
    before = [subject.beats(place) for place in range(SIGNALS)]
    assert set(subject.states()) == {"t"}
    assert [subject.beats(place) for place in range(SIGNALS)] == before


@pytest.mark.parametrize(
    "kinds",
    [("computes",) * 3, ("allocates",) * 3, ("hashes",) * 3, ("comes",) * 3, ("waits",) * 20, KINDS[:5]],
    ids=["computing", "allocating", "in libcrypto", "coming and going", "waiting", "of all kinds"],
)
def test_all_threads_are_frozen_and_run_on(tmp_path, kinds):
    with running(tmp_path, *kinds) as subject:
        for _ in range(8):
            frozen = subject.frozen()
            assert len(frozen._frozen) >= 2
            stays_at_rest(subject)
            frozen.release()
            subject.continues(*set(kinds))


@pytest.mark.torture
def test_all_threads_are_stopped_a_thousand_times(tmp_path):
    with running(tmp_path, *KINDS[:5] * 3) as subject:
        for _ in range(1000):
            frozen = subject.frozen()
            stays_at_rest(subject)
            frozen.release()
        subject.continues(*KINDS[:5])


def test_signals_are_not_lost(tmp_path):
    """Signals that queue: sent before, while threads are being stopped, and to stopped ones."""
    sent = 0
    with running(tmp_path, "computes", "waits", "comes") as subject:
        for _ in range(10):
            for _ in range(5):
                os.kill(subject.pid, signal.SIGRTMIN)
            frozen = subject.frozen()
            for _ in range(5):
                os.kill(subject.pid, signal.SIGRTMIN)
            stays_at_rest(subject)
            frozen.release()
            sent += 10
        until(lambda: subject.beats(SIGNALS) == sent, f"{sent} signals arrive")


def test_a_thread_that_cannot_be_frozen(tmp_path):
    """The thread is in a system call of which nobody knows what it holds; all others continue, and so does this one."""
    with running(tmp_path, "computes", "waits", "comes", "locks") as subject:
        with open(subject.lock) as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            waiting = f"-> FLOCK  ADVISORY  WRITE {subject.pid} "
            until(lambda: waiting in Path("/proc/locks").read_text(), "it waits for the lock")
            with pytest.raises(TimeoutError):
                subject.frozen(0.2)
            subject.continues("computes", "waits", "comes")
        subject.continues("locks")


def test_a_thread_without_a_lock_of_memory_is_stopped_where_there_is_no_other_way(tmp_path):
    with running(tmp_path, "computes", "allocates", "locks") as subject:
        with open(subject.lock) as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            waiting = f"-> FLOCK  ADVISORY  WRITE {subject.pid} "
            until(lambda: waiting in Path("/proc/locks").read_text(), "it waits for the lock")
            frozen = subject.frozen(2, insist=True)
            stays_at_rest(subject)
            frozen.release()
        subject.continues("computes", "allocates", "locks")


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("cuda00001400006", "libthread.so"),
        ("cuda0000240000a", "libthread.so"),
        ("cuda-EvtHandlr", "libcuda.so.1"),
        ("gpu-ckpt-fast", "_fastpath.so"),
        ("gpu-ckpt-copy", "_fastpath-0123456789abcdef.so"),
    ],
)
def test_threads_of_the_driver_and_of_the_library_run_on(tmp_path, name, of):
    with running(tmp_path, "computes", name=name, of=of) as subject:
        frozen = subject.frozen()
        assert subject.states_by_name()[name] != "t"
        assert set(subject.states_by_name().values()) > {"t"}
        frozen.release()


@pytest.mark.parametrize("name", ["cuda00001400006", "cuda-EvtHandlr", "gpu-ckpt-copy", "ZMQbg/IO/0", "cuda-of-a-user"])
def test_threads_that_the_program_began_are_frozen_whatever_they_are_called(tmp_path, name):
    """A program that takes a name of the driver's would run on, and meet memory that is not there."""
    takes = f"""
def takes(sleeps):
    ctypes.CDLL(None).prctl(15, {name!r}.encode())
    words[5] += 1
    while sleeps: time.sleep(1000)
threading.Thread(target=takes, args=(True,), daemon=True).start()
while not words[5]: time.sleep(0.001)
takes(False)
"""
    with running(tmp_path, "computes", more=takes) as subject:
        for freeze in ("freeze_all", "freeze_callers"):
            frozen = FrozenThreads(subject.pid)
            getattr(frozen, freeze)(time.monotonic() + 30)
            stays_at_rest(subject)
            frozen.release()
        subject.continues("computes")


@pytest.mark.parametrize(
    "name", ["cuda0", "cudaworker", "gpu-ckpt-mine", "gpu-ckpt-away", "gpu-ckpt-fast", "gpu-ckpt-copy"]
)
def test_threads_of_other_libraries_are_frozen_that_are_called_nearly_so_or_as_the_library_s(tmp_path, name):
    with running(tmp_path, "computes", name=name) as subject:
        frozen = subject.frozen()
        stays_at_rest(subject)
        frozen.release()


@pytest.mark.parametrize("name", ["cuda-of-a-user", "cuda0000240"])
def test_a_thread_that_may_be_a_driver_s_of_another_release(tmp_path, name):
    with running(tmp_path, "computes", name=name) as subject:
        with pytest.raises(OSError, match="may be the CUDA driver's"):
            subject.frozen()
        subject.continues("computes")
        frozen = subject.frozen(insist=True)
        stays_at_rest(subject)
        frozen.release()


def kill_who_stopped(subject: Process, source: str) -> None:
    """Have another process, which runs ``source``, stop all threads, and kill it."""
    other = subprocess.Popen(
        [sys.executable, "-c", source, str(subject.pid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        assert int(other.stdout.readline()) >= 5
        stays_at_rest(subject)
    finally:
        other.kill()
        other.communicate()


def test_the_process_that_stopped_the_threads_is_killed(tmp_path):
    with running(tmp_path, *KINDS[:5]) as subject:
        kill_who_stopped(subject, FREEZES)
        subject.continues(*KINDS[:5])


def test_the_init_that_stopped_the_threads_is_killed(tmp_path):
    """All processes of its namespace end with it, but its tracees would run until then."""
    with running(tmp_path, *KINDS[:5]) as subject:
        kill_who_stopped(subject, f"import os\nos.getpid = lambda: 1\n{FREEZES}")
        assert subject.process.wait(60) == -signal.SIGKILL


def test_the_process_is_killed(tmp_path):
    with running(tmp_path, *KINDS[:5]) as subject:
        frozen = subject.frozen()
        subject.process.kill()
        frozen.release()
        assert subject.process.wait(60) == -signal.SIGKILL, "no thread of it is left as our tracee"
        with pytest.raises(OSError):
            subject.frozen()


@pytest.mark.parametrize("continued", ["meanwhile", "later"])
def test_a_stopped_process_stays_stopped(tmp_path, continued):
    with running(tmp_path) as subject:
        calls = list(Path(f"/proc/{subject.pid}/task").glob("*/syscall"))
        until(lambda: {call.read_text().split()[0] for call in calls} == {str(NUMBERS["read"])}, "all wait")
        os.kill(subject.pid, signal.SIGSTOP)
        until(lambda: set(subject.states()) == {"T"}, "it is stopped")
        frozen = subject.frozen()
        stays_at_rest(subject)
        if continued == "meanwhile":
            os.kill(subject.pid, signal.SIGCONT)
            stays_at_rest(subject)
        frozen.release()
        if continued == "later":
            until(lambda: set(subject.states()) == {"T"}, "it is stopped again")
            os.kill(subject.pid, signal.SIGCONT)
        os.kill(subject.pid, signal.SIGRTMIN)
        until(lambda: subject.beats(SIGNALS) == 1, "it continues")


def test_a_process_that_is_stopped_where_it_cannot_be_frozen(tmp_path):
    with running(tmp_path, "locks") as subject:
        with open(subject.lock) as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            waiting = f"-> FLOCK  ADVISORY  WRITE {subject.pid} "
            until(lambda: waiting in Path("/proc/locks").read_text(), "it waits for the lock")
            os.kill(subject.pid, signal.SIGSTOP)
            until(lambda: set(subject.states()) == {"T"}, "it is stopped")
            with pytest.raises(TimeoutError):
                subject.frozen(0.2)
            until(lambda: set(subject.states()) == {"T"}, "it is stopped still")
            os.kill(subject.pid, signal.SIGCONT)
        subject.continues("locks")


def test_a_process_that_is_stopped_while_it_is_frozen(tmp_path):
    with running(tmp_path, "computes", "waits") as subject:
        frozen = subject.frozen()
        os.kill(subject.pid, signal.SIGSTOP)
        stays_at_rest(subject)
        frozen.release()
        until(lambda: set(subject.states()) == {"T"}, "it is stopped")
        os.kill(subject.pid, signal.SIGCONT)
        subject.continues("computes", "waits")


@pytest.mark.parametrize(
    ("path", "shared"),
    [
        ("/usr/lib/x86_64-linux-gnu/libc.so.6", True),
        ("/lib/libc-2.31.so (deleted)", True),
        ("/lib64/ld-linux-x86-64.so.2", True),
        ("/lib/ld-musl-x86_64.so.1", True),
        ("/usr/lib/libcuda.so.580.159.03", True),
        ("/usr/lib/libcudadebugger.so.1", True),
        ("/x/nvidia/cu13/lib/libcudart.so.13", True),
        ("/x/cupy.libs/libcudart-2f1a8c1d.so.12", True),
        ("/usr/lib/libtcmalloc_minimal.so.4", True),
        ("/x/jupyter_gpu_ckpt/cuda/native/_fastpath.abi3.so", True),
        ("/usr/lib/libcrypto.so.3", False),
        ("/x/nvidia/cu13/lib/libcublasLt.so.13", False),
        ("/x/nvidia/cudnn/lib/libcudnn.so.9", False),
        ("/x/lib/libmkl_avx512.so.2", False),
        ("/usr/lib/libm.so.6", False),
        ("/x/torch/lib/libtorch_cpu.so", False),
        ("/usr/bin/python3.11", False),
        ("[vdso]", True),
    ],
)
def test_code_in_which_nobody_is_frozen(path, shared):
    assert bool(_SHARED_CODE.search(path)) is shared


#: What stands for the driver's library: waits that it makes itself, and through the C library.
DRIVER = """
#define _GNU_SOURCE
#include <pthread.h>
#include <semaphore.h>
#include <poll.h>
#include <stddef.h>
static sem_t never;
void init(void) { sem_init(&never, 0, 0); }
void driver_waits(void) { volatile int here = 0; sem_wait(&never); here = 1; (void)here; }
void driver_polls(void) { volatile int here = 0; poll(NULL, 0, -1); here = 1; (void)here; }
void calls_back(void (*function)(void)) { volatile int here = 0; function(); here = 1; (void)here; }
/* A thread of the driver's own that has called a function of the program: its address is still in a register. */
static void *own_thread(void *function) {
    pthread_setname_np(pthread_self(), "its-own");
#ifdef __x86_64__
    register void *kept __asm__("r12") = function;
#else
    register void *kept __asm__("x19") = function;
#endif
    __asm__ volatile("" : "+r"(kept));
    sem_wait(&never);
    __asm__ volatile("" : : "r"(kept));
    return NULL;
}
static void *serves(void *unused) { for (;;) poll(NULL, 0, -1); return unused; }
void starts_events(void) {
    pthread_t thread;
    pthread_create(&thread, NULL, serves, NULL);
    pthread_setname_np(thread, "cuda-EvtHandlr");
}
void starts_own(void *function) { pthread_t thread; pthread_create(&thread, NULL, own_thread, function); }
"""
IN_DRIVER = """
import ctypes, sys, threading, time

PR_SET_NAME, PR_SET_PTRACER = 15, 0x59616D61
libc = ctypes.CDLL(None)
libc.prctl(PR_SET_PTRACER, ctypes.c_ulong(-1 & 2**64 - 1), 0, 0, 0)
driver = ctypes.CDLL(sys.argv[1])
driver.init()
back = ctypes.CFUNCTYPE(None)(lambda: time.sleep(1000))


def thread(name, function, *arguments):
    def run():
        libc.prctl(PR_SET_NAME, name.encode())
        function(*arguments)

    threading.Thread(target=run, daemon=True).start()


thread("waits-inside", driver.driver_waits)
thread("polls-inside", driver.driver_polls)
thread("called-back", driver.calls_back, back)
thread("waits-outside", threading.Event().wait)
thread("sleeps", time.sleep, 1000)
driver.starts_events()
driver.starts_own(ctypes.cast(ctypes.pythonapi.Py_IncRef, ctypes.c_void_p))
print("goes", flush=True)
sys.stdin.read()
"""


def test_threads_that_wait_inside_the_driver_are_stopped_and_no_others(tmp_path):
    program = [sys.executable, "-c", IN_DRIVER, str(library(tmp_path / "libcuda.so.1", DRIVER))]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        frozen = FrozenThreads(process.pid)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "goes\n"
            subject = Process(process, mmap.mmap(-1, 64), tmp_path)
            names = {"waits-inside", "polls-inside", "its-own"}
            names |= {"called-back", "waits-outside", "sleeps", "cuda-EvtHandlr"}
            until(lambda: all(subject.states_by_name().get(name) == "S" for name in names), "all wait")
            frozen.freeze_waiting_in_driver()
            stopped = {name for name, state in subject.states_by_name().items() if state == "t"}
            assert stopped == {"waits-inside", "polls-inside", "its-own"}
            # A later stop of everybody, and of what is stopped already, leaves nobody out.
            frozen.freeze_all(time.monotonic() + 30)
            assert subject.states_by_name()["cuda-EvtHandlr"] == "S"
            assert set(subject.states_by_name().values()) == {"t", "S"}
            frozen.release()
            until(lambda: "t" not in subject.states(), "all are let go")
        finally:
            frozen.release()  # a traced thread that was killed would wait for us
            process.kill()


def test_threads_that_could_call_the_driver_are_frozen_and_libzmq_s_serve_on(served):
    subject, frozen, answers = served
    for _ in range(3):
        frozen.freeze_callers(time.monotonic() + 30)
        states = subject.states_by_name()
        assert {name for name, state in states.items() if state != "t"} == {"ZMQbg/IO/0", "ZMQbg/Reaper", EVENTS}
        before = subject.beats(KINDS.index("computes"))
        assert accepts(subject.pid)
        assert subject.beats(KINDS.index("computes")) == before
        # For a dump all of them are frozen, and after it, or without it, the callers again.
        frozen.freeze_all(time.monotonic() + 30, insist=True)
        assert {name for name, state in subject.states_by_name().items() if state != "t"} == {EVENTS}
        os.kill(subject.pid, signal.SIGSTOP)
        frozen.release()
        until(lambda: set(subject.states()) == {"T"}, "it is stopped")
        frozen.freeze_again(time.monotonic() + 30)
        os.kill(subject.pid, signal.SIGCONT)
        until(lambda: subject.states_by_name()["ZMQbg/IO/0"] == "S", "libzmq's continue")
        assert accepts(subject.pid)
        assert subject.beats(KINDS.index("computes")) == before
        frozen.release()
        subject.continues("computes", "allocates")
        assert answers() == "yes"


def accepts(pid: int) -> bool:
    """Connect to the subject's unix socket, and disconnect: its libzmq accepts the connection, and closes it."""
    own = (SERVICE.format(pid=pid),)
    connections = len(preflight.open_connections(pid, own))
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(own[0])
        until(lambda: len(preflight.open_connections(pid, own)) == connections + 1, "it accepts")
    until(lambda: len(preflight.open_connections(pid, own)) == connections, "it closes its side")
    return True


EVENTS = "cuda-EvtHandlr"
SERVICE = "/tmp/gc-freezer-{pid}"
#: Added to the subject: a socket of ZMQ, whose requests are answered.
SERVES = """
import zmq
context = zmq.Context()
service = context.socket(zmq.REP)
service.bind(f"ipc:///tmp/gc-freezer-{os.getpid()}")
def serve():
    while True:
        service.recv()
        service.send(b"yes")
threading.Thread(target=serve, daemon=True).start()
"""


@pytest.fixture
def served(tmp_path):
    """The subject with such a socket, its frozen threads, and a function that returns the answer to a request."""
    context = zmq.Context()
    with running(tmp_path, "computes", "allocates", name=EVENTS, more=SERVES) as subject:
        frozen = FrozenThreads(subject.pid)
        path = SERVICE.format(pid=subject.pid)

        def answers() -> str:
            with context.socket(zmq.REQ) as client:
                client.linger = 0
                client.rcvtimeo = 30_000
                client.connect(f"ipc://{path}")
                client.send(b"?")
                return client.recv().decode()

        assert answers() == "yes"
        until(lambda: EVENTS in subject.states_by_name(), "all threads have their names")
        try:
            yield subject, frozen, answers
        finally:
            frozen.release()  # a traced thread that was killed would wait for us
    context.destroy(linger=0)
    Path(path).unlink(missing_ok=True)


def test_callers_that_cannot_be_frozen_all_run_on(served):
    subject, frozen, answers = served
    with Tracee(subject.pid, running=True), pytest.raises(PermissionError):
        frozen.freeze_callers(time.monotonic() + 30)
    subject.continues("computes", "allocates")
    assert answers() == "yes"


def test_callers_stay_frozen_when_their_process_does_not_stop_in_time(served, monkeypatch):
    """The stop for a dump releases them: the program must not run on then, as it would without a suspend."""
    subject, frozen, answers = served
    frozen.freeze_callers(time.monotonic() + 30)
    before = subject.beats(KINDS.index("computes"))
    with monkeypatch.context() as patch:
        patch.setattr(criu_guard, "_all_stopped", lambda _: False)
        with pytest.raises(criu_guard.DoesNotStop):
            criu_guard.stop(subject.pid, time.monotonic() + 0.1, frozen)
    until(lambda: set(subject.states()) == {"S", "t"}, "libzmq's and the driver's continue")
    assert accepts(subject.pid)
    assert subject.beats(KINDS.index("computes")) == before
    frozen.release()
    subject.continues("computes", "allocates")
    assert answers() == "yes"


@pytest.mark.parametrize(
    ("path", "is_libzmq"),
    [
        ("/x/pyzmq.libs/libzmq-a430b4ce.so.5.2.5", True),
        ("/usr/lib/x86_64-linux-gnu/libzmq.so.5.2.4", True),
        ("/usr/lib/x86_64-linux-gnu/libczmq.so.4", False),
        ("/x/zmq/backend/cython/_zmq.abi3.so", False),
    ],
)
def test_code_in_which_no_caller_is_frozen(path, is_libzmq):
    assert bool(_LIBZMQ.search(path)) is is_libzmq


def test_who_stands_in_a_stop_stays_when_it_ends(tmp_path):
    """After a restore all were stopped, and only the driver's threads are to continue."""
    with running(tmp_path, "computes", "allocates", name="cuda-EvtHandlr") as subject:
        os.kill(subject.pid, signal.SIGSTOP)
        until(lambda: set(subject.states()) == {"T"}, "it is stopped")
        frozen = FrozenThreads(subject.pid)
        frozen.freeze_stopped(time.monotonic() + 30)
        os.kill(subject.pid, signal.SIGCONT)
        until(lambda: subject.states_by_name()["cuda-EvtHandlr"] == "S", "the driver's continues")
        before = subject.beats(KINDS.index("computes")), subject.beats(KINDS.index("allocates"))
        assert sorted(set(subject.states())) == ["S", "t"]
        assert before == (subject.beats(KINDS.index("computes")), subject.beats(KINDS.index("allocates")))
        frozen.release()
        subject.continues("computes", "allocates")


def test_a_failure_releases_only_what_it_froze(tmp_path):
    with running(tmp_path, "waits", "locks", name="cuda-EvtHandlr") as subject:
        with open(subject.lock) as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            waiting = f"-> FLOCK  ADVISORY  WRITE {subject.pid} "
            until(lambda: waiting in Path("/proc/locks").read_text(), "it waits for the lock")
            os.kill(subject.pid, signal.SIGSTOP)
            until(lambda: set(subject.states()) == {"T"}, "it is stopped")
            frozen = FrozenThreads(subject.pid)
            frozen.freeze_stopped(time.monotonic() + 30)
            held_before = len(frozen._frozen)
            os.kill(subject.pid, signal.SIGCONT)
            frozen.freeze_all(time.monotonic() + 0.2)
            assert len(frozen._frozen) == held_before, "a frozen thread is not inspected again"
            frozen.release()
            with pytest.raises(TimeoutError):
                frozen.freeze_all(time.monotonic() + 0.2)
            assert len(frozen._frozen) == 0
        subject.continues("waits", "locks")


def test_memory_behind_a_thread_says_nothing_about_it():
    """The descriptor is at the end of the stack; beside it may be anything, the addresses of Python's code as well."""
    libc, size = ctypes.CDLL(None, use_errno=True), 1 << 20
    region = mmap.mmap(-1, size + mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(region))
    code = ctypes.cast(ctypes.pythonapi.Py_IncRef, ctypes.c_void_p).value
    region[size:] = code.to_bytes(8, sys.byteorder) * (mmap.PAGESIZE // 8)
    attributes, thread, before = ctypes.create_string_buffer(64), ctypes.c_ulong(), set(procfs.threads(os.getpid()))
    assert libc.pthread_attr_init(attributes) == 0
    assert libc.pthread_attr_setstack(attributes, ctypes.c_void_p(start), ctypes.c_size_t(size)) == 0
    assert libc.pthread_create(ctypes.byref(thread), attributes, libc.pause, None) == 0
    try:
        (tid,) = set(procfs.threads(os.getpid())) - before
        shared = _Shared.of(os.getpid())
        assert code in shared.python
        began_in = FrozenThreads(os.getpid())._began_in
        until(lambda: began_in(tid, shared.c_library), "it has begun")
        assert not began_in(tid, shared.python)
    finally:
        libc.pthread_cancel(thread)
        libc.pthread_join(thread, None)  # before its stack is unmapped
