"""The kernel provisioner: jupyter_client's hooks, done by the kernel's host.

One line of configuration makes every kernelspec checkpointable::

    c.KernelProvisionerFactory.default_provisioner_name = "gpu-ckpt-provisioner"

A host that cannot checkpoint still starts kernels, plainly, and logs the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.multikernelmanager import MultiKernelManager
from jupyter_client.provisioning.local_provisioner import LocalProvisioner
from jupyter_core.utils import ensure_async
from traitlets import Bool, Enum, Float, Int, List, Unicode, default

from ..errors import GateError, GpuCkptError, HostError, KernelUnfit, PreflightError, SavePointNotFound, StateError
from ..gate import wire
from ..gate.gate import Gate, GateState
from ..image.encryption import Vault
from ..image.quota import Quota
from ..image.save_point import SavePoint, find, of_image
from ..image.store import Image, Store
from ..lifecycle import endings, going_back, host_copies, suspend
from ..lifecycle.context import FilesChoice
from ..lifecycle.lifecycle import Lifecycle
from ..lifecycle.plans import State
from ..lifecycle.rates import RATES
from ..lifecycle.settings import REFRESHED, LifecycleSettings
from ..node.facts import unbindable
from ..trace import Sink, StepEvent, notify
from . import automatic_saves, branching, kernelspecs
from .agent_injection import NOTICE, PLAIN, rewrite
from .agent_requests import AgentRequests, gpu_map_to
from .branching import BranchPlan
from .directories import default_image_dir, default_runtime_base
from .engine import shared_engine, with_own_store
from .gpu_sharing import GpuSharing
from .host import BRANCH_FLAGS, UNFIT, BranchPoint, KernelHost, Launch, with_notice
from .orphans import Orphan, find_orphan, newest_images, not_attached_notice, not_saved_notice

Result = TypeVar("Result")

#: Seconds from a cell's reply to its idle, with which the gate has all that the cell has requested.
_CELL_ENDS = 1.0
#: Seconds that a restart waits for a cell that is about to end, and for the save point before it.
_SETTLES, _RESTART_WAITS = 0.2, 10.0
#: States of which there is a save point before a restart, and those on the way to one of them, or into an image.
_SAVED = frozenset({State.RUNNING, State.SUSPENDED, State.OFF_GPU})
_SAVED_THEN = frozenset({State.SUSPENDING, State.YIELDING, State.RESUMING, State.SAVING, State.DUMPING})


class GpuCkptProvisioner(LocalProvisioner):
    """Starts kernels in capsules behind a gate, and moves them between GPU, RAM and disk.

    `suspend`, `resume`, `checkpoint`, `restore` and `state` are for the server extension and policies.
    """

    image_dir = Unicode(help="Directory of the images; default: gpu-ckpt/images below Jupyter's data directory.").tag(
        config=True
    )
    runtime_base = Unicode(
        help="Directory for the kernels' sockets; keep it short. Default: gpu-ckpt below XDG_RUNTIME_DIR, "
        "or a directory of this user's own in /tmp."
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
        help="Let kernels continue when the server dies without having stopped them, so that the next one attaches "
        "them. The server extension starts a watchdog that checkpoints those that no server attaches.",
    ).tag(config=True)
    keep_image_on_shutdown = Bool(
        False,
        help="Keep the image when a checkpointed kernel is shut down; else it is deleted. (A restart makes it a save "
        "point, see `save_before_restarts`. It is always kept when a server with the extension stops, when the "
        "kernel expires, and when its user has protected it.) A kept image can be opened again from the list of "
        "sleeping kernels in the browser, or by REST; `jupyter gpu-ckpt rm` deletes it.",
    ).tag(config=True)

    accept_changed_files = Bool(
        False,
        help="Wake a kernel although files it has open were changed while it was away (a log that was rotated, a table "
        "that grew); it uses them as they are now. Else the wake is refused, and the error names the files.",
    ).tag(config=True)
    allow_unconfined_wake = Bool(
        False,
        help="Checkpoint kernels that are confined by Landlock, although they are restored without that. Else they are "
        "refused.",
    ).tag(config=True)
    archive_url = Unicode(
        help="The cold tier: a URL for fsspec (file:, s3:, gs:, sftp:). The server extension sends the content "
        "of images there that are older than `archive_after`; a wake fetches it. Default: "
        "$JUPYTER_GPU_CKPT_ARCHIVE."
    ).tag(config=True)
    archive_after = Float(
        7 * 86400.0, help="Seconds after which an image is archived, if there is an `archive_url`."
    ).tag(config=True)
    refresh_environment = List(
        Unicode(),
        list(REFRESHED),
        help="Environment variables that a restored kernel gets from the server that restores it.",
    ).tag(config=True)

    encryption_key = Unicode(
        help="Source of the key that encrypts images: file:PATH, env:NAME or command:COMMAND, each of which gives 64 "
        "hexadecimal digits. Empty: images are not encrypted. With encryption a checkpoint or restore needs the "
        "processes' host memory twice; device memory only once."
    ).tag(config=True)
    memory_dir = Unicode(
        "/dev/shm",  # noqa: S108 - a directory of this user's below it
        help="Directory of a file system in memory, for the unencrypted files of images that are encrypted.",
    ).tag(config=True)
    image_quota = Int(
        0,
        min=0,
        help="Limit in bytes for all images of a user together; 0: no limit. A checkpoint or pull that might exceed "
        "it is refused with QUOTA_EXCEEDED before anything is written; `jupyter gpu-ckpt prune` deletes old images.",
    ).tag(config=True)
    sleeping_quota = Int(
        0,
        min=0,
        help="Number of kernels of a user that may sleep in images at the same time; 0: no limit. Beyond it a "
        "checkpoint or pull is refused with QUOTA_EXCEEDED.",
    ).tag(config=True)

    template = Unicode(
        help="Name of an image that kernels start from, in place of a launch; a kernelspec sets it (`jupyter gpu-ckpt "
        "template create`)."
    ).tag(config=True)
    template_kernelspec = Unicode(
        help="Name of the kernelspec that the template was made of, as which its kernels continue when the template is "
        "removed; a template's kernelspec sets it."
    ).tag(config=True)
    automatic_save_points = Int(
        5,
        min=1,
        help="How many automatic save points of a kernel are kept: the newest two, the oldest, and of those in between "
        "some that are spread over time; of fewer than three the newest. Those that a user has named stay.",
    ).tag(config=True)
    save_before_restarts = Int(
        1 << 30,
        min=0,
        help="A restart from the server leaves an automatic save point of an idle kernel, awake or asleep, with at "
        "most so many bytes, device memory included: a restart by mistake can be undone. If none can be made, the next "
        "cell says why. 0: never. By default 1 GiB, which takes about a second; larger kernels are often restarted "
        "to free memory, and would have the restart wait for the disk.",
    ).tag(config=True)
    save_after_cells = Bool(
        False,
        help="Make an automatic save point after each cell, which writes an image. A cell that is sent later waits "
        "for it; cells that were sent together (Run All) run first, and have one save point.",
    ).tag(config=True)
    save_when_idle = Float(
        0.0,
        min=0.0,
        help="Minutes without a cell after which the server makes an automatic save point, and another each time they "
        "have passed while the kernel works (a thread that trains); one that does nothing has one until it is used "
        "again. 0: never.",
    ).tag(config=True)
    save_point_file_bytes = Int(
        256 << 20,
        min=0,
        help="Limit in bytes for the copies of files that a kernel has open for writing, at each save point. The "
        "kernel waits for the copies. On a file system with reflinks (Btrfs, XFS) they cost nothing and are not "
        "counted. A file that is not copied can only be taken as it is when the kernel goes back.",
    ).tag(config=True)
    save_point_code_bytes = Int(
        4 << 30,
        min=0,
        help="Limit in bytes for the copies of program code (libraries) in a save point, the smallest files "
        "first, so that it can go back after another version was installed. They are made when the kernel runs again, "
        "and once: save points share them. A quarter of what disk and quota have left is the most. Not for encrypted "
        "images.",
    ).tag(config=True)

    fast_path = Enum(
        ["auto", "kernel", "off"],
        "auto",
        help="`auto`: kernels on a host with an NVIDIA GPU, and the programs that they start, preload a library that "
        "moves their device memory at the rate of the bus. `kernel`: those programs do not, for some that do not "
        "bear LD_PRELOAD. `off`: the CUDA driver moves it, which is slower, and the threads of a suspended kernel "
        "stand still; a kernel that shares device memory with other processes (CUDA IPC) needs that.",
    ).tag(config=True)
    host_copy_bytes = Int(
        None,
        allow_none=True,
        min=0,
        help="With `fast_path`: up to so many bytes of host memory keep a copy of a kernel's device memory while it is "
        "on the GPU, so that its next suspend only copies what has changed. A larger kernel has none, and it is given "
        "up when host memory becomes short. 0: none. None: as many as leave an eighth of the server's memory free "
        "and space to suspend all other kernels on the GPUs; none if it has less than 16 GiB.",
    ).tag(config=True)
    mirror_when_idle = Bool(
        True,
        help="With `host_copy_bytes`: copy a kernel's device memory to host memory in the background once it is idle, "
        "so that its suspend only copies what has changed since. The next cell that uses the GPU ends that.",
    ).tag(config=True)
    keep_chunks = Bool(
        True,
        help="With `fast_path`: keep the device memory of a kernel's last image on the disk while the kernel runs, so "
        "that for its next image only what has changed is written. It is deleted when that needs the disk space.",
    ).tag(config=True)
    write_ahead = Bool(
        True,
        help="With `fast_path`: while a kernel is suspended, write the device memory that has changed since its last "
        "image to the image directory in the background, so that a checkpoint has less to write. A wake stops that. "
        "Not for images that are encrypted.",
    ).tag(config=True)
    gpu_sharing = Enum(
        ["off", "room", "turns"],
        "room",
        help="How kernels share GPUs with those of other servers and users that share them, too. `off`: each keeps its "
        "memory, and a wake without enough free memory fails with GPU_FULL. `room`: the longest idle kernels leave the "
        "GPU when another needs their memory; a wake waits for that. `turns`: kernels that compute and do not fit "
        "together take turns, also in the middle of a cell.",
    ).tag(config=True)
    warm_suspend = Bool(
        False,
        help="With `fast_path`: a suspended kernel keeps its CUDA context on the GPU, some hundred MiB, and only its "
        "allocations are swapped out, which makes suspend and resume faster. A checkpoint includes the context.",
    ).tag(config=True)

    @default("image_dir")
    def _default_image_dir(self) -> str:
        return str(default_image_dir())

    @default("archive_url")
    def _default_archive_url(self) -> str:
        return os.environ.get("JUPYTER_GPU_CKPT_ARCHIVE", "")

    @default("runtime_base")
    def _default_runtime_base(self) -> str:
        return str(default_runtime_base())

    def store(self) -> Store:
        """Return the images of this user, with the key and the limits that are configured."""
        vault, quota = Vault(self.encryption_key, Path(self.memory_dir)), Quota(self.image_quota, self.sleeping_quota)
        return Store(Path(self.image_dir), vault=vault, quota=quota)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        #: Why the kernel was started plainly: it had ended behind the gate.  None for all others.
        self.unfit: KernelUnfit | None = None
        #: Arguments of the launch, for another one.
        self._arguments: dict[str, Any] = {}
        #: The event loop that the kernel was launched on, and the last branch that a cell has requested.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._branch_task: Future[None] | None = None
        #: Whether the end of the kernel was requested.
        self._unwanted = False
        #: Listeners to the trace of this kernel's steps, and the faults that tests inject into them; see `trace`.
        self.sinks: list[Sink] = [self._log_step, RATES, self._show_step]
        self.faults: list[Sink] = []
        self._host = KernelHost(self.kernel_id, self, self.log)
        #: Called with each new state, on the thread that changed it.  They outlive a restart, unlike listeners of the
        #: lifecycle.
        self.on_state: list[Callable[[State], None]] = []
        #: Set if the kernel is ended by a policy: its image is kept.  For the next shutdown only.
        self.keep_image = False
        #: Called with the end of a protection (seconds since the epoch) when it is set, with None when it is lifted;
        #: must not raise.
        self.on_protected: list[Callable[[float | None], None]] = []
        #: Returns the notebook's document, on another thread than the event loop's; set by the server extension.
        self.document: Callable[[], bytes | None] = lambda: None
        self._orphan: Orphan | None = None
        #: Whether there is to be a save point before the restart that is under way, and why there is none.
        self._saves_restart = False
        self._not_saved: GpuCkptError | None = None
        #: Only the first launch attaches; a restart starts a fresh kernel.
        self._launched = False

    # -- the programmatic interface

    @property
    def state(self) -> State:
        """The kernel's state.  A kernel that was started plainly is running or dead."""
        if self.lifecycle is not None:
            return self.lifecycle.state
        return State.RUNNING if self.process is not None else State.DEAD

    @property
    def lifecycle(self) -> Lifecycle | None:
        """The kernel's lifecycle; None for a kernel that was started plainly, or is gone."""
        return self._host.lifecycle

    @property
    def agent_requests(self) -> AgentRequests:
        """Answers to the kernel's agent, and until when the kernel is protected from policies."""
        return self._host.agent_requests

    @property
    def sharing(self) -> GpuSharing | None:
        """The kernel's part in sharing GPUs with others; None if it has none."""
        return self._host.sharing

    @property
    def gate(self) -> Gate | None:
        """The gate, whose state tells what clients do; None for a kernel that was started plainly."""
        return self._host.gate

    @property
    def is_saving(self) -> bool:
        """True while a save point is being made, or may be as a cell has requested.  Waits for the gate's thread."""
        gate = self.gate
        may_be_requested = False
        if gate is not None:
            with contextlib.suppress(GateError):  # it was stopped
                ending = gate.under_way.ending  # first: it is over when the gate's state tells of the request
                may_be_requested = ending or gate.state in (GateState.DRAINING, GateState.DRAINED)
        return may_be_requested or self.state is State.SAVING

    async def suspend(self) -> None:
        """Move the CUDA state to host memory; the GPU is free then.  After failure the kernel runs on."""
        await self._host.worker.verb("suspend", self._checkpointable().suspend)

    async def resume(self) -> None:
        """Move the CUDA state back to the GPU.  After failure the kernel stays suspended."""
        await self._host.worker.verb("resume", self._checkpointable().resume)

    async def checkpoint(self) -> Image:
        """Write the kernel to an image and end its process.  After failure the kernel is as it was."""
        return await self._host.worker.verb("checkpoint", self._checkpointable().checkpoint)

    async def save(self, name: str, notebook: bytes | None = None) -> Image:
        """Write the kernel to a save point of this name; it pauses for that, and continues.

        ``notebook``: its document, to be kept with it.  After failure the kernel is as it was.
        """
        save = self._checkpointable().save
        return await self._host.worker.verb(f"save {name}", save, SavePoint(name), notebook)

    async def branch(self, name: str = "", *, gpu: int | None = None, **how: Any) -> str:
        """Start another kernel from a save point of this one, by the manager of both, and return the new kernel's id.

        ``name``: of the save point; without a name from this kernel as it is now: it is saved first if it is awake.
        ``how``: fields of `BranchPoint` but its image; ``gpu``: a GPU's number, in place of its ``gpu_map`` where one
        GPU is used.  After failure there is no new kernel, and this one is as it was; an image that was made for it is
        kept.  Raises `StateError` without a manager of several kernels, `SavePointNotFound`, `BranchDiffers`,
        `BranchUnsafe`, and as `restore`.
        """
        manager = self.parent
        kernels: Any = getattr(manager, "parent", None)
        if manager is None or not isinstance(kernels, MultiKernelManager):
            hint = "Give `BranchPoint` as the argument branch_of to the start_kernel of another kernel manager."
            raise StateError("This kernel's manager has no other kernels.", hint=hint)
        image = await self.branch_image(name)
        if gpu is not None:
            how["gpu_map"] = await asyncio.to_thread(
                gpu_map_to, self._checkpointable(), image.manifest.device_bytes, gpu
            )
        point = BranchPoint(image.id, **how)
        if (start := getattr(kernels, "start_branch", None)) is not None:  # the server's, with a notebook
            return str(await start(self.kernel_id, point))
        same = {name: self._arguments[name] for name in ("env", "cwd") if name in self._arguments}
        try:
            started = kernels.start_kernel(kernel_name=self.kernelspec_for_branch(), **same, branch_of=point)
            return str(await ensure_async(started))
        except BaseException:
            drop_failed_starts(kernels)
            raise

    def kernelspec_for_branch(self) -> str:
        """Return the name of the kernelspec that a branch has: the kernel's own, or what took its place.

        Raises `StateError`.
        """
        assert self.parent is not None
        names = (self.parent.kernel_name, self._checkpointable().home.fallback_name)
        return kernelspecs.choose(self.parent.kernel_spec_manager, *names)

    async def branch_image(self, name: str = "") -> Image:
        """Return the image that a branch starts from; make it if there is no ``name`` and the kernel is awake.

        Raises as `branch`.
        """
        lifecycle, engine = self._checkpointable(), self._checkpointable().engine
        if name:
            with contextlib.suppress(SavePointNotFound):
                return find(await asyncio.to_thread(engine.store.images), self.kernel_id, name)
            # Perhaps its save was requested by a cell whose reply comes before what the gate hears of that, or is under
            # way: on the worker it comes before this.
            deadline, gate = time.monotonic() + _CELL_ENDS, self.gate
            while gate is not None and gate.working and time.monotonic() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            found = self._host.worker.submit(lambda: find(engine.store.images(), self.kernel_id, name))
            return await asyncio.wrap_future(found)
        if (own := lifecycle.image) is not None and lifecycle.state is State.CHECKPOINTED:
            return own

        def save() -> Image:
            return automatic_saves.save(lifecycle, automatic_saves.BRANCH, self.notebook())

        return await self._host.worker.verb("save for a branch", save)

    async def branch_plan(self, name: str = "") -> BranchPlan:
        """Return the consequences of a `branch`, which is not begun: for a save point, or for a kernel that sleeps."""
        lifecycle = self._checkpointable()
        if not name and lifecycle.state is not State.CHECKPOINTED:
            hint = "Save it under a name first, and give that name."
            raise StateError("What a branch has otherwise is known of an image only; the kernel is awake.", hint=hint)
        image = await self.branch_image(name)
        return await asyncio.to_thread(branching.plan, lifecycle.engine.store, image)

    async def summary(self) -> dict[str, Any]:
        """Return the agent's summary of the variables now, as a save point has it.

        Raises `StateError` for a kernel that does not run, or has no agent, `AgentError`, `KernelBusy` while it runs a
        cell.
        """
        lifecycle = self._checkpointable()
        if lifecycle.state is not State.RUNNING or not lifecycle.home.has_agent:
            message = f"The kernel is {lifecycle.state.value}, or has no agent: its variables are not known."
            raise StateError(message, hint="Run a cell to wake it, or compare two save points.")
        reply = await asyncio.to_thread(suspend.request_agent, lifecycle.kernel, "summary", {})
        return dict(reply.get("report") or {})

    async def save_automatically(self, why: str) -> Image:
        """Make an automatic save point, for a reason of `automatic_saves`.  After failure the kernel is as it was."""

        def save(why: str) -> Image:
            return automatic_saves.save(self._checkpointable(), why, self.document())

        return await self._host.worker.verb("save_automatically", save, why)

    async def mirror(self) -> bool:
        """Begin to copy the device memory of the idle kernel to host memory; return whether that was begun.

        Raises `GpuCkptError`; the kernel is as it was.
        """

        def mirror() -> bool:
            lifecycle = self._checkpointable()
            try:
                return lifecycle.state is State.RUNNING and host_copies.begin_mirror(lifecycle.kernel)
            except OSError as error:
                raise GpuCkptError.from_exception(error) from error

        return await self._host.worker.verb("mirror", mirror)

    async def save_before_restart(self) -> None:
        """Called from the server before a restart: leave a save point of an idle kernel that is not too large.

        The image of one that sleeps, or falls asleep now, becomes one (`keep_or_discard_image`).  Never raises, and
        takes a few seconds at most: the user wants another kernel, whose first cell says why there is none.
        """
        self._not_saved, lifecycle, gate = None, self.lifecycle, self.gate
        if not self.save_before_restarts or lifecycle is None or gate is None:
            return
        self._saves_restart = True

        def save() -> None:
            current = self._checkpointable()
            if current.state in _SAVED and automatic_saves.size(current) <= self.save_before_restarts:
                automatic_saves.save(current, automatic_saves.RESTART, self.document())

        try:
            settled = time.monotonic() + _SETTLES
            while gate.under_way.cells and time.monotonic() < settled:  # noqa: ASYNC110
                await asyncio.sleep(0.02)  # between a reply, which clients wait for, and the idle there is no event
            wakes = lifecycle.state is State.RESTORING and gate.state is GateState.OPEN  # cells run before its end
            if gate.under_way.cells or not (wakes or lifecycle.state in _SAVED | _SAVED_THEN):
                return
            with contextlib.suppress(GpuCkptError, OSError):  # it is being moved, and has no process any more
                if await asyncio.to_thread(automatic_saves.size, lifecycle) > self.save_before_restarts:
                    self.log.info("Kernel %s is restarted without a save point: it is too large", self.kernel_id)
                    return
            await asyncio.wait_for(self._host.worker.verb("save_before_restart", save), _RESTART_WAITS)
        except TimeoutError:
            self._note_not_saved(PreflightError(f"It was not there within {_RESTART_WAITS:.0f} s."))
        except Exception as error:
            self._note_not_saved(error)

    def _note_not_saved(self, error: Exception) -> None:
        """Note why there is no save point before a restart, for the first cell of the next kernel."""
        self._not_saved = GpuCkptError.from_exception(error)
        foreign = None if self._not_saved is error else error
        message = "Kernel %s is restarted without a save point: %s"
        self.log.warning(message, self.kernel_id, self._not_saved.code, exc_info=foreign)

    async def back(
        self,
        name: str,
        files: FilesChoice = None,
        notebook: bytes | None = None,
        *,
        gpu_map: Mapping[str, str] | None = None,
    ) -> Image:
        """Go back to the save point of this name, with the same id and connections; messages wait meanwhile.

        The present state is saved first, as an automatic save point, which is returned.  ``files``: ``then`` or
        ``now``, for all files that differ or by path; `FilesDiffer` names those without a choice.  ``notebook``: the
        present document, to be kept with the present state.  ``gpu_map``: as for `restore`, of the save point.  After
        failure the kernel is as it was.
        """

        def back(*arguments: Any) -> Image:
            return self._checkpointable().back(*arguments)

        return await self._host.worker.verb("back", back, name, files, notebook, gpu_map)

    async def restore(
        self, gpu_map: Mapping[str, str] | None = None, *, accept_changed_files: bool | None = None
    ) -> None:
        """Restore the kernel from its image; ``gpu_map`` maps GPU UUIDs of the checkpoint to those to use.

        ``accept_changed_files``: in place of the trait of that name, this once.  After failure the image is kept, and
        the next try starts from it.  Raises `StateError` when a restore to other GPUs is under way.
        """

        def restore(gpu_map: dict[str, str], accept_changed_files: bool | None) -> None:
            self._checkpointable().restore(gpu_map, accept_changed_files=accept_changed_files)

        await self._host.worker.verb("restore", restore, dict(gpu_map or {}), accept_changed_files)

    @contextlib.asynccontextmanager
    async def once_idle(self) -> AsyncIterator[None]:
        """Wait until no cell runs or waits in the kernel; the body does a verb before the next cell.

        Raises `StateError` if the kernel ends or is restarted before.
        """
        self._checkpointable()
        if (gate := self.gate) is None:
            raise StateError("The kernel has no gate any more.")
        idle = gate.when_idle()
        try:
            await asyncio.wrap_future(idle)
            yield
        finally:
            # `cancel` first: if it is too late, the gate queues requests, unless a verb was done or its drain failed.
            if not idle.cancel() and idle.exception() is None and gate.state is GateState.DRAINING:
                with contextlib.suppress(GpuCkptError):  # another verb drains it
                    await asyncio.to_thread(gate.release)

    def _checkpointable(self) -> Lifecycle:
        if self.lifecycle is None:
            hint = "`jupyter gpu-ckpt doctor` says what the host lacks; then restart the kernel."
            hint = hint if self.unfit is None else self.unfit.message
            raise StateError("This kernel was started plainly and cannot be checkpointed.", hint=hint)
        return self.lifecycle

    def _log_step(self, event: StepEvent) -> None:
        if event.kind == "failed":
            self.log.warning("Kernel %s: step %s failed: %s", self.kernel_id, event.step, event.code)
        elif event.kind == "completed":
            parts = "".join(f", {name} {seconds:.3f}" for name, seconds in event.parts.items())
            self.log.debug("Kernel %s: %s in %.3f s%s", self.kernel_id, event.step, event.seconds, parts)

    def _show_step(self, event: StepEvent) -> None:
        if self.agent_requests.panel is not None:
            self.agent_requests.panel.stepped(event)

    # -- jupyter_client's hooks

    @property
    def has_process(self) -> bool:
        """Called by the kernel manager: a checkpointed kernel counts, else it would be taken for never started."""
        return self.lifecycle is not None or super().has_process

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Called from the kernel manager before each launch; writes the connection file and builds the command."""
        if not self._launched:
            self._orphan = await asyncio.to_thread(self._find_orphan)
            if self._orphan is not None:
                self._use_front(self._orphan.session.front)
        return await super().pre_launch(**kwargs)

    def _find_orphan(self) -> Orphan | None:
        """Find a kernel of this id without an owner, which is attached instead of starting another."""
        store = self.store()
        try:
            return find_orphan(self.kernel_id, Path(self.runtime_base), store)
        except HostError:  # the launch raises it, too
            return newest_images(store).get(self.kernel_id)

    def _use_front(self, front: Mapping[str, Any]) -> None:
        """Set the old ports and key in the kernel manager before it writes the connection file: clients reconnect.

        For a kernel from another host the ports may be taken here, or the address be the other host's: then the manager
        chooses, and clients that connect through a server notice nothing.
        """
        if (manager := self.parent) is None:
            return
        manager.session.key = str(front["key"]).encode()
        for name in ("curve_publickey", "curve_secretkey"):
            if front.get(name):
                setattr(manager, name, str(front[name]).encode())
        ports = {f"{channel}_port": front[f"{channel}_port"] for channel in wire.CHANNELS}
        if front["transport"] == "tcp" and any(unbindable(front["ip"], port) for port in ports.values()):
            self.log.info("Kernel %s gets new ports: its old ones cannot be bound here.", self.kernel_id)
            return
        manager.transport, manager.ip = front["transport"], front["ip"]
        for name, port in ports.items():
            setattr(manager, name, port)
        self.ports_cached = True

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        """Called from the kernel manager; also on restart.

        Starts the kernel plainly where the host, or the kernel, is unfit.
        """
        found, self._orphan = self._orphan, None
        point: BranchPoint | None = kwargs.pop("branch_of", None)
        if point is None and self.template:
            point = BranchPoint(
                self.template, reseed=True, is_template=True, accept_changed_files=True, accept_differences=True
            )
        elif self._launched:  # a restarted branch is a fresh kernel
            point = None
        launch = self._launch(cmd, kwargs, point)
        self._saves_restart = False
        if (why := self._not_saved) is not None:
            launch, self._not_saved = with_notice(launch, not_saved_notice(why)), None
        self._unwanted, self._arguments = False, dict(kwargs)
        self._loop = asyncio.get_running_loop()
        self.unfit = UNFIT.get(launch.key) if found is None and point is None else None
        if self.unfit is not None:
            self._host.close()
            self._launched = True
            self.log.warning("Kernel %s is started plainly, as others of its kind: %s", self.kernel_id, self.unfit)
            return await super().launch_kernel(cmd, **kwargs)
        try:
            engine = await asyncio.to_thread(shared_engine, Path(self.image_dir))
            engine = with_own_store(engine, self.store())
            try:
                await asyncio.to_thread(self._host.start, engine, launch, found)
            except GateError:
                if found is not None or not await self._chose_other_ports(kwargs):
                    raise
                launch = dataclasses.replace(launch, front=self._front_info())
                await asyncio.to_thread(self._host.start, engine, launch, None)
        except GpuCkptError as error:
            self._host.close()
            if not isinstance(error, HostError) or (point is not None and not point.is_template):
                # jupyter_client would leave the file; that of a kernel to attach may be another server's by now.
                if self.parent is not None and not self._launched and found is None:
                    self.parent.cleanup_connection_file()
                raise
            self.log.warning("Kernel %s is started plainly and cannot be checkpointed: %s", self.kernel_id, error)
            # With the agent all the same: it shows why, and what uses the GPU's memory.
            kwargs["env"] = {**(kwargs.get("env") or os.environ), PLAIN: json.dumps(error.as_dict())}
            if found is not None:
                kwargs["env"][NOTICE] = notice = not_attached_notice(found, error)
                self.log.warning("Kernel %s: %s", self.kernel_id, notice)
            self._launched = True
            return await super().launch_kernel(rewrite(cmd) or cmd, **kwargs)
        self._launched = True
        self.cwd = kwargs.get("cwd") or str(Path.cwd())
        return self.connection_info

    def start_plainly(self, error: KernelUnfit, cmd: list[str]) -> subprocess.Popen[bytes] | None:
        """Called on the worker's thread when a kernel ended before its first answer: start ``cmd`` in its place.

        Return None where the kernel is not wanted any more, or cannot be started.
        """
        if self._unwanted:
            return None
        try:
            asyncio.run(super().launch_kernel(cmd, **self._arguments))
        except Exception as foreign:
            self.log.error("Kernel %s could not be started plainly either: %s", self.kernel_id, type(foreign).__name__)
            return None
        process: subprocess.Popen[bytes] | None = self.process
        if self._unwanted and process is not None:  # since then, and perhaps only the other one was ended
            process.kill()
        self.unfit = error
        self.log.info("Kernel %s ended before its first answer; it is tried without a capsule.", self.kernel_id)
        return process

    async def _chose_other_ports(self, kwargs: Mapping[str, Any]) -> bool:
        """Choose ports once more for a kernel that nobody has connected to yet, if one of its own was taken.

        jupyter_client chooses ports and closes them; until the gate binds them any program may get one.
        """
        manager, front = self.parent, self._front_info()
        if manager is None or self._launched or not manager.cache_ports or front["transport"] != "tcp":
            return False
        ports = [front[f"{channel}_port"] for channel in wire.CHANNELS]
        if not any([await asyncio.to_thread(unbindable, front["ip"], port) for port in ports]):
            return False
        self.log.info("Kernel %s gets other ports: %s are not all free any more.", self.kernel_id, ports)
        self._host.close()
        self.ports_cached = False
        manager.cleanup_connection_file()
        await super().pre_launch(**kwargs)  # its command is the one that there is
        return True

    def _front_info(self) -> dict[str, Any]:
        """Return what clients connect to, as `Session.front` has it."""
        info: dict[str, Any] = dict(self.connection_info)
        return {name: value.decode("ascii") if isinstance(value, bytes) else value for name, value in info.items()}

    def _launch(self, cmd: list[str], kwargs: Mapping[str, Any], branch: BranchPoint | None = None) -> Launch:
        env = dict(kwargs.get("env") or os.environ)
        if self.save_after_cells:
            env[automatic_saves.AFTER_CELLS] = "1"
        if self.encryption_key.startswith("env:"):
            env.pop(self.encryption_key.removeprefix("env:"), None)  # else the key would be in the image
        return Launch(
            cmd=list(cmd),
            connection_file=str(Path(self.parent.connection_file).resolve()) if self.parent else "",
            front=self._front_info(),
            kernel_name=getattr(self.parent, "kernel_name", "") or "",
            root=str(getattr(getattr(self.parent, "parent", None), "root_dir", "")),
            base=Path(self.runtime_base),
            env=env,
            cwd=str(kwargs.get("cwd") or Path.cwd()),
            outlive=bool(kwargs.get("independent") or self.outlive_server),
            start_timeout=self.start_timeout,
            settings=LifecycleSettings(
                drain=self.drain_timeout,
                connect=self.wake_timeout,
                slowest_rate=self.slowest_rate,
                refresh=tuple(self.refresh_environment),
                accept_changed_files=self.accept_changed_files,
                allow_unconfined_wake=self.allow_unconfined_wake,
                archive_url=self.archive_url,
                warm=self.warm_suspend,
                sharing=self.gpu_sharing,
                host_copy_bytes=self.host_copy_bytes,
                keep_chunks=self.keep_chunks,
                write_ahead=self.write_ahead,
                kept_file_bytes=self.save_point_file_bytes,
                kept_code_bytes=self.save_point_code_bytes,
                automatic_save_points=self.automatic_save_points,
            ),
            fast_path=self.fast_path,
            stdout=kwargs.get("stdout"),
            stderr=kwargs.get("stderr"),
            branch=branch,
            fallback_name=self.template_kernelspec,
        )

    # -- as the owner of its host (`KernelOwner`)

    def state_changed(self, state: State, pid: int | None) -> None:
        """Called with each new state, and the pid if there is a process, on the thread that changed it."""
        self.pid = self.pgid = pid
        notify(self.on_state, state)

    def step_traced(self, event: StepEvent) -> None:
        """Called with each event of the trace, on the thread that runs the step."""
        notify(self.sinks, event)

    def notebook(self) -> bytes | None:
        """Called on the worker's thread, for a save point that the kernel itself has requested."""
        return self.document()

    def protection_changed(self, until: float | None) -> None:
        """Called with the end of a protection (seconds since the epoch) when it is set; None when it is lifted."""
        for callback in tuple(self.on_protected):
            callback(until)

    def branch_requested(
        self, content: Mapping[str, Any], on_end: Callable[[str, str, GpuCkptError | None], None]
    ) -> None:
        """Called on the gate's thread when a cell has requested a branch.

        ``on_end`` gets the new id and the file of its notebook, or the error.
        """
        how = content.get("how")
        # One that is not set is as the settings say.
        flags = {name: True for name in BRANCH_FLAGS if isinstance(how, dict) and how.get(name) is True}
        gpu = content.get("gpu")

        async def branch() -> None:
            kernel_id, notebook, failure = "", "", None
            try:
                kernel_id = await self.branch(str(content.get("name", "")), gpu=gpu, **flags)
                notebook = self._notebook_of_branch(kernel_id)
            except Exception as error:
                failure = GpuCkptError.from_exception(error)
            await asyncio.to_thread(on_end, kernel_id, notebook, failure)

        assert self._loop is not None
        self._branch_task = asyncio.run_coroutine_threadsafe(branch(), self._loop)

    def _notebook_of_branch(self, kernel_id: str) -> str:
        """Return the file of another kernel's notebook; empty if it has none, or this kernel's."""
        kernels: Any = getattr(self.parent, "parent", None)
        provisioner = kernels.get_kernel(kernel_id).provisioner if kernel_id in kernels else None
        files = [each.lifecycle.home.notebook if each and each.lifecycle else "" for each in (self, provisioner)]
        return files[1] if files[1] != files[0] else ""

    async def poll(self) -> int | None:
        """Called by the restarter and on shutdown.  None while checkpointed: anything else would restart the kernel."""
        if (lifecycle := self.lifecycle) is None:
            return await super().poll()
        return None if self._host.awaits_first_answer else lifecycle.poll()

    async def wait(self) -> int | None:
        """Called by the kernel manager once the kernel should be gone."""
        if (lifecycle := self.lifecycle) is None:
            return await super().wait()
        while (status := lifecycle.poll()) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)  # no event loop is notified of a process's end
        self._host.clear()
        return status

    async def send_signal(self, signum: int) -> None:
        """Called to interrupt and to end.

        For a kernel that is away the cells that wait for it are interrupted, and any end is immediate.
        """
        self._unwanted = self._unwanted or signum in (signal.SIGKILL, signal.SIGTERM)
        if self.lifecycle is None:
            return await super().send_signal(signum)
        gate = self._host.gate
        if signum == signal.SIGINT:
            self._host.interrupted()
        if signum == signal.SIGINT and gate is not None and await _in_thread(gate.interrupt):
            return None
        if signum == signal.SIGKILL or (signum == signal.SIGTERM and not self._host.reachable):
            await _in_thread(self.lifecycle.terminate)
        elif self._host.reachable and self.lifecycle.capsule is not None:
            self.lifecycle.capsule.signal(signum)
        return None

    async def kill(self, restart: bool = False) -> None:
        """Called when the kernel did not end in time, and for ``shutdown_kernel(now=True)``."""
        if self.lifecycle is not None and not self.lifecycle.kernel.end_requested:
            self.end_announced(self.lifecycle, restart)  # by now=True, which never says that a restart follows
        await self.send_signal(signal.SIGKILL)

    async def terminate(self, restart: bool = False) -> None:
        """Called between the shutdown request and `kill`."""
        await self.send_signal(signal.SIGTERM)

    async def shutdown_requested(self, restart: bool = False) -> None:
        """Called after the shutdown request was sent; a sleeping kernel cannot act on it, so it is ended here."""
        self._unwanted = True
        if self.lifecycle is not None:
            self.end_announced(self.lifecycle, restart)
            self.lifecycle.kernel.end_requested = True
            if not self._host.reachable:
                await _in_thread(self.lifecycle.terminate)

    async def cleanup(self, restart: bool = False) -> None:
        """Called after the kernel is gone.  A restart drops the image, or the old state would come back."""
        lifecycle = self.lifecycle or self._host.last
        if lifecycle is not None:
            if (kept := lifecycle.kernel.kept_image) is not None:
                message = (
                    "Kernel %s died as it had just come back; its image is kept: `jupyter gpu-ckpt rm %s` deletes it"
                )
                self.log.warning(message, self.kernel_id, kept.id)
            await _in_thread(self.keep_or_discard_image, lifecycle, restart)
        self.keep_image = False
        if not restart:
            if lifecycle is not None:
                await _in_thread(lifecycle.engine.store.forget, lifecycle.home.kernel_id)
            await _in_thread(self._host.end)
        await super().cleanup(restart)

    def end_announced(self, lifecycle: Lifecycle, restart: bool) -> None:
        """Called before the kernel is ended: a verb that ends by that says what is left."""
        lifecycle.kernel.keeps_at_end = functools.partial(self._keeps, restart)

    def keep_or_discard_image(self, lifecycle: Lifecycle, restart: bool) -> None:
        """Called when the kernel was ended, also by a message while it was away; ``restart``: another follows."""
        if not restart and not self._keeps_images:
            going_back.thin_out(lifecycle.kernel, 0)
        if (image := lifecycle.image) is None:
            return
        if not restart and self._keeps_images:
            endings.keep_image(lifecycle.kernel)
            self.log.info("Kernel %s was shut down; its image is kept as %s", self.kernel_id, image.id)
            return
        if restart and not image.is_save_point and self._keeps(restart, image):
            try:
                automatic_saves.keep_image(lifecycle, automatic_saves.RESTART, self.document())
                self.log.info("Kernel %s is restarted; its image %s is a save point now", self.kernel_id, image.id)
                return
            except Exception as error:  # the kernel is restarted all the same
                self._note_not_saved(error)
        endings.discard_image(lifecycle.kernel)
        if lifecycle.image is None and lifecycle.kernel.kept_image is None:
            self.log.info("Kernel %s was ended; its image %s is deleted", self.kernel_id, image.id)
        else:
            message = "Kernel %s was ended; its image could not be deleted, `jupyter gpu-ckpt rm %s` does it"
            self.log.warning(message, self.kernel_id, image.id)

    @property
    def _keeps_images(self) -> bool:
        """Return whether the image stays if the kernel is shut down."""
        return self.keep_image_on_shutdown or self.keep_image or self.agent_requests.protection() is not None

    def _keeps(self, restart: bool, image: Image) -> bool:
        """Return whether the image of a kernel that is ended stays.

        Save points do, but automatic ones of a shutdown.  Of a branch that has not run yet, the image is the state that
        it began from.
        """
        if (point := of_image(image)) is not None:
            return restart or self._keeps_images or not point.automatic
        if not restart:
            return self._keeps_images
        is_own = self._saves_restart and not image.manifest.branched_from
        return is_own and image.manifest.bytes <= self.save_before_restarts

    async def detach(self) -> None:
        """Called when the server stops: checkpoint the kernel, for the next server to attach.

        A kernel that cannot be checkpointed now runs on without an owner.  Either way this provisioner has none then.
        """
        if self.lifecycle is None:
            return
        self.lifecycle.begin_detach()
        try:
            await self.checkpoint()
        except GpuCkptError as error:
            self.log.warning("Kernel %s is left running: %s", self.kernel_id, error.code)
        await _in_thread(self._host.detach)

    async def detach_now(self) -> None:
        """Called when the server stops and `detach` took too long: leave the kernel as it is, without an owner.

        A drain, a dump or a restore under way is cancelled.  Any other step is waited for, also by the end of this
        process; the next owner repairs what is left half done.
        """
        await _in_thread(self._host.detach)

    async def get_provisioner_info(self) -> dict[str, Any]:
        """Called by the kernel manager, which stores the information for a later server."""
        info: dict[str, Any] = await super().get_provisioner_info()
        image, directory = self.lifecycle and self.lifecycle.image, self._host.directory
        ours = {"state": self.state.value, "image": image.id if image else None}
        return {**info, **ours, "runtime_dir": str(directory) if directory else None}


async def _in_thread(call: Callable[..., Result], *arguments: Any) -> Result:
    """Return the result of ``call``, on a thread; at the end of the interpreter, which starts none, on this one.

    Clients without a server (``jupyter run``) end their kernels then (`atexit`).
    """
    try:
        future = asyncio.get_running_loop().run_in_executor(None, call, *arguments)
    except RuntimeError:
        return call(*arguments)
    return await future


def drop_failed_starts(kernels: MultiKernelManager) -> None:
    """Drop kernels that could not be started from those that ``kernels`` is starting.

    jupyter_client keeps them there, and fails to shut them down when it shuts down all.
    """
    for kernel_id, task in tuple(kernels._pending_kernels.items()):
        if task.done() and kernel_id not in kernels:
            del kernels._pending_kernels[kernel_id]
