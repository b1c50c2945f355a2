"""The library that a kernel preloads; a missing or damaged one prevents no start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import notebook

from jupyter_gpu_ckpt.cuda import fastpath

NATIVE = Path(fastpath.__file__).with_name("native")


@pytest.fixture(autouse=True)
def own_data(tmp_path, monkeypatch):
    data, preload = tmp_path / "data", fastpath.preload
    monkeypatch.setattr(fastpath, "data_directory", (data / "gpu-ckpt").joinpath)
    preload.cache_clear()
    yield data
    preload.cache_clear()


@pytest.fixture
def built(tmp_path) -> Path:
    """A directory with a copy of the library."""
    library = next(iter(sorted(NATIVE.glob("_fastpath*.so"))), None)
    if library is None:
        pytest.skip("the library is not built here: there was no C compiler when the package was installed")
    place = tmp_path / "native"
    place.mkdir()
    (place / "_fastpath.so").write_bytes(library.read_bytes())
    return place


def test_a_copy_is_preloaded_that_another_release_leaves_alone(built, own_data):
    first = fastpath.preload(built)
    assert first.path is not None and first.path.is_relative_to(own_data)
    content = first.path.read_bytes()
    fastpath.preload.cache_clear()
    (built / "_fastpath.so").write_bytes(content + b"another release")
    second = fastpath.preload(built)
    assert second.path not in (None, first.path)
    assert first.path.read_bytes() == content


def test_a_copy_that_was_damaged_is_made_anew(built):
    path = fastpath.preload(built).path
    content = path.read_bytes()
    path.write_bytes(content[:100])
    fastpath.preload.cache_clear()
    assert fastpath.preload(built).path.read_bytes() == content


@pytest.mark.parametrize("content", [b"", b"no library at all", b"\x7fELF" + b"\0" * 60])
def test_a_library_that_cannot_be_loaded_is_not_preloaded(built, content):
    (built / "_fastpath.so").write_bytes(content)
    found = fastpath.preload(built)
    assert found.path is None and "cannot be preloaded" in found.why


def test_without_a_library_or_a_place_for_it_it_is_said_why(built, tmp_path, own_data):
    assert "no C compiler" in fastpath.preload(tmp_path / "nowhere").why
    own_data.mkdir()
    (own_data / "gpu-ckpt").write_text("in the way")
    assert "cannot be copied" in fastpath.preload(built).why


def test_a_host_without_a_gpu_has_kernels_without_it(built, monkeypatch, tmp_path):
    monkeypatch.setattr(fastpath, "has_driver", lambda: False)
    assert fastpath.environment(tmp_path, {}) == {}


def test_what_was_preloaded_before_still_is(built, monkeypatch, tmp_path):
    monkeypatch.setattr(fastpath, "has_driver", lambda: True)
    monkeypatch.setattr(fastpath, "preload", lambda: fastpath.Preload(Path("/ours.so")))
    name = str(tmp_path / fastpath.SOCKET)
    variables = fastpath.environment(tmp_path, {"LD_PRELOAD": "/first.so /ours.so:/second.so"})
    assert variables == {
        "LD_PRELOAD": "/ours.so:/first.so:/second.so",
        fastpath.VARIABLE: name,
        fastpath.CHILDREN_VARIABLE: name,
        "ASAN_OPTIONS": "verify_asan_link_order=0",
    }
    inherited = {"ASAN_OPTIONS": "verify_asan_link_order=1:detect_leaks=0"}
    assert fastpath.environment(tmp_path, inherited)["ASAN_OPTIONS"] == "detect_leaks=0:verify_asan_link_order=0"
    alone = fastpath.environment(tmp_path, {}, children=False)
    assert alone == {"LD_PRELOAD": "/ours.so", fastpath.VARIABLE: name, fastpath.CHILDREN_VARIABLE: ""}
    assert fastpath.environment(tmp_path / ("x" * 100), {}) == {}, "a socket's name has 107 bytes"


def test_what_the_process_starts_inherits_nothing_if_only_the_kernel_is_meant(built, monkeypatch, tmp_path):
    library = fastpath.preload(built).path
    monkeypatch.setattr(fastpath, "has_driver", lambda: True)
    monkeypatch.setattr(fastpath, "preload", lambda: fastpath.Preload(library))
    env = os.environ | fastpath.environment(tmp_path, os.environ, children=False)
    code = "import os, subprocess; print(os.environ.get('LD_PRELOAD'), flush=True); subprocess.run(['env'])"
    said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert said.startswith("None\n") and "LD_PRELOAD" not in said and fastpath.VARIABLE not in said


@pytest.mark.slow
async def test_a_kernel_with_the_library_and_no_gpu_is_checkpointed_and_restored(
    built, monkeypatch, tmp_path, runtime_base
):
    monkeypatch.setattr(fastpath, "has_driver", lambda: True)
    library = fastpath.preload(built)
    monkeypatch.setattr(fastpath, "preload", lambda: library)
    async with notebook(tmp_path, runtime_base, fast_path="auto") as kernel:
        maps = await kernel.run("x = 5; print(open('/proc/self/maps').read())")
        assert str(library.path) in maps
        await kernel.provisioner.checkpoint()
        assert await kernel.run("print(x)") == "5"
