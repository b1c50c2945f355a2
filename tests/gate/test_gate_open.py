"""An open gate is not there: every channel works as it does without one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from pathlib import Path
from queue import Empty

import pytest
import zmq
from gate_world import DEADLINE, World, kinds, outputs, reply, send
from jupyter_client import AsyncKernelClient
from waiting import until

from jupyter_gpu_ckpt.errors import GateError, KernelBusy, StateError
from jupyter_gpu_ckpt.gate import wire


def test_requests_of_every_kind_are_answered(up: World) -> None:
    client = up.client()
    done = client.execute("answer = 6 * 7; answer")
    assert reply(client, done)["content"]["status"] == "ok"
    assert kinds(outputs(client, done)) == ["busy", "execute_input", "execute_result", "idle"]
    assert "answer" in reply(client, client.complete("answ"))["content"]["matches"]
    assert reply(client, client.inspect("answer"))["content"]["found"]
    assert reply(client, client.history(hist_access_type="tail", n=1))["content"]["status"] == "ok"
    assert reply(client, client.is_complete("for i in x:"))["content"]["status"] == "incomplete"
    assert reply(client, client.comm_info())["content"]["comms"] == {}
    until(lambda: not up.gate.pending, "every request is accounted for")


async def test_the_asynchronous_client_works(up: World) -> None:
    client = AsyncKernelClient()
    client.load_connection_info(up.front)
    client.start_channels()
    try:
        await client.wait_for_ready(timeout=DEADLINE)
        answer = await client.execute_interactive("print('hi')", timeout=DEADLINE, output_hook=lambda _: None)
        assert answer["content"]["status"] == "ok"
    finally:
        client.stop_channels()


def test_input_reaches_the_client_that_runs_the_cell(up: World) -> None:
    bystander, client = up.client(), up.client()
    done = client.execute("said = input('name? ')", allow_stdin=True)
    assert client.get_stdin_msg(timeout=DEADLINE)["content"]["prompt"] == "name? "
    assert not bystander.stdin_channel.msg_ready()
    client.input("Ada")
    assert reply(client, done)["content"]["status"] == "ok"


def test_a_running_cell_is_interrupted_and_control_answers_meanwhile(up: World, tmp_path: Path) -> None:
    client = up.client()
    done = client.execute(f"open({str(tmp_path / 'began')!r}, 'w'); import time; time.sleep(1000)")
    until((tmp_path / "began").exists, "the cell runs")
    asked = send(client, "kernel_info_request", {}, "control")
    assert reply(client, asked, "control")["msg_type"] == "kernel_info_reply"
    stop = send(client, "interrupt_request", {}, "control")
    assert reply(client, stop, "control")["content"]["status"] == "ok"
    assert reply(client, done)["content"]["ename"] == "KeyboardInterrupt"


def test_comms_go_both_ways(up: World) -> None:
    client = up.client()
    code = "get_ipython().kernel.comm_manager.register_target('echo', lambda c, m: c.on_msg(lambda m: c.send('heard')))"
    reply(client, client.execute(code))
    send(client, "comm_open", {"comm_id": "c1", "target_name": "echo", "data": {}})
    sent = send(client, "comm_msg", {"comm_id": "c1", "data": {}})
    heard = outputs(client, sent)
    assert kinds(heard) == ["busy", "comm_msg", "idle"]
    assert heard[1]["content"]["data"] == "heard"


def test_a_subshell_answers_while_the_main_shell_is_busy(up: World, tmp_path: Path) -> None:
    client = up.client()
    made = reply(client, send(client, "create_subshell_request", {}, "control"), "control")["content"]
    go = tmp_path / "go"
    busy = client.execute(f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)")
    content = {"code": "1", "silent": False, "store_history": False, "user_expressions": {}, "allow_stdin": False}
    aside = send(client, "execute_request", content, subshell_id=made["subshell_id"])
    assert reply(client, aside)["content"]["status"] == "ok"
    go.touch()
    reply(client, busy)
    gone = send(client, "delete_subshell_request", {"subshell_id": made["subshell_id"]}, "control")
    assert reply(client, gone, "control")["content"]["status"] == "ok"


def test_a_burst_of_outputs_loses_none(up: World) -> None:
    client = up.client()
    # The kernel itself drops outputs when it prints faster than it sends, gate or no gate; this is not about that.
    # libzmq applies the mark to the connections that there are, so the gate must not reconnect after this.
    reply(client, client.execute("t = get_ipython().kernel.iopub_thread; t.schedule(lambda: t.socket.set_hwm(0))"))
    done = client.execute(
        "k = get_ipython().kernel\n"
        "for i in range(5000):\n"
        "    k.session.send(k.iopub_socket, 'stream', {'name': 'stdout', 'text': str(i)}, parent=k.get_parent('shell'))"
    )
    texts = [m["content"]["text"] for m in outputs(client, done) if m["msg_type"] == "stream"]
    assert texts == [str(i) for i in range(5000)]


def test_a_new_subscriber_is_welcomed_and_the_kernels_own_welcome_is_not_passed_on(up: World) -> None:
    subscriber = wire.context().socket(zmq.SUB)
    subscriber.connect(wire.address(up.front, "iopub"))
    subscriber.subscribe(b"")
    try:
        # ipykernel 7 does not notice who subscribes while it sends (20 of 20).  A gate that it has not welcomed takes
        # it for an older kernel, and welcomes nobody.
        for _ in range(int(DEADLINE)):
            if subscriber.poll(1000):
                break
            up.to_sleep()
            up.wake()
        frames = subscriber.recv_multipart(zmq.NOBLOCK)
        message = wire.session(up.front, history=False).deserialize(wire.split(frames)[1])
        assert message["msg_type"] == "iopub_welcome"
        assert message["content"] == {"subscription": ""}
        up.to_sleep()
        up.wake()  # the gate subscribes again, and the kernel welcomes it
        asked = up.client().kernel_info()
        types = []
        while asked not in types:
            assert subscriber.poll(DEADLINE * 1000)
            message = wire.session(up.front, history=False).deserialize(wire.split(subscriber.recv_multipart())[1])
            types += [message["msg_type"], message["parent_header"].get("msg_id")]
        assert types.count("iopub_welcome") == 1  # that of the client that came later
    finally:
        subscriber.close(linger=0)


@pytest.mark.parametrize("welcomed", [True, False])
def test_a_later_gate_of_a_sleeping_kernel_welcomes_subscribers_as_the_kernel_does(up: World, welcomed: bool) -> None:
    identity = {**up.gate.identity, "welcomes": welcomed}
    up.gate.stop()
    up.gate = up.new_gate(identity=identity)
    up.gate.start()
    client = up.client(ready=False, hb=False)
    heard: list[str] = []
    while "status" not in heard:  # it follows the welcome; a subscription may come after a request
        client.kernel_info()
        with contextlib.suppress(Empty):
            while True:
                heard.append(client.get_iopub_msg(timeout=0.5)["msg_type"])
    assert ("iopub_welcome" in heard) is welcomed


@pytest.mark.parametrize("forge", ["forged", "repeated", "garbage", "no delimiter", "header"])
def test_messages_that_do_not_verify_are_dropped_and_logged_in_one_line(
    up: World, caplog: pytest.LogCaptureFixture, forge: str
) -> None:
    client = up.client()
    frames = client.session.serialize(client.session.msg("kernel_info_request", {}))
    if forge == "forged":
        frames[1] = b"0" * len(frames[1])
    elif forge == "repeated":
        client.shell_channel.socket.send_multipart(frames)
        client.get_shell_msg(timeout=DEADLINE)
    elif forge == "garbage":
        frames = frames[:3]
    elif forge == "no delimiter":
        frames = [b"hello"]
    else:
        message = client.session.msg("kernel_info_request", {})
        message["header"]["msg_id"] = ["a list"]
        frames = client.session.serialize(message)
    caplog.clear()
    client.shell_channel.socket.send_multipart(frames)
    until(lambda: caplog.records, "a line in the log")
    # The kernel may never answer it, so it must not be waited for either.
    up.gate.drain(DEADLINE)
    up.gate.release()
    asked = client.execute("1")
    while (answer := client.get_shell_msg(timeout=DEADLINE))["parent_header"]["msg_id"] != asked:
        assert forge == "header", "the kernel answered what it should have dropped"
    assert answer["content"]["status"] == "ok"
    assert len(caplog.records) == 1
    # What was not signed goes nowhere; what was is the kernel's to judge.
    signed = forge in ("repeated", "header")
    line = "no answer is expected to a message" if signed else "dropped a message"
    assert caplog.records[0].message.startswith(f"gate: {line} on client shell: ")
    if forge == "repeated":
        assert caplog.records[0].message.endswith("repeated signature")


def test_one_msg_is_executed_once_though_it_was_sent_twice(up: World) -> None:
    client = up.client()
    reply(client, client.execute("count = 0"))
    message = client.session.msg("execute_request", {"code": "count += 1", "silent": False})
    frames = client.session.serialize(message)
    for _ in range(2):
        client.shell_channel.socket.send_multipart(frames)
    reply(client, message["header"]["msg_id"])
    sent = client.execute("print(count)")
    reply(client, sent)
    assert [m["content"]["text"] for m in outputs(client, sent) if m["msg_type"] == "stream"] == ["1\n"]


def test_clients_do_not_see_the_gates_own_request_and_a_missing_answer_is_an_error(up: World) -> None:
    client = up.client()
    assert up.gate.request("kernel_info_request", {}, DEADLINE)["implementation"] == "ipython"
    with pytest.raises(GateError) as failure:
        up.gate.request("gpu_ckpt_nonsense_request", {}, DEADLINE)
    assert failure.value.code == "KERNEL_SILENT"
    sent = client.execute("1")
    assert kinds([client.get_iopub_msg(timeout=DEADLINE)]) == ["busy"]  # the client's own is the first it sees
    reply(client, sent)


def test_the_kernels_request_comes_after_the_cell_and_clients_never_see_it(up: World, tmp_path: Path) -> None:
    client, go, began = up.client(), tmp_path / "go", tmp_path / "began"
    done = client.execute(
        "import os, time\n"
        "k = get_ipython().kernel\n"
        "k.session.send(k.iopub_socket, 'gpu_ckpt_request', {'verb': 'checkpoint'}, parent=k.get_parent('shell'))\n"
        f"print('asked', flush=True); open({str(began)!r}, 'w')\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.01)"
    )
    until(began.exists, "the cell asked")
    while client.get_iopub_msg(timeout=DEADLINE)["msg_type"] != "stream":
        pass
    assert up.asked == []
    go.touch()
    assert reply(client, done)["content"]["status"] == "ok"
    assert "gpu_ckpt_request" not in kinds(outputs(client, done))
    until(lambda: up.asked == [{"verb": "checkpoint"}], "the ask")


def test_looking_is_no_activity(up: World) -> None:
    client = up.client()
    before = up.gate.last_activity
    reply(client, client.kernel_info())
    assert up.gate.last_activity == before
    reply(client, client.execute("1"))
    assert before < up.gate.last_activity <= time.monotonic()


def test_a_taken_port_is_named_and_nothing_stays_bound(world: World) -> None:
    port = world.front["control_port"]
    with socket.create_server(("127.0.0.1", port)), pytest.raises(GateError, match=str(port)):
        world.gate.start()
    world.gate.start()


def test_a_gate_that_gets_no_thread_leaves_nothing_bound_and_nothing_open(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with wire.context().socket(zmq.REQ):  # libzmq's own descriptors come with the first socket
        pass
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", exhausted)
        with pytest.raises(RuntimeError):
            world.gate.start()
    until(lambda: len(os.listdir("/proc/self/fd")) <= before, "libzmq has closed its sockets")
    world.gate = world.new_gate()
    world.gate.start()


def test_a_taken_unix_socket_is_named_too(world: World, tmp_path: Path) -> None:
    world.front.update(world.kernel.info)
    until(lambda: Path(f"{world.kernel.info['ip']}-1").exists(), "the kernel's socket")
    with pytest.raises(GateError, match=r"ipc://.*[Aa]ddress .*in use"):
        world.new_gate().start()


def test_a_gate_of_unix_sockets_works(world: World, tmp_path: Path) -> None:
    names = ("shell", "iopub", "stdin", "control", "hb")
    world.front.update(transport="ipc", ip=str(world.kernel.directory / "f"))
    world.front.update({f"{name}_port": n for n, name in enumerate(names, 1)})
    world.gate = world.new_gate()
    world.up()
    client = world.client()
    assert reply(client, client.execute("1"))["content"]["status"] == "ok"


def test_a_stopped_gate_can_be_followed_by_another_on_its_ports(up: World) -> None:
    up.gate.stop()
    up.gate.stop()
    up.gate.kernel_died()
    with pytest.raises(GateError):
        up.gate.release()
    up.gate = up.new_gate()
    up.up()
    up.client()


def test_verbs_that_make_no_sense_are_refused(world: World) -> None:
    with pytest.raises(GateError):
        world.gate.open(1)  # not started
    world.gate.start()
    for verb in (world.gate.release, lambda: world.gate.drain(1), lambda: world.gate.request("x_request", {}, 1)):
        with pytest.raises(StateError):
            verb()
    world.wake()
    for verb in (world.gate.sleep, lambda: world.gate.open(1), world.gate.start):
        with pytest.raises(StateError):
            verb()
    assert world.gate.state == "open"


def test_a_callback_that_calls_the_gate_is_logged_and_does_no_harm(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.gate._router._on_wake = lambda _: world.gate.release()
    world.up()
    world.to_sleep()
    client = world.client()
    assert reply(client, client.execute("1"))["content"]["ename"] == "GATE_FAILED"
    assert any("callback failed" in r.message for r in caplog.records)
    world.wake()
    assert reply(client, client.execute("1"))["content"]["status"] == "ok"


def test_a_thread_that_fails_is_no_secret(up: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: float) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(up.gate._router._drain, "tick", broken)
    with pytest.raises(GateError):
        for _ in range(2):
            up.gate.drain(DEADLINE)
    for verb in (up.gate.release, up.gate.sleep, lambda: up.gate.open(1), lambda: up.gate.pending):
        with pytest.raises(GateError):
            verb()


curve_client = pytest.mark.skipif(
    not (zmq.has("curve") and hasattr(AsyncKernelClient, "curve_publickey")),
    reason="CURVE needs libzmq with libsodium and jupyter_client >= 8.9",
)


@curve_client
def test_with_curve_keys_only_clients_with_the_servers_key_connect(world: World) -> None:
    public, secret = (key.decode() for key in zmq.curve_keypair())
    world.front.update(curve_publickey=public, curve_secretkey=secret)
    world.gate = world.new_gate()
    world.up()
    client = world.client()
    assert reply(client, client.execute("1"))["content"]["status"] == "ok"
    world.front = {name: value for name, value in world.front.items() if not name.startswith("curve")}
    stranger = world.client(ready=False, hb=False)
    # Once it has been turned away there is nobody to send to, and a send would wait for ever.
    stranger.shell_channel.socket.setsockopt(zmq.SNDTIMEO, 500)
    with pytest.raises((Empty, zmq.Again)):
        stranger.kernel_info()
        stranger.get_shell_msg(timeout=0.5)


def test_an_address_that_is_closed_a_moment_later_is_waited_for(tmp_path: Path) -> None:
    """libzmq closes in the background: a gate that has gone may listen for a moment longer."""
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        closing = threading.Timer(0.2, listener.close)
        closing.start()
        with zmq.Context() as context, context.socket(zmq.ROUTER) as made:
            wire._bind(made, f"ipc://{path}")
        closing.join()


@pytest.mark.parametrize("end", ["an answer", "an interrupt"])
def test_a_cell_that_waits_for_input_is_distinguished_from_one_that_works(up: World, tmp_path: Path, end: str) -> None:
    client, go = up.client(), tmp_path / "go"
    code = "import os, time\ntry: input('name? ')\nexcept KeyboardInterrupt: pass\n"
    code += f"while not os.path.exists({str(go)!r}): time.sleep(0.01)"
    assert not up.gate.under_way.awaits_input
    cell = client.execute(code, allow_stdin=True)
    client.get_stdin_msg(timeout=DEADLINE)
    assert up.gate.under_way.awaits_input
    with pytest.raises(KernelBusy, match=r"A cell waits for input\.") as caught:
        up.gate.drain(0.3)
    assert "Answer its prompt" in caught.value.hint
    up.gate.release()
    if end == "an answer":
        client.input("Ada")
    else:
        assert not up.gate.interrupt()
        up.kernel.process.send_signal(signal.SIGINT)
    until(lambda: not up.gate.under_way.awaits_input, "nobody waits for input")
    assert up.gate.under_way.cells == 1
    go.touch()
    reply(client, cell)
