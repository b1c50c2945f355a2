"""State of one kernel, of one attempt to move it, and the cancellation of that attempt.

The steps are functions of one `Attempt`, in `suspend`, `dump`, `restore` and `resume`; `plans` has their order and
their undo, `lifecycle` runs them.  A step that fails leaves everything as it was before, or raises `PartlyDone`.
"""

from __future__ import annotations

import contextlib
import enum
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ..capsule.capsule import Capsule
from ..capsule.namespaces import Clocks
from ..criu.criu import Criu
from ..criu.exclusive import Exclusive
from ..cuda.cuda import Cuda
from ..cuda.fastpath import FastPath
from ..cuda.gpus import Gpu, Gpus
from ..cuda.held_memory import HeldMemory
from ..cuda.refusals import Refusal
from ..errors import CapsuleError, CapsuleGone, CriuError, GpuCkptError, KernelLost, LimitReached, UnsupportedCuda
from ..image.background_task import BackgroundTask
from ..image.chunk_cache import ChunkCache
from ..image.completion import Completion
from ..image.device_memory import DeviceRead
from ..image.draft import Draft
from ..image.kept_files import KeptFile
from ..image.lease import Lease
from ..image.manifest import Manifest
from ..image.save_point import SavePoint
from ..image.store import Image, Store
from ..trace import Trace, TracedStep
from . import preflight
from .capsule_ahead import CapsuleAhead
from .plans import MachineState, State, Step
from .settings import LifecycleSettings

#: Beginnings of names in a kernel's directory: of its own sockets (the library's, too, `fastpath.SOCKET`), and of those
#: of its program that a branch has there.
KERNEL_SOCKETS, MOVED = "kernel-", "moved-"
#: Bytes of host memory for a copy of all device memory that a kernel can have.
_ALL = 1 << 62


class GateProtocol(Protocol):
    """The methods of `gate.gate.Gate` that a lifecycle calls."""

    def open(self, timeout: float) -> None: ...
    def drain(self, timeout: float) -> None: ...
    def release(self) -> None: ...
    def close(self) -> None: ...
    def sleep(self) -> None: ...
    def fail(self, error: GpuCkptError) -> None: ...
    def request(self, msg_type: str, content: dict[str, Any], timeout: float) -> dict[str, Any]: ...
    def prompt(self, text: str, timeout: float) -> str | None: ...
    def cancel_prompt(self) -> None: ...
    def notify(self, notice: str) -> None: ...
    def print_notice(self, text: str) -> None: ...
    def kernel_died(self) -> None: ...
    def expect_key(self, key: str) -> None: ...
    def follow_session(self, session: str) -> None: ...


class Admission(Protocol):
    """The methods by which a kernel that shares GPUs with others is admitted to one (`kernel.gpu_sharing`)."""

    def admit(
        self, needs: Mapping[str, int], present: Sequence[Gpu], *, elsewhere: bool, early: bool
    ) -> dict[str, str]: ...
    def renew(self) -> None: ...
    def settle(self) -> None: ...
    def frees(self, begun: bool) -> None: ...
    def is_alone(self) -> bool: ...


@dataclass
class Engine:
    """Facades of CRIU, the CUDA driver, the GPUs and the image directory; tests replace each by a fake."""

    criu: Criu
    criu_version: str
    cuda: Cuda
    gpus: Gpus
    store: Store
    #: The kernels of this server, by id, whatever their image directory.
    kernels: weakref.WeakValueDictionary[str, KernelState] = field(default_factory=weakref.WeakValueDictionary)


@dataclass
class Home:
    """The name and the directories of a kernel on this host."""

    kernel_id: str
    kernel_name: str
    runtime_dir: Path
    has_agent: bool
    #: The kernelspec to use when that of `kernel_name` is removed, a template; empty if there is none.
    fallback_name: str = ""
    #: The path of that directory inside the capsule, if it differs: the kernel came from another host.
    known_as: Path | None = None
    #: The path of its sockets inside the capsule, without ``-`` and the number of a channel, if they are not in
    #: `inner_dir`: a short one, for kernels that may know no longer ones.  The directory of it is the same directory.
    sockets: Path | None = None
    #: `multiprocessing`'s directories of sockets that the capsule has of its own (`capsule.private_directories`): at
    #: these paths the kernel that a branch comes from has others.
    private: Sequence[str] = ()
    #: Creates ``runtime_dir`` again if it was removed while the kernel was checkpointed; raises `RuntimeDirectory`.
    renew: Callable[[], object] = lambda: None
    #: Whether the kernel outlives this process.
    outlive: bool = False
    #: Of a branch that has not run: the key that signs the messages of the kernel it comes from.
    kernel_key: str = ""
    #: The key that clients have.
    key: str = ""
    #: Of a kernel that starts from a template: its environment and its working directory.
    environment: Mapping[str, str] = field(default_factory=dict)
    directory: str = ""
    #: The notebook of its document.
    notebook: str = ""
    #: Writes the session of the kernel, for a later server, into the directory of an image.
    write_session: Callable[[Path], None] | None = None
    #: As for `subprocess.Popen`.  Of files, descriptors of our own, until this object is gone: who started the kernel
    #: may close his, and each restore needs them again.
    stdout: Any = None
    stderr: Any = None

    def __post_init__(self) -> None:
        self.stdout, self.stderr = map(self._own_descriptor, (self.stdout, self.stderr))

    def create_capsule(self, image: Image, *, beside: bool = False) -> Capsule:
        """Make the capsule for the kernel of an image; its clocks continue from now on.

        ``beside``: the kernel still is in another one.  Raises `CapsuleError`, `LimitReached`.
        """
        manifest = image.manifest
        try:
            return Capsule.create(
                self.runtime_dir,
                offsets=Clocks(manifest.monotonic, manifest.boottime) - Clocks.now(),
                known_as=Path(manifest.runtime_dir),
                sockets=self.sockets,
                private=self.private,
                stdout=self.stdout,
                stderr=self.stderr,
                beside=beside,
            )
        except CapsuleError as error:
            number = error.details.get("errno", getattr(error.__cause__, "errno", None))
            if (limit := LimitReached.from_errno(number)) is not None:
                raise limit from error
            raise

    def _own_descriptor(self, output: Any) -> int | None:
        """Return a duplicate of a file's descriptor; None and the constants of `subprocess` as they are."""
        fd: int | None = output.fileno() if hasattr(output, "fileno") else output
        if fd is None or fd < 0:
            return fd
        own = os.dup(fd)
        weakref.finalize(self, os.close, own)
        return own

    @property
    def inner_dir(self) -> Path:
        """The path of the runtime directory inside the capsule."""
        return self.known_as or self.runtime_dir

    @property
    def own_sockets(self) -> tuple[str, ...]:
        """The beginnings of the paths of the kernel's own unix sockets, inside the capsule."""
        return (f"{self.inner_dir}/{KERNEL_SOCKETS}", *([f"{self.sockets}-"] if self.sockets else []))

    @property
    def unshared_sockets(self) -> tuple[str, ...]:
        """The beginnings of the paths of sockets that only the capsule has, whatever else is there outside."""
        return (*self.own_sockets, *(f"{directory}/" for directory in self.private))


#: Of a verb of a kernel that is ended meanwhile.
ENDED = "The kernel was ended by its owner (a restart or a shutdown) meanwhile."
REQUESTED = "That was requested: nothing is to be done. A restarted kernel begins without its variables."


class Reason(enum.IntEnum):
    """Reason to stop a verb; a higher one includes the lower ones."""

    NONE = 0
    #: The server will detach: a checkpoint may still begin, but a wake does not wait for the cold tier or ports.
    DETACH_SOON = 1
    #: The server detaches: an image that is being written or read is given up.
    DETACH = 2
    #: The kernel is ended.
    END = 3


class Cancellation:
    """The reason to stop the verb under way, if there is one; from any thread.

    `request` only raises it.  `reset` lowers it: called with the kernel's lock, while no verb runs.
    """

    def __init__(self) -> None:
        self.reason = Reason.NONE
        self._changed = threading.Condition()

    def request(self, reason: Reason) -> None:
        """Have the verb under way stop, also where it waits."""
        with self._changed:
            self.reason = max(self.reason, reason)
            self._changed.notify_all()

    def reset(self, reason: Reason = Reason.NONE, *, requested: Reason = Reason.END) -> None:
        """Lower the reason to ``reason`` when the ``requested`` one was met; a higher one of another thread stays."""
        with self._changed:
            if self.reason <= requested:
                self.reason = reason

    def wait(self, seconds: float, reason: Reason) -> bool:
        """Wait until ``reason`` is requested; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self.reason >= reason, seconds)

    def check(self, reason: Reason = Reason.DETACH) -> None:
        """Raise `KernelLost` if the kernel is ended, `CriuError` for another reason not below ``reason``."""
        if self.reason is Reason.END:
            raise KernelLost(ENDED, hint=REQUESTED)
        if self.reason >= reason:
            raise CriuError("Cancelled: the server detaches from the kernel.")


class EarlyReturn(NamedTuple):
    """A return to a GPU that another kernel still leaves: bytes in all, and those that the driver restores at once."""

    gpu: str
    bytes: int
    drivers: int


class PartlyDone(Exception):
    """Raised by a step from its error when some of its work was done: the step must be undone.

    ``cuda``: there may be CUDA state to resume since (`Saved.cuda`).
    """

    def __init__(self, *, cuda: bool = False) -> None:
        super().__init__()
        self.cuda = cuda


@dataclass
class Saved:
    """Facts of a kernel from its suspend, for its image and its resume.

    ``report``: the agent's.  ``device_bytes``: by GPU UUID.  ``node_gpus``: UUIDs of all GPUs of the node.  ``cuda``:
    whether there is CUDA state to resume.  ``pids``: whose bytes are counted, by host pid; None if that is not known.
    """

    report: dict[str, Any] = field(default_factory=dict)
    device_bytes: dict[str, int] = field(default_factory=dict)
    node_gpus: list[str] = field(default_factory=list)
    cuda: bool = False
    pids: frozenset[int] | None = None


@dataclass
class KernelState:
    """State of a kernel from one verb to the next, as long as its kernel id.

    `saved` is here, not in `Attempt`, on purpose: a suspend fills it, and a later checkpoint or resume needs it; and so
    are `chunks` and `spill_directory`, which a suspended kernel has on the disk.
    """

    home: Home
    engine: Engine
    gate: GateProtocol
    settings: LifecycleSettings
    trace: Trace
    machine: MachineState = field(default_factory=MachineState)
    cancellation: Cancellation = field(default_factory=Cancellation)
    #: Held by a verb, and by whatever else changes this state.
    lock: threading.RLock = field(default_factory=threading.RLock)
    #: Called with each new state; their errors are logged (`trace.notify`).
    on_state: list[Callable[[State], None]] = field(default_factory=list)
    #: Of the verb under way.
    attempt: Attempt | None = None
    capsule: Capsule | None = None
    image: Image | None = None
    #: The image of a kernel that died just after it was restored from it: deleted on request only.
    kept_image: Image | None = None
    #: The save point that was made last.
    save_point: Image | None = None
    #: The id of the save point that the present state descends from (`SavePoint.parent`); empty without one.
    parent: str = ""
    exit_status: int | None = None
    #: Whether the process ended by itself, or was killed.
    died: bool = False
    #: Whether its owner has sent it the request to end, which it follows by itself.
    end_requested: bool = False
    #: Whether its owner keeps this image of it when it is ended.
    keeps_at_end: Callable[[Image], bool] = lambda _: True
    saved: Saved = field(default_factory=Saved)
    #: Device files that forked children have of processes with CUDA state, by host pid; known from the last suspend.
    inherited: dict[int, list[str]] = field(default_factory=dict)
    #: Children that have device files without CUDA state, also after they were given time to begin with CUDA (NVML).
    without_cuda: set[int] = field(default_factory=set)
    #: Chunks of device memory that are on the disk already, for the next image.
    chunks: ChunkCache | None = None
    #: Directory on the disk with the allocations that host memory is too small for.
    spill_directory: Path | None = None
    #: The generation of the last image that was made of the kernel, or that it was restored from.
    generation: int = 0
    #: Whether the driver has restored the process's CUDA state since the process was started.
    restored_on_gpu: bool = False
    #: Why the driver has not suspended a kernel that is suspended: only the library has, its own allocations.
    refusal: Refusal | None = None
    #: Why the driver will not suspend the process as long as that lives, once it has refused.
    lasting_refusal: Refusal | None = None
    #: The driver's last refusal, with a reason, to checkpoint the process.
    refused_checkpoint: UnsupportedCuda | None = None
    #: The process, its bytes of device memory that the library moves, and of them those that were no zeros, when an
    #: image had no space for all of it.
    other_than_zeros: tuple[int, int, int] | None = None
    #: Whether the gate has no connection to the process.  Without CUDA state that is made again by the next step that
    #: needs it; a suspended kernel, whose threads may be frozen, cannot answer it and is connected when it is resumed.
    disconnected: bool = False
    #: Whether the kernel runs cells while it has CUDA state to resume: behind its launch gate (`State.OFF_GPU`).
    serves_off_gpu: bool = False
    #: Of a kernel that comes or goes back: the capsule that it will be in.
    ahead: CapsuleAhead | None = None
    #: Of the save point that the kernel goes back to, until its restore has it (`lease_of`).
    point_lease: Lease | None = None
    #: Of the state that the kernel goes back from: its image is not complete yet.
    completion: Completion | None = None
    #: Of a kernel that shares GPUs.
    admission: Admission | None = None
    #: Whether the kernel was attached alive and has not continued since (`resume.supersede_images`).
    supersedes_images: bool = False

    def __post_init__(self) -> None:
        self.engine.kernels[self.home.kernel_id] = self

    @property
    def is_being_ended(self) -> bool:
        """Return whether its owner ends the kernel: by its own request, or now."""
        return self.end_requested or self.cancellation.reason is Reason.END

    @property
    def publishes_save_point(self) -> bool:
        """Return whether a cell that runs now may come before a save point that an earlier one has requested.

        The gate forwards cells a moment before `Step.RELEASE` is noted as done, or a restore as ended.
        """
        machine = self.machine
        if machine.state is State.SAVING:
            return Step.DRAIN in machine.done  # none runs until the release
        return self.completion is not None and machine.state in (State.RUNNING, State.RESTORING)

    def descend_from(self, image: Image) -> None:
        """Note the save point that the kernel was saved in, or has gone back to, also for a later server."""
        self.parent = image.id
        self.write_session()

    def write_session(self) -> None:
        """Write what a later server needs to know; where the directory is full, it has the last state."""
        if self.home.write_session is not None:
            with contextlib.suppress(OSError):
                self.home.write_session(self.home.runtime_dir)

    def require_capsule(self) -> Capsule:
        """Return the capsule.  Raises `CapsuleGone` if there is none."""
        if self.capsule is None:
            raise CapsuleGone("The kernel has no process.")
        return self.capsule

    def lease_of(self, image: Image, timeout: float = 0.0) -> Lease:
        """Return the lease of an image, which is the caller's then: the one that is held already, or a new one.

        Raises as `Image.lease`.
        """
        lease, self.point_lease = self.point_lease, None  # first: the capsule ahead has a thread of its own
        if lease is not None and lease.path == image.path:
            return lease
        if lease is not None:
            lease.release()
        return image.lease(timeout)

    def release_point_lease(self) -> None:
        """End the lease of the save point that the kernel was to go back to, if no restore has it.  Never raises."""
        lease, self.point_lease = self.point_lease, None
        if lease is not None:
            lease.release()

    def discard_ahead(self) -> None:
        """End the capsule that was made ahead, if the kernel is not in it.  Never raises."""
        ahead, self.ahead = self.ahead, None
        if ahead is not None:
            ahead.discard()

    def written(self) -> int:
        """Return the bytes written of the image that is being made; 0 while none is.  From any thread."""
        if (attempt := self.attempt) is None or (draft := attempt.draft) is None:
            return 0
        return draft.size() + attempt.dropped_bytes

    def fast_path(self, capsule: Capsule | None = None, pid: int | None = None) -> FastPath:
        """Return the fast path of the kernel in ``capsule``, by default its own; or of process ``pid`` there."""
        capsule = capsule or self.require_capsule()
        child = pid if pid != capsule.host_pid else None
        keep_bytes = self.settings.host_copy_bytes
        if keep_bytes is None:
            keep_bytes = _ALL if preflight.reserved_memory() else 0
        return FastPath(capsule, self.engine.cuda, child, keep_bytes=keep_bytes)

    def deadline(self, bytes: int) -> float:
        """Return the seconds that CRIU or the CUDA driver may take for so many bytes."""
        return self.settings.base + bytes / self.settings.slowest_rate


#: The files that a kernel that goes back gets: ``then`` or ``now``, for all or by path; None: nobody has chosen.
FilesChoice = Mapping[str, str] | str | None


@dataclass
class Attempt:
    """One run of one verb; a wake that is tried twice has two."""

    kernel: KernelState
    goal: State
    #: Of the image, or of ``next_image``: GPUs then by those to use.
    gpu_map: Mapping[str, str] | None = None
    #: For this restore, instead of the setting.
    accept_changed_files: bool | None = None
    #: What makes the image of this checkpoint a save point.
    save_point: SavePoint | None = None
    #: The notebook's document for the save point.
    notebook: bytes | None = None
    #: Whether the processes run on after the dump.
    continues: bool = False
    #: Files that are to be replaced once this save point is there, which must keep them.
    replaced: Sequence[str] = ()
    #: The save point that the kernel goes back to once this one is there.
    next_image: Image | None = None
    #: The save point of the state that the kernel goes back from; None for a wake.
    present: Image | None = None
    #: The files that a kernel that goes back gets.
    files: FilesChoice = None
    #: Whether the verb has failed a moment ago.
    again: bool = False
    #: Whether a kernel that is restored is to have its children before it has answered.
    needs_children: bool = False
    #: Whether the steps that are run now are undo steps.
    unwinding: bool = False
    #: The step that is run now.
    traced: TracedStep = field(default_factory=lambda: TracedStep(""))
    #: Duration by completed step.
    seconds: dict[str, float] = field(default_factory=dict)
    #: The lease of the image and its verification, or `linked`; closed at the end of the attempt, if no step has.
    resources: ExitStack = field(default_factory=ExitStack)
    #: Of GPU memory; closed likewise.
    reservation: ExitStack = field(default_factory=ExitStack)
    #: Of a kernel that can come while another one leaves.
    early_return: EarlyReturn | None = None
    #: Device memory that stays on the GPU while the kernel is saved; ended by `resources`.
    held: HeldMemory = field(default_factory=HeldMemory)

    # of a dump
    #: Whether the disk, or the quota, has the space only if enough device memory is zeros.
    counts_on_zeros: bool = False
    draft: Draft | None = None
    #: Of the draft, without what `Draft.publish` finds out.
    manifest: Manifest | None = None
    clocks: Clocks | None = None
    #: Of the node (`node.fingerprint`).
    fingerprint: dict[str, Any] = field(default_factory=dict)
    #: Settings of each process that CRIU forgets and a restore puts back (`process.inventory`).
    notes: dict[str, Any] = field(default_factory=dict)
    #: The user's files in the draft of a save point.
    kept: dict[str, KeptFile] = field(default_factory=dict)
    #: Bytes of device memory that were written beside CRIU's files.
    swapped_bytes: int = 0
    #: Whether the kernel's library has a digest of all of that.
    has_digests: bool = False
    #: Device memory of a save point that is written when the kernel runs again, by links: their directory, open as
    #: long as `resources`.
    linked: int | None = None
    #: Of the same, where the kernel runs again in another process; ended by `resources`, if it was not handed over.
    completion: Completion | None = None
    #: Bytes of pages that CRIU has written and that were dropped, as another process has them, too.
    dropped_bytes: int = 0
    #: Bytes of pages that several processes have, and share again after a restore, but for the first of each.
    shared_bytes: int = 0
    #: What of the processes is not as it was before a dump that was taken back, in words.
    unrepaired: str = ""

    # of a restore
    lease: Lease | None = None
    verification: BackgroundTask | None = None
    #: GPUs by the UUID of the node that made the image.
    gpu_mapping: dict[str, str] | None = None
    #: Paths of files to be put back as they were at the save point.
    put_back: list[str] = field(default_factory=list)
    #: Paths of files that were changed since the checkpoint and are accepted.
    changed_files: list[str] = field(default_factory=list)
    #: Arguments for `Capsule.lock_databases`.
    databases: list[dict[str, Any]] = field(default_factory=list)
    #: The capsule that is being filled; `KernelState.capsule` once the kernel is in it.
    restoring: Capsule | None = None
    device_read: DeviceRead | None = None
    #: Whether the kernel runs without its children (`Capsule.attach_kernel`).
    alone: bool = False
    #: Of the branches of an image, to be restored (`branch.turn_to_restore`).
    turn: ExitStack = field(default_factory=ExitStack)
    #: State of the kernel that a branch comes from, and that it has otherwise.
    separated: list[Exclusive] = field(default_factory=list)
    #: Settings that could not be put back, in words; shown in the kernel's next cell.
    changed_settings: list[str] = field(default_factory=list)
