"""Threads: what each has of its own, and what each waits for."""

from __future__ import annotations

import concurrent.futures
import ctypes
import mmap
import os
import queue
import select
import signal
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import IMPOSSIBLE, kind, refused
from .asking import eventually, libc, moves, place, status, system


class Servant:
    """A thread that does what it is asked, so that a kind can give it attributes and ask for them."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self.tid = self._thread.native_id

    def _serve(self) -> None:
        while job := self._jobs.get():
            act, answer = job
            try:
                answer.put((act(), None))
            except Exception as error:
                answer.put((None, error))

    def do(self, act: Callable[[], Any]) -> Any:
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._jobs.put((act, answer))
        value, error = answer.get(timeout=30)
        if error is not None:
            raise error
        return value

    def end(self) -> None:
        self._jobs.put(None)
        self._thread.join()


def waits_in(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """A thread in ``function``, and the list that its result goes to."""
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(function()), daemon=True)
    thread.start()
    eventually(lambda: Path(f"/proc/self/task/{thread.native_id}/wchan").exists())
    return thread, done


@kind("a thread that counts")
def counting():
    count = [0]

    def run() -> None:
        while True:
            count[0] += 1
            time.sleep(0.005)

    threading.Thread(target=run, daemon=True, name="counter").start()
    return lambda: (moves(lambda: count[0]), "counter" in {thread.name for thread in threading.enumerate()})


@kind("a thread blocked on a lock")
def waiting_for_lock():
    lock, turn = threading.Lock(), queue.SimpleQueue()
    lock.acquire()

    def run() -> None:
        while True:
            with lock:
                turn.put("had it")
            time.sleep(0.05)

    threading.Thread(target=run, daemon=True).start()

    def show():
        lock.release()
        word = turn.get(timeout=60)
        lock.acquire()
        while not turn.empty():
            turn.get()
        return word, lock.locked()

    return show


@kind("threads that wait for a condition, an event, a barrier, a queue, a semaphore")
def waiting_for_all_kinds():
    condition, event, barrier = threading.Condition(), threading.Event(), threading.Barrier(2)
    things, semaphore, said = queue.Queue(), threading.Semaphore(0), queue.Queue()

    def on(word: str, wait: Callable[[], Any]) -> None:
        def run() -> None:
            while True:
                wait()
                said.put(word)

        threading.Thread(target=run, daemon=True).start()

    def for_condition() -> None:
        with condition:
            condition.wait()

    def for_event() -> None:
        event.wait()
        event.clear()

    for word, wait in (
        ("condition", for_condition),
        ("event", for_event),
        ("barrier", barrier.wait),
        ("queue", things.get),
        ("semaphore", semaphore.acquire),
    ):
        on(word, wait)

    def show():
        words = set()
        with condition:
            condition.notify_all()
        event.set()
        barrier.wait(60)
        things.put(1)
        semaphore.release()
        while len(words) < 5:
            words.add(said.get(timeout=60))
        return sorted(words)

    return show


@kind("a timer thread with an hour to go (threading.Timer)")
def timer():
    one = threading.Timer(3600, print)
    one.daemon = True
    one.start()
    return lambda: (one.is_alive(), one.interval, one.finished.is_set()), one.cancel


@kind("a thread pool with running work (ThreadPoolExecutor)")
def pool():
    pool = concurrent.futures.ThreadPoolExecutor(3)
    gate = threading.Event()
    futures = [pool.submit(gate.wait) for _ in range(5)]

    def show():
        return [future.running() for future in futures], len(pool._threads)

    return show, lambda: (gate.set(), pool.shutdown())


@kind("thread-local values")
def local():
    store, servants = threading.local(), [Servant() for _ in range(3)]
    for number, servant in enumerate(servants):
        servant.do(lambda number=number: setattr(store, "value", number))
    return lambda: ([servant.do(lambda: store.value) for servant in servants], hasattr(store, "value"))


@kind("a thread's name in the system")
def name():
    servant = Servant()
    servant.do(lambda: Path(f"/proc/self/task/{servant.tid}/comm").write_text("zoo-keeper"))
    return lambda: Path(f"/proc/self/task/{servant.tid}/comm").read_text()


@kind("a thread's id and stack address")
def number():
    servant = Servant()
    tid, where = servant.tid, threading.get_ident()
    return lambda: (servant.do(threading.get_native_id) == tid, threading.get_ident() == where, tid)


@kind("a thread's signal mask")
def signal_mask():
    servant = Servant()
    servant.do(lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGRTMIN + 7}))
    return lambda: status("SigBlk", tid=servant.tid)


@kind("a signal pending for a thread")
def pending_signal():
    servant = Servant()
    servant.do(lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMIN + 8}))
    servant.do(lambda: signal.pthread_kill(threading.get_ident(), signal.SIGRTMIN + 8))
    return lambda: (status("SigPnd", tid=servant.tid), servant.do(lambda: signal.SIGRTMIN + 8 in signal.sigpending()))


@kind("a thread's alternate signal stack")
def alternative_stack():
    servant, stack = Servant(), ctypes.create_string_buffer(1 << 16)
    where = struct.pack("QiiQ", ctypes.addressof(stack), 0, 0, 1 << 16)
    servant.do(lambda: libc("sigaltstack", where, None))

    def ask():
        found = ctypes.create_string_buffer(24)
        libc("sigaltstack", None, found)
        return found.raw == where

    return lambda: servant.do(ask), lambda: servant.do(
        lambda: libc("sigaltstack", struct.pack("QiiQ", 0, 2, 0, 0), None)
    )


@kind("a thread with a nice value")
def nice():
    servant = Servant()
    servant.do(lambda: os.setpriority(os.PRIO_PROCESS, servant.tid, 7))
    return lambda: os.getpriority(os.PRIO_PROCESS, servant.tid)


@kind("threads with the policies SCHED_BATCH and SCHED_IDLE")
def policies():
    one, two = Servant(), Servant()
    os.sched_setscheduler(one.tid, os.SCHED_BATCH, os.sched_param(0))
    os.sched_setscheduler(two.tid, os.SCHED_IDLE, os.sched_param(0))
    return lambda: (os.sched_getscheduler(one.tid), os.sched_getscheduler(two.tid))


@kind("a real-time thread (SCHED_RR)", user=IMPOSSIBLE)
def real_time():
    servant = Servant()
    os.sched_setscheduler(servant.tid, os.SCHED_RR, os.sched_param(3))
    return lambda: (os.sched_getscheduler(servant.tid), os.sched_getparam(servant.tid).sched_priority), servant.end


@kind("a thread with a CPU affinity")
def affinity():
    servant = Servant()
    os.sched_setaffinity(servant.tid, {min(os.sched_getaffinity(0))})
    return lambda: sorted(os.sched_getaffinity(servant.tid))


@kind("a thread with its own timer slack")
def timer_slack():
    servant = Servant()
    servant.do(lambda: libc("prctl", 29, ctypes.c_ulong(777_000), 0, 0, 0))
    return lambda: servant.do(lambda: libc("prctl", 30, 0, 0, 0, 0))


@kind("a thread with an I/O priority (ionice)")
def ioprio():
    servant = Servant()
    system("ioprio_set", 1, servant.tid, 3 << 13)
    return lambda: system("ioprio_get", 1, servant.tid)


@kind("a thread with a parent-death signal (PR_SET_PDEATHSIG)")
def death_signal():
    servant = Servant()

    def ask():
        number = ctypes.c_int()
        libc("prctl", 2, ctypes.byref(number), 0, 0, 0)
        return number.value

    servant.do(lambda: libc("prctl", 1, ctypes.c_ulong(signal.SIGUSR2), 0, 0, 0))
    return lambda: servant.do(ask), lambda: servant.do(lambda: libc("prctl", 1, ctypes.c_ulong(0), 0, 0, 0))


@kind("one thread with no_new_privs", alone="may be refused")
def no_new_privileges():
    servant = Servant()
    servant.do(lambda: libc("prctl", 38, ctypes.c_ulong(1), 0, 0, 0))
    return lambda: status("NoNewPrivs", tid=servant.tid), servant.end


@kind(
    "a thread with its own working directory (unshare CLONE_FS)",
    refused("UNPROVEN_STATE", "directories"),
    alone="may be refused",
    advice="End the thread.",
)
def own_directory():
    servant, directory = Servant(), place("thread")
    servant.do(lambda: libc("unshare", 0x200))
    servant.do(lambda: os.chdir(directory))
    return lambda: (servant.do(os.getcwd) == str(directory), os.getcwd() == str(directory)), servant.end


@kind(
    "a thread with its own descriptor table (unshare CLONE_FILES)",
    refused("UNPROVEN_STATE", "descriptor"),
    alone="may be refused",
    advice="End the thread.",
)
def own_descriptors():
    servant = Servant()
    servant.do(lambda: libc("unshare", 0x400))
    r, _ = servant.do(os.pipe)
    return lambda: servant.do(lambda: os.fstat(r).st_nlink), servant.end


@kind(
    "a thread of another user (setresuid of one thread)",
    refused("UNPROVEN_STATE", "user"),
    user=IMPOSSIBLE,
    alone="may be refused",
    advice="End the thread.",
)
def own_user():
    if os.getuid() != 0:
        raise PermissionError("it has no right to")
    servant = Servant()
    servant.do(
        lambda: libc("syscall", ctypes.c_long(117), ctypes.c_long(1000), ctypes.c_long(1000), ctypes.c_long(1000))
    )
    return lambda: status("Uid", tid=servant.tid), servant.end


@kind("threads blocked in system calls: read, poll, epoll, sleep")
def in_the_system():
    r, w = os.pipe()
    r2, w2 = os.pipe()
    poll, epoll = select.poll(), select.epoll()
    poll.register(r2, select.POLLIN)
    epoll.register(r2, select.EPOLLIN)
    reading, read = waits_in(lambda: os.read(r, 5))
    waiting = [waits_in(poll.poll), waits_in(epoll.poll), waits_in(lambda: select.select([r2], [], []))]
    sleeping, _ = waits_in(lambda: time.sleep(3600))

    def show():
        alive = reading.is_alive(), [thread.is_alive() for thread, _ in waiting], sleeping.is_alive()
        return alive, read, [done for _, done in waiting]

    def undo():
        os.write(w, b"hello")
        os.write(w2, b"x")

    return show, undo


@kind(
    "a C thread that sleeps in nanosleep for an hour, and is not woken early",
    advice="Written in C: call nanosleep again where it says EINTR.",
)
def nanosleep():
    library = ctypes.CDLL(None)
    thread, done = waits_in(lambda: library.nanosleep(struct.pack("ll", 3600, 0), None))
    return lambda: (thread.is_alive(), done)


@kind(
    "a C thread that waits in poll without a limit, and is not woken early",
    advice="Written in C: call poll again where it says EINTR.",
)
def native_poll():
    library, (r, w) = ctypes.CDLL(None), os.pipe()
    thread, done = waits_in(lambda: library.poll(struct.pack("ihh", r, 1, 0), 1, -1))
    return lambda: (thread.is_alive(), done), lambda: os.write(w, b"x")


@kind(
    "a C thread that waits in epoll_wait for an hour, and is not woken early",
    advice="Written in C: call epoll_wait again where it says EINTR.",
)
def native_epoll():
    library, epoll = ctypes.CDLL(None), select.epoll()
    events = ctypes.create_string_buffer(120)
    thread, done = waits_in(lambda: library.epoll_wait(epoll.fileno(), events, 10, 3_600_000))
    return lambda: (thread.is_alive(), done)


@kind(
    "a C thread that waits for a semaphore until a time, and is not woken early",
    advice="Written in C: call sem_timedwait again where it says EINTR.",
)
def native_semaphore():
    library, semaphore = ctypes.CDLL(None), ctypes.create_string_buffer(32)
    library.sem_init(semaphore, 0, 0)
    until = struct.pack("ll", int(time.time()) + 3600, 0)
    thread, done = waits_in(lambda: library.sem_timedwait(semaphore, until))
    return lambda: (thread.is_alive(), done), lambda: library.sem_post(semaphore)


@kind("a locked C mutex, one that two threads wait for")
def native_mutex():
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_init(mutex, None)
    library.pthread_mutex_lock(mutex)
    waiting = [
        waits_in(lambda: (library.pthread_mutex_lock(mutex), library.pthread_mutex_unlock(mutex))) for _ in range(2)
    ]
    busy = 16
    return lambda: (library.pthread_mutex_trylock(mutex) == busy, [done for _, done in waiting]), (
        lambda: library.pthread_mutex_unlock(mutex)
    )


@kind(
    "a locked robust mutex in a mapped file (a transaction of LMDB that writes)",
    refused("UNPROVEN_STATE", "robust mutex"),
    advice="Release it (commit or abort the transaction).",
)
def robust_mutex():
    library, sort = ctypes.CDLL(None), ctypes.create_string_buffer(16)
    path = place("mutex") / "file"
    path.write_bytes(bytes(mmap.PAGESIZE))
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    mutex = (ctypes.c_char * 64).from_buffer(memory)
    library.pthread_mutexattr_init(sort)
    library.pthread_mutexattr_setrobust(sort, 1)
    library.pthread_mutexattr_setpshared(sort, 1)
    library.pthread_mutex_init(mutex, sort)
    library.pthread_mutex_lock(mutex)
    return lambda: memory[:64].hex(), lambda: library.pthread_mutex_unlock(mutex)


@kind("each thread's robust futex list and rseq area")
def robust_list():
    servant = Servant()

    def ask():
        head, size = ctypes.c_void_p(), ctypes.c_size_t()
        system("get_robust_list", 0, ctypes.byref(head), ctypes.byref(size))
        return head.value, size.value

    return lambda: servant.do(ask)


@kind("a hundred threads")
def hundred():
    servants = [Servant() for _ in range(100)]
    return lambda: [servant.do(lambda number=number: number * number) for number, servant in enumerate(servants)][-1], (
        lambda: [servant.end() for servant in servants]
    )


@kind("a thread in the middle of a long calculation")
def calculating():
    stop, count = threading.Event(), [0]

    def run() -> None:
        while not stop.is_set():
            count[0] = sum(range(1000)) + count[0]

    threading.Thread(target=run, daemon=True).start()
    return lambda: moves(lambda: count[0]), stop.set


@kind(
    "a seccomp filter on one thread",
    user=refused("UNPROVEN_STATE", "seccomp"),
    alone="cannot be undone",
    advice="The kernel stays where it is.",
)
def seccomp_filter():
    servant = Servant()
    allow = struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)
    program = ctypes.create_string_buffer(allow)

    def confine():
        libc("prctl", 38, ctypes.c_ulong(1), 0, 0, 0)
        system("seccomp", 1, 0, ctypes.create_string_buffer(struct.pack("HxxxxxxP", 1, ctypes.addressof(program))))

    servant.do(confine)
    return lambda: status("Seccomp", "Seccomp_filters", tid=servant.tid), servant.end
