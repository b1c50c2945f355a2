"""What one kernel's steps work on: the outside, the settings, and what each step leaves for the next.

The steps are methods of their names in `leaving` and `returning`, against the real capsule, CRIU, CUDA driver and gate.
A step that fails must leave things as they were before it, or say that its undo is needed (`Steps._step_done`).  Which
step comes when, and what undoes it, says `machine`; `lifecycle` runs them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..capsule.capsule import Capsule
from ..capsule.namespaces import Clocks
from ..criu.criu import Criu
from ..cuda.driver import Cuda, CudaState
from ..cuda.fastpath import FastPath
from ..cuda.gpus import Gpus
from ..errors import AgentError, CapsuleGone, GpuCkptError, NoMemory
from ..image import chunk_cache, spill
from ..image.background_task import BackgroundTask
from ..image.chunk_cache import ChunkCache
from ..image.draft import Draft
from ..image.lease import Lease
from ..image.store import Image, Store
from ..trace import Recorder, Trace
from ..units import size
from .machine import MachineState, State
from .preflight import MARGIN, available_memory, read_process

#: What is stale after a restore: credentials of the server, and the job it runs in.
REFRESHED = ("JUPYTERHUB_API_TOKEN", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_STEP_ID")


class GateProtocol(Protocol):
    """What the lifecycle asks of the gate (`gate.gate.Gate`)."""

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

    def prompt(self, text: str, timeout: float) -> str | None:
        """Ask the user whose cell waits; None without an answer."""

    def cancel_prompt(self) -> None:
        """Whoever waits in `prompt` gets no answer."""

    def kernel_died(self) -> None:
        """The kernel is gone."""


@dataclass(frozen=True)
class LifecycleSettings:
    """Deadlines in seconds, and choices; the provisioner fills them from its traits."""

    drain: float = 10.0
    agent: float = 60.0
    cuda: float = 30.0
    connect: float = 20.0
    #: CRIU and the CUDA driver get ``base`` plus the time the bytes take at this rate (bytes per second).
    base: float = 60.0
    slowest_rate: float = 50e6
    #: For another kernel to be back on the same GPU, first.
    room: float = 30.0
    #: How long a dump waits for pipes that other processes of the user hold.
    pipes: float = 30.0
    #: How long a wake waits for ports on which closed connections linger: Linux needs 60 s.
    lingering: float = 65.0
    #: Environment variables to refresh in a restored kernel from the server's own.
    refresh: tuple[str, ...] = REFRESHED
    #: Whether files that changed while a kernel was away are taken as they are now.
    accept_changed_files: bool = False
    #: Whether a kernel that Landlock confines may leave, and come back without that.
    allow_unconfined_wake: bool = False
    #: How long a user is given to say whether changed files are to be taken.
    question: float = 120.0
    #: Where the content of old images is.
    archive_url: str = ""
    #: Whether the CUDA context of a suspended kernel stays on the GPU, where its blocks can leave without it.
    warm: bool = False
    #: Whether chunks of the last image are kept while the kernel runs, so that the next one is written faster.
    keep_chunks: bool = True
    #: Whether a suspended kernel's device memory is written to the disk before anybody asks for an image.
    write_ahead: bool = True


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
    #: The path by which the kernel itself knows that directory, where that is another: it came from another host.
    known_as: Path | None = None
    #: Makes ``runtime_dir`` again where it was removed while the kernel was away; raises `RuntimeDirectory`.
    renew: Callable[[], object] = lambda: None
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
    """What the steps of one kernel work on, and what all of them ask."""

    def __init__(
        self, home: Home, engine: Engine, gate: GateProtocol, *, settings: LifecycleSettings, trace: Trace
    ) -> None:
        self.home = home
        self.engine = engine
        self.gate = gate
        self.settings = settings
        self.trace = trace
        self.kernel = MachineState()
        self.capsule: Capsule | None = None
        self.image: Image | None = None
        #: The image of a kernel that died just after it had come back from it: nobody deletes that one unasked.
        self.kept: Image | None = None
        self.exit_status: int | None = None
        #: Called with each new state; what one of them raises is logged (`trace.notify`).
        self.on_state: list[Callable[[State], None]] = []
        self._recorder = Recorder()
        self.trace.sinks.append(self._recorder)
        self._lock = threading.RLock()
        #: Whether the step that failed had done its work all the same, or some of it, so that its undo must be run.
        self._step_done = False
        self._draft: Draft | None = None
        self._clocks: Clocks | None = None
        #: Of the processes in the draft: what CRIU forgets and a restore puts back (`inventory`).
        self._notes: dict[str, Any] = {}
        self._device_read: BackgroundTask | None = None
        #: Device memory that is on the disk already, for the next image.
        self._chunks: ChunkCache | None = None
        #: Where on the disk the kernel's blocks are, which host memory is too small for.
        self._spill: Path | None = None
        #: Bytes of device memory that a dump wrote beside CRIU's files.
        self._swapped_bytes = 0
        self._saved = Saved()
        #: The capsule that a restore is filling; `capsule` once the kernel is in it.
        self._filling: Capsule | None = None
        #: The owner ends the kernel: a verb on its way to a running kernel takes no further step.
        self._ending = threading.Event()
        #: The owner leaves: a kernel whose content is still on its way from the cold tier sleeps on.
        self._leaving = threading.Event()
        #: The owner ends the kernel, or leaves it: what is written or read of it just now is given up.
        self._breaking_off = threading.Event()
        self._lease: Lease | None = None
        self._proof: BackgroundTask | None = None
        #: Adopted alive, and not gone on since: see `Returning._outrun_images`.
        self._outruns_images = False
        #: The generation of the last image that the kernel came from or went to.
        self._generation = 0
        #: Whether the driver has restored the process's CUDA state since it was started.
        self._restored_on_gpu = False
        self._room = ExitStack()
        self._gpu_map: Mapping[str, str] | None = None
        self._mapping: dict[str, str] | None = None
        #: For this restore, in place of the setting.
        self._accept_changed_files: bool | None = None
        #: Files that this restore takes as they are, by path.
        self._changed_files: list[str] = []
        #: What the kernel that comes back lacks of what it was set to, in words; shown in its next cell.
        self._changed_settings: list[str] = []

    def _alive(self) -> Capsule:
        if self.capsule is None:
            raise CapsuleGone("The kernel has no process.")
        return self.capsule

    def _forget_chunks(self, *, wait: bool = False) -> None:
        """As soon as the disk allows, unless ``wait``."""
        chunk_cache, self._chunks = self._chunks, None
        if chunk_cache is not None:
            chunk_cache.discard(wait=wait)

    def _place(self, bytes: int, capsule: Capsule, all: int) -> Path | None:
        """Where so many bytes of blocks go: None for host memory, or a directory on the disk where that is too small.

        ``all``: bytes of host memory that are needed, the blocks among them.  Raises `NoMemory` where neither has the
        room, or they must not lie there in the clear; as `spill.begin`.
        """
        store = self.engine.store
        if available_memory() >= all + MARGIN:
            return None
        if not self._may_spill(bytes):
            raise _no_memory(all)
        store.prepare()
        if store.free() < bytes + MARGIN:
            chunk_cache.evict(store.root)
        self._end_spill()
        self._spill = spill.begin(store.root, capsule.keep_fd)
        return self._spill

    def _may_spill(self, bytes: int) -> bool:
        """Whether so many bytes of blocks may lie on the disk: there is room, and they may lie there in the clear."""
        store = self.engine.store
        return not store.vault.encrypts and store.free() + chunk_cache.evictable_bytes(store.root) >= bytes + MARGIN

    def _require_memory(self, bytes: int) -> None:
        """Raises `NoMemory` where so many bytes do not fit into host memory, to the last byte."""
        if available_memory() < bytes:
            raise _no_memory(bytes)

    def _spilled(self) -> int:
        """Bytes of the kernel's blocks that are on the disk."""
        return sum(path.stat().st_size for path in self._spill.glob("*.img")) if self._spill is not None else 0

    def _end_spill(self) -> None:
        place, self._spill = self._spill, None
        if place is not None:
            spill.end(place)

    def _fast_path(self) -> FastPath:
        return FastPath(self._alive(), self.engine.cuda)

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """While the body waits for an answer of the kernel: the kernel's end ends the waiting, not the deadline."""
        capsule = self._alive()
        with capsule.watch_exit(self.gate.close):
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

    def resident(self) -> int:
        """Host memory of the kernel, in bytes: its processes', and its blocks' that have left the GPU."""
        capsule = self._alive()
        processes = [process for pid in capsule.processes() if (process := read_process(pid))]
        return self._fast_path().host_memory_bytes() + sum(process.rss for process in processes)

    def _ask_agent(self, verb: str, content: dict[str, Any]) -> dict[str, Any]:
        with self._answering():
            reply = self.gate.request(f"gpu_ckpt_{verb}_request", content, self.settings.agent)
        if reply.get("status") != "ok":
            raise AgentError(
                f"The agent could not {verb} the kernel: {reply.get('ename')}: {reply.get('evalue')}",
                traceback=reply.get("traceback", []),
            )
        return reply


def _no_memory(bytes: int) -> NoMemory:
    free = available_memory()
    told = f"{size(bytes, 2)} are to go to host memory; {size(free, 2)} of it are free."
    return NoMemory(told, needed=bytes + MARGIN, free=free)
