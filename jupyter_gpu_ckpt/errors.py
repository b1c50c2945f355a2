"""Every error this project raises: one tree, stable codes, a hint, and what was left behind.

The ``code`` of an error is the same in the command line's JSON, in exit statuses, in REST replies and in events, and
it never changes its meaning.  ``hint`` says what the reader can do.  ``left`` says in what state things were left,
because the first question of somebody who sees a failed checkpoint is "is my work still there?".

Errors of the outside (CRIU, the CUDA driver, the kernel) are mapped to these classes inside ``engine/``, by class and
number; nothing above it reads foreign error texts.
"""

from __future__ import annotations

from typing import Any, ClassVar

from .terminal_text import printable


class GpuCkptError(Exception):
    """Something went wrong that has no code of its own.

    Base of all errors of this project.

    Parameters
    ----------
    message:
        What happened, in one sentence that a notebook user understands.
    hint:
        What to do about it; the class's own hint by default.
    left:
        What is left behind: "the kernel is running", "the image is kept as ...".
    details:
        Further facts for programs (pids, paths, bytes), as they are; must be JSON-serialisable.
    """

    code: ClassVar[str] = "INTERNAL"
    exit_status: ClassVar[int] = 70
    default_hint: ClassVar[str] = "Please report this with the log of the server."

    def __init__(self, message: str, *, hint: str | None = None, left: str = "", **details: Any) -> None:
        # Names of files and commands are in it, and end in terminals: whoever chose them is not to write there.
        self.message = printable(message)
        super().__init__(self.message)
        self.hint = self.default_hint if hint is None else printable(hint)
        self.left = left
        self.details = details

    @classmethod
    def from_exception(cls, error: BaseException) -> GpuCkptError:
        """Return ``error`` itself where it is one of these, else an error of the base class that names it."""
        return error if isinstance(error, GpuCkptError) else GpuCkptError(f"{type(error).__name__}: {error}")

    def __str__(self) -> str:
        parts = [f"[{self.code}] {self.message}"]
        if self.left:
            parts.append(f"Left behind: {printable(self.left)}.")
        if self.hint:
            parts.append(f"Hint: {self.hint}")
        return " ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """The error as JSON-serialisable data, the same in REST, events and ``--json``."""
        return {
            "code": self.code,
            "message": self.message,
            "hint": self.hint,
            "left": self.left,
            "details": self.details,
        }


# -- the host cannot do it --------------------------------------------------------------------------------------------


class HostError(GpuCkptError):
    """This host lacks something; ``jupyter gpu-ckpt doctor`` names the command that mends it."""

    code = "HOST_UNFIT"
    exit_status = 69
    default_hint = "Run `jupyter gpu-ckpt doctor`: it names what is missing and the command that mends it."


class CriuMissing(HostError):
    """No CRIU of a version that works was found."""

    code = "CRIU_MISSING"
    default_hint = "Run `jupyter gpu-ckpt install-criu`; it needs no root."


class CapsuleError(HostError):
    """The namespaces of a capsule could not be made, or its init does not answer."""

    code = "CAPSULE_FAILED"


class RuntimeDirectory(CapsuleError):
    """The directory of the kernel's sockets is gone, full or read-only."""

    code = "RUNTIME_DIRECTORY"
    exit_status = 73
    default_hint = (
        "Make room in it or have it writable again, then try again; or set another one "
        "(GpuCkptProvisioner.runtime_base) and start the server anew, which takes sleeping kernels along."
    )


class KernelUnfit(GpuCkptError):
    """The kernel ended before its first answer; it was started again plainly, and cannot be checkpointed."""

    code = "KERNEL_UNFIT"
    exit_status = 69
    default_hint = "It works, but it cannot be checkpointed. What it said when it ended is in the server's log."


# -- this kernel cannot be checkpointed now ---------------------------------------------------------------------------


class PreflightError(GpuCkptError):
    """The kernel cannot be checkpointed at this moment, for what it has or does; it stays in the state it was in."""

    code = "NOT_NOW"
    exit_status = 75
    default_hint = "Try again later."


class KernelBusy(PreflightError):
    """Requests are still being worked on after the drain deadline."""

    code = "KERNEL_BUSY"
    default_hint = "Wait for the running cell, or interrupt it, and try again."


class ChildProcesses(PreflightError):
    """The kernel has living child processes that cannot travel with it."""

    code = "CHILD_PROCESSES"
    default_hint = "End child processes (pools, DataLoader workers, commands) and try again."


class DebuggerAttached(PreflightError):
    """The kernel's debugger is in use; its adapter lives outside the process tree."""

    code = "DEBUGGER_ATTACHED"
    default_hint = "Turn the debugger off (the bug button) and try again."


class UnprovenState(PreflightError):
    """The kernel has state of a kind that is not proven to come back from a checkpoint."""

    code = "UNPROVEN_STATE"
    default_hint = "Do without it, or do it in a process of its own that ends, and try again."


class UnsupportedTerminal(PreflightError):
    """The kernel has a pseudo-terminal that could not be made again."""

    code = "TERMINAL_UNSUPPORTED"
    default_hint = "Close pseudo-terminals that are no longer used (pexpect: `child.close()`), or read what is in them."


class DeviceHeld(PreflightError):
    """The process holds a GPU device file that is not CUDA's (NVML, graphics) and cannot be saved."""

    code = "DEVICE_HELD"
    default_hint = "Close it (for NVML: pynvml.nvmlShutdown()) and try again."


class UnsupportedCuda(PreflightError):
    """The CUDA state is of a kind the driver cannot suspend (managed memory, IPC, MIG, MPS)."""

    code = "CUDA_UNSUPPORTED"
    default_hint = "Free managed (UVM) memory and CUDA IPC handles; MIG and MPS are not supported by this driver."


# -- there is too little of something --------------------------------------------------------------------------------


class InsufficientResources(GpuCkptError):
    """The disk, the quota or host memory is too small; found out beforehand, or in the middle of a dump or a wake."""

    code = "INSUFFICIENT_RESOURCES"
    exit_status = 75
    default_hint = "Free some, and try again."


class NoSpace(InsufficientResources):
    """The disk is too full for what was to be written."""

    code = "NO_SPACE"
    default_hint = "Free disk space and try again; new images can also go to another image directory."


class QuotaExceeded(InsufficientResources):
    """The user's sleeping kernels would take more than they may."""

    code = "QUOTA_EXCEEDED"
    default_hint = (
        "Shut down kernels that you need no more, delete their images (`jupyter gpu-ckpt list`, `rm`, `prune`), or "
        "free memory in this one. The limits are the administrator's: image_quota and sleeping_quota."
    )


class NoMemory(InsufficientResources):
    """Host memory is too small for the device memory, or the decrypted files, that were to go there."""

    code = "NO_MEMORY"
    default_hint = "Free host memory (end or checkpoint another kernel) and try again."


# -- states -----------------------------------------------------------------------------------------------------------


class StateError(GpuCkptError):
    """The request makes no sense in the kernel's present state."""

    code = "WRONG_STATE"
    exit_status = 65
    default_hint = "Look at the kernel's state first."


class BadRequest(GpuCkptError):
    """The request itself is malformed."""

    code = "BAD_REQUEST"
    exit_status = 64
    default_hint = "Correct the request."


class CapsuleGone(GpuCkptError):
    """The capsule of one kernel ended, and every process in it; the host can run others."""

    code = "CAPSULE_GONE"
    default_hint = "Restart the kernel, or run a cell to try again if its image is kept."


class KernelLost(GpuCkptError):
    """The kernel's process ended and the kernel does not come back by itself; an image that is kept is named."""

    code = "KERNEL_LOST"
    default_hint = "Restart the kernel: it begins anew, without its variables."


class ProtocolVersion(GpuCkptError):
    """Another release of this package started the kernel or wrote its session, in a version this one cannot use."""

    code = "PROTOCOL_VERSION"
    exit_status = 76
    default_hint = (
        "Adopt, wake or end the kernel with the release that started it (`pip install jupyter_gpu_ckpt==...`); it is "
        "left as it is until then."
    )


# -- CUDA -------------------------------------------------------------------------------------------------------------


class CudaError(GpuCkptError):
    """The CUDA driver refused a suspend or resume."""

    code = "CUDA_FAILED"
    exit_status = 71
    default_hint = (
        "Try again. If it repeats, an administrator finds the driver's words in the details and in the system's log "
        "(`journalctl -k -g NVRM`); a kernel that must go on meanwhile can be restarted, which loses its variables."
    )


class CudaUnavailable(CudaError):
    """The driver, or the Python bindings for it, cannot checkpoint processes on this host."""

    code = "CUDA_UNAVAILABLE"
    default_hint = "Install the extra: pip install 'jupyter_gpu_ckpt[gpu]'; the driver must be 580 or newer."


class CudaTimeout(CudaError):
    """The driver did not stop the process's CUDA work before the deadline."""

    code = "CUDA_TIMEOUT"
    default_hint = "A kernel on the GPU is still running; wait for it and try again."


class GpuFull(CudaError):
    """Too little free memory on the GPU to bring the kernel back; it was not tried."""

    code = "GPU_FULL"
    exit_status = 75
    default_hint = "Nothing is lost. Free memory on the GPU (checkpoint another kernel) and run a cell again."


class HelperGone(CudaError):
    """The helper process that talks to the CUDA driver ended in the middle of a call."""

    code = "HELPER_GONE"
    default_hint = "It is started afresh by the next call; try again."


# -- CRIU -------------------------------------------------------------------------------------------------------------


class CriuError(GpuCkptError):
    """CRIU failed for a reason that has no class of its own; its last errors are in the details."""

    code = "CRIU_FAILED"
    exit_status = 71
    default_hint = (
        "Try again. If it repeats, close what the kernel has open beyond plain files (devices, watchers, connections), "
        "and report it with the last lines of CRIU's log, which are in the details."
    )


class CriuTimeout(CriuError):
    """CRIU did not finish before its deadline."""

    code = "CRIU_TIMEOUT"
    default_hint = (
        "The deadline is a minute and the time that the kernel's bytes take at GpuCkptProvisioner.slowest_rate "
        "(bytes per second): lower that if the storage is slower."
    )


class CriuKilled(CriuError):
    """CRIU was ended by a signal."""

    code = "CRIU_KILLED"
    default_hint = "Was the host out of memory? Try again."


class ChangedFile(CriuError):
    """A file the kernel holds open or mapped was changed while the kernel was away."""

    code = "FILE_CHANGED"
    default_hint = "Put the file back as it was when the kernel was checkpointed, then try again."


class MissingFile(CriuError):
    """A file the kernel holds open or mapped is not there any more."""

    code = "FILE_MISSING"
    default_hint = "Put the file back, then try again."


class PortTaken(CriuError):
    """A TCP or UDP port the kernel listened on cannot be had now."""

    code = "PORT_TAKEN"
    default_hint = "If another process uses the port, end it; connections that were closed are gone after a minute."


class SocketTaken(CriuError):
    """The path of a unix socket of the kernel belongs to another process now."""

    code = "SOCKET_TAKEN"
    default_hint = "End the process that listens there, remove the socket's file, then try again."


class PipesExhausted(CriuError):
    """The user's processes have more pipes than the system gives an ordinary user; it was tried for a while."""

    code = "PIPES_EXHAUSTED"
    exit_status = 75
    default_hint = (
        "Try again when fewer kernels leave at once, or end what else holds many pipes. An administrator can raise the "
        "limit: sysctl fs.pipe-user-pages-soft."
    )


class PidTaken(CriuError):
    """A process id the kernel needs is in use."""

    code = "PID_TAKEN"


class DeletedMapping(CriuError):
    """The kernel maps a file that was deleted and cannot be saved without root."""

    code = "DELETED_MAPPING"
    default_hint = "Close what uses it (shared memory, memory-mapped temporary files) and try again."


class UnsupportedSocket(CriuError):
    """The kernel holds a socket of a kind that cannot be saved."""

    code = "SOCKET_UNSUPPORTED"
    default_hint = "Close the connection and try again."


class UnsupportedFile(CriuError):
    """The kernel holds a file of a kind that cannot be saved (device, pseudo file, foreign mount)."""

    code = "FILE_UNSUPPORTED"
    default_hint = "Close the file and try again."


# -- images -----------------------------------------------------------------------------------------------------------


class ImageError(GpuCkptError):
    """The image cannot be used."""

    code = "IMAGE_UNUSABLE"
    exit_status = 66
    default_hint = "`jupyter gpu-ckpt list` shows the images there are."


class ImageNotFound(ImageError):
    """There is no such image."""

    code = "IMAGE_NOT_FOUND"


class ImageBusy(ImageError):
    """The image is being used by another process."""

    code = "IMAGE_BUSY"
    default_hint = "Wait until the restore of this image has ended."


class ImageFormat(ImageError):
    """The manifest is damaged, or of a version this release does not know."""

    code = "IMAGE_FORMAT"
    default_hint = "A newer release may read it."


class ImageDamaged(ImageError):
    """The files of the image are not those its manifest lists: changed, cut short, missing, or not plain files."""

    code = "IMAGE_DAMAGED"
    default_hint = "It cannot be restored. Copy it again if there is another copy; `jupyter gpu-ckpt rm` deletes it."


class ImageForged(ImageError):
    """The image's manifest carries no seal of this user's keys: edited, of another user, or of an older release."""

    code = "IMAGE_FORGED"
    default_hint = (
        "If it comes from your other machine, copy that one's keys (`jupyter gpu-ckpt keys` lists them). If you "
        "know that nobody changed it, `jupyter gpu-ckpt seal IMAGE` vouches for it as it is."
    )


class ImageStale(ImageError):
    """The image is an old one: its kernel has run on since, or there is a newer image of it."""

    code = "IMAGE_STALE"
    default_hint = "`jupyter gpu-ckpt rm` deletes it."


class KeyUnusable(ImageError):
    """A key that seals or encrypts images cannot be read or made."""

    code = "KEY_UNUSABLE"
    exit_status = 77
    default_hint = "The keys must be files of yours alone: directory 0700, files 0600."


class NodeUnfit(ImageError):
    """This node lacks something that the image needs; nothing was started."""

    code = "NODE_UNFIT"
    exit_status = 69
    default_hint = "`jupyter gpu-ckpt match IMAGE` lists what is missing here."


class ImageArchived(ImageError):
    """The content of the image is in the cold tier, and could not be brought back from there."""

    code = "IMAGE_ARCHIVED"
    default_hint = "A wake brings it back; the server's GpuCkptProvisioner.archive_url must be the one it was sent to."


class RemoteUnsupported(ImageError):
    """The package for this kind of URL is not installed."""

    code = "REMOTE_UNSUPPORTED"
    exit_status = 69
    default_hint = "pip install 'jupyter_gpu_ckpt[s3]', [sftp] or [remote]; for gs: [remote] and gcsfs."


class RemoteFailed(ImageError):
    """The shared directory, object store or server that images are pushed to did not do what was asked."""

    code = "REMOTE_FAILED"
    exit_status = 74
    default_hint = "Nothing is lost; try again: what was transferred is not sent twice."


class StoreUnwritable(ImageError):
    """The image directory cannot be written."""

    code = "STORE_UNWRITABLE"
    exit_status = 73
    default_hint = "Check the directory's owner, mode and mount, or set another image directory."


class StoreShared(ImageError):
    """The directory of images, or of decrypted files, is one that others can enter or take away; it was not changed."""

    code = "STORE_SHARED"
    exit_status = 73
    default_hint = (
        "Name a directory that does not exist yet, for instance one below it: it is made for you alone. "
        "If nobody else needs the present one, `chmod 700` it."
    )


class StoreUnsuitable(ImageError):
    """The file system of the image directory lacks what keeps a kernel from being restored twice."""

    code = "STORE_UNSUITABLE"
    exit_status = 73
    default_hint = (
        "Set an image directory (GpuCkptProvisioner.image_dir) on a file system with hard links: ext4, XFS, Btrfs, "
        "tmpfs, NFS. What has none (FAT, a mounted object store) can be the cold tier: GpuCkptProvisioner.archive_url."
    )


# -- a hub and its users' servers -------------------------------------------------------------------------------------


class HubError(GpuCkptError):
    """A hub or a service of it could not have a user's server drained; kernels that could not be saved still run."""

    code = "HUB_FAILED"


class ServerSilent(HubError):
    """The user's server, or the proxy before it, does not answer, or the drain took longer than its deadline."""

    code = "SERVER_SILENT"
    exit_status = 75
    default_hint = "Look into the server's log; a drain that has begun continues there, and the next try joins it."


class ServerRefused(HubError):
    """The user's server answers that this cannot be done."""

    code = "SERVER_REFUSED"
    exit_status = 69
    default_hint = "Look into the server's log."


# -- the gate and the agent -------------------------------------------------------------------------------------------


class GateError(GpuCkptError):
    """The gate between the clients and the kernel could not do its work."""

    code = "GATE_FAILED"


class KernelSilent(GateError):
    """The kernel did not answer before the deadline."""

    code = "KERNEL_SILENT"
    default_hint = "Interrupt or restart the kernel."


class KernelAsleep(GateError):
    """The kernel is away, and too many messages wait for it already."""

    code = "KERNEL_ASLEEP"
    default_hint = "Wait until the kernel is back, or look why it does not come, and send it again."


class AgentError(GateError):
    """The agent inside the kernel failed, or is not there."""

    code = "AGENT_FAILED"
    default_hint = "Details carry the kernel-side message."
