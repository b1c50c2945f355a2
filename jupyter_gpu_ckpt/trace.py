"""The stream of ``started`` / ``completed`` / ``failed`` events for every step of every verb.

The log, the server's events, progress bars and the figures in a manifest all read this stream.  A sink is a callable
that takes one `StepEvent`.  An error of a sink is logged and not raised: a listener must not stop a kernel half-way.

`Trace.faults` are for tests: they are called with the same events before the sinks, and their errors make the step
fail.  So a test makes any step fail without changing the code under test.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from .errors import GpuCkptError

_log = logging.getLogger(__name__)

T = TypeVar("T")


def notify(listeners: Iterable[Callable[[T], object]], value: T) -> None:
    """Call each of ``listeners`` with ``value``.  The error of one is logged, and the others are called all the same.

    Listeners may be added and removed meanwhile.
    """
    for listener in tuple(listeners):
        try:
            listener(value)
        except Exception as error:
            _log.error("A listener failed: %s", type(error).__name__, exc_info=True)


@dataclass(frozen=True)
class StepEvent:
    """The start or end of a step, or a moment in between (``running``, emitted by the server's monitor).

    ``seconds`` is the step's duration (monotonic; ``None`` on ``started``), ``bytes`` the bytes it moved if known, both
    up to now while it is ``running``; ``code`` the error's code on ``failed``; ``parts`` the seconds of parts of it, by
    their names, at its end, where they are measured.  Without paths, tokens, user content.
    """

    kind: Literal["started", "running", "completed", "failed"]
    step: str
    kernel_id: str
    at: float
    seconds: float | None = None
    bytes: int | None = None
    code: str | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


Sink = Callable[[StepEvent], None]


@dataclass
class TracedStep:
    """The step under way; its code may set ``bytes`` before it ends, and measure parts of it."""

    name: str
    bytes: int | None = None
    parts: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Run the body as a part of the step, whose seconds are added to those of the same name."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + time.monotonic() - began


@dataclass
class Trace:
    """Runs named steps and notifies every sink, in order, on the caller's thread."""

    kernel_id: str
    sinks: list[Sink] = field(default_factory=list)
    #: Called before the sinks when a step starts and when it has done its work; may raise to make the step fail.
    faults: list[Sink] = field(default_factory=list)
    #: The error of the step that failed last, which may name private files; events have its code only.
    error: GpuCkptError | None = None

    def _emit(self, event: StepEvent) -> None:
        if event.kind in ("started", "completed"):
            for fault in tuple(self.faults):
                fault(event)
        notify(self.sinks, event)

    @contextmanager
    def step(self, name: str) -> Iterator[TracedStep]:
        """Run the body as step ``name``.  Errors are raised again after ``failed`` was emitted."""
        step = TracedStep(name)
        began = time.monotonic()
        try:
            self._emit(StepEvent("started", name, self.kernel_id, time.time()))
            yield step
            seconds = time.monotonic() - began
            self._emit(StepEvent("completed", name, self.kernel_id, time.time(), seconds, step.bytes, None, step.parts))
        except BaseException as error:
            self.error = error if isinstance(error, GpuCkptError) else None
            code = self.error.code if self.error is not None else type(error).__name__
            seconds = time.monotonic() - began
            self._emit(StepEvent("failed", name, self.kernel_id, time.time(), seconds, step.bytes, code, step.parts))
            raise
