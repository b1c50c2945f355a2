"""The steps by which a suspended kernel becomes an image: disconnect, dump, publish, end of the process."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import os
import random
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import errors, procfs
from ..capsule import root_program
from ..capsule.capsule import ANSWER
from ..criu import images, tasks
from ..criu.shared_pages import SharedPages
from ..cuda.cuda import CudaState
from ..cuda.fastpath import unlink_extents
from ..errors import GpuCkptError
from ..files.disk import mapped_errors
from ..image import chunk_cache, device_memory, kept_files, layout
from ..image.background_task import BackgroundTask, beside, following
from ..image.chunk_cache import ChunkCache
from ..image.draft import Draft
from ..image.image import Image
from ..image.manifest import Manifest
from ..node.facts import is_bound, unreachable
from ..node.fingerprint import fingerprint
from ..process import connections, descriptors, shared_memory
from ..process.sockets import let_ports_be_rebound
from . import completing, cuda_processes, host_memory, preflight, restore
from .context import Attempt, KernelState, PartlyDone, Reason
from .plans import Step
from .suspend import driver_checkpoint, gate_connections, suspend_late, why_not, without_sockets

#: How names of directories begin in which `multiprocessing` has its listeners (util.py, get_temp_dir).
_MULTIPROCESSING = "pymp-"

_log = logging.getLogger(__name__)

#: Dumps of this process at once.  Each takes some MiB of pipes, and Linux gives an ordinary user 64 MiB of them for all
#: processes together (fs.pipe-user-pages-soft, pipe(7)): 20 at once had enough, of 50 a quarter did not.
_TURNS = threading.BoundedSemaphore(8)
#: Dumps that are tried while a child of the kernel is killed during each; and while each is interrupted by a signal, or
#: meets the kernel at a moment whose state passes.
_TRIES, _TRIES_INTERRUPTED = 3, 5
#: The part of the space on the disk, and in the quota, that a save point may take for program code.
_CODE_PART = 4


def disconnect(attempt: Attempt) -> None:
    """Close the gate's connections and wait for the kernel to close its side: none of them is to be in the image.

    Meanwhile the suspended contexts give back their zeros.
    """
    if attempt.unwinding:
        _disconnect(attempt)
        return
    with beside(functools.partial(cuda_processes.drop_zero_pages, attempt.kernel)) as dropped:
        _disconnect(attempt)
    with attempt.traced.part("drop_zeros"):
        dropped.result()


def _disconnect(attempt: Attempt) -> None:
    kernel = attempt.kernel
    if kernel.refusal is not None and not attempt.unwinding:
        raise copy.copy(kernel.refusal)
    if not attempt.unwinding:  # a kernel that was suspended before had a preflight for a suspend only
        suspend_late(kernel)
        _note_inherited_files(kernel)
        _require_fit(kernel)
    before = gate_connections(kernel)
    if (error := without_sockets(kernel, before)) is not None:
        raise error
    if kernel.disconnected:  # by an earlier try, or an earlier server's end
        return
    kernel.gate.close()
    kernel.disconnected = True
    counts, deadline = Counter(before.values()), time.monotonic() + kernel.settings.connect
    # Each endpoint must lose one, the gate's.  Others may stay: ipykernel's debugger is connected to the shell; CRIU
    # names a stranger's.
    while True:
        late = time.monotonic() > deadline  # from before the count, which may be what took long
        now = Counter(gate_connections(kernel, before).values())
        left = {path: count for path, count in now.items() if count >= counts[path]}
        if not left:
            return
        if late:
            raise errors.GateError(f"The kernel does not close its connections to the gate: {_shown(kernel, left)}.")
        time.sleep(0.0005)


def _shown(kernel: KernelState, left: Mapping[str, int]) -> str:
    """Return the connections that are left, and threads of the kernel that are stopped, for a report of the error."""
    pid, parts = kernel.require_capsule().host_pid, [f"{count} at {Path(path).name}" for path, count in left.items()]
    with contextlib.suppress(*procfs.GONE):
        threads = [procfs.stat(pid, tid) for tid in procfs.threads(pid)]
        parts += [f"thread {each.name} is {each.state}" for each in threads if each.state not in "RS"]
    return ", ".join(parts)


def _note_inherited_files(kernel: KernelState) -> None:
    """Have the dump take from children the device files that they have inherited of processes with CUDA state.

    Also where there are none: the files that were noted for a dump which was refused then may be a process's own.
    """
    cuda_processes.note_new_forks(kernel)
    try:
        kernel.require_capsule().note_inherited_files(kernel.inherited)
    except errors.CapsuleError:  # its init is of an older release: such children are refused
        kernel.inherited = {}


def _require_fit(kernel: KernelState) -> None:
    """Raise the error for what only matters to a dump: other processes, and what the agent found when it quiesced.

    Device files that children have inherited do not: the capsule's init takes them away.
    """
    others, why = kernel.require_capsule().other_processes(), why_not(kernel, writes=True, suspended=True)
    preflight.require(preflight.judge_suspended(others, why, kernel.saved.report))


def dump(attempt: Attempt) -> None:
    """Write everything of an image but its manifest; the processes stay stopped."""
    kernel, root = attempt.kernel, attempt.kernel.engine.store.root
    if _suspend_warm(kernel):
        cuda_processes.drop_zero_pages(kernel)
    bytes = host_memory.resident(kernel)  # device memory is host memory by now
    attempt.clocks = kernel.require_capsule().clocks()
    point = attempt.next_image
    if point is not None and kernel.ahead is None and host_memory.may_read_ahead(kernel, point):
        restore.begin_to_go_back(attempt, point)
    with attempt.traced.part("space"):
        needed = _needed(attempt, bytes)
    over, pause, evicted, tries = time.monotonic() + kernel.settings.pipes, 0.1, False, 1
    while True:
        try:
            attempt.traced.bytes = _write_image(attempt, bytes, needed)
            return
        except errors.NoSpace:  # checkpoints side by side saw the same space
            if evicted or not chunk_cache.evictable_bytes(root):
                raise
            evicted = True  # once: other kernels may write ahead meanwhile
            host_memory.discard_chunks(kernel, wait=True)
            chunk_cache.evict(root)
        except errors.ProcessEnded:  # somebody has killed it: what is left can be saved
            if tries == _TRIES:
                raise
            tries += 1
        except errors.UnprovenState as error:
            if tries == _TRIES_INTERRUPTED or not error.details.get("passes"):
                raise
            tries += 1
        except errors.PipesExhausted:  # other processes of this user have them
            if time.monotonic() + pause > over:
                raise
            message = "Kernel %s: too many pipes (fs.pipe-user-pages-soft); the dump is tried again in %.1f s"
            _log.warning(message, kernel.home.kernel_id, pause)
            jitter = random.uniform(0.5, 1.5)  # noqa: S311 - so that not all come back at once
            kernel.cancellation.wait(pause * jitter, Reason.DETACH)
            kernel.cancellation.check()
            pause = min(2 * pause, 3.0)
        except errors.CriuError as error:  # it runs on unchanged
            passes = isinstance(error, errors.DumpInterrupted) or error.details.get("passes")
            if tries == _TRIES_INTERRUPTED or not passes or "unrepaired" in error.details:
                raise
            kernel.cancellation.check()
            _log.warning("Kernel %s: %s The dump is tried again", kernel.home.kernel_id, error.message)
            tries += 1


def _suspend_warm(kernel: KernelState) -> bool:
    """Suspend the CUDA context that a warm kernel still has on the GPU: CRIU cannot dump it.  Return whether it had."""
    states, own = cuda_processes.states(kernel), kernel.require_capsule().host_pid
    if any(state is CudaState.RUNNING and pid != own for pid, state in states.items()):  # one has begun just now
        suspend_late(kernel)
        _note_inherited_files(kernel)
        states = cuda_processes.states(kernel)
    if CudaState.RUNNING in states.values():  # after a wake that failed half-way, which only another one repairs
        raise errors.CudaError("The kernel is on the GPU, and was to be off it.", hint="Run a cell, and try again.")
    deadline = kernel.deadline(sum(kernel.saved.device_bytes.values()))
    locked = [pid for pid in states if states[pid] is CudaState.LOCKED]
    cuda_processes.keep_from_driver(kernel, locked)
    cuda_processes.checkpoint(kernel, [pid for pid in locked if pid != own], deadline)
    if own in locked:
        driver_checkpoint(kernel, deadline)
    return bool(locked)


def _needed(attempt: Attempt, bytes: int) -> int:
    """Make space for an image, and return the bytes that it needs at most, of ``bytes`` of resident memory.

    Raises `NoSpace` if the disk has too little, where the check before had counted on zeros of device memory.
    """
    kernel, store = attempt.kernel, attempt.kernel.engine.store
    needed = written = bytes + preflight.MARGIN
    if store.free() < needed or store.over_quota(kernel.home.kernel_id, needed + host_memory.spilled_bytes(kernel)):
        unique, lead = host_memory.unique(kernel)
        needed = unique + preflight.MARGIN
        written = min(written, needed + lead)
    there = _make_space(kernel, written)
    if attempt.counts_on_zeros:
        other = kernel.fast_path().host_memory_bytes() + host_memory.spilled_bytes(kernel)
        pid = kernel.require_capsule().host_pid
        kernel.other_than_zeros = pid, cuda_processes.amounts(kernel).bytes, other
        preflight.require_space(written - there, store.free())
    return needed + host_memory.spilled_bytes(kernel)


def _make_space(kernel: KernelState, needed: int) -> int:
    """Discard cached chunks where an image needs the space: of other kernels first, then this one's.

    Return the bytes that its own have of it.
    """
    store, own = kernel.engine.store, 0
    if kernel.chunks is not None:
        kernel.chunks.in_use = True
        own = kernel.chunks.stop_and_wait()
    if store.free() < needed - own:
        chunk_cache.evict(store.root)
        if store.free() < needed - own:
            host_memory.discard_chunks(kernel, wait=True)
            return 0
    return own


@contextlib.contextmanager
def _turn_to_dump(kernel: KernelState) -> Iterator[None]:
    """Wait to be one of the few dumps of this process that run at once."""
    while not _TURNS.acquire(timeout=0.1):
        kernel.cancellation.check()
    try:
        yield
    finally:
        _TURNS.release()


def _write_image(attempt: Attempt, bytes: int, needed: int) -> int:
    """Write the draft, compute its manifest and return its bytes.  After failure it is removed and the processes run.

    ``bytes``: resident; ``needed``: what the image may need.
    """
    kernel, shares = attempt.kernel, attempt.save_point is not None
    draft = kernel.engine.store.begin(kernel.home.kernel_id, needed, shares=shares)
    attempt.draft = draft  # `KernelState.written` counts it
    try:
        processes = kernel.require_capsule().processes()
        with _pages_hashed(attempt, draft, processes):
            _run_criu(attempt, draft, bytes, needed, processes)
            _examine(attempt, draft)
        attempt.manifest = _manifest(attempt)
        return draft.size() + attempt.dropped_bytes
    except BaseException:
        attempt.draft = None
        draft.discard()
        attempt.resources.close()
        with contextlib.suppress(errors.CapsuleError, errors.CapsuleGone):  # it ended
            _resume_processes(attempt)  # CRIU may have succeeded, and its answer come too late
        raise


def _run_criu(attempt: Attempt, draft: Draft, bytes: int, needed: int, processes: Sequence[int]) -> None:
    """Have CRIU write its files, and write device memory beside it.  ``bytes``, ``needed``: as for `_write_image`.

    ``processes``: of the capsule, a moment ago.
    """
    kernel, capsule = attempt.kernel, attempt.kernel.require_capsule()
    with (
        draft.work_directory() as work,
        device_memory_written(attempt, draft, needed),
        _turn_to_dump(kernel),
        _shared_pages_dropped(attempt, draft, processes),
    ):
        deadline, freeze = kernel.deadline(bytes), kernel.saved.cuda
        children = [*cuda_processes.states_of_children(kernel)] if freeze else []
        draft.note_before_dump(capsule.processes())
        with attempt.traced.part("criu"):
            kernel.engine.criu.dump(
                capsule, draft.criu_directory, timeout=deadline, freeze=freeze, children=children, work=work
            )


def _examine(attempt: Attempt, draft: Draft) -> None:
    """Refuse a dump that could not be restored as it is now, and note what a restore needs besides."""
    kernel, part = attempt.kernel, attempt.traced.part
    inspect = functools.partial(
        kernel.require_capsule().inspect, allow_unconfined=kernel.settings.allow_unconfined_wake
    )
    with part("inspect"), beside(inspect) as inspection:  # the capsule's init does while the image is read here
        with part("fingerprint"):
            files = images.regular_files(draft.criu_directory)
            _require_restorable(draft.criu_directory, files)
            attempt.fingerprint = _fingerprint(attempt, draft.criu_directory, files)
        attempt.notes = _require_proven(inspection.result(), draft.criu_directory)
    with part("files"):
        _keep_files(attempt, draft)
    with part("fit"):
        _require_fit(kernel)  # the parent of a process may have been killed meanwhile: then it is not in the image


def _keep_files(attempt: Attempt, draft: Draft) -> None:
    """Keep the files that the stopped processes use, for a save point."""
    if attempt.save_point is None:
        return
    shared = (attempt.kernel.saved.report.get("summary") or {}).get("shared") or []
    files = {path: facts for path, facts in attempt.fingerprint.get("files", {}).items() if path not in shared}
    most, free = attempt.kernel.settings.kept_file_bytes, max(0, attempt.kernel.engine.store.free() - preflight.MARGIN)
    attempt.kept = kept_files.keep(files, attempt.replaced, draft.criu_directory / layout.KEPT, most, free)


def _pages_hashed(attempt: Attempt, draft: Draft, processes: Sequence[int]) -> contextlib.AbstractContextManager[None]:
    """Hash CRIU's files of pages beside the body, where that is all that is done with them.

    Pages that several processes share are dropped from them, and a save point divides them.
    """
    if attempt.save_point is not None or processes[1:]:
        return contextlib.nullcontext()
    return draft.hashing_pages(attempt.kernel.cancellation.check)


@contextlib.contextmanager
def _shared_pages_dropped(attempt: Attempt, draft: Draft, processes: Sequence[int]) -> Iterator[None]:
    """Drop pages that processes share from what CRIU writes in the body, meanwhile; all of them after the body."""
    attempt.dropped_bytes = attempt.shared_bytes = 0
    if not processes[1:]:
        yield
        return
    pages = SharedPages(draft.criu_directory, _parents(processes))
    mapped = mapped_errors(attempt.kernel.engine.store.root)

    def check() -> None:
        attempt.dropped_bytes = pages.dropped
        attempt.kernel.cancellation.check()

    with following("gpu-ckpt-pages", mapped(pages.advance), mapped(pages.finish), check):
        yield
    attempt.dropped_bytes, attempt.shared_bytes = pages.dropped, pages.shared


def _parents(pids: Iterable[int]) -> dict[str, str]:
    """Return the parents of processes with these host pids, by pid, as the processes see both; not of ended ones."""
    inner, parents = {}, {}
    for pid in pids:
        with contextlib.suppress(*procfs.GONE):
            inner[pid] = procfs.status(pid)["NSpid"].split()[-1]
            parents[pid] = procfs.stat(pid).parent
    return {inner[pid]: inner[parent] for pid, parent in parents.items() if parent in inner}


def _require_restorable(directory: Path, files: Iterable[images.RegularFile]) -> None:
    """Raise `UnsupportedFile` if the dump in ``directory`` has a file that no restore could open, or no wake find.

    ``files``: its regular files.
    """
    if found := images.unrestorable(directory):
        more = f" and {len(found) - 1} more" if found[1:] else ""
        reason = "which belongs to one of its threads or is its working directory: it could not be opened again"
        raise errors.UnsupportedFile(f"The kernel has {found[0]} open{more}, {reason}.", culprit=found[0], files=found)
    if found := sorted(unreachable({file.path for file in files})):
        more = f" and {len(found) - 1} more" if found[1:] else ""
        message = (
            f"The kernel uses {found[0]}{more}, in a directory that this user may not search: no wake would find it."
        )
        hint = "Allow that again (chmod u+x), or close it, and try again."
        raise errors.UnsupportedFile(message, hint=hint, culprit=found[0], files=found)
    if found := images.with_too_long_names(directory):
        more = f" and {len(found) - 1} more" if found[1:] else ""
        message = f"The kernel has deleted files open whose names are too long to be made again: {found[0]}{more}."
        hint = "Close them, or give such files shorter names before they are deleted, and try again."
        raise errors.UnsupportedFile(message, hint=hint, culprit=found[0], files=found)


def _require_proven(state: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Compare the stopped processes' ``state`` with their fresh dump and return their settings that CRIU forgets.

    Raises the error for state that is not proven to be restored, and `CriuError` for state that the dump lacks.
    """
    preflight.require(preflight.judge_state(state["refusals"]))
    if unasked := state.get("unasked"):  # the capsule's init may be of an older release
        _log.warning("This host forbids %s: state that they report was not inspected.", ", ".join(unasked))
    if ended := tasks.uninspected(directory, state["inventory"]):
        # Its settings that CRIU does not save are not known, so the image would not restore them.
        raise errors.ProcessEnded.during_dump(ended)
    if missing := tasks.missing(directory, state["inventory"]):
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise errors.CriuError(f"CRIU's image lacks {missing[0]}{more}.", missing=missing)
    if tasks.has_external_peer(directory):
        message = "The kernel is connected through a unix socket to a process outside, which has not accepted it yet."
        raise errors.UnsupportedSocket(message)
    notes: dict[str, Any] = state["notes"]
    tasks.remove_posix_locks(directory, notes)
    for pid, process in state["inventory"].items():
        notes.setdefault(pid, {})["limits"] = process["limits"]
    owners = {str(tid): pid for pid, process in state["inventory"].items() for tid in process["threads"]}
    for tid, signal in tasks.remove_death_signals(directory).items():
        threads = notes.setdefault(owners[str(tid)], {}).setdefault("threads", {})
        threads.setdefault(str(tid), {})["death_signal"] = signal
    return notes


@contextlib.contextmanager
def device_memory_written(attempt: Attempt, draft: Draft, needed: int) -> Iterator[None]:
    """Write device memory that CRIU does not see, while the body runs; all of it is written after the body.

    ``needed``: what the image may need, in bytes.
    That of a kernel that continues or goes back is only linked, where host memory permits: `keep` writes it, or another
    process (`completing`).
    """
    kernel, fast_path = attempt.kernel, attempt.kernel.fast_path()
    attempt.linked = attempt.completion = None
    extents = fast_path.open_extents() if kernel.saved.cuda else None
    if extents is None:
        attempt.swapped_bytes, attempt.has_digests = 0, False
        yield
        return

    def write(check_task: Callable[[], None]) -> None:
        def check_cancelled() -> None:
            kernel.cancellation.check()
            check_task()

        try:
            draft.write_device(extents, kernel.chunks.claim if kernel.chunks is not None else None, check_cancelled)
        except BaseException:
            kernel.require_capsule().cancel_criu()
            raise

    try:
        kernel.cancellation.check()
        attempt.swapped_bytes, amounts = device_memory.size(extents), fast_path.amounts()
        attempt.has_digests = bool(amounts.known)
        if attempt.swapped_bytes != amounts.swapped_out:
            message = f"Of {amounts.swapped_out} bytes of device memory {attempt.swapped_bytes} are there."
            raise errors.CapsuleError(message)
        later = attempt.continues or completing.may_be_later(attempt, needed)
        if later and host_memory.may_wait_for_disk(kernel):
            link = functools.partial(_link_device_memory, attempt)
            if attempt.continues:
                with beside(link) as linking:
                    yield
                if not linking.result():
                    write(kernel.cancellation.check)
                return
            with attempt.traced.part("link"):
                linked = link()
            if linked and completing.begin(attempt, draft):
                yield
                return
            attempt.resources.close()
            attempt.linked = None
        task = BackgroundTask("gpu-ckpt-device", write)
        try:
            yield
        except BaseException as error:
            task.cancel()
            try:
                task.wait()
            except GpuCkptError as cause:
                if isinstance(error, GpuCkptError):
                    raise cause from error
            except Exception:
                _log.exception("Device memory could not be written")
            raise
        with attempt.traced.part("device_memory"):
            task.wait()
    finally:
        os.close(extents)


def _link_device_memory(attempt: Attempt) -> bool:
    """Have device memory stay as it is until the end of the attempt; return False if that cannot be."""
    try:
        attempt.linked = attempt.kernel.fast_path().link_extents()
    except (errors.CapsuleError, OSError) as error:
        _log.info("Device memory is written while the kernel waits: %s", error)
        return False
    attempt.resources.callback(unlink_extents, attempt.linked)
    return True


def write_ahead(kernel: KernelState) -> None:
    """Begin to write a suspended kernel's device memory to the disk: its checkpoint will have little left to do.

    Nothing is written that a checkpoint would be refused for, or that is to be encrypted.
    """
    store, kernel_id = kernel.engine.store, kernel.home.kernel_id
    if kernel.refusal is not None:  # there will be no image
        return
    wanted = kernel.settings.write_ahead and kernel.saved.cuda and not kernel.spill_directory
    if not wanted or not store.may_write_plain():
        return

    def permitted(bytes: int, fresh: int) -> bool:
        store.prepare()
        # As much again stays free: others may need it more.
        return store.free() >= 2 * fresh and store.over_quota(kernel_id, bytes) is None

    try:
        if (extents := kernel.fast_path().open_extents()) is None:
            return
        try:
            kernel.chunks = kernel.chunks or ChunkCache(store.root)
            kernel.chunks.write_ahead(extents, permitted)
        finally:
            os.close(extents)
    except (GpuCkptError, OSError, RuntimeError) as error:
        _log.info("Device memory is not written ahead: %s", error)


def publish(attempt: Attempt) -> None:
    """Write the manifest and make the draft an image, in which the kernel will sleep.

    Of a kernel that goes back another process may do so, when the kernel is back.
    """
    kernel, capsule = attempt.kernel, attempt.kernel.require_capsule()
    if attempt.next_image is not None and kernel.ahead is None:
        restore.begin_to_go_back(attempt, attempt.next_image)
    image = completing.hand_over(attempt, _final_manifest(attempt)) if attempt.completion is not None else None
    if image is None and attempt.linked is not None:
        _write_linked(attempt, attempt.linked)
    kernel.image = image or _published(attempt, claim_pid=capsule.host_pid, keep_fd=capsule.keep_fd)
    kernel.generation = kernel.image.manifest.generation
    host_memory.discard_chunks(kernel)


def keep(attempt: Attempt) -> None:
    """Write device memory and the manifest, and make the draft a save point of the kernel, which is served meanwhile.

    After failure there is no save point, and the kernel runs on.
    """
    if attempt.linked is not None:
        with attempt.traced.part("device_memory"):
            _write_linked(attempt, attempt.linked)
    attempt.kernel.save_point = _published(attempt)
    attempt.kernel.descend_from(attempt.kernel.save_point)
    host_memory.discard_chunks(attempt.kernel)


def _write_linked(attempt: Attempt, linked: int) -> None:
    """Write device memory that was linked to the draft, and give back each part of it that is written.

    The kernel may end meanwhile: that memory belongs to the links, too.
    """
    kernel, draft = attempt.kernel, attempt.draft
    assert draft is not None

    def check() -> None:
        kernel.cancellation.check()
        host_memory.require_wait()

    _make_space(kernel, attempt.swapped_bytes)  # others may have filled the disk since the dump
    draft.write_device(linked, kernel.chunks.claim if kernel.chunks is not None else None, check, removes=True)
    attempt.resources.close()


def _published(attempt: Attempt, **claim: Any) -> Image:
    kernel, draft, manifest = attempt.kernel, attempt.draft, _final_manifest(attempt)
    assert draft is not None
    image = draft.publish(manifest, **claim)
    attempt.draft = attempt.manifest = None
    kernel.engine.store.hashes.begin()
    attempt.traced.bytes = image.manifest.bytes
    return image


def _final_manifest(attempt: Attempt) -> Manifest:
    """Write what else is in the draft; return the manifest, but for the image's files."""
    kernel, draft, manifest = attempt.kernel, attempt.draft, attempt.manifest
    assert draft is not None and manifest is not None
    if kernel.home.write_session is not None:
        with mapped_errors(kernel.engine.store.root):
            kernel.home.write_session(draft.path)
    if manifest.save_point is not None:
        with mapped_errors(kernel.engine.store.root):
            of_kernel = {**_kept_code(attempt, draft, manifest), **attempt.kept}
            files = kept_files.hashed(of_kernel, draft.criu_directory / layout.KEPT)
        for path, facts in files.items():  # of the copy: the file itself may be another one by now
            if facts["blake3"] and path in (noted := manifest.fingerprint["files"]):
                noted[path].setdefault("blake3", facts["blake3"])
        manifest = dataclasses.replace(manifest, save_point={**manifest.save_point, "files": files})
    if attempt.notebook is not None:
        with mapped_errors(kernel.engine.store.root):
            kept = draft.criu_directory / layout.KEPT
            kept.mkdir(mode=0o700, exist_ok=True)
            (kept / layout.NOTEBOOK).write_bytes(attempt.notebook)
    return dataclasses.replace(manifest, steps=dict(attempt.seconds))


def _kept_code(attempt: Attempt, draft: Draft, manifest: Manifest) -> dict[str, kept_files.KeptFile]:
    """Keep the program code of a save point, where no kernel waits for that, as far as disk and quota have space.

    The smallest files first; most of the space is left for other images.
    """
    kernel, store, files = attempt.kernel, attempt.kernel.engine.store, manifest.fingerprint.get("files", {})
    code = {path: facts for path, facts in files.items() if facts.get("code") and path not in attempt.kept}
    most = min(kernel.settings.kept_code_bytes, sum(facts.get("size", 0) for facts in code.values()))
    if not attempt.continues or store.vault.encrypts:
        return {}
    if (full := store.over_quota(kernel.home.kernel_id, _CODE_PART * most)) is not None:  # this draft counts as used
        most = (full.details.get("allowed", 0) - full.details.get("used", 0)) // _CODE_PART
    if most <= 0:
        return {}
    try:
        draft.reserve(draft.size() + most)
    except errors.QuotaExceeded:
        return {}
    points, free = store.unencrypted_save_points(), (store.free() - preflight.MARGIN) // _CODE_PART
    kept = kept_files.keep_code(code, draft.criu_directory / layout.KEPT, most, free, points)
    draft.add_hashed(kept_files.entries(kept))
    return kept


def _manifest(attempt: Attempt) -> Manifest:
    """Return the manifest of a fresh dump, but for its files and what the next steps take."""
    kernel, draft, clocks, saved = attempt.kernel, attempt.draft, attempt.clocks, attempt.kernel.saved
    home, engine, capsule = kernel.home, kernel.engine, kernel.require_capsule()
    assert draft is not None and clocks is not None
    return Manifest(
        id=draft.id,
        kernel_id=home.kernel_id,
        created=time.time(),
        kernel_name=home.kernel_name,
        uid=os.geteuid(),
        hostname=socket.gethostname(),
        pid=capsule.inner_pid,
        pipes=capsule.pipes,
        monotonic=clocks.monotonic,
        boottime=clocks.boottime,
        runtime_dir=str(home.inner_dir),
        criu_version=engine.criu_version,
        report=saved.report,
        device_bytes=saved.device_bytes,
        node_gpus=saved.node_gpus,
        cuda=saved.cuda,
        generation=engine.store.generations.next_generation(home.kernel_id, kernel.generation),
        fingerprint=attempt.fingerprint | {"sockets": _sockets(attempt)},
        notes=attempt.notes,
        swapped_bytes=attempt.swapped_bytes,
        has_digests=attempt.has_digests,
        save_point=_save_point(attempt),
    )


def _save_point(attempt: Attempt) -> dict[str, Any] | None:
    """Return what makes the image a save point, with the agent's summary; None for one that is no save point."""
    if attempt.save_point is None:
        return None
    facts = {**attempt.save_point.as_dict(), "parent": attempt.kernel.parent}
    summary = attempt.kernel.saved.report.get("summary")
    if not summary:  # nobody knows the variables: without an agent, or if it failed
        return {**facts, "left_out": 1}
    known = {name: summary[name] for name in ("cell", "variables", "left_out") if name in summary}
    return {**facts, **known}


def _fingerprint(attempt: Attempt, directory: Path, regular_files: Iterable[images.RegularFile]) -> dict[str, Any]:
    """Return the fingerprint of the dump in ``directory``.  Raises `ImageFormat`, `CudaError`."""
    engine, saved = attempt.kernel.engine, attempt.kernel.saved
    shared, program = f"{attempt.kernel.home.inner_dir}/{shared_memory.DIRECTORY}/", root_program.path_of(directory)
    files = [each for each in regular_files if not each.path.startswith(shared)]
    pages = sum(path.stat().st_size for path in directory.glob(layout.PAGES))
    return fingerprint(
        files=(vars(file) for file in files if file.path != program),  # it is in the image, as the shared ones
        ports=map(dataclasses.asdict, images.ports(directory)),
        criu=engine.criu_version,
        hashes=engine.store.hashes,
        gpus=[dataclasses.asdict(gpu) for gpu in engine.gpus.list()] if saved.cuda else [],
        cuda=saved.cuda,
        device_bytes=saved.device_bytes,
        memory=attempt.swapped_bytes + pages + attempt.dropped_bytes - attempt.shared_bytes,
        open_files=descriptors.needed_limit(images.highest_descriptor(directory)),
        continues=attempt.continues,
    )


def _sockets(attempt: Attempt) -> list[dict[str, Any]]:
    """Return the unix sockets with a file where others may have one, too: a restore creates them again.

    ``directory``: mode, owner and group of the directory that each is in; ``alone``: it is one of `multiprocessing`'s,
    in which nobody else has anything.  Of another directory nobody knows what the program will put there.
    """
    own = attempt.kernel.home.unshared_sockets
    found = (socket for process in attempt.notes.values() for socket in process.get("sockets", {}).values())
    paths = [each["path"] for each in found if "path" in each and not each["path"]["path"].startswith(own)]
    by_directory: dict[Path, set[str]] = {}
    for each in paths:
        by_directory.setdefault(Path(each["path"]).parent, set()).add(Path(each["path"]).name)
    directories: dict[Path, dict[str, Any]] = {}
    for path, names in by_directory.items():
        directories[path] = {"directory": [], "alone": False}
        with contextlib.suppress(OSError):
            facts = path.stat()
            mode = stat.S_IMODE(facts.st_mode)
            private = path.name.startswith(_MULTIPROCESSING) and mode == 0o700 and facts.st_uid == os.geteuid()
            alone = private and not _others(path, names)
            directories[path] = {"directory": [mode, facts.st_uid, facts.st_gid], "alone": alone}
    return [{**each, **directories[Path(each["path"]).parent]} for each in paths]


def _others(directory: Path, names: set[str]) -> bool:
    """Return whether there is anything else than sockets of these names, and those that no process has any more."""
    others = [path for path in directory.iterdir() if path.name not in names]
    return any(not path.is_socket() or is_bound(str(path)) for path in others)


def end_process(attempt: Attempt) -> None:
    """End the process, after a dump or as the undo of a restore."""
    kernel = attempt.kernel
    host_memory.end_read(attempt)  # of a restore that is undone
    try:
        if kernel.capsule is not None:
            pids = kernel.capsule.processes()
            let_ports_be_rebound(pids)
            connections.abort_at_end(pids)
            try:
                kernel.capsule.close()
            finally:
                host_memory.end_spill(kernel)
            kernel.capsule = None
        if kernel.image is not None and attempt.lease is None:
            with contextlib.suppress(OSError):  # a claim whose process is gone is void all the same
                (kernel.completion or kernel.image).withdraw_claim()
    except Exception as error:
        # The process may be gone already, and its image must not be removed.
        raise PartlyDone from error


def continue_(attempt: Attempt) -> None:
    """Let the stopped processes run on, after the dump of a save point or to undo any dump, whose draft goes then.

    The save point of a kernel that has ended since its dump is kept instead.
    """
    if attempt.unwinding and not _kept_without_kernel(attempt):
        draft, attempt.draft = attempt.draft, None
        if draft is not None:
            draft.discard()
    _resume_processes(attempt)
    if attempt.unrepaired:
        attempt.changed_settings.append(attempt.unrepaired)


def _kept_without_kernel(attempt: Attempt) -> bool:
    """Return whether the kernel has ended since the dump of its save point, which is all that is left of it: keep that.

    Not that of a kernel that its owner ends.
    """
    kernel, capsule = attempt.kernel, attempt.kernel.require_capsule()
    if not attempt.continues or attempt.manifest is None or kernel.is_being_ended:
        return False
    try:
        capsule.clocks()
    except errors.CapsuleGone:
        capsule.wait(ANSWER)  # the init's connection ends before its processes do
    except errors.CapsuleError:
        return False
    if capsule.poll() is None:
        return False
    try:
        with kernel.trace.step(Step.KEEP.value) as attempt.traced:
            keep(attempt)
    except (GpuCkptError, OSError) as error:
        _log.warning("Kernel %s has ended, and its save point could not be kept: %s", kernel.home.kernel_id, error)
        return False
    return True


def _resume_processes(attempt: Attempt) -> None:
    """Let the processes run that a dump has left stopped; note what they have lost by it."""
    attempt.unrepaired = attempt.kernel.require_capsule().resume_processes()
    if attempt.unrepaired:
        message = "Kernel %s could not be repaired after its dump: %s"
        _log.warning(message, attempt.kernel.home.kernel_id, attempt.unrepaired)
