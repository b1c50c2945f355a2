"""What one kernel id has on this host: a directory with its claim, the gate, and the kernel's lifecycle.

The provisioner says what is to be started (`Launch`); here a kernel is launched into a capsule, or adopted with what
its last owner left, and what clients ask of it through the gate is brought to its lifecycle.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..capsule.capsule import Capsule
from ..cuda import fastpath
from ..errors import CapsuleGone, GpuCkptError, KernelUnfit, RuntimeDirectory
from ..gate.gate import Gate, GateState
from ..lifecycle.context import Engine, Home
from ..lifecycle.driver import Lifecycle
from ..lifecycle.machine import State
from ..lifecycle.settings import LifecycleSettings
from ..trace import Sink, Trace
from .adoption import Orphan, Session, ended_notice, newest_image_of
from .agent_injection import NOTICE, rewrite
from .agent_requests import AgentRequests
from .directories import free_ports, make_runtime_dir
from .registry import Registration, claim_lost, reap
from .worker import Worker


@dataclass(frozen=True)
class Launch:
    """What the kernel manager wants started.

    ``front``: the connection info clients use, and ``connection_file`` where ``cmd`` would read it.  ``root``: the root
    directory of the server, if there is one.  ``base``: the directory of the kernels' sockets.  ``fast_path``: whether
    the kernel is to have the library for device memory, if it can.  Times in seconds.
    """

    cmd: list[str]
    connection_file: str
    front: dict[str, Any]
    kernel_name: str
    root: str
    base: Path
    env: dict[str, str]
    cwd: str
    outlive: bool
    start_timeout: float
    settings: LifecycleSettings
    fast_path: bool = False
    stdout: Any = None
    stderr: Any = None


def _back_info(directory: Path, front: Mapping[str, Any]) -> dict[str, Any]:
    """Where the kernel itself listens: unix sockets in its directory, under the key the clients have too."""
    channels = ("shell", "iopub", "stdin", "control", "hb")
    return {
        "transport": "ipc",
        "ip": str(directory / "kernel"),
        **{f"{channel}_port": port for port, channel in enumerate(channels, 1)},
        "key": front["key"],
        "signature_scheme": front["signature_scheme"],
        "kernel_name": front.get("kernel_name", ""),
    }


def _early_exit(status: int) -> KernelUnfit:
    ended = f"was ended by signal {-status}" if status < 0 else f"ended with exit status {status}"
    return KernelUnfit(
        f"The kernel {ended} before it had answered from its capsule, and was started again without one.",
        left="the kernel runs, plainly",
        status=status,
    )


@contextlib.contextmanager
def _watched(process: subprocess.Popen[bytes], told: Callable[[], None]) -> Iterator[None]:
    """If ``process`` ends during the body, call ``told`` on another thread until the body ends."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            if process.poll() is not None:
                with contextlib.suppress(GpuCkptError):
                    told()

    watcher = threading.Thread(target=watch, name="kernel-watch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


class KernelHost:
    """The place of one kernel id, empty or with a kernel in it; a restart puts another one in.

    ``on_state`` is called with each new state and the kernel's pid (None while it has no process), ``on_step`` with
    each event of the trace, on the thread of whoever made them; ``on_shutdown`` when a client's message has ended a
    kernel that was away, with whether it is to be restarted.  ``faults`` are those of the trace, for tests.
    ``on_early_exit`` is called on the worker's thread when a kernel ended before its first answer, with what to say of
    that and the command by which to start it plainly; it returns the process, or None where nobody wants it.
    ``on_fallback`` is called when that one has answered.
    ``on_protected`` is called with the moment until which the kernel is protected, when that was set or (None) ended.
    """

    def __init__(
        self,
        kernel_id: str,
        *,
        on_state: Callable[[State, int | None], None],
        on_step: Sink,
        on_shutdown: Callable[[Lifecycle, bool], None],
        faults: list[Sink],
        on_early_exit: Callable[[KernelUnfit, list[str]], subprocess.Popen[bytes] | None],
        on_fallback: Callable[[KernelUnfit], None],
        on_protected: Callable[[float | None], None],
        log: logging.Logger | logging.LoggerAdapter[Any],
    ) -> None:
        self.kernel_id = kernel_id
        self.lifecycle: Lifecycle | None = None
        #: The lifecycle of the kernel that has ended, until another one comes.
        self.last: Lifecycle | None = None
        self.gate: Gate | None = None
        self.agent_requests = AgentRequests(log)
        #: Where the kernel's verbs run.  (A provisioner that is made only to read its settings has no kernel id.)
        self.worker = Worker(f"gpu-ckpt-{(kernel_id or '')[:8]}")
        self._on_state, self._on_step, self._on_shutdown = on_state, on_step, on_shutdown
        self._faults, self._log = faults, log
        self._on_early_exit, self._on_fallback = on_early_exit, on_fallback
        self._on_protected = on_protected
        self._unanswered: Lifecycle | None = None
        self._front: dict[str, Any] = {}
        self._registration: Registration | None = None

    @property
    def directory(self) -> Path | None:
        """The kernel's runtime directory."""
        return self._registration.directory if self._registration else None

    @property
    def reachable(self) -> bool:
        """Whether the kernel gets what is sent to it: a wake opens the gate before the last of its steps is done."""
        return self.gate is not None and self.gate.state in (GateState.OPEN, GateState.DRAINING)

    @property
    def awaits_first_answer(self) -> bool:
        """Whether the kernel was just launched and has yet to answer: if it ends now, another may take its place."""
        return self._unanswered is not None and self._unanswered is self.lifecycle

    # -- a kernel comes

    def start(self, engine: Engine, launch: Launch, found: Orphan | None) -> None:
        """Adopt ``found``, or launch a fresh kernel where there is none, or none any more.

        Raises `HostError` when neither can be done here; whatever was found is then left as it was.
        """
        if found is not None:
            try:
                return self._attach(engine, launch, found)
            except CapsuleGone:
                # It ended since it was found.  What it left on disk, if anything, is older than its end: kept, but not
                # brought back as if nothing had been.
                last = newest_image_of(self.kernel_id, engine.store)
                if last is not None and last.image is not None:
                    last.image.retire()
                notice = ended_notice(last)
                self._log.warning("Kernel %s: %s", self.kernel_id, notice)
                launch = dataclasses.replace(launch, env={**launch.env, NOTICE: notice})
        return self._launch(engine, launch)

    def _launch(self, engine: Engine, launch: Launch) -> None:
        if self._registration is None:
            reap(launch.base)
            launch = self._with_notice(engine, launch)
            self._registration = Registration(make_runtime_dir(launch.base))
        else:
            self._registration.renew()
        directory = self._registration.directory
        back = _back_info(directory, launch.front)
        file = directory / "connection.json"
        try:
            for stale in directory.glob("kernel-*"):
                stale.unlink()
            file.touch(0o600)
            file.write_text(json.dumps(back))
        except OSError as error:
            raise RuntimeDirectory(f"{directory} cannot be written: {error.strerror}.") from error
        argv = [argument.replace(launch.connection_file, str(file)) for argument in launch.cmd]
        rewritten = rewrite(argv)
        # 1 turns ipykernel's parent poller off: inside the capsule the parent is always pid 1.
        env = {**launch.env, "JPY_PARENT_PID": "1"}
        if launch.fast_path and rewritten is not None:  # a wrapper would use it up before the kernel
            env |= fastpath.environment(directory, env)
        session = Session(
            kernel_id=self.kernel_id,
            kernel_name=launch.kernel_name,
            runtime_dir=str(directory),
            has_agent=rewritten is not None,
            path=launch.cwd,
            front=launch.front,
            root=launch.root,
            notebook=env.get("JPY_SESSION_NAME", ""),
        )
        gate, lifecycle = self._prepare(engine, launch, session, back)
        launched: Future[bool] = Future()
        self._unanswered = lifecycle
        # Submitted before the kernel runs: a verb that came first would find a gate that was never opened.
        self.worker.submit(functools.partial(self._connect_launched, lifecycle, gate, launch, launched))
        try:
            lifecycle.launch(rewritten or argv, env, launch.cwd)
        finally:
            launched.set_result(lifecycle.state is State.RUNNING)

    def _with_notice(self, engine: Engine, launch: Launch) -> Launch:
        """The launch of a kernel that says so if it takes the place of one that ended together with its server."""
        lost = claim_lost(launch.base, self.kernel_id, launch.env.get("JPY_SESSION_NAME", ""))
        if not lost or NOTICE in launch.env:
            return launch
        notice = ended_notice(newest_image_of(lost, engine.store))
        self._log.warning("Kernel %s: %s", self.kernel_id, notice)
        return dataclasses.replace(launch, env={**launch.env, NOTICE: notice})

    def _attach(self, engine: Engine, launch: Launch, found: Orphan) -> None:
        """Instead of launching: be the owner of a kernel whose own is gone."""
        # A sleeping kernel gets a directory of this host's; it will find it where it was (`Home.known_as`).
        known_as = Path(found.session.runtime_dir)
        directory = found.directory or launch.base / known_as.name
        make_runtime_dir(directory.parent, directory.name)
        self._registration = Registration(directory)
        capsule: Capsule | None = None
        try:
            capsule = Capsule.attach(directory) if found.directory else None
            session = dataclasses.replace(found.session, front=launch.front)
            gate, lifecycle = self._prepare(engine, launch, session, _back_info(directory, session.front))
            lifecycle.attach(capsule=capsule, image=found.image)
        except BaseException:
            # It is left as it was found, for the next try.
            self._stop_gate()
            if capsule is not None:
                capsule.detach()
            self._registration.release()
            self._registration = self.lifecycle = None
            raise
        self._log.info("Kernel %s was adopted, %s", self.kernel_id, lifecycle.state.value)
        if lifecycle.state is State.RUNNING:
            self.worker.submit(functools.partial(self._connect_attached, lifecycle, gate, launch.start_timeout))

    def _prepare(
        self, engine: Engine, launch: Launch, session: Session, back: dict[str, Any]
    ) -> tuple[Gate, Lifecycle]:
        """The gate and the lifecycle of a kernel that is about to be launched or adopted."""
        assert self._registration is not None
        registration = self._registration
        directory = registration.directory

        def write_session(place: Path) -> None:
            dataclasses.replace(session, identity=gate.identity, protected_until=agent_requests.protection()).write(
                place
            )

        def renew() -> None:
            if registration.renew():
                self._log.warning("Kernel %s: its runtime directory was removed, and is made again", self.kernel_id)
                self._note_identity(lifecycle)

        # What an earlier process had asked for went with it; what an adopted one has, its session says.
        agent_requests = self.agent_requests = AgentRequests(
            self._log,
            protected_until=session.protected_until,
            remember=lambda: write_session(directory),
            on_protected=self._on_protected,
        )
        if self.gate is None or session.front != self._front:
            self._stop_gate()
            self.gate = Gate(
                session.front,
                back,
                on_wake=self._on_wake,
                on_agent_request=self._on_agent_request,
                kernel_id=self.kernel_id,
                log=self._log,
                identity=session.identity,
            )
            self.gate.start()
            self._front = session.front
        else:
            self.gate.rebind_kernel(back)
        gate = self.gate
        home = Home(
            kernel_id=self.kernel_id,
            kernel_name=session.kernel_name,
            runtime_dir=directory,
            has_agent=session.has_agent,
            known_as=Path(session.runtime_dir),
            renew=renew,
            outlive=launch.outlive,
            write_session=write_session,
            stdout=launch.stdout,
            stderr=launch.stderr,
        )
        try:
            session.write(directory)
        except OSError as error:
            raise RuntimeDirectory(f"{directory} cannot be written: {error.strerror}.") from error
        trace = Trace(self.kernel_id, [self._on_step], self._faults)
        self.lifecycle = lifecycle = Lifecycle(home, engine, gate, settings=launch.settings, trace=trace)
        lifecycle.on_state.append(functools.partial(self._note_state, lifecycle))
        return gate, lifecycle

    def _connect_launched(self, lifecycle: Lifecycle, gate: Gate, launch: Launch, launched: Future[bool]) -> None:
        """First contact with a fresh kernel; clients' messages wait in the gate until then.

        Where it ends before it has answered, a plain one takes its place behind the gate.
        """
        plain: subprocess.Popen[bytes] | None = None
        try:
            capsule = lifecycle.capsule if launched.result() else None
            if capsule is None:
                return
            answered = False
            with contextlib.suppress(CapsuleGone), capsule.watch_exit(gate.close):
                answered = self._open_gate(gate, launch.start_timeout)
            status = capsule.poll()
            if answered or lifecycle is not self.lifecycle:
                return
            if status is None:
                self._log.error("Kernel %s does not answer through the gate.", self.kernel_id)
                return
            back, argv = self._plain_command(launch)
            error = _early_exit(status)
            plain = self._on_early_exit(error, argv)
            if plain is not None:
                lifecycle.on_state.clear()  # for everybody else the kernel has not ended
                self.lifecycle = None
                capsule.close()
        finally:
            if self._unanswered is lifecycle:
                self._unanswered = None
        if plain is not None:
            gate.rebind_kernel(back)
            with _watched(plain, gate.close):
                answered = self._open_gate(gate, launch.start_timeout)
            if answered:
                self._on_fallback(error)

    def _connect_attached(self, lifecycle: Lifecycle, gate: Gate, timeout: float) -> None:
        """First contact with a kernel that was adopted while it ran."""
        if not self._open_gate(gate, timeout) and lifecycle is self.lifecycle and lifecycle.poll() is None:
            self._log.error("Kernel %s does not answer through the gate.", self.kernel_id)

    def _plain_command(self, launch: Launch) -> tuple[dict[str, Any], list[str]]:
        """Where a kernel without a capsule is to listen, on TCP as kernels do by themselves, and its command."""
        assert self._registration is not None
        back = {**_back_info(self._registration.directory, launch.front), "transport": "tcp", "ip": "127.0.0.1"}
        back.update(zip((name for name in back if name.endswith("_port")), free_ports(5), strict=True))
        file = self._registration.directory / "plain.json"
        file.touch(0o600)
        file.write_text(json.dumps(back))
        return back, [argument.replace(launch.connection_file, str(file)) for argument in launch.cmd]

    def _open_gate(self, gate: Gate, timeout: float) -> bool:
        """Open the gate to a kernel that runs; whether that has answered."""
        try:
            gate.open(timeout)
            if self.lifecycle is not None:
                self._note_identity(self.lifecycle)  # before it has any work in it
            # Its own idle was for the gate, and a server that restarted it by itself asks nothing: to that one it would
            # be starting, or be busy with the cell in which it died, until somebody runs something.
            gate.publish("status", {"execution_state": "idle"})
            gate.release()
        except GpuCkptError as error:
            self._log.info("Kernel %s has not answered: %s", self.kernel_id, error.code)
            return False
        return True

    def _note_identity(self, lifecycle: Lifecycle) -> None:
        """For a server that adopts the living kernel: it must not ask who that is, see `Router.open`."""
        if self._registration is None or lifecycle.home.write_session is None:
            return
        try:
            lifecycle.home.write_session(self._registration.directory)
        except OSError as error:
            self._log.warning("Kernel %s: its session could not be written: %s", self.kernel_id, error.strerror)

    def _note_state(self, lifecycle: Lifecycle, state: State) -> None:
        """The kernel has another state, and perhaps another process: keep the record others look at up to date."""
        pid = lifecycle.capsule.host_pid if lifecycle.capsule else None
        if self.agent_requests.panel is not None:
            self.agent_requests.panel.changed(state)
        self._on_state(state, pid)
        if self._registration is not None:
            try:
                self._registration.write(
                    kernel_id=self.kernel_id,
                    kernel_name=lifecycle.home.kernel_name,
                    state=state.value,
                    pid=pid,
                    image=lifecycle.image.id if lifecycle.image else None,
                )
            except OSError as error:
                self._log.warning("Kernel %s: its record could not be written: %s", self.kernel_id, error.strerror)

    # -- and goes

    def clear(self) -> None:
        """The kernel has ended; what is to become of its image is still to be said."""
        self.last, self.lifecycle = self.lifecycle, None

    def close(self) -> None:
        """No kernel of ours is here: clients are not served."""
        self._stop_gate()
        self.lifecycle = None

    def end(self) -> None:
        """Nothing comes after the kernel that has ended: give everything up."""
        self._stop_gate()
        self.worker.end()
        if self._registration is not None:
            self._registration.remove()
            self._registration = None

    def detach(self) -> None:
        """Release everything as it is, for another owner to find; a living kernel goes on."""
        # First of all: from here on no verb reaches the kernel, and nobody ends it.
        lifecycle, self.lifecycle, self.last = self.lifecycle, None, None
        if lifecycle is None:
            return
        self._stop_gate()
        lifecycle.detach()
        self.worker.end()
        if self._registration is not None:
            self._registration.release()
            self._registration = None

    def _stop_gate(self) -> None:
        if self.gate is not None:
            self.gate.stop()
            self.gate = None

    # -- what the gate tells us, on its thread

    def _on_wake(self, msg_type: str) -> None:
        self._log.info("Waking kernel %s for a client's %s", self.kernel_id, msg_type)
        self.worker.submit(self._wake)

    def _wake(self) -> None:
        lifecycle = self.lifecycle
        if lifecycle is None:
            return
        try:
            lifecycle.wake()
        except GpuCkptError as error:
            current = self.lifecycle
            if current is None or current.state is State.DEAD:
                return  # it was ended meanwhile; jupyter_client learns that by polling
            self._log.error("Kernel %s could not be woken: %s", self.kernel_id, error.code)
        except Exception as error:
            told = self._unexpected("wake", error)
            with contextlib.suppress(GpuCkptError):  # it came back all the same, or its gate is gone
                lifecycle.gate.fail(told)

    def _unexpected(self, verb: str, error: Exception) -> GpuCkptError:
        """An error that is none of ours: a fault in this program, whose log must tell where."""
        self._log.error("Kernel %s: an unexpected error in %s", self.kernel_id, verb, exc_info=error)
        return GpuCkptError(f"{type(error).__name__}: {error}")

    def _on_agent_request(self, content: dict[str, Any]) -> None:
        """The kernel itself (a magic), or a client of a sleeping kernel, asks for a verb."""
        lifecycle, gate = self.lifecycle, self.gate
        if lifecycle is None or gate is None:
            return
        if content.get("now"):
            self.agent_requests.answer(content, lifecycle, gate)
            return
        verbs: dict[str, Callable[[], Any]] = {"suspend": lifecycle.suspend, "checkpoint": lifecycle.checkpoint}
        verb = str(content.get("verb"))
        if verb == "shutdown":
            # Not on the worker: it does not wait for the verb under way there but ends it.
            restart = bool(content.get("restart"))
            arguments = (functools.partial(self._shut_down, lifecycle, restart), gate)
            threading.Thread(target=self._run_verb, args=arguments, name="gpu-ckpt-shutdown", daemon=True).start()
        elif verb in verbs:
            self.worker.submit(functools.partial(self._run_verb, verbs[verb], gate))
        else:
            self._log.warning("Kernel %s asked for something unknown.", self.kernel_id)

    def _shut_down(self, lifecycle: Lifecycle, restart: bool) -> None:
        lifecycle.terminate()
        self._on_shutdown(lifecycle, restart)

    def _run_verb(self, call: Callable[[], Any], gate: Gate) -> None:
        try:
            call()
        except Exception as foreign:
            error = foreign if isinstance(foreign, GpuCkptError) else self._unexpected("what it asked for", foreign)
            self._log.warning("Kernel %s did not do what was asked: %s", self.kernel_id, error.code)
            if gate.state is GateState.DRAINING:
                gate.release()  # kept for us since the cell that asked
            if gate.state is GateState.OPEN:
                self.agent_requests.report_failure(error, gate)
