"""The gate's bookkeeping alone: no sockets, no kernel."""

from __future__ import annotations

from typing import Any

import pytest

from jupyter_gpu_ckpt.gate import queue
from jupyter_gpu_ckpt.gate.pending import REPLIED_TYPES, Ledger
from jupyter_gpu_ckpt.gate.queue import Hold
from jupyter_gpu_ckpt.gate.wake_rules import wakes
from jupyter_gpu_ckpt.gate.wire import Request


def request(msg_id: str, kind: str = "execute_request", *, subshell: str | None = None, **content: Any) -> Request:
    header = {"msg_id": msg_id, "msg_type": kind, **({"subshell_id": subshell} if subshell else {})}
    return Request("shell", [b"x" * 10], [b"client"], header, content)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.mark.parametrize("first", ["replied", "idled"])
def test_a_request_is_done_with_reply_and_idle_in_either_order(ledger: Ledger, first: str) -> None:
    ledger.forwarded(request("1"))
    second = {"replied": "idled", "idled": "replied"}[first]
    assert getattr(ledger, first)("1") is None
    assert ledger.types() == ["execute_request"]
    assert getattr(ledger, second)("1").request.msg_id == "1"
    assert not ledger


@pytest.mark.parametrize("kind", ["comm_open", "comm_msg", "comm_close", "something_else"])
def test_what_has_no_reply_is_done_with_its_idle(ledger: Ledger, kind: str) -> None:
    ledger.forwarded(request("1", kind))
    assert ledger.idled("1") is not None
    assert not ledger


def test_one_msg_id_used_twice_is_done_after_both(ledger: Ledger) -> None:
    for _ in range(2):
        ledger.forwarded(request("1"))
    ledger.replied("1")
    assert ledger.idled("1") is None
    ledger.replied("1")
    assert ledger.idled("1") is not None


def test_answers_to_strangers_change_nothing(ledger: Ledger) -> None:
    ledger.forwarded(request("1"))
    assert ledger.replied("2") is None
    assert ledger.idled("2") is None
    assert len(ledger) == 1


def test_a_lane_straggles_only_when_nothing_in_it_moves(ledger: Ledger) -> None:
    ledger.forwarded(request("1"))
    ledger.forwarded(request("2", "comm_msg"))
    assert ledger.straggling() == {}
    ledger.idled("1")  # its handler raised: no reply will come
    assert ledger.straggling() == {("shell", None): 2}
    ledger.forwarded(request("3"))
    assert ledger.straggling() == {}


def test_a_fence_frees_the_stragglers_before_it_and_no_others(ledger: Ledger) -> None:
    ledger.forwarded(request("1", "comm_msg"))
    (order,) = ledger.straggling().values()
    ledger.forwarded(request("2", "comm_msg"))
    ledger.forwarded(request("3", "comm_msg", subshell="s"))
    assert [entry.request.msg_id for entry in ledger.fenced(("shell", None), order)] == ["1"]
    assert len(ledger) == 2


def test_a_comm_message_that_began_does_not_straggle(ledger: Ledger) -> None:
    ledger.forwarded(request("1", "comm_msg"))
    ledger.begun("1")
    assert ledger.straggling() == {}


def test_a_deleted_subshell_owes_nothing(ledger: Ledger) -> None:
    ledger.forwarded(request("1", subshell="s"))
    ledger.forwarded(request("2"))
    ledger.without_subshell("s")
    assert ledger.types() == ["execute_request"]


def test_only_what_a_user_asked_for_is_work(ledger: Ledger) -> None:
    for n, kind in enumerate(["complete_request", "kernel_info_request", "history_request"]):
        ledger.forwarded(request(str(n), kind))
    assert not ledger.working()
    ledger.forwarded(request("cell"))
    assert ledger.working()
    ledger.replied("cell")
    assert ledger.working(), "its idle has not come"
    ledger.idled("cell")
    assert not ledger.working()


def test_a_comm_message_is_work_from_its_busy_to_its_idle(ledger: Ledger) -> None:
    ledger.forwarded(request("slider", "comm_msg"))
    assert not ledger.working(), "ipykernel may have handled it on the side, and then never says so"
    ledger.begun("slider")
    assert ledger.working()
    ledger.idled("slider")
    assert not ledger.working()


def test_the_hold_keeps_the_order_and_counts_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Hold()
    for n in range(3):
        kept.append(request(str(n), "history_request" if n == 1 else "execute_request"))
    assert [r.msg_id for r in kept.take(lambda r: r.msg_type == "execute_request")] == ["0", "2"]
    assert len(kept) == 1
    monkeypatch.setattr(queue, "MAX_BYTES", 10)
    assert not kept.append(request("3", "history_request"))
    assert len(kept.take()) == 1
    assert kept.append(request("4", "history_request"))


def test_the_hold_has_room_for_a_users_own_longer_and_refuses_those_behind_one_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = Hold()
    monkeypatch.setattr(queue, "MAX_BYTES", 0)
    monkeypatch.setattr(queue, "MAX_WAKE_BYTES", 3 * 2048)
    assert [kept.append(request(str(n), "execute_request")) for n in range(4)] == [True, True, True, False]
    monkeypatch.setattr(queue, "MAX_WAKE_BYTES", 1 << 30)
    assert not kept.append(request("5", "comm_msg")), "there is room, but what came before it was refused"
    assert [r.msg_id for r in kept.take()] == ["0", "1", "2"]
    assert kept.append(request("6", "execute_request"))


def test_looking_at_a_notebook_wakes_nothing() -> None:
    kinds = REPLIED_TYPES | {"comm_open", "comm_msg", "comm_close", "input_reply"}
    woken = {kind for kind in kinds if wakes(request("1", kind))}
    assert woken == {"execute_request", "comm_open", "comm_msg", "input_reply"}


@pytest.mark.parametrize(
    ("kind", "content", "does"),
    [
        ("comm_open", {"target_name": "jupyter.widget.control"}, False),
        ("comm_msg", {"data": {"method": "request_states"}}, False),
        ("comm_msg", {"data": {"method": "request_state"}}, False),
        ("comm_open", {"target_name": "jupyter.widget"}, True),
        ("comm_msg", {"data": {"method": "update", "state": {"value": 4}}}, True),
        ("comm_msg", {"data": "of somebody else's making"}, True),
    ],
)
def test_a_page_that_looks_for_its_widgets_wakes_nothing_and_a_moved_slider_does(
    kind: str, content: dict[str, Any], does: bool
) -> None:
    assert wakes(request("1", kind, **content)) is does


@pytest.mark.parametrize(
    ("content", "stops"),
    [({}, True), ({"stop_on_error": False}, False), ({"silent": True}, False), ({"stop_on_error": True}, True)],
)
def test_an_execution_stops_the_queue_by_the_kernels_own_rule(content: dict[str, Any], stops: bool) -> None:
    assert request("1", **content).stops is stops
    assert not request("1", "complete_request", **content).stops
