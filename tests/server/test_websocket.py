"""Notebooks as browsers use them: by the server's websocket, plain and with CURVE behind it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import zmq
from jupyter_client.manager import KernelManager
from live import Server, server, until
from tab import OPENING, tab


def state(live: Server, kernel_id: str) -> str:
    return live.get(f"api/kernels/{kernel_id}")["gpu_ckpt"]["state"]


def test_opening_and_reloading_a_notebook_wakes_nothing_and_a_cell_does(live, kernel_id):
    with tab(live, kernel_id, "one") as before:
        before.run("x = 41")
    assert live.do(kernel_id, "checkpoint")["status"] == "done"
    for _ in range(2):
        with tab(live, kernel_id, "one") as reloaded:
            (info, *_) = [reloaded.send(*request) for request in OPENING]
            assert reloaded.reply(info)["implementation"] == "ipython", "answered for the kernel that sleeps"
        assert live.get("api/sessions") is not None and live.get("api/contents") is not None
        assert state(live, kernel_id) == "checkpointed"
    with tab(live, kernel_id, "one") as again:
        assert again.run("print(x + 1)") == "42"
    until(lambda: state(live, kernel_id) == "running")


def test_a_tab_that_stays_open_sees_nothing_but_time(live, kernel_id):
    with tab(live, kernel_id) as open_tab:
        open_tab.run("x = 1")
        for n in range(3):
            assert live.do(kernel_id, "checkpoint")["status"] == "done"
            assert open_tab.run("x += 1; print(x)") == str(n + 2)


def test_a_cell_from_a_client_without_a_browser_wakes_and_the_open_tab_sees_its_output(live, kernel_id):
    with tab(live, kernel_id) as open_tab:
        open_tab.run("x = 41")
        live.do(kernel_id, "checkpoint")
        live.run(kernel_id, "print(x + 1)")
        while (message := open_tab.next())["msg_type"] != "stream":
            pass
        assert message["content"]["text"] == "42\n"


CURVE = pytest.mark.skipif(
    not (zmq.has("curve") and hasattr(KernelManager, "transport_encryption")),
    reason="CURVE needs a libzmq with libsodium and a jupyter_client that has transport_encryption: update both",
)


@CURVE
@pytest.mark.parametrize("policy", ["auto", "required"])
def test_with_curve_a_kernel_sleeps_wakes_and_is_attached(tmp_path, runtime_base, criu_binary, policy):
    config = f"c.KernelManager.transport_encryption = {policy!r}"
    home = tmp_path / "home"
    with server(home, runtime_base, config=config) as first:
        kernel_id = first.start_kernel()
        with tab(first, kernel_id) as opened:
            assert opened.run("x = 40; print(x)") == "40"
            assert first.do(kernel_id, "checkpoint")["status"] == "done"
            assert opened.run("x += 1; print(x)") == "41"
        keys = curve_keys(first, kernel_id)
        assert all(keys)
        assert strangers_get_no_answer(first, kernel_id)
        (behind,) = runtime_base.glob("*/connection.json")
        inside = json.loads(behind.read_text())
        assert (inside["transport"], behind.parent.stat().st_mode & 0o777) == ("ipc", 0o700)
    with server(home, runtime_base, config=config) as second:
        until(lambda: second.get("api/kernels"))
        assert curve_keys(second, kernel_id) == keys, "clients that have the old file come back"
        with tab(second, kernel_id) as opened:
            assert opened.run("print(x + 1)") == "42"
        assert strangers_get_no_answer(second, kernel_id)


def connection(running: Server, kernel_id: str) -> dict:
    (file,) = (running.home / "runtime").glob(f"kernel-{kernel_id}.json")
    return json.loads(Path(file).read_text())


def curve_keys(running: Server, kernel_id: str) -> tuple[str | None, str | None]:
    info = connection(running, kernel_id)
    return info.get("curve_publickey"), info.get("curve_secretkey")


def strangers_get_no_answer(running: Server, kernel_id: str) -> bool:
    """A client without the key is not served: a heartbeat is answered over CURVE only."""
    info = connection(running, kernel_id)
    with zmq.Context() as context:
        beats = {}
        for known in (False, True):
            with context.socket(zmq.REQ) as beat:
                beat.linger = 0
                if known:
                    beat.curve_serverkey = info["curve_publickey"].encode()
                    beat.curve_publickey, beat.curve_secretkey = zmq.curve_keypair()
                beat.sndtimeo = 60_000 if known else 500  # who was turned away has nobody to send to
                beat.connect(f"tcp://{info['ip']}:{info['hb_port']}")
                with contextlib.suppress(zmq.Again):
                    beat.send(b"ping")
                beats[known] = bool(beat.poll(60_000 if known else 500))
    return beats == {False: False, True: True}
