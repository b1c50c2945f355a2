"""Servers come and go; notebooks, sessions and kernels stay."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from live import Server, server, until

from jupyter_gpu_ckpt.image.store import Store
from jupyter_gpu_ckpt.kernel.adoption import orphans


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


def open_notebook(running: Server) -> dict:
    """A session as a browser makes it, with a variable in its kernel."""
    body = {"path": "morning.ipynb", "name": "morning", "type": "notebook", "kernel": {"name": "python3"}}
    reply = running.ask("POST", "api/sessions", json=body)
    assert reply.status_code == 201, reply.text
    session = reply.json()
    running.run(session["kernel"]["id"], "x = 41; import os; pid = os.getpid()")
    return session


def pids(running: Server, base: Path) -> dict[str, int]:
    records = [json.loads(path.read_text()) for path in base.glob("*/kernel.json")]
    return {record["kernel_id"]: record["pid"] for record in records}


def test_sigterm_and_a_new_server_same_session_same_kernel_same_variables(home, runtime_base, criu_binary):
    with server(home, runtime_base) as first:
        before = open_notebook(first)
        kernel_id = before["kernel"]["id"]
        (pid,) = pids(first, runtime_base).values()
    assert not Path(f"/proc/{pid}").exists(), "it was checkpointed on the way down"
    (image,) = Store(home / "images").images()
    assert image.manifest.kernel_id == kernel_id
    with server(home, runtime_base) as second:
        (after,) = until(lambda: second.get("api/sessions"))
        assert (after["id"], after["path"], after["kernel"]["id"]) == (before["id"], "morning.ipynb", kernel_id)
        assert after["kernel"]["gpu_ckpt"]["state"] == "checkpointed", "coming back wakes nothing"
        assert after["kernel"]["execution_state"] == "idle"
        assert second.run(kernel_id, "print(x + 1, os.getpid() == pid)") == "42 True"


def test_kill_9_of_the_server_and_the_living_kernel_is_adopted(home, runtime_base, criu_binary):
    with server(home, runtime_base) as first:
        before = open_notebook(first)
        kernel_id = before["kernel"]["id"]
        running = pids(first, runtime_base)
        first.process.kill()
        first.process.wait()
    with server(home, runtime_base) as second:
        (after,) = until(lambda: second.get("api/sessions"))
        assert (after["id"], after["kernel"]["id"]) == (before["id"], kernel_id)
        assert pids(second, runtime_base) == running
        assert second.run(kernel_id, "print(x)") == "41"


def test_orphans_nobody_adopts_are_checkpointed_and_ended_by_the_watchdog(home, runtime_base, criu_binary):
    config = "c.Comeback.orphan_timeout = 0.5"
    with server(home, runtime_base, config=config) as first:
        kernel_id = open_notebook(first)["kernel"]["id"]
        (pid,) = pids(first, runtime_base).values()
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
    until(lambda: not Path(f"/proc/{pid}").exists(), 60)
    (orphan,) = until(lambda: orphans(runtime_base, Store(home / "images")))
    assert orphan.image is not None
    with server(home, runtime_base, config=config) as second:
        until(lambda: second.get("api/kernels"))
        assert second.run(kernel_id, "print(x)") == "41"


def test_a_kernel_that_was_shut_down_does_not_come_back(home, runtime_base, criu_binary):
    with server(home, runtime_base) as first:
        session = open_notebook(first)
        assert first.ask("DELETE", f"api/sessions/{session['id']}").status_code == 204
    with server(home, runtime_base) as second:
        assert second.get("api/sessions") == []
        assert second.get("api/kernels") == []


def test_switched_off_the_kernels_end_with_the_server(home, runtime_base, criu_binary):
    config = "c.Comeback.checkpoint_on_stop = False"
    with server(home, runtime_base, config=config) as first:
        open_notebook(first)
        (pid,) = pids(first, runtime_base).values()
    assert not Path(f"/proc/{pid}").exists()
    assert Store(home / "images").images() == []


def test_restart_of_an_adopted_sleeping_kernel_gives_a_fresh_one(home, runtime_base, criu_binary):
    with server(home, runtime_base) as first:
        kernel_id = open_notebook(first)["kernel"]["id"]
    with server(home, runtime_base) as second:
        until(lambda: second.get("api/kernels"))
        assert second.ask("POST", f"api/kernels/{kernel_id}/restart").status_code == 200
        assert second.run(kernel_id, "print('x' in globals())") == "False"
        assert Store(home / "images").images() == []
