"""Differences of a node from the one an image was made on: each field refused or warned about, in a helpful line."""

from __future__ import annotations

import copy
import mmap
import os
import socket
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest

import jupyter_gpu_ckpt.node.fingerprint as fingerprint_module
from jupyter_gpu_ckpt.errors import ChangedFile, MissingFile, NodeUnfit, PortTaken, SocketTaken
from jupyter_gpu_ckpt.node import facts as node
from jupyter_gpu_ckpt.node import fingerprint, match
from jupyter_gpu_ckpt.node import hashes as hashes_module
from jupyter_gpu_ckpt.node.hashes import Hashes

GIB = 1 << 30
GPU = {"uuid": "GPU-a", "name": "H200", "total": 139 * GIB, "free": 100 * GIB, "driver": "580.1", "cuda": "13.0"}


@pytest.fixture
def data(tmp_path) -> Path:
    file = tmp_path / "data.csv"
    file.write_text("a,b\n")
    return file


def taken(data: Path, **more: Any) -> dict[str, Any]:
    """A fingerprint of a CUDA kernel that has ``data`` open, taken here."""
    facts = data.stat()
    files = [
        {"path": str(data), "size": facts.st_size, "mode": facts.st_mode, "open": True},
        {"path": str(data.parent), "size": None, "mode": data.parent.stat().st_mode, "open": False},
    ]
    options: dict[str, Any] = {"ports": [], "criu": "4.2.1", "gpus": [GPU], "cuda": True, "memory": GIB}
    return match.fingerprint(files=files, **{**options, "device_bytes": {"GPU-a": 8 * GIB}, **more})


def seen(wanted: dict[str, Any]) -> dict[str, Any]:
    return match.inspect_node(wanted, criu="4.2.1", gpus=[GPU], memory=64 * GIB, disk=64 * GIB)


def differences(wanted: dict[str, Any], here: dict[str, Any], **options: Any) -> list[match.Mismatch]:
    return match.match(wanted, here, image="20261120T153012-0c0ffee0-a97839", **options)


def require(mismatches: list[match.Mismatch]) -> None:
    match.require(mismatches, "20261120T153012-0c0ffee0-a97839")


def test_the_node_an_image_was_made_on_matches(data):
    wanted = taken(data)
    assert differences(wanted, seen(wanted)) == []
    require([])


#: By field: what is changed in the answers of this node, and whether that forbids the restore.
DIFFERENCES = {
    "architecture": (lambda here: here.update(architecture="aarch64"), True),
    "cpu": (lambda here: here.update(cpu=[]), True),
    "kernel": (lambda here: here.update(kernel="5.4.0-1-generic"), True),
    "criu": (lambda here: here.update(criu="4.1"), True),
    "glibc": (lambda here: here.update(glibc="2.31"), True),
    "driver": (lambda here: here.update(driver="570.2"), True),
    "cuda": (lambda here: here.update(cuda="12.8"), True),
    "gpu_count": (lambda here: here["gpus"].append({**GPU, "uuid": "GPU-b"}), True),
    "gpu_model": (lambda here: here["gpus"][0].update(name="A100"), True),
    "gpu_memory": (lambda here: here["gpus"][0].update(total=80 * GIB), True),
    "device_memory": (lambda here: here["gpus"][0].update(free=7 * GIB), True),
    "memory": (lambda here: here.update(memory=GIB // 2), True),
    "disk": (lambda here: here.update(disk=GIB // 2), False),
}


@pytest.mark.parametrize("field", DIFFERENCES)
def test_one_line_for_each_difference(data, field):
    wanted = taken(data)
    here = copy.deepcopy(seen(wanted))
    change, hard = DIFFERENCES[field]
    change(here)
    (mismatch,) = differences(wanted, here)
    assert (mismatch.field, mismatch.hard) == (field, hard)
    assert mismatch.wanted != mismatch.found
    assert mismatch.advice
    assert "\n" not in str(mismatch)
    if hard:
        with pytest.raises(NodeUnfit) as caught:
            require([mismatch])
        assert caught.value.details["mismatches"] == [str(mismatch)]
        assert caught.value.hint == mismatch.advice
    else:
        require([mismatch])


def test_a_newer_node_is_no_mismatch(data):
    wanted = taken(data)
    here = seen(wanted)
    here.update(kernel="99.1", criu="5.0", cpu=[*here["cpu"], "amx_fp64"])
    assert differences(wanted, here) == []


def test_a_kernel_that_never_used_cuda_fits_a_node_without_a_gpu(data):
    wanted = taken(data, cuda=False, device_bytes={})
    assert differences(wanted, match.inspect_node(wanted, criu="4.2.1", gpus=[], memory=GIB, disk=GIB)) == []


def test_a_cuda_kernel_does_not_fit_a_node_without_a_gpu(data):
    wanted = taken(data)
    found = differences(wanted, match.inspect_node(wanted, criu="4.2.1", gpus=[], memory=GIB, disk=GIB))
    assert [mismatch.field for mismatch in found] == ["driver", "cuda", "gpu_count"]


def test_free_memory_is_checked_on_the_gpu_the_kernel_goes_to(data):
    gpus = [GPU, {**GPU, "uuid": "GPU-b"}]
    wanted = taken(data, gpus=gpus)
    here = match.inspect_node(wanted, criu="4.2.1", gpus=[{**gpus[0], "free": 0}, gpus[1]], memory=GIB, disk=GIB)
    assert [mismatch.field for mismatch in differences(wanted, here)] == ["device_memory"]
    swapped = {"GPU-a": "GPU-b", "GPU-b": "GPU-a"}
    assert differences(wanted, here, gpu_map=swapped) == []
    assert differences(wanted, here, gpu_map={"GPU-a": "GPU-b"}) == [], "the other one takes the place that is left"


def test_an_image_without_a_fingerprint_is_not_compared():
    assert differences({}, match.inspect_node({}, criu="4.2.1", gpus=[], memory=0, disk=0)) == []


def test_packages_that_differ_are_named_and_only_warned_about(tmp_path, data):
    site = tmp_path / "lib" / "site-packages"
    for name in ("numpy-2.1.0.dist-info", "torch-2.13.0+cpu.dist-info"):
        (site / name).mkdir(parents=True)
    (site / "numpy" / "core.so").parent.mkdir()
    (site / "numpy" / "core.so").write_bytes(b"")
    facts = (site / "numpy" / "core.so").stat()
    wanted = match.fingerprint(
        files=[{"path": str(site / "numpy/core.so"), "size": 0, "mode": facts.st_mode, "open": False}],
        ports=[],
        criu="4.2.1",
    )
    (site / "numpy-2.1.0.dist-info").rename(site / "numpy-2.2.0.dist-info")
    (mismatch,) = differences(wanted, seen(wanted))
    assert (mismatch.field, mismatch.hard) == ("packages", False)
    assert (mismatch.wanted, mismatch.found) == ("numpy 2.1.0", "2.2.0")


def test_a_mount_that_is_not_there(data):
    wanted = taken(data)
    wanted["mounts"] = {"/scratch": "nfs4"}
    (mismatch,) = differences(wanted, seen(wanted))
    assert (mismatch.field, mismatch.path, mismatch.wanted, mismatch.hard) == ("mount", "/scratch", "nfs4", False)


def test_the_mount_a_file_lies_on_is_part_of_the_fingerprint():
    where = {"/": "ext4", "/home": "nfs4", "/home/ada/tmp": "tmpfs"}
    assert node.mount_of("/home/ada/x", where) == "/home"
    assert node.mount_of("/home/ada/tmp/x", where) == "/home/ada/tmp"
    assert node.mount_of("/homeless", where) == "/"


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_port_that_is_taken(data, kind):
    with socket.socket(socket.AF_INET, kind) as other:
        other.bind(("127.0.0.1", 0))
        if kind == socket.SOCK_STREAM:
            other.listen()
        number = other.getsockname()[1]
        port = {"family": int(socket.AF_INET), "type": int(kind), "address": "127.0.0.1", "number": number}
        wanted = taken(data, ports=[port])
        (mismatch,) = differences(wanted, seen(wanted))
    assert mismatch.field == "port"
    with pytest.raises(PortTaken, match=str(number)):
        require([mismatch])
    assert differences(wanted, seen(wanted)) == []


# -- files


@pytest.mark.parametrize("now", ["", "a,b\n1,2\n"], ids=["shrank", "grew"])
def test_a_file_that_changed_is_named_with_both_sizes(data, now):
    wanted = taken(data)
    data.write_text(now)
    (mismatch,) = differences(wanted, seen(wanted))
    assert (mismatch.field, mismatch.path) == ("file_changed", str(data))
    assert (mismatch.wanted, mismatch.found) == ("4 bytes", f"{len(now)} bytes")
    with pytest.raises(ChangedFile) as caught:
        require([mismatch])
    assert caught.value.details["culprit"] == str(data)
    assert "`jupyter gpu-ckpt match 20261120T153012-0c0ffee0-a97839 --accept-changed-files`" in caught.value.hint

    accepted = differences(wanted, seen(wanted), accept_changed_files=True)
    require(accepted)
    assert match.accepted_files(accepted) == [str(data)]


def test_a_file_that_is_gone_stays_a_refusal(data):
    wanted = taken(data)
    data.unlink()
    found = differences(wanted, seen(wanted), accept_changed_files=True)
    assert [(mismatch.field, mismatch.path) for mismatch in found] == [("file_missing", str(data))]
    with pytest.raises(MissingFile):
        require(found)


def test_another_mode_is_no_other_content_if_the_file_can_be_opened(data, tmp_path, monkeypatch):
    hashes = Hashes(tmp_path)
    wanted = held(data, hashes)
    data.chmod(0o640)
    assert compared(wanted, hashes) == [("file_changed", False)]
    place = data.parent / "place"
    place.mkdir()
    directory = held(place)
    place.chmod(0o700)
    assert compared(directory) == [("file_changed", False)]
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    for each in (wanted, directory):
        assert compared(each, hashes) == [("file_changed", True)]
        assert compared(each, hashes, accept_changed_files=True) == [("file_changed", False)]


def test_another_kind_of_file_cannot_be_accepted(data):
    wanted = taken(data)
    data.unlink()
    data.mkdir()
    assert any(mismatch.hard for mismatch in differences(wanted, seen(wanted), accept_changed_files=True))


def test_a_file_that_is_only_appended_to_may_change(data):
    facts = data.stat()
    file = {"path": str(data), "size": None, "mode": facts.st_mode, "open": True}  # CRIU asks no size of it
    wanted = match.fingerprint(files=[file], ports=[], criu="4.2.1")
    data.write_text("a,b\nmore\n")
    (mismatch,) = differences(wanted, seen(wanted))
    assert (mismatch.field, mismatch.hard) == ("file_changed", False)


@pytest.mark.parametrize(
    ("uses", "replaced", "hard"),
    [
        ({}, "", False),
        ({"locked": True}, "", True),
        ({}, "renamed", True),
        ({}, "removed", True),
        ({"open": False}, "", True),
    ],
    ids=["open", "in a transaction", "another database", "a new database", "not open"],
)
def test_a_database_of_sqlite_may_have_been_written_to(tmp_path, uses, replaced, hard):
    """Not replaced: a new file may get the inode of a removed one, and the same script gives it the same counter."""
    path = tmp_path / "study.db"
    path.write_bytes(b"SQLite format 3\0" + bytes(4080))
    wanted = held(path, **uses)
    if replaced == "renamed":
        path.rename(tmp_path / "old.db")
    elif replaced:
        path.unlink()
    path.write_bytes(b"SQLite format 3\0" + bytes(8176))
    assert compared(wanted) == [("file_changed", hard)]


@pytest.mark.parametrize(("now", "hard"), [("a,b\n1,2\n", False), ("a", True)], ids=["grew", "shrank"])
def test_a_mapped_file_may_have_grown_but_not_shrunk(data, now, hard):
    """Memory beyond the end of a file is none: a touch of it ends the process."""
    facts = data.stat()
    file = {"path": str(data), "size": facts.st_size, "mode": facts.st_mode, "open": False}
    wanted = match.fingerprint(files=[file], ports=[], criu="4.2.1")
    data.write_text(now)
    (mismatch,) = differences(wanted, seen(wanted), accept_changed_files=True)
    assert mismatch.hard is hard


@pytest.fixture(params=["a disk", "memory"])
def stored(request, tmp_path):
    """A file with a dirty page in a shared mapping, which the test gets."""
    with tempfile.TemporaryDirectory(dir=tmp_path if request.param == "a disk" else "/dev/shm") as directory:
        path = Path(directory, "mapped")
        path.write_bytes(bytes(mmap.PAGESIZE))
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
            mapping[:1] = b"1"
            yield path, mapping


@pytest.mark.parametrize("hashed", [True, False])
def test_a_store_to_a_dirty_page_of_processes_that_run_on_is_noticed(stored, tmp_path, hashed):
    path, mapping = stored
    hashes = Hashes(tmp_path) if hashed else None
    wanted = held(path, hashes, writes=True, through_mapping=True, continues=True)
    if hashed:
        assert compared(wanted, hashes) == []
    for content in (b"2", b"3"):
        mapping[:1] = content
        assert compared(wanted, hashes) == [("file_changed", True)]
        assert compared(wanted, hashes, accept_changed_files=True) == [("file_changed", False)]
    if hashed:
        mapping[:1] = b"1"
        assert compared(wanted, hashes) == []


@pytest.mark.parametrize("tick", [0, fingerprint_module._TICK])
def test_a_change_in_the_tick_of_the_clock_in_which_the_file_was_noted_is_noticed(data, monkeypatch, tick):
    monkeypatch.setattr(fingerprint_module, "_TICK", tick)
    monkeypatch.setattr(fingerprint_module.time, "time_ns", lambda: data.stat().st_ctime_ns + 1_000_000)
    wanted = held(data, continues=True)
    data.write_text("b,a\n")
    facts = data.stat()
    wanted["files"][str(data)] |= {"mtime": facts.st_mtime_ns, "ctime": facts.st_ctime_ns}
    assert compared(wanted) == ([("file_changed", True)] if tick else [])


def held(path: Path, hashes: Hashes | None = None, continues: bool = False, **more: Any) -> dict[str, Any]:
    """A fingerprint of a kernel that has ``path`` open, or holds it in the way that ``more`` says."""
    facts = path.stat()
    size = None if path.is_dir() else facts.st_size
    file = {"path": str(path), "size": size, "mode": facts.st_mode, "open": True, **more}
    return match.fingerprint(files=[file], ports=[], criu="4.2.1", hashes=hashes, continues=continues)


def compared(wanted: dict[str, Any], hashes: Hashes | None = None, **options: Any) -> list[tuple[str, bool]]:
    here = match.inspect_node(wanted, criu="4.2.1", gpus=[], memory=GIB, disk=GIB, hashes=hashes)
    return [(mismatch.field, mismatch.hard) for mismatch in differences(wanted, here, **options)]


def changed(path: Path, how: str) -> None:
    facts = path.stat()
    content = path.read_bytes()[:-1] + b"!"
    if how == "in place":
        path.write_bytes(content)
    elif how == "in place, with its old time":
        path.write_bytes(content)
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    else:
        path.with_name("new").write_bytes(content)
        path.with_name("new").rename(path)


@pytest.mark.parametrize("how", ["in place", "in place, with its old time", "replaced"])
def test_another_content_of_the_same_size(data, tmp_path, how):
    hashes = Hashes(tmp_path)
    wanted, code = held(data, hashes), held(data, hashes, open=False, code=True)
    changed(data, how)
    assert compared(wanted, hashes) == [("file_changed", True)]
    assert compared(wanted, hashes, accept_changed_files=True) == [("file_changed", False)]
    assert compared(code, hashes, accept_changed_files=True) == [("file_changed", True)]


@pytest.mark.parametrize("at_once", [hashes_module.AT_ONCE, 0], ids=["small", "large"])
def test_the_hash_of_a_file_that_is_written_through_a_mapping_is_of_this_checkpoint(
    data, tmp_path, monkeypatch, at_once
):
    """The kernel has run on after an earlier one, which failed; of a later write to the same page no time is noted."""
    monkeypatch.setattr(hashes_module, "AT_ONCE", at_once)
    monkeypatch.setattr(hashes_module, "_SETTLED", -(10**10))
    hashes = Hashes(tmp_path)
    with data.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        for letter in b"xyz":
            memory[0] = letter
            wanted = held(data, hashes, writes=True, through_mapping=True)
            hashes.begin()
            hashes.settle()
    rename(data)  # the same content, and another ctime
    for known in (hashes, Hashes(tmp_path)):
        assert compared(wanted, known) == []
    changed(data, "in place, with its old time")
    assert compared(wanted, hashes) == [("file_changed", True)]


def test_a_file_of_others_that_this_user_may_not_open_cannot_be_accepted(data, tmp_path, monkeypatch):
    hashes = Hashes(tmp_path)
    wanted = held(data, hashes)
    changed(data, "replaced")
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    monkeypatch.setattr(fingerprint, "_is_own", lambda path: False)
    assert ("file_changed", True) in compared(wanted, hashes, accept_changed_files=True)


def test_other_rights_hide_no_other_content(data, tmp_path):
    hashes = Hashes(tmp_path)
    wanted = held(data, hashes, open=False, code=True)
    changed(data, "replaced")
    data.chmod(0o755)
    assert compared(wanted, hashes, accept_changed_files=True) == [("file_changed", True), ("file_changed", False)]


@pytest.mark.parametrize("how", ["in place", "in place, with its old time", "replaced"])
def test_without_a_hash_a_file_of_this_machine_goes_by_its_identity(data, how):
    wanted = held(data)
    changed(data, how)
    assert compared(wanted) == [("file_changed", True)]
    assert compared(wanted, accept_changed_files=True) == [("file_changed", False)]


def rename(path: Path) -> None:
    path.rename(path.with_name("aside"))
    path.with_name("aside").rename(path)


def link(path: Path) -> None:
    path.with_name("link").hardlink_to(path)


def keep_access_time(path: Path) -> None:
    """A backup reads the file and puts its times back."""
    facts = path.stat()
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


@pytest.mark.parametrize("harmless", [rename, link, keep_access_time])
@pytest.mark.parametrize("uses", [{}, {"open": False, "code": True}], ids=["data", "program code"])
def test_names_and_times_do_not_make_another_content_but_that_must_be_proven(data, tmp_path, harmless, uses):
    hashes = Hashes(tmp_path)
    hashed, unknown = held(data, hashes, **uses), held(data, **uses)
    harmless(data)
    assert compared(hashed, hashes) == []
    assert compared(unknown, hashes) == [("file_changed", True)]
    assert compared(unknown, hashes, accept_changed_files=True) == [("file_changed", False)], "its user may know it"


def test_a_hash_that_was_made_after_the_checkpoint_counts(data, tmp_path, monkeypatch):
    monkeypatch.setattr(hashes_module, "_SETTLED", -(10**10))
    wanted, hashes = held(data), Hashes(tmp_path)
    hashes.queue([(str(data), wanted["files"][str(data)], False)])
    hashes.begin()
    hashes.settle()
    hashes = Hashes(tmp_path)  # the next server's
    link(data)
    assert compared(wanted, hashes) == []
    changed(data, "in place, with its old time")
    assert compared(wanted, hashes) == [("file_changed", True)]


def renumbered(wanted: dict[str, Any]) -> dict[str, Any]:
    """The same, as if the device had had another number: before a boot or a mount."""
    wanted = copy.deepcopy(wanted)
    for file in wanted["files"].values():
        file["device"] += 1
    return wanted


def test_a_device_that_was_mounted_again_is_no_other_one(data, tmp_path):
    hashes = Hashes(tmp_path)
    for wanted in (held(data), held(data, hashes), held(tmp_path)):
        assert compared(renumbered(wanted), hashes) == []
    coarse = renumbered(held(data, hashes))
    coarse["files"][str(data)]["ctime"] = 1_000_000_000  # of an image whose maker chose the times
    assert compared(coarse, hashes) == []
    changed(data, "in place, with its old time")
    assert compared(coarse, hashes) == [("file_changed", True)]


def test_another_machine_has_other_numbers_and_goes_by_size_and_hash(data, tmp_path, monkeypatch):
    hashes = Hashes(tmp_path)
    with_hash, without, directory = held(data, hashes), held(data), held(tmp_path)
    monkeypatch.setattr(node, "machine", lambda: "another")
    moved = data.with_name("moved")
    moved.write_bytes(data.read_bytes())
    moved.rename(data)
    directory["files"][str(tmp_path)]["inode"] += 1
    for wanted in (with_hash, without, directory):
        assert compared(wanted, hashes) == []
    changed(data, "replaced")
    assert compared(with_hash, hashes) == [("file_changed", True)]
    assert compared(without, hashes) == [], "its size is all that is known"


@pytest.mark.parametrize(("root", "id", "lasts"), [("ext4", "a", True), ("overlay", "a", False), ("ext4", "", False)])
def test_a_machine_is_known_again_after_a_boot_where_nothing_else_has_its_id(monkeypatch, root, id, lasts):
    read = Path.read_text
    contents = {"/etc/machine-id": id}
    monkeypatch.setattr(node, "mounts", lambda: {"/": root})
    monkeypatch.setattr(
        Path, "read_text", lambda path, *args, **more: contents.get(str(path)) or read(path, *args, **more)
    )
    if not id:
        monkeypatch.setattr(node, "_MACHINE_ID", Path("/nowhere"))
    machines = set()
    for boot in ("one", "two"):
        monkeypatch.setattr(node.procfs, "boot_id", lambda boot=boot: boot)
        machines.add(node.machine())
    assert (len(machines) == 1) is lasts
    assert all(machine.endswith(f" {socket.gethostname()}") for machine in machines)


def test_a_directory_is_the_one_it_was_whatever_is_in_it(tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    wanted = held(place)
    (place / "new").touch()
    assert compared(wanted) == []
    place.rename(tmp_path / "aside")
    place.mkdir()
    assert compared(wanted) == [("file_changed", True)]
    assert compared(wanted, accept_changed_files=True) == [("file_changed", False)]


@pytest.mark.parametrize("kind", ["overlay", "fuse.sshfs", "cifs"])
def test_a_directory_whose_number_does_not_last_is_not_known_by_it(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(node, "mounts", lambda: {"/": kind})
    place = tmp_path / "place"
    place.mkdir()
    wanted = held(place)
    place.rename(tmp_path / "aside")
    place.mkdir()
    assert compared(wanted) == []


def test_what_linux_says_at_the_moment_has_no_content(tmp_path):
    path = Path("/sys/class/net/lo/ifindex")
    wanted = held(path, Hashes(tmp_path))
    assert "inode" not in wanted["files"][str(path)]
    assert "blake3" not in wanted["files"][str(path)]
    assert compared(wanted) == []


@pytest.mark.parametrize("accept", [False, True])
@pytest.mark.parametrize("size", [0, None], ids=["open for reading", "only appended to"])
def test_a_named_pipe_in_the_place_of_a_file(tmp_path, accept, size):
    path = tmp_path / "empty"
    path.touch()
    hashes = Hashes(tmp_path)
    wanted = held(path, hashes, size=size)
    path.unlink()
    os.mkfifo(path)
    here = match.inspect_node(wanted, criu="4.2.1", gpus=[], memory=GIB, disk=GIB, hashes=hashes)
    (mismatch,) = differences(wanted, here, accept_changed_files=accept)
    assert (mismatch.wanted, mismatch.found, mismatch.hard) == ("a file", "a named pipe", True)


def test_an_image_of_an_older_release_goes_by_size_and_build_id(data):
    wanted = held(data)
    entry = wanted["files"][str(data)]
    wanted["files"][str(data)] = {
        name: entry[name] for name in ("size", "mode", "build_id", "open", "mapped", "checked")
    }
    changed(data, "replaced")
    assert compared(wanted) == []
    data.write_text("longer than it was")
    assert compared(wanted) == [("file_changed", True)]


@pytest.mark.parametrize("here", [True, False])
def test_program_code_is_compared_by_its_build_id(tmp_path, monkeypatch, here):
    library = next(path for path in map(Path, _mapped()) if path.name.startswith("libc.so"))
    copy = tmp_path / "libx.so"
    copy.write_bytes(library.read_bytes())
    assert len(node.build_id(str(copy))) == 40
    facts = copy.stat()
    file = {"path": str(copy), "size": facts.st_size, "mode": facts.st_mode, "open": False}
    wanted = match.fingerprint(files=[file], ports=[], criu="4.2.1")
    content = bytearray(copy.read_bytes())
    at = content.index(bytes.fromhex(node.build_id(str(copy))))
    content[at] ^= 0xFF
    copy.write_bytes(content)
    if not here:
        monkeypatch.setattr(node, "machine", lambda: "another")
    (mismatch,) = differences(wanted, seen(wanted), accept_changed_files=True)
    assert (mismatch.field, mismatch.hard, mismatch.path) == ("file_changed" if here else "build", True, str(copy))
    assert ("other node" in mismatch.advice, "restart the kernel" in mismatch.advice) == (not here, here)
    with pytest.raises(ChangedFile if here else NodeUnfit):
        require([mismatch])


@pytest.mark.parametrize(("machine", "nodes"), [("this one", False), ("another", True)])
def test_no_advice_speaks_of_nodes_where_there_is_but_one(machine, nodes):
    old = {"machine": "this one", "glibc": "1.0", "packages": {"/lib": {"numpy": "1"}}, "ports": [1], "sockets": []}
    taken = [{"number": 80, "address": "::1", "problem": "it is in use"}]
    bound = [{"path": "/run/x", "problem": "another process listens there"}]
    now = {"machine": machine, "glibc": "2.0", "packages": {"/lib": {"numpy": "2"}}, "ports": taken, "sockets": bound}
    advice = [mismatch.advice for mismatch in differences(old, {**now, "files": {}})]
    assert len(advice) == 4
    assert [each for each in advice if "node" in each] == ([advice[0], advice[-1]] if nodes else [])


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"\x7fELF\x02\x01" + b"\xff" * 200, b"#!/bin/sh\n"])
def test_a_file_without_a_build_id_has_none(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    assert node.build_id(str(tmp_path / "x")) == ""


def _mapped() -> set[str]:
    return {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}


def test_the_working_directory_must_be_there(data):
    wanted = taken(data)
    assert stat.S_ISDIR(wanted["files"][str(data.parent)]["mode"])
    away = data.parent.with_name("elsewhere")
    os.rename(data.parent, away)
    found = {mismatch.path for mismatch in differences(wanted, seen(wanted)) if mismatch.field == "file_missing"}
    assert found == {str(data), str(data.parent)}


def test_a_unix_socket_that_another_process_has_created_since_is_reported(tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as own:
        own.bind(str(path))
    facts = path.stat()
    noted = [{"path": str(path), "inode": facts.st_ino, "mtime": facts.st_mtime_ns}]
    wanted = match.fingerprint(files=[], ports=[], criu="4.2.1", sockets=noted)
    assert compared(wanted) == [], "the file that the socket left"
    path.unlink()
    assert compared(wanted) == []
    path.write_text("")
    assert compared(wanted) == [("socket", True)]
    path.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(path))
        assert compared(wanted) == [("socket", True)]
    assert compared(wanted) == [], "no process has it any more, as after a restore that was broken off"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        assert compared(wanted) == [("socket", True)], "also where it has the inode of the old one"
        with pytest.raises(SocketTaken):
            require(differences(wanted, match.inspect_node(wanted, criu="4.2.1", gpus=[], memory=GIB, disk=GIB)))
