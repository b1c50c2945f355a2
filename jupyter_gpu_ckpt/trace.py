"""One stream of ``started`` / ``completed`` / ``failed`` for every step of every verb.

The log, the server's events, progress bars, the figures in a manifest and the fault injection of the tests all listen
to this stream; there is no second one.  A sink is a callable that takes one `StepEvent`.  A sink that raises makes
the step fail: that is how a test makes any step fail without touching the code under test.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from .errors import GpuCkptError


@dataclass(frozen=True)
class StepEvent:
    """One edge of one step; or, from those who watch a long one, a moment of it (``running``).

    ``seconds`` is the step's duration (monotonic; ``None`` on ``started``), ``bytes`` what it moved where that is
    known, both so far while it is ``running``; ``code`` the error's stable code on ``failed``.  Carries no path, token
    or user content.
    """

    kind: Literal["started", "running", "completed", "failed"]
    step: str
    kernel_id: str
    at: float
    seconds: float | None = None
    bytes: int | None = None
    code: str | None = None


Sink = Callable[[StepEvent], None]


@dataclass
class Step:
    """The step being run; the runner may set ``bytes`` before it ends."""

    name: str
    bytes: int | None = None


@dataclass
class Trace:
    """Runs named steps and tells every sink about them, in order, on the caller's thread."""

    kernel_id: str
    sinks: list[Sink] = field(default_factory=list)

    def _emit(self, event: StepEvent) -> None:
        for sink in tuple(self.sinks):
            sink(event)

    @contextmanager
    def step(self, name: str) -> Iterator[Step]:
        """Run the body as step ``name``.  Errors pass through after ``failed`` was told."""
        step = Step(name)
        began = time.monotonic()
        try:
            self._emit(StepEvent("started", name, self.kernel_id, time.time()))
            yield step
            seconds = time.monotonic() - began
            self._emit(StepEvent("completed", name, self.kernel_id, time.time(), seconds, step.bytes))
        except BaseException as error:
            code = error.code if isinstance(error, GpuCkptError) else type(error).__name__
            seconds = time.monotonic() - began
            self._emit(StepEvent("failed", name, self.kernel_id, time.time(), seconds, step.bytes, code))
            raise


@dataclass
class Recorder:
    """A sink that keeps what it was told: the table of a demo, the timings of a manifest, a test's evidence."""

    events: list[StepEvent] = field(default_factory=list)

    def __call__(self, event: StepEvent) -> None:
        self.events.append(event)

    def completed(self) -> list[StepEvent]:
        """The completed steps in order."""
        return [event for event in self.events if event.kind == "completed"]

    def seconds(self) -> dict[str, float]:
        """Seconds by step; a step that ran twice counts both times."""
        total: dict[str, float] = {}
        for event in self.completed():
            total[event.step] = total.get(event.step, 0.0) + (event.seconds or 0.0)
        return total
