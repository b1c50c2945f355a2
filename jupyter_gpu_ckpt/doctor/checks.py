"""Can THIS host checkpoint kernels, and if not, which command mends it.

`diagnose` asks `doctor.probes` and judges the answers; `fit` and `reason` are what buttons and preflights read;
``jupyter gpu-ckpt doctor`` (`cli.host`) prints them.  Nothing is changed on the host, and nothing here raises because
of what the host lacks.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ..criu import install
from ..errors import CriuMissing, CudaError
from ..image import user_directory as image_directories
from ..paths import data_directory
from ..units import size
from . import fixes
from .probes import Probes

Need = Literal["cpu", "gpu"]

#: 5.9 brought CAP_CHECKPOINT_RESTORE, without which an ordinary user cannot restore (capabilities(7)).
OLDEST_KERNEL = (5, 9)
#: What there is code for, and what that was ever run on.
ARCHITECTURES, TRIED = ("x86_64", "aarch64"), ("x86_64",)

#: Driver releases: the first whose suspend and resume are sound, and the first that can change the GPU on the way.
DRIVER_PLAIN, DRIVER_FULL = 570, 580

#: Bytes.  A torch context alone makes an image of 1.2 GiB; a plain kernel's is below 0.1 GiB.
LITTLE_SPACE, TOO_LITTLE_SPACE = 4 << 30, 256 << 20

NETWORK_FILESYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "lustre", "ceph", "beegfs", "gpfs")

SHARED_MEMORY = Path("/dev", "shm")

#: Capabilities (capabilities(7)) that a server running as root needs because it makes no user namespace.
ROOT_MUST = {"CAP_SYS_ADMIN": 21, "CAP_SYS_PTRACE": 19}


@dataclass(frozen=True)
class Finding:
    """One answer.

    ``ok`` is ``None`` where the question does not apply or could not be reached; ``level`` says how bad ``False`` is:
    an ``error`` makes the host unfit for what it is ``needed_for`` (``gpu`` needs everything that ``cpu`` needs, too).
    ``mend`` is the exact command, or empty if there is none.
    """

    check: str
    ok: bool | None
    what: str
    mend: str = ""
    level: Literal["error", "warning"] = "error"
    needed_for: Need = "cpu"


def diagnose(image_directory: Path | None = None, probes: Probes | None = None) -> list[Finding]:
    """Every finding about this host, in the order in which to mend them.

    ``image_directory`` is where images are to lie (by default ``$JUPYTER_GPU_CKPT_IMAGES``, or ``gpu-ckpt/images`` in
    the Jupyter data directory).
    Takes below 2 s on a host without a GPU; with one, the CUDA driver's own start is added.  Never raises.
    """
    asked = probes or Probes()
    directory = image_directory or Path(os.environ.get(image_directories.VARIABLE) or data_directory("images"))
    examinations: tuple[tuple[str, Callable[[], Iterable[Finding]]], ...] = (
        ("linux", lambda: _linux(asked)),
        ("criu", lambda: _criu(asked)),
        ("root-capabilities", lambda: _root(asked)),
        ("namespaces", lambda: _namespaces(asked)),
        ("image-directory", lambda: _images(asked, directory)),
        ("shared-memory", lambda: _shared_memory(asked)),
        ("ipykernel", lambda: _ipykernel(asked)),
        ("nvidia-driver", lambda: _nvidia(asked)),
    )
    findings: list[Finding] = []
    for check, examine in examinations:
        try:
            findings += examine()
        except Exception as error:  # a question that broke is an answer too: the others must still be asked
            what = f"could not be examined: {type(error).__name__}: {error}"
            findings.append(Finding(check, False, what, needed_for="gpu" if check == "nvidia-driver" else "cpu"))
    return findings


def fit(findings: Iterable[Finding], need: Need) -> bool:
    """Whether nothing stands in the way; for ``gpu`` there must also be a GPU."""
    return not _obstacles(findings, need)


def reason(findings: Iterable[Finding], need: Need = "cpu") -> str:
    """One line for a disabled button: the first obstacle and what mends it; empty if the host is fit."""
    for finding in _obstacles(findings, need):
        return f"{finding.what} To mend it: {finding.mend}" if finding.mend else finding.what
    return ""


def _obstacles(findings: Iterable[Finding], need: Need) -> list[Finding]:
    relevant = [finding for finding in findings if need == "gpu" or finding.needed_for == "cpu"]
    return [
        finding
        for finding in relevant
        if (finding.ok is False and finding.level == "error")
        or (need == "gpu" and finding.check == "nvidia-driver" and finding.ok is None)
    ]


# -- the host ---------------------------------------------------------------------------------------------------------


def _linux(probes: Probes) -> Iterable[Finding]:
    kernel = probes.kernel()
    named = f"{kernel.system} {kernel.release} on {kernel.machine}"
    if kernel.system != "Linux":
        yield Finding("linux", False, f"{named}: kernels can be checkpointed on Linux only.")
    elif kernel.version < OLDEST_KERNEL:
        yield Finding("linux", False, f"{named} is too old: 5.9 or newer is needed.", "Boot a newer Linux kernel.")
    elif kernel.machine not in ARCHITECTURES:
        yield Finding("linux", False, f"{named}: only {' and '.join(TRIED)} is supported.")
    elif kernel.machine not in TRIED:
        yield Finding("linux", False, f"{named}: nobody has tried it there.", level="warning")
    else:
        yield Finding("linux", True, named)


def _criu(probes: Probes) -> Iterable[Finding]:
    try:
        binary = probes.criu()
    except CriuMissing as error:
        mend = "unset " + install.VARIABLE if error.details.get("named") else "jupyter gpu-ckpt install-criu"
        yield Finding("criu", False, error.message, mend)
        yield Finding("criu-check", None, "not asked: there is no CRIU")
        return
    yield Finding("criu", True, f"CRIU {install.dotted(binary.version)} ({binary.origin})")
    answer = probes.criu_check(binary)
    # a warning: `criu check` also asks for things that a capsule never uses, and the trials below are the real thing
    yield Finding("criu-check", answer.ok, f"criu check: {answer.what}", level="warning")


def _root(probes: Probes) -> Iterable[Finding]:
    if not probes.is_root():
        yield Finding("root-capabilities", None, "not needed: the server is not root")
        return
    held = int(probes.status().get("CapEff", "0"), 16)
    missing = [name for name, number in ROOT_MUST.items() if not held >> number & 1]
    if missing:
        what = f"The server is root without {' and '.join(missing)}, and so cannot make the kernels' namespaces."
        yield Finding("root-capabilities", False, what, fixes.container(probes.container(), root=True))
    else:
        yield Finding("root-capabilities", True, "root has the capabilities that CRIU needs")


def _namespaces(probes: Probes) -> Iterable[Finding]:
    try:
        answers = probes.namespaces()
    except (OSError, TimeoutError, ValueError) as error:
        yield Finding("user-namespaces", False, f"The namespaces could not be tried: {error}")
        return
    trial = fixes.Trial(
        answers, probes.is_root(), probes.container(), probes.sysctl, probes.status().get("Seccomp", "0") != "0"
    )
    yield _user_namespaces(trial)
    yield _other_namespaces(trial)
    yield _proc(trial, probes)
    yield _pids(trial)
    yield _ptrace(trial)


def _user_namespaces(trial: fixes.Trial) -> Finding:
    check = "user-namespaces"
    if trial.root:
        return Finding(check, None, "not needed: the server is root")
    refused = trial.refused("user", "map")
    if refused is None:
        return Finding(check, True, "an ordinary user can make user namespaces")
    return Finding(check, False, *fixes.user_namespace(trial, refused))


def _other_namespaces(trial: fixes.Trial) -> Finding:
    check = "namespaces"
    if not trial.reached("mount"):
        return Finding(check, None, "not tried: they need the user namespace")
    refused = trial.refused("mount", "time", "pid")
    if refused is None:
        return Finding(check, True, "mount, time and pid namespaces can be made")
    return Finding(check, False, *fixes.namespace(trial, refused))


def _proc(trial: fixes.Trial, probes: Probes) -> Finding:
    check = "proc-mount"
    if not trial.reached("proc"):
        return Finding(check, None, "not tried: it needs the namespaces")
    refused = trial.refused("proc")
    if refused is None:
        return Finding(check, True, "a fresh /proc can be mounted")
    return Finding(check, False, *fixes.proc(trial, refused, probes.proc_covers()))


def _pids(trial: fixes.Trial) -> Finding:
    check = "pid-choice"
    if not trial.reached("set_tid"):
        return Finding(check, None, "not tried: it needs the namespaces")
    ways = {"ns_last_pid": "ns_last_pid", "set_tid": "clone3 with set_tid"}
    works = [way for step, way in ways.items() if trial.works(step)]
    if works:  # CRIU takes either
        return Finding(check, True, f"a process can be given its old pid ({', '.join(works)})")
    what = "A process cannot be given its old pid: neither ns_last_pid nor clone3 with set_tid works."
    return Finding(check, False, what, fixes.container(trial.container, root=trial.root) if trial.confined else "")


def _ptrace(trial: fixes.Trial) -> Finding:
    check = "ptrace"
    if not trial.reached("ptrace"):
        return Finding(check, None, "not tried: it needs the namespaces")
    scope = trial.sysctl("kernel.yama.ptrace_scope")
    refused = trial.refused("ptrace")
    if refused is None:
        # yama asks for CAP_SYS_PTRACE in the target's user namespace, which a capsule has in its own (scopes 1 and 2)
        note = "" if scope in (None, "0") else f" (yama's ptrace_scope {scope} is no obstacle inside a capsule)"
        return Finding(check, True, f"CRIU can attach to processes{note}")
    return Finding(check, False, *fixes.ptrace(trial, refused, scope))


def _images(probes: Probes, named: Path) -> Iterable[Finding]:
    directory = image_directories.of_user(named)
    place = probes.place(directory)
    check, quoted = "image-directory", shlex.quote(str(directory))
    if obstacle := image_directories.obstacle(named):
        yield Finding(check, False, obstacle.message, obstacle.hint)
    elif place.problem:
        mend = f'sudo install -d -m 700 -o "$(id -un)" {quoted}'
        yield Finding(check, False, f"Images cannot be written to {directory}: {place.problem}.", mend)
    elif place.filesystem in NETWORK_FILESYSTEMS:
        note = " A server that is root writes there as nobody if the export squashes root." if probes.is_root() else ""
        what = f"{directory} is on a network file system ({place.filesystem}): checkpoints are as fast as that.{note}"
        yield Finding(check, False, what, level="warning")
    else:
        yield Finding(check, True, f"{directory} can be written ({place.filesystem})")
    free = f"{size(place.free)} free for images"
    if place.free >= LITTLE_SPACE:
        yield Finding("disk-space", True, free)
    else:
        level: Literal["error", "warning"] = "error" if place.free < TOO_LITTLE_SPACE else "warning"
        yield Finding("disk-space", False, f"Only {free}.", f"df -h {shlex.quote(str(place.path))}", level)


def _shared_memory(probes: Probes) -> Iterable[Finding]:
    place = probes.place(SHARED_MEMORY)
    if place.path != SHARED_MEMORY or place.problem:
        what = f"{SHARED_MEMORY} cannot be used, and multiprocessing (also every tqdm bar) needs it."
        mend = f"sudo mount -t tmpfs -o mode=1777 tmpfs {SHARED_MEMORY}"
        yield Finding("shared-memory", False, what, mend, "warning")
    else:
        yield Finding("shared-memory", True, f"{SHARED_MEMORY} can be written ({place.filesystem})")


def _ipykernel(probes: Probes) -> Iterable[Finding]:
    try:
        version = probes.default_kernel()
    except (LookupError, OSError, TimeoutError) as error:
        what = f"The default kernel cannot be used: {error}."
        yield Finding("ipykernel", False, what, f"{shlex.quote(sys.executable)} -m pip install ipykernel", "warning")
    else:
        yield Finding("ipykernel", True, f"the default kernel has ipykernel {version}")


# -- the GPU ----------------------------------------------------------------------------------------------------------


def _nvidia(probes: Probes) -> Iterable[Finding]:
    version = probes.nvidia_driver()
    if version is None:
        yield Finding("nvidia-driver", None, "This host has no NVIDIA driver.", needed_for="gpu")
        return
    yield _driver(version)
    try:
        probes.require_cuda()
    except CudaError as error:
        yield Finding("cuda-checkpoint", False, error.message, fixes.cuda(error), needed_for="gpu")
    else:
        yield Finding("cuda-checkpoint", True, "the driver can checkpoint processes", needed_for="gpu")
    try:
        gpus = probes.gpus()
    except CudaError as error:
        yield Finding("nvml", False, error.message, fixes.cuda(error), needed_for="gpu")
        return
    if not gpus:
        what = "The NVIDIA driver is loaded, and shows no GPU to this user."
        yield Finding("nvml", False, what, "nvidia-smi --list-gpus", needed_for="gpu")
        return
    yield Finding("nvml", True, f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''}", needed_for="gpu")
    split = [str(gpu.index) for gpu in gpus if gpu.mig]
    if split:
        mend = f"sudo nvidia-smi -i {','.join(split)} -mig 0"
        what = f"GPU {', '.join(split)} is split by MIG, which the driver cannot checkpoint."
        yield Finding("mig", False, what, mend, needed_for="gpu")
    else:
        yield Finding("mig", True, "no GPU is split by MIG", needed_for="gpu")
    if any(gpu.mps for gpu in gpus):
        what = "The MPS service is running, whose clients the driver cannot checkpoint."
        yield Finding("mps", False, what, "echo quit | nvidia-cuda-mps-control", needed_for="gpu")
    elif any(gpu.mps is None for gpu in gpus):
        yield Finding("mps", None, "whether MPS is running cannot be seen from here", needed_for="gpu")
    else:
        yield Finding("mps", True, "MPS is not running", needed_for="gpu")
    yield _fast_path(probes)


def _fast_path(probes: Probes) -> Finding:
    found = probes.preload()
    if found.path is None:
        what = f"Device memory moves at the driver's rate only; of the library for more: {found.why}."
        mend = (
            "A newer release of jupyter_gpu_ckpt may know them; kernels are saved all the same."
            if found.unknown_locks
            else "Install a C compiler (apt-get install gcc), then pip install --force-reinstall jupyter_gpu_ckpt"
        )
        return Finding("fast-path", False, what, mend, "warning", "gpu")
    return Finding(
        "fast-path", True, "device memory can move at the rate of the bus (fast_path = auto)", needed_for="gpu"
    )


def _driver(version: str) -> Finding:
    major = int(version.split(".")[0])
    check, mend = "nvidia-driver", "Install NVIDIA driver 580 or newer, and restart the host."
    if major == 0:
        what = "the NVIDIA driver does not tell its version"
        return Finding(check, True, what, needed_for="gpu")
    if major < DRIVER_PLAIN:
        return Finding(check, False, f"NVIDIA driver {version} is too old.", mend, needed_for="gpu")
    if major < DRIVER_FULL:
        what = f"With NVIDIA driver {version} a kernel can come back only to the GPU it left."
        return Finding(check, False, what, mend, "warning", "gpu")
    return Finding(check, True, f"NVIDIA driver {version}", needed_for="gpu")


# -- output -----------------------------------------------------------------------------------------------------------


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """The same for ``--json`` and REST."""
    needs: tuple[Need, ...] = ("cpu", "gpu")
    return {
        "fit": {need: fit(findings, need) for need in needs},
        "reason": {need: reason(findings, need) for need in needs},
        "findings": [asdict(finding) for finding in findings],
    }
