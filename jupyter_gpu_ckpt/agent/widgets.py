"""`CheckpointPanel`: the kernel's state, its device memory and buttons, in the notebook itself.

Runs in the kernel, so this package and ipywidgets must be installed in its environment (``pip install
'jupyter_gpu_ckpt[widgets]'``)::

    from jupyter_gpu_ckpt import CheckpointPanel
    CheckpointPanel()

A panel outlives the checkpoints of its own kernel.  While the kernel is away the browser's half of it is kept up to
date by the server (`kernel.panel`), and a press on *Wake* is a message that wakes.
"""

from __future__ import annotations

import html
import sys
import threading
from collections.abc import Callable
from typing import Any

import ipywidgets
from IPython import get_ipython  # type: ignore[attr-defined]

from ..errors import HostError

_AGENT = "_jupyter_gpu_ckpt_agent"

# Variables with a bar of their own.
_ROWS = 5

# The server keeps one panel up to date, so there is one: a new one takes the place of that before.
_shown: list[CheckpointPanel] = []


class CheckpointPanel(ipywidgets.VBox):  # type: ignore[misc]
    """State, memory bars, progress, and buttons that suspend, checkpoint and wake.

    Raises `HostError` in a kernel that has no agent: one that was not started by our provisioner.
    """

    def __init__(self, **options: Any) -> None:
        agent = getattr(get_ipython(), _AGENT, None)
        if agent is None:
            raise HostError("This kernel has no agent: it was not started by jupyter_gpu_ckpt.")
        self._agent: Any = agent
        self._tensors: Any = sys.modules[f"{_AGENT}.tensors"]
        self._refused: type[Exception] = sys.modules[f"{_AGENT}.server_channel"].RequestRefused
        self.state = ipywidgets.HTML()
        self.memory = ipywidgets.VBox()
        self.progress = ipywidgets.FloatProgress(min=0.0, max=1.0)
        self.message = ipywidgets.HTML()
        self.suspend = self._button("Suspend", "off the GPU, into host memory", lambda: self._leave("suspend"))
        self.checkpoint = self._button("Checkpoint", "to disk, no process left", lambda: self._leave("checkpoint"))
        self.wake = self._button("Wake", "back to the GPU", self.refresh)  # the message itself wakes
        self.renew = self._button("Refresh", "look again at the memory", self.refresh)
        buttons = ipywidgets.HBox([self.suspend, self.checkpoint, self.wake, self.renew])
        super().__init__([self.state, self.memory, self.progress, buttons, self.message], **options)
        for earlier in _shown:
            earlier.close()
        _shown[:] = [self]
        self._agent.on_leave.append(self._leaving)
        self._agent.on_return.append(self._returned)
        self._agent.outside.on_failure.append(self._failed)
        self.refresh()
        self._watch()

    def close(self) -> None:
        """Take the panel away; the kernel keeps no trace of it."""
        for calls, call in (
            (self._agent.on_leave, self._leaving),
            (self._agent.on_return, self._returned),
            (self._agent.outside.on_failure, self._failed),
        ):
            if call in calls:
                calls.remove(call)
        super().close()

    def refresh(self) -> None:
        """Look again: state and sizes as they are now."""
        self.message.value = ""
        try:
            status = self._agent.magics.status()
        except self._refused as error:
            self._complain(error)
            return
        self._show("running")
        self.progress.value, self.progress.description = 0.0, ""
        self.memory.children = [*self._gpu_bars(status), *self._variable_bars()]
        for finding in status["findings"]:
            if finding["blocks"]:
                self.message.value = _paragraph(f"{finding['code']}: {finding['text']} {finding['hint']}")
        self.suspend.disabled = self.checkpoint.disabled = any(each["blocks"] for each in status["findings"])

    def _gpu_bars(self, status: dict[str, Any]) -> list[Any]:
        own = status["device_bytes"]
        return [
            _bar(gpu["name"], own[gpu["uuid"]], gpu["total"], f"of {self._tensors.human(gpu['total'])}", self._tensors)
            for gpu in status["gpus"]
            if gpu["uuid"] in own
        ]

    def _variable_bars(self) -> list[Any]:
        found = self._tensors.tensors(get_ipython().user_ns)
        together = sum(tensor.bytes for tensor in found)
        return [_bar(tensor.name, tensor.bytes, together, "", self._tensors) for tensor in found[:_ROWS]]

    # -- what is pressed and what happens -----------------------------------------------------------------------------

    def _button(self, text: str, tooltip: str, press: Callable[[], None]) -> Any:
        button = ipywidgets.Button(description=text, tooltip=tooltip)
        button.on_click(lambda _: press())
        return button

    def _leave(self, verb: str) -> None:
        self.message.value = ""
        self._agent.outside.request(verb)
        self._show("asked to leave")

    def _leaving(self) -> None:
        """Called from the agent: from here on the server speaks to the browser's half."""
        self._show("leaving the GPU")

    def _returned(self) -> None:
        """Called from the agent.  What the server told the browser meanwhile, this half never heard: say all again."""
        self._show("running")
        self.progress.value, self.progress.description = 0.0, ""
        self.state.send_state()
        self.progress.send_state()
        # Asking waits for the server, which waits for this call to end: on a thread of its own.
        threading.Thread(target=self._watch, name="gpu-ckpt-panel", daemon=True).start()

    def _failed(self) -> None:
        """Called from the agent, on the control thread."""
        self._complain(self._agent.outside.failure)
        self._show("running")
        self.state.send_state()

    def _watch(self) -> None:
        """Tell the server which widgets to keep up to date; a new one, after a restart of its own, does not know."""
        models = {"state": self.state.model_id, "progress": self.progress.model_id}
        try:
            self._agent.outside.ask("watch", models=models)
        except self._refused as error:
            self._complain(error)

    def _show(self, text: str) -> None:
        self.state.value = html.escape(text)

    def _complain(self, error: Any) -> None:
        self.message.value = "".join(map(_paragraph, error.lines()))


def _bar(name: str, count: int, whole: int, note: str, tensors: Any) -> Any:
    bar = ipywidgets.FloatProgress(value=count / whole if whole else 0.0, min=0.0, max=1.0)
    label = ipywidgets.HTML(html.escape(f"{tensors.human(count)} {note}".strip()))
    return ipywidgets.HBox([ipywidgets.HTML(f"<code>{html.escape(name)}</code>"), bar, label])


def _paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"
