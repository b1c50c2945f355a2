"""The steps by which a kernel leaves the GPU, and then its process: suspend and checkpoint."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..capsule.capsule import Capsule
from ..criu import tasks
from ..cuda.driver import CudaState
from ..errors import (
    CapsuleError,
    CapsuleGone,
    CriuError,
    CudaError,
    DeviceHeld,
    GateError,
    GpuCkptError,
    NoSpace,
    PipesExhausted,
    ProtocolVersion,
    RuntimeDirectory,
    UnsupportedSocket,
)
from ..image import chunk_cache, device_memory
from ..image.chunk_cache import ChunkCache
from ..image.draft import Draft
from ..image.manifest import Manifest
from ..process.ports import let_ports_be_rebound
from ..trace import TracedStep
from . import compatibility, preflight
from .context import Saved, Steps
from .machine import State

_log = logging.getLogger(__name__)

#: Dumps of this process at once.  Each takes some MiB of pipes, and Linux gives an ordinary user 64 MiB of them for all
#: processes together (fs.pipe-user-pages-soft, pipe(7)): 20 at once had enough, of 50 a quarter did not.
_TURNS = threading.BoundedSemaphore(8)


class Leaving(Steps):
    """Each step of the way out, a method of its name; and what can be said of that way before it and on it."""

    def written(self) -> int:
        """Bytes of the image that is being made; 0 while none is.  From any thread; asks the disk."""
        draft = self._draft
        return draft.size() if draft is not None else 0

    def findings(self, *, writes: bool = True) -> list[preflight.PreflightFinding]:
        """What preflight says now, from outside; the kernel is not disturbed.  A suspend ``writes`` no image."""
        capsule = self._alive()
        if writes and (hidden := preflight.undumpable(capsule.host_pid)) is not None:
            return [hidden]  # nothing more can be found out about it
        device_bytes = self.device_bytes()
        found = preflight.look(
            kernel_pid=capsule.host_pid,
            companions=capsule.other_processes(),
            device_bytes=device_bytes,
            has_agent=self.home.has_agent,
            away=self._fast_path().host_memory_bytes(),
            spillable=self._spillable,
            disk_free=self._room_for_image() if writes else None,
            over_quota=functools.partial(self.engine.store.over_quota, self.home.kernel_id),
        )
        if writes and (gone := self._without_sockets()) is not None:
            found.append(preflight.PreflightFinding(gone.code, gone.message, gone))
        if writes:
            found += self._state_findings(capsule)
        if device_bytes and (why := self._fast_path().why_slow(sum(device_bytes.values()))):
            found.append(
                preflight.PreflightFinding("DRIVERS_RATE", f"Device memory moves at the driver's own rate: {why}.")
            )
        return found

    def _state_findings(self, capsule: Capsule) -> list[preflight.PreflightFinding]:
        """State of the kernel that is not proven to come back, as far as it shows while the kernel runs."""
        state = capsule.inspect(allow_unconfined=self.settings.allow_unconfined_wake)
        return preflight.judge_state(state["refusals"])

    def _spillable(self) -> int:
        """Bytes of device memory that need no host memory, should there be too little."""
        bytes = self._blocks()
        return bytes if self._may_spill(bytes) else 0

    def _blocks(self) -> int:
        """Bytes of device memory that the kernel moves by its own hands."""
        try:
            return self._fast_path().amounts().bytes
        except (CudaError, ProtocolVersion):  # it is busy with them, or of another release
            return 0

    def _room_for_image(self) -> int:
        """Bytes that an image may have."""
        store = self.engine.store
        if not store.vault.encrypts:
            return store.free() + chunk_cache.evictable_bytes(store.root)
        # What CRIU writes lies in memory first.  Blocks do not, and those that have left the GPU are in memory already.
        memory = preflight.available_memory() + self._fast_path().host_memory_bytes()
        return min(store.free(), memory, store.vault.free() + self._blocks())

    def _preflight(self, _: TracedStep) -> None:
        plan = self.kernel.plan
        writes = plan is None or plan.to is State.CHECKPOINTED
        if writes:
            self.engine.store.prepare()
        preflight.require(self.findings(writes=writes))

    def _drain(self, _: TracedStep) -> None:
        try:
            with self._answering():
                self.gate.drain(self.settings.drain)
        except CapsuleGone:
            raise
        except GpuCkptError:
            self.gate.release()
            raise

    def _quiesce(self, traced: TracedStep) -> None:
        self._saved = Saved()
        if not self.home.has_agent:
            return
        report = self._ask_agent("quiesce", {"trim": True, "files": True}).get("report", {})
        traced.bytes = report.get("trimmed_bytes")
        try:
            preflight.require(preflight.judge_report(report, gpus=len(self.device_bytes())))
        except GpuCkptError:
            self._ask_agent("thaw", {"environ": {}})
            raise
        self._saved.report = report

    def _cuda_suspend(self, traced: TracedStep) -> None:
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
            deadline = self._deadline(traced.bytes)
            place = functools.partial(self._place, capsule=self._alive(), all=traced.bytes)
            moved = self._fast_path().swap_out(lock_s=self.settings.cuda, timeout_s=deadline, choose_directory=place)
            if not moved:
                self._end_spill()
            # Where blocks did not leave that were to go to the disk: what the driver moves goes to host memory.
            self._require_memory(max(0, traced.bytes - moved))
            plan = self.kernel.plan
            warm = self.settings.warm and moved > 0 and plan is not None and plan.to is State.SUSPENDED
            if not warm:  # else the lock alone keeps the kernel from CUDA
                self._alive().freeze_threads_in_driver()
                cuda.checkpoint(pid, timeout_s=deadline)
                self._refuse_device_files(pid)
        except GpuCkptError:
            # How far the driver came nobody knows (its helper may have ended after the work was done), and the way back
            # needs proof of room: so the undo of this step finds out, and does what is left to do.
            self._step_done = True
            raise

    def _refuse_device_files(self, pid: int) -> None:
        if held := self.engine.cuda.device_files(pid):
            raise DeviceHeld("The kernel holds GPU device files open that are not CUDA's (NVML, graphics).", files=held)

    def _disconnect(self, _: TracedStep) -> None:
        """Close the gate's side and wait until the kernel has closed its own: no foreign connection in the image."""
        pid, directory = self._alive().host_pid, self.home.known_as or self.home.runtime_dir
        if (gone := self._without_sockets()) is not None:
            raise gone
        before = preflight.open_connections(pid, directory)
        self.gate.close()
        deadline = time.monotonic() + self.settings.connect
        # Each endpoint must lose one, the gate's.  Others may stay: a kernel can be connected to itself, and of a
        # stranger CRIU tells who it is.
        while any(count >= before[path] for path, count in preflight.open_connections(pid, directory).items()):
            if time.monotonic() > deadline:
                raise GateError("The kernel does not let go of its connections to the gate.")
            time.sleep(0.002)

    def _without_sockets(self) -> RuntimeDirectory | None:
        """Why a kernel could not be reached any more once its connections are closed; None if it can.

        CRIU saves a socket whose file was removed as one without a name.
        """
        pid, directory = self._alive().host_pid, self.home.runtime_dir
        known_as = self.home.known_as or directory
        sockets = [directory / Path(path).name for path in preflight.open_connections(pid, known_as)]
        if all(path.exists() for path in sockets):
            return None
        return RuntimeDirectory(
            f"The sockets of the kernel were removed from {directory}: it could not be reached after it came back.",
            hint="Save what you need from it to a file; a restart of the kernel makes the directory anew.",
        )

    def _dump(self, traced: TracedStep) -> None:
        capsule = self._alive()
        self._cool(capsule.host_pid)
        bytes = self.resident()  # device memory is host memory by now
        self._clocks = capsule.clocks()
        needed = bytes + preflight.MARGIN
        self._make_room(needed)
        try:
            traced.bytes = self._write_patiently(capsule, needed, self._deadline(bytes))
        except NoSpace:  # checkpoints side by side saw the same room
            if not chunk_cache.evictable_bytes(self.engine.store.root):
                raise
            self._forget_chunks(wait=True)
            chunk_cache.evict(self.engine.store.root)
            traced.bytes = self._write_patiently(capsule, needed, self._deadline(bytes))

    def _write_patiently(self, capsule: Capsule, needed: int, deadline: float) -> int:
        """`_write_image`, tried again while other processes of this user hold the pipes that CRIU needs."""
        over, pause = time.monotonic() + self.settings.pipes, 0.1
        while True:
            try:
                return self._write_image(capsule, needed, deadline)
            except PipesExhausted:
                if time.monotonic() + pause > over:
                    raise
                told = "Kernel %s: too many pipes (fs.pipe-user-pages-soft); the dump is tried again in %.1f s"
                _log.warning(told, self.home.kernel_id, pause)
            self._breaking_off.wait(pause * random.uniform(0.5, 1.5))  # noqa: S311 - so that not all come back at once
            self._require_not_broken_off()
            pause = min(2 * pause, 3.0)

    @contextlib.contextmanager
    def _turn_to_dump(self) -> Iterator[None]:
        """One of the few dumps of this process that run at once, for the body."""
        while not _TURNS.acquire(timeout=0.1):
            self._require_not_broken_off()
        try:
            yield
        finally:
            _TURNS.release()

    def _write_image(self, capsule: Capsule, needed: int, deadline: float) -> int:
        """The draft, but for its manifest; its bytes.  After failure there is none, and the processes go on."""
        promised = needed + self._spilled()
        self._draft = draft = self.engine.store.begin(self.home.kernel_id, promised)  # from here on `written` counts
        try:
            with draft.work_directory() as work, self._device_written(draft), self._turn_to_dump():
                self.engine.criu.dump(
                    capsule, draft.criu_directory, timeout=deadline, freeze=self._saved.cuda, work=work
                )
            compatibility.require_restorable(draft.criu_directory)
            self._notes = self._require_proven(capsule, draft.criu_directory)
            return draft.size()
        except BaseException:
            self._draft = None
            draft.discard()
            with contextlib.suppress(CapsuleError, CapsuleGone):  # it ended
                capsule.resume_processes()  # CRIU may have done well, and its answer come too late
            raise

    def _require_proven(self, capsule: Capsule, dump: Path) -> dict[str, Any]:
        """Compare the stopped processes with their fresh dump; what CRIU forgets of them.

        Raises the error of what is not proven to come back, and `CriuError` for what the dump lacks.
        """
        state = capsule.inspect(allow_unconfined=self.settings.allow_unconfined_wake)
        preflight.require(preflight.judge_state(state["refusals"]))
        if unasked := state.get("unasked"):  # the capsule's init may be of an older release
            _log.warning("This host forbids %s: what it tells of a kernel was not looked at.", ", ".join(unasked))
        if missing := tasks.missing(dump, state["inventory"]):
            more = f" and {len(missing) - 1} more" if missing[1:] else ""
            raise CriuError(f"CRIU's image lacks {missing[0]}{more}.", missing=missing)
        if tasks.has_external_peer(dump):
            raise UnsupportedSocket(
                "The kernel is connected through a unix socket to a process outside, which has not accepted it yet."
            )
        notes: dict[str, Any] = state["notes"]
        owners = {str(tid): pid for pid, was in state["inventory"].items() for tid in was["threads"]}
        for tid, signal in tasks.remove_death_signals(dump).items():
            threads = notes.setdefault(owners[str(tid)], {}).setdefault("threads", {})
            threads.setdefault(str(tid), {})["death_signal"] = signal
        return notes

    def _bound_sockets(self) -> list[dict[str, Any]]:
        """The unix sockets of the kernel that have a file, but for those in its own directory."""
        own = str(self.home.known_as or self.home.runtime_dir)
        sockets = (socket for process in self._notes.values() for socket in process.get("sockets", {}).values())
        return [each["path"] for each in sockets if "path" in each and not each["path"]["path"].startswith(f"{own}/")]

    @contextlib.contextmanager
    def _device_written(self, draft: Draft) -> Iterator[None]:
        """Beside what is done in this: device memory that CRIU does not see; all of it is written after."""
        self._swapped_bytes, blocks = 0, self._fast_path().open_extents() if self._saved.cuda else None
        if blocks is None:
            yield
            return
        capsule, claim = self._alive(), self._chunks.claim if self._chunks is not None else None
        cancelled = threading.Event()

        def check_cancelled() -> None:
            self._require_not_broken_off()
            if cancelled.is_set():
                raise CancelledError

        def break_off(done: Future[None]) -> None:
            if done.exception() is not None:  # CRIU has nothing to go on for, either
                capsule.cancel_criu()

        try:
            self._require_not_broken_off()
            self._swapped_bytes = device_memory.size(blocks)
            if self._swapped_bytes != (away := self._fast_path().amounts().swapped_out):
                raise CapsuleError(f"Of {away} bytes of device memory {self._swapped_bytes} are there.")
            with ThreadPoolExecutor(1, thread_name_prefix="gpu-ckpt-device") as thread:
                written = thread.submit(draft.write_device, blocks, claim, check_cancelled)
                written.add_done_callback(break_off)
                try:
                    yield
                except BaseException as error:
                    cancelled.set()
                    if isinstance(error, GpuCkptError) and isinstance(failure := written.exception(), GpuCkptError):
                        raise failure from error  # the one is of the other's making
                    raise
                written.result()
        finally:
            os.close(blocks)

    def _write_ahead(self) -> None:
        """A suspended kernel's device memory begins its way to the disk: its checkpoint will have little left to do.

        Nothing is written that a checkpoint would be refused for, or that is to be encrypted.
        """
        store = self.engine.store
        if not (self.settings.write_ahead and self._saved.cuda and not store.vault.encrypts and self._spill is None):
            return
        try:
            blocks = self._fast_path().open_extents()
        except (GpuCkptError, OSError) as error:
            _log.info("Device memory is not written ahead: %s", error)
            return
        if blocks is None:
            return
        kernel_id = self.home.kernel_id

        def permitted(bytes: int, fresh: int) -> bool:
            store.prepare()
            # As much again stays free: it is room that others may need more.
            return store.free() >= 2 * fresh and store.over_quota(kernel_id, bytes) is None

        try:
            self._chunks = self._chunks or ChunkCache(store.root)
            self._chunks.write_ahead(blocks, permitted)
        except (OSError, RuntimeError) as error:
            _log.info("Device memory is not written ahead: %s", error)
        finally:
            os.close(blocks)

    def _make_room(self, needed: int) -> None:
        """What is written ahead gives way to an image: that of other kernels first, this one's if it is no help."""
        store, mine = self.engine.store, 0
        if self._chunks is not None:
            self._chunks.in_use = True
            mine = self._chunks.stop_and_wait()
        if store.free() < needed - mine:
            chunk_cache.evict(store.root)
            if store.free() < needed - mine:
                self._forget_chunks(wait=True)

    def _require_not_broken_off(self) -> None:
        if self._breaking_off.is_set():
            raise CriuError("The dump was broken off: the kernel's owner ends or leaves.")

    def _cool(self, pid: int) -> None:
        """What a kernel that was suspended warm still has on the GPU leaves, too: CRIU can take no CUDA context."""
        state = self.engine.cuda.state(pid)
        if state is CudaState.RUNNING:  # after a wake that failed half-way, which only another one mends
            raise CudaError("The kernel is on the GPU, and was to be off it.", hint="Run a cell, and try again.")
        if state is CudaState.LOCKED:
            self._alive().freeze_threads_in_driver()
            self.engine.cuda.checkpoint(pid, timeout_s=self._deadline(sum(self._saved.device_bytes.values())))
            self._refuse_device_files(pid)

    def _publish(self, traced: TracedStep) -> None:
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
            runtime_dir=str(self.home.known_as or self.home.runtime_dir),
            criu_version=self.engine.criu_version,
            device_bytes=self._saved.device_bytes,
            node_gpus=self._saved.node_gpus,
            cuda=self._saved.cuda,
            report=self._saved.report,
            steps=self._recorder.seconds(),
            generation=self.engine.store.generations.next_generation(self.home.kernel_id, self._generation),
            fingerprint=compatibility.taken(
                draft.criu_directory,
                self.engine,
                cuda=self._saved.cuda,
                device_bytes=self._saved.device_bytes,
                swapped_bytes=self._swapped_bytes,
                sockets=self._bound_sockets(),
            ),
            notes=self._notes,
            swapped_bytes=self._swapped_bytes,
        )
        if self.home.write_session is not None:
            self.home.write_session(draft.path)
        self.image = draft.publish(manifest, claim_pid=capsule.host_pid, keep_fd=capsule.keep_fd)
        self._generation = manifest.generation
        self._draft = None
        self._forget_chunks()
        self.engine.store.hashes.begin()
        traced.bytes = self.image.manifest.bytes

    def _end_process(self, _: TracedStep) -> None:
        if self.capsule is not None:
            # Whatever fails from here on, the process may be gone already, and its image must not be taken back.
            self._step_done = True
            let_ports_be_rebound(self.capsule.processes())
            try:
                self.capsule.close()
            finally:
                self._end_spill()
            self.capsule = None
        if self.image is not None and self._lease is None:
            with contextlib.suppress(OSError):  # a claim whose process is gone is void all the same
                self.image.withdraw_claim()

    def _sleep(self, _: TracedStep) -> None:
        plan = self.kernel.plan
        if self.kernel.unwinding and plan is not None and plan.to is State.RUNNING:
            # A wake failed.  `Gate.fail` comes next: it answers those who wait, and sleeps.  A sleep now would wake
            # again at once, for messages that are about to hear that it failed.
            return
        self.gate.sleep()

    def _continue(self, _: TracedStep) -> None:
        """Undo of a dump: the stopped processes go on."""
        if self._draft is not None:
            self._draft.discard()
            self._draft = None
        self._alive().resume_processes()
