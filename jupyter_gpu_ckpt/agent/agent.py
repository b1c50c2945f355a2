"""The agent inside the kernel: makes it ready for a checkpoint, and mends it after a restore.

Loaded by launch.py as ``_jupyter_gpu_ckpt_agent`` (with this folder as its package) into whatever environment the
kernel runs in: standard library and IPython/ipykernel only, Python >= 3.8, ipykernel >= 6.

It answers three requests on the shell channel, so on the kernel's main thread and between cells.  Each reply has
``status``: ``ok`` with ``report``, or ``error`` with ``ename``, ``evalue`` and ``traceback``.

``gpu_ckpt_report_request``  {}
    The report, without changing anything: for preflight.
``gpu_ckpt_quiesce_request``  {"trim": true, "files": true}
    Flush all output.  ``trim``: release the variables that ``%gpu_checkpoint --drop`` named (for good, also if the
    kernel stays), collect garbage and free the caches of GPU libraries.  ``files``: let go of what
    cannot be saved by CRIU, or not be restored by it: a debugger that was turned off (for good, until it is turned on
    again), the history database, the TCP listener for children's output, shared mappings of deleted files.  An error
    reply means that all of it has been undone.
``gpu_ckpt_thaw_request``  {"environ": {"NAME": "value" | null}, "notice": "text for the next cell's output"}
    Set (null: unset) environment variables and take back what quiesce let go of.  What cannot be taken back is told in
    ``probe_errors`` and hurts nobody: the kernel works without it.

Quiescing twice and thawing without having quiesced are fine.  A kernel that was quiesced but never dumped, because
the server died in between, takes everything back by itself before it runs the next cell.  Random number generators
are never touched.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from . import debugging, gpu_memory, mappings, probes
from .history import History
from .iopub import IOPub
from .magics import GpuMagics
from .server_channel import Outside
from .sigterm import spare
from .trackers import Trackers

NAME = "_jupyter_gpu_ckpt_agent"


class Agent:
    """The agent of one kernel; every method is called on the main thread."""

    def __init__(self, kernel: Any, shell: Any) -> None:
        self._kernel = kernel
        self._shell = shell
        self._history = History(shell)
        self._iopub = IOPub(kernel)
        self._trackers = Trackers()
        self._healing = False
        self.outside = Outside(kernel)
        self.magics = GpuMagics(shell, kernel, self.outside, lambda: self._iopub.port)
        #: Called without arguments on the main thread: the last thing before the kernel may go, the first when it is
        #: back, or stayed.
        self.on_leave: list[Callable[[], None]] = []
        self.on_return: list[Callable[[], None]] = []

    def register(self) -> None:
        """Called from `load_ipython_extension`."""
        for verb in ("report", "quiesce", "thaw"):
            self._kernel.shell_handlers[f"gpu_ckpt_{verb}_request"] = self._handler(verb, getattr(self, verb))
        self.outside.register()
        self.magics.register()
        probes.probe([], "trackers", self._trackers.watch, None)
        self._notices: list[str] = []
        self._notify(os.environ.pop("JUPYTER_GPU_CKPT_NOTICE", ""))  # what this kernel starts is not meant

    def _notify(self, notice: str) -> None:
        """Show ``notice``, unless it is empty, in the output of the next cell."""
        if notice and not self._notices:
            self._shell.events.register("pre_run_cell", self._show_notices)
        self._notices += [notice] if notice else []

    def _show_notices(self, _: Any) -> None:
        """Called from IPython before the first cell that is not silent: its output is where its user looks."""
        self._shell.events.unregister("pre_run_cell", self._show_notices)
        print(*self._notices, sep="\n", file=sys.stderr, flush=True)
        self._notices.clear()

    def unregister(self) -> None:
        """Called from `unload_ipython_extension`."""
        self._take_back([])
        for verb in ("report", "quiesce", "thaw"):
            self._kernel.shell_handlers.pop(f"gpu_ckpt_{verb}_request", None)
        self._trackers.unwatch()
        self.magics.unregister()
        self.outside.unregister()

    def _handler(self, verb: str, act: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[..., Any]:
        # Awaited by ipykernel 6 and 7; `stream` is a ZMQStream there and a socket pair to the shell thread here, all
        # for session.send.
        async def handler(stream: Any, ident: Any, parent: dict[str, Any]) -> None:
            try:
                if threading.current_thread() is not threading.main_thread():
                    raise RuntimeError("to be asked on the main shell, not on a subshell")
                content = {"status": "ok", "report": act(parent["content"])}
            except BaseException as error:  # also KeyboardInterrupt: the caller waits for an answer
                content = {
                    "status": "error",
                    "ename": type(error).__name__,
                    "evalue": str(error),
                    "traceback": traceback.format_exc().splitlines(),
                }
            self._kernel.session.send(stream, f"gpu_ckpt_{verb}_reply", content, parent, ident)

        return handler

    # -- the three requests -------------------------------------------------------------------------------------------

    def report(self, content: dict[str, Any]) -> dict[str, Any]:
        """What stands in the way of a checkpoint; changes nothing."""
        return probes.report(self._kernel, self._iopub.port, [])

    def quiesce(self, content: dict[str, Any]) -> dict[str, Any]:
        """Make the process ready to be suspended (``trim``) and dumped (``files``).

        After failure: everything is as before.
        """
        errors: list[str] = []
        trimmed, rehomed = 0, 0
        for tell in tuple(self.on_leave):
            probes.probe(errors, "leave", tell, None)
        still_deleted: list[dict[str, Any]] | None = None
        try:
            probes.probe(errors, "flush", self._flush, None)
            if content.get("trim", True):
                probes.probe(errors, "release", self.magics.release, 0)
                probes.probe(errors, "gc", gc.collect, None)
                # After an error of CUDA's own nothing can be trimmed; whether it can be suspended is the driver's say.
                trimmed = probes.probe(errors, "trim", gpu_memory.trim, 0)
            if content.get("files", True):
                if not probes.probe(errors, "debugger", lambda: probes.debugger_in_use(self._kernel), True):
                    probes.probe(errors, "debugger", lambda: debugging.close(self._kernel), None)
                rehomed, still_deleted = probes.probe(errors, "rehome", mappings.rehome, (0, None))
                self._watch_for_cells()
                self._history.park()
                self._iopub.unbind()
            report = probes.report(self._kernel, self._iopub.port, errors)
            report["tracked"] = probes.probe(errors, "trackers", self._trackers.living, [])
        except BaseException:  # also KeyboardInterrupt: SIGINT reaches handlers as it reaches cells
            self._take_back(errors)
            raise
        report.update(trimmed_bytes=trimmed, rehomed=rehomed)
        if still_deleted is not None:
            report["deleted_mappings"] = still_deleted  # with the reasons
        return report

    def thaw(self, content: dict[str, Any]) -> dict[str, Any]:
        """Take back what quiesce let go of, refresh environment variables, and have the next cell show a notice."""
        environ = content.get("environ") or {}
        for name, value in environ.items():
            if not name or "=" in name or "\0" in name + ("" if value is None else value):
                raise ValueError("not an environment variable")  # before any is set; the name may be a secret
        errors: list[str] = []
        self._take_back(errors)
        for name, value in environ.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._notify(content.get("notice", ""))
        for tell in tuple(self.on_return):
            probes.probe(errors, "return", tell, None)
        return {"pid": os.getpid(), "pipe_port": self._iopub.port, "probe_errors": errors}

    # -- steps --------------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            if stream is not None and not stream.closed:
                stream.flush()
        loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
        for logger in loggers:
            for handler in getattr(logger, "handlers", ()):
                # Others keep records back on purpose (MemoryHandler).
                if isinstance(handler, logging.StreamHandler):
                    handler.flush()
        self._iopub.drain()

    def _take_back(self, errors: list[str]) -> None:
        """Undo the ``files`` part of `quiesce`, in reverse; each step whether or not another one fails."""
        probes.probe(errors, "pipe", self._iopub.bind, None)
        problem = probes.probe(errors, "history", self._history.unpark, "")
        if problem:
            errors.append(problem)
        if self._healing:
            self._healing = False
            probes.probe(errors, "events", lambda: self._shell.events.unregister("pre_execute", self._heal), None)

    def _watch_for_cells(self) -> None:
        if not self._healing:
            self._shell.events.register("pre_execute", self._heal)
            self._healing = True

    def _heal(self) -> None:
        """Called from IPython before a cell runs; after a thaw it is not registered any more."""
        self._take_back([])


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
    agent = getattr(ip, NAME, None)
    if agent is not None:
        agent.unregister()
        delattr(ip, NAME)


def attach() -> None:
    """Have the kernel application load the agent, after the user's own extensions and before any user code.

    Called from launch.py; raises when IPython is missing or has changed beyond recognition.
    """
    from IPython.core.shellapp import InteractiveShellApp

    app: Any = InteractiveShellApp
    init_extensions = app.init_extensions
    spare()

    def init_extensions_and_agent(self: Any) -> None:
        init_extensions(self)
        try:
            self.shell.extension_manager.load_extension(NAME)
        except Exception as error:
            if sys.__stderr__ is not None:  # the raw one: sys.stderr is the notebook's already
                print(
                    f"jupyter_gpu_ckpt: no agent in this kernel ({type(error).__name__}: {error})", file=sys.__stderr__
                )

    app.init_extensions = init_extensions_and_agent
