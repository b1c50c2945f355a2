"""One kernel id on this host: its directory, which is locked, its gate and its lifecycle.

The provisioner says what is to be started (`Launch`).  Here a kernel is launched into a capsule, or the one that an
earlier owner left is attached, and what clients request through the gate is passed to the lifecycle.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jupyter_client.connect import LocalPortCache

from ..capsule.capsule import Capsule
from ..cuda import fastpath
from ..errors import CapsuleGone, GpuCkptError, KernelUnfit, StateError
from ..files.atomic import write_atomically
from ..gate.gate import Gate, GateState
from ..image import branch
from ..image.branch import NewKernel
from ..image.save_point import SavePoint, find
from ..image.store import Image
from ..lifecycle import going_back
from ..lifecycle.context import Engine, Home
from ..lifecycle.lifecycle import Lifecycle
from ..lifecycle.plans import State, Step
from ..lifecycle.settings import LifecycleSettings
from ..node.changed_files import how_to_accept
from ..process import descriptors
from ..terminal_text import printable
from ..trace import Sink, StepEvent, Trace
from . import automatic_saves, branching
from .agent_injection import NOTICE, rewrite
from .agent_requests import AgentRequests, gpu_map_to
from .directories import make_runtime_dir, short_socket_path, writing
from .engine import shared_exchange
from .gpu_sharing import GpuSharing
from .orphans import Orphan, Session, ended_notice, newest_images, without_template_notice
from .registry import Registration, claim_lost, reap
from .worker import Worker

#: Why kernels of a `Launch.key` are started plainly, as long as this process lives.  They end before their first answer
#: in a capsule: for example because they can listen on TCP only.
UNFIT: dict[tuple[str, ...], KernelUnfit] = {}
#: How changed files are accepted for a branch, by each way to request one (docs/branches.md).
_ACCEPT_IN_BRANCH = "begin the branch with `--accept-changed-files`"
#: Signals that others send, Linux where memory is short among them: a kernel that they end may well live in a capsule.
_SENT = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


#: The fields of `BranchPoint`, true or false, that a request for a branch may set.
BRANCH_FLAGS = ("reseed", "accept_differences", "accept_changed_files")


@dataclass(frozen=True)
class BranchPoint:
    """The image that a kernel starts from, in place of a launch: that of another kernel.

    ``reseed``, ``is_template``: see `image.branch.NewKernel`.  ``accept_changed_files``: for its restore; None: as is
    recorded with the image (`Image.accept_changed_files`), or else as the settings say.  ``accept_differences``: it may
    start although something cannot exist twice (`branching.BranchPlan`).  ``gpu_map``: as for `Lifecycle.restore`.
    """

    image: str
    reseed: bool = False
    is_template: bool = False
    accept_changed_files: bool | None = None
    accept_differences: bool = False
    gpu_map: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Launch:
    """The kernel to start, as the kernel manager describes it.

    ``front`` is the connection info for clients, ``connection_file`` the path of it in ``cmd``, ``root`` the root
    directory of the server, if there is one, ``base`` the directory of the kernels' sockets.  ``fast_path``: whether
    the kernel preloads the library for device memory, if it can: "auto" (its children, too), "kernel" or "off".
    ``branch``: what it starts from, if that is an image.  ``fallback_name``: `Session.fallback_name`.
    Times in seconds.
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
    fast_path: str = "off"
    stdout: Any = None
    stderr: Any = None
    branch: BranchPoint | None = None
    fallback_name: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        """The common properties of one kernelspec's kernels: name, and command without the path of the connection."""
        return (self.kernel_name, *(word.replace(self.connection_file, "{connection_file}") for word in self.cmd))


def with_notice(launch: Launch, notice: str) -> Launch:
    """Return ``launch`` with a notice that the user reads in the kernel's first cell."""
    return dataclasses.replace(launch, env={**launch.env, NOTICE: notice})


class KernelOwner(Protocol):
    """The methods that a `KernelHost` calls in its owner, the provisioner.  None may call the gate or block."""

    faults: list[Sink]

    def state_changed(self, state: State, pid: int | None) -> None: ...
    def step_traced(self, event: StepEvent) -> None: ...
    def protection_changed(self, until: float | None) -> None: ...
    def notebook(self) -> bytes | None: ...
    def end_announced(self, lifecycle: Lifecycle, restart: bool) -> None: ...
    def keep_or_discard_image(self, lifecycle: Lifecycle, restart: bool) -> None: ...
    def start_plainly(self, error: KernelUnfit, cmd: list[str]) -> subprocess.Popen[bytes] | None: ...
    def branch_requested(
        self, content: Mapping[str, Any], on_end: Callable[[str, str, GpuCkptError | None], None]
    ) -> None: ...


def _back_info(directory: Path, front: Mapping[str, Any], sockets: str = "") -> dict[str, Any]:
    """Return the kernel's own connection info: unix sockets in its directory, and the key that clients have.

    ``sockets``: `Session.sockets`, whose last name the sockets have.
    """
    channels = ("shell", "iopub", "stdin", "control", "hb")
    return {
        "transport": "ipc",
        "ip": str(directory / (Path(sockets).name or "kernel")),
        **{f"{channel}_port": port for port, channel in enumerate(channels, 1)},
        "key": front["key"],
        "signature_scheme": front["signature_scheme"],
        "kernel_name": front.get("kernel_name", ""),
    }


def _early_exit(status: int) -> KernelUnfit:
    ended = f"was ended by signal {-status}" if status < 0 else f"ended with exit status {status}"
    message = f"The kernel {ended} before it had answered from its capsule, and was started again without one."
    return KernelUnfit(message, left="the kernel runs, plainly", status=status)


@contextlib.contextmanager
def _watch_exit(process: subprocess.Popen[bytes], on_exit: Callable[[], None]) -> Iterator[None]:
    """Call ``on_exit`` on another thread, until the body ends, once ``process`` has ended."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            if process.poll() is not None:
                with contextlib.suppress(GpuCkptError):
                    on_exit()

    watcher = threading.Thread(target=watch, name="kernel-watch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


class KernelHost:
    """Directory, gate and lifecycle of one kernel id, with or without a kernel; after a restart, another kernel."""

    def __init__(self, kernel_id: str, owner: KernelOwner, log: logging.Logger | logging.LoggerAdapter[Any]) -> None:
        self.kernel_id = kernel_id
        self.lifecycle: Lifecycle | None = None
        #: The lifecycle of the kernel that has ended, until another one is started.
        self.last: Lifecycle | None = None
        self.gate: Gate | None = None
        self.agent_requests = AgentRequests(log)
        #: The kernel's part in sharing GPUs with others, if it has one.
        self.sharing: GpuSharing | None = None
        #: Runs the kernel's verbs.  (A provisioner that is made only to read its settings has no kernel id.)
        self.worker = Worker(f"gpu-ckpt-{(kernel_id or '')[:8]}")
        self._owner, self._log = owner, log
        #: Whether a cell has ended that is in no save point yet and wants one; while one is made, until it is drained.
        self._save_due = self._saves_after_cells = False
        #: Saves and goings back that cells have requested, until the kernel is drained for them, or they fail; and the
        #: one whose verb runs.
        self._requested: list[Mapping[str, Any]] = []
        self._running_request: Mapping[str, Any] | None = None
        self._unanswered: Lifecycle | None = None
        self._front: dict[str, Any] = {}
        self._registration: Registration | None = None

    @property
    def directory(self) -> Path | None:
        """The kernel's runtime directory."""
        return self._registration.directory if self._registration else None

    @property
    def reachable(self) -> bool:
        """Return whether messages reach the kernel: a wake opens the gate before the last of its steps is done."""
        return self.gate is not None and self.gate.state in (GateState.OPEN, GateState.DRAINING)

    @property
    def awaits_first_answer(self) -> bool:
        """Return whether the kernel has not answered since its launch: if it ends now, another may take its place."""
        return self._unanswered is not None and self._unanswered is self.lifecycle

    # -- start

    def start(self, engine: Engine, launch: Launch, found: Orphan | None) -> None:
        """Attach the kernel ``found``; launch a fresh one if there is none, or it has ended since.

        Raises `HostError` when neither can be done here; a kernel that was found is then left as it was.
        """
        if found is not None:
            try:
                return self._attach(engine, launch, found)
            except CapsuleGone:
                # An image of it is older than its end: it is kept, but not restored as if nothing had happened.
                last = newest_images(engine.store).get(self.kernel_id)
                if last is not None and last.image is not None:
                    last.image.retire()
                launch = self._with_end_noticed(launch, last)
        if launch.branch is not None:
            try:
                return self._branch(engine, launch, launch.branch)
            except GpuCkptError as error:
                if not launch.branch.is_template:
                    raise
                message = "Kernel %s is started without its template: %s"
                self._log.warning(message, self.kernel_id, error)
                launch = with_notice(launch, without_template_notice(error))
        return self._launch(engine, launch)

    def _branch(self, engine: Engine, launch: Launch, point: BranchPoint) -> None:
        """Start a kernel from an image of another one.  After failure nothing is left of it."""
        source = engine.store.get(point.image)
        plan = branching.plan(engine.store, source)
        plan.require(point.accept_differences)
        was = plan.session
        if self._registration is None:
            reap(launch.base)
            self._registration = Registration(make_runtime_dir(launch.base))
        else:
            self._registration.renew()
        directory = self._registration.directory
        notebook = launch.env.get("JPY_SESSION_NAME", "")
        session = dataclasses.replace(
            was,
            kernel_id=self.kernel_id,
            kernel_name=launch.kernel_name,
            front=launch.front,
            path=launch.cwd,
            root=launch.root,
            notebook=notebook,
            protected_until=None,
            directory=directory.name,
            private=plan.private,
            fallback_name=launch.fallback_name,
            kernel_key=was.kernel_key if source.manifest.branched_from else str(was.front["key"]),
            parent="" if point.is_template else source.id if source.is_save_point else was.parent,
        )
        accept = point.accept_changed_files
        if accept is None and source.accepts_changed_files:
            accept = True
        kernel = NewKernel(
            self.kernel_id, launch.kernel_name, session.write, reseed=point.reseed, is_template=point.is_template
        )
        image: Image | None = None
        try:
            image = branch.copy(engine.store, source, kernel)
            if point.is_template:
                going_back.put_missing_files_back(engine.store, source)
            back = _back_info(directory, session.front, session.sockets)
            with writing(directory):
                inside = back | {"ip": f"{session.runtime_dir}/kernel" if not session.sockets else session.sockets}
                write_atomically(directory / "connection.json", json.dumps(inside), durable=False)
            _, lifecycle = self._prepare(engine, launch, session, back)
            lifecycle.attach(image=image)
            lifecycle.restore(point.gpu_map, accept_changed_files=accept)
        except BaseException as error:
            self._stop_gate()
            if isinstance(error, GpuCkptError):
                error.left = f"the image is kept as {source.id}"
                if image is not None:  # which is deleted
                    error.substitute(how_to_accept(image.id), _ACCEPT_IN_BRANCH)
                    error.substitute(image.id, source.id)
            if image is not None:
                with contextlib.suppress(GpuCkptError):
                    engine.store.remove(image)
                engine.store.forget(self.kernel_id)
            self._registration.remove()
            self._registration = self.lifecycle = None
            raise
        assert self.gate is not None
        self.gate.publish("status", {"execution_state": "idle"})

    def _launch(self, engine: Engine, launch: Launch) -> None:
        previous = self.lifecycle or self.last
        if previous is not None and previous.kernel.died and NOTICE not in launch.env:
            status, has_magic = previous.kernel.exit_status, rewrite(launch.cmd) is not None
            notice = automatic_saves.offer(engine.store, self.kernel_id, status, has_magic=has_magic)
            launch = with_notice(launch, notice) if notice else launch
        if self._registration is None:
            reap(launch.base)
            lost = claim_lost(launch.base, self.kernel_id, launch.env.get("JPY_SESSION_NAME", ""))
            if lost and NOTICE not in launch.env:
                launch = self._with_end_noticed(launch, newest_images(engine.store).get(lost))
            self._registration = Registration(make_runtime_dir(launch.base))
        else:
            self._registration.renew()
        directory = self._registration.directory
        file = directory / "connection.json"
        argv = [argument.replace(launch.connection_file, str(file)) for argument in launch.cmd]
        rewritten = rewrite(argv)
        # Of other kernels nobody knows how long a path they can listen on.
        sockets = str(short_socket_path() or "") if rewritten is None else ""
        back = _back_info(directory, launch.front, sockets)
        with writing(directory):
            for stale in (*directory.glob("*-[1-5]"), *directory.glob(f"{fastpath.SOCKET}*")):
                if stale.is_socket():
                    stale.unlink(missing_ok=True)
            inside = back | {"ip": sockets} if sockets else back
            write_atomically(file, json.dumps(inside), durable=False)
        # 1 turns ipykernel's parent poller off: the kernel's parent is its root process, which ends with it.
        env = {**launch.env, "JPY_PARENT_PID": "1"}
        notice = env.pop(NOTICE, "") if rewritten is None else ""
        if launch.fast_path != "off" and rewritten is not None:  # a wrapper script would preload it in its place
            shares = launch.settings.sharing != "off"
            env |= fastpath.environment(directory, env, children=launch.fast_path == "auto", shares_gpus=shares)
        session = Session(
            kernel_id=self.kernel_id,
            kernel_name=launch.kernel_name,
            runtime_dir=str(directory),
            has_agent=rewritten is not None,
            path=launch.cwd,
            front=launch.front,
            root=launch.root,
            notebook=env.get("JPY_SESSION_NAME", ""),
            sockets=sockets,
            fallback_name=launch.fallback_name,
        )
        announces = launch.fast_path == "auto" and fastpath.VARIABLE in env
        gate, lifecycle = self._prepare(engine, launch, session, back, announces=announces)
        if notice:
            gate.notify(notice)
        launched: Future[bool] = Future()
        self._unanswered = lifecycle
        # Submitted before the kernel runs: a verb that came first would meet a gate that was never opened.
        self.worker.submit(functools.partial(self._connect_launched, lifecycle, gate, launch, launched))
        try:
            lifecycle.launch(rewritten or argv, env, launch.cwd)
        finally:
            launched.set_result(lifecycle.state is State.RUNNING)

    def _with_end_noticed(self, launch: Launch, last: Orphan | None) -> Launch:
        """Return ``launch`` with a notice for the user that an earlier kernel ended; ``last`` is its last image."""
        notice = ended_notice(last)
        self._log.warning("Kernel %s: %s", self.kernel_id, notice)
        return with_notice(launch, notice)

    def _attach(self, engine: Engine, launch: Launch, found: Orphan) -> None:
        """Become the owner of a kernel that has none."""
        # A sleeping kernel gets a directory of this host; inside it keeps its old path (`Home.known_as`).
        known_as = Path(found.session.runtime_dir)
        directory = found.directory or launch.base / (Path(found.session.directory).name or known_as.name)
        make_runtime_dir(directory.parent, directory.name)
        self._registration = Registration(directory)
        capsule: Capsule | None = None
        try:
            capsule = Capsule.attach(directory) if found.directory else None
            session = dataclasses.replace(found.session, front=launch.front)
            back = _back_info(directory, session.front, session.sockets)
            gate, lifecycle = self._prepare(engine, launch, session, back)
            lifecycle.attach(capsule=capsule, image=found.image)
        except BaseException:
            # Leave it as it was found, for the next try.
            self._stop_gate()
            if capsule is not None:
                capsule.detach()
            self._registration.release()
            self._registration = self.lifecycle = None
            raise
        self._log.info("Kernel %s was attached, %s", self.kernel_id, lifecycle.state.value)
        if lifecycle.state is State.RUNNING:
            self.worker.submit(functools.partial(self._connect_attached, lifecycle, gate, launch.start_timeout))

    def _prepare(
        self, engine: Engine, launch: Launch, session: Session, back: dict[str, Any], *, announces: bool = False
    ) -> tuple[Gate, Lifecycle]:
        """Make the gate and the lifecycle of a kernel that is about to be launched or attached.

        ``announces``: as for `GpuSharing`.
        """
        registration, directory = self._registration, self.directory
        assert registration is not None and directory is not None
        registration.keep(Path(session.runtime_dir))

        def write_session(path: Path) -> None:
            protected_until = agent_requests.protection()
            parent = lifecycle.kernel.parent
            now = dataclasses.replace(session, identity=gate.identity, protected_until=protected_until, parent=parent)
            now.write(path)

        def renew() -> None:
            if registration.renew():
                self._log.warning("Kernel %s: its runtime directory was removed, and is made again", self.kernel_id)
                self._write_session(lifecycle)

        def protection_changed(until: float | None) -> None:
            write_session(directory)
            self._owner.protection_changed(until)

        # A fresh kernel has no protection; that of an attached one is in its session.
        agent_requests = self.agent_requests = AgentRequests(
            self._log, protected_until=session.protected_until, on_protected=protection_changed
        )
        if self.gate is None or session.front != self._front:
            self._stop_gate()
            self.gate = Gate(
                session.front,
                back,
                on_wake=self._on_wake,
                on_agent_request=self._on_agent_request,
                on_work=self._on_work,
                kernel_id=self.kernel_id,
                log=self._log,
                identity=session.identity,
                stable_name=session.has_agent,  # ipykernel's sockets hand over
                may_nudge=self._may_nudge,
                keeps_queueing=self._goes_back_next,
            )
            self.gate.start()
            self._front = session.front
        else:
            self.gate.rebind_kernel(back)
        gate = self.gate
        home = Home(
            kernel_id=self.kernel_id,
            kernel_name=session.kernel_name,
            fallback_name=session.fallback_name,
            runtime_dir=directory,
            has_agent=session.has_agent,
            known_as=Path(session.runtime_dir),
            sockets=Path(session.sockets) if session.sockets else None,
            private=session.private,
            renew=renew,
            outlive=launch.outlive,
            key=str(session.front["key"]),
            kernel_key=session.kernel_key,
            notebook=session.notebook,
            environment=launch.env,
            directory=launch.cwd,
            write_session=write_session,
            stdout=launch.stdout,
            stderr=launch.stderr,
        )
        with writing(directory):
            session.write(directory)
        trace = Trace(self.kernel_id, [self._owner.step_traced, self._step_traced], self._owner.faults)
        self.lifecycle = lifecycle = Lifecycle(home, engine, gate, settings=launch.settings, trace=trace)
        lifecycle.kernel.parent = session.parent
        lifecycle.on_state.append(functools.partial(self._note_state, lifecycle))
        self._share(lifecycle, gate, launch, announces=announces)
        return gate, lifecycle

    def _connect_launched(self, lifecycle: Lifecycle, gate: Gate, launch: Launch, launched: Future[bool]) -> None:
        """Connect the gate to a fresh kernel; clients' requests are queued until it has answered.

        If it ends before, a kernel without a capsule takes its place behind the gate.
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
            if (plain := self._owner.start_plainly(error, argv)) is not None:
                lifecycle.on_state.clear()  # for all listeners the kernel has not ended
                self.lifecycle = None
                capsule.close()
        finally:
            if self._unanswered is lifecycle:
                self._unanswered = None
        if plain is not None:
            gate.rebind_kernel(back)
            with _watch_exit(plain, gate.close):
                answered = self._open_gate(gate, launch.start_timeout)
            if answered:
                self._log.warning("Kernel %s: %s", self.kernel_id, error)
                if -status not in _SENT:
                    UNFIT[launch.key] = error

    def _connect_attached(self, lifecycle: Lifecycle, gate: Gate, timeout: float) -> None:
        """Connect the gate to a kernel that was attached while it ran."""
        answered = self._open_gate(gate, timeout, again=not lifecycle.home.has_agent)
        if not answered and lifecycle is self.lifecycle and lifecycle.poll() is None:
            self._log.error("Kernel %s does not answer through the gate; the next message tries again.", self.kernel_id)
            with contextlib.suppress(GpuCkptError):
                gate.sleep()

    def _plain_command(self, launch: Launch) -> tuple[dict[str, Any], list[str]]:
        """Return the connection info of a kernel without a capsule, on TCP as is usual, and its command."""
        assert self._registration is not None
        back = {**_back_info(self._registration.directory, launch.front), "transport": "tcp", "ip": "127.0.0.1"}
        ports = LocalPortCache.instance()
        back |= {name: ports.find_available_port(back["ip"]) for name in back if name.endswith("_port")}
        file = self._registration.directory / "plain.json"
        write_atomically(file, json.dumps(back), durable=False)
        return back, [argument.replace(launch.connection_file, str(file)) for argument in launch.cmd]

    def _open_gate(self, gate: Gate, timeout: float, *, again: bool = False) -> bool:
        """Open the gate to a kernel that runs; return whether it has answered.

        ``again``: when the kernel has answered everything that came under the gate's old name, get another name.
        """
        lifecycle = self.lifecycle
        pid = lifecycle.capsule.host_pid if lifecycle is not None and lifecycle.capsule is not None else None
        try:
            # Of a kernel on TCP nothing is needed: libzmq waits there until it can accept a connection.
            with descriptors.headroom(pid, timeout) if pid is not None else contextlib.nullcontext():
                gate.open(timeout)
                if again:
                    gate.close()
                    gate.open(timeout)
            if lifecycle is not None:
                self._write_session(lifecycle)  # before it has any work in it
            # Its own idle was for the gate, and a server that restarted it by itself sends no request: there it would
            # be starting, or be busy with the cell in which it died, until a cell is run.
            gate.publish("status", {"execution_state": "idle"})
            gate.release()
        except GpuCkptError as error:
            self._log.info("Kernel %s has not answered: %s", self.kernel_id, error.code)
            return False
        return True

    def _write_session(self, lifecycle: Lifecycle) -> None:
        """Write the session, with the gate's identity, for a server that attaches the kernel (see `Router.open`)."""
        if self._registration is None or lifecycle.home.write_session is None:
            return
        try:
            lifecycle.home.write_session(self._registration.directory)
        except OSError as error:
            self._log.warning("Kernel %s: its session could not be written: %s", self.kernel_id, error.strerror)

    def _note_state(self, lifecycle: Lifecycle, state: State) -> None:
        """Pass on a new state, and write it to the kernel's record."""
        pid = lifecycle.capsule.host_pid if lifecycle.capsule else None
        if self.agent_requests.panel is not None:
            self.agent_requests.panel.changed(state)
        self._owner.state_changed(state, pid)
        if self._registration is not None:
            facts = {"kernel_id": self.kernel_id, "kernel_name": lifecycle.home.kernel_name, "state": state.value}
            try:
                self._registration.write(**facts, pid=pid, image=lifecycle.image.id if lifecycle.image else None)
            except OSError as error:
                self._log.warning("Kernel %s: its record could not be written: %s", self.kernel_id, error.strerror)

    # -- end

    def clear(self) -> None:
        """Forget a kernel that has ended; `last` is kept until its image is kept or discarded."""
        self._end_sharing()
        self.last, self.lifecycle = self.lifecycle, None

    def close(self) -> None:
        """Stop the gate: the kernel, if there is one, is started plainly."""
        self._end_sharing()
        self._stop_gate()
        self.lifecycle = None

    def end(self) -> None:
        """Release and remove everything: no other kernel follows the one that has ended."""
        self._end_sharing()
        self._stop_gate()
        self.worker.end()
        if self._registration is not None:
            self._registration.remove()
            self._registration = None

    def detach(self) -> None:
        """Release everything as it is, for another owner to find; a living kernel continues."""
        # First of all: from here on no verb reaches the kernel, and no shutdown ends it.
        lifecycle, self.lifecycle, self.last = self.lifecycle, None, None
        self._end_sharing()
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

    # -- sharing GPUs

    def interrupted(self) -> None:
        """Give the kernel's place in the queue for a GPU back, if it has one."""
        if self.sharing is not None:
            self.sharing.give_back()

    def _share(self, lifecycle: Lifecycle, gate: Gate, launch: Launch, *, announces: bool) -> None:
        """Have a kernel take part in sharing GPUs, if that is configured and there may be any."""
        self._end_sharing()
        settings, gpus = launch.settings, lifecycle.engine.gpus
        if settings.sharing == "off" or not fastpath.has_driver():
            return
        self.sharing = GpuSharing(
            lifecycle,
            gate,
            self.worker,
            shared_exchange(gpus),
            turns=settings.sharing == "turns",
            visible=launch.env.get("CUDA_VISIBLE_DEVICES"),
            announces=announces,
            is_protected=lambda: self.agent_requests.protection() is not None,
            log=self._log,
        )
        self.agent_requests.sharing = self.sharing.status

    def _end_sharing(self) -> None:
        if self.sharing is not None:
            self.agent_requests.sharing = None
            self.sharing.close()
            self.sharing = None

    # -- callbacks of the gate, on its thread

    def _may_nudge(self) -> bool:
        capsule = self.lifecycle.capsule if self.lifecycle is not None else None
        return capsule is None or descriptors.may_connect(capsule.host_pid)

    def _on_wake(self, msg_type: str) -> None:
        self._log.info("Waking kernel %s for a client's %s", self.kernel_id, msg_type)
        self.worker.submit(self._wake)

    def _on_work(self, msg_type: str) -> None:
        if self.sharing is not None:
            self.sharing.join()

    def _wake(self) -> None:
        if (lifecycle := self.lifecycle) is None:
            return
        try:
            lifecycle.wake()
        except GpuCkptError as error:
            current = self.lifecycle
            if current is None or current.state is State.DEAD:
                return  # it was ended meanwhile; jupyter_client learns that by polling
            self._log.error("Kernel %s could not be woken: %s", self.kernel_id, error.code)
        except Exception as error:
            unexpected = self._unexpected("wake", error)
            with contextlib.suppress(GpuCkptError):  # it came back all the same, or its gate was stopped
                lifecycle.gate.fail(unexpected)

    def _unexpected(self, verb: str, error: Exception) -> GpuCkptError:
        """Log an error of no class of this package, a fault of this program, with its traceback."""
        self._log.error("Kernel %s: an unexpected error in %s", self.kernel_id, verb, exc_info=error)
        return GpuCkptError.from_exception(error)

    def _on_agent_request(self, content: dict[str, Any]) -> None:
        """Answer a request of the agent (a magic), or do the verb that it or a client's shutdown requests."""
        lifecycle, gate = self.lifecycle, self.gate
        if lifecycle is None or gate is None:
            return
        if content.get("now"):
            requested = [*self._requested, *content.get("requested", ())]
            self.agent_requests.answer({**content, "requested": requested}, lifecycle, gate)
            return
        if content.get("verb") == "interrupt":
            self.interrupted()
            return
        name, notebook = str(content.get("name", "")), self._owner.notebook
        verbs: dict[str, Callable[[], Any]] = {
            "suspend": lifecycle.suspend,
            "checkpoint": lifecycle.checkpoint,
            "save": lambda: lifecycle.save(SavePoint(name), notebook()),
            "save_after_cell": lambda: self._save_after_cell(lifecycle, gate),
            "save_before_cell": lambda: self._save_before_cell(lifecycle, gate, str(content.get("cell"))),
            "back": lambda: self._go_back(lifecycle, content),
        }
        verb = str(content.get("verb"))
        if verb == "shutdown":
            # Not on the worker: it does not wait for the verb that runs there but ends it.
            restart = bool(content.get("restart"))
            arguments = (functools.partial(self._shut_down, lifecycle, restart), gate)
            threading.Thread(target=self._run_verb, args=arguments, name="gpu-ckpt-shutdown", daemon=True).start()
        elif verb == "branch":
            self._owner.branch_requested(content, functools.partial(self._report_branch, gate))
        elif verb in verbs:
            if verb == "save_after_cell":
                self._save_due = True
            self._submit_requested(content, verbs[verb], gate)
        else:
            self._log.warning("Kernel %s requested an unknown verb.", self.kernel_id)

    def _submit_requested(self, content: Mapping[str, Any], call: Callable[[], Any], gate: Gate) -> None:
        """Have a verb run that a cell has requested, after those requested before.  Raises `LimitReached`.

        Where this program is ending, and its kernel with it, nothing is done.
        """

        def forget() -> None:
            with contextlib.suppress(ValueError):
                self._requested.remove(content)

        def run() -> None:
            self._running_request = content
            try:
                call()
            finally:
                self._running_request = None
                forget()  # before queued messages are released for a verb that has failed

        if content.get("verb") in ("save", "back"):
            self._requested.append(content)
        try:
            self.worker.submit(functools.partial(self._run_verb, run, gate))
        except StateError as ending:  # a command such as `jupyter run` ends its kernel with the last reply
            forget()
            self._log.info("Kernel %s: a request is left undone: %s", self.kernel_id, ending.message)
        except BaseException:
            forget()
            raise

    def _go_back(self, lifecycle: Lifecycle, content: Mapping[str, Any]) -> None:
        name, gpu, gpu_map = str(content.get("name", "")), content.get("gpu"), None
        if gpu is not None:
            point = find(lifecycle.engine.store.images(), self.kernel_id, name)
            gpu_map = gpu_map_to(lifecycle, point.manifest.device_bytes, gpu)
        lifecycle.back(name, going_back.require_choice(content.get("files")), self._owner.notebook(), gpu_map)

    def _goes_back_next(self) -> bool:
        """Return whether a cell has requested to go back, and the kernel is not drained for that yet."""
        return any(each.get("verb") == "back" for each in tuple(self._requested))

    def _shut_down(self, lifecycle: Lifecycle, restart: bool) -> None:
        self._owner.end_announced(lifecycle, restart)
        lifecycle.terminate()
        self._owner.keep_or_discard_image(lifecycle, restart)

    def _save_after_cell(self, lifecycle: Lifecycle, gate: Gate) -> None:
        """Make an automatic save point.  Nobody is interrupted by a report that it failed.

        One save is for all cells that have ended until the kernel is drained for it: what they requested was the same.
        """
        if not self._save_due:
            return
        self._save_due, self._saves_after_cells = False, True
        try:
            automatic_saves.save(lifecycle, automatic_saves.CELL, self._owner.notebook())
        except GpuCkptError as error:
            self._log.info("Kernel %s has no save point after its cell: %s", self.kernel_id, error.code)
            if gate.state is GateState.DRAINING:
                gate.release()
        finally:
            self._saves_after_cells = False

    def _save_before_cell(self, lifecycle: Lifecycle, gate: Gate, cell: str) -> None:
        """Make the save point that a risky cell waits for; without it the cell does not run."""
        failure = None
        try:
            automatic_saves.save(lifecycle, automatic_saves.RISKY, self._owner.notebook())
        except Exception as foreign:
            failure = foreign if isinstance(foreign, GpuCkptError) else self._unexpected("a save point", foreign)
            self._log.warning("Kernel %s has no save point before a risky cell: %s", self.kernel_id, failure.code)
            failure.left = "the cell has not run"
            failure.hint = f"{failure.hint} Without its first line the cell runs without a save point.".strip()
        gate.risky_saved(cell, failure)

    def _step_traced(self, event: StepEvent) -> None:
        """Called on the worker's thread; all that the drained cells have requested came before."""
        if (event.kind, event.step) != ("completed", Step.DRAIN.value):
            return
        if self._saves_after_cells:
            self._save_due = False
        if self._running_request in self._requested:
            self._requested.remove(self._running_request)

    def _report_branch(self, gate: Gate, kernel_id: str, notebook: str, error: GpuCkptError | None) -> None:
        """Tell the user of a requested branch, in the next cell, which kernel it is or why there is none.

        ``notebook``: the file of its document, empty if it has none of its own.
        """
        with contextlib.suppress(GpuCkptError):  # its kernel has ended
            if error is not None:
                self._log.warning("Kernel %s: a requested branch failed: %s", self.kernel_id, error.code)
                self.agent_requests.report_failure(error, gate)
            else:
                where = f", in the notebook {printable(Path(notebook).name)}" if notebook else ""
                gate.notify(f"The branch is kernel {kernel_id}{where}.")

    def _run_verb(self, call: Callable[[], Any], gate: Gate) -> None:
        try:
            call()
        except Exception as foreign:
            error = foreign if isinstance(foreign, GpuCkptError) else self._unexpected("a requested verb", foreign)
            self._log.warning("Kernel %s: a requested verb failed: %s", self.kernel_id, error.code)
            if gate.state is GateState.DRAINING:
                gate.release()  # queued for this verb since the cell that requested it
            if gate.state is GateState.OPEN:
                self.agent_requests.report_failure(error, gate)
            elif gate.state is GateState.DRAINING:  # for a going back, whose kernel would not know of it
                with contextlib.suppress(GpuCkptError):
                    gate.notify(str(error))
