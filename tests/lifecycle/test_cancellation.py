"""The reason to stop a verb, and the table of its steps."""

from __future__ import annotations

import threading

import pytest

from jupyter_gpu_ckpt.errors import CriuError, KernelLost
from jupyter_gpu_ckpt.lifecycle.context import Cancellation, Reason
from jupyter_gpu_ckpt.lifecycle.plans import Step
from jupyter_gpu_ckpt.lifecycle.steps import STEPS


def test_every_step_has_a_function():
    assert set(STEPS) == set(Step)


def test_a_request_only_raises_the_reason():
    cancellation = Cancellation()
    for requested, reason in ((Reason.DETACH, Reason.DETACH), (Reason.DETACH_SOON, Reason.DETACH), (Reason.END,) * 2):
        cancellation.request(requested)
        assert cancellation.reason is reason
    cancellation.reset(Reason.DETACH_SOON)
    assert cancellation.reason is Reason.DETACH_SOON


def test_a_detach_does_not_take_back_the_end_that_another_thread_has_requested():
    cancellation = Cancellation()
    cancellation.request(Reason.DETACH)
    cancellation.request(Reason.END)
    cancellation.reset(Reason.DETACH_SOON, requested=Reason.DETACH)
    assert cancellation.reason is Reason.END
    cancellation.reset()
    cancellation.request(Reason.DETACH)
    cancellation.reset(Reason.DETACH_SOON, requested=Reason.DETACH)
    assert cancellation.reason is Reason.DETACH_SOON


@pytest.mark.parametrize(
    ("reason", "error"), [(Reason.NONE, None), (Reason.DETACH_SOON, None), (Reason.DETACH, CriuError)]
)
def test_a_check_raises_for_reasons_from_a_detach_on(reason, error):
    cancellation = Cancellation()
    cancellation.request(reason)
    cancellation.check(Reason.END)
    if error is None:
        cancellation.check()
    else:
        with pytest.raises(error):
            cancellation.check()


@pytest.mark.parametrize("least", Reason)
def test_a_kernel_that_is_ended_is_lost(least):
    cancellation = Cancellation()
    cancellation.request(Reason.END)
    with pytest.raises(KernelLost):
        cancellation.check(least)


def test_a_wait_ends_with_a_reason_that_is_high_enough():
    cancellation = Cancellation()
    cancellation.request(Reason.DETACH_SOON)
    assert cancellation.wait(0, Reason.DETACH_SOON)
    assert not cancellation.wait(0, Reason.DETACH)
    waiting = threading.Timer(0.01, cancellation.request, [Reason.END])
    waiting.start()
    assert cancellation.wait(60, Reason.DETACH)
    waiting.join()
