"""The doctor on hosts that only fakes can show; `test_doctor_here` has the real one."""

import errno
import io
import json
import os
import threading
from collections import namedtuple
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from jupyter_gpu_ckpt.cli.host import show_findings
from jupyter_gpu_ckpt.cli.terminal import Terminal
from jupyter_gpu_ckpt.criu.install import Check, CriuBinary
from jupyter_gpu_ckpt.cuda.fastpath import Preload
from jupyter_gpu_ckpt.doctor import checks, namespace_probe
from jupyter_gpu_ckpt.doctor.checks import Finding, diagnose, fit, reason
from jupyter_gpu_ckpt.doctor.probes import DirectoryFacts, NoIpykernel, Probes, ServerExtension
from jupyter_gpu_ckpt.errors import CriuMissing, CudaError, CudaUnavailable

PERMITTED = (
    "user", "map", "mount", "time", "pid", "proc", "ns_last_pid", "set_tid", "ptrace", "kcmp", "pidfd_getfd",
    "vmsplice",
)  # fmt: skip


Uname = namedtuple("Uname", ("system", "release", "machine"))


@dataclass(frozen=True)
class FakeGpu:
    index: int = 0
    mig: bool = False
    mps: bool | None = False


#: A host that can do everything, and holds an ordinary user's server.
FIT = Probes(
    kernel=lambda: Uname("Linux", "6.18.1-generic", "x86_64"),
    glibc=lambda: "2.36",
    missing_native_parts=list,
    is_root=lambda: False,
    status=lambda: {"Seccomp": "0", "CapEff": "0"},
    sysctl=lambda name: None,
    container=lambda: "",
    proc_covers=list,
    namespaces=lambda: dict.fromkeys(PERMITTED),
    criu=lambda: CriuBinary(("/usr/sbin/criu",), (4, 2, 1), "system"),
    criu_check=lambda binary: Check(True, "Looks good"),
    directory_facts=lambda path: DirectoryFacts(path, 100 << 30, "ext4"),
    default_kernel=lambda: "7.4.0",
    server_extension=lambda configured: ServerExtension(True),
    nvidia_driver=lambda: "580.159.04",
    require_cuda=lambda: None,
    gpus=lambda: [FakeGpu(0)],
    preload=lambda: Preload(Path("/there.so")),
)
#: The same, and the server is root.
ROOT = replace(FIT, is_root=lambda: True, status=lambda: {"Seccomp": "0", "CapEff": "1ffffffffff"})


def by_check(probes: Probes, **arguments) -> dict[str, Finding]:
    findings = diagnose(probes=probes, **arguments)
    assert len({finding.check for finding in findings}) == len(findings)
    return {finding.check: finding for finding in findings}


def raiser(error: Exception):
    def probe(*arguments):
        raise error

    return probe


def refusing(step: str, number: int = errno.EPERM, **probes) -> Probes:
    """A fit host, but that ``step`` of the trial is refused, and whatever follows it is not reached."""
    answers = dict.fromkeys(PERMITTED[: PERMITTED.index(step)])
    answers[step] = {"errno": number, "message": os.strerror(number)}
    if step in ("ns_last_pid", "set_tid", "ptrace"):
        answers = dict.fromkeys(PERMITTED) | answers
    return replace(FIT, namespaces=lambda: answers, **probes)


def settings(**values: str):
    """``sysctl`` with ``kernel__yama__ptrace_scope=...`` for a dotted name."""
    return lambda name: values.get(name.replace(".", "__"))


# -- fit hosts --------------------------------------------------------------------------------------------------------


def test_a_host_below_an_apparmor_profile_that_permits_what_is_needed():
    confined = dict.fromkeys((*PERMITTED, "change_profile"))
    assert by_check(replace(FIT, namespaces=lambda: confined))["apparmor"].ok
    assert "apparmor" not in by_check(FIT)


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("gpu-ckpt (enforce)\n", "gpu-ckpt"),
        ("a name (x) (enforce)\n\0", "a name (x)"),
        ("gpu-ckpt (complain)\n", ""),
        ("unconfined\n", ""),
        ("system_u:system_r:container_t:s0\0", ""),
    ],
)
def test_the_trial_enters_the_profile_that_confines_it(tmp_path, label, name):
    file = tmp_path / "current"
    file.write_text(label)
    assert namespace_probe.apparmor_profile(str(file)) == name
    assert namespace_probe.apparmor_profile(str(tmp_path / "none")) == ""


def test_the_trial_writes_as_criu_does(tmp_path):
    file = tmp_path / "current"
    file.write_text("gpu-ckpt (enforce)\n")
    namespace_probe.enter_own_profile(str(file))
    assert file.read_text() == "changeprofile gpu-ckpt"


def test_a_fit_host():
    findings = diagnose(probes=FIT)
    assert fit(findings, "cpu") and fit(findings, "gpu")
    assert reason(findings) == reason(findings, "gpu") == ""
    assert all(finding.ok is not False and not finding.fix for finding in findings)


def test_without_a_gpu_kernels_without_cuda_can_be_checkpointed():
    findings = diagnose(
        probes=replace(FIT, nvidia_driver=lambda: None, require_cuda=raiser(AssertionError("was asked")))
    )
    assert fit(findings, "cpu") and not fit(findings, "gpu")
    assert not any(finding.ok is False for finding in findings)
    assert reason(findings) == "" and "no NVIDIA driver" in reason(findings, "gpu")


def test_a_root_server_needs_no_user_namespace():
    found = by_check(ROOT)
    assert found["root-capabilities"].ok and found["user-namespaces"].ok is None


# -- every fault: (probes, check, level, need, words of the finding, words of what mends it) --------------------------

OPTIONS = ("seccomp=unconfined", "apparmor=unconfined", "systempaths=unconfined")
DOCKER = " ".join(["docker run", *(f"--security-opt {option}" for option in OPTIONS)])
FAULTS = {
    "not linux": (
        replace(FIT, kernel=lambda: Uname("Darwin", "25.0", "arm64")), "linux", "error", "cpu", "Linux only", ""
    ),
    "old kernel": (
        replace(FIT, kernel=lambda: Uname("Linux", "5.4.0-90", "x86_64")),
        "linux", "error", "cpu", "5.9 or newer", "newer",
    ),
    "other machine": (
        replace(FIT, kernel=lambda: Uname("Linux", "6.8.0", "riscv64")), "linux", "error", "cpu", "riscv64", ""
    ),
    "arm": (
        replace(FIT, kernel=lambda: Uname("Linux", "6.8.0", "aarch64")),
        "linux", "error", "cpu", "only x86_64 is supported", "",
    ),
    "musl": (replace(FIT, glibc=lambda: ""), "linux", "error", "cpu", "without glibc (musl?)", "Debian"),
    "built without a C compiler": (
        replace(FIT, missing_native_parts=lambda: ["fastpath", "root"]),
        "native-parts", "warning", "cpu", "fastpath: device memory moves at the driver's rate only; root: ", "gcc",
    ),
    "no criu": (
        replace(FIT, criu=raiser(CriuMissing("No CRIU."))), "criu", "error", "cpu", "No CRIU.", "install-criu"
    ),
    "unfit criu named": (
        replace(FIT, criu=raiser(CriuMissing("Bad.", named="/x"))),
        "criu", "error", "cpu", "Bad.", "unset JUPYTER_GPU_CKPT_CRIU",
    ),
    "server extension not enabled": (
        replace(FIT, server_extension=lambda configured: ServerExtension(False)),
        "server-extension", "warning", "cpu", "is not enabled", "jupyter server extension enable jupyter_gpu_ckpt",
    ),
    "server extension without what it needs": (
        replace(FIT, server_extension=lambda configured: ServerExtension(True, "No module named 'jupyter_events'")),
        "server-extension", "warning", "cpu", "No module named 'jupyter_events'", "'jupyter_gpu_ckpt[server]'",
    ),
    "criu check": (
        replace(FIT, criu_check=lambda binary: Check(False, "no luck")), "criu-check", "warning", "cpu", "no luck", ""
    ),
    "root without rights": (
        replace(FIT, is_root=lambda: True, container=lambda: "docker"),
        "root-capabilities", "error", "cpu", "CAP_SYS_ADMIN and CAP_SYS_PTRACE and ", "docker run --cap-add SYS_ADMIN",
    ),
    "root without rights in a pod": (
        replace(FIT, is_root=lambda: True, container=lambda: "kubernetes"),
        "root-capabilities", "error", "cpu", "CAP_SYS_ADMIN", "capabilities: {add: [SYS_ADMIN, SYS_PTRACE, ",
    ),
    "no user namespaces": (
        refusing("user", errno.ENOSPC, sysctl=settings(user__max_user_namespaces="0")),
        "user-namespaces", "error", "cpu", "switched off", "sysctl -w user.max_user_namespaces=15000",
    ),
    "too many user namespaces": (
        refusing("user", errno.ENOSPC, sysctl=settings(user__max_user_namespaces="5")),
        "user-namespaces", "error", "cpu", "limit", "sysctl -w user.max_user_namespaces=15000",
    ),
    "debian's switch": (
        refusing("user", sysctl=settings(kernel__unprivileged_userns_clone="0")),
        "user-namespaces", "error", "cpu", "for root only", "sysctl -w kernel.unprivileged_userns_clone=1",
    ),
    "ubuntu's apparmor": (
        refusing("map", sysctl=settings(kernel__apparmor_restrict_unprivileged_userns="1")),
        "user-namespaces", "error", "cpu", "AppArmor", "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
    ),
    "ubuntu's apparmor, later": (
        refusing("mount", errno.EACCES, sysctl=settings(kernel__apparmor_restrict_unprivileged_userns="1")),
        "namespaces", "error", "cpu", "AppArmor", "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
    ),
    "docker's seccomp": (
        refusing("user", container=lambda: "docker", status=lambda: {"Seccomp": "2"}),
        "user-namespaces", "error", "cpu", "seccomp profile", DOCKER,
    ),
    "podman's seccomp": (
        refusing("user", container=lambda: "podman", status=lambda: {"Seccomp": "2"}),
        "user-namespaces", "error", "cpu", "seccomp profile", "--security-opt unmask=ALL",
    ),
    "a pod's seccomp": (
        refusing("user", container=lambda: "kubernetes", status=lambda: {"Seccomp": "2"}),
        "user-namespaces", "error", "cpu", "seccomp profile", "seccompProfile: {type: Unconfined}",
    ),
    "a service's seccomp": (
        refusing("user", status=lambda: {"Seccomp": "2"}),
        "user-namespaces", "error", "cpu", "systemd service's", "RestrictNamespaces=no",
    ),
    "unknown refusal": (refusing("user"), "user-namespaces", "error", "cpu", "Operation not permitted", ""),
    "no time namespaces": (
        refusing("time", errno.EINVAL),
        "namespaces", "error", "cpu", "no time namespaces", "CONFIG_TIME_NS",
    ),
    "too many pid namespaces": (
        refusing("pid", errno.ENOSPC),
        "namespaces", "error", "cpu", "limit of pid", "sysctl -w user.max_pid_namespaces=15000",
    ),
    "too many mount namespaces": (
        refusing("mount", errno.ENOSPC),
        "namespaces", "error", "cpu", "limit of mount", "sysctl -w user.max_mnt_namespaces=15000",
    ),
    "docker's /proc": (
        refusing("proc", container=lambda: "docker"), "proc-mount", "error", "cpu", "hides parts of /proc", DOCKER
    ),
    "a pod's /proc": (
        refusing("proc", container=lambda: "kubernetes"), "proc-mount", "error", "cpu", "hides", "procMount: Unmasked"
    ),
    "covered /proc": (
        refusing("proc", proc_covers=lambda: ["/proc/a", "/proc/a/b"]),
        "proc-mount", "error", "cpu", "/proc/a, /proc/a/b", "sudo umount /proc/a/b /proc/a",
    ),
    "no choice of pids": (
        replace(FIT, namespaces=lambda: dict.fromkeys(PERMITTED) | {
            name: {"errno": errno.EPERM, "message": "no"} for name in ("ns_last_pid", "set_tid")
        }),
        "pid-choice", "error", "cpu", "old pid", "",
    ),
    "yama forbids all": (
        refusing("ptrace", sysctl=settings(kernel__yama__ptrace_scope="3")),
        "ptrace", "error", "cpu", "ptrace_scope is 3", "reboot",
    ),
    "seccomp forbids ptrace": (
        refusing("ptrace", container=lambda: "docker", status=lambda: {"Seccomp": "2"}),
        "ptrace", "error", "cpu", "attach", DOCKER,
    ),
    "an AppArmor profile that forbids to enter itself": (
        replace(FIT, namespaces=lambda: dict.fromkeys(PERMITTED) | {
            "change_profile": {"errno": errno.EACCES, "message": "Permission denied"}
        }),
        "apparmor", "error", "cpu", "restored thread", "change_profile",
    ),
    "a seccomp profile on a Linux that does not count filters": (
        replace(FIT, container=lambda: "podman", status=lambda: {"Seccomp": "2"}),
        "seccomp", "error", "cpu", "UNPROVEN_STATE", "--security-opt seccomp=unconfined",
    ),
    "a profile that forbids a call": (
        refusing("kcmp", container=lambda: "docker", status=lambda: {"Seccomp": "2", "Seccomp_filters": "1"}),
        "seccomp", "error", "cpu", "kcmp: Operation not permitted", DOCKER,
    ),
    "a service's filter on a Linux that does not count filters": (
        replace(FIT, status=lambda: {"Seccomp": "2"}),
        "seccomp", "error", "cpu", "cannot be distinguished", "SystemCallFilter=",
    ),
    "unwritable images": (
        replace(FIT, directory_facts=lambda path: DirectoryFacts(path, 100 << 30, "ext4", "Permission denied")),
        "image-directory", "error", "cpu", "Permission denied", "sudo install -d -m 700",
    ),
    "images on a full disk": (
        replace(FIT, directory_facts=lambda path: DirectoryFacts(path, 100 << 30, "ext4", "No space left on device")),
        "image-directory", "error", "cpu", "No space left", "df -h",
    ),
    "images on a disk without hard links": (
        replace(FIT, directory_facts=lambda path: DirectoryFacts(path, 100 << 30, "vfat", "Operation not permitted")),
        "image-directory", "error", "cpu", "not permitted", "Set another image directory",
    ),
    "images on nfs": (
        replace(ROOT, directory_facts=lambda path: DirectoryFacts(path, 100 << 30, "nfs4")),
        "image-directory", "warning", "cpu", "squashes root", "",
    ),
    "little space": (
        replace(FIT, directory_facts=lambda path: DirectoryFacts(path, 1 << 30, "ext4")),
        "disk-space", "warning", "cpu", "Only 1.0 GiB", "df -h",
    ),
    "no space": (
        replace(FIT, directory_facts=lambda path: DirectoryFacts(path, 1 << 20, "ext4")),
        "disk-space", "error", "cpu", "Only 1.0 MiB", "df -h",
    ),
    "no shared memory": (
        replace(FIT, directory_facts=lambda path: DirectoryFacts(Path("/dev"), 100 << 30, "devtmpfs")),
        "shared-memory", "warning", "cpu", "tqdm", "mount -t tmpfs",
    ),
    "no ipykernel": (
        replace(FIT, default_kernel=raiser(LookupError("no module"))),
        "ipykernel", "warning", "cpu", "no module", "pip install ipykernel",
    ),
    "no ipykernel in the kernel's own environment": (
        replace(FIT, default_kernel=raiser(NoIpykernel("no module", "/env of mine/bin/python"))),
        "ipykernel", "warning", "cpu", "no module", "'/env of mine/bin/python' -m pip install ipykernel",
    ),
    "a kernel whose Python hangs": (
        replace(FIT, default_kernel=raiser(TimeoutError("it did not end"))),
        "ipykernel", "warning", "cpu", "did not end", "",
    ),
    "old driver": (
        replace(FIT, nvidia_driver=lambda: "535.183.01"),
        "nvidia-driver", "error", "gpu", "535.183.01 is too old", "580",
    ),
    "plain driver": (
        replace(FIT, nvidia_driver=lambda: "570.86.15"), "nvidia-driver", "warning", "gpu", "the GPU it left", "580"
    ),
    "no binding": (
        replace(FIT, require_cuda=raiser(CudaUnavailable("None.", reason="binding-missing"))),
        "cuda-checkpoint", "error", "gpu", "None.", "pip install 'jupyter_gpu_ckpt[gpu]'",
    ),
    "old binding": (
        replace(FIT, require_cuda=raiser(CudaUnavailable("Old.", reason="binding-too-old"))),
        "cuda-checkpoint", "error", "gpu", "Old.", "pip install --upgrade",
    ),
    "cuda fails": (
        replace(FIT, require_cuda=raiser(CudaError("Broken.", hint="Look."))),
        "cuda-checkpoint", "error", "gpu", "Broken.", "Look.",
    ),
    "no nvml": (
        replace(FIT, gpus=raiser(CudaUnavailable("No NVML.", reason="nvml-missing"))),
        "nvml", "error", "gpu", "No NVML.", "pip install",
    ),
    "no library for device memory": (
        replace(FIT, preload=lambda: Preload(None, "it was not built")),
        "fast-path", "warning", "gpu", "it was not built", "apt-get install gcc",
    ),
    "locks of a C library that nobody has looked at": (
        replace(FIT, preload=lambda: Preload(None, "it does not know the locks of glibc 2.99", unknown_locks=True)),
        "fast-path", "warning", "gpu", "glibc 2.99", "newer release",
    ),
    "hidden gpus": (replace(FIT, gpus=list), "nvml", "error", "gpu", "this user sees no GPU", "nvidia-smi"),
    "mig": (
        replace(FIT, gpus=lambda: [FakeGpu(0), FakeGpu(3, mig=True)]),
        "mig", "error", "gpu", "GPU 3", "nvidia-smi -i 3 -mig 0",
    ),
    "mps": (
        replace(FIT, gpus=lambda: [FakeGpu(mps=True)]),
        "mps", "error", "gpu", "MPS", "echo quit | nvidia-cuda-mps-control",
    ),
}  # fmt: skip


def test_a_file_server_that_never_answers_ends_no_more_than_its_check(monkeypatch):
    monkeypatch.setattr(checks, "DEADLINE", 0.5)
    answered = threading.Event()
    findings = diagnose(probes=replace(FIT, directory_facts=lambda path: answered.wait()))
    answered.set()
    unanswered = [finding for finding in findings if "no answer within" in finding.message]
    assert [finding.check for finding in unanswered] == ["image-directory", "shared-memory"]
    assert not fit(findings, "cpu")
    assert findings[-1].check == "fast-path"


@pytest.mark.parametrize("name", FAULTS)
def test_fault(name):
    probes, check, level, need, words, fix = FAULTS[name]
    findings = diagnose(probes=probes)
    finding = next(finding for finding in findings if finding.check == check)
    assert finding.ok is False and (finding.level, finding.needed_for) == (level, need)
    assert words in finding.message
    assert fix in finding.fix and bool(fix) == bool(finding.fix)
    hindered = level == "error"
    assert fit(findings, "gpu") is not hindered
    assert fit(findings, "cpu") is not (hindered and need == "cpu")
    if hindered:
        assert reason(findings, "gpu").startswith(finding.message)


@pytest.mark.parametrize("scope", ["1", "2"])
def test_yama_does_not_hinder_a_capsule(scope):
    found = by_check(replace(FIT, sysctl=settings(kernel__yama__ptrace_scope=scope)))
    assert found["ptrace"].ok and f"ptrace_scope {scope} is no obstacle" in found["ptrace"].message


@pytest.mark.parametrize("step", ["ns_last_pid", "set_tid"])
def test_one_way_to_choose_pids_is_enough(step):
    assert by_check(refusing(step))["pid-choice"].ok


def test_the_configured_fast_path_is_reported():
    found = {value: by_check(FIT, fast_path=value)["fast-path"] for value in ("auto", "kernel", "off")}
    assert {value: finding.ok for value, finding in found.items()} == {"auto": True, "kernel": True, "off": None}
    assert all(f'fast_path = "{value}"' in finding.message for value, finding in found.items())
    assert "rate of the bus" not in found["off"].message


def test_mps_that_cannot_be_seen_is_no_fault():
    assert by_check(replace(FIT, gpus=lambda: [FakeGpu(mps=None)]))["mps"].ok is None


def test_what_was_not_reached_is_not_called_a_fault():
    found = by_check(refusing("user"))
    assert [found[check].ok for check in ("namespaces", "proc-mount", "pid-choice", "ptrace")] == [None] * 4


def test_a_broken_probe_is_a_finding_and_the_others_still_run():
    findings = diagnose(
        probes=replace(FIT, kernel=raiser(RuntimeError("boom")), namespaces=raiser(TimeoutError("60 s")))
    )
    broken = {finding.check: finding for finding in findings if finding.ok is False}
    assert set(broken) == {"linux", "user-namespaces"}
    assert "RuntimeError: boom" in broken["linux"].message and "60 s" in broken["user-namespaces"].message


def test_text_and_json_say_the_same():
    findings = diagnose(probes=refusing("user", sysctl=settings(user__max_user_namespaces="0")))
    printed = io.StringIO()
    show_findings(findings, Terminal(printed))
    text, data = printed.getvalue(), checks.as_json(findings)
    assert json.loads(json.dumps(data)) == data
    assert "FAIL  user-namespaces" in text and "-> sudo sysctl -w user.max_user_namespaces=15000" in text
    assert data["fit"] == {"cpu": False, "gpu": False} and data["reason"]["cpu"] in text
    assert "\n" not in data["reason"]["cpu"]


def test_several_gpus_are_no_hindrance():
    assert by_check(replace(FIT, gpus=lambda: [FakeGpu(0), FakeGpu(1)]))["fast-path"].ok
