"""Timers and clocks: what is set goes off when it should, as if no time had passed."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sched
import signal
import struct
import time

from . import documented, kind
from .asking import fdinfo, libc, moves, readable, system

HOUR = 3600
_state: dict[str, float] = {}


def timerfd(clock: int, first: float, interval: float = 0.0, flags: int = 0) -> int:
    """A descriptor that becomes readable; seconds."""
    fd = libc("timerfd_create", clock, os.O_NONBLOCK | os.O_CLOEXEC)
    libc("timerfd_settime", fd, flags, struct.pack("4l", *split(interval), *split(first)), None)
    return fd


def split(seconds: float) -> tuple[int, int]:
    return int(seconds), int(seconds % 1 * 1e9)


def left(fd: int) -> tuple[float, float]:
    """Seconds until it goes off, and its interval."""
    found = ctypes.create_string_buffer(32)
    libc("timerfd_gettime", fd, found)
    every, every_ns, until, until_ns = struct.unpack("4l", found.raw)
    return until + until_ns / 1e9, every + every_ns / 1e9


def near(seconds: float, what: float = HOUR) -> bool:
    """Return whether ``seconds`` is a little less than ``what``."""
    return what - 600 < seconds < what + 1


@kind("a timer that expires every 10 ms (timerfd)")
def timerfd_periodic():
    fd = timerfd(time.CLOCK_MONOTONIC, 0.01, 0.01)

    def show():
        ticks = [bool(readable(fd)) and struct.unpack("Q", os.read(fd, 8))[0] > 0 for _ in range(3)]
        return ticks, left(fd)[1]

    return show


@kind("a timer with an hour to go (timerfd)")
def timerfd_hour():
    fds = [timerfd(clock, HOUR, 5) for clock in (time.CLOCK_MONOTONIC, time.CLOCK_BOOTTIME)]
    return lambda: [(near(left(fd)[0]), left(fd)[1], bool(readable(fd, within=0))) for fd in fds]


@kind("a timer at an absolute time, tomorrow (timerfd, TFD_TIMER_ABSTIME)")
def timerfd_tomorrow():
    fd = timerfd(time.CLOCK_REALTIME, time.time() + 24 * HOUR, flags=1)
    return lambda: (near(left(fd)[0], 24 * HOUR), fdinfo(fd)["settime flags"])


@kind("a disarmed timer (timerfd)")
def timerfd_unset():
    fd = timerfd(time.CLOCK_MONOTONIC, 0)
    return lambda: (left(fd), readable(fd, within=0))


@kind("an expired timer whose count is not read (timerfd)")
def timerfd_expired():
    fd = timerfd(time.CLOCK_MONOTONIC, 0.001)
    readable(fd)
    return lambda: bool(readable(fd, within=1))


@kind("an alarm in an hour (setitimer, real time)", alone="there is one for the whole process")
def itimer_real():
    signal.setitimer(signal.ITIMER_REAL, HOUR, 7)

    def show():
        until, every = signal.getitimer(signal.ITIMER_REAL)
        return near(until), every

    return show, lambda: signal.setitimer(signal.ITIMER_REAL, 0)


@kind("an alarm every 20 ms (setitimer, real time)", alone="there is one for the whole process")
def itimer_ticking():
    count = [0]

    def handler(*_: object) -> None:
        count[0] += 1

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)

    def undo():
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

    return lambda: moves(lambda: count[0]), undo


@kind("CPU-time timers (ITIMER_VIRTUAL, ITIMER_PROF)", alone="there is one for the whole process")
def itimer_cpu():
    for which in (signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        signal.setitimer(which, HOUR, 7)

    def show():
        return [
            (near(until), every) for until, every in map(signal.getitimer, (signal.ITIMER_VIRTUAL, signal.ITIMER_PROF))
        ]

    return show, lambda: [signal.setitimer(which, 0) for which in (signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)]


def posix_timer(number: int, first: float, every: float, clock: int = time.CLOCK_MONOTONIC) -> int:
    identity = ctypes.c_int()
    event = struct.pack("Qii48x", 0x2A, number, 0)
    system("timer_create", clock, ctypes.create_string_buffer(event), ctypes.byref(identity))
    system(
        "timer_settime",
        identity.value,
        0,
        ctypes.create_string_buffer(struct.pack("4l", *split(every), *split(first))),
        None,
    )
    return identity.value


def posix_left(identity: int) -> tuple[float, float]:
    found = ctypes.create_string_buffer(32)
    system("timer_gettime", identity, found)
    every, every_ns, until, until_ns = struct.unpack("4l", found.raw)
    return until + until_ns / 1e9, every + every_ns / 1e9


@kind("a POSIX timer with an hour to go (timer_create)")
def posix_hour():
    identity = posix_timer(signal.SIGRTMIN + 10, HOUR, 5)
    return lambda: (identity, near(posix_left(identity)[0]), posix_left(identity)[1])


@kind("a periodic POSIX timer (timer_create)")
def posix_ticking():
    count, number = [0], signal.SIGRTMIN + 11

    def handler(*_: object) -> None:
        count[0] += 1

    signal.signal(number, handler)
    identity = posix_timer(number, 0.02, 0.02)
    return lambda: (
        moves(lambda: count[0]),
        posix_left(identity)[1],
    ), lambda: posix_timer(number, 0, 0) and libc("syscall", ctypes.c_long(226), ctypes.c_long(identity))


@kind("time.monotonic and time.perf_counter never go back, nor jump ahead")
def clocks():
    asleep = [time.monotonic(), time.time()]
    return lambda: (time.monotonic() >= asleep[0], time.monotonic() - asleep[0] <= time.time() - asleep[1] + 1)


@kind(
    "time.process_time and time.thread_time never go back",
    documented("CPU time starts anew"),
    advice="Measure within a cell.",
)
def processor_time():
    sum(range(5_000_000))
    latest = [time.process_time(), time.thread_time()]

    def show():
        now = [time.process_time(), time.thread_time()]
        forwards = [new >= old for new, old in zip(now, latest, strict=True)]
        latest[:] = [max(pair) for pair in zip(now, latest, strict=True)]
        return forwards

    return show


@kind("asyncio callbacks, one due at once, one in an hour")
def call_later():
    loop, ran = asyncio.get_event_loop(), []
    soon = loop.call_later(HOUR, ran.append, "late")
    return lambda: (ran, near(soon.when() - loop.time())), soon.cancel


@kind("a scheduler's queue (sched)")
def scheduler():
    queue = sched.scheduler()
    for number in range(3):
        queue.enter(HOUR + number, 1, print, (number,))
    return lambda: ([event.argument for event in queue.queue], queue.run(blocking=False) > HOUR - 600)


@kind("a stored date and the current time")
def wall_clock():
    began = time.time()
    return lambda: (0 <= time.time() - began < HOUR, time.tzname, time.localtime().tm_isdst >= -1)
