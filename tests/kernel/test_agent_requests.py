"""Answers to a kernel's requests, without a kernel."""

from __future__ import annotations

import logging
import math
import time
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import until

from jupyter_gpu_ckpt.errors import BadRequest, KernelSilent
from jupyter_gpu_ckpt.kernel.agent_requests import AgentRequests


class Gate:
    """Stands for the gate: keeps what is sent to the kernel."""

    def __init__(self, error: Exception | None = None) -> None:
        self.sent: list[dict[str, Any]] = []
        self.error = error

    def request(self, msg_type: str, content: dict[str, Any], timeout: float, channel: str) -> dict[str, Any]:
        self.sent.append({"msg_type": msg_type, **content})
        if self.error:
            raise self.error
        return {}


LIFECYCLE: Any = SimpleNamespace(home=SimpleNamespace(kernel_id="k"))


@pytest.fixture
def agent_requests() -> AgentRequests:
    return AgentRequests(logging.getLogger("test"))


@pytest.mark.parametrize("seconds", [None, "2h", True, -1, math.inf, math.nan])
def test_a_protection_is_a_number_of_seconds(agent_requests: AgentRequests, seconds: Any) -> None:
    with pytest.raises(BadRequest):
        agent_requests.protect(seconds)
    assert agent_requests.protection() is None


def test_a_protection_ends_by_itself_and_by_request(agent_requests: AgentRequests) -> None:
    assert (
        agent_requests.protect(60)["protected_until"]
        == agent_requests.protection()
        == pytest.approx(time.time() + 60, abs=5)
    )
    agent_requests.protected_until = time.time() - 1
    assert agent_requests.protection() is None
    agent_requests.protect(60)
    assert agent_requests.protect(0) == {"protected_until": None} and agent_requests.protection() is None


@pytest.mark.parametrize(
    "content", [{"verb": "no such"}, {}, {"verb": "watch"}, {"verb": "watch", "models": {"state": 1}}]
)
def test_what_makes_no_sense_is_answered_too(agent_requests: AgentRequests, content: dict[str, Any]) -> None:
    gate: Any = Gate()
    agent_requests.answer({**content, "now": True, "id": "7"}, LIFECYCLE, gate)
    until(lambda: gate.sent, "an answer")
    (sent,) = gate.sent
    assert (sent["msg_type"], sent["id"], sent["kernel_id"]) == ("gpu_ckpt_answer_request", "7", "k")
    assert sent["error"]["code"] == "BAD_REQUEST"


def test_an_answer_that_cannot_be_made_is_an_error_without_details(agent_requests: AgentRequests) -> None:
    gate: Any = Gate(KernelSilent("gone"))  # nor does it hurt when nobody takes the answer
    agent_requests.answer({"verb": "status", "now": True, "id": "7"}, LIFECYCLE, gate)
    until(lambda: gate.sent, "an answer")
    assert gate.sent[0]["error"]["code"] == "INTERNAL"
    assert gate.sent[0]["error"]["message"] == "The request could not be answered: AttributeError."


def test_kernels_whose_save_points_are_being_published_keep_no_other_waiting(agent_requests: AgentRequests) -> None:
    state, gate = SimpleNamespace(publishes_save_point=True), Gate()
    store = SimpleNamespace(images=list)
    publishes: Any = SimpleNamespace(
        home=SimpleNamespace(kernel_id="publishes"), kernel=state, engine=SimpleNamespace(store=store)
    )
    answered: Any = Gate()
    try:
        for _ in range(16):
            agent_requests.answer({"verb": "saves", "now": True}, publishes, gate)  # type: ignore[arg-type]
        agent_requests.answer({"verb": "protect", "seconds": 0, "now": True}, LIFECYCLE, answered)
        until(lambda: answered.sent, "the answer to another kernel")
        assert gate.sent == []
    finally:
        state.publishes_save_point = False
    until(lambda: len(gate.sent) == 16, "the others' answers")


def test_a_protection_is_written_down_and_taken_over() -> None:
    remembered = []
    log = logging.getLogger("test")
    before = AgentRequests(log, on_protected=remembered.append)
    before.protect(100)
    assert remembered == [before.protection()]
    assert AgentRequests(log, protected_until=remembered[0]).protection() == remembered[0]
