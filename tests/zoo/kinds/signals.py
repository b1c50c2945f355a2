"""Signals: who handles them, who waits for them, which ones wait."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import struct
import threading

from . import kind
from .asking import eventually, libc, status

MASKS = ("SigBlk", "SigIgn", "SigCgt", "SigPnd", "ShdPnd")


def handled(number: int) -> tuple[list[int], object]:
    """A handler for ``number`` that counts, and who handled it before."""
    count = [0]

    def handler(*_: object) -> None:
        count[0] += 1

    return count, signal.signal(number, handler)


@kind("a Python handler for a signal")
def handler():
    count, before = handled(signal.SIGUSR1)

    def show():
        was = count[0]
        os.kill(os.getpid(), signal.SIGUSR1)
        return eventually(lambda: count[0] > was), status(*MASKS[1:3])

    return show, lambda: signal.signal(signal.SIGUSR1, before)


@kind("handlers for SIGCONT, SIGTERM, SIGTRAP and SIGHUP, not called by a wake")
def never_called():
    numbers = signal.SIGCONT, signal.SIGTERM, signal.SIGTRAP, signal.SIGHUP
    counts = [handled(number) for number in numbers]

    def undo():
        for number, (_, before) in zip(numbers, counts, strict=True):
            signal.signal(number, before)

    return lambda: [(number.name, count[0]) for number, (count, _) in zip(numbers, counts, strict=True)], undo


@kind("ignored signals")
def ignored():
    before = signal.signal(signal.SIGWINCH, signal.SIG_IGN), signal.signal(signal.SIGTTOU, signal.SIG_IGN)

    def undo():
        signal.signal(signal.SIGWINCH, before[0])
        signal.signal(signal.SIGTTOU, before[1])

    return lambda: (str(signal.getsignal(signal.SIGWINCH)), status("SigIgn")), undo


@kind("blocked signals")
def blocked():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMIN + 3, signal.SIGALRM})
    return lambda: status("SigBlk"), lambda: signal.pthread_sigmask(
        signal.SIG_UNBLOCK, {signal.SIGRTMIN + 3, signal.SIGALRM}
    )


@kind("a pending blocked signal")
def pending():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)  # to this thread: the others do not block it

    def undo():
        signal.sigtimedwait({signal.SIGUSR2}, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})

    return lambda: (signal.SIGUSR2 in signal.sigpending(), status("SigPnd")), undo


@kind("queued signals with values, in their order")
def queued():
    number = signal.SIGRTMIN + 5
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})

    def send(values: list[int]) -> None:
        for value in values:
            libc("pthread_sigqueue", ctypes.c_ulong(threading.get_ident()), number, ctypes.c_void_p(value))

    send([11, 22, 33])

    def receive() -> list[int]:
        found = []
        mask, info = struct.pack("Q", 1 << (number - 1)) + b"\0" * 120, ctypes.create_string_buffer(128)
        while ctypes.CDLL(None).sigtimedwait(mask, info, struct.pack("ll", 0, 0)) == number:
            found.append(struct.unpack_from("Q", info.raw, 24)[0])
        return found

    def show():
        values = receive()
        send(values)
        return values

    return show, lambda: (receive(), signal.pthread_sigmask(signal.SIG_UNBLOCK, {number}))


@kind("the flags and mask of a handler (sigaction)")
def action_flags():
    number, library = signal.SIGRTMIN + 6, ctypes.CDLL(None)
    function = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: None)
    SA_RESTART, SA_NODEFER, SA_ONSTACK = 0x10000000, 0x40000000, 0x08000000
    address = ctypes.cast(function, ctypes.c_void_p).value
    action = struct.pack(
        "Q128siQ", address, struct.pack("Q", 1 << 9) + b"\0" * 120, SA_RESTART | SA_NODEFER | SA_ONSTACK, 0
    )
    library.sigaction(number, action, None)

    def show(keep=function):
        found = ctypes.create_string_buffer(200)
        library.sigaction(number, None, found)
        handler, mask, how = struct.unpack_from("Q128si", found.raw)
        return handler == address, mask[:8].hex(), how & 0xF8000000

    return show, lambda: signal.signal(number, signal.SIG_DFL)


@kind("a descriptor that Python writes signals to (set_wakeup_fd)", alone="asyncio has one of its own")
def wakeup_fd():
    a, b = socket.socketpair()
    a.setblocking(False)
    b.setblocking(False)
    before = signal.set_wakeup_fd(a.fileno())
    count, old = handled(signal.SIGUSR1)

    def show():
        os.kill(os.getpid(), signal.SIGUSR1)
        eventually(lambda: count[0])
        seen = b.recv(100)
        return set(seen) == {signal.SIGUSR1}

    def undo():
        signal.signal(signal.SIGUSR1, old)
        signal.set_wakeup_fd(before)

    return show, undo


@kind("faulthandler, enabled")
def faults():
    faulthandler.enable(open(os.devnull, "w"))
    faulthandler.register(signal.SIGRTMIN + 9, open(os.devnull, "w"))
    return lambda: (faulthandler.is_enabled(), status("SigCgt")), lambda: faulthandler.unregister(signal.SIGRTMIN + 9)


@kind("the user's own SIGINT handler")
def interrupt():
    # ipykernel sets its own while a cell runs: between cells the user's stays.
    before = signal.getsignal(signal.SIGQUIT)
    signal.signal(signal.SIGQUIT, signal.default_int_handler)

    def show():
        try:
            os.kill(os.getpid(), signal.SIGQUIT)
            eventually(lambda: False, 1)
        except KeyboardInterrupt:
            return "interrupted"
        return "not interrupted"

    return show, lambda: signal.signal(signal.SIGQUIT, before)
