"""Texts for people, command by command, as `texts.txt` has them; nowhere else is a whole text compared.

After a change that is meant, ``GPU_CKPT_WRITE_TEXTS=1 python -m pytest tests/cli/test_texts.py`` writes the file anew.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from pathlib import Path

import pytest
from images import FILES
from images import publish as publish_files

from jupyter_gpu_ckpt.cli import demo
from jupyter_gpu_ckpt.doctor import checks
from jupyter_gpu_ckpt.doctor.checks import Finding
from jupyter_gpu_ckpt.image import layout
from jupyter_gpu_ckpt.kernel.directories import make_runtime_dir
from jupyter_gpu_ckpt.kernel.orphans import VERSION
from jupyter_gpu_ckpt.kernel.registry import Registration
from jupyter_gpu_ckpt.node.match import Mismatch

TEXTS = Path(__file__).with_name("texts.txt")
KERNELS = [f"{n}c0ffee0-1111-2222-3333-444444444444" for n in range(4)]

FINDINGS = [
    Finding("linux", True, "Linux 6.18.44 on x86_64"),
    Finding("criu", False, "No CRIU >= 4.2.1 was found.", "jupyter gpu-ckpt install-criu"),
    Finding("criu-check", None, "not run: there is no CRIU"),
    Finding("disk-space", False, "Only 1.0 GiB free for images.", "df -h /images", "warning"),
]
MISMATCHES = [
    Mismatch("file", "/shared/table.csv", "4 bytes", "8 bytes", "Put it back.", hard=True),
    Mismatch("gpu", "GPU 0", "H200", "H100", "Expect other speeds.", hard=False),
]


def publish(store, files=None, **facts):
    """An image; without a session no server brings it back, so that it may be deleted."""
    plain = {name: content for name, content in FILES.items() if name != "session.json"}
    return publish_files(store, plain if files is None else files, **facts)


class Transcript:
    """Commands and what they print, with every value replaced that differs from run to run."""

    def __init__(self, run, tmp_path: Path) -> None:
        self._run, self._tmp_path = run, str(tmp_path)
        self._ids: dict[str, str] = {}
        self.text = ""

    def __call__(self, *arguments: str) -> None:
        done = self._run(*arguments)
        self.text += self._stable(f"$ jupyter gpu-ckpt {shlex.join(arguments)}\n{done.out}")
        self.text += self._stable("".join(f"stderr: {line}\n" for line in done.err.splitlines()))
        self.text += f"(exit status {done.status})\n\n"

    def _stable(self, text: str) -> str:
        text = text.replace(self._tmp_path, "/home/user")
        text = re.sub(r"\d{8}T\d{6}-(\w{8})-[0-9a-f]{6}", self._image, text)
        text = re.sub(r"\d{8}T\d{6}-[0-9a-f]{8}(?!-)", "20261120T153012-0badcafe", text)
        text = re.sub(r"[\d.]+ [MG]B/s", "340 MB/s", text)
        return re.sub(r"in [\d.]+ m?s\b", "in 0.1 s", text)

    def _image(self, match: re.Match[str]) -> str:
        return self._ids.setdefault(match[0], f"20261120T153012-{match[1]}-{len(self._ids):06}")


@pytest.fixture
def transcript(run, tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_GPU_CKPT_KEYS", str(tmp_path / "keys"))
    monkeypatch.setattr(time, "time", lambda: 1_000_000.0)
    return Transcript(run, tmp_path)


def test_every_text(transcript, run, configuration, tmp_path, monkeypatch):
    from jupyter_gpu_ckpt.image.store import Store

    base = tmp_path / "gpu-ckpt"
    store = Store(tmp_path / "data" / "gpu-ckpt" / "images")
    depot = tmp_path / "depot"
    depot.mkdir()

    transcript("--help")
    transcript("prune", "--help")
    transcript("match", "--help")
    transcript("lst")
    transcript("rm", "--froce", "x")
    transcript("list")
    transcript("check")
    transcript("inspect", "x")

    registration = Registration(make_runtime_dir(base))
    registration.write(kernel_id=KERNELS[0], kernel_name="python3", state="running", pid=8192, image=None)
    first, second = (
        publish(store, kernel_id=id, created=1_000_000.0 - age) for id, age in zip(KERNELS, (10_800, 42), strict=False)
    )
    damaged = publish(store, kernel_id=KERNELS[2])
    (damaged.path / "manifest.json").write_text("{")
    transcript("list")
    registration.remove()
    transcript("check")
    transcript("verify", first.id)
    (second.criu_directory / "core-1.img").write_bytes(b"CORE")
    transcript("check")
    transcript("verify", second.id)
    transcript("seal", second.id)
    with first.lease() as lease:
        lease.claim(os.getpid())
    transcript("break-claim", first.id)
    transcript("break-claim", first.id)
    assert not (first.path / layout.CLAIM).exists()

    monkeypatch.setattr("jupyter_gpu_ckpt.lifecycle.compatibility.mismatches", lambda *_, **__: MISMATCHES)
    transcript("match", first.id)
    monkeypatch.setattr("jupyter_gpu_ckpt.lifecycle.compatibility.mismatches", lambda *_, **__: [])
    transcript("match", first.id)

    session = {"version": VERSION, "kernel_id": KERNELS[3], "kernel_name": "python3", "runtime_dir": "/nowhere/kernel"}
    session.update(has_agent=True, path="/", front={})
    sleeping = publish(store, {"session.json": json.dumps(session).encode()}, kernel_id=KERNELS[3])
    transcript("rm", sleeping.id)
    transcript("prune")
    transcript("prune", "--max-age", "2h", "--dry-run")
    transcript("prune", "--max-age", "2h")
    transcript("prune", "--max-age", "2h")

    transcript("push", second.id, str(depot), "--keep")
    transcript("rm", second.id)
    transcript("pull", str(depot))
    transcript("pull", str(depot), second.id)
    transcript("pull", str(depot))
    transcript("keys")

    monkeypatch.setattr(checks, "diagnose", lambda directory, **options: FINDINGS)
    transcript("doctor")
    monkeypatch.setattr(demo, "quickstart", lambda: tmp_path / "demo.ipynb")
    (tmp_path / "demo.ipynb").write_text('{"cells": []}')
    transcript("demo")

    if "GPU_CKPT_WRITE_TEXTS" in os.environ:
        TEXTS.write_text(transcript.text)
    assert transcript.text.splitlines() == TEXTS.read_text().splitlines()
