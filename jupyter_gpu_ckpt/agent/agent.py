"""The agent inside the kernel: prepares it for a checkpoint, and undoes the preparation afterwards.

Loaded by launch.py as ``_jupyter_gpu_ckpt_agent`` (with this folder as its package) into whatever environment the
kernel runs in: standard library and IPython/ipykernel only, Python >= 3.8, ipykernel >= 6.

It handles six requests on the shell channel, so on the kernel's main thread and between cells.  Each reply has
``status``: ``ok`` with ``report``, or ``error`` with ``ename``, ``evalue``, ``traceback``, and ``lacking``: what the
kernel has too little of (threads, descriptors, memory), if that is why.

``gpu_ckpt_report_request``  {}
    Return the report of preflight; changes nothing.
``gpu_ckpt_summary_request``  {}
    Return the summary of the variables (`summary`), to be compared with that of a save point; changes nothing.
``gpu_ckpt_collect_request``  {}
    Collect garbage, while the kernel is still served: a quiesce that follows at once does not look through all objects.
``gpu_ckpt_quiesce_request``  {"trim": true, "files": true, "summary": false, "writes": true, "bytes": 1048576,
                               "goes_back": false}
    Flush all output.  ``trim``: release the variables that ``%gpu_checkpoint --drop`` named (for good, also if the
    checkpoint fails), collect garbage and free the caches of GPU libraries.  ``files``: close or replace what CRIU
    cannot save or restore: a debugger that was turned off (until it is turned on again), the history database, the TCP
    listener for children's output, shared mappings of deleted files.  ``summary``: the report has a summary of the
    variables, for a save point.  ``writes``: an image is to be written, of about so many ``bytes``.  ``goes_back``: the
    kernel goes back from this state.  An error reply means that all of it was undone.
``gpu_ckpt_thaw_request``  {"environ": {"NAME": "value" | null}, "notice": "text for the next cell's output",
"again": false}
    Set (null: unset) environment variables and undo quiesce.  ``again``: the kernel has come back from a save point,
    and may have lived beyond it before.  Failures to undo are listed in ``probe_errors``; the kernel works without
    these things.

``gpu_ckpt_identity_request``  {"key": "...", "reseed": false, "notebook": "path", "environ": {...}, "directory": "...",
"ports": {"old": new}}
    Become another kernel than the one that this process comes from (`identity`); after a restore, before thaw.  With
    ``environ`` and ``directory`` (both optional) as a new notebook's.  The reply has the new ``session`` id, and is
    the last message with the old one and the old key.

Quiescing twice and thawing without having quiesced are fine.  A kernel that was quiesced but never dumped, because
the server died in between, undoes quiesce by itself before it runs the next cell.  Random number generators are never
touched, but in a branch that asks for it.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from . import debugging, gpu_memory, identity, limits, mappings, messages, probes, summary
from .history import History
from .iopub import IOPub
from .magics import GpuMagics
from .server_channel import ServerChannel
from .sigterm import ignore_sigterm, obey_sigterm_if
from .trackers import Trackers

NAME = "_jupyter_gpu_ckpt_agent"
#: Seconds since the end of the last cell.
_JUST_USED_S = 60.0
#: Bytes that a dump writes, of host and device memory together, in less than ten times the time of that look: garbage
#: that is a tenth of them costs less than to find it.
_LITTLE = 4 << 30
#: Seconds since all objects were looked through for garbage.
_JUST_COLLECTED_S = 5.0


class Agent:
    """The agent of one kernel; every method is called on the main thread."""

    def __init__(self, kernel: Any, shell: Any) -> None:
        self._kernel = kernel
        self._shell = shell
        self._history = History(shell)
        self._iopub = IOPub(kernel)
        self._trackers = Trackers()
        self._watches_cells = False
        #: The end of the last cell, in seconds of `time.monotonic`.
        self._used_at = time.monotonic()
        #: When all objects were looked through for garbage, likewise.
        self._collected_at = -_JUST_COLLECTED_S
        self.server = ServerChannel(kernel)
        self.magics = GpuMagics(shell, kernel, self.server, lambda: self._iopub.port)
        #: Called without arguments on the main thread: before anything else of a quiesce, and after a thaw.
        self.on_quiesce: list[Callable[[], None]] = []
        self.on_thaw: list[Callable[[], None]] = []
        self._verbs: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "report": self.report,
            "summary": lambda content: summary.summary(self._shell),
            "collect": self.collect,
            "quiesce": self.quiesce,
            "thaw": self.thaw,
            "identity": self.become_another,
        }
        #: Work that is done when the reply to the request under way was sent.
        self._after_reply: list[Callable[[], None]] = []

    def register(self) -> None:
        """Called from `load_ipython_extension`."""
        for verb, act in self._verbs.items():
            self._kernel.shell_handlers[f"gpu_ckpt_{verb}_request"] = self._handler(verb, act)
        obey_sigterm_if(lambda: getattr(self._kernel, "_shutdown_message", None) is not None)
        self.server.register()
        self.magics.register()
        probes.probe([], "trackers", self._trackers.watch, None)
        self._notices: list[str] = []
        self._shell.events.register("post_execute", self._note_use)
        self._shell.input_transformers_cleanup.append(unmarked)
        if os.environ.pop("JUPYTER_GPU_CKPT_SAVE_AFTER_CELLS", ""):
            self._shell.events.register("post_run_cell", self._save_after_cell)
        self._notify(os.environ.pop("JUPYTER_GPU_CKPT_NOTICE", ""))  # not for the programs that this kernel starts

    def _notify(self, notice: str) -> None:
        """Show ``notice``, unless it is empty, in the output of the next cell."""
        if notice and not self._notices:
            self._shell.events.register("pre_run_cell", self._show_notices)
        self._notices += [notice] if notice else []

    def _show_notices(self, _: Any) -> None:
        """Called from IPython before the first cell that is not silent; its user sees the notices in its output."""
        self._shell.events.unregister("pre_run_cell", self._show_notices)
        print(*self._notices, sep="\n", file=sys.stderr, flush=True)
        self._notices.clear()

    def _note_use(self) -> None:
        self._used_at = time.monotonic()

    def _save_after_cell(self, result: Any) -> None:
        """Called from IPython after each cell that is not silent; one that has requested something has its own save."""
        requested, self.server.scheduled_in_cell = self.server.scheduled_in_cell, False
        if not requested:
            with contextlib.suppress(Exception):  # a kernel without a gate
                self.server.schedule("save_after_cell")
                self.server.scheduled_in_cell = False

    def unregister(self) -> None:
        """Called from `unload_ipython_extension`."""
        with contextlib.suppress(ValueError):
            self._shell.events.unregister("post_run_cell", self._save_after_cell)
        with contextlib.suppress(ValueError):
            self._shell.input_transformers_cleanup.remove(unmarked)
        with contextlib.suppress(ValueError):
            self._shell.events.unregister("post_execute", self._note_use)
        self._undo_quiesce([])
        for verb in self._verbs:
            self._kernel.shell_handlers.pop(f"gpu_ckpt_{verb}_request", None)
        self._trackers.unwatch()
        self.magics.unregister()
        self.server.unregister()

    def _handler(self, verb: str, act: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[..., Any]:
        # Awaited by ipykernel 6 and 7; `stream` is a ZMQStream there and a socket pair to the shell thread here.
        async def handler(stream: Any, ident: Any, parent: dict[str, Any]) -> None:
            with contextlib.ExitStack() as until_sent:
                stream.send_multipart(answer(until_sent, ident, parent))
            while self._after_reply:
                self._after_reply.pop()()

        def answer(until_sent: contextlib.ExitStack, ident: Any, parent: dict[str, Any]) -> list[Any]:
            def reply(content: dict[str, Any]) -> list[Any]:
                return messages.frames(self._kernel.session, f"gpu_ckpt_{verb}_reply", content, parent, ident)

            try:
                if threading.current_thread() is not threading.main_thread():
                    raise RuntimeError("send this request to the main shell, not to a subshell")
                until_sent.enter_context(_without_automatic_gc())
                return reply({"status": "ok", "report": act(parent["content"])})
            except BaseException as error:  # also KeyboardInterrupt: the caller waits for a reply
                if verb == "quiesce":  # and got no report of what was done
                    self._undo_quiesce([])
                return reply(
                    {
                        "status": "error",
                        "ename": type(error).__name__,
                        "evalue": str(error),
                        "traceback": traceback.format_exc().splitlines(),
                        "lacking": limits.shortage(error),
                    }
                )

        return handler

    # -- the requests -------------------------------------------------------------------------------------------

    def report(self, content: dict[str, Any]) -> dict[str, Any]:
        """Return what may prevent a checkpoint; changes nothing."""
        return probes.report(self._kernel, self._iopub.port, [])

    def collect(self, content: dict[str, Any]) -> dict[str, Any]:
        """Collect all garbage."""
        errors: list[str] = []
        probes.probe(errors, "gc", gc.collect, None)
        self._collected_at = time.monotonic()
        return {"probe_errors": errors}

    def quiesce(self, content: dict[str, Any]) -> dict[str, Any]:
        """Make the process ready to be suspended (``trim``) and dumped (``files``).

        After failure: everything is as before.
        """
        errors: list[str] = []
        trimmed = 0
        seconds, since = dict[str, float](), time.perf_counter()

        def measure(part: str) -> None:
            nonlocal since
            seconds[part], since = time.perf_counter() - since, time.perf_counter()

        for callback in tuple(self.on_quiesce):
            probes.probe(errors, "on_quiesce", callback, None)
        moved: mappings.Rehomed | None = None
        try:
            probes.probe(errors, "flush", self._flush, None)
            measure("flush")
            if content.get("trim", True):
                probes.probe(errors, "release", self.magics.release, 0)
                probes.probe(errors, "gc", lambda: gc.collect(self._oldest_garbage(content)), None)
                measure("gc")
                # This fails after an error of CUDA; the driver may be able to suspend the process all the same.
                trimmed = probes.probe(errors, "trim", gpu_memory.trim, 0)
                measure("trim")
            if content.get("files", True):
                # For what is closed to be opened again, too.
                limits.require_headroom(descriptors=0)
                if not probes.probe(errors, "debugger", lambda: probes.debugger_in_use(self._kernel), True):
                    probes.probe(errors, "debugger", lambda: debugging.close(self._kernel), None)
                moved = probes.probe(errors, "rehome", mappings.rehome, None)
                if not self._watches_cells:
                    self._shell.events.register("pre_execute", self._on_cell)
                    self._watches_cells = True
                self._history.close()
                self._iopub.unbind()
                measure("files")
            report = probes.report(self._kernel, self._iopub.port, errors, moved.mapped if moved else None)
            if content.get("summary"):
                report["summary"] = probes.probe(errors, "summary", lambda: summary.summary(self._shell), {})
            report["tracked"] = probes.probe(errors, "trackers", self._trackers.living, [])
            report["pipe_port"] = self._iopub.port  # open in the image, as a child has it, too
            measure("report")
        except BaseException:  # also KeyboardInterrupt: SIGINT reaches handlers as it reaches cells
            self._undo_quiesce(errors)
            raise
        report.update(trimmed_bytes=trimmed, seconds=seconds)
        if moved is not None:
            report.update(rehomed=moved.done, deleted_mappings=moved.still_deleted)  # with the reasons
        return report

    def thaw(self, content: dict[str, Any]) -> dict[str, Any]:
        """Undo quiesce, set environment variables, and show a notice in the next cell's output."""
        environ = content.get("environ") or {}
        for name, value in environ.items():  # before any is set
            if not name or "=" in name or "\0" in name + ("" if value is None else value):
                raise ValueError("not an environment variable")  # not named, for the name may be a secret
        errors: list[str] = []
        self._undo_quiesce(errors)
        if content.get("again"):
            probes.probe(errors, "history", self._history.begin_session, None)
            probes.probe(errors, "OpenSSL", identity.reseed_openssl, None)
        for name, value in environ.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._notify(content.get("notice", ""))
        for callback in tuple(self.on_thaw):
            probes.probe(errors, "on_thaw", callback, None)
        return {"pid": os.getpid(), "pipe_port": self._iopub.port, "probe_errors": errors}

    def become_another(self, content: dict[str, Any]) -> dict[str, Any]:
        """Become another kernel than the one that this process comes from."""
        errors: list[str] = []
        made = identity.become_another(self._kernel, content, errors)
        probes.probe(errors, "trackers", self._trackers.forget, None)
        self.server.kernel_id = ""
        self._iopub.listen_at(content.get("ports") or {})
        self._after_reply.append(lambda: identity.sign_as(self._kernel, made["session"], str(content["key"])))
        return {**made, "probe_errors": errors}

    def _oldest_garbage(self, content: dict[str, Any]) -> int:
        """Return the generation up to which a quiesce collects garbage.

        To look through all objects takes 0.2 s where a framework is imported, in which 10 GiB of device memory leave
        the GPU.  A suspend of a kernel that was just in use is not kept waiting by that, nor its way back to a save
        point, nor a checkpoint of little memory: what is garbage in a cycle for long moves with the rest.  Nor is a
        save, if it can be no device memory.
        """
        just_used = time.monotonic() - self._used_at < _JUST_USED_S
        little = not content.get("writes", True) or content.get("bytes", _LITTLE) < _LITTLE
        waits_not = just_used and (little or content.get("goes_back"))
        waits_not = waits_not or time.monotonic() - self._collected_at < _JUST_COLLECTED_S
        if waits_not or (content.get("summary") and not gpu_memory.initialized()):
            return 1
        return 2

    # -- steps --------------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        streams = [sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__]
        for logger in (logging.getLogger(), *logging.Logger.manager.loggerDict.values()):
            for handler in getattr(logger, "handlers", ()):
                # Other handlers buffer records on purpose (MemoryHandler).
                if isinstance(handler, logging.StreamHandler):
                    if type(handler).flush is logging.StreamHandler.flush:
                        streams.append(handler.stream)
                    else:
                        handler.flush()
        # Each once: PyTorch has forty handlers of one stream, and ipykernel's wait for another thread at each flush.
        for stream in {id(stream): stream for stream in streams}.values():
            if stream is not None and hasattr(stream, "flush") and not getattr(stream, "closed", False):
                stream.flush()
        self._iopub.flush()

    def _undo_quiesce(self, errors: list[str]) -> None:
        """Undo the ``files`` part of `quiesce`, in reverse; a step that fails does not stop the others.

        What cannot be opened, because a limit of the kernel is reached, is tried again before each cell.
        """
        probes.probe(errors, "pipe", self._iopub.bind, None)
        if problem := probes.probe(errors, "history", self._history.reopen, ""):
            errors.append(problem)
            self._notify(f"IPython's {problem}.")
        if self._watches_cells and self._history.complete and self._iopub.complete:
            self._watches_cells = False
            probes.probe(errors, "events", lambda: self._shell.events.unregister("pre_execute", self._on_cell), None)

    def _on_cell(self) -> None:
        """Called from IPython before a cell runs; after a thaw it is not registered any more."""
        self._undo_quiesce([])


def unmarked(lines: list[str]) -> list[str]:
    """Remove the first line of a cell that is marked as risky: the gate has had a save point made before it."""
    first = next((number for number, line in enumerate(lines) if line.strip()), 0)
    if lines and lines[first].split() == ["%%risky"]:
        return [*lines[:first], "\n", *lines[first + 1 :]]
    return lines


def load_ipython_extension(ip: Any) -> None:
    """Called from IPython's extension manager; shells without a kernel get no agent."""
    kernel = getattr(ip, "kernel", None)
    if kernel is None or hasattr(ip, NAME):
        return
    agent = Agent(kernel, ip)
    agent.register()
    setattr(ip, NAME, agent)


def unload_ipython_extension(ip: Any) -> None:
    """Called from ``%unload_ext``."""
    if (agent := getattr(ip, NAME, None)) is not None:
        agent.unregister()
        delattr(ip, NAME)


#: Whether a request keeps the automatic collections off which the program has.
_kept_off = threading.Event()


@contextlib.contextmanager
def _without_automatic_gc() -> Iterator[None]:
    """Answer a request without a collection by Python itself, for which 0.2 s pass where a framework was imported.

    One that is due begins once the reply has gone.  `Agent.quiesce` decides what is collected.
    """
    enabled = gc.isenabled()
    try:  # an interrupt at any moment leaves it as it was
        if enabled:
            _kept_off.set()
        gc.disable()
        yield
    finally:
        if enabled:
            gc.enable()
        _kept_off.clear()


def _collect_in_child() -> None:
    """Called in a child that another thread forks during a request: nobody else would turn collections on there."""
    if _kept_off.is_set():
        gc.enable()


os.register_at_fork(after_in_child=_collect_in_child)


def attach() -> None:
    """Have the kernel application load the agent, after the user's own extensions and before any user code.

    Called from launch.py; raises when IPython is missing or incompatible.
    """
    from IPython.core.shellapp import InteractiveShellApp

    app: Any = InteractiveShellApp
    init_extensions = app.init_extensions
    ignore_sigterm()
    # By default the store of torch.distributed uses libuv, and so io_uring, which CRIU cannot save.  Its other backend
    # does without (torch/distributed/rendezvous.py reads this variable).
    os.environ.setdefault("USE_LIBUV", "0")

    def init_extensions_and_agent(self: Any) -> None:
        init_extensions(self)
        try:
            self.shell.extension_manager.load_extension(NAME)
        except Exception as error:
            text = f"jupyter_gpu_ckpt: no agent in this kernel ({type(error).__name__}: {error})"
            if sys.__stderr__ is not None:  # the raw one: sys.stderr is the notebook's already
                print(text, file=sys.__stderr__)

    app.init_extensions = init_extensions_and_agent
