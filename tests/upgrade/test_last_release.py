"""Kernels of the last release, found by this tree: attached and woken, or refused by a code, and never lost.

The last release is that of the newest tag ``v*`` below this commit.  While there is none it is a copy of this tree:
also that one is built, installed in an environment of its own, and its servers start the kernels.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live import Server, server

from jupyter_gpu_ckpt import __version__
from jupyter_gpu_ckpt.image.store import Store

ROOT = Path(__file__).resolve().parents[2]
#: By which this release refuses what it does not know.
CODES = ("PROTOCOL_VERSION", "IMAGE_FORMAT")

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout


def last_tag() -> str | None:
    """Return the newest tag of a release below this commit, and of another commit than this; None without one."""
    describe = ["git", "describe", "--tags", "--abbrev=0", "--match", "v*"]
    for commit in ("HEAD", "HEAD^"):
        found = subprocess.run([*describe, commit], cwd=ROOT, capture_output=True, text=True, timeout=60)
        tag = found.stdout.strip()
        if found.returncode != 0 or run("git", "rev-list", "-n1", tag) != run("git", "rev-list", "-n1", "HEAD"):
            return tag or None
    return None


class Release:
    """A release in an environment of its own, that shares what it requires with that of the tests."""

    def __init__(self, place: Path, tag: str | None, edits: dict[str, tuple[str, str]] | None = None) -> None:
        tree, env = place / "tree", place / "env"
        tree.mkdir()
        if tag is not None:
            run("git", "archive", "--output", place / "tree.tar", tag)
            shutil.unpack_archive(place / "tree.tar", tree)
        else:
            for name in run("git", "ls-files", "--cached", "--others", "--exclude-standard").splitlines():
                if (ROOT / name).is_file():
                    (tree / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(ROOT / name, tree / name)
        for name, (old, new) in (edits or {}).items():
            text = (tree / name).read_text()
            assert text.count(old) == 1, (name, old)
            (tree / name).write_text(text.replace(old, new))
        run(sys.executable, "-m", "venv", "--without-pip", env)
        self.python = env / "bin/python"
        (packages,) = env.glob("lib/python*/site-packages")
        (packages / "required.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        install = ["--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed", "--quiet"]
        run(self.python, "-m", "pip", "install", *install, tree)
        shown = "import jupyter_gpu_ckpt as one; print(one.__file__, one.__version__)"
        file, self.version = run(self.python, "-c", shown, cwd=place).split()
        assert file.startswith(str(env)), "it is not the one that was installed"
        self.is_this = tag is None and not edits


@pytest.fixture(scope="module")
def last_release(tmp_path_factory) -> Release:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no clone with its history")
    return Release(tmp_path_factory.mktemp("last"), last_tag())


@pytest.fixture(scope="module")
def other_release(tmp_path_factory) -> Release:
    """A release that writes images of another format, and speaks another version of the protocol with its capsules."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no clone with its history")
    edits = {
        "jupyter_gpu_ckpt/image/manifest.py": ("\nVERSION = ", "\nVERSION = 70"),
        "jupyter_gpu_ckpt/capsule/protocol.py": ("\nVERSION = ", "\nVERSION = 70"),
    }
    return Release(tmp_path_factory.mktemp("other"), None, edits)


def left_by(release: Release, home: Path, base: Path, end: signal.Signals) -> tuple[str, int]:
    """Have a server of a release start a kernel, and end the server.  Return the kernel's id and its pid inside."""
    with server(home, base, python=release.python) as old:
        kernel_id = old.start_kernel()
        made = (
            "import os, random, threading; random.seed(7); x = [random.random() for _ in range(1000)]; total = sum(x)"
        )
        old.run(kernel_id, made)
        pid = old.run(kernel_id, "print(os.getpid())")
        old.process.send_signal(end)
        old.process.wait(60)
    return kernel_id, int(pid)


QUESTION = "print(sum(x) == total, len(x), os.getpid())"


def answer(running: Server, kernel_id: str) -> Any:
    """Return what the kernel prints, or the error that a client gets."""
    printed: list[str] = []

    def collect(message: dict[str, Any]) -> None:
        printed.append(message["content"].get("text", ""))

    with running.client(kernel_id) as client:
        reply = client.execute_interactive(QUESTION, timeout=60, output_hook=collect, allow_stdin=False)
    return "".join(printed).strip() if reply["content"]["status"] == "ok" else str(reply["content"])


def refusal(running: Server) -> str:
    """Return the code by which a server refuses what it found, by its log."""
    return next((code for code in CODES if re.search(rf"\b{code}\b", running.log)), "")


@pytest.fixture
def home(tmp_path) -> Iterator[Path]:
    yield tmp_path / "home"


def test_a_kernel_that_sleeps_wakes_sleeps_and_wakes_or_its_image_is_refused_and_kept(
    last_release, home, runtime_base, criu_binary
):
    kernel_id, pid = left_by(last_release, home, runtime_base, signal.SIGTERM)
    (image,) = (home / "images").glob("*/manifest.json")
    with server(home, runtime_base) as new:
        if last_release.is_this or not refusal(new):
            assert [kernel["id"] for kernel in new.get("api/kernels")] == [kernel_id]
            said = answer(new, kernel_id)
            if last_release.is_this or not any(code in said for code in CODES):
                assert said == f"True 1000 {pid}", (last_release.version, __version__)
                assert new.do(kernel_id, "checkpoint")["status"] == "done"
                assert answer(new, kernel_id) == f"True 1000 {pid}"
                return
        assert image.exists()
    with server(home, runtime_base, python=last_release.python) as old:  # the way back is open
        assert old.run(kernel_id, QUESTION) == f"True 1000 {pid}"


@pytest.mark.torture
def test_a_kernel_that_runs_is_attached_or_refused_and_runs_on(last_release, home, runtime_base, criu_binary):
    kernel_id, pid = left_by(last_release, home, runtime_base, signal.SIGKILL)
    with server(home, runtime_base) as new:
        if last_release.is_this or not refusal(new):
            assert answer(new, kernel_id) == f"True 1000 {pid}"
            assert new.do(kernel_id, "checkpoint")["status"] == "done"
            assert answer(new, kernel_id) == f"True 1000 {pid}"
            return
    with server(home, runtime_base, python=last_release.python) as old:
        assert old.run(kernel_id, QUESTION) == f"True 1000 {pid}"


def test_an_image_of_another_format_is_refused_by_its_code_and_wakes_in_its_own_release(
    other_release, home, runtime_base, criu_binary
):
    kernel_id, pid = left_by(other_release, home, runtime_base, signal.SIGTERM)
    (image,) = (home / "images").glob("*/manifest.json")
    with server(home, runtime_base) as new:
        assert refusal(new) == "IMAGE_FORMAT" and image.exists()
        assert Store(home / "images").images() == []
    with server(home, runtime_base, python=other_release.python) as old:
        assert old.run(kernel_id, QUESTION) == f"True 1000 {pid}"


@pytest.mark.torture
def test_a_kernel_of_another_protocol_is_refused_by_its_code_and_runs_on(
    other_release, home, runtime_base, criu_binary
):
    kernel_id, pid = left_by(other_release, home, runtime_base, signal.SIGKILL)
    with server(home, runtime_base) as new:
        assert refusal(new) == "PROTOCOL_VERSION"
    with server(home, runtime_base, python=other_release.python) as old:
        assert old.run(kernel_id, QUESTION) == f"True 1000 {pid}"
