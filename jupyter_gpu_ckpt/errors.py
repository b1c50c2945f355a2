"""Every error this project raises: one tree with stable codes, a hint, and what was left behind.

The ``code`` of an error is the same in the command line's JSON, in REST replies and in events, and never changes its
meaning.  ``hint`` says what the reader can do.  ``left`` says in which state things are, because the first question
after a failed checkpoint is "is my work still there?".

``criu/``, ``cuda/`` and ``kernel/`` map errors of CRIU, of the CUDA driver and of the kernel to these classes; no other
code reads foreign error texts.
"""

from __future__ import annotations

import errno
import shlex
from collections.abc import Sequence
from typing import Any, ClassVar

from .terminal_text import printable

#: Numbers of errors for lack of space on a disk: of the disk's, or of the user's quota.
FULL = (errno.ENOSPC, errno.EDQUOT)


class GpuCkptError(Exception):
    """An error without a code of its own.

    Base of all errors of this project.

    Parameters
    ----------
    message:
        What happened, in one sentence that a notebook user understands.
    hint:
        What to do about it; the class's own hint by default.  ``{image}`` stands for the image's id (``details``).
    left:
        What was left behind: "the kernel is running", "the image is kept as ...".
    details:
        Further facts for programs (pids, paths, bytes); must be JSON-serialisable.
    """

    code: ClassVar[str] = "INTERNAL"
    exit_status: ClassVar[int] = 70
    default_hint: ClassVar[str] = "Please report this with the server's log."

    def __init_subclass__(cls, *, code: str | None = None, exit_status: int | None = None) -> None:
        super().__init_subclass__()
        cls.code = code or cls.code
        cls.exit_status = exit_status or cls.exit_status

    def __init__(self, message: str, *, hint: str | None = None, left: str = "", **details: Any) -> None:
        # It may contain names of files and commands, which must not control the terminal it is shown in.
        self.message = printable(message)
        super().__init__(self.message)
        self._hint = self.default_hint if hint is None else printable(hint)
        self.left = left
        self.details = details

    @property
    def hint(self) -> str:
        """Return what the reader can do, with commands that can be run as they are."""
        return self.filled(self._hint, self.details.get("image"))

    @hint.setter
    def hint(self, hint: str) -> None:
        self._hint = hint

    @staticmethod
    def filled(hint: str, image: str | None) -> str:
        """Return ``hint`` with the id of the image, if it is known, in the place of ``{image}``."""
        if "{image}" not in hint:
            return hint
        if image:
            return hint.replace("{image}", printable(shlex.quote(image)))
        return f"{hint.replace('{image}', 'IMAGE')} (`jupyter gpu-ckpt list` shows the ids of images.)"

    @classmethod
    def from_exception(cls, error: BaseException) -> GpuCkptError:
        """Return ``error`` itself where it is one of these, else an error that names it.

        That is a `NoSpace` if a disk is full, a `LimitReached` if this process has got no memory, descriptor or thread,
        else one of the base class.
        """
        if isinstance(error, GpuCkptError):
            return error
        if isinstance(error, RuntimeError) and "start new thread" in str(error):
            return LimitReached(_NO_MORE.format("threads"))
        if isinstance(error, OSError) and error.errno in FULL:
            where = f" of {error.filename}" if error.filename else ""
            return NoSpace(f"The disk{where} is full.")
        number = errno.ENOMEM if isinstance(error, MemoryError) else error.errno if isinstance(error, OSError) else None
        return LimitReached.from_errno(number) or GpuCkptError(f"{type(error).__name__}: {error}")

    def __str__(self) -> str:
        parts = [f"[{self.code}] {self.message}"]
        if self.left:
            parts.append(f"Left behind: {printable(self.left)}.")
        if self.hint:
            parts.append(f"Hint: {self.hint}")
        return " ".join(parts)

    def substitute(self, old: str, new: str) -> None:
        """Replace ``old`` in all texts of the error, those of its details among them."""

        def substituted(value: Any) -> Any:
            if isinstance(value, str):
                return value.replace(old, new)
            if isinstance(value, list):
                return [substituted(each) for each in value]
            if isinstance(value, dict):
                return {name: substituted(each) for name, each in value.items()}
            return value

        self.message, self._hint = substituted(self.message), substituted(self.hint)
        self.left, self.details = substituted(self.left), substituted(self.details)

    def as_dict(self) -> dict[str, Any]:
        """Return the error as JSON-serialisable data, the same in REST, events and ``--json``."""
        return {name: getattr(self, name) for name in ("code", "message", "hint", "left", "details")}


# -- the host cannot do it --------------------------------------------------------------------------------------------


class HostError(GpuCkptError, code="HOST_UNFIT", exit_status=69):
    """This host lacks something; ``jupyter gpu-ckpt doctor`` names the command that repairs it."""

    default_hint = "Run `jupyter gpu-ckpt doctor`: it names what is missing and the command that repairs it."


class CriuMissing(HostError, code="CRIU_MISSING"):
    """No working version of CRIU was found."""

    default_hint = "Run `jupyter gpu-ckpt install-criu`; it needs no root rights."


class CapsuleError(HostError, code="CAPSULE_FAILED"):
    """The namespaces of a capsule could not be created, or its init does not answer."""


class RuntimeDirectory(CapsuleError, code="RUNTIME_DIRECTORY", exit_status=73):
    """The directory of the kernel's sockets is gone, full or read-only."""

    default_hint = (
        "Free space in it or make it writable again, then try again; or set another directory "
        "(GpuCkptProvisioner.runtime_base) and restart the server; sleeping kernels are kept."
    )


class KernelUnfit(GpuCkptError, code="KERNEL_UNFIT", exit_status=69):
    """The kernel ended before its first reply; it was started again without a capsule and cannot be checkpointed."""

    default_hint = "It works, but it cannot be checkpointed. Its output before it ended is in the server's log."


# -- this kernel cannot be checkpointed now ---------------------------------------------------------------------------


class PreflightError(GpuCkptError, code="NOT_NOW", exit_status=75):
    """The kernel cannot be checkpointed now, because of what it has open or does; its state is unchanged."""

    default_hint = "Try again later."


class KernelBusy(PreflightError, code="KERNEL_BUSY"):
    """The kernel still works on requests at the deadline, or a thread of it cannot be stopped safely."""

    default_hint = "Wait for the running cell, or interrupt it, and try again."
    hint_for_input: ClassVar[str] = "Answer its prompt (input(), a debugger), or interrupt the cell, and try again."


class BranchDiffers(PreflightError, code="BRANCH_DIFFERS"):
    """State of the kernel cannot exist twice, so a branch of it would have it otherwise."""

    default_hint = (
        "Close it in the kernel and save again, or accept the differences and begin the branch without it "
        "(`--accept-differences`)."
    )


class BranchUnsafe(PreflightError, code="BRANCH_UNSAFE"):
    """Two kernels that continue from the same state would damage something."""

    default_hint = "End it in the kernel, save again, and begin the branch from there."


class ChildProcesses(PreflightError, code="CHILD_PROCESSES"):
    """The kernel has child processes that cannot be saved with it."""

    default_hint = "End these child processes and try again; or suspend the kernel."


class DebuggerAttached(PreflightError, code="DEBUGGER_ATTACHED"):
    """The kernel's debugger is in use; its adapter is a process that cannot be saved."""

    default_hint = "Turn the debugger off (the bug button) and try again."


class LoopbackTcp(PreflightError, code="LOOPBACK_TCP"):
    """A TCP connection within the kernel has unread bytes that could not come back."""

    default_hint = (
        "Have its reader read them, or close the connection; a suspend, which frees the GPU, is possible meanwhile."
    )


class UnprovenState(PreflightError, code="UNPROVEN_STATE"):
    """The kernel has state of a kind that is not proven to survive a checkpoint."""

    default_hint = "Close it, or use it in a separate process that ends, and try again."


class UnsupportedTerminal(PreflightError, code="TERMINAL_UNSUPPORTED"):
    """The kernel has a pseudo-terminal that could not be restored."""

    default_hint = "Close unused pseudo-terminals (pexpect: `child.close()`), or read the output that waits in them."


class DeviceHeld(PreflightError, code="DEVICE_HELD"):
    """The process has a GPU device file open that is not CUDA's (NVML, graphics) and cannot be saved."""

    default_hint = "Close it (for NVML: pynvml.nvmlShutdown()) and try again."


class UnsupportedCuda(PreflightError, code="CUDA_UNSUPPORTED"):
    """The CUDA driver cannot suspend the kernel's CUDA state, for a reason that it does not give."""

    default_hint = (
        "Free what the driver is known not to save: managed (UVM) memory, memory shared with other processes "
        "(CUDA IPC). If nothing helps, save what you need to a file and restart the kernel."
    )


class ProfilerUsed(UnsupportedCuda, code="PROFILER_USED"):
    """A CUDA profiler (CUPTI: `torch.profiler`) was used; the driver does not checkpoint the process any more."""

    default_hint = (
        "For checkpoints, profile in a kernel of its own, and restart this one after saving what you need to a file."
    )


class ManagedMemory(UnsupportedCuda, code="MANAGED_MEMORY"):
    """The kernel has managed (unified) memory, which the driver does not checkpoint."""

    default_hint = (
        "For checkpoints, free it, or use device memory: CuPy's ordinary pool, RMM without managed memory "
        "(CUDF_PANDAS_RMM_MODE=pool), bitsandbytes' optimisers that are not paged."
    )


class NcclPeers(UnsupportedCuda, code="NCCL_PEERS"):
    """Processes of the kernel communicate by NCCL, and while one is locked the CUDA driver does not lock the other."""

    default_hint = "End the group (torch.distributed.destroy_process_group(), or its processes) and try again."


class SharedDeviceMemory(UnsupportedCuda, code="CUDA_IPC"):
    """Processes of the kernel share device memory (CUDA IPC), which the driver does not suspend in several of them."""

    default_hint = "Send tensors through host memory (tensor.cpu()), or end the processes that use the kernel's."


class MultiInstanceGpu(UnsupportedCuda, code="MIG"):
    """The kernel uses a part of a GPU (MIG), which this driver does not suspend."""

    default_hint = "Use a whole GPU: an administrator turns MIG off (`nvidia-smi -mig 0`)."


class MultiProcessService(UnsupportedCuda, code="MPS"):
    """The kernel shares its GPU by CUDA's multi-process service (MPS), which this driver does not suspend."""

    default_hint = "Start the kernel without MPS (CUDA_MPS_PIPE_DIRECTORY), or have an administrator end its daemon."


# -- resources ---------------------------------------------------------------------------------------------------


class InsufficientResources(GpuCkptError, code="INSUFFICIENT_RESOURCES", exit_status=75):
    """Disk space, the quota or host memory does not suffice."""

    default_hint = "Free disk space or host memory, and try again."


class NoSpace(InsufficientResources, code="NO_SPACE"):
    """There is too little disk space."""

    default_hint = "Free disk space and try again; or set another image directory."


class QuotaExceeded(InsufficientResources, code="QUOTA_EXCEEDED"):
    """The user's sleeping kernels would exceed their quota."""

    default_hint = (
        "Shut down kernels that you do not need, delete their images (`jupyter gpu-ckpt list`, `rm`, `prune`), or "
        "free memory in this one. The administrator sets the limits: image_quota and sleeping_quota."
    )


class NoMemory(InsufficientResources, code="NO_MEMORY"):
    """There is too little host memory for the kernel's device memory or for decrypted files."""

    default_hint = "Free host memory (end or checkpoint another kernel) and try again."


class LimitReached(InsufficientResources, code="LIMIT_REACHED"):
    """The kernel or its server has reached a limit: of open files, threads, processes or memory."""

    default_hint = (
        "Close files, end threads or child processes, or free memory in the kernel, or have its limits raised (ulimit, "
        "resource.setrlimit, its control group), and try again."
    )

    @classmethod
    def from_errno(cls, number: int | None) -> LimitReached | None:
        """Return the error for an errno(3) that says that this process has reached a limit; None for others."""
        return cls(_NO_MORE.format(_LACKING[number])) if number in _LACKING else None


#: What a process gets no more of, by the number of an error; the agent's own are in `agent.limits`.
_LACKING = {
    errno.ENOMEM: "memory",
    errno.EMFILE: "file descriptors",
    errno.ENFILE: "file descriptors",
    errno.EAGAIN: "threads or processes",
}
_NO_MORE = "The server, or the kernel, has reached a limit: it gets no more {}."


# -- states -----------------------------------------------------------------------------------------------------------


class StateError(GpuCkptError, code="WRONG_STATE", exit_status=65):
    """The request is not possible in the kernel's present state."""

    default_hint = "Wait until what is under way has ended. A page may show an older state until it is reloaded."


class BadRequest(GpuCkptError, code="BAD_REQUEST", exit_status=64):
    """The request itself is malformed."""

    default_hint = "Correct the request; the message names the error."


class CapsuleGone(GpuCkptError, code="CAPSULE_GONE"):
    """The capsule of one kernel ended, and every process in it; the host can run others."""

    default_hint = "Restart the kernel, or run a cell to try again if its image is kept."


class KernelLost(GpuCkptError, code="KERNEL_LOST"):
    """The kernel's process ended, and no image brings it back by itself."""

    default_hint = "Restart the kernel; it starts without its variables."


class ProtocolVersion(GpuCkptError, code="PROTOCOL_VERSION", exit_status=76):
    """Another release of this package started the kernel or wrote its session, in a version this one cannot use."""

    default_hint = (
        "Use or end the kernel with the release of jupyter_gpu_ckpt that started it; it stays unchanged until then."
    )


# -- CUDA -------------------------------------------------------------------------------------------------------------


class CudaError(GpuCkptError, code="CUDA_FAILED", exit_status=71):
    """The CUDA driver refused a suspend or resume."""

    default_hint = (
        "Try again. If it repeats, an administrator finds the driver's messages in the system's log (`journalctl -k -g "
        "NVRM`). To continue at once, restart the kernel, which loses its variables."
    )


class CudaUnavailable(CudaError, code="CUDA_UNAVAILABLE"):
    """The driver, or the Python bindings for it, cannot checkpoint processes on this host."""

    default_hint = "Install the extra: pip install 'jupyter_gpu_ckpt[gpu]'; the driver must be 580 or newer."


class DriverTooOld(CudaUnavailable, code="DRIVER_TOO_OLD"):
    """The NVIDIA driver is older than its functions that suspend processes."""

    default_hint = "An administrator updates the NVIDIA driver to 580 or newer."


class CudaTimeout(CudaError, code="CUDA_TIMEOUT"):
    """The driver did not stop the process's CUDA work before the deadline."""

    default_hint = "A kernel on the GPU is still running; wait for it and try again."


class GpuFull(CudaError, code="GPU_FULL", exit_status=75):
    """There is too little free memory on the GPU to wake the kernel; it was not tried."""

    default_hint = "Nothing is lost. Free memory on the GPU (checkpoint another kernel) and run a cell again."


class GpuWaitCancelled(CudaError, code="GPU_WAIT_CANCELLED", exit_status=75):
    """The kernel waited for a GPU that it shares, and its place in the queue was given back."""

    default_hint = "Nothing is lost. Run a cell to wait again."


class HelperGone(CudaError, code="HELPER_GONE"):
    """The helper process that calls the CUDA driver ended in the middle of a call."""

    default_hint = "Try again; the next call starts a new helper."


# -- CRIU -------------------------------------------------------------------------------------------------------------


class CriuError(GpuCkptError, code="CRIU_FAILED", exit_status=71):
    """CRIU failed for a reason without a code of its own, which the message quotes."""

    default_hint = (
        "Try again. If it repeats, close what the kernel has open besides plain files (devices, watchers, sockets), "
        "and report it with this message."
    )


class ProcessEnded(CriuError, code="PROCESS_ENDED"):
    """A child process of the kernel ended while the image was written, which does not show how it ended."""

    default_hint = (
        "Try again. If it repeats, look for what ends the kernel's processes: `journalctl -k` shows whether the host "
        "ran out of memory."
    )

    @classmethod
    def during_dump(cls, pids: Sequence[int | str], **details: Any) -> ProcessEnded:
        """Return the error for these processes, by their pids in the capsule."""
        names = " and ".join(f"process {pid}" for pid in pids)
        return cls(f"Of the kernel, {names} ended during the checkpoint.", ended=list(pids), **details)


class DumpInterrupted(CriuError, code="DUMP_INTERRUPTED"):
    """A signal interrupted the dump in a process of the kernel, at each of several tries."""

    default_hint = (
        "Try again. If it repeats, end for the checkpoint what sends signals to that process: a periodic timer "
        "(setitimer, timer_create), a sampling profiler."
    )


class CriuTimeout(CriuError, code="CRIU_TIMEOUT"):
    """CRIU did not finish before its deadline."""

    default_hint = (
        "The deadline is one minute plus the time for the kernel's bytes at GpuCkptProvisioner.slowest_rate (bytes per "
        "second). Lower that rate if the storage is slower."
    )


class CriuKilled(CriuError, code="CRIU_KILLED"):
    """CRIU was ended by a signal."""

    default_hint = "Check whether the host ran out of memory, and try again."


class ChangedFile(CriuError, code="FILE_CHANGED"):
    """A file that the kernel has open or mapped was changed while the kernel slept."""

    default_hint = (
        "Restore the file as it was at the checkpoint, then try again. `jupyter gpu-ckpt match {image}` names every "
        "such file, and with --accept-changed-files the kernel continues with them as they are now, where that can be."
    )


class MissingFile(CriuError, code="FILE_MISSING"):
    """A file that the kernel has open or mapped does not exist any more."""

    default_hint = "Restore the file, then try again."


class PortTaken(CriuError, code="PORT_TAKEN"):
    """A TCP or UDP port of the kernel is in use."""

    default_hint = "If another process uses the port, end it; closed connections free it after a minute."


class LockTaken(CriuError, code="LOCK_TAKEN"):
    """A lock that the kernel had on a file cannot be set again: another process has locked the file meanwhile."""

    default_hint = "End the program that has locked the file (`lslocks` shows it), or let it finish, then try again."


class SocketTaken(CriuError, code="SOCKET_TAKEN"):
    """The path of a unix socket of the kernel belongs to another process now."""

    default_hint = "End the process that listens there, remove the socket's file, then try again."


class PipesExhausted(CriuError, code="PIPES_EXHAUSTED", exit_status=75):
    """The user's processes have too many pipes open for CRIU to create those it needs."""

    default_hint = (
        "Try again when fewer kernels are checkpointed at once, or end programs with many pipes. An administrator "
        "can raise the limit: sysctl fs.pipe-user-pages-soft."
    )


class PidTaken(CriuError, code="PID_TAKEN"):
    """A process id of the kernel is in use."""

    default_hint = "Try again: each try has a PID namespace of its own. If it repeats, report it with the server's log."


class DeletedMapping(CriuError, code="DELETED_MAPPING"):
    """The kernel maps a deleted file, which cannot be saved without root rights."""

    default_hint = "Close the object that uses it (shared memory, memory-mapped temporary files) and try again."


class UnsupportedSocket(CriuError, code="SOCKET_UNSUPPORTED"):
    """The kernel has a socket of a kind that cannot be saved."""

    default_hint = "Close the socket and try again."


class UnsupportedFile(CriuError, code="FILE_UNSUPPORTED"):
    """The kernel has a file open of a kind that cannot be saved (device, pseudo file, foreign mount)."""

    default_hint = "Close the file and try again."


# -- images -----------------------------------------------------------------------------------------------------------


class ImageError(GpuCkptError, code="IMAGE_UNUSABLE", exit_status=66):
    """The image cannot be used."""

    default_hint = "`jupyter gpu-ckpt list` shows all images."


class ImageNotFound(ImageError, code="IMAGE_NOT_FOUND"):
    """There is no such image."""


class SavePointNotFound(ImageNotFound, code="SAVE_POINT_NOT_FOUND"):
    """The kernel has no save point of this name."""

    default_hint = "`jupyter gpu-ckpt list` shows the save points of all kernels."


class TemplateNotFound(ImageNotFound, code="TEMPLATE_NOT_FOUND"):
    """There is no template of this name."""

    default_hint = "`jupyter gpu-ckpt template list` shows the templates."


class SavePointExists(ImageError, code="SAVE_POINT_EXISTS"):
    """The kernel has a save point of this name already."""

    default_hint = "Choose another name, or delete that save point first."


class FilesDiffer(ImageError, code="FILES_DIFFER"):
    """Files that the kernel had open at the save point are not as they were, and nobody has chosen which it gets."""

    default_hint = (
        "Choose for each, or for all: as it was then, which replaces it (`--files then`), or as it is now "
        "(`--files now`)."
    )


class NotebookNotReplaced(ImageError, code="NOTEBOOK_NOT_REPLACED"):
    """The kernel's notebook cannot be replaced by that of the save point, or was not: one is missing or was changed."""

    default_hint = "Save the notebook and go back once more, or go back without the notebook."


class ImageBusy(ImageError, code="IMAGE_BUSY"):
    """The image is being used by another process."""

    default_hint = "Wait until the restore of this image has ended."


class ImageFormat(ImageError, code="IMAGE_FORMAT"):
    """The manifest is damaged, or of an unknown version."""

    default_hint = (
        "If a newer version of this package wrote it, use that; else `jupyter gpu-ckpt rm {image}` deletes it."
    )


class ImageDamaged(ImageError, code="IMAGE_DAMAGED"):
    """The image's files are not those of its manifest: changed, cut short, missing, or not plain files."""

    default_hint = (
        "It cannot be restored. Copy it again if another copy exists; `jupyter gpu-ckpt rm {image}` deletes it."
    )


class ImageForged(ImageError, code="IMAGE_FORGED"):
    """The image's manifest has no valid seal by this user's keys: it was edited, or is another user's."""

    default_hint = (
        "If it is from another machine of yours, copy that machine's keys (`jupyter gpu-ckpt keys` lists them). If you "
        "know that it is unchanged, `jupyter gpu-ckpt seal {image}` seals it as it is."
    )


class ImageStale(ImageError, code="IMAGE_STALE"):
    """The image is outdated: its kernel has run on since, or has a newer image."""

    default_hint = "`jupyter gpu-ckpt rm {image}` deletes it."


class KeyUnusable(ImageError, code="KEY_UNUSABLE", exit_status=77):
    """A key that seals or encrypts images cannot be read or created."""

    default_hint = "Only you may have access to the keys: set the directory to 0700, its files to 0600."


class NodeUnfit(ImageError, code="NODE_UNFIT", exit_status=69):
    """This node lacks something that the image needs; the kernel was not restored."""

    default_hint = "`jupyter gpu-ckpt match {image}` lists what is missing here."


class ImageArchived(ImageError, code="IMAGE_ARCHIVED"):
    """The content of the image is in the cold tier and could not be fetched."""

    default_hint = "A wake fetches it; the server's GpuCkptProvisioner.archive_url must be that of its archive."


class RemoteUnsupported(ImageError, code="REMOTE_UNSUPPORTED", exit_status=69):
    """The package for this kind of URL is not installed."""

    default_hint = "pip install 'jupyter_gpu_ckpt[s3]', [sftp] or [remote]; for gs: [remote] and gcsfs."


class RemoteFailed(ImageError, code="REMOTE_FAILED", exit_status=74):
    """The shared directory, object store or server for images failed."""

    default_hint = "Nothing is lost. Try again; transferred parts are not sent twice."


class StoreUnwritable(ImageError, code="STORE_UNWRITABLE", exit_status=73):
    """The image directory cannot be read or written."""

    default_hint = "Check the directory's owner, mode and mount, or set another image directory."


class StoreShared(ImageError, code="STORE_SHARED", exit_status=73):
    """Other users can access or replace the directory of images or decrypted files; it was not changed."""

    default_hint = (
        "Set a directory that does not exist yet, for instance one below it: it is created for you alone. "
        "If nobody else needs the present one, `chmod 700` it."
    )


class StoreUnsuitable(ImageError, code="STORE_UNSUITABLE", exit_status=73):
    """The file system of the image directory lacks hard links, without which a kernel could be restored twice."""

    default_hint = (
        "Set an image directory (GpuCkptProvisioner.image_dir) on a file system with hard links: ext4, XFS, Btrfs, "
        "tmpfs, NFS. One without (FAT, a mounted object store) can be the cold tier: GpuCkptProvisioner.archive_url."
    )


# -- a hub and its users' servers -------------------------------------------------------------------------------------


class HubError(GpuCkptError, code="HUB_FAILED"):
    """A hub or a service of it could not drain a user's server; kernels that were not saved were not stopped."""


class ServerSilent(HubError, code="SERVER_SILENT", exit_status=75):
    """The user's server, or the proxy before it, does not answer, or draining it took longer than its deadline."""

    default_hint = "Check the server's log. A drain that was started continues there, and the next try joins it."


class ServerRefused(HubError, code="SERVER_REFUSED", exit_status=69):
    """The user's server refused the request."""

    default_hint = "Check the server's log."


# -- the gate and the agent -------------------------------------------------------------------------------------------


class GateError(GpuCkptError, code="GATE_FAILED"):
    """The gate between the clients and the kernel failed."""


class KernelSilent(GateError, code="KERNEL_SILENT"):
    """The kernel did not reply before the deadline."""

    default_hint = "Interrupt or restart the kernel."


class KernelAsleep(GateError, code="KERNEL_ASLEEP"):
    """The kernel sleeps, and too many messages wait for it already."""

    default_hint = "Wait until the kernel is awake, or check why it does not wake, and send the message again."


class AgentError(GateError, code="AGENT_FAILED"):
    """The agent inside the kernel failed, or is missing."""

    default_hint = "Try again. If it repeats, save what you need to a file and restart the kernel."
