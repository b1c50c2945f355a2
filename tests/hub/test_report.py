"""`admin report`: who holds what, from the directories alone, whatever the users have put there."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "image"))
from images import FACTS, publish

from jupyter_gpu_ckpt import cli
from jupyter_gpu_ckpt.hub import confined, report, survey
from jupyter_gpu_ckpt.image import absences
from jupyter_gpu_ckpt.image.keys import Keyring
from jupyter_gpu_ckpt.image.store import Store

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: run the tests as root too")
ADA, BOB = 54321, 54322
NOW = 1_000_000.0
H200 = {"gpus": [{"uuid": "GPU-1", "name": "NVIDIA H200", "total": 1}, {"uuid": "GPU-2", "name": "other", "total": 1}]}


@pytest.fixture
def root(tmp_path):
    """What an administrator has made for everybody; the way there is open."""
    for path in list(tmp_path.parents)[:3]:
        if path.stat().st_uid == os.geteuid():
            path.chmod(path.stat().st_mode | 0o055)
    tmp_path.chmod(0o755)
    directory = tmp_path / "images"
    directory.mkdir()
    directory.chmod(0o1777)
    return directory


@pytest.fixture
def store(root, tmp_path) -> Store:
    directory = root / str(os.geteuid())
    directory.mkdir(mode=0o700)
    return Store(directory, Keyring(tmp_path / "keys"))


def given(path: Path, uid: int) -> Path:
    """``path`` and all below it become the user's."""
    for each in [path, *path.rglob("*")]:
        os.chown(each, uid, uid, follow_symlinks=False)
    return path


def of_me(users: list[report.User]) -> report.User:
    (user,) = [user for user in users if user.uid == os.geteuid()]
    return user


def test_who_holds_what(store, root):
    publish(store, kernel_id="young", created=NOW - 60, fingerprint=H200)
    publish(store, kernel_id="old", created=NOW - 7200, fingerprint=H200, device_bytes={"GPU-1": 3, "GPU-2": 4})
    row = of_me(report.collect(root, store.root, NOW)).summary(NOW)
    assert (row["kernels_asleep"], row["images"], row["device_bytes_freed"]) == (2, 2, 10)
    assert (row["oldest_s"], row["gpu_models"]) == (7200.0, ["NVIDIA H200", "other"])
    assert row["gpu_hours_given_back"] == pytest.approx(2 * 2 + 60 / 3600)
    real = sum(path.stat().st_blocks * 512 for path in store.root.rglob("*") if path.is_file())
    assert row["disk_bytes"] == real > 0
    assert row["problems"] == {}


def test_gpu_hours_of_kernels_that_are_back_are_counted_and_none_twice(store, root):
    image = publish(store, kernel_id="back", created=NOW - 7200)
    absences.came_back(store.root, image, NOW - 3600)
    user = of_me(report.collect(root, store.root, NOW))
    assert (user.gpu_seconds, user.returns, user.asleep) == (3600.0, 1, [])
    store.remove(image)
    assert of_me(report.collect(root, store.root, NOW)).gpu_seconds == 3600.0


def test_a_kernel_that_was_shut_down_sleeps_no_more(store, root):
    image = publish(store, created=NOW - 7200)
    image.retire()
    os.utime(image._mark("retired"), (NOW - 3600, NOW - 3600))
    user = of_me(report.collect(root, store.root, NOW))
    assert (user.asleep, len(user.images), user.gpu_seconds) == ([], 1, 3600.0)


def test_of_two_images_of_a_kernel_it_sleeps_once(store, root):
    for age in (20, 10):
        publish(store, kernel_id="one", created=NOW - age)
    assert [held.created for held in of_me(report.collect(root, store.root, NOW)).asleep] == [NOW - 10]


def test_without_a_root_it_is_the_callers_own(store, tmp_path):
    publish(store)
    (user,) = report.collect(None, store.root, NOW)
    assert len(user.images) == 1
    (user,) = report.collect(None, tmp_path / "nothing", NOW)
    assert (user.images, user.problems) == ([], {})


@AS_ROOT
def test_two_users_are_told_apart(root, tmp_path):
    for uid, number in ((ADA, 1), (BOB, 3)):
        (root / str(uid)).mkdir(mode=0o700)
        own = Store(root / str(uid), Keyring(tmp_path / "keys"))
        os.chown(own.root, os.geteuid(), os.geteuid())
        for kernel in range(number):
            publish(own, kernel_id=str(kernel))
        given(own.root, uid)
    users = report.collect(root, tmp_path, NOW)
    assert [(user.uid, user.name, len(user.asleep)) for user in users] == [(BOB, str(BOB), 3), (ADA, str(ADA), 1)]
    document = report.as_json(users, NOW)
    assert document["total"]["kernels_asleep"] == 4
    assert len(document["users"][0]["held"]) == 3


def test_the_command(store, root, capsys):
    publish(store, created=time.time() - 7200, fingerprint=H200)
    assert cli.main(["admin", "report", "--root", str(root)]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["USER", "ASLEEP", "IMAGES", "ON", "DISK", "OFF", "GPU", "OLDEST", "GPU-HOURS", "GPUS"]
    assert table[1].split()[1:3] == ["1", "1"]
    assert table[1].endswith("2 h       2.0  NVIDIA H200")
    for arguments in (
        ["admin", "report", "--json", "--root", str(root)],
        ["admin", "--json", "report", "--root", str(root)],
    ):
        assert cli.main(arguments) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["users"][0]["held"][0]["kernel_id"] == FACTS.kernel_id
    assert cli.main(["admin", "report", "--image-dir", str(store.root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["users"][0]["kernels_asleep"] == 1
    assert cli.main(["admin", "report", "--root", str(root / "nowhere"), "--json"]) == 73
    assert json.loads(capsys.readouterr().err)["error"]["code"] == "STORE_UNWRITABLE"


# -- users who mean ill


def hostile_link_to_secrets(image, store, outside):
    (image.path / "manifest.json").unlink()
    (image.path / "manifest.json").symlink_to(outside / "manifest.json")


def hostile_second_name(image, store, outside):
    (image.path / "manifest.json").unlink()
    (image.path / "manifest.json").hardlink_to(outside / "manifest.json")


def hostile_pipe(image, store, outside):
    (image.path / "manifest.json").unlink()
    os.mkfifo(image.path / "manifest.json")


def hostile_socket(image, store, outside):
    (image.path / "manifest.json").unlink()
    here = os.getcwd()
    os.chdir(image.path)
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind("manifest.json")
    finally:
        os.chdir(here)


def hostile_directory(image, store, outside):
    (image.path / "manifest.json").unlink()
    (image.path / "manifest.json").mkdir()


def hostile_terabyte(image, store, outside):
    os.truncate(image.path / "manifest.json", 1 << 40)


def hostile_depth(image, store, outside):
    (image.path / "manifest.json").write_text("[" * 1_000_000)


def hostile_number(image, store, outside):
    text = (image.path / "manifest.json").read_text()
    (image.path / "manifest.json").write_text(text.replace('"created": 1.0', '"created": ' + "9" * 100_000))


def hostile_nan(image, store, outside):
    text = (image.path / "manifest.json").read_text()
    (image.path / "manifest.json").write_text(text.replace('"created": 1.0', '"created": NaN'))


def hostile_empty(image, store, outside):
    (image.path / "manifest.json").write_bytes(b"")


def hostile_bytes(image, store, outside):
    (image.path / "manifest.json").write_bytes(bytes(range(256)) * 100)


def hostile_other_name(image, store, outside):
    image.path.rename(store.root / "renamed")


@pytest.mark.parametrize("hostile", [each for name, each in sorted(globals().items()) if name.startswith("hostile_")])
def test_a_hostile_image_is_passed_over_and_the_others_are_told(store, root, tmp_path, hostile):
    outside = tmp_path / "outside"
    outside.mkdir()
    bad = publish(store, kernel_id="bad")
    (outside / "manifest.json").write_bytes((bad.path / "manifest.json").read_bytes())
    hostile(bad, store, outside)
    publish(store, kernel_id="good", created=NOW - 60)
    user = of_me(report.collect(root, store.root, NOW))
    assert [held.kernel_id for held in user.images] == ["good"]
    assert sum(user.problems.values()) == 1


def test_links_and_pipes_beside_images_are_not_followed_and_not_waited_for(store, root, tmp_path):
    publish(store, kernel_id="good")
    linked = publish(store, kernel_id="linked")
    linked.path.rename(tmp_path / "elsewhere")
    linked.path.symlink_to(tmp_path / "elsewhere")
    os.mkfifo(store.root / "pipe")
    (store.root / absences.RECORD).symlink_to("/dev/zero")
    (store.root / "loop").symlink_to(store.root)
    user = of_me(report.collect(root, store.root, NOW))
    assert [held.kernel_id for held in user.images] == ["good"]
    assert user.problems == {"not an image": 3}


def test_a_deep_and_a_wide_image_have_an_end(store, root, monkeypatch):
    image = publish(store, kernel_id="good")
    deep = image.path
    for _ in range(40):
        deep = deep / "d"
        deep.mkdir()
    assert of_me(report.collect(root, store.root, NOW)).problems == {"too many files": 1}
    monkeypatch.setattr(survey, "MOST_FILES", 3)
    assert "too many files" in of_me(report.collect(root, store.root, NOW)).problems
    publish(store, kernel_id="another")
    monkeypatch.setattr(survey, "MOST_IMAGES", 1)
    assert "too many images" in of_me(report.collect(root, store.root, NOW)).problems


def test_a_file_of_many_names_takes_its_room_once(store, root):
    image = publish(store, {"pages-1.img": b"x" * 100_000})
    before = of_me(report.collect(root, store.root, NOW)).disk
    for number in range(20):
        (image.path / f"again-{number}").hardlink_to(image.criu_directory / "pages-1.img")
    assert of_me(report.collect(root, store.root, NOW)).disk == before


ESCAPES = "\x1b]0;owned\x07\x1b[2J\r\u202egnp\u0085\ud800"


def test_names_cannot_drive_the_terminal(store, root, capsys):
    gpus = {"gpus": [{"uuid": "GPU-1", "name": f"H200{ESCAPES}", "total": 1}]}
    image = publish(store)
    names = {"kernel_id": f"x{ESCAPES}", "kernel_name": ESCAPES, "hostname": ESCAPES, "fingerprint": gpus}
    facts = json.loads((image.path / "manifest.json").read_text())
    (image.path / "manifest.json").write_text(json.dumps({**facts, **names}))
    assert cli.main(["admin", "report", "--root", str(root)]) == 0
    out = capsys.readouterr().out
    assert "H200\\x1b]0;owned\\x07" in out
    assert all(one.isprintable() or one == "\n" for one in out)
    assert cli.main(["admin", "report", "--json", "--root", str(root)]) == 0
    out = capsys.readouterr().out
    assert all(" " <= one <= "~" or one == "\n" for one in out)
    assert json.loads(out)["users"][0]["held"][0]["kernel_id"].startswith("x\x1b")


def test_printable_is_bounded():
    assert report.printable("a" * 1000, 10) == "aaaaaaa..."
    assert report.printable("ada") == "ada"
    assert len(report.printable("\x1b" * 1000, 10)) == 10


@AS_ROOT
def test_a_directory_that_pretends_to_be_another_users(root, tmp_path):
    own = Store(tmp_path / "mine", Keyring(tmp_path / "keys"))
    publish(own)
    own.root.rename(root / str(ADA))
    given(root / str(ADA), BOB)
    (root / str(BOB)).symlink_to("/etc")
    (root / "not a uid").mkdir()
    (user,) = report.collect(root, tmp_path, NOW)
    assert (user.uid, user.images, user.problems) == (BOB, [], {"the directory is another user's": 1})


@AS_ROOT
def test_root_looks_with_the_rights_of_the_user(root, monkeypatch):
    """What the user may not read, root does not read for the user either."""
    secret = root.parent / "secret"
    secret.mkdir(mode=0o700)
    (root / str(ADA)).mkdir(mode=0o700)
    given(root / str(ADA), ADA)

    def look(name, owner, at):
        return {
            "images": [],
            "disk": os.geteuid(),
            "problems": {str(os.access(secret, os.R_OK)): len(os.getgroups())},
            "absences": {"gpu_seconds": float(os.getegid()), "times": 0},
        }

    monkeypatch.setattr(survey, "survey", look)
    (user,) = report.collect(root, root, NOW)
    assert (user.disk, user.gpu_seconds, user.problems) == (ADA, float(report.NOBODY), {"False": 0})


def test_who_hangs_is_given_up_and_the_next_is_told(store, root, monkeypatch):
    monkeypatch.setattr(report, "PATIENCE", 0.2)
    monkeypatch.setattr(survey, "survey", lambda *_: time.sleep(600))
    user = of_me(report.collect(root, store.root, NOW))
    assert user.problems == {"it took too long to look at": 1}


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda *_: os._exit(0), "limits of memory and time"),
        (lambda *_: os.kill(os.getpid(), 9), "limits of memory and time"),
        (lambda *_: {"x": "y" * (confined.MOST_BYTES + 1)}, "too much of it"),
        (lambda *_: bytearray(confined.MEMORY + 1), "MemoryError"),
        (lambda *_: [], "makes no sense"),
        (lambda *_: {"images": [], "disk": -1, "absences": {"gpu_seconds": 0, "times": 0}, "problems": {}}, "sense"),
        (lambda *_: {"images": [{}], "disk": 0, "absences": {"gpu_seconds": 0, "times": 0}, "problems": {}}, "sense"),
        (lambda *_: {"images": [], "disk": 0, "absences": {"gpu_seconds": "1", "times": 0}, "problems": {}}, "sense"),
    ],
)
def test_what_the_child_says_is_not_believed(store, root, monkeypatch, call, what):
    monkeypatch.setattr(survey, "survey", call)
    (problem,) = of_me(report.collect(root, store.root, NOW)).problems
    assert what in problem


def children() -> list[str]:
    """Of this process; the servers of other tests may be among them."""
    tasks = Path("/proc/self/task").iterdir()
    return sorted(pid for task in tasks for pid in (task / "children").read_text().split())


def test_no_child_and_no_descriptor_is_left(store, root):
    publish(store)
    report.collect(root, store.root, NOW)
    before = sorted(os.listdir("/proc/self/fd")), children()
    for _ in range(5):
        report.collect(root, store.root, NOW)
    assert (sorted(os.listdir("/proc/self/fd")), children()) == before


def test_nothing_is_changed_by_looking(store, root):
    publish(store)
    before = {str(path): path.lstat().st_mtime_ns for path in root.rglob("*")}
    report.collect(root, store.root, NOW)
    assert {str(path): path.lstat().st_mtime_ns for path in root.rglob("*")} == before


def test_one_image_that_is_beyond_reason_does_not_hide_the_others(store, root):
    publish(store, kernel_id="bad", device_bytes={f"GPU-{number}": 2**62 for number in range(3)})
    publish(store, kernel_id="good")
    user = of_me(report.collect(root, store.root, NOW))
    assert [held.kernel_id for held in user.images] == ["good"]
    assert user.problems == {"a damaged manifest": 1}
