"""`CheckpointPanel`, through the messages that a browser would see and send."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from harness import DAEMON, END_DAEMON, until
from kernel_limits import LIMITS, ordinary_users

pytest.importorskip("ipywidgets", reason="ipywidgets is missing: pip install ipywidgets")

PANEL = "from jupyter_gpu_ckpt import CheckpointPanel; panel = CheckpointPanel()"


class Browser:
    """The browser's half of the widgets: the last state sent to each model, and pressing buttons."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.models: dict[str, dict[str, Any]] = {}
        self.received: list[tuple[str, dict[str, Any]]] = []
        self.names: dict[str, str] = {}

    def take(self, message: dict[str, Any]) -> None:
        content = message["content"]
        if message["msg_type"] == "comm_open":
            self.models[content["comm_id"]] = dict(content["data"]["state"])
        elif message["msg_type"] == "comm_msg" and content["data"].get("method") == "update":
            state = content["data"]["state"]
            self.models.setdefault(content["comm_id"], {}).update(state)
            self.received.append((content["comm_id"], state))

    async def run(self, code: str) -> str:
        """Return the output of a cell.  Messages that answer no request of ours are heard, too."""
        cell, printed = self.kernel.client.execute(code, allow_stdin=False), ""
        while True:
            message = await self.kernel.client.get_iopub_msg(timeout=60)
            self.take(message)
            mine, content = message["parent_header"].get("msg_id") == cell, message["content"]
            assert not (mine and message["msg_type"] == "error"), content
            printed += content["text"] if mine and message["msg_type"] == "stream" else ""
            if mine and content.get("execution_state") == "idle":
                return printed

    async def listen(self, goal: Any, timeout: float = 60) -> None:
        """Take what comes until ``goal()``."""

        async def listening() -> None:
            while not goal():
                message = await self.kernel.client.get_iopub_msg(timeout=timeout)
                self.take(message)

        await asyncio.wait_for(listening(), timeout)

    async def open(self) -> None:
        await self.run(PANEL)
        names = "state", "progress", "message", "suspend", "checkpoint", "wake"
        printed = await self.run(f"print(*[getattr(panel, name).model_id for name in {names}])")
        self.names = dict(zip(names, printed.split(), strict=True))

    def shown(self, name: str) -> Any:
        return self.models[self.names[name]].get("value")

    def press(self, name: str) -> None:
        data = {"method": "custom", "content": {"event": "click"}}
        message = self.kernel.client.session.msg("comm_msg", {"comm_id": self.names[name], "data": data})
        self.kernel.client.shell_channel.send(message)


@pytest.fixture
async def browser(kernel):
    made = Browser(kernel)
    await made.open()
    return made


async def test_the_panel_shows_state_and_memory(browser):
    assert browser.shown("state") == "running"
    code = "class A:\n    __cuda_array_interface__ = {'shape': (1024,), 'typestr': '<f4', 'data': (1, False)}\n"
    await browser.run(code + "weights = A(); panel.refresh()")
    bars = await browser.run("print([child.value for row in panel.memory.children for child in row.children])")
    assert bars.strip() == "['<code>weights</code>', 1.0, '4.0 KiB']"


async def test_checkpoint_and_wake_by_its_buttons_with_progress_in_between(browser):
    kernel = browser.kernel
    await browser.run("x = 1")
    browser.press("checkpoint")
    await browser.listen(lambda: "checkpointed" in (browser.shown("state") or ""))
    assert kernel.state == "checkpointed"
    progress = [state for model, state in browser.received if model == browser.names["progress"]]
    values = [state["value"] for state in progress if state.get("value")]
    assert values == sorted(values) and values[-1] == 1.0 and len(values) > 3
    assert "dump" in [state.get("description") for state in progress]
    assert browser.shown("progress") == 0.0, "nothing is under way any more"

    browser.press("wake")
    await browser.listen(lambda: browser.shown("state") == "running")
    await kernel.settled("running")
    assert await browser.run("print(x, panel.state.value)") == "1 running\n"
    assert browser.shown("state") == "running"


async def test_a_panel_follows_what_others_do_and_survives_it_twice(browser):
    kernel = browser.kernel
    for _ in range(2):
        await kernel.provisioner.suspend()
        await browser.listen(lambda: "suspended" in browser.shown("state"))
        browser.press("wake")
        await browser.listen(lambda: browser.shown("state") == "running")
        await kernel.settled("running")
        await kernel.provisioner.checkpoint()
        await browser.listen(lambda: "checkpointed" in browser.shown("state"))
        await browser.run("1")
        assert browser.shown("state") == "running"
        await kernel.settled("running")


@ordinary_users
async def test_a_panel_of_a_kernel_that_may_have_no_more_threads_is_found_by_another_server(browser):
    kernel = browser.kernel
    await browser.run(f"{LIMITS}allow('NPROC', -5)")
    await browser.run("%gpu_checkpoint")
    await browser.listen(lambda: "checkpointed" in browser.shown("state"))
    kernel.provisioner.agent_requests.panel = None
    browser.press("wake")
    await browser.listen(lambda: browser.shown("state") == "running")
    await kernel.settled("running")
    await until(lambda: kernel.provisioner.agent_requests.panel is not None)
    assert await browser.run("print(panel.message.value)") == "\n"


async def test_a_refusal_is_shown_with_its_hint(browser):
    await browser.run(DAEMON)
    browser.press("checkpoint")
    await browser.listen(lambda: "CHILD_PROCESSES" in (browser.shown("message") or ""))
    assert "Hint: End these child processes" in browser.shown("message") and browser.shown("state") == "running"
    assert browser.kernel.state == "running"
    await browser.run(f"{END_DAEMON}panel.refresh()")
    assert browser.shown("message") == ""


async def test_there_is_one_panel_and_closing_it_leaves_nothing(browser):
    await browser.run("first = panel\n" + PANEL)
    agent = "get_ipython()._jupyter_gpu_ckpt_agent"
    await browser.run(f"assert len({agent}.on_quiesce) == len({agent}.on_thaw) == 1 and first.comm is None")
    await browser.run(f"panel.close(); assert not {agent}.on_quiesce and not {agent}.server.on_failure")
    await browser.kernel.provisioner.checkpoint()
    await browser.run("assert panel.comm is None")


async def test_a_restarted_kernel_has_no_panel(browser):
    await browser.kernel.manager.restart_kernel()
    await browser.kernel.client.wait_for_ready(timeout=60)
    assert browser.kernel.provisioner.agent_requests.panel is None
    await browser.kernel.provisioner.checkpoint()
    await until(lambda: browser.kernel.state == "checkpointed")


def test_a_kernel_without_an_agent_shows_the_reason(start):
    kernel = start()
    kernel.run("%unload_ext _jupyter_gpu_ckpt_agent")
    received = kernel.run(
        "try:\n    from jupyter_gpu_ckpt import CheckpointPanel; CheckpointPanel()\nexcept Exception as e: print(e)"
    )
    assert received.startswith("[HOST_UNFIT] This kernel has no agent")
