"""The synchronous client and manager: no event loop runs between their calls, and nothing needs one."""

from __future__ import annotations

import asyncio

import pytest
from recorder import Recorder
from stock import Blocking, drained, executed, heard, printed, replies
from waiting import until

from jupyter_gpu_ckpt.gate import router
from jupyter_gpu_ckpt.trace import StepEvent

pytestmark = pytest.mark.timeout(120)


def outputs_of(messages: list[dict], msg_id: str) -> list[dict]:
    return [message for message in messages if message["parent_header"].get("msg_id") == msg_id]


def text_of(outputs: list[dict]) -> str:
    """Return the printed text; ipykernel may send it in pieces."""
    return "".join(output["content"]["text"] for output in outputs if output["msg_type"] == "stream")


def test_execute_interactive_wakes_a_kernel_that_was_checkpointed_from_another_loop(blocking: Blocking):
    client = blocking.connect()
    printed(client, "x = 41")
    asyncio.run(blocking.provisioner.checkpoint())
    assert blocking.state == "checkpointed"
    assert blocking.manager.is_alive()
    assert printed(client, "x += 1; print(x)") == "42"
    blocking.settled("running")
    blocking.checkpoint()
    assert printed(client, "x += 1; print(x)") == "43"


def test_two_clients_each_get_their_own_replies_and_both_see_every_output(blocking: Blocking):
    ada, bob = blocking.connect(), blocking.connect()
    printed(ada, "order = []")
    blocking.checkpoint()
    asked = {
        ada: ada.execute("order.append('ada'); print(order)"),
        bob: bob.execute("order.append('bob'); print(order)"),
    }
    for client, msg_id in asked.items():
        (reply,) = replies(client, 1)
        assert reply["parent_header"]["msg_id"] == msg_id
        assert reply["content"]["status"] == "ok"
        assert drained(client.get_shell_msg) == []
    for client in asked:
        seen = heard(client, asked.values())
        texts = []
        for msg_id in asked.values():
            outputs = outputs_of(seen, msg_id)
            states = [output["content"]["execution_state"] for output in outputs if output["msg_type"] == "status"]
            assert states == ["busy", "idle"]
            texts.append(text_of(outputs))
        assert sorted(texts, key=len) in (["['ada']\n", "['ada', 'bob']\n"], ["['bob']\n", "['bob', 'ada']\n"])


def test_a_client_that_connects_while_the_kernel_sleeps_is_ready_at_once_and_wakes_nobody(blocking: Blocking):
    printed(blocking.connect(), "x = 1")
    image = blocking.checkpoint()
    late = blocking.connect()  # waits for kernel_info on shell, and for the heart to beat
    assert late.is_alive()
    assert blocking.state == "checkpointed"
    assert image.path.exists()
    assert printed(late, "print(x)") == "1"


def test_twenty_cells_sent_while_it_sleeps_are_run_in_order_and_once(blocking: Blocking):
    client = blocking.connect()
    printed(client, "ran = []")
    blocking.checkpoint()
    sent = [client.execute(f"ran.append({n}); print({n})") for n in range(20)]
    answers = replies(client, len(sent))
    assert [answer["parent_header"]["msg_id"] for answer in answers] == sent
    assert {answer["content"]["status"] for answer in answers} == {"ok"}
    counts = [answer["content"]["execution_count"] for answer in answers]
    assert counts == list(range(counts[0], counts[0] + 20))
    assert drained(client.get_shell_msg) == [], "no reply comes twice"
    seen = heard(client, sent)
    assert [text_of(outputs_of(seen, msg_id)) for msg_id in sent] == [f"{n}\n" for n in range(20)]
    assert printed(client, "print(ran == list(range(20)))") == "True"


def test_an_error_in_a_queue_of_held_cells_aborts_those_behind_it(blocking: Blocking):
    """Ipykernel aborts cells that a notebook sent by "Run all" in the same way."""
    client = blocking.connect()
    blocking.checkpoint()
    sent = [client.execute(code) for code in ("a = 1", "1 / 0", "a = 2", "a = 3")]
    answers = replies(client, len(sent))
    assert [answer["parent_header"]["msg_id"] for answer in answers] == sent
    assert [answer["content"]["status"] for answer in answers] == ["ok", "error", "aborted", "aborted"]
    assert printed(client, "print(a)") == "1"


def test_questions_that_do_not_wake_are_answered_by_the_kernel_once_it_is_awake(blocking: Blocking):
    client = blocking.connect()
    printed(client, "unmistakable_name = 1")
    blocking.checkpoint()
    asked = [client.complete("unmistakable_na"), client.history(n=1)]
    assert drained(client.get_shell_msg) == []
    assert blocking.state == "checkpointed"
    last = client.execute("print(unmistakable_name)")
    answers = {answer["parent_header"]["msg_id"]: answer["content"] for answer in replies(client, 3)}
    assert list(answers) == [*asked, last]
    assert answers[asked[0]]["matches"] == ["unmistakable_name"]
    assert answers[last]["status"] == "ok"


def test_the_end_of_a_line_in_a_console_wakes_the_kernel(blocking: Blocking, monkeypatch):
    monkeypatch.setattr(router, "UNKNOWN_AFTER", 60.0)  # a busy machine takes longer to wake it
    client = blocking.connect()
    blocking.checkpoint()
    client.is_complete("for i in x:")
    (answer,) = replies(client, 1)
    assert answer["content"] == {"status": "incomplete", "indent": "    "}
    assert blocking.settled("running") is None


def test_a_wake_that_fails_answers_with_the_code_and_the_hint_and_the_next_try_works(blocking: Blocking):
    client = blocking.connect()
    printed(client, "x = 1")
    image = blocking.checkpoint()
    hidden = image.path.with_name(".hidden")
    image.path.rename(hidden)
    reply, outputs = executed(client, "print(x)")
    assert reply["status"] == "error"
    assert reply["ename"] == "IMAGE_NOT_FOUND"
    assert any(line.startswith("Hint: ") for line in reply["traceback"])
    (error,) = [message["content"] for message in outputs if message["msg_type"] == "error"]
    assert error["ename"] == "IMAGE_NOT_FOUND"
    assert blocking.manager.is_alive(), "a restarter must not take it for dead"
    assert blocking.checkpoint().id == image.id, "it is where it was"

    hidden.rename(image.path)
    assert printed(client, "x += 1; print(x)") == "2"
    blocking.settled("running")
    assert not image.path.exists()


def test_a_wake_that_fails_is_tried_once_for_all_that_wait(blocking: Blocking):
    """Each try of a restore costs the node its GPU lock and minutes of disk; the next one is the user's to ask for."""
    client = blocking.connect()
    image = blocking.checkpoint()
    image.path.rename(image.path.with_name(".hidden"))
    steps, gate = Recorder(), blocking.provisioner.gate

    def all_wait(event: StepEvent) -> None:
        """The wake fails once all three wait for it; a cell that comes later is one that asks for another."""
        if (event.kind, event.step) == ("started", "match"):
            until(lambda: gate.queued >= 3, "all three are kept")

    blocking.provisioner.sinks += [steps, all_wait]
    sent = [client.execute(code) for code in ("1", "2", "3")]
    answers = replies(client, len(sent))
    assert [answer["content"]["status"] for answer in answers] == ["error", "aborted", "aborted"]
    blocking.checkpoint()  # nothing to do, but it waits its turn behind every wake
    assert [event.code for event in steps.events if event.kind == "failed"] == ["IMAGE_NOT_FOUND"]


def test_restart_and_shutdown_from_the_synchronous_manager_while_it_sleeps(blocking: Blocking):
    client = blocking.connect()
    printed(client, "x = 1")
    image = blocking.checkpoint()
    blocking.manager.restart_kernel()
    client.wait_for_ready(timeout=60)
    assert printed(client, "print('x' in globals())") == "False"
    assert not image.path.exists(), "the old state must not come back"
    image = blocking.checkpoint()
    blocking.manager.shutdown_kernel()
    assert not blocking.manager.is_alive()
    assert not image.path.exists(), "a kernel that was shut down is not wanted any more"
