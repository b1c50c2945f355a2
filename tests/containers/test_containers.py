"""Containers with the options of docs/admin/containers.md: a kernel sleeps and wakes in them; the profiles are valid.

The container's root file system is this machine's, below an overlay, so that no image is needed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest
from everybody import REPOSITORY, closed_to_others, needed, readable_criu

from jupyter_gpu_ckpt.criu.install import VARIABLE

PAGE = REPOSITORY / "docs/admin/containers.md"
FILES = PAGE.with_suffix("")
DEFAULT = Path("/usr/share/containers/seccomp.json")
#: cgroups of both versions at once, which crun refuses: without version 2 in a mount namespace of its own.
ENTER = 'umount /sys/fs/cgroup/unified 2>/dev/null; exec "$@"'
HAS_APPARMOR = Path("/sys/kernel/security/apparmor").exists()


def options(beginning: str) -> list[str]:
    """Return the options of the page's `podman run` that begin so, without those this host cannot apply."""
    (line,) = re.findall(rf"^\$ podman run ({beginning}.*) IMAGE$", PAGE.read_text(), re.MULTILINE)
    words = line.split()
    if not HAS_APPARMOR:
        at = words.index("apparmor=gpu-ckpt")
        del words[at - 1 : at + 1]
    return words


def profile(*arguments: str | Path) -> dict:
    made = subprocess.run([FILES / "seccomp-profile", *arguments], capture_output=True, text=True, timeout=30)
    assert made.returncode == 0, made.stderr
    return json.loads(made.stdout)


class Podman:
    """Runs programs of this machine in containers; its own files are below ``place``."""

    def __init__(self, place: Path, criu: str) -> None:
        self._place = place
        shown = [word for path in needed() for word in ("--volume", f"{path}:{path}:ro")]
        limits = ["--network=none", "--memory=2g", "--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096"]
        home = [
            "--tmpfs=/tmp:mode=1777,notmpcopyup",
            "--env=HOME=/tmp",
            "--env=PYTHONDONTWRITEBYTECODE=1",
            "--workdir=/tmp",
        ]
        program = [f"--volume={criu}:/opt/criu:ro", f"--env={VARIABLE}=/opt/criu"] if Path(criu).is_dir() else []
        self._run = ["podman", "run", "--rm", *limits, *home, *program, *shown]

    def run(self, given: list[str], *command: str, shm: str = "16m") -> subprocess.CompletedProcess[str]:
        words = [re.sub(r"seccomp=(?=[\w-]+\.json)", f"seccomp={self._place}/", word) for word in given]
        words += [f"--shm-size={shm}", "--rootfs", "/:O", *command]
        argv = ["unshare", "--mount", "sh", "-c", ENTER, "sh", *self._run, *words]
        return subprocess.run(argv, capture_output=True, text=True, timeout=280)

    def ours(self, given: list[str], *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command of this package."""
        return self.run(given, sys.executable, "-m", "jupyter_gpu_ckpt", *words)


@pytest.fixture(scope="module")
def podman(tmp_path_factory, criu_binary):
    if os.geteuid() != 0:
        pytest.skip("containers with this machine's root file system need root")
    if missing := [name for name in ("podman", "crun", "unshare") if shutil.which(name) is None]:
        pytest.skip(f"no {', no '.join(missing)} on this host: `apt-get install podman crun`")
    if not DEFAULT.exists():
        pytest.skip(f"the engine's default seccomp profile is not at {DEFAULT}")
    if closed := [path for path in needed() if closed_to_others(path)]:
        pytest.skip(f"the container's user cannot enter {closed[0]}")
    place = tmp_path_factory.mktemp("containers")
    place.chmod(0o755)
    (place / "gpu-ckpt.json").write_text(json.dumps(profile(DEFAULT)))
    root = ("CAP_SYS_ADMIN", "CAP_SYS_PTRACE", "CAP_SYS_CHROOT")
    (place / "for-root.json").write_text(json.dumps(profile(DEFAULT, *root)))
    engine = Podman(place, readable_criu(criu_binary, place))
    tried = engine.run([], "true")
    if tried.returncode != 0:
        pytest.skip(f"podman cannot start a container here: {tried.stderr.strip()[-300:]}")
    return engine


USER, ROOT = "--user", "--cap-add"


def findings(done: subprocess.CompletedProcess[str]) -> dict[str, dict]:
    assert done.stdout, done.stderr
    return {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}


@pytest.mark.slow
def test_a_kernel_sleeps_and_wakes_in_a_container_without_a_capability(podman):
    done = podman.ours(options(USER), "demo")
    assert "Every value is intact." in done.stdout, done.stdout + done.stderr


@pytest.mark.torture
def test_a_kernel_of_root_sleeps_and_wakes_in_a_container(podman):
    done = podman.ours(options(ROOT), "demo")
    assert "Every value is intact." in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("left_out", "check", "words"),
    [("unmask=", "proc-mount", "hides parts of /proc"), ("seccomp=", "seccomp", "kcmp: Operation not permitted")],
)
def test_without_an_option_the_doctor_says_what_is_forbidden(podman, left_out, check, words):
    """With the engine's defaults in its place."""
    given = options(USER)
    at = next(number for number, word in enumerate(given) if word.startswith(left_out))
    found = findings(podman.ours(given[: at - 1] + given[at + 1 :], "doctor", "--json"))
    assert [name for name, finding in found.items() if finding["ok"] is False and finding["level"] == "error"] == [
        check
    ]
    assert words in found[check]["message"] and "podman run" in found[check]["fix"]


@pytest.mark.slow
def test_without_capabilities_the_doctor_names_them_to_root(podman):
    given = options(ROOT)
    added = [word for word in given if word.isupper()]
    kept = [word for word in given if word not in (ROOT, *added)]
    found = findings(podman.ours(kept, "doctor", "--json"))["root-capabilities"]
    missing = {f"CAP_{name}" for name in added} - {"CAP_CHECKPOINT_RESTORE"}  # a part of SYS_ADMIN
    assert found["ok"] is False and set(re.findall(r"CAP_\w+", found["message"])) == missing
    assert all(f"--cap-add {name}" in found["fix"] for name in added)


# -- the profiles themselves


def test_the_seccomp_profile_is_the_default_one_and_six_calls():
    default = {
        "defaultAction": "SCMP_ACT_ERRNO",
        "syscalls": [
            {"names": ["read", "kcmp"], "action": "SCMP_ACT_ALLOW"},
            {"names": ["vmsplice", "uselib"], "action": "SCMP_ACT_ERRNO", "errnoRet": 1},
            {"names": ["mount", "bpf"], "action": "SCMP_ACT_ALLOW", "includes": {"caps": ["CAP_SYS_ADMIN"]}},
            {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38, "excludes": {"caps": ["CAP_SYS_ADMIN"]}},
            {"names": ["cacheflush"], "action": "SCMP_ACT_ALLOW", "includes": {"arches": ["arm64"]}},
            {"name": "personality", "action": "SCMP_ACT_ALLOW", "args": [{"index": 0, "value": 0}]},
        ],
    }
    made = subprocess.run(
        [sys.executable, FILES / "seccomp-profile", "/dev/stdin"],
        input=json.dumps(default),
        capture_output=True,
        text=True,
    )
    rules = json.loads(made.stdout)["syscalls"]
    needed = ["kcmp", "mount", "pidfd_getfd", "umount2", "unshare", "vmsplice"]
    assert rules == [
        {"names": ["read"], "action": "SCMP_ACT_ALLOW"},
        {"names": ["uselib"], "action": "SCMP_ACT_ERRNO", "errnoRet": 1},
        {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38},
        {"names": ["personality"], "action": "SCMP_ACT_ALLOW", "args": [{"index": 0, "value": 0}]},
        {"names": needed, "action": "SCMP_ACT_ALLOW"},
    ]
    assert all(f"`{name}`" in PAGE.read_text() for name in needed)


@pytest.mark.parametrize("fault", ["", "trace,"])
def test_the_parser_takes_the_apparmor_profile(fault):
    """The parser needs no kernel with AppArmor; loading the profile does."""
    parser = shutil.which("apparmor_parser", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if parser is None:
        pytest.skip("no apparmor_parser on this host: `apt-get install apparmor`")
    text = (FILES / "apparmor-profile").read_text()
    if fault:
        text = text.replace(fault, "everything,", 1)
    options = ["--skip-kernel-load", "--skip-cache"]
    done = subprocess.run([parser, *options], input=text, capture_output=True, text=True, timeout=60)
    assert (done.returncode == 0) is not bool(fault), done.stderr


def test_the_apparmor_profile_lets_criu_restore_threads_below_it():
    """CRIU writes "changeprofile NAME" for each thread, also where that is the profile it has: else no kernel wakes."""
    text = (FILES / "apparmor-profile").read_text()
    (name,) = re.findall(r"^profile (\S+) ", text, re.MULTILINE)
    assert re.findall(r"^  change_profile -> (\S+),$", text, re.MULTILINE) == [name]


#: What the machine of `scripts/try-apparmor` says of a profile that permits what is needed and no more; shortened.
LOG = """\
== confined
gpu-ckpt (enforce)
== control
asleep: checkpointed, 39942197 bytes
The kernel slept and woke.
== user
asleep: checkpointed, 39864090 bytes
The kernel slept and woke.
== forbidden
sh: 1: cannot create /proc/sys/kernel/panic: Permission denied
sh: 1: kill: Permission denied
audit: apparmor="DENIED" operation="signal" profile="gpu-ckpt" comm="sh" denied_mask="send" peer="unconfined"
== without mount
FAIL  namespaces         A mount namespace is refused: mount flags on /: Permission denied.
== without change_profile
FAIL  apparmor           The AppArmor profile forbids to enter itself, so no restored thread gets it: Permission denied.
== end
""".replace("\n", "\r\n")


@pytest.mark.parametrize(
    ("changed", "into", "problem"),
    [
        ("", "", []),
        ("(enforce)", "(complain)", ["the program is confined"]),
        ("197 bytes\r\nThe kernel slept", "It did not", ["a kernel sleeps and wakes without the profile"]),
        ("090 bytes\r\nThe kernel slept", "It did not", ["a kernel sleeps and wakes"]),
        ("== forbidden", 'apparmor="DENIED" operation="mount"\r\n== forbidden', ["nothing that it needs is denied"]),
        ("panic: Permission denied", "", ["settings of Linux cannot be written"]),
        ('"signal"', '"open"', ["signals do not leave the profile"]),
        ("FAIL  namespaces", "", ["without its rules for mounts doctor complains"]),
        ("FAIL  apparmor", "", ["without its rule for itself doctor complains"]),
    ],
)
def test_a_profile_that_is_too_narrow_or_too_wide_is_found(changed, into, problem):
    loader = SourceFileLoader("try_apparmor", str(REPOSITORY / "scripts/try-apparmor"))
    module = module_from_spec(spec_from_loader("try_apparmor", loader))
    loader.exec_module(module)
    assert changed in LOG
    assert module.problems(LOG.replace(changed, into) if changed else LOG) == problem


@pytest.mark.torture
@pytest.mark.timeout(6000)
def test_a_kernel_sleeps_and_wakes_below_the_apparmor_profile():
    """In a virtual machine: `scripts/try-apparmor`."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    needs = {"qemu-system-x86_64": "qemu-system-x86", "busybox": "busybox-static", "aa-exec": "apparmor"}
    missing = [package for program, package in needs.items() if shutil.which(program, path=path) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and `apt-get install {' '.join(missing)}`")
    command = [sys.executable, REPOSITORY / "scripts/try-apparmor"]
    done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=5900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
