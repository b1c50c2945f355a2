"""The kernel's questions through the gate, and their answers while a cell runs."""

from __future__ import annotations

import pytest
from gate_world import DEADLINE, kinds, outputs, reply
from waiting import until

from jupyter_gpu_ckpt.errors import KernelSilent

ASK = """
def ask(content, kernel=get_ipython().kernel):
    session, ident = kernel.session, b"gpu_ckpt_request"
    session.send(kernel.iopub_socket, "gpu_ckpt_request", content, kernel.get_parent(), ident=ident)
"""
ANSWERED = """
import threading
answered = threading.Event()
async def take(stream, ident, parent, kernel=get_ipython().kernel):
    answers.append(parent["content"])
    kernel.session.send(stream, "an_answer_reply", {"status": "ok"}, parent, ident)
    answered.set()
answers = []
get_ipython().kernel.control_handlers["an_answer_request"] = take
"""


def test_a_prompt_is_shown_at_once_and_answered_while_the_cell_runs(up):
    client = up.client()
    outputs(client, client.execute(ASK + ANSWERED))
    client.get_shell_msg(timeout=DEADLINE)
    cell = client.execute("ask({'verb': 'status', 'now': True}); print(answered.wait(60), answers)")
    until(lambda: up.asked, "the question came")
    assert up.asked == [{"verb": "status", "now": True, "requested": []}]
    assert up.gate.request("an_answer_request", {"image": 1}, DEADLINE, "control") == {"status": "ok"}
    seen = outputs(client, cell)
    # ipykernel may send what is printed in more than one piece.
    pieces = [message for message in seen if message["msg_type"] == "stream"]
    others = [kind for kind in kinds(seen) if kind != "stream"]
    assert others == ["busy", "execute_input", "idle"], "the control request and its status are unseen"
    assert "".join(piece["content"]["text"] for piece in pieces) == "True [{'image': 1}]\n"
    assert up.gate.state == "open"


def test_a_request_that_is_answered_at_once_has_what_the_cell_has_requested_before(up):
    client = up.client()
    outputs(client, client.execute(ASK))
    client.get_shell_msg(timeout=DEADLINE)
    reply(client, client.execute("ask({'verb': 'save', 'name': 'a'}); ask({'verb': 'may', 'now': True})"))
    until(lambda: len(up.asked) == 2, "both came")
    assert up.asked[0] == {"verb": "may", "now": True, "requested": [{"verb": "save", "name": "a"}]}
    assert up.asked[1] == {"verb": "save", "name": "a"}


def test_cells_stay_queued_at_a_release_for_a_verb_that_follows(world):
    follows = [True]
    world.gate = world.new_gate(keeps_queueing=lambda: follows[0])
    world.gate.start()
    world.gate.open(DEADLINE)
    client = world.client()
    world.gate.release()
    assert world.gate.state == "draining"
    cell = client.execute("1 + 1")
    until(lambda: world.gate.queued == 1, "the cell was kept")
    world.gate.drain(DEADLINE)
    follows.clear()
    follows.append(False)
    world.gate.release()
    assert reply(client, cell)["content"]["status"] == "ok"
    assert world.gate.state == "open"


def test_the_next_cell_is_queued_as_soon_as_the_requesting_cell_ended(up):
    client = up.client()
    outputs(client, client.execute(ASK))
    client.get_shell_msg(timeout=DEADLINE)
    first, second = client.execute("ask({'verb': 'checkpoint'})"), None
    reply(client, first)
    outputs(client, first)
    second = client.execute("1 + 1")
    until(lambda: up.gate.queued == 1, "the second cell was kept")
    assert up.asked == [{"verb": "checkpoint"}] and up.gate.state == "draining"
    up.to_sleep()
    assert up.woken == ["execute_request"]
    up.wake()
    assert reply(client, second)["content"]["status"] == "ok"


def test_a_refused_request_queues_nothing_once_released(up):
    client = up.client()
    outputs(client, client.execute(ASK + "ask({'verb': 'suspend'})"))
    client.get_shell_msg(timeout=DEADLINE)
    until(lambda: up.gate.state == "draining", "the gate keeps")
    cell = client.execute("2 + 2")
    up.gate.release()
    assert reply(client, cell)["content"]["status"] == "ok"


def test_a_kernel_that_does_not_know_the_request_is_reported_in_time(up):
    with pytest.raises(KernelSilent):
        up.gate.request("unheard_of_request", {}, 0.5, "control")


def test_the_gate_publishes_for_a_sleeping_kernel(up):
    client = up.client()
    up.to_sleep()
    up.gate.publish("comm_msg", {"comm_id": "panel", "data": {}})
    message = client.get_iopub_msg(timeout=DEADLINE)
    while message["msg_type"] != "comm_msg":
        message = client.get_iopub_msg(timeout=DEADLINE)
    assert message["content"]["comm_id"] == "panel" and message["parent_header"] == {}
    assert up.woken == []
