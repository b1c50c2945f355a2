"""The steps by which a kernel comes back to the GPU: resume, restore, and the undo of a way out that failed."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from ..capsule.capsule import Capsule
from ..capsule.namespaces import Clocks
from ..criu import images
from ..cuda.driver import CudaState
from ..cuda.fastpath import FastPath
from ..cuda.gpus import gpu_mapping
from ..errors import (
    BadRequest,
    CapsuleGone,
    CriuError,
    ImageArchived,
    KernelLost,
    KeyUnusable,
    NoMemory,
    RuntimeDirectory,
)
from ..files.disk import mapped_errors
from ..image import device_memory, layout
from ..image.chunk_cache import ChunkCache
from ..image.encryption import Readable
from ..image.store import Image
from ..node import match
from ..node.facts import LINGERS
from ..terminal_text import printable
from ..trace import TracedStep
from ..transfer import archive
from ..transfer.remote import Remote
from . import compatibility, preflight
from .context import Saved, Steps
from .machine import State

#: The driver's states in which a process holds its device memory.
_ON_GPU = (CudaState.RUNNING, CudaState.LOCKED)


#: Seconds to wait for who has the image for a moment only: the cold tier, as it sets the content aside.
_MOMENT = 2.0


class Returning(Steps):
    """Each step of the way back, a method of its name; and the way back of a kernel whose owner ended half-way."""

    def _match(self, _: TracedStep) -> None:
        assert self.image is not None
        image = self.engine.store.get(self.image.id)
        lease = image.lease(_MOMENT)
        try:
            if image.archived:
                self._bring_back_content(image)
            self._proof = self.engine.store.begin_check(image)
            self._changed_files = self._require_fit(image)
        except BaseException:
            self._drop_proof()
            lease.release()
            raise
        self._lease = lease
        manifest = image.manifest
        self._generation = manifest.generation
        self._saved = Saved(manifest.report, manifest.device_bytes, manifest.node_gpus, manifest.cuda)

    def _bring_back_content(self, image: Image) -> None:
        if not self.settings.archive_url:
            raise ImageArchived("The content of the image is in the cold tier.", image=image.id)
        # Asked with each piece: nobody who ends the kernel, or the server, is to wait for all of them.
        archive.fetch_content(
            image, self.engine.store, Remote(self.settings.archive_url), lambda _: self._require_content_wanted()
        )

    def _require_content_wanted(self) -> None:
        self._require_wanted()
        if self._leaving.is_set():
            raise ImageArchived(
                "The server was stopped while the content was on its way back from the cold tier.",
                hint="The next wake goes on where this one was.",
            )

    def _require_fit(self, image: Image) -> list[str]:
        """Raises what `match.require` does for what this node lacks; the changed files that are accepted."""
        accept = self._accept_changed_files
        if accept is None:
            accept = self.settings.accept_changed_files or image.accepts_changed_files
        found = self._mismatches(image, accept)
        deadline = time.monotonic() + self.settings.lingering
        while any(mismatch.found == LINGERS for mismatch in found) and time.monotonic() < deadline:
            # The kernel's own, from before it left: the system gives its port back by itself.
            if self._ending.wait(0.2) or self._leaving.is_set():
                break
            found = self._mismatches(image, accept)
        if any(mismatch.hard for mismatch in found) and not accept:
            accepted = self._mismatches(image, True)
            if not any(mismatch.hard for mismatch in accepted) and self._agrees(match.accepted_files(accepted)):
                found = accepted
        match.require(found)
        return match.accepted_files(found)

    def _mismatches(self, image: Image, accept: bool) -> list[match.Mismatch]:
        try:
            found = compatibility.mismatches(
                image.manifest,
                self.engine,
                accept_changed_files=accept,
                gpu_map=self._gpu_map,
                go_on=lambda: not self._breaking_off.is_set(),
            )
        except ValueError as error:
            raise BadRequest(f"The GPU mapping cannot be used: {error}.") from error
        if self._breaking_off.is_set():
            self._require_wanted()
            raise CriuError("The restore was broken off: the kernel's owner leaves.")
        # Room on the GPU is the next step's, which has the lock that makes the answer last.
        return [mismatch for mismatch in found if mismatch.field != "device_memory"]

    def _agrees(self, changed: list[str]) -> bool:
        """Whether the user whose cell waits takes the files as they are."""
        files = ", ".join(map(printable, changed[:3])) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
        prompt = f"Changed while the kernel was away: {files}. Go on with the files as they are now? [y/N] "
        answer = self.gate.prompt(prompt, self.settings.question)
        return answer is not None and answer.strip().lower() in ("y", "yes")

    def _drop_proof(self) -> None:
        if self._proof is not None:
            self._proof.cancel(wait_for_end=True)
            self._proof = None

    def _unlease(self, _: TracedStep | None = None) -> None:
        self._drop_proof()
        if self._lease is not None:
            if self.capsule is None:  # whatever was restored has ended
                with contextlib.suppress(OSError):  # a claim whose process is gone is void all the same
                    self._lease.withdraw_claim()
            self._lease.release()
            self._lease = None

    def _reserve(self, _: TracedStep) -> None:
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
        held = self.engine.gpus.used_by(self.capsule.host_pid) if self.capsule is not None else {}
        needs = {
            mapping.get(uuid, uuid): max(0, bytes - held.get(uuid, 0))  # a warm one still has its context there
            for uuid, bytes in self._saved.device_bytes.items()
        }
        return self.engine.gpus.room(needs, self.settings.room)

    def _on_gpu(self) -> bool:
        """Whether the device memory is back already: an earlier try ended between the driver's restore and unlock."""
        on_gpu = self.capsule is not None and self.engine.cuda.state(self.capsule.host_pid) in _ON_GPU
        return on_gpu and not self._fast_path().swapped_out()

    def _unreserve(self, _: TracedStep) -> None:
        self._room.close()

    def _criu_restore(self, traced: TracedStep) -> None:
        assert self.image is not None and self._proof is not None
        manifest = self.image.manifest
        directory = self.home.runtime_dir
        self.home.renew()
        try:
            for stale in directory.glob("kernel-*"):
                if stale.is_socket():
                    stale.unlink()
        except OSError as error:
            raise RuntimeDirectory(f"{directory} cannot be written: {error.strerror}.") from error
        offsets = Clocks(manifest.monotonic, manifest.boottime) - Clocks.now()
        capsule = Capsule.create(
            directory,
            offsets=offsets,
            known_as=Path(manifest.runtime_dir),
            stdout=self.home.stdout,
            stderr=self.home.stderr,
        )
        self._filling = capsule  # from here on `terminate` ends it, or was called before and is met by the check
        try:
            self._require_wanted()
            with (
                self.engine.store.readable(self.image) as files,
                self._accepting(files.criu_directory) as dump,
                self._reading_device_memory(capsule, files),
            ):
                restored = self.engine.criu.restore(
                    capsule,
                    dump,
                    pid=manifest.pid,
                    pipes=manifest.pipes,
                    timeout=self._deadline(manifest.bytes),
                    freeze=manifest.cuda,
                    before_running=self._require_proved,
                    notes=manifest.notes,
                )
        except BaseException:
            capsule.close()
            self._end_spill()
            raise
        else:
            self.capsule = capsule
            self._changed_settings = restored.changed
        finally:
            self._filling = None
        traced.bytes = manifest.bytes

    @contextlib.contextmanager
    def _reading_device_memory(self, capsule: Capsule, files: Readable) -> Iterator[None]:
        """Device memory comes from the image into the capsule's own memory while CRIU is at work on the rest."""
        assert self.image is not None
        manifest = self.image.manifest
        if not manifest.swapped_bytes:
            yield
            return
        needed = int(manifest.fingerprint.get("memory", 0))
        place = self._place(manifest.swapped_bytes, capsule, needed) if not files.encrypted else None
        blocks = FastPath(capsule, self.engine.cuda).create_extents(place)
        try:
            self._device_read = reading = device_memory.begin_read(
                blocks,
                manifest.swapped_bytes,
                files.device_directory,
                device_memory.entries(manifest),
                files.codec,
            )
            try:
                if self._breaking_off.is_set():  # just before there was something to stop
                    reading.cancel()
                yield
            finally:
                self._device_read = None
                reading.cancel(wait_for_end=True)
        finally:
            os.close(blocks)

    @contextlib.contextmanager
    def _accepting(self, dump: Path) -> Iterator[Path]:
        """CRIU's files as a restore needs them that takes changed files as they are."""
        if not self._changed_files:
            yield dump
            return
        with tempfile.TemporaryDirectory(prefix="view-", dir=self.home.runtime_dir) as place:
            yield images.view(dump, Path(place) / layout.CRIU, self._changed_files)

    def _require_proved(self) -> None:
        assert self._proof is not None
        if self._device_read is not None:
            with mapped_errors(self.engine.store.root) if self._spill is not None else self._memory_mapped():
                filled = self._device_read.wait()
            if not filled:
                self._require_wanted()
                raise CriuError("The restore was broken off: the kernel's owner leaves.")
        if not self._proof.wait():
            self._require_wanted()

    @contextlib.contextmanager
    def _memory_mapped(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise NoMemory("The kernel's device memory does not fit into host memory.") from error
            raise

    def _require_wanted(self) -> None:
        """Raises `KernelLost` when the owner ends the kernel."""
        if self._ending.is_set():
            raise KernelLost("The kernel was ended while it was on its way back.")

    def _cuda_resume(self, traced: TracedStep) -> None:
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
        deadline = self._deadline(sum(self._saved.device_bytes.values()))
        if self.engine.cuda.state(pid) not in _ON_GPU:
            self._restored_on_gpu = True
            self.engine.cuda.restore(pid, self._mapping, timeout_s=deadline)
        self._fast_path().swap_in(lock_s=self.settings.cuda, timeout_s=deadline)
        self._end_spill()
        self._saved.cuda = False
        self._mapping = None

    def _connect(self, _: TracedStep) -> None:
        # Nothing comes after an undo that could try again, so a kernel that lives gets all the time there is.
        patience = self.settings.base if self.kernel.unwinding else 0.0
        with self._answering():
            self.gate.open(self.settings.connect + patience)

    def _thaw(self, _: TracedStep) -> None:
        if self.home.has_agent:
            environ = {name: os.environ[name] for name in self.settings.refresh if name in os.environ}
            notice = ""
            if self._changed_settings:
                notice = f"This kernel came back without what it was set to: {'; '.join(self._changed_settings)}"
            self._ask_agent("thaw", {"environ": environ, "notice": notice})
            self._changed_settings = []

    def _release(self, _: TracedStep) -> None:
        if self._lease is not None and not self.kernel.unwinding:
            # The point of no return: of all that ever restored this image, one kernel gets messages.
            capsule = self._alive()
            self._lease.claim(capsule.host_pid, capsule.keep_fd)
        if not self.kernel.unwinding:
            self._outrun_images()
        self.gate.release()

    def _outrun_images(self) -> None:
        """An adopted kernel goes on: whatever image its last owner published is an old one from here on."""
        if self._outruns_images:
            self._outruns_images = False
            with contextlib.suppress(KeyUnusable):
                self.engine.store.generations.record_restored(self.home.kernel_id)

    def _discard_image(self, traced: TracedStep) -> None:
        """The kernel answers, so its image is history; that of one that has died since is all there is of it."""
        capsule = self._alive()
        if (status := capsule.poll()) is not None:
            raise CapsuleGone(f"The kernel's process ended (status {status}).", status=status)
        if self.home.outlive:
            capsule.outlive()  # until now its image was there to come back from
        traced.bytes = self._remove_image()

    def _remove_image(self) -> int:
        """Delete the image, under the lease of the restore that came from it or one of its own; the bytes freed."""
        freed = 0
        if self.image is not None:
            manifest = self.image.manifest
            freed = self.engine.store.remove(
                self.image, leased=self._lease is not None, before_delete=self._keep_chunks
            )
            self.image = None
            with contextlib.suppress(KeyUnusable):  # a copy of it that is put back may go unnoticed
                self.engine.store.generations.record_restored(manifest.kernel_id, manifest.generation)
        self._unlease()
        return freed

    def _keep_chunks(self, doomed: Path) -> None:
        """What the image had of device memory is the kernel's next image's as far as it does not change."""
        assert self.image is not None
        manifest = self.image.manifest
        self._forget_chunks()
        wanted = self.settings.keep_chunks and not self.engine.store.vault.encrypts and self.capsule is not None
        if wanted and manifest.swapped_bytes and manifest.encryption is None:
            with contextlib.suppress(OSError):  # a sweep has come upon it
                self._chunks = ChunkCache(self.engine.store.root)
                self._chunks.adopt(doomed / layout.CRIU / layout.DEVICE, device_memory.entries(manifest))

    def _mend(self, capsule: Capsule) -> State:
        cuda, pid = self.engine.cuda, capsule.host_pid
        state, fast_path = cuda.state(pid), FastPath(capsule, cuda)
        warm = state is CudaState.LOCKED and fast_path.swapped_out()
        self._spill = fast_path.disk_directory()
        if state is CudaState.CHECKPOINTED or warm:
            # How much it held is not to be found out any more; all that the process has in RAM, and in files of its
            # blocks, is an upper bound.
            process = preflight.read_process(pid)
            most = (process.rss if process else 0) + fast_path.host_memory_bytes() + self._spilled()
            gpus = [gpu.uuid for gpu in self.engine.gpus.list()]
            self._saved = Saved({}, dict.fromkeys(gpus, most), gpus, cuda=True)
            return State.SUSPENDED
        fast_path.swap_in(lock_s=self.settings.cuda, timeout_s=self._deadline(self._spilled()))
        self._end_spill()
        return State.RUNNING
