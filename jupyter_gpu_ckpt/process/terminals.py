"""What is under way in the pseudo-terminals of stopped processes: taken out before a dump, put back after it.

CRIU saves a terminal's number, modes and window size.  Of the bytes that were written to one end and not yet read at
the other it reads what the modes let it, and writes them to the other end again, where they are edited and echoed a
second time; half a line is lost, and so is what is in a terminal of which only the master is open.  A master whose last
slave was closed (its reads end with EIO: that is how a program learns that its child has ended) comes back as one that
no slave was opened of yet, whose reads wait for ever; and exclusive mode (TIOCEXCL) does not come back.

So a capsule's init takes all this out while the processes are stopped, with editing and echo turned off, and puts it
back the same way: into the restored terminals before their processes run, or into the old ones when a dump is undone.

Standard library only.  Sources: ioctl_tty(2), termios(3), pty(7); in Linux drivers/tty/n_tty.c (a change of ICANON
makes what was read so far one line, so lines are written back with ICANON as it was) and drivers/tty/pty.c.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import json
import os
import re
import select
import stat
import struct
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.process import syscalls

#: The name of the file in which a dump keeps what was under way, beside CRIU's own.
FILE = "terminals.json"

# Requests that the standard library does not name (include/uapi/asm-generic/ioctls.h).
_TCGETS2, _TCSETS2 = 0x802C542A, 0x402C542B
_GET_NUMBER, _GET_LOCK, _SET_LOCK = 0x80045430, 0x80045439, 0x40045431
_GET_PACKET, _GET_EXCLUSIVE = 0x80045438, 0x80045440
_MULTIPLEXER, _SLAVES = (5, 2), range(136, 144)

#: ``struct termios2``: input, output, control and local modes, line discipline, characters, speeds.
_MODES = struct.Struct("=4IB19s2I")
_END, _LITERAL = b"\x04", b"\x16"  # characters that stand for the end of a file, and that take the next one literally
_NUMBER_OF_CHARACTERS = 19
#: Seconds that a silent terminal is waited for, which works at once; all of them together; each after these are over.
_SILENCE, _PATIENCE, _MOMENT = 1.0, 2.0, 0.02
#: Bytes that are written at once.  Linux keeps them in buffers of at least 256 (drivers/tty/tty_buffer.c), up to a
#: limit that larger ones reach with fewer bytes in them.
_CHUNK = 256
#: Bytes that a new terminal takes on their way to its slave, where the line discipline keeps them (N_TTY_BUF_SIZE in
#: drivers/tty/n_tty.c, less one), and on their way to its master: buffers hold some 19 KiB if filled as above.
_MOST_TYPED, _MOST_SAID = 4095, 16384


#: What terminals are called, below whatever root: a runtime of containers also mounts one over another device.
_NAMES = re.compile(r"/dev/(?:pts/[0-9]+|(?:pts/)?ptmx|tty[0-9A-Za-z]*|console)(?: \(deleted\))?$")

#: Numbers of terminals that CRIU can make again: it opens new ones until it has the right number, 32 at most.
NUMBERS = range(32)


def obstacle(pid: int) -> str:
    """Why the pseudo-terminals of process ``pid`` could not come back, seen from outside; empty if they could."""
    numbers = list(_numbers(pid))
    if numbers and not _has_own(pid):
        return "they are the host's: a capsule here has none of its own"
    if numbers and (highest := max(numbers)) not in NUMBERS:
        return f"it has a pseudo-terminal with the number {highest}, and only those below {len(NUMBERS)} can be saved"
    with contextlib.suppress(OSError):
        seen = procfs.stat(pid)
        if seen.terminal and seen.foreground > 0 and not _exists(seen.foreground):
            return "the job in the foreground of its controlling terminal has ended, and no other was put there"
    return ""


def _numbers(pid: int) -> Iterator[int]:
    """The numbers of the pseudo-terminals that a process has open, of either end."""
    with contextlib.suppress(OSError):
        for number in procfs.descriptors(pid):
            with contextlib.suppress(OSError):  # closed meanwhile
                device = _device(pid, number)
                if device is not None and os.major(device) in _SLAVES:
                    yield _number(device)
                elif device is not None and (index := procfs.fdinfo(pid, number).get("tty-index")):
                    yield int(index)


def _device(pid: int, fd: int) -> int | None:
    """The device of an open file, if it is one end of a pseudo-terminal; raises `OSError` if it is closed.

    By its name first: whoever asks for the status of any file waits for as long as its server does not answer.
    """
    path = f"/proc/{pid}/fd/{fd}"
    if not _NAMES.search(os.readlink(path)):
        return None
    status = os.stat(path)
    device = os.major(status.st_rdev), os.minor(status.st_rdev)
    if stat.S_ISCHR(status.st_mode) and (device == _MULTIPLEXER or device[0] in _SLAVES):
        return status.st_rdev
    return None


def _has_own(pid: int) -> bool:
    try:
        return os.stat(f"/proc/{pid}/root/dev/pts").st_dev != os.stat("/dev/pts").st_dev
    except OSError:
        return True  # it has ended, or the host has no terminals at all


def _number(device: int) -> int:
    return os.minor(device) + 256 * (os.major(device) - _SLAVES[0])


def _exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


@dataclass
class Content:
    """What is under way in one terminal.

    ``lines`` and ``rest`` are on their way to the slave: whole lines, if it reads by lines, and whatever else; ``said``
    on its way to the master.  ``closed``: slaves were open, and none is any more.  ``exclusive``: of master and slave.
    """

    lines: list[bytes] = field(default_factory=list)
    rest: bytes = b""
    said: bytes = b""
    closed: bool = False
    exclusive: tuple[bool, bool] = (False, False)

    def typed(self) -> int:
        """Bytes of the line discipline that what is on its way to the slave needs at most: a file's end takes one."""
        return sum(len(line) + (line[-1:] != b"\n") for line in self.lines) + len(self.rest)

    def __bool__(self) -> bool:
        return bool(self.lines or self.rest or self.said or self.closed or any(self.exclusive))


class Unsupported(OSError):
    """A terminal of stopped processes could not come back as it is; ``strerror`` says which and why."""


class _Waiter:
    """How long a terminal is waited for, and all together ``until`` then: one that was silent once, not any more."""

    def __init__(self, until: float) -> None:
        self._until = until
        self._silent = False

    def __call__(self, fd: int, event: int) -> bool:
        """Whether it comes."""
        patience = 0.0 if self._silent else min(_SILENCE, max(_MOMENT, self._until - time.monotonic()))
        came = bool(_polled(fd, patience, event) & event)
        self._silent = self._silent or not came
        return came


class Terminals:
    """The pseudo-terminals whose masters processes of this pid namespace have open; all those must be stopped.

    Raises `OSError`.
    """

    def __init__(self) -> None:
        self._masters: dict[int, int] = {}
        #: A descriptor of a slave that a process has open.
        self._slaves: dict[int, int] = {}
        self.contents: dict[int, Content] = {}
        try:
            self._find()
        except BaseException:
            self.close()
            raise

    def _find(self) -> None:
        for pid in procfs.pids():
            with contextlib.suppress(*procfs.GONE):
                # A zombie has no descriptors, and its directory of them is root's.
                if pid != os.getpid() and not procfs.stat(pid).has_ended:
                    for number in procfs.descriptors(pid):
                        self._add(pid, number)

    def _add(self, pid: int, fd: int) -> None:
        try:
            device = _device(pid, fd)
        except OSError:  # closed meanwhile
            return
        if device is None:
            return
        with syscalls.pidfd_of(pid) as pidfd:
            found = syscalls.pidfd_getfd(pidfd, fd)
        if os.major(device) in _SLAVES:
            known, number = self._slaves, _number(device)
        else:
            known, number = self._masters, _word(found, _GET_NUMBER)
        if number not in NUMBERS:  # opened since `obstacle` was asked
            os.close(found)
            raise Unsupported(errno.ENOTSUP, f"a pseudo-terminal has the number {number}")
        if number in known:
            os.close(found)
        else:
            known[number] = found

    def drain(self) -> None:
        """Take out what is under way, into ``contents``.  After failure nothing is taken out.

        Raises `Unsupported` for a terminal that holds more than a new one takes.
        """
        try:
            for number in self._masters:
                content = Content()
                try:
                    self._drain(number, content)
                finally:
                    if content:
                        self.contents[number] = content
                if content.typed() > _MOST_TYPED or len(content.said) > _MOST_SAID:
                    raise _too_much(number)
        except OSError as error:
            if lost := self.restore():
                error.strerror = f"{error.strerror}; {lost}"
            raise
        except BaseException:
            self.restore()
            raise

    def restore(self) -> str:
        """Put ``contents`` into the terminals; afterwards there are none.  What is lost of them, in words.

        One that fails keeps nothing from the others, and takes its part of the seconds that there are.
        """
        contents, self.contents = self.contents, {}
        until = time.monotonic() + _PATIENCE
        lost = []
        for number, content in contents.items():
            if number not in self._masters:
                continue
            try:
                left = self._restore(number, content, _Waiter(until))
            except OSError as error:
                lost.append(f"pseudo-terminal {number}: {error}")
            else:
                if left:
                    lost.append(f"pseudo-terminal {number}: {left} bytes did not fit into it again")
        return "; ".join(lost)

    def close(self) -> None:
        """Give the descriptors back."""
        for known in (self._masters, self._slaves):
            while known:
                os.close(known.popitem()[1])

    def save(self, path: str) -> None:
        """Write ``contents`` to a new file, if there are any."""
        if self.contents:
            rows = [
                {
                    "number": number,
                    "lines": [_text(line) for line in content.lines],
                    "rest": _text(content.rest),
                    "said": _text(content.said),
                    "closed": content.closed,
                    "exclusive": content.exclusive,
                }
                for number, content in self.contents.items()
            ]
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
                json.dump(rows, file)

    def load(self, path: str) -> None:
        """Take ``contents`` from a file that `save` made; there may be none."""
        try:
            with open(path) as file:
                rows: list[dict[str, Any]] = json.load(file)
        except FileNotFoundError:
            rows = []
        self.contents = {
            row["number"]: Content(
                [base64.b64decode(line) for line in row["lines"]],
                base64.b64decode(row["rest"]),
                base64.b64decode(row["said"]),
                row["closed"],
                (row["exclusive"][0], row["exclusive"][1]),
            )
            for row in rows
        }

    # -- one terminal

    def _drain(self, number: int, content: Content) -> None:
        master = self._masters[number]
        content.closed = bool(_polled(master, 0) & select.POLLHUP)
        slave = self._slaves.get(number, -1)
        content.exclusive = bool(_word(master, _GET_EXCLUSIVE)), slave >= 0 and bool(_word(slave, _GET_EXCLUSIVE))
        if slave < 0 and not content.closed:
            return  # nobody has opened a slave yet, and to do so would tell the master that it was closed
        with self._plain(number) as (slave, modes):
            # Before anything is taken out: what is full might not take all of it again, in other pieces.
            if _word(slave, termios.FIONREAD) >= _MOST_TYPED or not all(
                _polled(fd, 0, select.POLLOUT) & select.POLLOUT for fd in (master, slave)
            ):
                raise _too_much(number)
            if _by_lines(modes):
                while _polled(slave, 0) & select.POLLIN:
                    content.lines.append(os.read(slave, 4096))
            self._set(slave, modes, local=0, least=0)
            while more := _read(slave):
                content.rest += more
            while _polled(master, 0) & select.POLLIN:
                content.said += os.read(master, 4096)

    def _restore(self, number: int, content: Content, waiter: _Waiter) -> int:
        """How many bytes did not fit."""
        master, left = self._masters[number], 0
        if content.lines or content.rest or content.said or content.closed:
            with self._plain(number) as (slave, modes):
                by_lines = _by_lines(modes)
                local = termios.ECHO | ((termios.ICANON | termios.IEXTEN) if by_lines else 0)
                self._set(slave, modes, local=local, least=1)
                ends = _line_ends(modes)
                typed = []
                for line in content.lines:
                    ended = bool(line) and line[-1:] in ends
                    typed.append(
                        (_literal(line[:-1], ends) + line[-1:] if ended else _literal(line, ends) + _END, line)
                    )
                typed.append((_literal(content.rest, ends) if by_lines else content.rest, content.rest))
                for written, echoed in typed:
                    # Nothing after what did not fit: a gap would be taken for what was typed.
                    left += len(written) if left else _type(master, written, echoed, waiter)
                left += _write(slave, content.said, waiter)
        for fd, exclusive in zip((master, self._slaves.get(number, -1)), content.exclusive, strict=True):
            if exclusive and fd >= 0:
                fcntl.ioctl(fd, termios.TIOCEXCL)
        return left

    @contextmanager
    def _plain(self, number: int) -> Iterator[tuple[int, bytes]]:
        """A slave to work with, that is not waited for, and its modes; they are put back at the end.

        Packet mode, in which each change is reported to the master, is off meanwhile, and so is the lock.
        """
        master = self._masters[number]
        locked, packets = _word(master, _GET_LOCK), _word(master, _GET_PACKET)
        _set_word(master, _SET_LOCK, 0)
        _set_word(master, termios.TIOCPKT, 0)
        slave = -1
        try:
            try:
                slave = os.open(f"/dev/pts/{number}", os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError:  # it is exclusively opened
                slave = os.dup(self._slaves[number]) if number in self._slaves else -1
                if slave < 0:
                    raise
            modes = fcntl.ioctl(slave, _TCGETS2, bytes(_MODES.size))
            try:
                yield slave, modes
            finally:
                fcntl.ioctl(slave, _TCSETS2, modes)
        finally:
            if slave >= 0:
                os.close(slave)
            _set_word(master, termios.TIOCPKT, packets)
            _set_word(master, _SET_LOCK, locked)

    @staticmethod
    def _set(slave: int, modes: bytes, *, local: int, least: int) -> None:
        """Turn off all editing; with ICANON among the ``local`` modes, lines end where they did."""
        _, output, control, _, discipline, characters, *speeds = _MODES.unpack(modes)
        own = bytearray(_NUMBER_OF_CHARACTERS)
        own[termios.VEOF], own[termios.VLNEXT] = _END[0], _LITERAL[0]
        own[termios.VEOL], own[termios.VEOL2] = characters[termios.VEOL], characters[termios.VEOL2]
        if not local & termios.ICANON:
            own[termios.VMIN], own[termios.VTIME] = least, 0
        output &= ~termios.OPOST
        fcntl.ioctl(slave, _TCSETS2, _MODES.pack(0, output, control, local, discipline, bytes(own), *speeds))


def _by_lines(modes: bytes) -> bool:
    return bool(_MODES.unpack(modes)[3] & termios.ICANON)


def _line_ends(modes: bytes) -> list[bytes]:
    characters = _MODES.unpack(modes)[5]
    return [b"\n", *(bytes([characters[index]]) for index in (termios.VEOL, termios.VEOL2) if characters[index])]


def _literal(data: bytes, ends: list[bytes]) -> bytes:
    """The same bytes for a terminal that reads by lines, to which some have a meaning."""
    special = {_END, _LITERAL, *ends}
    return b"".join(_LITERAL + byte if byte in special else byte for byte in (bytes([each]) for each in data))


def _too_much(number: int) -> Unsupported:
    return Unsupported(
        errno.ENOBUFS,
        f"pseudo-terminal {number} is stopped, or holds more that was not read yet than a new one takes"
        f" ({_MOST_TYPED} bytes to its slave, {_MOST_SAID} to its master)",
    )


def _type(master: int, typed: bytes, echoed: bytes, waiter: _Waiter) -> int:
    """Write to the slave's input, and wait for the echo, which says that it is there: modes change for what is not.

    Returns how many bytes did not fit.
    """
    while typed:
        length = _CHUNK
        if typed[:length].endswith(_LITERAL):
            length += 1  # what it makes literal comes with it
        if left := _write(master, typed[:length], waiter, length):
            return left + len(typed[length:])
        typed = typed[length:]
    heard = 0
    while heard < len(echoed) and waiter(master, select.POLLIN):
        heard += len(os.read(master, len(echoed) - heard))
    return 0


def _write(fd: int, data: bytes, waiter: _Waiter, length: int = _CHUNK) -> int:
    """How many bytes did not fit."""
    while data and waiter(fd, select.POLLOUT):
        try:
            data = data[os.write(fd, data[:length]) :]
        except BlockingIOError:
            break
    return len(data)


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 4096)
    except BlockingIOError:
        return b""


def _polled(fd: int, seconds: float, events: int = select.POLLIN) -> int:
    poll = select.poll()
    poll.register(fd, events)
    return dict(poll.poll(seconds * 1000)).get(fd, 0)


def _word(fd: int, request: int) -> int:
    (value,) = struct.unpack("i", fcntl.ioctl(fd, request, bytes(4)))
    return int(value)


def _set_word(fd: int, request: int, value: int) -> None:
    fcntl.ioctl(fd, request, struct.pack("i", value))


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
