"""Servers come and go; notebooks, sessions and kernels stay."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests
from live import TOKEN, Server, server, until

from jupyter_gpu_ckpt.image.store import Store
from jupyter_gpu_ckpt.kernel.orphans import find_orphans
from jupyter_gpu_ckpt.lifecycle import host_memory
from jupyter_gpu_ckpt.lifecycle.plans import State
from jupyter_gpu_ckpt.lifecycle.rates import Rates
from jupyter_gpu_ckpt.server import drain
from jupyter_gpu_ckpt.trace import StepEvent


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


def open_notebook(running: Server, name: str = "morning.ipynb") -> dict:
    """A session as a browser makes it, with a variable in its kernel."""
    body = {"path": name, "name": name, "type": "notebook", "kernel": {"name": "python3"}}
    reply = running.ask("POST", "api/sessions", json=body)
    assert reply.status_code == 201, reply.text
    session = reply.json()
    running.run(session["kernel"]["id"], "x = 41; import os; pid = os.getpid()")
    return session


def pids(running: Server, base: Path) -> dict[str, int]:
    records = [json.loads(path.read_text()) for path in base.glob("*/kernel.json")]
    return {record["kernel_id"]: record["pid"] for record in records}


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_and_a_new_server_same_session_same_kernel_same_variables(home, runtime_base, criu_binary, end):
    with server(home, runtime_base) as first:
        before = open_notebook(first)
        kernel_id = before["kernel"]["id"]
        (pid,) = pids(first, runtime_base).values()
        first.process.send_signal(end)
        first.process.wait(60)
    assert not Path(f"/proc/{pid}").exists(), "it was checkpointed on the way down"
    (image,) = Store(home / "images").images()
    assert image.manifest.kernel_id == kernel_id
    with server(home, runtime_base) as second:
        (after,) = until(lambda: second.get("api/sessions"))
        assert (after["id"], after["path"], after["kernel"]["id"]) == (before["id"], "morning.ipynb", kernel_id)
        assert after["kernel"]["gpu_ckpt"]["state"] == "checkpointed", "coming back wakes nothing"
        assert after["kernel"]["execution_state"] == "idle"
        assert second.run(kernel_id, "print(x + 1, os.getpid() == pid)") == "42 True"


def test_without_the_database_of_sessions_the_notebook_still_finds_its_kernel(home, runtime_base, criu_binary):
    with server(home, runtime_base) as first:
        (home / "work" / "morning.ipynb").write_text("{}")
        kernel_id = open_notebook(first)["kernel"]["id"]
    (database,) = home.rglob("sessions/*.sqlite")
    database.unlink()
    with server(home, runtime_base) as second:
        (session,) = until(lambda: second.get("api/sessions"))
        assert (session["path"], session["kernel"]["id"]) == ("morning.ipynb", kernel_id)
        assert second.run(kernel_id, "print(x)") == "41"


def test_kill_9_of_the_server_and_the_living_kernel_is_attached_its_random_numbers_unchanged(
    home, runtime_base, criu_binary
):
    with server(home, runtime_base) as first:
        before = open_notebook(first)
        kernel_id = before["kernel"]["id"]
        first.run(kernel_id, "import random; random.seed(7); state = random.getstate()")
        running = pids(first, runtime_base)
        first.process.kill()
        first.process.wait()
    with server(home, runtime_base) as second:
        (after,) = until(lambda: second.get("api/sessions"))
        assert (after["id"], after["kernel"]["id"]) == (before["id"], kernel_id)
        assert pids(second, runtime_base) == running
        assert second.run(kernel_id, "print(x, random.getstate() == state)") == "41 True"


def test_what_was_not_shut_down_comes_back_also_without_a_path_and_can_be_restarted(home, runtime_base, criu_binary):
    with server(home, runtime_base) as first:
        ended, kept = (open_notebook(first, f"{name}.ipynb") for name in ("ended", "kept"))
        assert first.ask("DELETE", f"api/sessions/{ended['id']}").status_code == 204
        without_path = first.start_kernel()
        first.run(without_path, "x = 41")
    with server(home, runtime_base) as second:
        until(lambda: len(second.get("api/kernels")) == 2)
        assert {kernel["id"] for kernel in second.get("api/kernels")} == {kept["kernel"]["id"], without_path}
        assert [session["path"] for session in second.get("api/sessions")] == ["kept.ipynb"]
        assert second.run(without_path, "print(x + 1)") == "42"
        assert second.ask("POST", f"api/kernels/{kept['kernel']['id']}/restart").status_code == 200
        assert second.run(kept["kernel"]["id"], "print('x' in globals())") == "False"
        until(lambda: len(Store(home / "images").images()) == 1)
        (left,) = Store(home / "images").images()
        assert (left.manifest.kernel_id, left.is_save_point, left.retired) == (kept["kernel"]["id"], True, True)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL], ids=["asleep", "alive"])
def test_a_protection_outlives_the_server(home, runtime_base, criu_binary, end):
    with server(home, runtime_base) as first:
        kernel_id = open_notebook(first)["kernel"]["id"]
        first.run(kernel_id, "%gpu_checkpoint --protect 2h")
        first.process.send_signal(end)
        first.process.wait(60)
    config = "c.IdlePolicy.interval = 0.1"
    with server(home, runtime_base, config=config) as second:

        def policy() -> dict:
            return next((kernel["policy"] for kernel in second.get("gpu-ckpt/kernels")), None) or {}

        until(lambda: policy().get("protected_s"))
        assert 7000 < policy()["protected_s"] <= 7200
        second.run(kernel_id, "%gpu_checkpoint --protect off")
        second.process.send_signal(signal.SIGTERM)
        second.process.wait(60)
    (left,) = find_orphans(runtime_base, Store(home / "images")).orphans
    assert left.session.protected_until is None


def test_orphans_nobody_attaches_are_checkpointed_and_ended_by_the_watchdog(home, runtime_base, criu_binary):
    config = "c.KernelPersistence.orphan_timeout = 0.5"
    with server(home, runtime_base, config=config) as first:
        kernel_id = open_notebook(first)["kernel"]["id"]
        (pid,) = pids(first, runtime_base).values()
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
    until(lambda: not Path(f"/proc/{pid}").exists(), 60)
    (orphan,) = until(lambda: find_orphans(runtime_base, Store(home / "images")).orphans)
    assert orphan.image is not None
    with server(home, runtime_base, config=config) as second:
        until(lambda: second.get("api/kernels"))
        assert second.run(kernel_id, "print(x)") == "41"


def test_the_watchdog_writes_images_as_the_server_was_to(home, runtime_base, criu_binary):
    home.mkdir()
    (home / "key").write_text("17" * 32)
    (home / "key").chmod(0o600)
    config = "c.KernelPersistence.orphan_timeout = 0.5\n"
    config += f"c.GpuCkptProvisioner.encryption_key = 'file:{home / 'key'}'"
    with server(home, runtime_base, config=config) as first:
        kernel_id = open_notebook(first)["kernel"]["id"]
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
    (image,) = until(lambda: Store(home / "images").images())
    assert (image.manifest.kernel_id, bool(image.manifest.encryption)) == (kernel_id, True)
    with server(home, runtime_base, config=config) as second:
        assert second.run(kernel_id, "print(x)") == "41"


def test_a_kernel_that_is_too_late_at_the_stop_runs_on_and_is_attached_with_its_cell(home, runtime_base, criu_binary):
    # Longer than a restarter looks for dead kernels: the one that left early must not be taken for one.
    config = "c.KernelPersistence.stop_timeout = 4\nc.GpuCkptProvisioner.drain_timeout = 100"
    flag = home / "go"
    code = f"import os, time\nwhile not os.path.exists({str(flag)!r}): time.sleep(0.01)\nx = 42"
    with server(home, runtime_base, config=config) as first:
        kernel_id, early = open_notebook(first)["kernel"]["id"], first.start_kernel()
        first.run(early, "y = 1")
        running = pids(first, runtime_base)
        with first.client(kernel_id) as client:
            client.execute(code)
            while client.get_iopub_msg(timeout=60)["msg_type"] != "execute_input":
                pass
            first.process.send_signal(signal.SIGTERM)
            first.process.wait(60)
        assert "was not checkpointed within" in first.log
    assert [image.manifest.kernel_id for image in Store(home / "images").images()] == [early]
    with server(home, runtime_base, config=config) as second:
        until(lambda: len(second.get("api/kernels")) == 2)
        assert pids(second, runtime_base) == {kernel_id: running[kernel_id], early: None}
        flag.touch()
        assert second.run(kernel_id, "print(x)") == "42"
        assert second.run(early, "print(y)") == "1"


def test_a_kernel_in_the_middle_of_its_dump_at_the_deadline_is_not_lost(home, runtime_base, criu_binary):
    with server(home, runtime_base, config="c.KernelPersistence.stop_timeout = 0.3") as first:
        kernel_id = open_notebook(first)["kernel"]["id"]
        first.run(kernel_id, "block = os.urandom(800 << 20)")
        first.process.send_signal(signal.SIGTERM)
        first.process.wait(60)
        assert "was not checkpointed within" in first.log
    with server(home, runtime_base) as second:
        until(lambda: second.get("api/kernels"))
        assert second.run(kernel_id, "print(x, len(block) >> 20)") == "41 800"


def test_an_early_request_is_not_answered_without_the_kernels(home, runtime_base, criu_binary):
    """A tab that reconnects by itself would believe it."""
    with server(home, runtime_base) as first:
        kernels = [first.start_kernel() for _ in range(4)]
        port, answers = first.port, []
        early = Server(first.process, port, home)

    def ask() -> bool:
        try:
            answers.extend(early.ask("GET", f"api/kernels/{id}").status_code for id in kernels)
        except requests.exceptions.ConnectionError:
            return False
        return 200 in answers

    asking = threading.Thread(target=lambda: until(ask, 60))
    asking.start()
    with server(home, runtime_base, config=f"c.ServerApp.port = {port}\nc.ServerApp.port_retries = 0\n"):
        asking.join()
    assert set(answers) == {200}


SLOW = """
import asyncio, pathlib
from jupyter_gpu_ckpt.server import app
from jupyter_gpu_ckpt.server.persistence import KernelPersistence
attach = KernelPersistence.attach

async def once_there(self, kernels, orphan):
    while not pathlib.Path({go!r}).exists():
        await asyncio.sleep(0.05)
    await attach(self, kernels, orphan)

KernelPersistence.attach = once_there
app._ATTACH_TIMEOUT = 0.1
"""


def test_a_notebook_that_is_opened_while_kernels_still_come_back_waits_for_its_own(home, runtime_base, criu_binary):
    """A front end that finds no session starts another kernel, without the variables."""
    with server(home, runtime_base) as first:
        before = open_notebook(first)
        kernel_id = before["kernel"]["id"]
    go = home / "go"
    with server(home, runtime_base, config=SLOW.format(go=str(go))) as second, ThreadPoolExecutor() as asking:
        body = {"path": "morning.ipynb", "name": "morning.ipynb", "type": "notebook", "kernel": {"name": "python3"}}
        opened = asking.submit(second.ask, "POST", "api/sessions", json=body)
        sessions, kernels = (asking.submit(second.get, f"api/{what}") for what in ("sessions", "kernels"))
        tab = asking.submit(second.ask, "GET", f"api/kernels/{kernel_id}")
        never = asking.submit(second.ask, "GET", f"api/kernels/{uuid.uuid4()}")
        until(lambda: second.ask("GET", "api/contents").ok)
        assert not any(one.done() for one in (opened, sessions, kernels, tab, never))
        go.touch()
        assert opened.result().json()["kernel"]["id"] == kernel_id
        assert [one["id"] for one in sessions.result()] == [before["id"]]
        assert [one["id"] for one in kernels.result()] == [kernel_id]
        assert (tab.result().status_code, never.result().status_code) == (200, 404)
        assert second.run(kernel_id, "print(x)") == "41"


GONE = """
import asyncio, pathlib
from jupyter_server.serverapp import ServerApp
cleanup_kernels = ServerApp.cleanup_kernels

async def and_dawdle(self):
    await cleanup_kernels(self)
    pathlib.Path({gone!r}).touch()
    while not pathlib.Path({go!r}).exists():
        await asyncio.sleep(0.05)

ServerApp.cleanup_kernels = and_dawdle
"""


def test_a_request_during_the_stop_is_not_answered_without_the_kernels(home, runtime_base, criu_binary):
    """A connection that was made before is served to the end; and jupyter_server drops sessions without a kernel."""
    gone, go = home / "gone", home / "go"
    config = GONE.format(gone=str(gone), go=str(go))
    with server(home, runtime_base, config=config) as first, requests.Session() as tab:
        kernel_id = open_notebook(first)["kernel"]["id"]
        asked = {"headers": {"Authorization": f"token {TOKEN}"}, "timeout": 60}
        places = [first.url + place for place in ("api/sessions", "api/kernels", f"api/kernels/{kernel_id}")]
        assert [tab.get(place, **asked).status_code for place in places] == [200] * 3
        first.process.send_signal(signal.SIGTERM)
        until(gone.exists)
        assert [tab.get(place, **asked).status_code for place in places] == [503] * 3
        go.touch()
    with server(home, runtime_base) as second:
        (session,) = until(lambda: second.get("api/sessions"))
        assert session["kernel"]["id"] == kernel_id


SIGNALLED = """
import asyncio, os, signal
from jupyter_gpu_ckpt.server.persistence import KernelPersistence
attach = KernelPersistence.attach

async def and_be_stopped(self, kernels, orphan):
    await attach(self, kernels, orphan)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(60)

KernelPersistence.attach = and_be_stopped
"""


def test_a_server_that_is_stopped_while_its_kernels_come_back_ends_and_loses_none(home, runtime_base, criu_binary):
    with server(home, runtime_base) as first:
        kernel_id = open_notebook(first)["kernel"]["id"]
    with pytest.raises(AssertionError, match="received signal 15"), server(home, runtime_base, config=SIGNALLED):
        pass  # it never gets so far that it listens
    with server(home, runtime_base) as third:
        assert third.run(kernel_id, "print(x)") == "41"


def test_the_deadline_of_a_stop_is_computed_from_bytes_and_measured_rates(monkeypatch):
    def kernel(**memory: int) -> SimpleNamespace:
        lifecycle = SimpleNamespace(state=State.RUNNING, capsule=SimpleNamespace(host_pid=1), kernel=memory)
        return SimpleNamespace(kernel_id="k", lifecycle=lifecycle, drain_timeout=10.0)

    monkeypatch.setattr(host_memory, "device_bytes", lambda kernel: kernel)
    monkeypatch.setattr(host_memory, "resident", lambda kernel: 1 << 30)
    monkeypatch.setattr(drain, "RATES", Rates())  # not what the tests before this one measured

    def deadline(kernels):
        return drain.estimate(kernels, logging.getLogger(), verify=False).seconds

    small = deadline({"a": kernel()})
    assert deadline({"a": kernel(), "b": kernel()}) == pytest.approx(2 * small - drain.GRACE)
    on_gpu = deadline({"a": kernel(gpu=8 << 30)})
    slow = Rates()
    for step in ("cuda_suspend", "dump", "publish"):
        slow(StepEvent("completed", step, "k", 0.0, 10.0, 1 << 30))
    monkeypatch.setattr(drain, "RATES", slow)
    # Nine GiB at 10 s each through dump and publish, eight through the driver, and twice that to be on the safe side.
    assert deadline({"a": kernel(gpu=8 << 30)}) > 2 * (2 * 9 + 8) * 10 > 10 * on_gpu > 10 * small
    asleep = kernel()
    asleep.lifecycle.state = State.CHECKPOINTED
    assert deadline({"a": asleep}) == drain.GRACE


# jupyter_server looks once a minute whether there was activity.
OFTEN = """
from tornado import ioloop

class Often(ioloop.PeriodicCallback):
    def __init__(self, callback, callback_time, jitter=0):
        super().__init__(callback, min(callback_time, 200), jitter)

ioloop.PeriodicCallback = Often
c.ServerApp.shutdown_no_activity_timeout = 4
"""


def test_a_server_with_none_but_sleeping_kernels_shuts_down_for_want_of_activity(home, runtime_base, criu_binary):
    with server(home, runtime_base, config=OFTEN) as first:
        kernel_id = open_notebook(first)["kernel"]["id"]
        with pytest.raises(subprocess.TimeoutExpired):
            first.process.wait(6)  # what is tested is that in so much time nothing happens: a kernel runs
        assert first.ask("POST", f"gpu-ckpt/kernels/{kernel_id}/checkpoint").status_code == 202
        assert first.process.wait(60) == 0
        assert "shutting down" in first.log
    with server(home, runtime_base) as second:
        until(lambda: second.get("api/kernels"))
        assert second.run(kernel_id, "print(x)") == "41"


def test_switched_off_the_kernels_end_with_the_server_but_those_that_sleep_already(home, runtime_base, criu_binary):
    config = "c.KernelPersistence.checkpoint_on_stop = False"
    with server(home, runtime_base, config=config) as first:
        asleep = open_notebook(first)["kernel"]["id"]
        first.do(asleep, "checkpoint")
        awake = first.start_kernel()
        first.run(awake, "pass")
        pid = pids(first, runtime_base)[awake]
    assert not Path(f"/proc/{pid}").exists()
    assert [image.manifest.kernel_id for image in Store(home / "images").images()] == [asleep]
    with server(home, runtime_base) as second:
        until(lambda: second.get("api/kernels"))
        assert [kernel["id"] for kernel in second.get("api/kernels")] == [asleep]
        assert second.run(asleep, "print(x)") == "41"
