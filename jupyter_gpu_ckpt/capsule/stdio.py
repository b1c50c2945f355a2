"""Copy the kernel's raw stdout and stderr to the capsule's own: output that does not go to the notebook.

Runs in PID 1 of a capsule (`init`), which answers its owner in the same loop: nothing here may block.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import stat

#: Bytes kept for a slow reader; more output is dropped.
BACKLOG = 1 << 20


class Pipe:
    """A pipe between the kernel's raw stdout or stderr and ours.

    ``inode`` names the pipe in CRIU's images: on restore CRIU replaces the old pipe by our new one.

    The kernel never waits for the reader of our stdout: `BACKLOG` bytes at most wait for a slow reader, and further
    output is dropped.  All output is dropped once the other end is closed.
    """

    def __init__(self, target: int, selector: selectors.BaseSelector) -> None:
        self._target = Target(target)
        self._selector = selector
        self._backlog = bytearray()
        self.reader, self.writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.reader, False)
        self.inode = os.fstat(self.writer).st_ino
        selector.register(self.reader, selectors.EVENT_READ, self.read)

    def read(self) -> None:
        """Read from the kernel.  Called when it has written, or closed its end."""
        try:
            data = os.read(self.reader, 65536)
        except BlockingIOError:
            return
        if not data:
            self._selector.unregister(self.reader)
        self._backlog += data[: BACKLOG - len(self._backlog)]
        self.flush()

    def flush(self) -> None:
        """Write as much as our stdout takes now.  Called again when it takes more."""
        try:
            while self._backlog and (count := self._target.write(self._backlog)):
                del self._backlog[:count]
        except OSError:  # the other end is closed
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
        #: Writes to a regular file do not wait for a reader.
        self._is_file = stat.S_ISREG(mode)
        #: Whether the descriptor is in blocking mode, so that it must be polled first.
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
        """Write what fits now.  Return the number of bytes.  Raises `OSError` when the other end is closed."""
        if self._is_file:
            return os.write(self.fd, data)
        if self._blocking:
            poll = select.poll()
            poll.register(self.fd, select.POLLOUT)
            if not poll.poll(0):
                return 0
            # A pipe or socket that is ready takes this much at once.
            return os.write(self.fd, data[: select.PIPE_BUF])
        try:
            return os.write(self.fd, data)
        except BlockingIOError:
            return 0
