"""Check whether this host can checkpoint kernels, and which command fixes what is missing.  Changes nothing."""

from __future__ import annotations

import errno
import functools
import os
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from ..criu import install
from ..errors import CriuMissing, CudaError
from ..image import user_directory as image_directories
from ..node.facts import NETWORK_FILESYSTEMS
from ..paths import data_directory
from ..units import size
from . import fixes
from .probes import NoIpykernel, Probes

Need = Literal["cpu", "gpu"]

#: 5.9 brought CAP_CHECKPOINT_RESTORE, without which an ordinary user cannot restore (capabilities(7)).
OLDEST_KERNEL = (5, 9)
#: The only architecture on which kernels were checkpointed; setup.py builds the package for no other.
ARCHITECTURE = "x86_64"

#: Driver releases: the first whose suspend and resume are sound, and the first that can change the GPU on the way.
DRIVER_PLAIN, DRIVER_FULL = 570, 580

#: Bytes.  A torch context alone makes an image of 1.2 GiB; a plain kernel's is below 0.1 GiB.
LITTLE_SPACE, TOO_LITTLE_SPACE = 4 << 30, 256 << 20

#: Seconds for one examination; those that start programs have shorter ones of their own.
DEADLINE = 120.0

SHARED_MEMORY = Path("/dev", "shm")

#: What does not work without a program in C of this package, by its name.
NATIVE_PARTS = {
    "fastpath": "device memory moves at the driver's rate only",
    "root": "kernels with daemons or background commands cannot be checkpointed",
}

#: System calls that profiles of containers forbid, and that no other check tries.
FILTERED = ("kcmp", "pidfd_getfd", "vmsplice")

#: Capabilities (capabilities(7)) that a server running as root needs because it makes no user namespace: the first
#: two for namespaces and ptrace(2), the others for the clocks of a time namespace and for buffers of sockets.
ROOT_MUST = {"CAP_SYS_ADMIN": 21, "CAP_SYS_PTRACE": 19, "CAP_SYS_TIME": 25, "CAP_NET_ADMIN": 12}


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    ``ok`` is ``None`` if the check does not apply or could not be made.  A failed check of level ``error`` makes the
    host unfit for its ``needed_for`` (``gpu`` needs all of ``cpu``, too).  ``fix``: the exact command, or empty.
    """

    check: str
    ok: bool | None
    message: str
    fix: str = ""
    level: Literal["error", "warning"] = "error"
    needed_for: Need = "cpu"


def diagnose(
    image_directory: Path | None = None,
    probes: Probes | None = None,
    *,
    fast_path: str = "auto",
    extensions: Mapping[str, Any] | None = None,
) -> list[Finding]:
    """Return every finding about this host, in the order in which to fix them.  Never raises.

    ``image_directory``: by default ``$JUPYTER_GPU_CKPT_IMAGES``, or ``gpu-ckpt/images`` in the Jupyter data directory.
    ``extensions``: the configured ``ServerApp.jpserver_extensions``.  An examination ends after `DEADLINE` seconds.
    Takes less than 2 s on a host without a GPU; with one, the start of the CUDA driver is added.
    """
    probes = probes or Probes()
    directory = image_directory or Path(os.environ.get(image_directories.VARIABLE) or data_directory("images"))
    examinations: tuple[tuple[str, Callable[[], Iterable[Finding]]], ...] = (
        ("linux", lambda: _linux(probes)),
        ("native-parts", lambda: _native_parts(probes)),
        ("criu", lambda: _criu(probes)),
        ("root-capabilities", lambda: _root(probes)),
        ("namespaces", lambda: _namespaces(probes)),
        ("image-directory", lambda: _images(probes, directory)),
        ("shared-memory", lambda: _shared_memory(probes)),
        ("ipykernel", lambda: _ipykernel(probes)),
        ("server-extension", lambda: _server_extension(probes, extensions or {})),
        ("nvidia-driver", lambda: _nvidia(probes, fast_path)),
    )
    findings: list[Finding] = []
    for check, examine in examinations:
        need: Need = "gpu" if check == "nvidia-driver" else "cpu"
        found, error = _within_deadline(examine)
        findings += [replace(finding, needed_for=need) for finding in found]
        if error is not None:  # a failed probe is a finding, too: the other checks must still run
            message = f"could not be examined: {type(error).__name__}: {error}"
            findings.append(Finding(check, False, message, needed_for=need))
    return findings


def _within_deadline(examine: Callable[[], Iterable[Finding]]) -> tuple[list[Finding], Exception | None]:
    """Return the findings, and the error that ended the examination; the file server of a directory may not answer.

    The thread that waits for it is left, and ends with the process.
    """
    found: list[Finding] = []
    ended: list[Exception | None] = []

    def run() -> None:
        try:
            for finding in examine():
                found.append(finding)
        except Exception as error:
            ended.append(error)
        else:
            ended.append(None)

    thread = threading.Thread(target=run, name="gpu-ckpt-doctor", daemon=True)
    thread.start()
    thread.join(DEADLINE)
    if not ended:
        return found[:], TimeoutError(f"no answer within {DEADLINE:g} s")
    return found, ended[0]


def fit(findings: Iterable[Finding], need: Need) -> bool:
    """Return whether no finding prevents checkpoints; for ``gpu`` there must also be a GPU."""
    return not _obstacles(findings, need)


def reason(findings: Iterable[Finding], need: Need = "cpu") -> str:
    """Return the first obstacle and its fix, in one line for a disabled button; empty if the host is fit."""
    for finding in _obstacles(findings, need):
        return f"{finding.message} To fix it: {finding.fix}" if finding.fix else finding.message
    return ""


def _obstacles(findings: Iterable[Finding], need: Need) -> list[Finding]:
    return [
        finding
        for finding in findings
        if (finding.ok is False and finding.level == "error" and need in (finding.needed_for, "gpu"))
        or (finding.ok is None and finding.check == "nvidia-driver" and need == "gpu")
    ]


# -- the host ---------------------------------------------------------------------------------------------------------


def _linux(probes: Probes) -> Iterable[Finding]:
    kernel = probes.kernel()
    version = re.match(r"(\d+)\.(\d+)", kernel.release)
    named = f"{kernel.system} {kernel.release} on {kernel.machine}"
    if kernel.system != "Linux":
        yield Finding("linux", False, f"{named}: kernels can be checkpointed on Linux only.")
    elif version is None or (int(version[1]), int(version[2])) < OLDEST_KERNEL:
        yield Finding("linux", False, f"{named} is too old: 5.9 or newer is needed.", "Boot a newer Linux kernel.")
    elif kernel.machine != ARCHITECTURE:
        yield Finding("linux", False, f"{named}: only {ARCHITECTURE} is supported.")
    elif not probes.glibc():
        message = f"{named} without glibc (musl?): checkpoints were tried with glibc only, and no other is supported."
        yield Finding(
            "linux", False, message, "Use a distribution with glibc: Debian, Ubuntu, Fedora, RHEL and others."
        )
    else:
        yield Finding("linux", True, named)


def _native_parts(probes: Probes) -> Iterable[Finding]:
    check, missing = "native-parts", probes.missing_native_parts()
    if missing:
        yield Finding(check, False, without(missing), fixes.NATIVE_PARTS, "warning")
    else:
        yield Finding(check, True, "the programs in C of this package are there")


def without(missing: Sequence[str]) -> str:
    """Return a sentence about the programs in C that this installation lacks, of those in `NATIVE_PARTS`."""
    effects = "; ".join(f"{name}: {NATIVE_PARTS[name]}" for name in missing)
    return f"This installation of jupyter_gpu_ckpt lacks programs in C, so it can do less ({effects})."


def _criu(probes: Probes) -> Iterable[Finding]:
    try:
        binary = probes.criu()
    except CriuMissing as error:
        fix = "unset " + install.VARIABLE if error.details.get("named") else "jupyter gpu-ckpt install-criu"
        yield Finding("criu", False, error.message, fix)
        yield Finding("criu-check", None, "not run: there is no CRIU")
        return
    yield Finding("criu", True, f"CRIU {install.dotted(binary.version)} ({binary.origin})")
    answer = probes.criu_check(binary)
    # a warning: `criu check` also checks features that a capsule never uses; the trials below decide
    yield Finding("criu-check", answer.ok, f"criu check: {answer.what}", level="warning")


def _root(probes: Probes) -> Iterable[Finding]:
    if not probes.is_root():
        yield Finding("root-capabilities", None, "not needed: the server is not root")
        return
    effective = int(probes.status().get("CapEff", "0"), 16)
    missing = [name for name, number in ROOT_MUST.items() if not effective >> number & 1]
    if missing:
        message = f"The server is root without {' and '.join(missing)}, which capsules and CRIU need."
        yield Finding("root-capabilities", False, message, fixes.container(probes.container(), root=True))
    else:
        yield Finding("root-capabilities", True, "root has the capabilities that CRIU needs")


def _namespaces(probes: Probes) -> Iterable[Finding]:
    try:
        answers = probes.namespaces()
    except (OSError, TimeoutError, ValueError) as error:
        yield Finding("user-namespaces", False, f"The namespaces could not be tried: {error}")
        return
    confined = probes.status().get("Seccomp", "0") != "0"
    trial = fixes.Trial(answers, probes.is_root(), probes.container(), probes.sysctl, confined)

    def judge(
        check: str,
        steps: Sequence[str],
        message: str,
        explain: Callable[[fixes.Trial, fixes.RefusedStep], fixes.Fix],
        needs: str = "it needs the namespaces",
    ) -> Finding:
        if steps[0] not in answers:
            return Finding(check, None, f"not tried: {needs}")
        refused = trial.refused(*steps)
        return Finding(check, True, message) if refused is None else Finding(check, False, *explain(trial, refused))

    if trial.root:
        yield Finding("user-namespaces", None, "not needed: the server is root")
    else:
        message = "an ordinary user can create user namespaces"
        yield judge("user-namespaces", ("user", "map"), message, fixes.user_namespace)
    message = "mount, time and pid namespaces can be created"
    yield judge("namespaces", ("mount", "time", "pid"), message, fixes.namespace, "they need the user namespace")
    covers = probes.proc_covers()
    yield judge("proc-mount", ("proc",), "a fresh /proc can be mounted", functools.partial(fixes.proc, covers=covers))
    yield _pids(trial)
    scope = trial.sysctl("kernel.yama.ptrace_scope")
    # scopes 1 and 2 require CAP_SYS_PTRACE in the target's user namespace, which a capsule has in its own
    note = "" if scope in (None, "0") else f" (yama's ptrace_scope {scope} is no obstacle inside a capsule)"
    message = f"CRIU can attach to processes{note}"
    yield judge("ptrace", ("ptrace",), message, functools.partial(fixes.ptrace, scope=scope))
    if "change_profile" in answers:
        message = "CRIU can restore threads below the AppArmor profile of this process"
        yield judge("apparmor", ("change_profile",), message, fixes.apparmor_profile)
    yield _seccomp(trial, counted="Seccomp_filters" in probes.status())


def _seccomp(trial: fixes.Trial, *, counted: bool) -> Finding:
    """Find calls that a filter refuses, and one that looks like a kernel's own (`process.inherited_filters`)."""
    check = "seccomp"
    if refused := trial.refused(*FILTERED):
        message = f"A system call that checkpoints need is refused ({refused.step}: {refused.message})."
        return Finding(check, False, message, fixes.seccomp(trial) if trial.confined else "")
    if not trial.confined:
        return Finding(check, True, "no seccomp filter")
    if counted:
        return Finding(check, True, "kernels inherit a seccomp filter, and wake below it")
    message = (
        "Kernels inherit the seccomp filter of this process, and this Linux does not count filters: it cannot be "
        "distinguished from one of the kernel's own, and a checkpoint is refused (UNPROVEN_STATE)."
    )
    return Finding(check, False, message, f"Boot Linux 5.11 or newer. Or: {fixes.seccomp(trial)}")


def _pids(trial: fixes.Trial) -> Finding:
    check = "pid-choice"
    if "set_tid" not in trial.answers:
        return Finding(check, None, "not tried: it needs the namespaces")
    ways = {"ns_last_pid": "ns_last_pid", "set_tid": "clone3 with set_tid"}
    works = [way for step, way in ways.items() if step in trial.answers and trial.answers[step] is None]
    if works:  # CRIU uses either
        return Finding(check, True, f"a process can be given its old pid ({', '.join(works)})")
    message = "A process cannot be given its old pid: neither ns_last_pid nor clone3 with set_tid works."
    return Finding(check, False, message, fixes.container(trial.container, root=trial.root) if trial.confined else "")


def _images(probes: Probes, named: Path) -> Iterable[Finding]:
    directory = image_directories.of_user(named)
    facts = probes.directory_facts(directory)
    check, quoted = "image-directory", shlex.quote(str(directory))
    if obstacle := image_directories.obstacle(named):
        yield Finding(check, False, obstacle.message, obstacle.hint)
    elif facts.problem:
        message = f"Images cannot be written to {directory}: {facts.problem}."
        if facts.problem == os.strerror(errno.EACCES):
            fix = f'sudo install -d -m 700 -o "$(id -un)" {quoted}'
        elif facts.problem in map(os.strerror, (errno.ENOSPC, errno.EDQUOT)):
            fix = f"df -h {shlex.quote(str(facts.path))}"
        else:
            fix = f"Set another image directory (GpuCkptProvisioner.image_dir, or {image_directories.VARIABLE})."
        yield Finding(check, False, message, fix)
    elif facts.filesystem in NETWORK_FILESYSTEMS:
        note = " A server that is root writes there as nobody if the export squashes root." if probes.is_root() else ""
        where = f"{directory} is on a network file system ({facts.filesystem})"
        yield Finding(check, False, f"{where}: checkpoints are as fast as that.{note}", level="warning")
    else:
        yield Finding(check, True, f"{directory} can be written ({facts.filesystem})")
    free = f"{size(facts.free)} free for images"
    if facts.free >= LITTLE_SPACE:
        yield Finding("disk-space", True, free)
    else:
        level: Literal["error", "warning"] = "error" if facts.free < TOO_LITTLE_SPACE else "warning"
        yield Finding("disk-space", False, f"Only {free}.", f"df -h {shlex.quote(str(facts.path))}", level)


def _shared_memory(probes: Probes) -> Iterable[Finding]:
    facts = probes.directory_facts(SHARED_MEMORY)
    if facts.path != SHARED_MEMORY or facts.problem:
        message = f"{SHARED_MEMORY} cannot be used, and multiprocessing (also every tqdm bar) needs it."
        fix = f"sudo mount -t tmpfs -o mode=1777 tmpfs {SHARED_MEMORY}"
        yield Finding("shared-memory", False, message, fix, "warning")
    else:
        yield Finding("shared-memory", True, f"{SHARED_MEMORY} can be written ({facts.filesystem})")


def _ipykernel(probes: Probes) -> Iterable[Finding]:
    try:
        yield Finding("ipykernel", True, f"the default kernel has ipykernel {probes.default_kernel()}")
    except (LookupError, OSError, TimeoutError) as error:
        message = f"The default kernel cannot be used: {error}."
        python = error.python if isinstance(error, NoIpykernel) else sys.executable
        fix = f"{shlex.quote(python)} -m pip install ipykernel" if isinstance(error, LookupError) else ""
        yield Finding("ipykernel", False, message, fix, "warning")


def _server_extension(probes: Probes, configured: Mapping[str, Any]) -> Iterable[Finding]:
    check, found = "server-extension", probes.server_extension(configured)
    if found is None:
        yield Finding(check, None, "no Jupyter server is installed here")
    elif not found.enabled:
        where = " --sys-prefix" if os.access(sys.prefix, os.W_OK) else ""
        fix = f"jupyter server extension enable jupyter_gpu_ckpt{where}"
        message = "The server extension is not enabled: Jupyter servers start kernels that cannot be checkpointed."
        yield Finding(check, False, message, fix, "warning")
    elif found.problem:
        fix = f"{shlex.quote(sys.executable)} -m pip install 'jupyter_gpu_ckpt[server]'"
        yield Finding(check, False, f"The server extension cannot be loaded: {found.problem}.", fix, "warning")
    else:
        yield Finding(check, True, "Jupyter servers load the server extension")


# -- the GPU ----------------------------------------------------------------------------------------------------------


def _nvidia(probes: Probes, fast_path: str) -> Iterable[Finding]:
    version = probes.nvidia_driver()
    if version is None:
        yield Finding("nvidia-driver", None, "This host has no NVIDIA driver.")
        return
    yield _driver(version)
    try:
        probes.require_cuda()
        yield Finding("cuda-checkpoint", True, "the driver can checkpoint processes")
    except CudaError as error:
        yield Finding("cuda-checkpoint", False, error.message, fixes.cuda(error))
    try:
        gpus = probes.gpus()
    except CudaError as error:
        yield Finding("nvml", False, error.message, fixes.cuda(error))
        return
    if not gpus:
        yield Finding(
            "nvml", False, "The NVIDIA driver is loaded, but this user sees no GPU.", "nvidia-smi --list-gpus"
        )
        return
    yield Finding("nvml", True, f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''}")
    split = [str(gpu.index) for gpu in gpus if gpu.mig]
    if split:
        fix = f"sudo nvidia-smi -i {','.join(split)} -mig 0"
        message = f"GPU {', '.join(split)} is split by MIG, which the driver cannot checkpoint."
        yield Finding("mig", False, message, fix)
    else:
        yield Finding("mig", True, "no GPU is split by MIG")
    if any(gpu.mps for gpu in gpus):
        message = "The MPS service is running, whose clients the driver cannot checkpoint."
        yield Finding("mps", False, message, "echo quit | nvidia-cuda-mps-control")
    elif any(gpu.mps is None for gpu in gpus):
        yield Finding("mps", None, "whether MPS is running cannot be seen from here")
    else:
        yield Finding("mps", True, "MPS is not running")
    yield _fast_path(probes, fast_path)


def _fast_path(probes: Probes, configured: str) -> Finding:
    if configured == "off":
        message = 'device memory moves at the driver\'s rate (fast_path = "off" is configured)'
        return Finding("fast-path", None, message)
    found = probes.preload()
    if found.path is None:
        message = "Device memory moves at the driver's rate only. The library for a higher rate cannot be used: "
        fix = fixes.NATIVE_PARTS
        if found.unknown_locks:
            fix = "A newer release of jupyter_gpu_ckpt may know them; kernels can be checkpointed without."
        return Finding("fast-path", False, f"{message}{found.why}.", fix, "warning")
    message = f'device memory can move at the rate of the bus (fast_path = "{configured}")'
    return Finding("fast-path", True, message)


def _driver(version: str) -> Finding:
    major = int(version.split(".")[0])
    check, fix = "nvidia-driver", fixes.NEW_DRIVER
    if major == 0:
        return Finding(check, True, "the NVIDIA driver does not report its version")
    if major < DRIVER_PLAIN:
        return Finding(check, False, f"NVIDIA driver {version} is too old.", fix)
    if major < DRIVER_FULL:
        message = f"With NVIDIA driver {version} a kernel can come back only to the GPU it left."
        return Finding(check, False, message, fix, "warning")
    return Finding(check, True, f"NVIDIA driver {version}")


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the document for ``--json`` and REST."""
    needs = get_args(Need)
    return {
        "fit": {need: fit(findings, need) for need in needs},
        "reason": {need: reason(findings, need) for need in needs},
        "findings": [asdict(finding) for finding in findings],
    }
