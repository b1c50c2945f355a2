"""The rights of users who share GPUs: from a file of root's, whatever else lies there."""

from __future__ import annotations

import json
import os
import pwd

import pytest

from jupyter_gpu_ckpt.kernel.gpu_sharing import DailySeconds
from jupyter_gpu_ckpt.sharing.allotments import Allotments
from jupyter_gpu_ckpt.sharing.policy import Allotment

ME = pwd.getpwuid(os.getuid())
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: run the tests as root too")


@pytest.fixture
def file(tmp_path):
    return tmp_path / "sharing.json"


def _rights(file, *users: str) -> dict[str, Allotment]:
    return Allotments(file).of(users)


def test_without_a_file_all_users_are_equal(file):
    assert _rights(file, "0", "77") == {"0": Allotment(), "77": Allotment()}


@as_root
def test_users_by_name_and_all_others(file):
    file.write_text(json.dumps({ME.pw_name: {"weight": 2}, "nobody-here": {}, "*": {"protect_budget": 60}}))
    assert _rights(file, str(ME.pw_uid), "77") == {
        str(ME.pw_uid): Allotment(weight=2.0),
        "77": Allotment(protect_budget=60.0),
    }


@as_root
def test_it_is_read_again_when_it_has_changed(file):
    allotments = Allotments(file)
    for weight in (2.0, 3.0):
        draft = file.with_name("draft")
        draft.write_text(json.dumps({"*": {"weight": weight}}))
        draft.rename(file)
        assert allotments.of(["77"])["77"].weight == weight
    file.unlink()
    assert allotments.of(["77"])["77"] == Allotment()


@as_root
@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "nonsense",
        "[" * 100_000,
        '{"*": 1}',
        '{"*": {"weight": -1}}',
        '{"*": {"weight": 1000}}',
        '{"*": {"weight": true}}',
        '{"*": {"weight": NaN}}',
        '{"*": {"colour": 1}}',
    ],
)
def test_what_cannot_be_used_is_logged_and_gives_no_rights(file, content, caplog):
    file.write_text(content)
    assert _rights(file, "77") == {"77": Allotment()}
    assert str(file) in caplog.text


@as_root
@pytest.mark.parametrize("how", ["owner", "mode", "link", "fifo"])
def test_a_file_that_a_user_could_have_written_gives_no_rights(file, how):
    target = file.with_name("target") if how == "link" else file
    if how == "fifo":
        os.mkfifo(file)
    else:
        target.write_text('{"*": {"weight": 2}}')
    if how == "owner":
        os.chown(file, 65534, 65534)
    elif how == "mode":
        file.chmod(0o666)
    elif how == "link":
        file.symlink_to(target)
    assert _rights(file, "77") == {"77": Allotment()}


def test_seconds_of_a_day_are_counted_while_it_is_so():
    seconds = DailySeconds()
    assert seconds.used(100.0, True) == 0
    assert seconds.used(130.0, True) == 30
    assert seconds.used(200.0, False) == 30
    assert seconds.used(300.0, True) == 30, "it was not so before"
    assert seconds.used(310.0, True) == 40
    assert seconds.used(310.0 + 86400, False) == 0, "a day later"
