"""The doctor on this host, and on this host with real faults provoked."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from ordinary_user import ordinary_user

from jupyter_gpu_ckpt.cli import main
from jupyter_gpu_ckpt.criu import install
from jupyter_gpu_ckpt.doctor import checks, probes
from jupyter_gpu_ckpt.doctor.checks import diagnose
from jupyter_gpu_ckpt.errors import CriuMissing
from jupyter_gpu_ckpt.kernel.directories import default_image_dir
from jupyter_gpu_ckpt.subprocesses import run

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: run the tests as root too")


@pytest.fixture(scope="module")
def criu(tmp_path_factory):
    """The variable's value for a fit CRIU: the host's own, or one unpacked for these tests."""
    try:
        return install.find().argv[-1]
    except CriuMissing:
        if "GPU_CKPT_OFFLINE" in os.environ:
            pytest.skip("no CRIU here and GPU_CKPT_OFFLINE is set: unset it, or install one")
        return str(install.install(tmp_path_factory.mktemp("criu"), force_unpack=True).argv[-1])


def findings_of(done) -> dict[str, dict]:
    """The findings of a doctor that was run as a program."""
    assert done.out, done.err
    return {finding["check"]: finding for finding in json.loads(done.out)["findings"]}


HINDRANCES = ("linux", "criu", "criu-check", "namespaces", "proc-mount", "pid-choice", "ptrace", "image-directory")


def test_this_host_is_fit(criu, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv(install.VARIABLE, criu)
    assert main(["doctor", "--json", "--image-dir", str(tmp_path / "not/yet")]) == 0
    found = {finding["check"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert all(found[check]["ok"] for check in HINDRANCES), found
    assert list(tmp_path.iterdir()) == []  # nothing is made
    assert found["ipykernel"]["ok"], found["ipykernel"]


def test_images_are_searched_where_the_other_commands_find_them(monkeypatch, tmp_path):
    monkeypatch.setenv("JUPYTER_GPU_CKPT_IMAGES", str(tmp_path / "theirs"))
    (finding,) = (one for one in diagnose() if one.check == "image-directory")
    assert str(tmp_path / "theirs") in finding.message
    assert default_image_dir() == tmp_path / "theirs"
    (finding,) = (one for one in diagnose(tmp_path / "named") if one.check == "image-directory")
    assert str(tmp_path / "named") in finding.message


def test_this_host_is_fit_for_an_ordinary_user(criu):
    with ordinary_user() as user:
        named, tree = Path(criu), Path(criu).parents[2] if len(Path(criu).parents) > 2 else None
        if tree and (tree / "criu.json").exists():  # in a directory of pytest's, which only its owner can enter
            named = Path(shutil.copytree(tree, user.home / "criu"))
        env = {install.VARIABLE: str(named)}
        done = user.run([user.python, "-m", "jupyter_gpu_ckpt", "doctor", "--json"], timeout_s=120, env=env)
    found = findings_of(done)
    assert done.status == 0, found
    assert all(found[check]["ok"] for check in (*HINDRANCES, "user-namespaces")), found
    assert found["root-capabilities"]["ok"] is None


# -- real faults ------------------------------------------------------------------------------------------------------

#: Enters a fresh user namespace (as an ordinary user of it), spoils something there, and becomes the doctor.
SPOILER = """
import ctypes, os, struct, sys
from jupyter_gpu_ckpt.process import syscalls as s
fault, rest = sys.argv[1], sys.argv[2:]
uid, gid = os.getuid(), os.getgid()
inner = uid or 1000
if fault != "root":
    s.unshare(s.CLONE_NEWUSER | s.CLONE_NEWNS)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{inner} {uid} 1"), ("gid_map", f"{inner} {gid} 1")):
        open(f"/proc/self/{name}", "w").write(text)
if fault.startswith("max_"):
    open(f"/proc/sys/user/{fault}", "w").write("0")
elif fault == "proc":
    s.mount("/dev/null", "/proc/timer_list", None, 0x1000)  # MS_BIND, as container engines do
elif fault == "unwritable":
    s.mount("tmpfs", rest[-1], "tmpfs", 0)
    os.chmod(rest[-1], 0o500)
elif fault == "root":
    s.prctl(24, 21)  # PR_CAPBSET_DROP, CAP_SYS_ADMIN
elif fault in ("seccomp", "wide-seccomp", "vmsplice"):
    number = {"seccomp": 272, "wide-seccomp": 246, "vmsplice": 278}[fault]  # unshare(2), kexec_load(2), vmsplice(2)
    code = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | 1), (0x06, 0, 0, 0x7FFF0000)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in code))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(program)))
    s.prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
    s.prctl(22, 2, ctypes.addressof(header))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
os.execv(sys.executable, [sys.executable, "-m", "jupyter_gpu_ckpt", "doctor", "--json", *rest])
"""


def spoiled(fault: str, *arguments: str) -> dict[str, dict]:
    environment = dict(os.environ) | {"PYTHONPATH": str(Path(checks.__file__).parents[2])}
    return findings_of(run([sys.executable, "-c", SPOILER, fault, *arguments], timeout_s=120, env=environment))


def test_real_user_namespaces_switched_off():
    finding = spoiled("max_user_namespaces")["user-namespaces"]
    assert finding["ok"] is False and "user.max_user_namespaces is 0" in finding["message"]
    assert finding["fix"] == "sudo sysctl -w user.max_user_namespaces=15000"


@pytest.mark.parametrize(("kind", "word"), [("mnt", "mount"), ("pid", "pid"), ("time", "time")])
def test_real_other_namespaces_used_up(kind, word):
    found = spoiled(f"max_{kind}_namespaces")
    assert found["user-namespaces"]["ok"] is True
    assert found["namespaces"]["ok"] is False and f"limit of {word} namespaces" in found["namespaces"]["message"]
    assert found["namespaces"]["fix"] == f"sudo sysctl -w user.max_{kind}_namespaces=15000"


def test_real_masked_proc():
    found = spoiled("proc")
    assert found["namespaces"]["ok"] is True
    assert found["proc-mount"]["ok"] is False and "/proc/timer_list" in found["proc-mount"]["message"]


def test_real_seccomp_filter():
    finding = spoiled("seccomp")["user-namespaces"]
    assert finding["ok"] is False and "seccomp" in finding["message"] and "seccomp=unconfined" in finding["fix"]


def test_real_seccomp_filter_that_refuses_a_call_of_criu():
    finding = spoiled("vmsplice")["seccomp"]
    assert finding["ok"] is False and "vmsplice" in finding["message"] and "seccomp=unconfined" in finding["fix"]


def test_real_seccomp_filter_that_permits_what_a_checkpoint_needs():
    found = spoiled("wide-seccomp")
    assert [name for name, finding in found.items() if finding["ok"] is False] == []
    assert "wake below it" in found["seccomp"]["message"]


@as_root
def test_real_root_without_cap_sys_admin():
    found = spoiled("root")
    assert found["root-capabilities"]["ok"] is False and "CAP_SYS_ADMIN" in found["root-capabilities"]["message"]
    assert "--cap-add SYS_ADMIN" in found["root-capabilities"]["fix"]
    assert found["namespaces"]["ok"] is False


def test_real_unwritable_image_directory(tmp_path):
    finding = spoiled("unwritable", "--image-dir", str(tmp_path))["image-directory"]
    assert finding["ok"] is False and "Permission denied" in finding["message"]


def test_real_old_criu(tmp_path, monkeypatch):
    old = tmp_path / "criu"
    old.write_text("#!/bin/sh\necho 'Version: 3.17.1'\n")
    old.chmod(0o755)
    monkeypatch.setenv(install.VARIABLE, str(old))
    found = {finding.check: finding for finding in diagnose()}
    assert found["criu"].ok is False and "3.17.1" in found["criu"].message and found["criu-check"].ok is None


def test_no_driver_no_gpu_questions():
    if probes.nvidia_driver() is not None:
        pytest.skip("this host has an NVIDIA driver: run it on one without")
    found = {finding.check: finding for finding in diagnose()}
    assert found["nvidia-driver"].ok is None
    assert found.keys().isdisjoint({"cuda-checkpoint", "nvml", "mig", "mps"})
