"""One image directory for all users: each user has a private one below it, and defects are reported."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from images import publish

from jupyter_gpu_ckpt.doctor import checks
from jupyter_gpu_ckpt.errors import StoreShared, StoreUnsuitable, StoreUnwritable
from jupyter_gpu_ckpt.image import user_directory
from jupyter_gpu_ckpt.image.keys import Keyring
from jupyter_gpu_ckpt.image.store import Store

pytestmark = pytest.mark.slow  # makes users

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: run the tests as root too")
#: Two users of one hub.
ADA, BOB = 54321, 54322


@pytest.fixture
def named(tmp_path):
    """The directory that an administrator has set for everybody: as ``/tmp``."""
    path = tmp_path / "images"
    path.mkdir()
    path.chmod(0o1777)
    return path


def test_a_sticky_directory_gets_a_private_one_for_each_user(named, tmp_path):
    store = Store(named, Keyring(tmp_path / "keys"))
    image = publish(store)
    assert image.path.parent == named / str(os.geteuid())
    assert image.path.parent.stat().st_mode & 0o7777 == 0o700
    assert [one.id for one in Store(named, store.keys).images()] == [image.id]
    assert [path.name for path in named.iterdir()] == [str(os.geteuid())]
    assert finding(named).ok


def finding(named):
    return next(each for each in checks.diagnose(named) if each.check == "image-directory")


# All is imported by root: Python itself may lie where the user cannot read.
PROGRAM = """
import os, sys
from pathlib import Path
from jupyter_gpu_ckpt.doctor import checks as doctor
from jupyter_gpu_ckpt.errors import GpuCkptError
from jupyter_gpu_ckpt.image import user_directory as directory
from jupyter_gpu_ckpt.image.store import Store
uid, named = int(sys.argv[1]), Path(sys.argv[2])
doctor.diagnose(named)
os.setgroups([]); os.setgid(uid); os.setuid(uid); os.umask(0)
shown = next(each for each in doctor.diagnose(named) if each.check == "image-directory")
print(shown.ok, shown.message, "|", shown.fix)
try:
    directory.prepare(named)
    print(directory.of_user(named))
except GpuCkptError as error:
    print(error.code, error.message, "|", error.hint)
try:
    print(Store(named).images())
except GpuCkptError as error:
    print(error.code, error.message, "|", error.hint)
"""


def of(uid: int, named) -> list[str]:
    """Return what the doctor and `prepare` print for the user ``uid``, a line each."""
    package = str(user_directory.__file__).partition("/jupyter_gpu_ckpt/")[0]
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(uid), str(named)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": package, "HOME": "/nonexistent"},
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.splitlines()


@pytest.fixture
def reachable():
    """The same where other users get to: above pytest's own directories there is one that they cannot enter."""
    with tempfile.TemporaryDirectory(prefix="gc-") as place:
        Path(place).chmod(0o755)
        named = Path(place) / "images"
        named.mkdir()
        named.chmod(0o1777)
        yield named


@AS_ROOT
def test_two_users_share_roots_directory(reachable):
    for uid in (ADA, BOB):
        shown, own, _ = of(uid, reachable)
        assert shown.startswith("True")
        assert own == f"{reachable}/{uid}"
    for uid in (ADA, BOB):
        facts = (reachable / str(uid)).stat()
        assert (facts.st_uid, facts.st_mode & 0o7777) == (uid, 0o700)


@AS_ROOT
@pytest.mark.parametrize(
    ("change", "advice"),
    [
        (lambda path: path.chmod(0o777), "chmod +t"),
        (lambda path: os.chown(path, BOB, BOB), "chown root"),
        (lambda path: path.chmod(0o755), f"install -d -m 700 -o {ADA}"),
        (lambda path: (path / str(ADA)).mkdir(mode=0o700), "administrator removes"),
        (lambda path: (path / str(ADA)).symlink_to("/etc"), "administrator removes"),
    ],
    ids=["not sticky", "another's", "not writable", "taken", "a link"],
)
def test_a_fault_of_a_shared_directory_is_reported_and_not_changed(reachable, change, advice):
    change(reachable)
    before = reachable.stat().st_mode, sorted(reachable.iterdir())
    shown, refused, _ = of(ADA, reachable)
    assert shown.startswith("False")
    assert refused.startswith("STORE_SHARED")
    assert advice in shown
    assert advice in refused
    assert (reachable.stat().st_mode, sorted(reachable.iterdir())) == before


@AS_ROOT
@pytest.mark.parametrize(
    ("change", "code"),
    [(lambda path: path.chmod(0o700), "STORE_SHARED"), (lambda path: path.parent.chmod(0o700), "STORE_UNWRITABLE")],
    ids=["itself", "its parent"],
)
def test_the_images_of_a_directory_that_the_user_cannot_enter(reachable, change, code):
    change(reachable)
    assert of(ADA, reachable)[2].startswith(code)


@AS_ROOT
def test_a_directory_that_an_administrator_made_for_the_user(reachable):
    reachable.chmod(0o755)
    own = reachable / str(ADA)
    own.mkdir(mode=0o700)
    os.chown(own, ADA, ADA)
    assert of(ADA, reachable)[1] == str(own)


def test_a_private_one_that_was_opened_to_others_is_refused(named):
    user_directory.prepare(named)
    (named / str(os.geteuid())).chmod(0o750)
    with pytest.raises(StoreShared, match="not yours alone"):
        user_directory.prepare(named)
    assert not finding(named).ok


def test_the_users_own_directory_is_what_was_named(tmp_path):
    assert user_directory.of_user(tmp_path / "new") == tmp_path / "new"
    user_directory.prepare(tmp_path / "new")
    assert user_directory.of_user(tmp_path / "new") == tmp_path / "new"
    (tmp_path / "link").symlink_to(tmp_path / "new")
    user_directory.prepare(tmp_path / "link")


@pytest.mark.parametrize(
    ("number", "kind", "code"),
    [
        (errno.EPERM, StoreUnsuitable, "STORE_UNSUITABLE"),
        (errno.EOPNOTSUPP, StoreUnsuitable, "STORE_UNSUITABLE"),
        (errno.EIO, StoreUnwritable, "STORE_UNWRITABLE"),
    ],
)
def test_a_file_system_without_hard_links_is_refused_at_once(tmp_path, monkeypatch, number, kind, code):
    def link(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(kind) as caught:
        Store(tmp_path / "images", Keyring(tmp_path / "keys")).begin("kernel")
    assert caught.value.code == code
    assert list((tmp_path / "images").iterdir()) == []
    assert not finding(tmp_path / "images").ok
