"""Records of kernels, without kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jupyter_gpu_ckpt.errors import ProtocolVersion
from jupyter_gpu_ckpt.image import layout
from jupyter_gpu_ckpt.image.store import Store
from jupyter_gpu_ckpt.kernel import registry
from jupyter_gpu_ckpt.kernel.directories import make_runtime_dir
from jupyter_gpu_ckpt.kernel.orphans import find_orphans
from jupyter_gpu_ckpt.kernel.registry import RECORD, VERSION, Registration, kernels, owned_kernel, reap


@pytest.fixture
def registration(tmp_path: Path) -> Registration:
    made = Registration(make_runtime_dir(tmp_path / "base"))
    made.write(kernel_id="k", kernel_name="python3", state="running", pid=1, image=None)
    return made


def change_version(registration: Registration, version: int | None) -> None:
    path = registration.directory / RECORD
    record = json.loads(path.read_text())
    assert record.pop("version") == VERSION
    path.write_text(json.dumps(record if version is None else {**record, "version": version}))


def test_a_record_is_listed_without_its_version(registration: Registration) -> None:
    (record,) = kernels(registration.directory.parent)
    assert record["owned"] and record["state"] == "running" and "version" not in record
    assert (registration.directory / RECORD).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("version", [None, VERSION + 1])
def test_a_record_of_another_version_is_refused_by_name(
    registration: Registration, version: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    base, store = registration.directory.parent, Store(tmp_path / "images")
    change_version(registration, version)
    (record,) = kernels(base)
    assert (record["kernel_id"], record["state"], record["owned"]) == ("k", "refused", True)
    assert str(registration.directory / RECORD) in record["refusal"]
    with pytest.raises(ProtocolVersion):
        owned_kernel(registration.directory)
    assert find_orphans(base, store).refused == {}, "it has an owner"
    registration.release()
    monkeypatch.setattr(registry, "_is_alive", lambda _: True)
    assert list(find_orphans(base, store).refused) == ["k"]
    monkeypatch.undo()
    assert reap(base) == [registration.directory]


def started_from(source: Registration, name: str) -> Registration:
    """A kernel that knows its directory by the path of another one's, as a branch does."""
    made = Registration(make_runtime_dir(source.directory.parent))
    made.write(kernel_id=name, kernel_name="python3", state="running", pid=1, image=None)
    (made.directory / layout.SESSION).write_text(json.dumps({"runtime_dir": str(source.directory)}))
    return made


@pytest.mark.parametrize("end", ["removed", "reaped"])
def test_a_path_stays_as_long_as_a_kernel_knows_its_directory_by_it(registration: Registration, end: str) -> None:
    base, source = registration.directory.parent, registration.directory
    (source / "made" / "by").mkdir(parents=True)
    branches = [started_from(registration, name) for name in ("a", "b")]
    if end == "removed":
        registration.remove()
    else:
        registration.release()
        assert reap(base) == [source]
    assert [path.name for path in source.iterdir()] == [".kept"]
    assert (registry.owned_by_id(source, "a") or {}).get("directory") == str(branches[0].directory)
    branches[0].remove()
    assert sorted(base.glob("[!.]*")) == sorted([source, branches[1].directory])
    branches[1].remove()
    assert list(base.glob("[!.]*")) == []


def test_only_directories_that_were_kept_are_removed_when_nothing_is_in_them(registration: Registration) -> None:
    """In an empty one the capsule of a kernel with another base may have mounted its own."""
    base = registration.directory.parent
    for name in ("0123456789ab", "ba9876543210", "another", "aaaaaaaaaaaa"):
        (base / name).mkdir()
        if name != "aaaaaaaaaaaa":
            (base / name / ".kept").touch()
    (base / "ba9876543210" / "file").touch()
    registration.remove()
    assert sorted(path.name for path in base.iterdir()) == ["aaaaaaaaaaaa", "another", "ba9876543210"]


def test_notes_of_lost_kernels_leave_no_directory(registration: Registration) -> None:
    base = registration.directory.parent
    registration.release()
    assert reap(base)
    assert registry.claim_lost(base, "k", "") == "k"
    assert list(base.iterdir()) == []
