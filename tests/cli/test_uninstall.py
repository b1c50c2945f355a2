"""``jupyter gpu-ckpt uninstall``: nothing of this user's is left but images, and these only until ``--images``.

That the package itself goes is in `tests/test_packages.py`, where there is one to be uninstalled.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from images import publish

from jupyter_gpu_ckpt.cli import uninstall
from jupyter_gpu_ckpt.image.store import Store
from jupyter_gpu_ckpt.kernel.directories import make_runtime_dir
from jupyter_gpu_ckpt.kernel.registry import Registration

SPEC = {"argv": ["python"], "display_name": "x", "language": "python"}


@pytest.fixture(autouse=True)
def pip(monkeypatch):
    """Calls of pip, which must not uninstall the package that is tested."""
    calls: list[str] = []
    monkeypatch.setattr(uninstall, "uninstall_package", lambda: calls.append("pip") or "")
    return calls


@pytest.fixture
def user(configuration, tmp_path, monkeypatch) -> Path:
    """A data directory with a file of each kind, and a temporary directory that is this user's own."""
    monkeypatch.setenv("JUPYTER_GPU_CKPT_KEYS", str(tmp_path / "data/gpu-ckpt/keys"))
    monkeypatch.setattr(uninstall.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    for name in ("criu/4.2.1/criu", "native/x_fastpath.so", "sessions/x.db", "keys/generations/one", "runtime/host"):
        path = tmp_path / "data/gpu-ckpt" / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_text("")
    for path in (tmp_path / "data").rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    (tmp_path / "gc").mkdir(mode=0o700)
    return tmp_path


def left(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def test_nothing_is_left_of_a_user_without_images(run, user, pip):
    (user / "tmp").mkdir()
    socket_base = user / f"tmp/gpu-ckpt-{os.geteuid()}-abcdef"
    (socket_base / "lost").mkdir(parents=True)
    socket_base.chmod(0o700)
    (user / "data/gpu-ckpt/runtime/host").write_text(f"{socket_base}\n{user}\n/\n")
    done = run("uninstall")
    assert done.status == 0 and pip == ["pip"]
    assert left(user) == set() and not (user / "data/gpu-ckpt").exists()
    assert not socket_base.exists() and not (user / "gc").exists()
    assert "Removed: the package jupyter_gpu_ckpt" in done.out and "Kept" not in done.out


def test_images_and_their_keys_are_kept_and_named_until_they_are_to_go(run, user, pip):
    store = Store(user / "data/gpu-ckpt/images")
    image = publish(store)
    done = run("uninstall")
    assert done.status == 0 and pip == ["pip"]
    assert "Kept: 1 images" in done.out and str(store.root) in done.out and "--images" in done.out
    assert run("verify", image.id).status == 0
    assert {path.name for path in (user / "data/gpu-ckpt").iterdir()} == {"images", "keys"}
    done = run("uninstall", "--images")
    assert done.status == 0 and not (user / "data/gpu-ckpt").exists() and left(user) == set()


def test_other_files_in_the_directory_of_images_stay(run, user, configuration):
    directory = user / "configured"
    (configuration / "jupyter_server_config.py").write_text(f"c.GpuCkptProvisioner.image_dir = {str(directory)!r}\n")
    publish(Store(directory))
    (directory / "thesis.tex").write_text("precious")
    (directory / ".hidden").write_text("precious")
    done = run("uninstall", "--images")
    assert left(user) == {"configured/thesis.tex", "configured/.hidden", "config/jupyter_server_config.py"}
    assert "Edit this file" in done.out and "jupyter_server_config.py" in done.out


def test_a_configured_directory_of_sockets_is_cleared_of_kernels_only(run, user):
    base = user / "sockets"
    make_runtime_dir(base)
    Registration(make_runtime_dir(base, "killed")).write(kernel_id="x", state="running", pid=1, image=None)
    (base / "mine").write_text("precious")
    assert run("uninstall", f"--GpuCkptProvisioner.runtime_base={base}").status == 0
    assert (base / "mine").exists() and not (base / "killed").exists()


def test_a_dry_run_removes_nothing(run, user, pip):
    publish(Store(user / "data/gpu-ckpt/images"))
    before = left(user)
    done = run("uninstall", "--images", "--dry-run")
    assert left(user) == before and pip == []
    assert "Would be removed" in done.out and "Removed" not in done.out


def test_kernelspecs_start_without_the_provisioner(run, user):
    theirs = {"kernel_provisioner": {"provisioner_name": "local-provisioner"}}
    ours = {"kernel_provisioner": {"provisioner_name": "gpu-ckpt-provisioner"}, "debugger": True}
    for name, metadata in {"ours": ours, "theirs": theirs, "odd": []}.items():
        (user / "data/kernels" / name).mkdir(parents=True)
        (user / "data/kernels" / name / "kernel.json").write_text(json.dumps({**SPEC, "metadata": metadata}))
    done = run("uninstall", "--json")
    assert done.document["kernelspecs"] == [str(user / "data/kernels/ours/kernel.json")]
    read = {path.parent.name: json.loads(path.read_text()) for path in user.rglob("kernel.json")}
    assert read["ours"] == {**SPEC, "metadata": {"debugger": True}}
    assert read["theirs"]["metadata"] == theirs and read["odd"]["metadata"] == []


def test_nothing_is_done_while_a_kernel_runs(run, user, pip):
    registration = Registration(make_runtime_dir(user / "gpu-ckpt"))
    registration.write(kernel_id="0c0ffee0", kernel_name="python3", state="running", pid=8192, image=None)
    before = left(user)
    done = run("uninstall", "--json")
    assert done.status == 65 and done.document["error"]["code"] == "WRONG_STATE"
    assert "0c0ffee0" in done.document["error"]["message"]
    assert left(user) == before and pip == []
    registration.remove()
