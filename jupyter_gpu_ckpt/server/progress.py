"""Estimate how far a verb is, from bytes known beforehand and this host's measured rates.

Inside a step the fraction moves by the bytes that were written to disk, else by the seconds that have passed.  Both are
compared with an estimate, so the last tenth of a step does not count before the step has ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..lifecycle.machine import Plan, Step
from ..lifecycle.rates import RATES

#: Seconds a step takes however little it moves: measured with a kernel without CUDA (docs/measurements.md).
_FLOORS = {Step.QUIESCE: 0.03, Step.DUMP: 0.08, Step.CRIU_RESTORE: 0.07, Step.CONNECT: 0.02, Step.END_PROCESS: 0.03}
_FLOOR = 0.005


@dataclass(frozen=True)
class Sizes:
    """Bytes known before a verb starts: resident host memory, device memory by GPU UUID, the image."""

    host: int = 0
    device: dict[str, int] = field(default_factory=dict)
    image: int = 0

    def moved_by(self, step: Step) -> int:
        """Return the bytes that ``step`` will move."""
        on_device = sum(self.device.values())
        if step in (Step.CUDA_SUSPEND, Step.CUDA_RESUME):
            return on_device
        if step in (Step.DUMP, Step.PUBLISH):
            return self.host + on_device
        return self.image if step is Step.CRIU_RESTORE else 0


class Progress:
    """One verb under way."""

    def __init__(self, plan: Plan, sizes: Sizes) -> None:
        self.plan = plan
        self.bytes = {step: sizes.moved_by(step) for step in plan.steps}
        self.seconds = {step: _seconds(step, bytes) for step, bytes in self.bytes.items()}
        self._parts: dict[Step, float] = {}

    @property
    def fraction(self) -> float:
        """The part of the expected time that is done, 0 to 1.  Never decreases; 1 when all steps are done."""
        if all(self._parts.get(step) == 1.0 for step in self.seconds):
            return 1.0
        return sum(self.seconds[step] * part for step, part in self._parts.items()) / sum(self.seconds.values())

    def under_way(self, step: Step, seconds: float, bytes: int | None = None) -> None:
        """Record that a step has run for ``seconds`` and, if known, has moved ``bytes``."""
        if step in self.seconds:
            by_bytes = bytes is not None and self.bytes[step] > 0
            share = (bytes or 0) / self.bytes[step] if by_bytes else seconds / self.seconds[step]
            self._parts[step] = max(self._parts.get(step, 0.0), _damped(share))

    def done(self, step: Step) -> None:
        """Record that a step of the plan was completed; undo steps do not count."""
        if step in self.seconds:
            self._parts[step] = 1.0


def _damped(share: float) -> float:
    """Damp an estimate of the part that is done: beyond nine tenths it grows ever slower and never reaches 1."""
    return max(0.0, share) if share <= 0.9 else 1.0 - 0.09 / share


def _seconds(step: Step, bytes: int) -> float:
    floor = _FLOORS.get(step, _FLOOR)
    return floor + RATES.seconds([step.value], bytes) if bytes else floor
