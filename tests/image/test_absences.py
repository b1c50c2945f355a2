"""The record of GPU time that kernels gave to others: what goes in, what is summed up, and who can break it."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import asdict, replace

import pytest
from images import publish

from jupyter_gpu_ckpt.image import absences
from jupyter_gpu_ckpt.image.absences import Absence

ONE = Absence("kernel", "", 100.0, 160.0, 120.0, 7)
TWO_GPUS = {"GPU-1": 3, "GPU-2": 4}


def record(store) -> list[Absence]:
    path = store.root / absences.RECORD
    return absences.read(path.read_bytes()) if path.exists() else []


def test_time_counts_for_each_gpu():
    absence = absences.of("kernel", "", 100.0, 160.0, TWO_GPUS)
    assert absence == ONE
    assert absences.of("kernel", "", 100.0, 90.0, TWO_GPUS).gpu_seconds == 0, "a clock that was put back"


def test_an_image_that_goes_without_its_kernel_having_come_back_is_an_absence(store):
    image = publish(store, created=100.0)
    store.remove(image)
    (found,) = record(store)
    assert (found.image, found.since, found.device_bytes) == (image.id, 100.0, 3)


def test_an_image_whose_kernel_came_back_is_counted_once(store):
    image = publish(store, created=100.0)
    absences.came_back(store.root, image, 160.0)
    store.remove(image)
    assert [(one.image, one.until) for one in record(store)] == [(image.id, 160.0)]


def test_the_time_after_a_shutdown_gives_nobody_anything(store):
    image = publish(store, created=100.0)
    image.retire()
    os.utime(image._mark("retired"), (160.0, 160.0))
    store.remove(image)
    assert [one.gpu_seconds for one in record(store)] == [60.0]


def test_a_kernel_that_was_not_on_a_gpu_gave_none_back(store):
    store.remove(publish(store, device_bytes={}))
    assert record(store) == []


def test_an_image_that_moved_is_not_an_absence_that_ended(store):
    store.remove(publish(store), moved=True)
    assert record(store) == []


def test_the_record_is_the_users_alone_whatever_the_umask(store):
    store.prepare()
    before = os.umask(0)
    try:
        absences.write(store.root, ONE)
    finally:
        os.umask(before)
    assert stat.S_IMODE((store.root / absences.RECORD).stat().st_mode) == 0o600
    assert record(store) == [ONE]


def test_the_image_directory_is_not_made_by_writing_to_it(store):
    absences.write(store.root, ONE)
    assert not store.root.exists()


def test_a_record_that_cannot_be_written_is_no_reason_to_fail(store):
    store.prepare()
    (store.root / absences.RECORD).mkdir()
    absences.write(store.root, ONE)
    store.remove(publish(store))


def test_old_lines_are_summed_up_by_month_and_nothing_is_lost(store, monkeypatch):
    monkeypatch.setattr(absences, "SUM_UP", 4096)
    monkeypatch.setattr(absences, "KEPT", 5)
    store.prepare()
    day = 86400.0
    for number in range(120):
        absences.write(store.root, absences.of("kernel", "", number * day, number * day + 60, {"GPU-1": 9}))
    assert (store.root / absences.RECORD).stat().st_size < 6000
    found = record(store)
    assert sum(one.gpu_seconds for one in found) == 120 * 60
    assert sum(one.times for one in found) == 120
    assert found[0].times == 31, "January 1970"
    assert found[-1] == absences.of("kernel", "", 119 * day, 119 * day + 60, {"GPU-1": 9})


def test_the_line_of_an_image_that_is_there_still_is_not_summed_up(store, monkeypatch):
    """Else its kernel would seem to sleep on."""
    monkeypatch.setattr(absences, "SUM_UP", 100)
    monkeypatch.setattr(absences, "KEPT", 1)
    image = publish(store)
    absences.came_back(store.root, image, 160.0)
    for _ in range(5):
        absences.write(store.root, ONE)
    assert image.id in [one.image for one in record(store)]


HOSTILE = [
    "",
    "{",
    "[]",
    "null",
    "[" * 100_000,
    json.dumps({"kernel_id": "x"}),
    json.dumps({**asdict(ONE), "more": 1}),
    *(
        json.dumps(asdict(replace(ONE, **facts)))
        for facts in (
            {"kernel_id": 7},
            {"kernel_id": "x" * 201},
            {"since": float("nan")},
            {"until": float("inf")},
            {"gpu_seconds": -1.0},
            {"gpu_seconds": 2.0**63},
            {"gpu_seconds": True},
            {"until": 99.0},
            {"device_bytes": "7"},
        )
    ),
]


@pytest.mark.parametrize("line", HOSTILE, ids=range(len(HOSTILE)))
def test_a_line_that_is_none_of_ours_is_passed_over(line):
    good = json.dumps(asdict(ONE))
    assert absences.read(f"{good}\n{line}\n{good}\n".encode()) == [ONE, ONE]


def test_a_record_of_any_size_is_read_in_part(store):
    text = (json.dumps(asdict(ONE)).encode() + b"\n") * 30_000
    assert len(absences.read(text)) < 30_000
