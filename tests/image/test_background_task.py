"""A job that runs beside what its caller does."""

from __future__ import annotations

import threading

import pytest

from jupyter_gpu_ckpt.image.background_task import beside, following


@pytest.fixture(params=["a thread", "no thread"])
def threads(request, monkeypatch) -> bool:
    """Say whether a thread can be started, and have it so."""
    if request.param == "no thread":

        def refused(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refused)
    return request.param == "a thread"


def test_it_runs_beside_the_body_or_before_it(threads):
    bodys = threading.Event()
    with beside(lambda: bodys.wait(10 if threads else 0)) as result:
        bodys.set()
        assert result.result() is threads


def test_its_error_is_raised_where_its_result_is_asked_for(threads):
    with beside(lambda: 1 // 0) as result:
        pass
    with pytest.raises(ZeroDivisionError):
        result.result()


def test_the_body_s_error_is_raised_once_it_has_ended(threads):
    ran = threading.Event()
    with pytest.raises(KeyError), beside(ran.set):
        raise KeyError
    assert ran.is_set()


def test_a_body_is_followed_to_its_end():
    advanced, calls = threading.Event(), []

    def advance(check) -> None:
        check()
        calls.append("advance")
        advanced.set()

    with following("follower", advance, lambda check: calls.append("finish"), lambda: calls.append("check")):
        assert advanced.wait(60)
    assert calls[:3] == ["check", "check", "advance"]
    assert calls.index("finish") == len(calls) - 1


def test_a_body_that_fails_is_followed_no_further_and_its_error_is_raised():
    advanced, ended, finished = threading.Event(), threading.Event(), []

    def advance(check) -> None:
        advanced.set()
        try:
            while True:
                check()
        finally:
            ended.set()

    with pytest.raises(KeyError), following("follower", advance, finished.append, lambda: None):
        assert advanced.wait(60)
        raise KeyError
    assert ended.is_set()
    assert not finished


@pytest.mark.parametrize("failing", ["advance", "finish", "check"])
def test_an_error_of_what_follows_is_raised_after_the_body(failing):
    functions = {name: lambda *_: None for name in ("advance", "finish", "check")} | {failing: lambda *_: 1 // 0}
    ran = []
    with pytest.raises(ZeroDivisionError), following("follower", **functions):
        ran.append(threading.Event().wait(0.05))
    assert ran
