"""Unread data in the pseudo-terminals of stopped processes: drained before a dump, restored after it.

CRIU saves a terminal's number, modes and window size.  It reads the bytes that were written to one end and not yet read
at the other as far as the modes allow, and writes them to the other end again, where they are edited and echoed a
second time; half a line is lost, and so is the data in a terminal of which only the master is open.  A master whose
last slave was closed (its reads end with EIO, by which a program learns that its child has ended) comes back as one
without a slave so far, whose reads wait for ever; and exclusive mode (TIOCEXCL) does not come back.

So a capsule's init drains the terminals while the processes are stopped, with editing and echo turned off, and writes
the data back the same way: to the restored terminals before their processes run, or to the old ones if a dump fails.

Sources: ioctl_tty(2), termios(3), pty(7); in Linux drivers/tty/n_tty.c (a change of ICANON makes the data that has
arrived one line, so lines are written back with ICANON as it was) and drivers/tty/pty.c.
"""

from __future__ import annotations

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
from collections.abc import Iterator, Sequence
from typing import Any

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.process import syscalls
from jupyter_gpu_ckpt.process.unsavable import Unsavable

#: The file of the drained data in a dump, beside CRIU's own files.
FILE = "terminals.json"

# Requests that the standard library does not name (include/uapi/asm-generic/ioctls.h).
_TCGETS2, _TCSETS2 = 0x802C542A, 0x402C542B
_GET_NUMBER, _GET_LOCK, _SET_LOCK = 0x80045430, 0x80045439, 0x40045431
_GET_PACKET, _GET_EXCLUSIVE = 0x80045438, 0x80045440
_MULTIPLEXER, _SLAVES = os.makedev(5, 2), range(136, 144)

#: ``struct termios2``: input, output, control and local modes, line discipline, characters, speeds.
_MODES = struct.Struct("=4IB19s2I")
_END, _LITERAL = b"\x04", b"\x16"  # characters: the end of a file; the next character is taken literally
_NUMBER_OF_CHARACTERS = 19
#: Seconds to wait for one terminal, which normally answers at once; for all together; for each one after these.
_ONE_TIMEOUT, _ALL_TIMEOUT, _LATE_TIMEOUT = 1.0, 2.0, 0.02
#: Bytes that are written at once.  Linux keeps them in buffers of at least 256 (drivers/tty/tty_buffer.c), up to a
#: limit that larger ones reach with fewer bytes in them.
_CHUNK = 256
#: Bytes of input that a new terminal takes, where the line discipline keeps them (N_TTY_BUF_SIZE in
#: drivers/tty/n_tty.c, less one), and of output to its master: buffers have some 19 KiB if filled as above.
_MOST_INPUT, _MOST_OUTPUT = 4095, 16384


#: Names of terminals, below any root: a container runtime also mounts a terminal over another device.
_NAMES = re.compile(r"/dev/(?:pts/[0-9]+|(?:pts/)?ptmx|tty[0-9A-Za-z]*|console)(?: \(deleted\))?$")

#: Numbers of terminals that CRIU can make again: it opens new ones until it has the right number, 32 at most.
NUMBERS = range(32)


def obstacle(pid: int) -> str:
    """Return why the pseudo-terminals of process ``pid`` could not be restored; empty if they could."""
    numbers = list(_numbers(pid))
    if numbers and not _has_own(pid):
        return "they are the host's: a capsule here has none of its own"
    if numbers and (highest := max(numbers)) not in NUMBERS:
        return f"it has a pseudo-terminal with the number {highest}, and only those below {len(NUMBERS)} can be saved"
    with contextlib.suppress(OSError):
        if foreground_has_ended(pid):
            return "the job in the foreground of its controlling terminal has ended, and no other was put there"
    return ""


def foreground_has_ended(pid: int) -> bool:
    """Return whether nothing is left of the process group in the foreground of a process's controlling terminal.

    CRIU cannot make such a group again, which it says at the restore only.  A shell puts itself there, once it has
    noticed that its command has ended.  Raises as `procfs.stat`.
    """
    seen = procfs.stat(pid)
    return bool(seen.terminal) and seen.foreground > 0 and not _exists(seen.foreground)


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
    """Return the device of one end of a pseudo-terminal; None for another file.  Raises `OSError` if it is closed."""
    path = f"/proc/{pid}/fd/{fd}"
    if not _NAMES.search(os.readlink(path)):  # stat(2) of it could wait for a server that never answers
        return None
    status = os.stat(path)
    is_terminal = status.st_rdev == _MULTIPLEXER or os.major(status.st_rdev) in _SLAVES
    return status.st_rdev if stat.S_ISCHR(status.st_mode) and is_terminal else None


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
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


class Content:
    """Unread data in one terminal, and its state.

    ``lines`` and ``rest`` are input of the slave: whole lines, if it reads by lines, and the rest; ``output`` goes to
    the master.  ``closed``: slaves were open, and none is any more.  ``exclusive``: of master and slave.
    """

    def __init__(
        self,
        lines: Sequence[bytes] = (),
        rest: bytes = b"",
        output: bytes = b"",
        closed: bool = False,
        exclusive: tuple[bool, ...] = (False, False),
    ) -> None:
        self.lines = list(lines)
        self.rest, self.output = rest, output
        self.closed, self.exclusive = closed, exclusive

    def input_bytes(self) -> int:
        """Bytes of the line discipline that the input needs at most: a file's end takes one."""
        return sum(len(line) + (line[-1:] != b"\n") for line in self.lines) + len(self.rest)

    def __bool__(self) -> bool:
        return bool(self.lines or self.rest or self.output or self.closed or any(self.exclusive))


class UnsavableTerminal(Unsavable):
    """A terminal of stopped processes cannot be restored; ``strerror`` names the terminal and the reason."""

    field = "unsupported_terminal"


class _Waiter:
    """Waits for one terminal, until ``deadline`` for all together; after one time-out, not any more."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.timed_out = False

    def __call__(self, fd: int, event: int) -> bool:
        """Wait for ``event``; return whether it came."""
        left = self.deadline - time.monotonic()
        timeout = 0.0 if self.timed_out else min(_ONE_TIMEOUT, max(_LATE_TIMEOUT, left))
        came = bool(_polled(fd, timeout, event) & event)
        self.timed_out |= not came
        return came


class Terminals:
    """The pseudo-terminals whose masters the stopped processes of this pid namespace have open.  Raises `OSError`."""

    def __init__(self) -> None:
        self._masters: dict[int, int] = {}
        #: A descriptor of a slave that a process has open.
        self._slaves: dict[int, int] = {}
        self.contents: dict[int, Content] = {}
        try:
            for pid in procfs.pids():
                with contextlib.suppress(*procfs.GONE):
                    # A zombie has no descriptors, and its directory of them is root's.
                    if pid != os.getpid() and not procfs.stat(pid).has_ended:
                        for number in procfs.descriptors(pid):
                            self._add(pid, number)
        except BaseException:
            self.close()
            raise

    def _add(self, pid: int, fd: int) -> None:
        device = None
        with contextlib.suppress(OSError):  # closed meanwhile
            device = _device(pid, fd)
        if device is None:
            return
        with syscalls.pidfd_of(pid) as pidfd:
            found = syscalls.pidfd_getfd(pidfd, fd)
        if os.major(device) in _SLAVES:
            known, number = self._slaves, _number(device)
        else:
            known, number = self._masters, _word(found, _GET_NUMBER)
        if number in NUMBERS and number not in known:
            known[number] = found
            return
        os.close(found)
        if number not in NUMBERS:  # opened since the call of `obstacle`
            raise UnsavableTerminal(errno.ENOTSUP, f"a pseudo-terminal has the number {number}")

    def drain(self) -> None:
        """Move unread data into ``contents``.  After failure it is where it was: `OSError`, `UnsavableTerminal`."""
        try:
            for number in self._masters:
                content = Content()
                try:
                    self._drain(number, content)
                finally:
                    if content:
                        self.contents[number] = content
                if content.input_bytes() > _MOST_INPUT or len(content.output) > _MOST_OUTPUT:
                    raise _too_much(number)
        except OSError as error:
            if lost := self.restore():
                error.strerror = f"{error.strerror}; {lost}"
            raise
        except BaseException:
            self.restore()
            raise

    def restore(self) -> str:
        """Write ``contents`` to the terminals, and clear them.  Return what is lost, in words."""
        contents, self.contents = self.contents, {}
        until = time.monotonic() + _ALL_TIMEOUT
        lost = []
        for number in contents.keys() & self._masters.keys():
            try:
                if left := self._restore(number, contents[number], _Waiter(until)):
                    lost.append(f"pseudo-terminal {number}: {left} bytes did not fit into it again")
            except OSError as error:
                lost.append(f"pseudo-terminal {number}: {error}")
        return "; ".join(lost)

    def close(self) -> None:
        """Close the descriptors."""
        for known in (self._masters, self._slaves):
            while known:
                os.close(known.popitem()[1])

    def save(self, path: str) -> None:
        """Write ``contents`` to a new file, if there are any."""
        if self.contents:
            rows = [{"number": number, **vars(content)} for number, content in self.contents.items()]
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
                json.dump(rows, file, default=lambda data: data.decode("latin-1"))  # any byte is a character there

    def load(self, path: str) -> None:
        """Read ``contents`` from the file of `save`, which may not exist."""
        rows: list[dict[str, Any]] = []
        with contextlib.suppress(FileNotFoundError), open(path) as file:
            rows = json.load(file)
        for row in rows:
            lines = [line.encode("latin-1") for line in row["lines"]]
            rest, output = row["rest"].encode("latin-1"), row["output"].encode("latin-1")
            self.contents[row["number"]] = Content(lines, rest, output, row["closed"], tuple(row["exclusive"]))

    # -- one terminal

    def _drain(self, number: int, content: Content) -> None:
        master = self._masters[number]
        content.closed = bool(_polled(master, 0) & select.POLLHUP)
        slave = self._slaves.get(number, -1)
        content.exclusive = bool(_word(master, _GET_EXCLUSIVE)), slave >= 0 and bool(_word(slave, _GET_EXCLUSIVE))
        if slave < 0 and not content.closed:
            return  # no slave was opened yet, and to open one would make it a closed one for the master
        with self._plain(number) as (slave, modes):
            # Before anything is drained: a full terminal might not take all of it again, in other pieces.
            if _word(slave, termios.FIONREAD) >= _MOST_INPUT or not all(
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
                content.output += os.read(master, 4096)

    def _restore(self, number: int, content: Content, waiter: _Waiter) -> int:
        """Write the content; return the bytes that did not fit."""
        master, left = self._masters[number], 0
        if content.lines or content.rest or content.output or content.closed:
            with self._plain(number) as (slave, modes):
                by_lines = _by_lines(modes)
                local = termios.ECHO | ((termios.ICANON | termios.IEXTEN) if by_lines else 0)
                self._set(slave, modes, local=local, least=1)
                ends = _line_ends(modes)
                typed = []
                for line in content.lines:
                    body, end = (line[:-1], line[-1:]) if line and line[-1:] in ends else (line, _END)
                    typed.append((_literal(body, ends) + end, line))
                typed.append((_literal(content.rest, ends) if by_lines else content.rest, content.rest))
                for written, echoed in typed:
                    # Nothing after data that did not fit: the program must not see a gap.
                    left += len(written) if left else _type(master, written, echoed, waiter)
                left += _write(slave, content.output, waiter)
        for fd, exclusive in zip((master, self._slaves.get(number, -1)), content.exclusive, strict=True):
            if exclusive and fd >= 0:
                fcntl.ioctl(fd, termios.TIOCEXCL)
        return left

    @contextlib.contextmanager
    def _plain(self, number: int) -> Iterator[tuple[int, bytes]]:
        """Yield a slave in non-blocking mode and its modes; it is unlocked and out of packet mode meanwhile."""
        master = self._masters[number]
        locked, packets = _word(master, _GET_LOCK), _word(master, _GET_PACKET)
        _set_word(master, _SET_LOCK, 0)
        _set_word(master, termios.TIOCPKT, 0)
        slave = -1
        try:
            try:
                slave = os.open(f"/dev/pts/{number}", os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError:  # it is exclusively opened
                if number not in self._slaves:
                    raise
                slave = os.dup(self._slaves[number])
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
    """Escape the bytes that have a meaning for a terminal that reads by lines."""
    special = {_END, _LITERAL, *ends}
    return b"".join(_LITERAL + byte if byte in special else byte for byte in (bytes([each]) for each in data))


def _too_much(number: int) -> UnsavableTerminal:
    return UnsavableTerminal(
        errno.ENOBUFS,
        f"pseudo-terminal {number} is stopped, or has more unread data than a new one takes"
        f" ({_MOST_INPUT} bytes to its slave, {_MOST_OUTPUT} to its master)",
    )


def _type(master: int, typed: bytes, echoed: bytes, waiter: _Waiter) -> int:
    """Write to the slave's input, and wait for the echo: only then may modes change.  Return the bytes left over."""
    while typed:
        length = _CHUNK
        if typed[:length].endswith(_LITERAL):
            length += 1  # with the character that it escapes
        if left := _write(master, typed[:length], waiter, length):
            return left + len(typed[length:])
        typed = typed[length:]
    echo = 0
    while echo < len(echoed) and waiter(master, select.POLLIN):
        echo += len(os.read(master, len(echoed) - echo))
    return 0


def _write(fd: int, data: bytes, waiter: _Waiter, length: int = _CHUNK) -> int:
    """Write the data; return the bytes that did not fit."""
    while data and waiter(fd, select.POLLOUT):
        try:
            data = data[os.write(fd, data[:length]) :]
        except BlockingIOError:
            break
    return len(data)


def _read(fd: int) -> bytes:
    with contextlib.suppress(BlockingIOError):
        return os.read(fd, 4096)
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
