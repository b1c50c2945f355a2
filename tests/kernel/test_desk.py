"""What a kernel is answered, without a kernel."""

from __future__ import annotations

import logging
import math
import time
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import until

from jupyter_gpu_ckpt.errors import BadRequest, KernelSilent
from jupyter_gpu_ckpt.kernel.agent_requests import Desk


class Gate:
    """Stands for the gate: keeps what the kernel is told."""

    def __init__(self, error: Exception | None = None) -> None:
        self.told: list[dict[str, Any]] = []
        self.error = error

    def tell(self, msg_type: str, content: dict[str, Any], timeout: float) -> dict[str, Any]:
        self.told.append({"msg_type": msg_type, **content})
        if self.error:
            raise self.error
        return {}


LIFECYCLE: Any = SimpleNamespace(home=SimpleNamespace(kernel_id="k"))


@pytest.fixture
def desk() -> Desk:
    return Desk(logging.getLogger("test"))


@pytest.mark.parametrize("seconds", [None, "2h", True, -1, math.inf, math.nan])
def test_a_protection_is_a_number_of_seconds(desk: Desk, seconds: Any) -> None:
    with pytest.raises(BadRequest):
        desk.protect(seconds)
    assert desk.protection() is None


def test_a_protection_ends_by_itself_and_when_asked(desk: Desk) -> None:
    assert desk.protect(60)["protected_until"] == desk.protection() == pytest.approx(time.time() + 60, abs=5)
    desk.protected_until = time.time() - 1
    assert desk.protection() is None
    desk.protect(60)
    assert desk.protect(0) == {"protected_until": None} and desk.protection() is None


@pytest.mark.parametrize(
    "content", [{"verb": "no such"}, {}, {"verb": "watch"}, {"verb": "watch", "models": {"state": 1}}]
)
def test_what_makes_no_sense_is_answered_too(desk: Desk, content: dict[str, Any]) -> None:
    gate: Any = Gate()
    desk.take({**content, "now": True, "id": "7"}, LIFECYCLE, gate)
    until(lambda: gate.told, "an answer")
    (told,) = gate.told
    assert (told["msg_type"], told["id"], told["kernel_id"]) == ("gpu_ckpt_answer_request", "7", "k")
    assert told["error"]["code"] == "BAD_REQUEST"


def test_an_answer_that_cannot_be_made_is_an_error_without_details(desk: Desk) -> None:
    gate: Any = Gate(KernelSilent("gone"))  # nor does it hurt when nobody takes the answer
    desk.take({"verb": "status", "now": True, "id": "7"}, LIFECYCLE, gate)
    until(lambda: gate.told, "an answer")
    assert gate.told[0]["error"]["code"] == "INTERNAL"
    assert gate.told[0]["error"]["message"] == "The question could not be answered: AttributeError."


def test_a_protection_is_written_down_and_taken_over() -> None:
    remembered = []
    log = logging.getLogger("test")
    before = Desk(log, remember=lambda: remembered.append(before.protected_until))
    before.protect(100)
    assert remembered == [before.protection()]
    assert Desk(log, protected_until=remembered[0]).protection() == remembered[0]
