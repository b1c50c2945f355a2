"""Drafts that become images after their kernel's process has ended: completed by a process that outlives the server.

A kernel that goes back waits neither for the disk nor for hashes: its present state's device memory stays in host
memory, by links, while the kernel comes back from its save point.  From the end of its old process on, that memory and
a draft are all there is of the present state.  So a process of its own has descriptors of both, and makes the image
when it is requested to, or when its server ends, however that ends.  It keeps the draft's lock: no sweep removes it.

The server restarts one that is killed, and the next server waits for it (`await_abandoned`).  Limit: the host's reboot,
or the end of both processes at one moment, loses what is not written, as it loses each running kernel.

The two talk by lines of JSON through pipes.  Requests: the manifest, then ``begin`` or ``abort``; the end of the pipe
is a ``begin``.  Replies: ``accepted``; ``full``, while the disk is, or cannot be written; ``done`` or ``error``.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..errors import GpuCkptError, NoSpace, StoreUnwritable
from ..files.disk import mapped_errors
from . import layout, lease
from .draft import Draft
from .image import Image
from .keys import Keyring
from .manifest import Manifest
from .store import Store

#: Seconds in which the process must accept a draft: a Python starts, and imports.
_ACCEPT = 30.0
#: Seconds between two tries on a full disk; for which the caller of `Completion.wait` waits for space on it, and a
#: process whose server has ended.
_AGAIN, PATIENCE, _ALONE = 0.5, 60.0, 600.0
#: How often a process that was killed is replaced.
_REPLACED = 3
_POLL = 0.1


class Completion:
    """The completion of one draft: begun, `hand_over`, `begin`, `wait`; or `abort`, which never raises.

    ``extents``: a directory of device memory that nobody changes, closed in the end; ``remove``: called with it if it
    is not needed any more, and closes it.  Raises `OSError`, `StoreUnwritable`; then it is as it was.
    """

    def __init__(self, store: Store, draft: Draft, extents: int, remove: Callable[[int], object]) -> None:
        self.id = draft.id
        self._store, self._draft, self._extents, self._remove = store, draft, extents, remove
        self._manifest, self._begun, self._ended = "", False, False
        #: The time of the first of the process's last reports that the disk is full, and of the last one.
        self._full_since: float | None = None
        self._full_at = 0.0
        self._mark = FileLock(_mark(draft.path), timeout=0, mode=0o600, thread_local=False)
        with mapped_errors(store.root):
            self._mark.acquire()
        try:
            self._start()
        except BaseException:
            self._unmark()
            raise

    def _start(self) -> None:
        """Start the process, which imports its modules meanwhile."""
        options = {
            "images": str(self._store.named),
            "keys": str(self._store.keys.directory),
            "id": self.id,
            "extents": self._extents,
            "lock": self._draft.lock_fd,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[self._extents, self._draft.lock_fd],
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._replies, self._begun = _Lines(self._process.stdout.fileno()), False

    def hand_over(self, manifest: Manifest) -> None:
        """Have the process complete the draft from now on, whatever becomes of this one.

        Raises `StoreUnwritable`; then there is no process, and the draft is as it was.
        """
        text = manifest.to_json()
        try:
            self._request(manifest=text)
            accepted = (self._replies.next(_ACCEPT) or {}).get("accepted")
        except (OSError, EOFError, ValueError):
            accepted = False
        if not accepted:
            self._process.kill()
            self._process.wait()
            raise StoreUnwritable("The process that completes images does not answer.")
        self._manifest = text

    def begin(self) -> None:
        """Have the process write device memory.  Idempotent; the process does so by itself if this one ends."""
        if not self._begun:
            with contextlib.suppress(OSError, ValueError):  # it was killed: `wait` finds out
                self._request(begin=True)
            self._begun = True

    def wait(self, check: Callable[[], object], when_full: Callable[[], object], *, gives_up: bool) -> Image:
        """Wait for the image.  Raises what ``check`` raises, which is called meanwhile, and the error of the process.

        ``when_full``: called once where the disk is full, to make space.  After `PATIENCE` seconds of a full disk
        `NoSpace` is raised; if the caller ``gives_up``, the draft is removed then, else it waits on.
        """
        self.begin()
        self._full_since, replaced = None, 0
        while True:
            check()
            try:
                reply = self._replies.next(_POLL)
            except (EOFError, ValueError, OSError) as error:
                if self._draft.target.exists():  # it was killed behind the last step
                    return self._done()
                if replaced == _REPLACED:
                    raise StoreUnwritable("The process that completes images was killed again and again.") from error
                replaced += 1
                self._replace()
                continue
            if reply is None:
                self._require_progress(gives_up)
            elif "full" in reply:
                if self._full_since is None:
                    when_full()
                self._full_at = time.monotonic()
                self._full_since = self._full_since or self._full_at
                self._require_progress(gives_up)
            elif "done" in reply:
                return self._done()
            elif "error" in reply:
                self._end()
                raise StoreUnwritable(f"The image could not be completed: {reply['error']}")

    def _done(self) -> Image:
        self._end()
        return self._store.get(self.id)

    def _require_progress(self, gives_up: bool) -> None:
        now = time.monotonic()
        if now > self._full_at + 4 * _AGAIN:
            self._full_since = None
        if self._full_since is not None and now > self._full_since + PATIENCE:
            if gives_up:
                self.abort()
            raise NoSpace("The disk of the image directory is full.", directory=str(self._store.root))

    def _replace(self) -> None:
        """Start the process again: it continues where the one before was."""
        self._close_process()
        self._start()
        with contextlib.suppress(StoreUnwritable):  # the next try finds out
            if self._manifest:
                self.hand_over(Manifest.from_json(self._manifest, self.id))
                self.begin()

    def abort(self) -> None:
        """Have the draft removed, or left to this process if it was not handed over."""
        with contextlib.suppress(OSError, ValueError):
            self._request(abort=True)
        self._end()

    def detach(self) -> None:
        """Leave the draft to the process, which completes it alone."""
        self._end(alone=True)

    def _end(self, *, alone: bool = False) -> None:
        if self._ended:
            return
        self._ended = True
        self._close_process(alone=alone)
        if alone:
            os.close(self._extents)
            self._mark.release()
        else:
            self._remove(self._extents)
            self._unmark()
        if self._manifest:
            self._draft.unlock()

    def _unmark(self) -> None:
        with contextlib.suppress(OSError):
            Path(self._mark.lock_file).unlink(missing_ok=True)
        self._mark.release()

    def _close_process(self, *, alone: bool = False) -> None:
        process = self._process
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError, ValueError):
                assert pipe is not None
                pipe.close()
        if alone:  # reaped when it ends
            threading.Thread(target=process.wait, name="image-completion", daemon=True).start()
            return
        try:
            process.wait(_ACCEPT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _request(self, **request: Any) -> None:
        """Send a request.  Raises `OSError`, also where the process does not read it in `_ACCEPT` seconds."""
        assert self._process.stdin is not None
        fd, deadline = self._process.stdin.fileno(), time.monotonic() + _ACCEPT
        text = json.dumps(request).encode() + b"\n"
        os.set_blocking(fd, False)  # a pipe takes less than a large manifest
        writable = select.poll()
        writable.register(fd, select.POLLOUT)
        while text:
            if not writable.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError("The process that completes images does not read.")
            with contextlib.suppress(BlockingIOError):
                text = text[os.write(fd, text) :]

    # -- the claim of an image that may still be a draft

    def claim(self, pid: int, keep_fd: lease.KeepFd) -> None:
        """Do as `Image.claim`.  Raises `StoreUnwritable`, `NoSpace`."""
        with mapped_errors(self._store.root), self._draft.stays():
            lease.publish_claim(self._path(), pid, keep_fd)

    def withdraw_claim(self) -> None:
        """Do as `Image.withdraw_claim`.  Raises `OSError`, `Timeout`."""
        with self._draft.stays():
            lease.withdraw_claim(self._path())

    def _path(self) -> Path:
        return self._draft.path if self._draft.path.exists() else self._draft.target


class _Lines:
    """Lines of JSON from a pipe."""

    def __init__(self, fd: int) -> None:
        self._fd, self._text = fd, b""
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    def next(self, seconds: float | None) -> dict[str, Any] | None:
        """Return the next one; None if there is none for so many seconds.  Raises `EOFError`, `ValueError`."""
        while b"\n" not in self._text:
            if not self._poll.poll(None if seconds is None else seconds * 1000):
                return None
            if not (more := os.read(self._fd, 1 << 16)):
                raise EOFError
            self._text += more
        line, _, self._text = self._text.partition(b"\n")
        return dict(json.loads(line))


def _mark(draft: Path) -> Path:
    return draft.with_name(f"{draft.name}{layout.LATER}")


def await_abandoned(root: Path, seconds: float = -1) -> None:
    """Wait for drafts to be completed whose servers have ended or left them: their kernels may sleep in them.

    No longer than their processes live, nor for each than so many ``seconds``; -1: without a limit.
    """
    for mark in root.glob(f"{layout.DRAFT}*{layout.LATER}"):
        with contextlib.suppress(Timeout, OSError), FileLock(mark, timeout=0, mode=0o600):
            draft = mark.with_name(mark.name.removesuffix(layout.LATER))
            lock = FileLock(mark.with_name(draft.name + layout.LOCK), timeout=seconds, mode=0o600)
            with lock:
                mark.unlink(missing_ok=True)
                if not draft.exists():
                    Path(lock.lock_file).unlink(missing_ok=True)


# -- the process


def _nothing() -> None:
    """Do nothing: the process is not cancelled."""


class _GivenUp(Exception):
    """The server does not want the image any more, or ended long ago."""


class _Requests:
    """The requests of the server to the process, as long as the server lives."""

    def __init__(self) -> None:
        self._lines, self._lock = _Lines(0), threading.Lock()
        self._alone_until: float | None = None
        self._given_up = False

    def next(self, seconds: float | None = None) -> dict[str, Any] | None:
        """Return the next one, an empty one if the server has ended; None if there is none for so many seconds."""
        try:
            return self._lines.next(seconds)
        except (EOFError, OSError, ValueError):
            return {}

    def wait_for_space(self) -> None:
        """Wait for a moment.  From several threads at a time.  Raises `_GivenUp`."""
        if self._lock.acquire(blocking=False):
            try:
                _reply(full=True)
                request = self.next(_AGAIN)
                if request == {}:
                    self._alone_until = self._alone_until or time.monotonic() + _ALONE
                    time.sleep(_AGAIN)
                too_long = self._alone_until is not None and time.monotonic() > self._alone_until
                self._given_up = self._given_up or too_long or "abort" in (request or {})
            finally:
                self._lock.release()
        else:
            time.sleep(_AGAIN)
        if self._given_up:
            raise _GivenUp


def _reply(**reply: Any) -> None:
    with contextlib.suppress(OSError):  # the server has ended
        os.write(1, json.dumps(reply).encode() + b"\n")


def main(argument: str) -> None:
    """Complete a draft, once it is handed over and the server requests it or has ended."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # a whole group gets it, and the server is meant
        signal.signal(number, signal.SIG_IGN)
    options, requests = json.loads(argument), _Requests()
    store = Store(Path(options["images"]), Keyring(Path(options["keys"])))
    manifest = (requests.next() or {}).get("manifest")
    if manifest is None:
        return
    found = Manifest.from_json(manifest, options["id"])
    draft = store.take_over(found.id, found.kernel_id, options["lock"])
    _reply(accepted=True)
    try:
        if "abort" in (requests.next() or {}):
            raise _GivenUp
        _complete(draft, found, options["extents"], requests)
    except Exception as error:
        draft.discard()
        _reply(error=f"{type(error).__name__}: {error}")
    else:
        _reply(done=True)
    finally:
        _mark(store.root / f"{layout.DRAFT}{options['id']}").unlink(missing_ok=True)


def _complete(draft: Draft, manifest: Manifest, extents: int, requests: _Requests) -> None:
    bytes, when_full = manifest.swapped_bytes, requests.wait_for_space
    while True:
        try:
            draft.write_device(extents, None, _nothing, removes=True, continues=bytes, when_full=when_full)
            draft.publish(manifest)
            return
        except (GpuCkptError, OSError):  # the disk may be full, or not there for a while: it is all there is
            requests.wait_for_space()


if __name__ == "__main__":
    main(sys.argv[1])
