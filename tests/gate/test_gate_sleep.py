"""The kernel sleeps and wakes behind the gate; clients notice only a delay."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from queue import Empty

import ipykernel
import pytest
import zmq
from gate_world import DEADLINE, Kernel, World, kinds, outputs, reply, send
from jupyter_client import BlockingKernelClient
from waiting import until

from jupyter_gpu_ckpt.errors import GateError, GpuFull, KernelBusy, KernelSilent
from jupyter_gpu_ckpt.gate import queue, router, wake_rules, wire
from jupyter_gpu_ckpt.gate.gate import Gate
from jupyter_gpu_ckpt.gate.replies import IDLE_TYPE


def wait_for(go: Path) -> str:
    """Code of a cell that runs until ``go`` exists."""
    return f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\n"


def beat(world: World, timeout: float) -> bool:
    """Return whether a heartbeat is answered within ``timeout`` seconds."""
    with wire.context().socket(zmq.REQ) as heart:
        heart.linger = 0
        heart.connect(wire.address(world.front, "hb"))
        heart.send(b"ping")
        return bool(heart.poll(timeout * 1000)) and heart.recv() == b"ping"


def nothing(client: BlockingKernelClient) -> None:
    with pytest.raises(Empty):
        client.get_shell_msg(timeout=0.2)


# -- draining --------------------------------------------------------------------------------------------------------


def test_a_drain_waits_for_the_cell_and_keeps_what_comes_meanwhile(up: World, tmp_path: Path) -> None:
    client = up.client()
    first = client.execute(wait_for(tmp_path / "go"))
    until(lambda: up.gate.pending == ["execute_request"], "the cell is under way")
    draining = up.in_thread(lambda: up.gate.drain(DEADLINE))
    until(lambda: up.gate.state == "draining", "the drain began")
    second = client.execute("1")
    until(lambda: up.gate.queued == 1, "the second cell is kept")
    (tmp_path / "go").touch()
    draining.join()
    assert up.gate.state == "drained"
    reply(client, first)
    nothing(client)
    up.gate.release()
    assert reply(client, second)["content"]["status"] == "ok"


def test_a_drain_that_takes_too_long_says_what_runs_and_loses_nothing(up: World, tmp_path: Path) -> None:
    client = up.client()
    first = client.execute(wait_for(tmp_path / "go"))
    until(lambda: up.gate.pending, "the cell is under way")
    draining = up.in_thread(lambda: up.gate.drain(0.3))
    until(lambda: up.gate.state == "draining", "the drain began")
    second = client.execute("1")
    with pytest.raises(KernelBusy) as failure:
        draining.join()
    assert failure.value.details == {"pending": ["execute_request"], "seconds": 0.3}
    up.gate.release()
    (tmp_path / "go").touch()
    reply(client, first)
    assert reply(client, second)["content"]["status"] == "ok"


def test_a_cell_that_waits_for_input_can_be_answered_and_interrupted_during_a_drain(up: World) -> None:
    client = up.client()
    first = client.execute("said = input()", allow_stdin=True)
    client.get_stdin_msg(timeout=DEADLINE)
    draining = up.in_thread(lambda: up.gate.drain(DEADLINE))
    until(lambda: up.gate.state == "draining", "the drain began")
    client.input("yes")
    reply(client, first)
    draining.join()
    up.gate.release()

    second = client.execute("input()", allow_stdin=True)
    client.get_stdin_msg(timeout=DEADLINE)
    draining = up.in_thread(lambda: up.gate.drain(DEADLINE))
    until(lambda: up.gate.state == "draining", "the drain began")
    send(client, "interrupt_request", {}, "control")
    assert reply(client, second)["content"]["status"] == "error"
    draining.join()


def test_an_error_aborts_the_cells_kept_before_it_and_nothing_else(up: World, tmp_path: Path) -> None:
    client = up.client()
    first = client.execute(wait_for(tmp_path / "go") + "1/0")
    until(lambda: up.gate.pending, "the cell is under way")
    draining = up.in_thread(lambda: up.gate.drain(DEADLINE))
    until(lambda: up.gate.state == "draining", "the drain began")
    queued = [client.execute("1") for _ in range(2)]
    asked = client.complete("prin")
    until(lambda: up.gate.queued == 3, "all is kept")
    (tmp_path / "go").touch()
    assert reply(client, first)["content"]["ename"] == "ZeroDivisionError"
    for msg_id in queued:
        aborted = reply(client, msg_id)
        assert aborted["content"] == {"status": "aborted"}
        assert kinds(outputs(client, msg_id)) == ["busy", "idle"]
    draining.join()
    later = client.execute("1")
    up.gate.release()
    assert "print" in reply(client, asked)["content"]["matches"]
    assert reply(client, later)["content"]["status"] == "ok"


@pytest.mark.parametrize("option", [{"stop_on_error": False}, {"silent": True}])
def test_an_error_that_does_not_stop_aborts_nothing(up: World, tmp_path: Path, option: dict[str, bool]) -> None:
    client = up.client()
    first = client.execute(wait_for(tmp_path / "go") + "1/0", **option)
    until(lambda: up.gate.pending, "the cell is under way")
    draining = up.in_thread(lambda: up.gate.drain(DEADLINE))
    until(lambda: up.gate.state == "draining", "the drain began")
    queued = client.execute("1")
    until(lambda: up.gate.queued == 1, "it is kept")
    (tmp_path / "go").touch()
    reply(client, first)
    draining.join()
    up.gate.release()
    assert reply(client, queued)["content"]["status"] == "ok"


def test_a_request_whose_handler_raises_does_not_delay_the_drain(up: World) -> None:
    client = up.client()
    send(client, "complete_request", {})  # no code: the kernel logs an error, goes idle, and never replies
    until(lambda: up.gate.pending == ["complete_request"], "it is under way")
    up.gate.drain(DEADLINE)
    assert up.gate.state == "drained"


@pytest.mark.skipif(
    ipykernel.version_info[:2] < (7, 4), reason="ipykernel before 7.4 answers one shell message at a time"
)
def test_a_comm_message_handled_beside_an_awaiting_cell_does_not_delay_the_drain(up: World, tmp_path: Path) -> None:
    client = up.client()
    target = "lambda c, m: c.on_msg(lambda m: c.send('heard'))"
    code = f"get_ipython().kernel.comm_manager.register_target('note', {target})"
    reply(client, client.execute(code))
    send(client, "comm_open", {"comm_id": "c2", "target_name": "note", "data": {}})
    go, began = tmp_path / "go", tmp_path / "began"
    cell = client.execute(
        f"import asyncio, os\nopen({str(began)!r}, 'w')\n"
        f"while not os.path.exists({str(go)!r}): await asyncio.sleep(0.01)"
    )
    until(began.exists, "the cell runs")
    send(client, "comm_msg", {"comm_id": "c2", "data": {}})
    while client.get_iopub_msg(timeout=DEADLINE)["msg_type"] != "comm_msg":
        pass
    go.touch()
    reply(client, cell)
    up.gate.drain(DEADLINE)
    assert up.gate.pending == []


# -- sleeping and waking ---------------------------------------------------------------------------------------------


def test_a_cell_wakes_the_kernel_once_and_is_run_after(up: World) -> None:
    client = up.client()
    reply(client, client.execute("x = 41"))
    up.to_sleep()
    assert up.gate.state == "asleep"
    cells = [client.execute("x += 1"), client.execute("print(x)")]
    until(lambda: up.gate.queued == 2, "both are kept")
    assert up.woken == ["execute_request"]
    up.wake()
    for cell in cells:
        assert reply(client, cell)["content"]["status"] == "ok"
    assert [m["content"]["text"] for m in outputs(client, cells[1]) if m["msg_type"] == "stream"] == ["42\n"]


@pytest.mark.parametrize(
    ("kind", "channel"),
    [("comm_open", "shell"), ("comm_msg", "shell"), ("input_reply", "stdin"), ("execute_request", "shell")]
    + [("is_complete_request", "shell")],
)
def test_the_allow_list_wakes(up: World, kind: str, channel: str) -> None:
    client = up.client()
    up.to_sleep()
    send(client, kind, {"silent": True, "code": ""}, channel)
    until(lambda: up.woken == [kind], "the wake")


def test_whether_a_line_is_complete_is_unknown_where_the_kernel_is_not_back_in_time(up: World) -> None:
    client = up.client()
    up.to_sleep()
    begun = time.monotonic()
    assert reply(client, client.is_complete("for n in x:"))["content"] == {"status": "unknown"}
    assert time.monotonic() - begun >= wake_rules.UNKNOWN_AFTER
    assert wake_rules.UNKNOWN_AFTER < 1, "jupyter_console waits for a second"
    assert (up.woken, up.gate.queued) == (["is_complete_request"], 0)
    up.wake()
    assert reply(client, client.is_complete("for n in x:"))["content"]["status"] == "incomplete"
    nothing(client)


def test_whether_a_line_is_complete_says_the_kernel_that_is_back_in_time(
    up: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "UNKNOWN_AFTER", 3.0)
    client = up.client()
    up.to_sleep()
    line = client.is_complete("for n in x:")
    until(lambda: up.woken == ["is_complete_request"], "the wake")
    up.wake()
    assert reply(client, line)["content"]["status"] == "incomplete"
    time.sleep(3.0)
    nothing(client)


def test_looking_does_not_wake_and_is_answered_after(up: World) -> None:
    client = up.client()
    up.to_sleep()
    looked = [client.history(hist_access_type="tail", n=1), client.comm_info(), client.complete("prin")]
    debug = send(client, "debug_request", {"type": "request", "seq": 1, "command": "debugInfo"}, "control")
    until(lambda: up.gate.queued == 4, "all is kept")
    nothing(client)
    assert up.woken == []
    up.wake()
    for msg_id in looked:
        assert reply(client, msg_id)["content"]["status"] == "ok"
    reply(client, debug, "control")


def test_a_message_kept_before_the_sleep_wakes_at_once(up: World) -> None:
    client = up.client()
    up.gate.drain(DEADLINE)
    cell = client.execute("1")
    until(lambda: up.gate.queued == 1, "it is kept")
    assert up.woken == []
    up.gate.close()
    up.gate.sleep()
    assert up.woken == ["execute_request"]
    up.wake()
    reply(client, cell)


def test_a_client_can_connect_to_a_sleeping_kernel(up: World) -> None:
    former = up.client().session.session
    up.to_sleep()
    client = up.client()  # waits until ready
    for channel in ("shell", "control"):
        asked = send(client, "kernel_info_request", {}, channel)
        answer = reply(client, asked, channel)
        assert answer["content"]["implementation"] == "ipython"
        assert answer["header"]["session"] not in (former, client.session.session)
        assert kinds(outputs(client, asked)) == ["busy", "idle"]
    assert up.woken == []


def test_a_client_that_connects_to_a_sleeping_kernel_gets_the_status_idle(up: World) -> None:
    """A front end takes no status from what belongs to a kernel_info_request; without another it says "Unknown"."""
    up.to_sleep()
    client = up.client()
    client.kernel_info()
    while (message := client.get_iopub_msg(timeout=DEADLINE))["parent_header"].get("msg_type") == "kernel_info_request":
        pass
    assert (message["msg_type"], message["content"]) == ("status", {"execution_state": "idle"})
    assert message["parent_header"]["msg_type"] == IDLE_TYPE
    assert up.woken == []


def test_the_answer_from_the_cache_is_the_kernels_own(up: World) -> None:
    client = up.client()
    awake = reply(client, client.kernel_info())
    up.to_sleep()
    asleep = reply(client, client.kernel_info())
    for answer in (awake, asleep):
        answer["content"].pop("banner")  # ends in a tip of the day
    assert asleep["content"] == awake["content"]
    assert asleep["header"]["session"] == awake["header"]["session"]


def test_a_kernel_attached_asleep_has_the_identity_that_an_earlier_gate_recorded(up: World) -> None:
    before = reply(client := up.client(), client.kernel_info())
    identity = up.gate.identity
    up.gate.stop()
    up.gate = up.new_gate(identity=identity)
    up.gate.start()
    up.gate.sleep()
    client = up.client()
    assert reply(client, client.kernel_info())["header"]["session"] == before["header"]["session"]
    cell = client.execute("1")
    until(lambda: up.woken == ["execute_request"], "the wake")
    up.wake()
    reply(client, cell)


def test_before_the_kernel_was_heard_everything_waits(world: World) -> None:
    world.gate.start()
    assert world.gate.state == "closed"
    client = world.client(ready=False)
    asked, cell = client.kernel_info(), client.execute("1")
    until(lambda: world.gate.queued == 2, "both are kept")
    world.wake()
    assert reply(client, asked)["msg_type"] == "kernel_info_reply"
    assert reply(client, cell)["content"]["status"] == "ok"


@pytest.mark.parametrize("asleep", [False, True])
def test_shutdown_and_interrupt_of_a_sleeping_kernel_are_answered_and_never_reach_it(up: World, asleep: bool) -> None:
    client = up.client()
    up.gate.drain(DEADLINE)
    up.gate.close()
    if asleep:
        up.gate.sleep()
    asked = send(client, "shutdown_request", {"restart": True}, "control")
    assert reply(client, asked, "control")["content"] == {"status": "ok", "restart": True}
    assert kinds(outputs(client, asked)) == ["busy", "idle"]
    asked = send(client, "interrupt_request", {}, "control")
    assert reply(client, asked, "control")["content"] == {"status": "ok"}
    assert up.asked == [{"verb": "shutdown", "restart": True}, {"verb": "interrupt"}]
    up.wake()
    assert reply(client, client.execute("1"))["content"]["status"] == "ok"


def test_a_gate_that_stops_ends_a_prompt(up: World) -> None:
    client = up.client()
    up.to_sleep()
    client.execute("1", allow_stdin=True)
    until(lambda: up.woken, "the cell woke the kernel")
    answer = up.in_thread(lambda: up.gate.prompt("Continue?", 600.0))
    assert client.get_stdin_msg(timeout=DEADLINE)["content"]["prompt"] == "Continue?"
    up.gate.stop()
    assert answer.join() is None


@pytest.mark.parametrize("how", ["message", "signal"])
@pytest.mark.parametrize("asleep", [False, True])
def test_an_interrupt_of_a_sleeping_kernel_ends_the_cells_that_wait(up: World, asleep: bool, how: str) -> None:
    """The first of a queue as ipykernel ends an interrupted cell, those behind it as it aborts them."""
    client, other = up.client(), up.client()
    up.gate.drain(DEADLINE)
    up.gate.close()
    if asleep:
        up.gate.sleep()
    first, second = client.execute("ran = 1"), client.execute("ran = 2")
    loose = [other.execute("ran = 3", stop_on_error=False) for _ in range(2)]
    asked = client.comm_info()
    until(lambda: up.gate.queued == 5, "all are kept")
    if how == "message":
        stop = send(client, "interrupt_request", {}, "control")
        assert reply(client, stop, "control")["content"] == {"status": "ok"}
    else:
        assert up.gate.interrupt()
    answers = [reply(client, id)["content"] for id in (first, second)]
    assert [answer["status"] for answer in answers] == ["error", "aborted"]
    assert answers[0]["ename"] == "KeyboardInterrupt"
    assert kinds(outputs(client, first)) == ["busy", "error", "idle"]
    assert [reply(other, id)["content"]["ename"] for id in loose] == ["KeyboardInterrupt"] * 2
    assert up.gate.queued == 1, "a question is not a cell"
    up.wake()
    assert reply(client, asked)["msg_type"] == "comm_info_reply"
    assert reply(client, client.execute("assert 'ran' not in globals()"))["content"]["status"] == "ok"


def test_a_gate_that_is_open_leaves_the_interrupt_to_the_kernel(up: World) -> None:
    assert not up.gate.interrupt()


def test_two_hundred_cells_around_a_sleep_are_each_run_once_and_in_order(up: World) -> None:
    client = up.client()
    reply(client, client.execute("seen = []"))
    sent: list[str] = []
    answered: list[str] = []

    def collect(count: int) -> None:
        while len(answered) < count:
            answered.append(client.get_shell_msg(timeout=DEADLINE)["parent_header"]["msg_id"])

    def send_all() -> None:
        for i in range(200):
            sent.append(client.execute(f"seen.append({i})", silent=True))
            collect(len(sent) - 20)  # never more than twenty ahead, so that the sleeps fall among the cells

    sending = up.in_thread(send_all)
    rounds = 0
    while len(sent) < 200 or rounds < 5:
        up.to_sleep()
        up.wake()
        rounds += 1
    sending.join()
    collect(200)
    assert answered == sent
    nothing(client)
    last = client.execute("print(seen == list(range(200)))")
    reply(client, last)
    assert [m["content"]["text"] for m in outputs(client, last) if m["msg_type"] == "stream"] == ["True\n"]


def test_a_sleep_does_not_touch_the_users_random_numbers(up: World) -> None:
    """IPython draws the tip in its banner, so a ``kernel_info_request`` of the gate would."""
    client = up.client()

    def numbers() -> str:
        last = client.execute("import random; print(hash(random.getstate()))")
        reply(client, last)
        return str([m["content"]["text"] for m in outputs(client, last) if m["msg_type"] == "stream"])

    before = numbers()
    up.to_sleep()
    up.wake()
    assert numbers() == before


def test_a_kernel_suspended_in_place_keeps_its_connection(up: World) -> None:
    client = up.client()
    up.gate.drain(DEADLINE)
    up.gate.sleep()
    assert up.gate.request("kernel_info_request", {}, DEADLINE)["status"] == "ok"
    cell = client.execute("1")
    until(lambda: up.woken == ["execute_request"], "the wake")
    up.wake()
    reply(client, cell)


def test_when_too_much_waits_looking_is_refused_and_cells_are_not(up: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "MAX_MESSAGES", 2)
    client = up.client()
    up.to_sleep()
    for _ in range(2):
        client.comm_info()
    refused = client.comm_info()
    answer = reply(client, refused)
    assert (answer["msg_type"], answer["content"]["ename"]) == ("comm_info_reply", "KERNEL_ASLEEP")
    client.execute("1")
    until(lambda: up.gate.queued == 3, "the cell is kept")


def test_a_users_request_is_refused_by_an_error_when_memory_would_be_full_and_nothing_is_lost(
    up: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = up.client()
    up.to_sleep()
    big = client.execute(f"x = len({'a' * 10_000!r})")
    until(lambda: up.gate.queued == 1, "the first is kept")
    monkeypatch.setattr(queue, "MAX_WAKE_BYTES", 10_000)
    refused = [client.execute("x = 0"), client.execute("x = 1")]
    slider = client.session.send(client.shell_channel.socket, "comm_msg", {"comm_id": "c", "data": {}})
    for cell in refused:
        content = reply(client, cell)["content"]
        assert (content["status"], content["ename"]) == ("error", "KERNEL_ASLEEP")
        assert "Hint: Wait until" in content["traceback"][-1]
    outputs = {}
    while len(outputs) < 3:
        message = client.get_iopub_msg(timeout=DEADLINE)
        if message["msg_type"] == "error":
            outputs[message["parent_header"]["msg_id"]] = message["content"]["ename"]
    assert outputs == dict.fromkeys([*refused, slider["header"]["msg_id"]], "KERNEL_ASLEEP")
    up.wake()
    assert reply(client, big)["content"]["status"] == "ok"
    after = client.execute("assert x == 10_000")
    assert reply(client, after)["content"]["status"] == "ok", "the refused ones were not run"


# -- failures --------------------------------------------------------------------------------------------------------


def test_a_failed_wake_is_shown_as_an_error_of_the_cell(up: World) -> None:
    client, other = up.client(), up.client()
    up.to_sleep()
    asked = client.comm_info()
    cells = [client.execute("1"), client.execute("2")]
    until(lambda: up.gate.queued == 3, "all is kept")
    others = other.execute("3")
    until(lambda: up.gate.queued == 4, "all is kept")
    up.gate.fail(GpuFull("The GPU is full.", left="the image is kept"))
    failed = reply(client, cells[0])["content"]
    assert (failed["status"], failed["ename"], failed["evalue"]) == ("error", "GPU_FULL", "The GPU is full.")
    heard = outputs(client, cells[0])
    assert kinds(heard) == ["busy", "error", "idle"]
    assert "the image is kept" in "\n".join(heard[1]["content"]["traceback"])
    assert reply(client, cells[1])["content"] == {"status": "aborted"}
    assert reply(other, others)["content"]["ename"] == "GPU_FULL"
    assert (up.gate.state, up.gate.queued, up.woken) == ("asleep", 1, ["execute_request"])
    again = client.execute("4")
    until(lambda: len(up.woken) == 2, "the next cell wakes again")
    up.wake()
    assert reply(client, asked)["msg_type"] == "comm_info_reply"
    assert reply(client, again)["content"]["status"] == "ok"


def exhausted(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def refusing(world: World) -> World:
    """A world whose gate's owner can do nothing that is requested of it."""
    world.gate = Gate(
        world.front, world.kernel.info, on_wake=exhausted, on_agent_request=exhausted, kernel_id="under-test"
    )
    world.up()
    return world


def test_a_wake_that_could_not_begin_is_an_error_of_the_cell_and_the_next_one_tries_again(world: World) -> None:
    client = refusing(world).client()
    world.to_sleep()
    for _ in range(2):
        cell = client.execute("1")
        assert reply(client, cell)["content"]["ename"] == "LIMIT_REACHED"
    assert world.gate.state == "asleep"


def test_a_cell_whose_request_cannot_be_carried_out_keeps_no_later_one_from_running(world: World) -> None:
    client = refusing(world).client()
    code = (
        "k = get_ipython().kernel\n"
        "k.session.send(k.iopub_socket, 'gpu_ckpt_request', {'verb': 'checkpoint'}, parent=k.get_parent('shell'))"
    )
    for cell in (client.execute(code), client.execute("2")):
        assert reply(client, cell)["content"]["status"] == "ok"
    until(lambda: world.gate.state == "open", "the gate is open")


# -- risky cells ------------------------------------------------------------------------------------------------------

RISKY = "%%risky\nran.append(1)"


def with_risky(world: World) -> BlockingKernelClient:
    """A client of a kernel that runs risky cells as its agent has it do: without their first line."""
    client = world.client()
    magic = "get_ipython().register_magic_function(lambda _, cell: exec(cell, globals()), 'cell', 'risky'); ran = []"
    assert reply(client, client.execute(magic))["content"]["status"] == "ok"
    return client


def risky_runs(client: BlockingKernelClient) -> str:
    """The number of risky cells that the kernel has run."""
    wanted = reply(client, client.execute("", user_expressions={"ran": "len(ran)"}))["content"]["user_expressions"]
    return str(wanted["ran"]["data"]["text/plain"])


def test_each_risky_cell_waits_for_a_save_point_of_its_own(up: World) -> None:
    client = with_risky(up)
    first, between, second = client.execute(RISKY), client.execute("1"), client.execute(RISKY)
    until(lambda: up.gate.queued == 3, "all are kept")
    up.gate.drain(DEADLINE)
    up.gate.release()  # as a save does, before its image is complete
    assert (up.gate.state, up.gate.queued) == ("draining", 3)
    assert up.asked == [{"verb": "save_before_cell", "cell": first}]
    up.gate.risky_saved(second, None)  # of another kernel's cell
    assert up.gate.queued == 3
    up.gate.risky_saved(first, None)
    for cell in (first, between):
        assert reply(client, cell)["content"]["status"] == "ok"
    until(lambda: up.asked[1:] == [{"verb": "save_before_cell", "cell": second}], "the second is requested")
    assert (up.gate.state, up.gate.queued) == ("draining", 1)
    up.gate.risky_saved(second, None)
    assert reply(client, second)["content"]["status"] == "ok"
    assert (risky_runs(client), up.gate.state) == ("2", "open")


def test_a_risky_cell_without_a_save_point_does_not_run_nor_what_its_client_sent_behind_it(up: World) -> None:
    client, other = with_risky(up), up.client()
    risky, behind = client.execute(RISKY), client.execute(RISKY)
    until(lambda: up.gate.queued == 2, "both are kept")
    others = other.execute("1")
    until(lambda: up.gate.queued == 3, "the other's, too")
    up.gate.risky_saved(risky, GpuFull("The GPU is full."))
    assert reply(client, risky)["content"]["ename"] == "GPU_FULL"
    assert reply(client, behind)["content"] == {"status": "aborted"}
    assert reply(other, others)["content"]["status"] == "ok"
    assert (risky_runs(client), up.gate.state) == ("0", "open")


def test_a_risky_cell_whose_save_point_cannot_be_requested_does_not_run(world: World) -> None:
    client = with_risky(refusing(world))
    assert reply(client, client.execute(RISKY))["content"]["ename"] == "LIMIT_REACHED"
    assert (risky_runs(client), world.gate.state) == ("0", "open")


@pytest.mark.parametrize("how", ["message", "signal"])
def test_an_interrupt_ends_the_risky_cell_that_waits_and_nothing_else(up: World, how: str) -> None:
    """ipykernel drops a cell that begins when the signal comes: its reply would never come."""
    client = with_risky(up)
    count = (
        "handlers, met = get_ipython().kernel.control_handlers, []\n"
        "async def interrupt(*request, real=handlers['interrupt_request']):\n"
        "    met.append(1); await real(*request)\n"
        "handlers['interrupt_request'] = interrupt"
    )
    assert reply(client, client.execute(count))["content"]["status"] == "ok"
    risky = client.execute(RISKY)
    until(lambda: up.gate.queued == 1 and not up.gate.pending, "it is kept, and the cell before it has ended")
    if how == "message":
        stop = send(client, "interrupt_request", {}, "control")
        assert reply(client, stop, "control")["content"] == {"status": "ok"}
        assert up.asked[1:] == [{"verb": "interrupt"}]
    else:
        assert up.gate.interrupt()
    assert reply(client, risky)["content"]["ename"] == "KeyboardInterrupt"
    up.gate.risky_saved(risky, None)
    assert risky_runs(client) == "0"
    undo = client.execute("handlers['interrupt_request'] = interrupt.__kwdefaults__['real']; assert not met")
    assert reply(client, undo)["content"]["status"] == "ok"


def test_an_interrupt_while_a_risky_cell_waits_reaches_a_kernel_that_works(up: World, tmp_path: Path) -> None:
    """A widget's callback, or what a tool executes silently."""
    client, began = with_risky(up), tmp_path / "began"
    silent = client.execute(f"open({str(began)!r}, 'w').close()\n{wait_for(tmp_path / 'never')}", silent=True)
    until(began.exists, "it runs: ipykernel ignores signals before")
    risky = client.execute(RISKY)
    until(lambda: up.gate.queued == 1, "the cell is kept")
    assert not up.gate.interrupt()
    assert reply(client, risky)["content"]["ename"] == "KeyboardInterrupt"
    stop = send(client, "interrupt_request", {}, "control")
    assert reply(client, silent)["content"]["ename"] == "KeyboardInterrupt"
    reply(client, stop, "control")
    up.gate.risky_saved(risky, None)
    assert risky_runs(client) == "0"


def test_a_risky_cell_that_has_run_is_not_kept(up: World) -> None:
    client = with_risky(up)
    risky = client.execute(RISKY)
    until(lambda: up.gate.queued == 1, "it is kept")
    up.gate.risky_saved(risky, None)
    assert reply(client, risky)["content"]["status"] == "ok"
    until(lambda: not up.gate.pending, "it is done")
    gc.collect()
    assert [each for each in gc.get_objects() if isinstance(each, wire.Request) and each.msg_id == risky] == []


def test_a_kernel_that_was_woken_for_a_risky_cell_is_saved_before_it(up: World) -> None:
    client = with_risky(up)
    up.to_sleep()
    risky = client.execute(RISKY)
    until(lambda: up.woken == ["execute_request"], "the wake")
    up.wake()
    assert (up.gate.state, up.asked) == ("draining", [{"verb": "save_before_cell", "cell": risky}])
    up.gate.kernel_died()
    up.gate.risky_saved(risky, None)  # its save ends late
    assert up.gate.queued == 0


def test_a_cell_that_only_has_the_word_is_waited_for_as_any_other(up: World, tmp_path: Path) -> None:
    client = with_risky(up)
    cell = client.execute(wait_for(tmp_path / "go") + f"{RISKY!r}")
    until(lambda: up.gate.pending == ["execute_request"], "the cell is under way")
    (tmp_path / "go").touch()
    assert reply(client, cell)["content"]["status"] == "ok"
    assert up.asked == []


def test_each_cell_that_does_not_stop_gets_the_whole_error(up: World) -> None:
    client = up.client()
    up.to_sleep()
    cells = [client.execute("1", stop_on_error=False) for _ in range(2)]
    until(lambda: up.gate.queued == 2, "both are kept")
    up.gate.fail(GpuFull("The GPU is full."))
    assert [reply(client, cell)["content"]["ename"] for cell in cells] == ["GPU_FULL", "GPU_FULL"]


def test_a_kernel_that_does_not_answer_is_reported_and_sleeps_on(up: World, own_kernel: Kernel) -> None:
    client = up.client()
    up.to_sleep()
    own_kernel.kill()
    up.gate.rebind_kernel(own_kernel.info)
    up.gate.sleep()
    with pytest.raises(KernelSilent):
        up.gate.open(0.3)
    assert up.gate.state == "asleep"
    cell = client.execute("1")
    until(lambda: up.woken == ["execute_request"], "the wake")
    up.gate.rebind_kernel(up.kernel.info)
    up.wake()
    assert reply(client, cell)["content"]["status"] == "ok"


def test_a_kernel_that_dies_is_followed_by_another(own_world: World, shared_kernel: Kernel) -> None:
    own_world.up()
    client, gate = own_world.client(), own_world.gate
    client.execute("import time; time.sleep(1000)")
    until(lambda: gate.pending, "the cell is under way")
    draining = own_world.in_thread(lambda: gate.drain(DEADLINE))
    until(lambda: gate.state == "draining", "the drain began")
    client.execute("1")
    until(lambda: gate.queued == 1, "it is kept")
    own_world.kernel.kill()
    gate.kernel_died()
    with pytest.raises(GateError):
        draining.join()
    assert (gate.state, gate.queued, gate.pending) == ("closed", 0, [])
    gate.rebind_kernel(shared_kernel.info)
    gate.open(DEADLINE)
    gate.release()
    assert reply(client, client.execute("1"))["content"]["status"] == "ok"


# -- heartbeat -------------------------------------------------------------------------------------------------------


def test_the_heart_beats_until_the_kernel_is_dead(own_world: World) -> None:
    gate = own_world.gate
    gate.start()
    assert beat(own_world, DEADLINE)  # starting
    own_world.wake()
    assert beat(own_world, DEADLINE)  # the kernel's own
    own_world.to_sleep()
    assert beat(own_world, DEADLINE)
    own_world.kernel.kill()
    gate.kernel_died()
    assert not beat(own_world, 0.3)


def test_a_beat_in_flight_is_returned_when_the_kernel_goes(own_world: World) -> None:
    own_world.up()
    own_world.gate.drain(DEADLINE)
    own_world.gate.release()
    process = own_world.kernel.process
    process.send_signal(19)  # SIGSTOP: it accepts the beat and does not return it
    threads = Path(f"/proc/{process.pid}/task")
    until(
        lambda: all("T" in (thread / "stat").read_text().rpartition(")")[2].split()[0] for thread in threads.iterdir()),
        "all its threads stopped",
    )
    with wire.context().socket(zmq.REQ) as heart:
        heart.linger = 0
        heart.connect(wire.address(own_world.front, "hb"))
        heart.send(b"ping")
        until(lambda: own_world.gate._router._beats, "the beat was forwarded")
        own_world.gate.close()
        assert heart.poll(DEADLINE * 1000)
