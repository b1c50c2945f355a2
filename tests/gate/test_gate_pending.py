"""The gate's bookkeeping alone: no sockets, no kernel."""

from __future__ import annotations

from typing import Any

import pytest

from jupyter_gpu_ckpt.gate import queue
from jupyter_gpu_ckpt.gate.pending import REPLIED_TYPES, PendingRequests
from jupyter_gpu_ckpt.gate.queue import RequestQueue
from jupyter_gpu_ckpt.gate.wake_rules import wakes
from jupyter_gpu_ckpt.gate.wire import Request


def request(msg_id: str, kind: str = "execute_request", *, subshell: str | None = None, **content: Any) -> Request:
    header = {"msg_id": msg_id, "msg_type": kind, **({"subshell_id": subshell} if subshell else {})}
    return Request("shell", [b"x" * 10], [b"client"], header, content)


@pytest.fixture
def pending() -> PendingRequests:
    return PendingRequests()


@pytest.mark.parametrize("first", ["replied", "idled"])
def test_a_request_is_done_with_reply_and_idle_in_either_order(pending: PendingRequests, first: str) -> None:
    pending.forwarded(request("1"))
    second = {"replied": "idled", "idled": "replied"}[first]
    assert getattr(pending, first)("1") is None
    assert pending.types() == ["execute_request"]
    assert getattr(pending, second)("1").request.msg_id == "1"
    assert not pending


def test_a_cell_does_not_run_any_more_once_its_reply_is_there(pending: PendingRequests) -> None:
    """A program that has the reply may request a checkpoint before the idle has come, which is waited for."""
    pending.forwarded(request("1"))
    pending.begun("1")
    assert (pending.cells(), pending.running_cell()) == (1, pending.find("1").request)
    pending.replied("1")
    assert (pending.cells(), pending.running_cell(), len(pending)) == (0, None, 1)


@pytest.mark.parametrize("kind", ["comm_open", "comm_msg", "comm_close", "something_else"])
def test_what_has_no_reply_is_done_with_its_idle(pending: PendingRequests, kind: str) -> None:
    pending.forwarded(request("1", kind))
    assert pending.idled("1") is not None
    assert not pending


def test_one_msg_id_used_twice_is_done_after_both(pending: PendingRequests) -> None:
    for _ in range(2):
        pending.forwarded(request("1"))
    pending.replied("1")
    assert pending.idled("1") is None
    pending.replied("1")
    assert pending.idled("1") is not None


def test_answers_to_strangers_change_nothing(pending: PendingRequests) -> None:
    pending.forwarded(request("1"))
    assert pending.replied("2") is None
    assert pending.idled("2") is None
    assert len(pending) == 1


def test_a_lane_straggles_only_when_nothing_in_it_moves(pending: PendingRequests) -> None:
    pending.forwarded(request("1"))
    pending.forwarded(request("2", "comm_msg"))
    assert pending.straggling() == {}
    pending.idled("1")  # its handler raised: no reply will come
    assert pending.straggling() == {("shell", None): 2}
    pending.forwarded(request("3"))
    assert pending.straggling() == {}


def test_a_fence_frees_the_stragglers_before_it_and_no_others(pending: PendingRequests) -> None:
    pending.forwarded(request("1", "comm_msg"))
    (order,) = pending.straggling().values()
    pending.forwarded(request("2", "comm_msg"))
    pending.forwarded(request("3", "comm_msg", subshell="s"))
    assert [entry.request.msg_id for entry in pending.drop_fenced(("shell", None), order)] == ["1"]
    assert len(pending) == 2


def test_a_comm_message_that_began_does_not_straggle(pending: PendingRequests) -> None:
    pending.forwarded(request("1", "comm_msg"))
    pending.begun("1")
    assert pending.straggling() == {}


def test_a_deleted_subshell_owes_nothing(pending: PendingRequests) -> None:
    pending.forwarded(request("1", subshell="s"))
    pending.forwarded(request("2"))
    pending.drop_subshell("s")
    assert pending.types() == ["execute_request"]


def test_only_requests_of_users_count_as_work(pending: PendingRequests) -> None:
    for n, kind in enumerate(["complete_request", "kernel_info_request", "history_request"]):
        pending.forwarded(request(str(n), kind))
    assert not pending.working()
    pending.forwarded(request("cell"))
    assert pending.working()
    pending.replied("cell")
    assert pending.working(), "its idle has not come"
    pending.idled("cell")
    assert not pending.working()


def test_a_comm_message_is_work_from_its_busy_to_its_idle(pending: PendingRequests) -> None:
    pending.forwarded(request("slider", "comm_msg"))
    assert not pending.working(), "ipykernel may have handled it on the side, and then never says so"
    pending.begun("slider")
    assert pending.working()
    pending.idled("slider")
    assert not pending.working()


def test_the_queue_keeps_the_order_and_counts_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = RequestQueue()
    for n in range(3):
        kept.append(request(str(n), "history_request" if n == 1 else "execute_request"))
    assert [r.msg_id for r in kept.remove(lambda r: r.msg_type == "execute_request")] == ["0", "2"]
    assert len(kept) == 1
    monkeypatch.setattr(queue, "MAX_BYTES", 10)
    assert not kept.append(request("3", "history_request"))
    assert len(kept.remove()) == 1
    assert kept.append(request("4", "history_request"))


def test_the_queue_takes_execute_requests_longer_and_refuses_those_behind_a_refused_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = RequestQueue()
    monkeypatch.setattr(queue, "MAX_BYTES", 0)
    monkeypatch.setattr(queue, "MAX_WAKE_BYTES", 3 * 2048)
    assert [kept.append(request(str(n), "execute_request")) for n in range(4)] == [True, True, True, False]
    monkeypatch.setattr(queue, "MAX_WAKE_BYTES", 1 << 30)
    assert not kept.append(request("5", "comm_msg")), "there is space, but what came before it was refused"
    assert [r.msg_id for r in kept.remove()] == ["0", "1", "2"]
    assert kept.append(request("6", "execute_request"))


def test_looking_at_a_notebook_wakes_nothing() -> None:
    kinds = REPLIED_TYPES | {"comm_open", "comm_msg", "comm_close", "input_reply"}
    woken = {kind for kind in kinds if wakes(request("1", kind))}
    assert woken == {"execute_request", "comm_open", "comm_msg", "input_reply", "is_complete_request"}


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
def test_a_page_that_requests_its_widgets_wakes_nothing_and_a_moved_slider_does(
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
