"""The kernel's raw stdout and stderr on their way to the capsule's own: what the kernel writes past its notebook.

Runs in PID 1 of a capsule (`init`), which answers its owner in the same loop: nothing here may block.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import stat

#: Bytes kept for a reader that is behind; what comes while they are full is dropped.
BACKLOG = 1 << 20


class Pipe:
    """A pipe between the kernel's raw stdout or stderr and ours.

    ``inode`` names the pipe in CRIU's images: on restore CRIU is told to put our new pipe in the place of the old one.

    The kernel never waits for whoever reads our stdout: up to `BACKLOG` bytes wait for a slow reader, and the rest of
    what the kernel writes is dropped.  Everything is dropped once nobody holds the other end.
    """

    def __init__(self, target: int, selector: selectors.BaseSelector) -> None:
        self._target = Target(target)
        self._selector = selector
        self._backlog = bytearray()
        self.reader, self.writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.reader, False)
        self.inode = os.fstat(self.writer).st_ino
        selector.register(self.reader, selectors.EVENT_READ, self.take)

    def take(self) -> None:
        """Called when the kernel has written, or closed its end."""
        try:
            data = os.read(self.reader, 65536)
        except BlockingIOError:
            return
        if not data:
            self._selector.unregister(self.reader)
        self._backlog += data[: BACKLOG - len(self._backlog)]
        self.flush()

    def flush(self) -> None:
        """Hand on what our stdout takes now; called again when it takes more."""
        try:
            while self._backlog and (count := self._target.write(self._backlog)):
                del self._backlog[:count]
        except OSError:  # nobody holds the other end
            self._backlog.clear()
        watched = self._target.fd in self._selector.get_map()
        if self._backlog and not watched:
            self._selector.register(self._target.fd, selectors.EVENT_WRITE, self.flush)
        elif watched and not self._backlog:
            self._selector.unregister(self._target.fd)


class Target:
    """One of our own stdout and stderr, which we share with our owner and perhaps with its terminal."""

    def __init__(self, shared: int) -> None:
        mode = os.fstat(shared).st_mode
        self.fd = os.dup(shared)
        #: Whether a write takes as long as it takes: a regular file's do not depend on a reader.
        self._patient = stat.S_ISREG(mode)
        #: Whether the descriptor is in blocking mode, so that it must be asked for room first.
        self._blocking = True
        if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
            # Opened anew, because O_NONBLOCK on the shared one would be its owner's too.  Not allowed for a terminal of
            # another user (after `su`); not possible for a socket, nor wanted for a file, which would be written over.
            with contextlib.suppress(OSError):
                flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
                own = os.open(f"/proc/self/fd/{shared}", flags)
                os.close(self.fd)
                self.fd, self._blocking = own, False

    def write(self, data: bytearray) -> int:
        """Write what there is room for now; how many bytes that were.  Raises `OSError` when nobody can read them."""
        if self._patient:
            return os.write(self.fd, data)
        if self._blocking:
            room = select.poll()
            room.register(self.fd, select.POLLOUT)
            if not room.poll(0):
                return 0
            # A pipe or socket that says it has room takes this much at once.
            return os.write(self.fd, data[: select.PIPE_BUF])
        try:
            return os.write(self.fd, data)
        except BlockingIOError:
            return 0
