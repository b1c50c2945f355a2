"""Terminals: pairs that the notebook opened, settings, what is under way."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import tty

from . import kind
from .asking import error_of, flags

ADVICE = "Close it."


def size(fd: int) -> tuple[int, ...]:
    return struct.unpack("HHHH", fcntl.ioctl(fd, termios.TIOCGWINSZ, b"\0" * 8))


def word(source: int, target: int, data: bytes = b"hello\n") -> str:
    os.write(source, data)
    return os.read(target, 100).decode() if select.select([target], [], [], 5)[0] else "nothing came"


@kind("a pair of terminals (pty.openpty)", alone="may be refused", advice=ADVICE)
def pair():
    master, slave = pty.openpty()
    tty.setraw(slave)
    return lambda: (os.ttyname(slave), word(master, slave), word(slave, master), flags(master)), lambda: (
        os.close(master),
        os.close(slave),
    )


@kind("a pair of terminals with a size and settings", alone="may be refused", advice=ADVICE)
def settings():
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 41, 133, 7, 9))
    attributes = termios.tcgetattr(slave)
    attributes[3] &= ~termios.ECHO
    attributes[6][termios.VEOF] = b"\x05"
    termios.tcsetattr(slave, termios.TCSANOW, attributes)
    return lambda: (size(master), repr(termios.tcgetattr(slave))), lambda: (os.close(master), os.close(slave))


@kind("a terminal with unread text", alone="may be refused", advice=ADVICE)
def unread():
    master, slave = pty.openpty()
    tty.setraw(slave)
    os.write(slave, b"unread")
    fcntl.fcntl(master, fcntl.F_SETFL, os.O_NONBLOCK)

    def show():
        if not select.select([master], [], [], 1)[0]:
            return "lost"
        data = os.read(master, 100)
        os.write(slave, data)
        return data.decode()

    return show, lambda: (os.close(master), os.close(slave))


@kind("a terminal whose other end was closed", alone="may be refused", advice=ADVICE)
def half():
    master, slave = pty.openpty()
    os.close(slave)
    return lambda: (
        error_of(lambda: os.read(master, 1)),
        os.ptsname(master) if hasattr(os, "ptsname") else "",
    ), lambda: os.close(master)


@kind("/dev/ptmx, opened and locked", alone="may be refused", advice=ADVICE)
def multiplexer():
    fd = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY)
    return lambda: (fcntl.ioctl(fd, 0x80045439, b"\0" * 4), size(fd)), lambda: os.close(fd)


@kind("a terminal whose program has ended (pexpect)", alone="may be refused", needs="pexpect", advice=ADVICE)
def pexpect_ended():
    import pexpect

    child = pexpect.spawn("/bin/echo", ["done"], encoding="utf-8")
    child.expect(pexpect.EOF)
    child.wait()
    return lambda: (child.before.strip(), child.isalive(), child.exitstatus), child.close


@kind("a program on a terminal, which has ended, its terminal still open", alone="may be refused", advice=ADVICE)
def program_ended():
    master, slave = pty.openpty()
    process = subprocess.Popen(["/bin/echo", "said"], stdout=slave, close_fds=True)
    process.wait()
    fcntl.fcntl(master, fcntl.F_SETFL, os.O_NONBLOCK)
    seen: list[str] = []

    def show():
        if select.select([master], [], [], 0.2)[0]:
            seen.append(os.read(master, 100).decode())
        return seen, process.returncode

    return show, lambda: (os.close(master), os.close(slave))


@kind("three pairs of terminals, the middle one closed", alone="may be refused", advice=ADVICE)
def several():
    pairs = [pty.openpty() for _ in range(3)]
    os.close(pairs[1][0])
    os.close(pairs[1][1])
    left = [pairs[0], pairs[2]]
    return lambda: [os.ttyname(slave) for _, slave in left], lambda: [os.close(fd) for pair in left for fd in pair]


@kind("a controlling terminal", alone="may be refused", advice=ADVICE)
def controlling():
    if os.getsid(0) != os.getpid():
        raise PermissionError("the kernel leads no session")
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
    import signal

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def undo():
        fcntl.ioctl(slave, termios.TIOCNOTTY)
        os.close(master)
        os.close(slave)
        signal.signal(signal.SIGHUP, before)

    return lambda: (
        os.ttyname(slave),
        os.tcgetpgrp(slave) == os.getpgrp(),
        error_of(lambda: os.close(os.open("/dev/tty", os.O_RDWR))),
    ), undo


@kind("a terminal in packet mode", alone="may be refused", advice=ADVICE)
def packet_mode():
    master, slave = pty.openpty()
    tty.setraw(slave)
    fcntl.ioctl(master, termios.TIOCPKT, struct.pack("i", 1))

    def show():
        os.write(slave, b"x")
        return os.read(master, 10) if select.select([master], [], [], 2)[0] else None

    return show, lambda: (os.close(master), os.close(slave))
