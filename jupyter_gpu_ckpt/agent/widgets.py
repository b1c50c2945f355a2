"""`CheckpointPanel`: the kernel's state, its device memory and buttons, in the notebook itself.

Runs in the kernel, so this package and ipywidgets must be installed in its environment (``pip install
'jupyter_gpu_ckpt[widgets]'``)::

    from jupyter_gpu_ckpt import CheckpointPanel
    CheckpointPanel()

A panel outlives the checkpoints of its own kernel.  While the kernel sleeps, the server updates the browser's half of
it (`kernel.panel`), and a press on *Wake* is a message that wakes the kernel.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Callable
from typing import Any

import ipywidgets
from IPython import get_ipython  # type: ignore[attr-defined]

from ..errors import HostError

_AGENT = "_jupyter_gpu_ckpt_agent"

# Variables with a bar of their own.
_ROWS = 5

# The server updates one panel only: a new one replaces the earlier one.
_shown: list[CheckpointPanel] = []


class CheckpointPanel(ipywidgets.VBox):  # type: ignore[misc]
    """State, memory bars, progress, and buttons that suspend, checkpoint and wake.

    Raises `HostError` in a kernel without an agent, which our provisioner did not start.
    """

    def __init__(self, **options: Any) -> None:
        if (agent := getattr(get_ipython(), _AGENT, None)) is None:
            raise HostError("This kernel has no agent: it was not started by jupyter_gpu_ckpt.")
        self._agent: Any = agent
        self._tensors: Any = sys.modules[f"{_AGENT}.tensors"]
        self._refused: type[Exception] = sys.modules[f"{_AGENT}.server_channel"].RequestRefused
        self.state = ipywidgets.HTML()
        self.memory = ipywidgets.VBox()
        self.progress = ipywidgets.FloatProgress(min=0.0, max=1.0)
        self.message = ipywidgets.HTML()
        suspend, checkpoint = lambda: self._schedule("suspend"), lambda: self._schedule("checkpoint")
        self.suspend = self._button("Suspend", "Move device memory to host memory; the process stays", suspend)
        self.checkpoint = self._button("Checkpoint", "Save everything to disk; the process ends", checkpoint)
        self.wake = self._button("Wake", "Bring the kernel back", self.refresh)  # the message itself wakes
        self.reload = self._button("Refresh", "Measure memory again", self.refresh)
        buttons = ipywidgets.HBox([self.suspend, self.checkpoint, self.wake, self.reload])
        super().__init__([self.state, self.memory, self.progress, buttons, self.message], **options)
        for earlier in _shown:
            earlier.close()
        _shown[:] = [self]
        self._callbacks: tuple[tuple[list[Any], Callable[[], None]], ...] = (
            (agent.on_quiesce, self._on_quiesce),
            (agent.on_thaw, self._on_thaw),
            (agent.server.on_failure, self._on_failure),
        )
        for callbacks, callback in self._callbacks:
            callbacks.append(callback)
        self.refresh()
        self._watch(self._agent.server.request)

    def close(self) -> None:
        """Remove the panel, and its callbacks from the agent."""
        for callbacks, callback in self._callbacks:
            if callback in callbacks:
                callbacks.remove(callback)
        super().close()

    def refresh(self) -> None:
        """Show the present state and sizes."""
        self.message.value = ""
        try:
            status = self._agent.magics.status()
        except self._refused as error:
            self._show_error(error)
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
        gpus = [gpu for gpu in status["gpus"] if gpu["uuid"] in own]
        return [self._bar(gpu["name"], own[gpu["uuid"]], gpu["total"], show_total=True) for gpu in gpus]

    def _variable_bars(self) -> list[Any]:
        found = self._tensors.tensors(get_ipython().user_ns)
        together = sum(tensor.bytes for tensor in found)
        return [self._bar(tensor.name, tensor.bytes, together) for tensor in found[:_ROWS]]

    # -- buttons and callbacks -----------------------------------------------------------------------------

    def _button(self, text: str, tooltip: str, press: Callable[[], None]) -> Any:
        button = ipywidgets.Button(description=text, tooltip=tooltip)
        button.on_click(lambda _: press())
        return button

    def _bar(self, name: str, count: int, whole: int, *, show_total: bool = False) -> Any:
        bar = ipywidgets.FloatProgress(value=count / whole if whole else 0.0, min=0.0, max=1.0)
        human = self._tensors.human
        label = ipywidgets.HTML(html.escape(f"{human(count)} of {human(whole)}" if show_total else human(count)))
        return ipywidgets.HBox([ipywidgets.HTML(f"<code>{html.escape(name)}</code>"), bar, label])

    def _schedule(self, verb: str) -> None:
        self.message.value = ""
        try:
            self._agent.server.schedule(verb)
        except self._refused as error:
            self._show_error(error)
        else:
            self._show("waiting until no cell runs")

    def _on_quiesce(self) -> None:
        """Called from the agent; from here on the server updates the browser's half."""
        self._show("going to sleep")

    def _on_thaw(self) -> None:
        """Called from the agent.  Sends all state again: this half missed the server's updates of the browser's."""
        self._show("running")
        self.progress.value, self.progress.description = 0.0, ""
        self.state.send_state()
        self.progress.send_state()
        # Without waiting, and so without a thread: the server replies only after this callback has ended.
        self._watch(lambda verb, **content: self._agent.server.notify(verb, self._show_error, **content))

    def _on_failure(self) -> None:
        """Called from the agent, on the control thread."""
        self._show_error(self._agent.server.failure)
        self._show("running")
        self.state.send_state()

    def _watch(self, send: Callable[..., Any]) -> None:
        """Send the server the ids of the widgets to update; a restarted server does not know them."""
        models = {"state": self.state.model_id, "progress": self.progress.model_id}
        try:
            send("watch", models=models)
        except self._refused as error:
            self._show_error(error)

    def _show(self, text: str) -> None:
        self.state.value = html.escape(text)

    def _show_error(self, error: Any) -> None:
        self.message.value = "".join(map(_paragraph, error.lines()))


def _paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"
