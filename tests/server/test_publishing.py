"""Requirements of sleeping kernels that a server publishes for the hub."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import stat
from pathlib import Path

import pytest
from live import server, until

from jupyter_gpu_ckpt.image.manifest import Manifest
from jupyter_gpu_ckpt.image.store import Image, Store
from jupyter_gpu_ckpt.kernel.orphans import Session
from jupyter_gpu_ckpt.node.requirements import FILE, VARIABLE, Requirements, of, parse
from jupyter_gpu_ckpt.server.placement import publish


def asleep(store: Store, kernel_id: str, **fingerprint) -> Image:
    """An image of a kernel that a server would bring back."""
    draft = store.begin(kernel_id)
    (draft.criu_directory / "core-1.img").write_bytes(b"core")
    Session(kernel_id, "python3", "/nowhere", True, "/home", {}).write(draft.path)
    zero = dict.fromkeys(("pid", "monotonic", "boottime"), 1)
    texts = dict.fromkeys(("id", "kernel_name", "hostname", "runtime_dir", "criu_version"), "")
    facts = Manifest(kernel_id=kernel_id, created=1.0, uid=os.geteuid(), pipes=[], **zero, **texts)
    return draft.publish(dataclasses.replace(facts, fingerprint=fingerprint))


def published(directory: Path) -> list[Requirements]:
    return parse((directory / FILE).read_bytes())


@pytest.fixture
def place(tmp_path) -> Path:
    (tmp_path / "placement").mkdir()
    return tmp_path / "placement"


def test_every_kernel_that_sleeps_and_nothing_else(tmp_path, place):
    store = Store(tmp_path / "images")
    publish(place, store)
    assert published(place) == []
    asleep(store, "a" * 8, glibc="2.36")
    kept = asleep(store, "b" * 8, glibc="2.31")
    kept.retire()  # its user shut the kernel down
    publish(place, store)
    assert published(place) == [Requirements(glibc="2.36")]


def test_of_a_kernel_with_several_images_the_newest(tmp_path, place, monkeypatch):
    store = Store(tmp_path / "images")
    for day, glibc in (("20260101", "2.31"), ("20260102", "2.36")):
        monkeypatch.setattr("time.strftime", lambda *_, day=day: f"{day}T000000")
        asleep(store, "a" * 8, glibc=glibc)
    publish(place, store)
    assert published(place) == [Requirements(glibc="2.36")]


def test_the_group_may_read_it_and_nobody_else(tmp_path, place):
    before = os.umask(0)
    try:
        publish(place, Store(tmp_path / "images"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((place / FILE).stat().st_mode) == 0o640
    assert [one.name for one in place.iterdir()] == [FILE], "no draft is left"


def test_a_server_emits_events_when_a_kernel_sleeps_wakes_and_is_left(
    tmp_path, place, runtime_base, criu_binary, monkeypatch
):
    monkeypatch.setenv(VARIABLE, str(place))
    with server(tmp_path / "home", runtime_base) as live:
        until(lambda: (place / FILE).is_file())
        assert published(place) == []
        kernel_id = live.start_kernel()
        live.run(kernel_id, "x = 41")
        live.do(kernel_id, "checkpoint")
        (needed,) = until(lambda: published(place))
        (image,) = Store(tmp_path / "home" / "images").images()
        assert needed == of(json.loads(image.manifest.to_json())["fingerprint"])
        assert live.run(kernel_id, "print(x + 1)") == "42"
        until(lambda: published(place) == [], timeout=60)
        live.process.send_signal(signal.SIGTERM)
        live.process.wait(60)
        (left,) = published(place)  # said for the last time when all have left
        assert dataclasses.replace(left, memory=needed.memory) == needed
