"""The caller's side of the helper process: start it, send requests with deadlines, replace it.

`cuda.Cuda` and `gpus.Gpus` share a `Helper`, with any number of threads.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

from ..errors import CudaError, CudaTimeout, CudaUnavailable, DriverTooOld, HelperGone
from .checkpoint_api import DriverRefused
from .helper import DRAIN_S

#: Seconds for the start and for ``cuInit`` or ``nvmlInit``, on top of the first call's own deadline.
_START_TIMEOUT_S = 90.0
#: Operations that change nothing: they may be made twice.
_QUERIES = re.compile(r"cuda[.]state|nvml[.].*")
_UNKNOWN = "the process's CUDA state is unknown; a locked process can be unlocked"
_HINTS = {
    "binding-missing": None,
    "binding-too-old": "pip install --upgrade 'jupyter_gpu_ckpt[gpu]'",
    "symbol-missing": "pip install --upgrade 'jupyter_gpu_ckpt[gpu]'",
    "nvml-missing": None,
    "driver-missing": "Kernels without CUDA can be checkpointed.",
    "driver-refuses": "Run `nvidia-smi` to see why; after a driver update the host must be restarted.",
}


class Caller(Protocol):
    """The methods of a helper that the facades call; `testing.fake_cuda.FakeDriver` has them, too."""

    def call(self, op: str, *, lane: int | None = None, timeout_s: float, **args: Any) -> Any: ...
    def another(self) -> Caller: ...
    def close(self) -> None: ...


class _NotSent(Exception):
    """The session ended before the request was sent: sending it to another one repeats nothing."""


@dataclass
class _Call:
    op: str
    lane: int | None
    reply: dict[str, Any] | None = None
    overdue: bool = False


@dataclass(eq=False)
class _Session:
    """One helper process.  ``changed`` guards everything but the process itself."""

    process: subprocess.Popen[str]
    changed: threading.Condition = field(default_factory=threading.Condition)  # over an RLock
    pending: dict[int, _Call] = field(default_factory=dict)
    opened: set[str] = field(default_factory=set)
    retired: bool = False
    ended: bool = False

    def request(self, number: int, call: _Call, args: dict[str, Any], deadline: float) -> dict[str, Any]:
        """Send one request, once its lane is free, and wait for its reply."""
        began = time.monotonic()
        line = json.dumps({"id": number, "op": call.op, "args": args}) + "\n"
        with self.changed:
            self.wait_for_lane(call, deadline)
            if self.ended or self.retired:
                raise _NotSent
            try:
                stdin = _pipe(self.process.stdin)
                stdin.write(line)
                stdin.flush()
            except (OSError, ValueError) as error:  # a broken pipe; a pipe closed by close()
                self.retired = True
                raise _NotSent from error
            self.pending[number] = call
            self.changed.wait_for(lambda: call.reply is not None or self.ended, deadline - time.monotonic())
            if call.reply is not None:
                return call.reply
            facts: dict[str, Any] = {"left": _UNKNOWN, "op": call.op, "pid": call.lane}
            if self.ended:
                message = f"The CUDA helper ended during {call.op}."
                raise HelperGone(message, **facts, returncode=self.process.returncode)
            call.overdue = self.retired = True
            self._kill_if_useless()
            self.changed.notify_all()
        waited = time.monotonic() - began
        raise CudaTimeout(f"The NVIDIA driver did not answer {call.op} within {waited:.1f} s.", **facts)

    def wait_for_lane(self, call: _Call, deadline: float) -> None:
        """Wait until no call of the same lane is running in this process, or the process has ended.

        A call that cannot start by its deadline says nothing about the helper, which is kept.
        """

        def is_free() -> bool:
            return self.ended or all(other.lane != call.lane for other in self.pending.values())

        with self.changed:
            if call.lane is not None and not self.changed.wait_for(is_free, deadline - time.monotonic()):
                message = "Another call for this process is still running in the NVIDIA driver."
                raise CudaTimeout(message, left="nothing was changed by this call", op=call.op, pid=call.lane)

    def _kill_if_useless(self) -> None:
        # A hung call can only be ended with the process, but other kernels' checkpoints may be running in it: they
        # finish first.  New calls go to a new helper meanwhile.
        if self.retired and all(call.overdue for call in self.pending.values()):
            self.process.kill()

    def read_replies(self) -> None:
        """Read replies until the process ends; the target of the reader thread."""
        try:
            for line in _pipe(self.process.stdout):
                reply = json.loads(line)
                with self.changed:
                    call = self.pending.pop(reply["id"])
                    call.reply = reply
                    self._kill_if_useless()
                    self.changed.notify_all()
        finally:
            self.process.kill()  # its output is closed: no further reply can be received
            _pipe(self.process.stdout).close()
            self.process.wait()
            with self.changed:
                self.ended = True
                self.changed.notify_all()


class Helper:
    """The helper process, started by the first call and again after it ended; it ends when the caller ends.

    ``command``: the command to run instead of the real helper (tests).
    """

    def __init__(self, command: Sequence[str] | None = None) -> None:
        self._command = list(command or (sys.executable, "-m", "jupyter_gpu_ckpt.cuda.helper"))
        self._sessions: list[_Session] = []
        self._starting = threading.Lock()
        self._numbers = itertools.count(1)
        weakref.finalize(self, _end, self._sessions)

    def another(self) -> Helper:
        """Return a helper with a process of its own, which the caller closes."""
        return Helper(self._command)

    @property
    def pid(self) -> int | None:
        """The process id of the helper that receives calls now, if one runs."""
        with self._starting:
            current = self._current()
            return current.process.pid if current else None

    def call(self, op: str, *, lane: int | None = None, timeout_s: float, **args: Any) -> Any:
        """Run one operation of `helper.real_operations` and return its value.

        Calls with the same ``lane`` (a process id) run one at a time, also across helpers; others side by side.

        Raises
        ------
        DriverRefused
            The driver returned an error; the facades know what its number means for their verb.
        CudaUnavailable
            This host cannot checkpoint CUDA processes; ``details["reason"]`` says why.
        CudaTimeout
            No reply after ``timeout_s``.  The helper is replaced, and ended as soon as no other call runs in it.
        HelperGone
            The helper ended during the call; the next call starts another one.  A call that changes nothing is made
            once more in a new helper before.
        """
        for again in (True, False):
            try:
                return self._call_once(op, lane, timeout_s, args)
            except _NotSent:
                continue  # the helper ended between two calls
            except HelperGone:
                if not (again and _QUERIES.fullmatch(op)):
                    raise
        raise HelperGone("The CUDA helper exits as soon as it is started.", op=op, pid=lane)

    def _call_once(self, op: str, lane: int | None, timeout_s: float, args: dict[str, Any]) -> Any:
        session = self._session()
        family = op.partition(".")[0]
        if family not in session.opened:
            self._value(session, _Call(f"{family}.open", None), {}, time.monotonic() + _START_TIMEOUT_S)
            session.opened.add(family)
        call, deadline = _Call(op, lane), time.monotonic() + timeout_s
        for other in list(self._sessions):
            other.wait_for_lane(call, deadline)  # a helper that is being replaced counts, too
        return self._value(session, call, args, deadline)

    def close(self) -> None:
        """End the helper after the running calls, at most `DRAIN_S` later; a later call starts another one."""
        with self._starting:
            sessions = list(self._sessions)
            _end(self._sessions)
        for session in sessions:
            try:
                session.process.wait(DRAIN_S + 5.0)
            except subprocess.TimeoutExpired:
                session.process.kill()

    def _value(self, session: _Session, call: _Call, args: dict[str, Any], deadline: float) -> Any:
        reply = session.request(next(self._numbers), call, args, deadline)
        if (error := reply.get("error")) is None:
            return reply["value"]
        if error["kind"] == "refused":
            raise DriverRefused(error["number"], error["name"])
        if error["kind"] == "unavailable":
            unavailable = DriverTooOld if error["reason"] == "driver-too-old" else CudaUnavailable
            raise unavailable(error["message"], hint=_HINTS.get(error["reason"]), reason=error["reason"])
        raise CudaError(f"The CUDA helper failed in {call.op}.", op=call.op, helper=error["message"])

    def _current(self) -> _Session | None:
        self._sessions[:] = [session for session in self._sessions if not session.ended]
        return next((session for session in self._sessions if not session.retired), None)

    def _session(self) -> _Session:
        with self._starting:
            if (current := self._current()) is None:
                self._sessions.append(current := _start(self._command))
            return current


_F = TypeVar("_F", bound="Facade")


class Facade:
    """Base of the facades: uses the given helper, shared with others, or its own, which `close` ends."""

    def __init__(self, helper: Caller | None = None) -> None:
        self._helper: Caller = helper or Helper()
        self._owns_helper = helper is None

    def with_own_helper(self: _F) -> _F:
        """Return the same facade with a helper process of its own, for calls that may hang; the caller closes it."""
        own = copy.copy(self)
        own._helper, own._owns_helper = self._helper.another(), True
        return own

    def close(self) -> None:
        """End the helper process, if it is this object's own, after the running calls."""
        if self._owns_helper:
            self._helper.close()

    def __enter__(self: _F) -> _F:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _start(command: Sequence[str]) -> _Session:
    # The helper must see all GPUs: a mapping must name all of them, and cuInit fails without any.
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env=environment,
            # `-m` puts the working directory first on sys.path, and a Jupyter server's has the user's own modules.
            cwd=Path(__file__).resolve().parents[2],
            start_new_session=True,  # the terminal's Ctrl-C is for the server
        )
    except OSError as error:
        raise HelperGone(f"The CUDA helper could not be started: {error.strerror}.") from error
    session = _Session(process)
    threading.Thread(target=session.read_replies, name="cuda-helper-replies", daemon=True).start()
    return session


def _end(sessions: list[_Session]) -> None:
    for session in sessions:
        session.retired = True
        with contextlib.suppress(OSError):  # the process ended before it read its last request
            _pipe(session.process.stdin).close()
    sessions.clear()


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None  # made by `_start`
    return stream
