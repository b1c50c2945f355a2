"""A job that runs beside what its caller does."""

from __future__ import annotations

import threading

import pytest

from jupyter_gpu_ckpt.image.background_task import beside


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
