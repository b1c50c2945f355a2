"""The kernel provisioner: jupyter_client's hooks on one side, the lifecycle and the gate on the other.

One line of configuration makes every kernelspec checkpointable::

    c.KernelProvisionerFactory.default_provisioner_name = "gpu-ckpt-provisioner"

A host that cannot checkpoint still starts kernels: plainly, with one line in the log that says why.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import os
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.provisioning.local_provisioner import LocalProvisioner
from traitlets import Bool, Float, Unicode, default

from ..engine.capsule import Capsule
from ..engine.criu import Criu
from ..engine.criu_install import dotted, find
from ..engine.cuda import Cuda
from ..engine.cuda_client import Helper
from ..engine.gpus import Gpus
from ..errors import GpuCkptError, HostError, StateError
from ..estimate import RATES
from ..image.store import Image, Store
from ..lifecycle import Engine, Home, Lifecycle, Settings
from ..machine import State
from ..trace import Sink, StepEvent, Trace
from .adoption import Orphan, Session, orphan
from .desk import Desk
from .gate import Gate, GateState
from .inject import PLAIN, rewrite
from .places import default_image_dir, default_runtime_base, make_runtime_dir
from .registry import Registration, reap

Result = TypeVar("Result")

_engines: dict[Path, Engine] = {}
_engines_lock = threading.Lock()


def shared_engine(image_dir: Path) -> Engine:
    """The process's engine: one CRIU, one helper for the CUDA driver, a store per directory.  Raises `HostError`."""
    with _engines_lock:
        if image_dir not in _engines:
            known = next(iter(_engines.values()), None)
            if known is None:
                binary = find()
                helper = Helper()
                version = dotted(binary.version)
                known = Engine(Criu(binary.argv), version, Cuda(helper), Gpus(helper), Store(image_dir))
            store = Store(image_dir)
            store.sweep()
            _engines[image_dir] = Engine(known.criu, known.criu_version, known.cuda, known.gpus, store)
        return _engines[image_dir]


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


class GpuCkptProvisioner(LocalProvisioner):
    """Starts kernels in capsules behind a gate, and moves them between GPU, RAM and disk.

    `suspend`, `resume`, `checkpoint`, `restore` and `state` are the one programmatic way in: the command line, the
    server extension, magics and policies call them.
    """

    image_dir = Unicode(help="Directory of the images; default: gpu-ckpt/images below Jupyter's data directory.").tag(
        config=True
    )
    runtime_base = Unicode(
        help="Directory for the kernels' sockets; keep it short. Default: gpu-ckpt below XDG_RUNTIME_DIR, or in /tmp."
    ).tag(config=True)
    drain_timeout = Float(
        10.0, help="Seconds a checkpoint waits for running requests before it gives up with KERNEL_BUSY."
    ).tag(config=True)
    start_timeout = Float(60.0, help="Seconds a fresh kernel may take until it answers through the gate.").tag(
        config=True
    )
    wake_timeout = Float(20.0, help="Seconds a restored kernel may take until it answers through the gate.").tag(
        config=True
    )
    slowest_rate = Float(
        50e6, help="Bytes per second that storage and driver reach at least; deadlines are computed from it."
    ).tag(config=True)
    outlive_server = Bool(
        False,
        help="Let kernels run on when the server dies without having stopped them, so that the next one adopts them. "
        "Something must then end those that nobody adopts: the server extension starts a watchdog.",
    ).tag(config=True)
    keep_image_on_shutdown = Bool(
        True,
        help="Keep the image when a checkpointed kernel is shut down (a restart always drops it). "
        "`jupyter gpu-ckpt rm` deletes kept images.",
    ).tag(config=True)

    @default("image_dir")
    def _default_image_dir(self) -> str:
        return str(default_image_dir())

    @default("runtime_base")
    def _default_runtime_base(self) -> str:
        return str(default_runtime_base())

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.lifecycle: Lifecycle | None = None
        self._last: Lifecycle | None = None
        #: Listeners to the trace of this kernel's steps; see `trace`.
        self.sinks: list[Sink] = [self._log_step, RATES, self._show_step]
        #: What the kernel is answered when it asks, and until when it is protected from policies.
        self.desk = Desk(self.log)
        self._gate: Gate | None = None
        self._front: dict[str, Any] = {}
        self._has_agent = False
        self._registration: Registration | None = None
        self._orphan: Orphan | None = None
        # One thread for this kernel's verbs: they take turns, and the caller's event loop (if it has one) stays free.
        self._worker: ThreadPoolExecutor | None = None
        self._joined: dict[str, Future[Any]] = {}

    # -- the programmatic way in

    @property
    def state(self) -> State:
        """The kernel's state.  A kernel that was started plainly is running or dead."""
        if self.lifecycle is not None:
            return self.lifecycle.state
        return State.RUNNING if self.process is not None else State.DEAD

    @property
    def gate(self) -> Gate | None:
        """The gate, for those who watch what clients do; None for a kernel that was started plainly."""
        return self._gate

    async def suspend(self) -> None:
        """CUDA state to host RAM, the GPU is free.  After failure the kernel runs on."""
        await self._verb("suspend", self._checkpointable().suspend)

    async def resume(self) -> None:
        """CUDA state back to the GPU.  After failure the kernel stays suspended."""
        await self._verb("resume", self._checkpointable().resume)

    async def checkpoint(self) -> Image:
        """Everything to an image, no process left.  After failure the kernel is as it was."""
        return await self._verb("checkpoint", self._checkpointable().checkpoint)

    async def restore(self, gpu_map: Mapping[str, str] | None = None) -> None:
        """Back from the image; ``gpu_map`` maps GPU UUIDs of the checkpoint to those to use.

        After failure the image is kept, and the next try starts from it.
        """
        await self._verb("restore", functools.partial(self._checkpointable().restore, gpu_map))

    def _checkpointable(self) -> Lifecycle:
        if self.lifecycle is None:
            raise StateError(
                "This kernel was started plainly and cannot be checkpointed.",
                hint="`jupyter gpu-ckpt doctor` says what the host lacks; then restart the kernel.",
            )
        return self.lifecycle

    async def _verb(self, name: str, call: Callable[[], Result]) -> Result:
        """Run a verb on the kernel's worker; a second request for the same verb joins the one under way."""
        future: Future[Result] | None = self._joined.get(name)
        if future is None or future.done():
            future = self._joined[name] = self._submit(call)
        # Shielded: a caller that is cancelled must not cancel what another caller waits for.
        return await asyncio.shield(asyncio.wrap_future(future))

    def _submit(self, call: Callable[[], Result]) -> Future[Result]:
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix=f"gpu-ckpt-{self.kernel_id[:8]}")
        return self._worker.submit(call)

    def _tell_sinks(self, event: StepEvent) -> None:
        # Not the list itself: each launch has a trace of its own, and would leave a listener of its own in it.
        for sink in tuple(self.sinks):
            sink(event)

    def _log_step(self, event: StepEvent) -> None:
        if event.kind == "failed":
            self.log.warning("Kernel %s: step %s failed: %s", self.kernel_id, event.step, event.code)
        elif event.kind == "completed":
            self.log.debug("Kernel %s: %s in %.3f s", self.kernel_id, event.step, event.seconds)

    def _show_step(self, event: StepEvent) -> None:
        if self.desk.panel is not None:
            self.desk.panel.stepped(event)

    # -- what the gate tells us, on its thread

    def _on_wake(self, msg_type: str) -> None:
        self.log.info("Waking kernel %s for a client's %s", self.kernel_id, msg_type)
        self._submit(self._wake)

    def _wake(self) -> None:
        if self.lifecycle is None:
            return
        try:
            self.lifecycle.wake()
        except GpuCkptError as error:
            if self.lifecycle is None or self.state is State.DEAD:
                return  # it was ended meanwhile; jupyter_client learns that by polling
            self.log.error("Kernel %s could not be woken: %s", self.kernel_id, error.code)

    def _on_ask(self, content: dict[str, Any]) -> None:
        """The kernel itself (a magic), or a client of a sleeping kernel, asks for a verb."""
        lifecycle, gate = self.lifecycle, self._gate
        if lifecycle is None or gate is None:
            return
        if content.get("now"):
            self.desk.take(content, lifecycle, gate)
            return
        verbs: dict[str, Callable[[], Any]] = {
            "suspend": lifecycle.suspend,
            "checkpoint": lifecycle.checkpoint,
            "shutdown": lifecycle.terminate,
        }
        call = verbs.get(str(content.get("verb")))
        if call is None:
            self.log.warning("Kernel %s asked for something unknown.", self.kernel_id)
            return
        self._submit(functools.partial(self._do_asked, call, gate))

    def _do_asked(self, call: Callable[[], Any], gate: Gate) -> None:
        try:
            call()
        except GpuCkptError as error:
            self.log.warning("Kernel %s did not do what was asked: %s", self.kernel_id, error.code)
            if gate.state is GateState.DRAINING:
                gate.release()  # kept for us since the cell that asked
            if gate.state is GateState.OPEN:
                self.desk.refused(error, gate)

    # -- jupyter_client's hooks

    @property
    def has_process(self) -> bool:
        """Called by the kernel manager: a checkpointed kernel counts, else it would be taken for never started."""
        return self.lifecycle is not None or super().has_process

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Called from the kernel manager before each launch; writes the connection file and makes the command."""
        if self._gate is None and self._last is None:
            self._orphan = await asyncio.to_thread(self._find_orphan)
            if self._orphan is not None:
                self._take_front(self._orphan.session.front)
        return await super().pre_launch(**kwargs)

    def _find_orphan(self) -> Orphan | None:
        """A kernel of this very id that nobody owns: it is adopted instead of starting another."""
        try:
            return orphan(self.kernel_id, Path(self.runtime_base), Store(Path(self.image_dir)))
        except HostError:
            return None  # the launch meets it too, says why, and starts plainly

    def _take_front(self, front: Mapping[str, Any]) -> None:
        """The kernel manager gets the old ports and key, before it writes the connection file: clients come back."""
        manager = self.parent
        if manager is None:
            return
        manager.transport, manager.ip = front["transport"], front["ip"]
        for channel in ("shell", "iopub", "stdin", "control", "hb"):
            setattr(manager, f"{channel}_port", front[f"{channel}_port"])
        self.ports_cached = True
        manager.session.key = str(front["key"]).encode()
        for name in ("curve_publickey", "curve_secretkey"):
            if front.get(name):
                setattr(manager, name, str(front[name]).encode())

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        """Called from the kernel manager; also on restart.  Falls back to a plain start on a host that is unfit."""
        try:
            engine = await asyncio.to_thread(shared_engine, Path(self.image_dir))
            if self._orphan is not None:
                await asyncio.to_thread(self._adopt, engine, self._orphan, kwargs)
            else:
                await asyncio.to_thread(self._launch_in_capsule, engine, list(cmd), kwargs)
        except HostError as error:
            self._drop_gate()
            self.lifecycle = None
            self.log.warning("Kernel %s is started plainly and cannot be checkpointed: %s", self.kernel_id, error)
            # With the agent all the same: it can say why, and still shows what holds the GPU's memory.
            kwargs["env"] = {**(kwargs.get("env") or os.environ), PLAIN: json.dumps(error.as_dict())}
            return await super().launch_kernel(rewrite(cmd) or cmd, **kwargs)
        self.cwd = kwargs.get("cwd") or str(Path.cwd())
        return self.connection_info

    def _launch_in_capsule(self, engine: Engine, cmd: list[str], kwargs: Mapping[str, Any]) -> None:
        if self._registration is None:
            reap(Path(self.runtime_base))
            self._registration = Registration(make_runtime_dir(Path(self.runtime_base)))
        directory = self._registration.directory
        for stale in directory.glob("kernel-*"):
            stale.unlink()
        front = self._front_info()
        back = _back_info(directory, front)
        file = directory / "connection.json"
        file.touch(0o600)
        file.write_text(json.dumps(back))
        argv = [argument.replace(self._connection_file(), str(file)) for argument in cmd]
        rewritten = rewrite(argv)
        env = dict(kwargs.get("env") or os.environ)
        # 1 turns ipykernel's parent poller off: inside the capsule the parent is always pid 1.
        env["JPY_PARENT_PID"] = "1"
        cwd = str(kwargs.get("cwd") or Path.cwd())
        session = Session(
            kernel_id=self.kernel_id,
            kernel_name=getattr(self.parent, "kernel_name", "") or "",
            runtime_dir=str(directory),
            has_agent=rewritten is not None,
            path=cwd,
            front=front,
        )
        gate, lifecycle = self._furnish(engine, session, back, kwargs)
        launched: Future[bool] = Future()
        # Submitted before the kernel runs: a verb that came first would find a gate that was never opened.
        self._submit(functools.partial(self._open_gate, lifecycle, gate, launched))
        try:
            lifecycle.launch(rewritten or argv, env, cwd)
        finally:
            launched.set_result(lifecycle.state is State.RUNNING)

    def _adopt(self, engine: Engine, found: Orphan, kwargs: Mapping[str, Any]) -> None:
        """Instead of launching: be the owner of a kernel whose own is gone."""
        self._orphan = None
        directory = found.directory or Path(found.session.runtime_dir)
        make_runtime_dir(directory.parent, directory.name)
        self._registration = Registration(directory)
        session = dataclasses.replace(found.session, front=self._front_info())
        capsule = Capsule.attach(directory) if found.directory else None
        gate, lifecycle = self._furnish(engine, session, _back_info(directory, session.front), kwargs)
        lifecycle.adopt(capsule=capsule, image=found.image)
        self.log.info("Kernel %s was adopted, %s", self.kernel_id, lifecycle.state.value)
        if lifecycle.state is State.RUNNING:
            self._submit(functools.partial(self._open_gate, lifecycle, gate))

    def _furnish(
        self, engine: Engine, session: Session, back: dict[str, Any], kwargs: Mapping[str, Any]
    ) -> tuple[Gate, Lifecycle]:
        """The gate and the lifecycle of a kernel that is about to be launched or adopted."""
        assert self._registration is not None
        self.desk = Desk(self.log)  # what an earlier process had asked for went with it
        if self._gate is None or session.front != self._front:
            self._drop_gate()
            self._gate = Gate(
                session.front,
                back,
                on_wake=self._on_wake,
                on_ask=self._on_ask,
                kernel_id=self.kernel_id,
                log=self.log,
                identity=session.identity,
            )
            self._gate.start()
            self._front = session.front
        else:
            self._gate.rebind_kernel(back)
        gate = self._gate
        home = Home(
            kernel_id=self.kernel_id,
            kernel_name=session.kernel_name,
            runtime_dir=self._registration.directory,
            has_agent=session.has_agent,
            outlive=bool(kwargs.get("independent") or self.outlive_server),
            write_session=lambda place: dataclasses.replace(session, identity=gate.identity).write(place),
            stdout=kwargs.get("stdout"),
            stderr=kwargs.get("stderr"),
        )
        session.write(self._registration.directory)
        settings = Settings(drain=self.drain_timeout, connect=self.wake_timeout, slowest_rate=self.slowest_rate)
        trace = Trace(self.kernel_id, [self._tell_sinks])
        self.lifecycle = Lifecycle(home, engine, gate, settings=settings, trace=trace)
        self.lifecycle.on_state.append(self._note_state)
        return gate, self.lifecycle

    def _front_info(self) -> dict[str, Any]:
        info: dict[str, Any] = dict(self.connection_info)
        for name, value in info.items():
            if isinstance(value, bytes):
                info[name] = value.decode("ascii")
        return info

    def _connection_file(self) -> str:
        return str(Path(self.parent.connection_file).resolve()) if self.parent else ""

    def _open_gate(self, lifecycle: Lifecycle, gate: Gate, launched: Future[bool] | None = None) -> None:
        """First contact with a fresh kernel; clients' messages wait in the gate until then."""
        if launched is not None and not launched.result():
            return
        try:
            gate.open(self.start_timeout)
            gate.release()
        except GpuCkptError as error:
            if lifecycle is self.lifecycle and lifecycle.poll() is None:
                self.log.error("Kernel %s does not answer through the gate: %s", self.kernel_id, error.code)

    def _note_state(self, state: State) -> None:
        """The kernel has another state, and perhaps another process: keep the record others look at up to date."""
        lifecycle = self.lifecycle
        capsule = lifecycle.capsule if lifecycle else None
        self.pid = self.pgid = capsule.host_pid if capsule else None
        if self.desk.panel is not None:
            self.desk.panel.changed(state)
        if self._registration is not None and lifecycle is not None:
            self._registration.write(
                kernel_id=self.kernel_id,
                kernel_name=lifecycle.home.kernel_name,
                state=state.value,
                pid=self.pid,
                image=lifecycle.image.id if lifecycle.image else None,
            )

    async def poll(self) -> int | None:
        """Called by the restarter and on shutdown.  None while checkpointed: anything else would restart the kernel."""
        if self.lifecycle is None:
            return await super().poll()
        return self.lifecycle.poll()

    async def wait(self) -> int | None:
        """Called by the kernel manager once the kernel should be gone."""
        if self.lifecycle is None:
            return await super().wait()
        while (status := self.lifecycle.poll()) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)  # a process's end has no event loop of ours to tell it to
        self._last, self.lifecycle = self.lifecycle, None
        return status

    async def send_signal(self, signum: int) -> None:
        """Called to interrupt and to end.  A sleeping kernel has nothing to interrupt; ending it drops the process."""
        if self.lifecycle is None:
            return await super().send_signal(signum)
        if signum == signal.SIGKILL or (signum == signal.SIGTERM and not self._reachable):
            await asyncio.to_thread(self.lifecycle.terminate)
        elif self._reachable and self.lifecycle.capsule is not None:
            self.lifecycle.capsule.signal(signum)
        return None

    async def kill(self, restart: bool = False) -> None:
        """Called when the kernel did not end in time, and for ``shutdown_kernel(now=True)``."""
        await self.send_signal(signal.SIGKILL)

    async def terminate(self, restart: bool = False) -> None:
        """Called between the polite request and `kill`."""
        await self.send_signal(signal.SIGTERM)

    async def shutdown_requested(self, restart: bool = False) -> None:
        """Called after the shutdown request was sent; a sleeping kernel cannot act on it, so it is ended here."""
        if self.lifecycle is not None and not self._reachable:
            await asyncio.to_thread(self.lifecycle.terminate)

    @property
    def _reachable(self) -> bool:
        """Whether the kernel gets what is sent to it: a wake opens the gate before the last of its steps is done."""
        return self._gate is not None and self._gate.state in (GateState.OPEN, GateState.DRAINING)

    async def cleanup(self, restart: bool = False) -> None:
        """Called after the kernel is gone.  A restart drops the image, or the old state would come back."""
        lifecycle = self.lifecycle or self._last
        if lifecycle is not None:
            if restart or not self.keep_image_on_shutdown:
                await asyncio.to_thread(lifecycle.discard_image)
            elif lifecycle.image is not None:
                lifecycle.image.retire()
                self.log.info("Kernel %s was shut down; its image is kept as %s", self.kernel_id, lifecycle.image.id)
        if not restart:
            await asyncio.to_thread(self._drop_gate)
            if self._worker is not None:
                self._worker.shutdown(wait=False)
                self._worker = None
            if self._registration is not None:
                self._registration.end()
                self._registration = None
        await super().cleanup(restart)

    async def leave(self) -> None:
        """Called when the server stops: the kernel is checkpointed for the next server to adopt.

        One that cannot be checkpointed now runs on without an owner.  Either way this provisioner has no kernel left.
        """
        lifecycle = self.lifecycle
        if lifecycle is None:
            return
        try:
            await self.checkpoint()
        except GpuCkptError as error:
            self.log.warning("Kernel %s is left running: %s", self.kernel_id, error.code)
        await asyncio.to_thread(self._let_go, lifecycle)

    def _let_go(self, lifecycle: Lifecycle) -> None:
        self._drop_gate()
        lifecycle.leave()
        if self._worker is not None:
            self._worker.shutdown(wait=False)
            self._worker = None
        if self._registration is not None:
            self._registration.leave()
            self._registration = None
        self.lifecycle = self._last = None

    def _drop_gate(self) -> None:
        if self._gate is not None:
            self._gate.stop()
            self._gate = None

    async def get_provisioner_info(self) -> dict[str, Any]:
        """Called by the kernel manager to persist what a later server needs to find this kernel again."""
        info: dict[str, Any] = await super().get_provisioner_info()
        lifecycle = self.lifecycle
        info["state"] = self.state.value
        info["image"] = lifecycle.image.id if lifecycle and lifecycle.image else None
        info["runtime_dir"] = str(self._registration.directory) if self._registration else None
        return info
