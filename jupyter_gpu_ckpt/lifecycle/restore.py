"""The steps by which a kernel's processes are restored from its image, and the end of that image."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from ..capsule.capsule import Capsule, Ran
from ..criu import exclusive, images, open_file_locks, shared_pages, vmas
from ..criu.criu import Restored
from ..criu.exclusive import Exclusive
from ..cuda.cuda import CudaState
from ..errors import (
    CapsuleGone,
    CriuError,
    GpuCkptError,
    ImageArchived,
    KeyUnusable,
    LockTaken,
    MissingFile,
    RuntimeDirectory,
)
from ..image import branch, device_memory, layout, links, shared_chunks
from ..image.chunk_cache import ChunkCache
from ..image.device_memory import DeviceRead
from ..image.encryption import Readable
from ..image.lease import MOMENT
from ..image.manifest import Manifest
from ..image.store import Image
from ..node import databases
from ..node import facts as node_facts
from ..node.facts import LINGERS
from ..node.match import Mismatch, accepted_files, require
from ..terminal_text import printable
from ..transfer import archive
from ..transfer.remote import Remote
from . import compatibility, completing, cuda_processes, going_back, host_copies, host_memory
from .capsule_ahead import CapsuleAhead, ProcessesAhead
from .context import MOVED, Attempt, Home, KernelState, Reason, Saved
from .plans import State


def match(attempt: Attempt) -> None:
    """Lease the image, fetch its content if it is archived, begin to verify it, and match it with this node."""
    kernel, store = attempt.kernel, attempt.kernel.engine.store
    assert kernel.image is not None
    if kernel.completion is not None and kernel.completion.id == kernel.image.id:
        kernel.image = completing.completed(kernel)
    store.require_private()  # before anything is done that a manifest says
    image = store.get(kernel.image.id)
    if kernel.ahead is not None and not kernel.ahead.is_of(image):  # its processes may have memory on the GPU
        kernel.discard_ahead()
    ahead = kernel.ahead.hand_over() if kernel.ahead is not None else None
    attempt.lease, attempt.verification = ahead or (kernel.lease_of(image, MOMENT), None)
    attempt.resources.callback(_end_lease, attempt)
    _begin_capsule(attempt, image)
    if attempt.verification is not None:
        attempt.resources.callback(attempt.verification.cancel, wait_for_end=True)
    try:
        attempt.resources.callback(attempt.turn.close)
        attempt.turn.enter_context(branch.turn_to_restore(store, image))
        links.put_back(image.manifest)  # of a restore whose process was killed
        if image.archived:
            fetch_content(kernel, image)
        if attempt.verification is None:
            with attempt.traced.part("verify"):
                attempt.verification = store.begin_check(image)
            attempt.resources.callback(attempt.verification.cancel, wait_for_end=True)
        with attempt.traced.part("compare"):
            attempt.changed_files = _require_match(attempt, image)
        for database, paths in databases.to_lock(image.manifest.fingerprint.get("files", {})):
            attempt.databases.append(database)
            if "unchanged" not in database:  # log and index may get another size
                attempt.changed_files.extend(paths)
    except BaseException:
        attempt.resources.close()
        raise
    manifest = image.manifest
    kernel.generation = manifest.generation
    kernel.saved = Saved(manifest.report, manifest.device_bytes, manifest.node_gpus, manifest.cuda)


def _begin_capsule(attempt: Attempt, image: Image) -> None:
    """Begin to make the capsule, while the image is matched; what makes it impossible shows when it is needed."""
    kernel, home = attempt.kernel, attempt.kernel.home

    def create() -> Capsule:
        home.renew()
        return home.create_capsule(image)

    attempt.resources.callback(kernel.discard_ahead)
    if kernel.ahead is None:
        with contextlib.suppress(RuntimeError):  # there are no more threads
            kernel.ahead = CapsuleAhead(image, create)


def _end_lease(attempt: Attempt) -> None:
    lease, attempt.lease = attempt.lease, None
    assert lease is not None
    image = attempt.kernel.image
    if attempt.kernel.capsule is None:  # whatever was restored has ended
        if image is not None:
            links.put_back(image.manifest)
            if image.is_save_point:
                links.keep(image.manifest)
        with contextlib.suppress(OSError):  # a claim whose process is gone is void all the same
            lease.withdraw_claim()
    lease.release()


def image_of_sleep(kernel: KernelState) -> Image | None:
    """Return the image that the kernel sleeps in, complete and here; None for one that does not sleep.

    Raises as a wake does where it is not this kernel's to restore, or cannot be here.
    """
    if kernel.machine.state is not State.CHECKPOINTED:
        return None
    if kernel.completion is not None:
        kernel.image = completing.completed(kernel)
    assert kernel.image is not None
    with kernel.image.lease(MOMENT):
        if kernel.image.archived:
            fetch_content(kernel, kernel.image)
    return kernel.image


def fetch_content(kernel: KernelState, image: Image) -> None:
    """Fetch the content of a leased image from the cold tier.  Raises `ImageArchived` where that cannot be."""
    url, cancellation = kernel.settings.archive_url, kernel.cancellation
    if not url:
        raise ImageArchived("The content of the image is in the cold tier.", image=image.id)

    def check_cancelled(_: int) -> None:
        cancellation.check(Reason.END)
        if cancellation.reason >= Reason.DETACH_SOON:
            message = "The server was stopped while the content was on its way back from the cold tier."
            raise ImageArchived(message, hint="The next wake continues where this one stopped.")

    archive.fetch_content(image, kernel.engine.store, Remote(url), check_cancelled)


def _require_match(attempt: Attempt, image: Image) -> list[str]:
    """Return the changed files that are accepted.  Raises as `node.match.require` for what this node lacks."""
    kernel, settings = attempt.kernel, attempt.kernel.settings
    if (accept := attempt.accept_changed_files) is None:
        accept = settings.accept_changed_files or image.accepts_changed_files
    found = _settled(attempt, image, accept)
    deadline = time.monotonic() + settings.lingering
    if lingering := [mismatch.what for mismatch in found if mismatch.found == LINGERS]:
        kernel.gate.print_notice(f"The kernel wakes as soon as this is free: {', '.join(lingering)} ({LINGERS}).")
    while any(mismatch.found == LINGERS for mismatch in found) and time.monotonic() < deadline:
        # The kernel's own port, from before its checkpoint: the system gives it back by itself.
        if kernel.cancellation.wait(0.2, Reason.DETACH_SOON):
            break
        found = _settled(attempt, image, accept)
    if any(mismatch.hard for mismatch in found) and not accept:
        accepted = _settled(attempt, image, True)
        if not any(mismatch.hard for mismatch in accepted) and _user_accepts(kernel, accepted_files(accepted)):
            found = accepted
    require(found, image.id)
    return accepted_files(found)


def _settled(attempt: Attempt, image: Image, accept: bool) -> list[Mismatch]:
    """Return the mismatches, but for files that are put back as they were, or are wanted as they are now."""
    goes_back = attempt.present is not None
    files = (attempt.files or (going_back.NOW if accept else None)) if goes_back else going_back.replaced(image)
    if not image.is_save_point or not (goes_back or files):
        return _mismatches(attempt, image, accept)
    found, attempt.put_back = going_back.settle(
        image, files, lambda accepted: _mismatches(attempt, image, accept or accepted), insist=goes_back
    )
    return found


def _mismatches(attempt: Attempt, image: Image, accept: bool) -> list[Mismatch]:
    kernel, engine, cancellation = attempt.kernel, attempt.kernel.engine, attempt.kernel.cancellation
    host_copies.release_copies(kernel, image.manifest.fingerprint.get("memory", 0))
    found = compatibility.mismatches(
        image.manifest,
        engine.store,
        engine.gpus,
        engine.criu_version,
        accept_changed_files=accept,
        gpu_map=attempt.gpu_map,
        read=_read_ahead(kernel, image),
        cancelled=lambda: cancellation.reason >= Reason.DETACH,
    )
    cancellation.check()
    # Free memory on the GPU is the next step's, which has the lock that makes the answer last.
    return [mismatch for mismatch in found if mismatch.field != "device_memory"]


def _read_ahead(kernel: KernelState, image: Image) -> int:
    """Return the bytes of the image that are in host memory already, or will be."""
    if kernel.ahead is None:
        return 0
    if kernel.ahead.restores:
        return int(image.manifest.fingerprint.get("memory", 0))
    return image.manifest.swapped_bytes if kernel.ahead.reading is not None else 0


def _user_accepts(kernel: KernelState, changed: list[str]) -> bool:
    """Ask the user whose cell waits whether the changed files are accepted."""
    files = ", ".join(map(printable, changed[:3])) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
    prompt = f"Changed while the kernel was away: {files}. Continue with the files as they are now? [y/N] "
    answer = kernel.gate.prompt(prompt, kernel.settings.question)
    return answer is not None and answer.strip().lower() in ("y", "yes")


def criu_restore(attempt: Attempt) -> None:
    """Have CRIU restore the processes in a fresh capsule; device memory begins to be read from the image."""
    try:
        _criu_restore(attempt)
    finally:
        attempt.turn.close()


def _criu_restore(attempt: Attempt) -> None:
    kernel, home = attempt.kernel, attempt.kernel.home
    assert kernel.image is not None
    manifest = kernel.image.manifest
    home.renew()
    links.secure(manifest)
    _make_directories_of_sockets(manifest)
    with _writing(home.runtime_dir):
        for stale in home.runtime_dir.glob(f"{home.sockets.name if home.sockets else 'kernel'}-*"):
            if stale.is_socket() or stale.is_symlink():
                stale.unlink()
    ahead, kernel.ahead = kernel.ahead, None
    as_it_was = not (attempt.put_back or attempt.changed_files or attempt.databases or attempt.again)
    with attempt.traced.part("capsule"):
        capsule = ahead.claim(kernel.image, as_it_was=as_it_was) if ahead is not None else None
        capsule = capsule or home.create_capsule(kernel.image)
    if ahead is not None and ahead.reading is not None:
        attempt.device_read, kernel.spill_directory = ahead.reading, ahead.reading.directory
    stopped, resumed = (ahead.restored, ahead.resumed) if ahead is not None else (None, None)
    # Until the image is needed no more: a child may change files that it has open, and the next try would find them so.
    alone = not attempt.needs_children and _serves_clients(manifest, home)
    running: dict[str, Any] = {
        "pid": manifest.pid,
        "freeze": manifest.cuda,
        "alone": alone,
        "before_running": lambda: _require_verified(attempt),
        "notes": exclusive.without_locks(manifest.notes) if manifest.branched_from else manifest.notes,
    }
    attempt.restoring = capsule  # from here on `terminate` ends it; if that was called before, the check notices
    try:
        kernel.cancellation.check(Reason.END)
        with kernel.engine.store.readable(kernel.image) as files, _closed_after_failure(capsule):
            if stopped is None:
                restored = _restore(attempt, capsule, files, running)
            else:
                _begin_read(attempt, capsule, files)
                kernel.restored_on_gpu = resumed is not None
                restored = resumed or kernel.engine.criu.run_restored(capsule, stopped, **running)
            with _writing(home.runtime_dir):
                capsule.replace_other()
    except BaseException as error:
        capsule.close()
        host_memory.end_read(attempt)
        host_memory.end_spill(kernel)
        if isinstance(error, CriuError) and attempt.verification is not None:
            attempt.verification.wait()  # memory that is not what was saved is the cause, if it is damaged
        raise
    else:
        attempt.traced.parts["criu"] = restored.seconds  # before this step, of processes that were restored ahead
        kernel.capsule, attempt.alone = capsule, alone
        kernel.inherited, kernel.without_cuda = {}, set()  # of other processes
        attempt.changed_settings = restored.changed
    finally:
        attempt.restoring = None
    if stopped is None:  # else the step's seconds say nothing of how long they take
        attempt.traced.bytes = manifest.bytes


@contextlib.contextmanager
def _writing(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RuntimeDirectory(f"{directory} cannot be written: {error.strerror}.") from error


def _restore(attempt: Attempt, capsule: Capsule, files: Readable, running: dict[str, Any]) -> Restored:
    """Have CRIU restore the processes of the image in a capsule.  ``running``: how they run (`Criu.run_restored`)."""
    kernel = attempt.kernel
    assert kernel.image is not None
    manifest, changed = kernel.image.manifest, attempt.changed_files
    branches = bool(manifest.branched_from)
    _remove_ghosts_of_other_images(kernel)
    with (
        _files_put_back(attempt, files),
        shared_chunks.whole(kernel.engine.store.root, files.criu_directory) as whole,
        _view(kernel, manifest, whole, capsule, changed, attempt.again, branches) as (view, separated),
        links.ghosts_removed(files.criu_directory, layout.mark(kernel.image.path, layout.RESTORING)),
        _closed_after_failure(capsule),
    ):
        attempt.separated = separated
        _begin_read(attempt, capsule, files)
        if attempt.databases:
            capsule.lock_databases(attempt.databases)
        if path := open_file_locks.taken(view):
            message = f"The kernel cannot lock {path} again as it had: another process has locked it."
            raise LockTaken(message, culprit=path, lacking=[path])
        timeout = kernel.deadline(manifest.bytes)
        return kernel.engine.criu.restore(capsule, view, pipes=manifest.pipes, timeout=timeout, **running)


def _remove_ghosts_of_other_images(kernel: KernelState) -> None:
    """Remove the files that CRIU had made for a moment when it was killed as it restored another image of the kernel.

    The restore of this one makes files of the same names.
    """
    for image in kernel.engine.store.images():
        mark = layout.mark(image.path, layout.RESTORING)
        is_other = image.manifest.kernel_id == kernel.home.kernel_id and image != kernel.image
        if is_other and mark.exists():
            with (
                contextlib.suppress(GpuCkptError, OSError),
                image.lease(),
                kernel.engine.store.readable(image) as files,
            ):
                links.remove_ghosts(images.ghost_names(files.criu_directory))
                mark.unlink(missing_ok=True)


def begin_to_go_back(attempt: Attempt, image: Image) -> None:
    """Begin to make the capsule for the way back, and to read device memory and restore processes in it, where allowed.

    The kernel's clocks continue from now.
    """
    kernel, same_gpus = attempt.kernel, not attempt.gpu_map
    create = functools.partial(kernel.home.create_capsule, image, beside=True)
    read = functools.partial(host_memory.begin_read_ahead, kernel, image)
    with contextlib.suppress(RuntimeError):  # there are no more threads: it is made when it is needed
        kernel.ahead = CapsuleAhead(image, create, read, functools.partial(_prepare_ahead, kernel, image, same_gpus))


def _prepare_ahead(kernel: KernelState, image: Image, same_gpus: bool) -> ProcessesAhead | None:
    """Return how the processes of a save point are restored while the kernel's own are there; None if they must not be.

    Not where something of them cannot exist twice, a restore needs more files than the image's and those that they have
    open, or one of these is another than it was.  ``same_gpus``: nobody has chosen others, to which they would go late.
    """
    store, manifest, directory = kernel.engine.store, image.manifest, image.criu_directory
    files, noted = manifest.fingerprint.get("files", {}), manifest.fingerprint

    def is_still_true() -> bool:
        facts = ((was, node_facts.file_facts(path)) for path, was in files.items())
        return all(now is not None and node_facts.same_file(was, now) for was, now in facts)

    def restore(capsule: Capsule, whole: Path) -> Ran:
        with _view(kernel, manifest, whole, capsule, (), False, manifest.cuda) as (view, _):
            timeout = kernel.deadline(manifest.bytes)
            return kernel.engine.criu.restore_stopped(
                capsule, view, pid=manifest.pid, pipes=manifest.pipes, timeout=timeout
            )

    def resume(capsule: Capsule, stopped: Ran, reading: DeviceRead | None) -> Restored:
        if not verification.wait():
            raise CriuError("The verification of the image was cancelled.")
        options: dict[str, Any] = {"pid": manifest.pid, "freeze": True, "alone": True, "notes": manifest.notes}
        restored = kernel.engine.criu.run_restored(capsule, stopped, **options)
        _resume_ahead(kernel, manifest, capsule, reading)
        return restored

    def suspend(capsule: Capsule) -> None:
        cuda_processes.suspend_before_end(kernel, [capsule.host_pid] if capsule.host_pid else [])

    if manifest.encryption or image.archived or manifest.branched_from or noted.get("ports") or noted.get("sockets"):
        return None
    if links.may_consume(manifest) or any(databases.to_lock(files)) or not host_memory.may_restore_ahead(kernel, image):
        return None
    if any(of_process.get("watches") for of_process in manifest.notes.values()):  # they would see what is written now
        return None
    lease = kernel.lease_of(image)
    try:
        verification = store.begin_check(image)
        own = kernel.home.unshared_sockets
        found = exclusive.find(directory, own, manifest.notes)
        twice = [each for each in found if each.kind not in ("connection", "semaphore")]
        if not (twice or images.ghost_names(directory)) and is_still_true():
            may_resume = resume if same_gpus and _may_resume_ahead(kernel, manifest) else None
            whole = functools.partial(shared_chunks.whole, store.root, directory)
            return ProcessesAhead(lease, verification, whole, restore, is_still_true, may_resume, suspend)
        verification.cancel(wait_for_end=True)
    except BaseException:
        lease.release()
        raise
    lease.release()
    return None


def _may_resume_ahead(kernel: KernelState, manifest: Manifest) -> bool:
    """Return whether CUDA state of an image may move to the GPU before the present state's processes have ended.

    To the one where it was, if nobody else is admitted to what the present state leaves.
    """
    if len(manifest.device_bytes) != 1 or not manifest.swapped_bytes or not _serves_clients(manifest, kernel.home):
        return False
    alone = kernel.admission is None or kernel.admission.is_alone()
    return alone and [gpu.uuid for gpu in kernel.engine.gpus.list()] == manifest.node_gpus


def _resume_ahead(kernel: KernelState, manifest: Manifest, capsule: Capsule, reading: DeviceRead | None) -> None:
    """Move the CUDA state of a process that was restored ahead to the GPU, while only the driver's threads run.

    What is not done here `resume.cuda_resume` does.  Raises `GpuFull`, `CudaError`, and what the reading has raised.
    """
    cuda, pid = kernel.engine.cuda, capsule.host_pid
    if capsule.processes() != [pid]:  # its children's comes first
        return
    deadline = kernel.deadline(sum(manifest.device_bytes.values()))
    with kernel.engine.gpus.reservation(manifest.device_bytes, kernel.settings.reservation):
        if cuda.state(pid) is not CudaState.CHECKPOINTED:
            return
        cuda.restore(pid, timeout_s=deadline)
    if reading is not None and reading.task.wait():
        kernel.fast_path(capsule).swap_in_frozen(timeout_s=deadline, proves=reading.prove is not None)
        reading.prove = None


def _make_directories_of_sockets(manifest: Manifest) -> None:
    """Make directories anew in which unix sockets were: CRIU makes the sockets only.

    Temporary ones (`multiprocessing.Manager`) are removed when their server ends, or by who cleans ``/tmp``.  Raises
    `MissingFile`.
    """
    for noted in manifest.fingerprint.get("sockets", ()):
        directory = Path(noted["path"]).parent
        if directory.is_relative_to(manifest.runtime_dir) or directory.exists() or not noted.get("directory"):
            continue
        mode, owner, group = noted["directory"]
        try:
            directory.mkdir(0o700, parents=True)
            with contextlib.suppress(PermissionError):  # only root can, whose kernels may have directories of others
                os.chown(directory, owner, group)
            directory.chmod(mode)
        except OSError as error:
            message = f"{directory}, where the kernel has a unix socket, is gone and cannot be made: {error.strerror}."
            hint = f"Make it: `mkdir -p {shlex.quote(str(directory))}`."
            raise MissingFile(message, hint=hint, culprit=str(directory)) from error


def _serves_clients(manifest: Manifest, home: Home) -> bool:
    """Return whether the kernel itself has the sockets that clients connect to: those of a script, its child has."""
    sockets = manifest.notes.get(str(manifest.pid), {}).get("sockets", {}).values()
    return any("path" in each and each["path"]["path"].startswith(home.own_sockets) for each in sockets)


@contextlib.contextmanager
def _files_put_back(attempt: Attempt, files: Readable) -> Iterator[None]:
    """Put files back as they were at the save point, before the body.  They stay when that fails: see `replaced`."""
    assert attempt.kernel.image is not None
    going_back.put_files_back(attempt.kernel.image, attempt.put_back, files, attempt.present)
    yield


@contextlib.contextmanager
def _closed_after_failure(capsule: Capsule) -> Iterator[None]:
    """Close a capsule when the body fails: CRIU makes no files any more."""
    try:
        yield
    except BaseException:
        capsule.close()
        raise


def _begin_read(attempt: Attempt, capsule: Capsule, files: Readable) -> None:
    """Begin to read device memory from the image into the capsule's own memory, unless that has begun.

    Only the swap in waits for its end (`host_memory.require_read`), after CRIU and the driver have done their parts.
    """
    kernel = attempt.kernel
    assert kernel.image is not None
    manifest = kernel.image.manifest
    if not manifest.swapped_bytes:
        return
    if attempt.device_read is None:
        needed, target = int(manifest.fingerprint.get("memory", 0)), None
        if host_memory.links_chunks(kernel, encrypted=files.encrypted):
            target = host_memory.begin_spill(kernel, capsule)
        elif not files.encrypted:
            target = host_memory.choose_directory(kernel, capsule, manifest.swapped_bytes, all=needed)
        attempt.device_read = host_memory.begin_read(
            kernel, manifest, capsule, files.device_directory, files.codec, target
        )
    if kernel.cancellation.reason >= Reason.DETACH:  # requested before there was something to stop
        attempt.device_read.task.cancel()


@contextlib.contextmanager
def _view(
    kernel: KernelState,
    manifest: Manifest,
    directory: Path,
    capsule: Capsule,
    changed: Collection[str],
    again: bool,
    separates: bool,
) -> Iterator[tuple[Path, list[Exclusive]]]:
    """Yield CRIU's files, or a view of them, and the state that the processes get otherwise.

    A view where there are ``changed`` files, processes share pages, or it ``separates`` what cannot exist twice.  A
    wake that failed is tried ``again`` with CRIU's own tables of mappings: processes rather share less than never wake.
    """
    references, home = shared_pages.references(directory), kernel.home
    aligned = vmas.AS_DUMPED if again else vmas.aligned(directory)
    if not (changed or references or aligned.records or separates):
        yield directory, []
        return
    with contextlib.ExitStack() as stack:
        separated: list[Exclusive] = []
        try:
            temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="view-", dir=capsule.directory))
            view = images.view(directory, Path(temporary) / layout.CRIU, changed)
            shared_pages.add_parents(directory, view, references, aligned.whole)
            vmas.replace(view, aligned.records)
            if separates:
                moved = f"{home.inner_dir}/{MOVED}"
                separated = exclusive.separate(
                    directory, view, home.unshared_sockets, exclusive.free_port, moved, manifest.notes
                )
        except OSError as error:
            raise RuntimeDirectory(f"{capsule.directory} cannot be written: {error.strerror}.") from error
        yield view, separated


def _require_verified(attempt: Attempt) -> None:
    """Wait until the image is verified, but for device memory: before that no restored process may run."""
    assert attempt.verification is not None
    with attempt.traced.part("verify"):
        verified = attempt.verification.wait()
    if not verified:
        attempt.kernel.cancellation.check(Reason.NONE)


def discard_image(attempt: Attempt) -> None:
    """Delete the image of a kernel that answers; if the kernel has died since, the image is all that is left of it."""
    kernel, capsule = attempt.kernel, attempt.kernel.require_capsule()
    if (status := capsule.poll()) is not None:
        raise CapsuleGone(f"The kernel's process ended (status {status}).", status=status)
    if kernel.home.outlive:
        capsule.outlive()  # until now its image was there to restore
    attempt.traced.bytes = remove_image(kernel)


def remove_image(kernel: KernelState) -> int:
    """Delete the image, under the lease of the attempt that restored it or one of its own; return the bytes freed.

    A save point stays, and can be restored again.
    """
    image, attempt, freed = kernel.image, kernel.attempt, 0
    if image is not None and image.is_save_point:
        kernel.image = None
        if kernel.completion is not None and kernel.completion.id == image.id:
            completing.begin_save_point(kernel, image)
        else:
            _keep_save_point(image)
    elif image is not None:
        leased = attempt is not None and attempt.lease is not None
        freed = kernel.engine.store.remove(image, leased=leased, before_delete=lambda path: _keep_chunks(kernel, path))
        kernel.image = None
        with contextlib.suppress(KeyUnusable):  # then a copy of it that is put back may go unnoticed
            kernel.engine.store.generations.record_restored(image.manifest.kernel_id, image.manifest.generation)
    if attempt is not None:
        attempt.resources.close()
    return freed


def _keep_save_point(image: Image) -> None:
    """Leave a save point as it was before its kernel came back from it."""
    links.keep(image.manifest)
    release_save_point(image)


def release_save_point(image: Image) -> None:
    """Record that the kernel does not sleep in a save point, and lives from it no more than from others."""
    image.retire()
    image.withdraw_claim()
    layout.mark(image.path, layout.REPLACED).unlink(missing_ok=True)


def retire_image(kernel: KernelState) -> Image | None:
    """Keep the image, but let no server restore it by itself: the kernel has changed since.  Return it."""
    image, kernel.image = kernel.image, None
    if image is not None:
        with contextlib.suppress(OSError):
            image.retire()
    return image


def _keep_chunks(kernel: KernelState, path: Path) -> None:
    """Keep the device memory of an image that is being deleted: the next one needs the chunks that do not change."""
    assert kernel.image is not None
    manifest, store = kernel.image.manifest, kernel.engine.store
    host_memory.discard_chunks(kernel)
    wanted = kernel.settings.keep_chunks and kernel.capsule is not None and store.may_write_plain(manifest)
    if wanted and manifest.swapped_bytes:
        with contextlib.suppress(OSError):  # a sweep has removed it
            kernel.chunks = ChunkCache(store.root)
            kernel.chunks.reuse(path / layout.CRIU / layout.DEVICE, device_memory.entries(manifest))
