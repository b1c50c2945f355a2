"""The steps of every verb, each a method of the step's name, against the real capsule, CRIU, CUDA driver and gate.

A step that fails must leave things as they were before it, or say that its undo is needed (`Steps._step_done`).  Which
step comes when, and what undoes it, says `machine`; `lifecycle` runs them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from . import preflight
from .engine.capsule import Capsule, Clocks
from .engine.criu import Criu
from .engine.cuda import Cuda, CudaState
from .engine.gpus import Gpus, gpu_mapping
from .errors import AgentError, BadRequest, CapsuleGone, DeviceHeld, GateError, GpuCkptError, PreflightError
from .image.manifest import Manifest
from .image.store import Draft, Image, Store
from .machine import Kernel, State
from .trace import Recorder, Trace
from .trace import Step as Traced

#: The driver's states in which a process holds its device memory.
_ON_GPU = (CudaState.RUNNING, CudaState.LOCKED)


class Gate(Protocol):
    """What the lifecycle asks of the gate (`kernel.gate.Gate`)."""

    def open(self, timeout: float) -> None:
        """Connect to the kernel and prove that all channels work."""

    def drain(self, timeout: float) -> None:
        """Hold new requests and wait for those under way."""

    def release(self) -> None:
        """Forward what was held."""

    def close(self) -> None:
        """Drop the connections to the kernel."""

    def sleep(self) -> None:
        """From now on a message that needs the kernel wakes it."""

    def fail(self, error: GpuCkptError) -> None:
        """A wake failed: tell the clients that wait, and sleep on."""

    def request(self, msg_type: str, content: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Ask the agent inside the kernel."""

    def died(self) -> None:
        """The kernel is gone."""


@dataclass(frozen=True)
class Settings:
    """Deadlines in seconds, and choices; the provisioner fills them from its traits."""

    drain: float = 10.0
    agent: float = 60.0
    cuda: float = 30.0
    connect: float = 20.0
    #: CRIU and the CUDA driver get ``base`` plus the time the bytes take at this rate (bytes per second).
    base: float = 60.0
    slowest_rate: float = 50e6
    room: float = 10.0
    #: Environment variables to refresh in a restored kernel from the server's own.
    refresh: tuple[str, ...] = ("JUPYTERHUB_API_TOKEN", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_STEP_ID")


@dataclass
class Engine:
    """The outside: each a facade that the tests can replace by a fake."""

    criu: Criu
    criu_version: str
    cuda: Cuda
    gpus: Gpus
    store: Store


@dataclass
class Home:
    """Where a kernel lives on this host."""

    kernel_id: str
    kernel_name: str
    runtime_dir: Path
    has_agent: bool
    #: Whether the kernel goes on when this process dies.
    outlive: bool = False
    #: Writes what a later server needs to serve this kernel into a directory: the image's.
    write_session: Callable[[Path], None] | None = None
    stdout: Any = None
    stderr: Any = None


@dataclass
class Saved:
    """What the steps of one verb hand on to the next."""

    report: dict[str, Any] = field(default_factory=dict)
    device_bytes: dict[str, int] = field(default_factory=dict)
    node_gpus: list[str] = field(default_factory=list)
    cuda: bool = False


class Steps:
    """What one kernel's steps work on, and the steps."""

    def __init__(self, home: Home, engine: Engine, gate: Gate, *, settings: Settings, trace: Trace) -> None:
        self.home = home
        self.engine = engine
        self.gate = gate
        self.settings = settings
        self.trace = trace
        self.kernel = Kernel()
        self.capsule: Capsule | None = None
        self.image: Image | None = None
        self.exit_status: int | None = None
        self.on_state: list[Callable[[State], None]] = []
        self._recorder = Recorder()
        self.trace.sinks.append(self._recorder)
        self._lock = threading.RLock()
        #: Whether the step that failed had done its work all the same, or some of it, so that its undo must be run.
        self._step_done = False
        self._draft: Draft | None = None
        self._clocks: Clocks | None = None
        self._saved = Saved()
        self._lease = ExitStack()
        self._room = ExitStack()
        self._gpu_map: Mapping[str, str] | None = None
        self._mapping: dict[str, str] | None = None

    def _mend(self, capsule: Capsule) -> State:
        capsule.signal(signal.SIGCONT)
        cuda, pid = self.engine.cuda, capsule.host_pid
        state = cuda.state(pid)
        if state is CudaState.CHECKPOINTED:
            # How much it held is not to be found out any more; all that the process has in RAM is an upper bound.
            process = preflight.read_process(pid)
            gpus = [gpu.uuid for gpu in self.engine.gpus.list()]
            self._saved = Saved({}, dict.fromkeys(gpus, process.rss if process else 0), gpus, cuda=True)
            return State.SUSPENDED
        if state is CudaState.LOCKED:
            cuda.unlock(pid)
        return State.RUNNING

    def _alive(self) -> Capsule:
        if self.capsule is None:
            raise CapsuleGone("The kernel has no process.")
        return self.capsule

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """While the body waits for an answer of the kernel: the kernel's end ends the waiting, not the deadline."""
        capsule = self._alive()
        with capsule.watched(self.gate.close):
            try:
                yield
            except GpuCkptError as error:
                if (status := capsule.poll()) is not None:
                    raise CapsuleGone(f"The kernel's process ended (status {status}).", status=status) from error
                raise

    def _deadline(self, bytes: int) -> float:
        return self.settings.base + bytes / self.settings.slowest_rate

    def device_bytes(self) -> dict[str, int]:
        """Device memory the kernel holds now, in bytes by GPU UUID; asks the driver.  Raises `CudaError`."""
        pid = self._alive().host_pid
        return {} if self.engine.cuda.state(pid) is CudaState.NONE else self.engine.gpus.used_by(pid)

    def findings(self, *, writes: bool = True) -> list[preflight.Finding]:
        """What preflight says now, from outside; the kernel is not disturbed.  A suspend ``writes`` no image."""
        capsule = self._alive()
        return preflight.look(
            kernel_pid=capsule.host_pid,
            companions=capsule.companions(),
            device_bytes=self.device_bytes(),
            disk_free=self.engine.store.free() if writes else None,
        )

    # -- steps of a checkpoint

    def _preflight(self, _: Traced) -> None:
        plan = self.kernel.plan
        writes = plan is None or plan.to is State.CHECKPOINTED
        if writes:
            self.engine.store.prepare()
        preflight.require(self.findings(writes=writes))

    def _drain(self, _: Traced) -> None:
        try:
            with self._answering():
                self.gate.drain(self.settings.drain)
        except CapsuleGone:
            raise
        except GpuCkptError:
            self.gate.release()
            raise

    def _quiesce(self, traced: Traced) -> None:
        self._saved = Saved()
        if not self.home.has_agent:
            return
        report = self._ask_agent("quiesce", {"trim": True, "files": True}).get("report", {})
        traced.bytes = report.get("trimmed_bytes")
        try:
            preflight.require(preflight.judge_report(report))
        except PreflightError:
            self._ask_agent("thaw", {"environ": {}})
            raise
        self._saved.report = report

    def _ask_agent(self, verb: str, content: dict[str, Any]) -> dict[str, Any]:
        with self._answering():
            reply = self.gate.request(f"gpu_ckpt_{verb}_request", content, self.settings.agent)
        if reply.get("status") != "ok":
            raise AgentError(
                f"The agent could not {verb} the kernel: {reply.get('ename')}: {reply.get('evalue')}",
                traceback=reply.get("traceback", []),
            )
        return reply

    def _cuda_suspend(self, traced: Traced) -> None:
        pid, cuda, saved = self._alive().host_pid, self.engine.cuda, self._saved
        if cuda.state(pid) is CudaState.NONE:
            self._refuse_device_files(pid)
            return
        saved.device_bytes = self.engine.gpus.used_by(pid)
        saved.node_gpus = [gpu.uuid for gpu in self.engine.gpus.list()]
        traced.bytes = sum(saved.device_bytes.values())
        saved.cuda = True
        try:
            cuda.lock(pid, self.settings.cuda)
            cuda.checkpoint(pid, timeout_s=self._deadline(traced.bytes))
            self._refuse_device_files(pid)
        except GpuCkptError:
            # How far the driver came nobody knows (its helper may have ended after the work was done), and the way back
            # needs proof of room: so the undo of this step finds out, and does what is left to do.
            self._step_done = True
            raise

    def _refuse_device_files(self, pid: int) -> None:
        if held := self.engine.cuda.device_files(pid):
            raise DeviceHeld("The kernel holds GPU device files open that are not CUDA's (NVML, graphics).", files=held)

    def _disconnect(self, _: Traced) -> None:
        """Close the gate's side and wait until the kernel has closed its own: no foreign connection in the image."""
        pid, directory = self._alive().host_pid, self.home.runtime_dir
        before = preflight.open_connections(pid, directory)
        self.gate.close()
        deadline = time.monotonic() + self.settings.connect
        # Each endpoint must lose one, the gate's.  Others may stay: a kernel can be connected to itself, and of a
        # stranger CRIU tells who it is.
        while any(count >= before[path] for path, count in preflight.open_connections(pid, directory).items()):
            if time.monotonic() > deadline:
                raise GateError("The kernel does not let go of its connections to the gate.")
            time.sleep(0.002)

    def _dump(self, traced: Traced) -> None:
        capsule = self._alive()
        bytes = sum(process.rss for pid in capsule.processes() if (process := preflight.read_process(pid)))
        self._clocks = capsule.clocks()
        draft = self.engine.store.begin(self.home.kernel_id)
        try:
            self.engine.criu.dump(capsule, draft.criu_directory, timeout=self._deadline(bytes))
        except BaseException:
            draft.discard()
            # A CRIU that was killed may have left the kernel stopped.
            capsule.signal(signal.SIGCONT)
            raise
        self._draft = draft
        traced.bytes = sum(path.stat().st_size for path in draft.criu_directory.iterdir())

    def _publish(self, traced: Traced) -> None:
        capsule, draft, clocks = self._alive(), self._draft, self._clocks
        assert draft is not None and clocks is not None
        manifest = Manifest(
            id=draft.id,
            kernel_id=self.home.kernel_id,
            created=time.time(),
            kernel_name=self.home.kernel_name,
            uid=os.geteuid(),
            hostname=socket.gethostname(),
            pid=capsule.inner_pid,
            pipes=capsule.pipes,
            monotonic=clocks.monotonic,
            boottime=clocks.boottime,
            runtime_dir=str(self.home.runtime_dir),
            criu_version=self.engine.criu_version,
            device_bytes=self._saved.device_bytes,
            node_gpus=self._saved.node_gpus,
            cuda=self._saved.cuda,
            report=self._saved.report,
            steps=self._recorder.seconds(),
        )
        if self.home.write_session is not None:
            self.home.write_session(draft.path)
        self.image = draft.publish(manifest)
        self._draft = None
        traced.bytes = self.image.manifest.bytes

    def _end_process(self, _: Traced) -> None:
        if self.capsule is not None:
            # Whatever fails from here on, the process may be gone already, and its image must not be taken back.
            self._step_done = True
            self.capsule.close()
            self.capsule = None

    def _sleep(self, _: Traced) -> None:
        plan = self.kernel.plan
        if self.kernel.unwinding and plan is not None and plan.to is State.RUNNING:
            # A wake failed.  `Gate.fail` comes next: it answers those who wait, and sleeps.  A sleep now would wake
            # again at once, for messages that are about to hear that it failed.
            return
        self.gate.sleep()

    def _continue(self, _: Traced) -> None:
        """Undo of a dump: the stopped processes go on."""
        if self._draft is not None:
            self._draft.discard()
            self._draft = None
        self._alive().signal(signal.SIGCONT)

    # -- steps of a restore

    def _match(self, _: Traced) -> None:
        assert self.image is not None
        image = self.engine.store.get(self.image.id)
        self._lease.enter_context(image.lease())
        try:
            self.engine.store.check(image)
        except BaseException:
            self._lease.close()
            raise
        manifest = image.manifest
        self._saved = Saved(manifest.report, manifest.device_bytes, manifest.node_gpus, manifest.cuda)

    def _unlease(self, _: Traced) -> None:
        self._lease.close()

    def _reserve(self, _: Traced) -> None:
        """Prove that the GPU has room and keep others from taking it until the driver has done its part."""
        if not self._saved.cuda or self._on_gpu():
            return
        present = [gpu.uuid for gpu in self.engine.gpus.list()]
        try:
            self._mapping = gpu_mapping(self._saved.node_gpus, present, self._gpu_map)
        except ValueError as error:
            raise BadRequest(f"The GPU mapping cannot be used: {error}.") from error
        self._room.enter_context(self._proven_room())

    def _proven_room(self) -> AbstractContextManager[None]:
        mapping = self._mapping or {}
        needs = {mapping.get(uuid, uuid): bytes for uuid, bytes in self._saved.device_bytes.items()}
        return self.engine.gpus.room(needs, self.settings.room)

    def _on_gpu(self) -> bool:
        """Whether the device memory is back already: an earlier try ended between the driver's restore and unlock."""
        return self.capsule is not None and self.engine.cuda.state(self.capsule.host_pid) in _ON_GPU

    def _unreserve(self, _: Traced) -> None:
        self._room.close()

    def _criu_restore(self, traced: Traced) -> None:
        assert self.image is not None
        manifest = self.image.manifest
        directory = Path(manifest.runtime_dir)
        directory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)  # `parents` are made with the umask's mode
        directory.mkdir(exist_ok=True, mode=0o700)
        for stale in directory.glob("kernel-*"):
            if stale.is_socket():
                stale.unlink()
        offsets = Clocks(manifest.monotonic, manifest.boottime) - Clocks.now()
        capsule = Capsule.create(directory, offsets=offsets, stdout=self.home.stdout, stderr=self.home.stderr)
        try:
            self.engine.criu.restore(
                capsule,
                self.image.criu_directory,
                pid=manifest.pid,
                pipes=manifest.pipes,
                timeout=self._deadline(manifest.bytes),
            )
        except BaseException:
            capsule.close()
            raise
        self.capsule = capsule
        traced.bytes = manifest.bytes

    def _cuda_resume(self, traced: Traced) -> None:
        if not self._saved.cuda:
            return
        pid = self._alive().host_pid
        traced.bytes = sum(self._saved.device_bytes.values())
        if self.kernel.unwinding and not self._on_gpu():
            # An undo has no reservation yet, and without proof of room the driver could destroy the process.
            with self._proven_room():
                self._bring_back(pid)
        else:
            self._bring_back(pid)

    def _bring_back(self, pid: int) -> None:
        bytes = sum(self._saved.device_bytes.values())
        state = self.engine.cuda.state(pid)
        if state not in _ON_GPU:
            self.engine.cuda.restore(pid, self._mapping, timeout_s=self._deadline(bytes))
        if state is not CudaState.RUNNING:
            self.engine.cuda.unlock(pid)
        self._saved.cuda = False
        self._mapping = None

    def _connect(self, _: Traced) -> None:
        # Nothing comes after an undo that could try again, so a kernel that lives gets all the time there is.
        patience = self.settings.base if self.kernel.unwinding else 0.0
        with self._answering():
            self.gate.open(self.settings.connect + patience)

    def _thaw(self, _: Traced) -> None:
        if self.home.has_agent:
            environ = {name: os.environ[name] for name in self.settings.refresh if name in os.environ}
            self._ask_agent("thaw", {"environ": environ})

    def _release(self, _: Traced) -> None:
        self.gate.release()

    def _discard_image(self, traced: Traced) -> None:
        """The kernel answers, so its image is history."""
        if self.home.outlive:
            self._alive().outlive()  # until now its image was there to come back from
        self._lease.close()
        if self.image is not None:
            traced.bytes = self.engine.store.remove(self.image)
            self.image = None
