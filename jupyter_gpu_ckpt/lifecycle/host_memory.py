"""Space for a kernel's swapped-out device memory: host memory, or the disk where that is too small."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from pathlib import Path

from ..capsule.capsule import Capsule
from ..errors import GpuCkptError, NoMemory
from ..files.disk import mapped_errors
from ..image import chunk_cache, device_memory, layout, spill
from ..image.device_memory import DeviceRead
from ..image.image import Image
from ..image.manifest import Manifest
from ..units import size
from . import cuda_processes, host_copies
from .context import Attempt, KernelState, Reason
from .preflight import (
    MARGIN,
    RESERVED_PART,
    Process,
    all_memory,
    available_memory,
    lead_bytes,
    read_process,
    unique_bytes,
)


def device_bytes(kernel: KernelState) -> dict[str, int]:
    """Return the device memory that the kernel and its children have now, in bytes by GPU UUID.  Queries NVML.

    Raises `CudaError` where the driver or NVML does not answer.
    """
    using = cuda_processes.candidates(kernel) if kernel.capsule is not None else ()
    return kernel.engine.gpus.used_by(*using) if using else {}


def resident(kernel: KernelState) -> int:
    """Return the bytes of host memory of the kernel's processes and of its swapped-out allocations."""
    return kernel.fast_path().host_memory_bytes() + sum(process.rss for process in _processes(kernel))


def copied(kernel: KernelState) -> int:
    """Return the bytes of allocations on the GPU of which host memory has a copy; 0 without processes."""
    return kernel.fast_path().kept_bytes() if kernel.capsule is not None else 0


def by_process(kernel: KernelState) -> tuple[int, list[Process]]:
    """Return `resident` and what is kept of allocations on the GPU, and the processes beside the kernel's own in it."""
    processes = _processes(kernel)
    fast_path = kernel.fast_path()
    extents = fast_path.host_memory_bytes() + fast_path.kept_bytes()
    bytes = extents + sum(process.rss for process in processes)
    return bytes, [process for process in processes if process.pid != kernel.require_capsule().host_pid]


def unique(kernel: KernelState) -> tuple[int, int]:
    """Return `resident` with pages that processes share counted once, and by how much a dump may exceed that.

    It takes long: see `preflight.unique_bytes`.
    """
    processes = _processes(kernel)
    return kernel.fast_path().host_memory_bytes() + unique_bytes(processes), lead_bytes(processes)


def _processes(kernel: KernelState) -> list[Process]:
    return [process for pid in kernel.require_capsule().processes() if (process := read_process(pid))]


def choose_directory(kernel: KernelState, capsule: Capsule, bytes: int, kept: int = 0, *, all: int) -> Path | None:
    """Return None if allocations of so many bytes fit into host memory, else a new directory on the disk for them.

    ``all``: bytes of host memory that are needed, the allocations included; of them it has ``kept`` already.  Raises
    `NoMemory` if neither has the space, or the disk must not have them unencrypted; and as `spill.begin`.
    """
    store = kernel.engine.store
    host_copies.release_copies(kernel, all + MARGIN - kept)
    if available_memory() + kept >= all + MARGIN:
        return None
    if not may_spill(kernel, bytes):
        raise _no_memory(all)
    store.prepare()
    if store.free() < bytes + MARGIN:
        chunk_cache.evict(store.root)
    return begin_spill(kernel, capsule)


def links_chunks(kernel: KernelState, *, encrypted: bool) -> bool:
    """Return whether the chunks of an image can be read where they are: those of images that are in memory.

    A link there is not copied, and takes no memory.  ``encrypted``: whether the image is.
    """
    try:
        return not encrypted and device_memory.is_in_memory(kernel.engine.store.root)
    except OSError:
        return False


def may_wait_for_disk(kernel: KernelState) -> bool:
    """Return whether swapped-out allocations may stay in host memory until they are on the disk, while the kernel runs.

    Not where memory is short, nor for those that are on the disk for that reason.
    """
    return kernel.spill_directory is None and available_memory() * RESERVED_PART >= all_memory()


def require_wait() -> None:
    """Raise `NoMemory` if host memory is all but used up while allocations wait there for the disk."""
    if (free := available_memory()) < MARGIN:
        message = "Host memory became short while device memory waited there to be written to the disk."
        raise NoMemory(message, needed=MARGIN, free=free)


def begin_read(
    kernel: KernelState,
    manifest: Manifest,
    capsule: Capsule,
    directory: Path,
    codec: device_memory.Codec,
    target: Path | None = None,
    *,
    only_links: bool = False,
) -> DeviceRead:
    """Begin to read an image's device memory, which is in ``directory``, into a capsule's host memory or ``target``.

    ``target``: see `DeviceRead`.  ``only_links``: to ``target``, and `DeviceRead.prove` is left to do.  Raises as
    `FastPath.create_extents`, and `RuntimeError` where there is no thread.
    """
    extents = kernel.fast_path(capsule).create_extents(target)
    try:
        chunks = device_memory.entries(manifest)
        task = device_memory.begin_read(
            extents, manifest.swapped_bytes, directory, chunks, codec, only_links=only_links
        )
        prove = None
        if only_links and target is not None:
            prove = functools.partial(device_memory.prove, target, manifest.swapped_bytes, chunks)
        return DeviceRead(task, target, prove)
    finally:
        os.close(extents)


def may_read_ahead(kernel: KernelState, image: Image, beside: int = 0) -> bool:
    """Return whether an image has device memory that may be read into host memory while a kernel's own is there.

    ``beside``: bytes of that which are not there yet.  Not where memory would be short then.  An encrypted image is
    read when it is decrypted.
    """
    bytes = image.manifest.swapped_bytes
    if bytes and links_chunks(kernel, encrypted=bool(image.manifest.encryption)):
        return True
    free = available_memory() - bytes - beside
    return bytes > 0 and not image.manifest.encryption and free * RESERVED_PART >= all_memory()


def may_restore_ahead(kernel: KernelState, image: Image) -> bool:
    """Return whether host memory has the space for an image's processes, and its device memory, beside a kernel's.

    Device memory that is read where it is takes none.
    """
    manifest = image.manifest
    bytes = int(manifest.fingerprint.get("memory", 0))
    if links_chunks(kernel, encrypted=bool(manifest.encryption)):
        bytes = max(0, bytes - manifest.swapped_bytes)
    return (available_memory() - bytes) * RESERVED_PART >= all_memory()


def may_go_back_before_suspend(kernel: KernelState, image: Image) -> bool:
    """Return whether the way back may be begun with all device memory that a kernel on the GPU still has there.

    Always if the image has none: what its processes need is looked at apart.
    """
    if not image.manifest.swapped_bytes:
        return True
    with contextlib.suppress(GpuCkptError):  # the driver does not answer: the suspend says why
        return may_read_ahead(kernel, image, sum(device_bytes(kernel).values()))
    return False


def begin_read_ahead(kernel: KernelState, image: Image, capsule: Capsule, resumes: bool) -> DeviceRead | None:
    """Begin to read an image's device memory while the kernel's own is in host memory, too.  None if that may not be.

    ``resumes``: it will move to the GPU ahead, too, where it can be proved if it has digests.  Raises as `begin_read`
    and `spill.begin`.
    """
    if not may_read_ahead(kernel, image):
        return None
    target = None
    if links_chunks(kernel, encrypted=False):
        target = spill.begin(kernel.engine.store.root, capsule.keep_fd)
    try:
        directory = image.path / layout.CRIU / layout.DEVICE
        only_links = resumes and target is not None and image.manifest.has_digests
        codec = device_memory.Codec()
        return begin_read(kernel, image.manifest, capsule, directory, codec, target, only_links=only_links)
    except BaseException:
        if target is not None:
            spill.end(target)
        raise


def end_read(attempt: Attempt) -> None:
    """Read no more device memory for a restore.  Never raises."""
    reading, attempt.device_read = attempt.device_read, None
    if reading is not None:
        reading.task.cancel(wait_for_end=True)


def require_read(attempt: Attempt) -> None:
    """Wait until device memory is read from the image, and proved: before that nothing may be swapped in.

    Raises `NoMemory`, `NoSpace`, `StoreUnwritable`, `ImageDamaged`, `OSError`, and as `Cancellation.check`.
    """
    kernel, complete = attempt.kernel, True
    if attempt.device_read is not None:
        spills = kernel.spill_directory is not None
        try:
            with mapped_errors(kernel.engine.store.root) if spills else contextlib.nullcontext():
                complete = attempt.device_read.task.wait()
                if complete and (prove := attempt.device_read.prove) is not None:
                    prove()
            attempt.traced.parts["all_read"] = attempt.device_read.task.seconds  # most of it before this step
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise NoMemory("The kernel's device memory does not fit into host memory.") from error
            raise
        finally:
            attempt.device_read = None
    if not complete:
        kernel.cancellation.check(Reason.NONE)


def may_spill(kernel: KernelState, bytes: int) -> bool:
    """Return whether the disk has space for so many bytes of allocations, and may have them unencrypted."""
    store = kernel.engine.store
    return store.may_write_plain() and store.free() + chunk_cache.evictable_bytes(store.root) >= bytes + MARGIN


def require_memory(bytes: int) -> None:
    """Raise `NoMemory` if so many bytes do not fit into host memory, to the last byte."""
    if available_memory() < bytes:
        raise _no_memory(bytes)


def _no_memory(bytes: int) -> NoMemory:
    free = available_memory()
    message = f"{size(bytes, 2)} are to go to host memory; {size(free, 2)} of it are free."
    return NoMemory(message, needed=bytes + MARGIN, free=free)


def spilled_bytes(kernel: KernelState) -> int:
    """Return the bytes of the kernel's allocations that are on the disk."""
    directory = kernel.spill_directory
    return sum(path.stat().st_size for path in directory.glob("*.img")) if directory is not None else 0


def begin_spill(kernel: KernelState, capsule: Capsule) -> Path:
    """Return a new directory for the kernel's allocations, beside the images.  Raises as `spill.begin`."""
    end_spill(kernel)
    kernel.spill_directory = spill.begin(kernel.engine.store.root, capsule.keep_fd)
    return kernel.spill_directory


def end_spill(kernel: KernelState) -> None:
    """Remove the kernel's allocations from the disk."""
    directory, kernel.spill_directory = kernel.spill_directory, None
    if directory is not None:
        spill.end(directory)


def discard_chunks(kernel: KernelState, *, wait: bool = False) -> None:
    """Remove the chunks kept for the next image: as soon as the disk allows, or before this returns (``wait``)."""
    chunks, kernel.chunks = kernel.chunks, None
    if chunks is not None:
        chunks.discard(wait=wait)
