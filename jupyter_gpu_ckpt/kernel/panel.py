"""Updates of the panel in the notebook (`agent.widgets`) while its own kernel cannot send them.

While the kernel is suspended, is away or is restored, the browser's half of the widget gets its updates from here, in
the kernel's name; the kernel's half sends the current state when it is back.  Message format: "Jupyter widgets
messaging protocol", version 2, method ``update``.
"""

from __future__ import annotations

import contextlib
import html
from typing import Any

from ..errors import GpuCkptError
from ..gate.gate import Gate
from ..lifecycle.plans import PLANS, State
from ..trace import StepEvent

#: Texts shown for the states.
TEXTS = {
    State.RUNNING: "running",
    State.SUSPENDING: "being suspended",
    State.SUSPENDED: "suspended: the process stays, in host memory. Run a cell, or press Wake.",
    State.YIELDING: "leaving the GPU for another kernel",
    State.OFF_GPU: "running off the GPU, which another kernel uses: its next call of CUDA waits for it.",
    State.RESUMING: "being resumed",
    State.DUMPING: "being written to disk",
    State.SAVING: "being saved",
    State.CHECKPOINTED: "checkpointed: on disk, without a process. Run a cell, or press Wake.",
    State.RESTORING: "coming back from disk",
    State.DEAD: "dead",
}


class Panel:
    """The browser's half of a panel; ``models`` has the ids of the widgets ``state`` and ``progress``."""

    def __init__(self, models: dict[str, str], gate: Gate) -> None:
        self._models, self._gate = models, gate
        self._steps, self._done = 1, 0

    def changed(self, state: State) -> None:
        """Called with each new state of the lifecycle."""
        for plan in PLANS.values():
            if plan is not None and plan.via is state:
                self._steps, self._done = len(plan.steps), 0
        if state not in (State.SUSPENDING, State.DUMPING, State.SAVING, State.RESUMING, State.RESTORING):
            self._update("progress", {"value": 0.0, "description": ""})
        self._update("state", {"value": html.escape(TEXTS.get(state, state.value))})

    def stepped(self, event: StepEvent) -> None:
        """Called with each event of the trace."""
        if event.kind == "started":
            self._update("progress", {"description": event.step.replace("_", " ")})
        elif event.kind == "completed":
            self._done = min(self._done + 1, self._steps)
            self._update("progress", {"value": self._done / self._steps})

    def _update(self, model: str, state: dict[str, Any]) -> None:
        content = {"comm_id": self._models[model], "data": {"method": "update", "state": state, "buffer_paths": []}}
        with contextlib.suppress(GpuCkptError):  # a panel that cannot be reached must not fail a step
            self._gate.publish("comm_msg", content)
