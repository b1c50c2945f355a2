"""The idle policy at work: on kernels that only count what is asked of them, and on real ones with a real CRIU."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from harness import DAEMON, END_DAEMON, notebook, until
from nbclient import NotebookClient
from traitlets import TraitError
from traitlets.config import Config

from jupyter_gpu_ckpt.cuda.cuda import CudaState
from jupyter_gpu_ckpt.errors import ChildProcesses, CriuError, DriverTooOld, GpuCkptError, StateError
from jupyter_gpu_ckpt.kernel.agent_requests import AgentRequests
from jupyter_gpu_ckpt.lifecycle.plans import State
from jupyter_gpu_ckpt.server.idle.loop import IdlePolicy, memory_of_host

ROOT = Path(__file__).resolve().parents[3]

#: The kernels here have no GPU.
ALL = {"without_device_memory": True}


class Stub:
    """A provisioner, and its lifecycle and capsule, in all that the policy looks at; its kernel holds no GPU."""

    def __init__(self, error: Exception | None = None) -> None:
        self.state, self.error, self.tries = State.RUNNING, error, 0
        self.begun, self.proceed = asyncio.Event(), asyncio.Event()
        self.gate = SimpleNamespace(last_activity=time.monotonic(), working=False, queries=0)
        self.agent_requests = AgentRequests(None)
        self.lifecycle = self.kernel = self.capsule = self
        self.require_capsule = lambda: self
        self.host_pid, self.processes, self.other_processes = 1, lambda: [1], list
        self.engine = SimpleNamespace(cuda=SimpleNamespace(state=lambda pid: CudaState.NONE))
        self.home = SimpleNamespace(kernel_name="python3", runtime_dir=Path("/nowhere"), known_as=None, sockets=None)

    async def checkpoint(self) -> None:
        self.tries += 1
        self.begun.set()
        await self.proceed.wait()
        if self.error:
            raise self.error
        self.state = State.CHECKPOINTED


def stubs(count: int, **traits) -> dict[str, Stub]:
    return {str(n): Stub(**traits) for n in range(count)}


@pytest.fixture
async def started():
    """Start a policy; it is stopped after the test."""
    policies = []

    def start(kernels, **traits) -> IdlePolicy:
        settings = {"suspend_after": 0, "checkpoint_after": 0.05, "interval": 0.05, **ALL, **traits}
        policies.append(IdlePolicy(lambda: kernels, **settings))
        policies[-1].start()
        return policies[-1]

    yield start
    for policy in policies:
        await policy.stop()


class TestTurns:
    async def test_two_at_a_time_until_all_are_gone(self, started):
        kernels = stubs(5)
        policy = started(kernels, max_parallel=2)
        for expected in (2, 2, 1):
            await until(lambda expected=expected: sum(k.begun.is_set() for k in kernels.values()) == expected)
            assert policy.status()["under_way"] == expected
            for kernel in kernels.values():
                if kernel.begun.is_set():
                    kernel.begun.clear()
                    kernel.proceed.set()
        await until(lambda: all(kernel.state is State.CHECKPOINTED for kernel in kernels.values()))
        assert {kernel.tries for kernel in kernels.values()} == {1}

    async def test_stopping_waits_for_nobody(self, started):
        kernels = stubs(1)
        policy = started(kernels)
        await kernels["0"].begun.wait()
        await asyncio.wait_for(policy.stop(), 60)
        assert policy.status()["running"] is False
        assert policy.status()["under_way"] == 0

    async def test_stopping_at_the_moment_a_kernel_has_left(self):
        for _ in range(20):
            kernels = stubs(1)
            times = {"suspend_after": 0, "checkpoint_after": 0.01, "interval": 0.05}
            policy = IdlePolicy(lambda kernels=kernels: kernels, **times, **ALL)
            policy.start()
            await kernels["0"].begun.wait()
            kernels["0"].proceed.set()
            await until(lambda kernels=kernels: kernels["0"].state is State.CHECKPOINTED)
            await asyncio.wait_for(policy.stop(), 60)

    async def test_plainly_started_kernels_are_left_alone(self, started):
        kernels = stubs(2)
        kernels["0"].lifecycle = kernels["0"].gate = None
        policy = started(kernels)
        await kernels["1"].begun.wait()
        assert kernels["0"].tries == 0
        assert policy.outlook("0") is None

    async def test_a_kernel_used_between_the_sample_and_the_verb_is_not_touched(self):
        kernels = stubs(1)
        policy = IdlePolicy(lambda: kernels, suspend_after=0, checkpoint_after=0.01, **ALL)
        await policy.round()
        deadline = time.monotonic() + 60
        while not (actions := await policy.round()):  # the verb runs once this test waits for anything
            assert time.monotonic() < deadline
            await asyncio.sleep(0)
        (action,) = actions
        kernels["0"].gate.last_activity = time.monotonic()
        await until(lambda: policy.status()["under_way"] == 0)
        assert (action.kernel_id, kernels["0"].tries) == ("0", 0)
        assert policy.outlook("0")["last_failure"] is None

    async def test_what_comes_soon_is_announced_once_and_taken_back_when_the_kernel_is_used_kept_or_leaves(self):
        kernels, said = stubs(1), []
        policy = IdlePolicy(
            lambda: kernels, lambda *plan: said.append(plan), suspend_after=0, checkpoint_after=1000, notice=900, **ALL
        )

        def age(seconds: float) -> None:
            """Let the kernel be idle for so long, by moving the policy's clock."""
            for known in policy._policy._known.values():
                known.resumed_at = known.computed_at = time.monotonic() - seconds
            kernels["0"].gate.last_activity = time.monotonic() - seconds

        await policy.round()
        assert said == []
        age(200)
        for _ in range(3):
            await policy.round()
        assert said == [("0", "checkpoint", pytest.approx(800, abs=60))]
        kernels["0"].gate.last_activity = time.monotonic()
        await policy.round()
        assert said[1:] == [("0", None, None)]
        age(500)
        await policy.round()
        assert policy.keep("0")["next_in_s"] == pytest.approx(1000, abs=60)
        assert said[2:] == [("0", "checkpoint", pytest.approx(500, abs=60)), ("0", None, None)]
        policy._policy._known["0"].kept_at = -float("inf")
        age(950)
        await policy.round()
        age(1000)
        await policy.round()
        assert said[4:] == [("0", "checkpoint", pytest.approx(50, abs=40)), ("0", None, None)]
        kernels["0"].proceed.set()
        await until(lambda: kernels["0"].state is State.CHECKPOINTED)

    async def test_a_round_that_fails_is_not_the_last(self, started, caplog):
        kernels = stubs(1)
        broken = [True]

        def listing():
            if broken:
                raise RuntimeError("the map changed")
            return kernels

        policy = IdlePolicy(listing, suspend_after=0, checkpoint_after=0.05, interval=0.05, **ALL)
        policy.start()
        await until(lambda: "could not inspect" in caplog.text)
        broken.clear()
        await asyncio.wait_for(kernels["0"].begun.wait(), 60)
        await policy.stop()


class TestTrouble:
    @pytest.mark.parametrize(
        ("error", "refused", "level"),
        [
            (ChildProcesses("It has a child."), True, "INFO"),
            (CriuError("CRIU failed."), False, "WARNING"),
            (StateError("The gate is drained by another."), True, "INFO"),
            (DriverTooOld("It is of 2023."), True, "INFO"),
            (ZeroDivisionError("a bug"), False, "WARNING"),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
    )
    async def test_it_is_kept_for_users_reported_once_and_tried_again(self, started, caplog, error, refused, level):
        caplog.set_level("INFO")
        kernels = stubs(1, error=error)
        kernels["0"].proceed.set()
        policy = started(kernels, retry_after=0.05, longest_retry=0.05)
        await until(lambda: kernels["0"].tries >= 4)
        trouble = policy.outlook("0")["last_failure"]
        assert trouble["refused"] is refused
        assert trouble["times"] >= 3
        assert trouble["code"] == (error.code if isinstance(error, GpuCkptError) else "INTERNAL")
        logged = [record for record in caplog.records if "stays" in record.message]
        assert [record.levelname for record in logged] == [level]
        assert logged[0].message.endswith(f": {trouble['code']}"), "no text: it may name what is the user's own"


class TestTraits:
    def test_defaults(self):
        policy = IdlePolicy(dict)
        assert (policy.suspend_after, policy.checkpoint_after, policy.max_parallel) == (300, 1800, 2)
        assert policy.suspended_memory_limit == memory_of_host() // 2 > 1 << 30

    def test_from_configuration(self):
        config = Config()
        config.IdlePolicy.suspend_after = 60
        config.IdlePolicy.kernelspecs = {"big": {"checkpoint_after": 0}}
        policy = IdlePolicy(dict, config=config)
        rules = policy._settings()
        assert (rules.rules["big"].suspend_after, rules.rules["big"].checkpoint_after) == (60, 0)
        assert rules.rules.keys() == {"big"} and rules.rule.checkpoint_after == 1800
        json.dumps(policy.status())

    @pytest.mark.parametrize("rule", [{"suspend": 3}, {"suspend_after": -1}, {"suspend_after": "3"}, 7])
    def test_nonsense_is_refused_at_once(self, rule):
        with pytest.raises(TraitError, match="python3"):
            IdlePolicy(dict, kernelspecs={"python3": rule})

    @pytest.mark.parametrize(
        ("name", "text", "limit"),
        [("memory.max", "1048576\n", 1 << 20), ("memory.max", "max\n", None), ("none", "", None)]
        + [("memory/memory.limit_in_bytes", "4096", 4096)],
    )
    def test_the_memory_of_a_container_is_the_cgroups(self, tmp_path, name, text, limit):
        (tmp_path / "memory").mkdir()
        (tmp_path / name).write_text(text)
        assert memory_of_host(tmp_path) == (limit or memory_of_host(tmp_path / "nowhere"))


@pytest.mark.timeout(120)
class TestRealKernels:
    async def test_an_idle_kernel_is_checkpointed_and_a_cell_wakes_it(self, kernel, started):
        await kernel.run("x = 41")
        policy = started({"k": kernel.provisioner}, checkpoint_after=0.5, interval=0.1)
        await kernel.settled("checkpointed")
        assert policy.outlook("k")["next"] is None
        assert await kernel.run("print(x + 1)") == "42"
        await kernel.settled("running")
        await kernel.settled("checkpointed")

    async def test_looking_at_it_keeps_nobody_awake(self, kernel, started):
        started({"k": kernel.provisioner}, checkpoint_after=0.5, interval=0.1)
        deadline = time.monotonic() + 60
        while kernel.state != "checkpointed":
            assert time.monotonic() < deadline
            await kernel.client.kernel_info(reply=True, timeout=60)
            kernel.client.history(hist_access_type="tail", n=1)  # kept, once the kernel is away
            await asyncio.sleep(0.05)  # a tenth of the time after which it goes
        await kernel.client.kernel_info(reply=True, timeout=60)
        assert kernel.state == "checkpointed"

    async def test_one_without_device_memory_is_left_alone(self, kernel, started):
        policy = started({"k": kernel.provisioner}, checkpoint_after=0.1, interval=0.05, without_device_memory=False)
        await until(lambda: (policy.outlook("k") or {"idle_s": 0})["idle_s"] > 1)
        assert (kernel.state, policy.outlook("k")["next"]) == ("running", None)

    async def test_a_thread_that_computes_keeps_its_kernel(self, kernel, started):
        await kernel.run(
            "import threading\nbusy = True\ndef work():\n  while busy: pass\nthreading.Thread(target=work).start()"
        )
        policy = started({"k": kernel.provisioner}, checkpoint_after=1.5, interval=0.2)
        await until(lambda: policy.outlook("k") is not None)
        begun, idle = time.monotonic(), []
        while time.monotonic() < begun + 5:
            assert kernel.state == "running"
            idle.append(policy.outlook("k")["idle_s"])
            await asyncio.sleep(0.1)
        assert min(idle[len(idle) // 2 :]) < 1.5  # not the last one: the policy's last look may be longer ago
        await kernel.run("busy = False")
        await kernel.settled("checkpointed")

    async def test_a_suspended_kernel_that_computes_keeps_its_process(self, kernel, started):
        await kernel.run("import threading\ndef work():\n  while True: pass\nthreading.Thread(target=work).start()")
        await kernel.provisioner.suspend()
        policy = started({"k": kernel.provisioner}, checkpoint_after=1.0, interval=0.2)
        await until(lambda: policy.outlook("k") is not None)
        begun = time.monotonic()
        while time.monotonic() < begun + 3:
            assert kernel.state == "suspended"
            await asyncio.sleep(0.1)

    async def test_a_web_server_keeps_its_kernel_awake_while_it_has_requests(self, kernel, started):
        port = int(
            await kernel.run(
                "import threading, http.server\n"
                "class Handler(http.server.SimpleHTTPRequestHandler):\n  def log_message(self, *_): pass\n"
                "served = http.server.HTTPServer(('127.0.0.1', 0), Handler)\n"
                "threading.Thread(target=served.serve_forever, daemon=True).start()\nprint(served.server_port)"
            )
        )
        policy = started({"k": kernel.provisioner}, checkpoint_after=4.0, interval=0.1)
        begun = time.monotonic()
        while time.monotonic() < begun + 6:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"HEAD / HTTP/1.0\r\n\r\n")
            assert (await asyncio.wait_for(reader.read(), 60)).startswith(b"HTTP/1.0 200")
            writer.close()
            assert kernel.state == "running"
            await asyncio.sleep(0.5)
        assert policy.outlook("k")["idle_s"] < 4.0
        await kernel.settled("checkpointed")

    async def test_a_running_cell_is_not_idle(self, kernel, started, tmp_path):
        go = tmp_path / "go"
        cell = asyncio.ensure_future(
            kernel.run(f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)")
        )
        await until(lambda: kernel.provisioner.gate.under_way.cells == 1)
        policy = started({"k": kernel.provisioner}, checkpoint_after=0.2, interval=0.05)
        await until(lambda: policy.outlook("k") is not None)
        await asyncio.sleep(1.5)  # far longer than the time after which it would go
        assert "drain" not in {event.step for event in kernel.steps.events}
        assert policy.outlook("k")["last_failure"] is None
        go.touch()
        await cell
        await kernel.settled("checkpointed")

    async def test_a_kernel_that_was_brought_back_by_hand_gets_its_time(self, kernel, started):
        started({"k": kernel.provisioner}, checkpoint_after=1.0, interval=0.05)
        await kernel.settled("checkpointed")
        back = time.monotonic()
        await kernel.provisioner.restore()
        await kernel.settled("running")
        await kernel.settled("checkpointed")
        assert time.monotonic() - back >= 1.0

    async def test_a_protected_kernel_stays(self, kernel, started):
        kernel.provisioner.agent_requests.protect(3600)
        policy = started({"k": kernel.provisioner}, checkpoint_after=0.1, interval=0.05)
        await until(lambda: (policy.outlook("k") or {"idle_s": 0})["idle_s"] > 1)
        assert kernel.state == "running"
        assert 3500 < policy.outlook("k")["next_in_s"] <= 3600
        kernel.provisioner.agent_requests.protect(0)
        await kernel.settled("checkpointed")

    async def test_a_kernel_with_a_daemon_says_why_it_stays(self, kernel, started):
        await kernel.run(DAEMON)
        policy = started({"k": kernel.provisioner}, checkpoint_after=0.2, interval=0.05, retry_after=0.5)
        await until(lambda: (policy.outlook("k") or {}).get("last_failure"))
        trouble = policy.outlook("k")["last_failure"]
        assert (trouble["code"], trouble["refused"]) == ("CHILD_PROCESSES", True)
        assert "sleep 600" in trouble["message"]
        assert await kernel.run(f"{END_DAEMON}print('gone')") == "gone"
        await kernel.settled("checkpointed")

    async def test_a_restarted_kernel_is_a_fresh_one(self, kernel, started):
        await kernel.provisioner.checkpoint()
        started({"k": kernel.provisioner}, checkpoint_after=1.0, interval=0.05)
        back = time.monotonic()
        await kernel.manager.restart_kernel(now=True)
        await kernel.settled("running")
        await kernel.settled("checkpointed")
        assert time.monotonic() - back >= 0.9


async def test_several_kernels_are_checkpointed_while_another_works(tmp_path, runtime_base, started, criu_binary):
    for name in "ab":
        (tmp_path / name).mkdir()
    async with notebook(tmp_path / "a", runtime_base) as a, notebook(tmp_path / "b", runtime_base) as b:
        kernels = {"a": a.provisioner, "b": b.provisioner}
        started(kernels, checkpoint_after=0.5, interval=0.05)
        for n in range(1000):
            assert await b.run(f"print({n})") == str(n)
            if a.state == "checkpointed":
                break
        assert (a.state, b.state) == ("checkpointed", "running")


def test_the_notebook_about_policies(tmp_path):
    """Its cells assert what they say."""
    book = nbformat.read(ROOT / "notebooks" / "policies.ipynb", as_version=4)
    NotebookClient(book, timeout=60, resources={"metadata": {"path": str(tmp_path)}}).execute()


def test_the_reference_names_every_trait():
    text = (ROOT / "docs" / "reference" / "policies.md").read_text()
    for name, trait in IdlePolicy.class_own_traits(config=True).items():
        row = f"| `IdlePolicy.{name}` | {'' if name == 'suspended_memory_limit' else trait.default()} | "
        assert f"{row}{' '.join(trait.help.split())} |" in text, f"{row}{' '.join(trait.help.split())} |"
