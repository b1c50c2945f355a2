"""A sink of a trace that records its events."""

from __future__ import annotations

from dataclasses import dataclass, field

from jupyter_gpu_ckpt.trace import StepEvent


@dataclass
class Recorder:
    """The events, in order."""

    events: list[StepEvent] = field(default_factory=list)

    def __call__(self, event: StepEvent) -> None:
        self.events.append(event)

    def completed(self) -> list[StepEvent]:
        """Return the completed steps in order."""
        return [event for event in self.events if event.kind == "completed"]

    def seconds(self) -> dict[str, float]:
        """Return seconds by step; a step that ran twice counts both times."""
        total: dict[str, float] = {}
        for event in self.completed():
            total[event.step] = total.get(event.step, 0.0) + (event.seconds or 0.0)
        return total
