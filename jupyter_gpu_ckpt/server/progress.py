"""How far a verb is: what each of its steps will probably take, from bytes known beforehand and this host's rates.

Nothing is interpolated: the fraction moves when a step ends.  The expected bytes and seconds of the step under way are
handed on, and a front end that wants a moving bar can move it by them, as the estimate that they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..estimate import RATES
from ..machine import Plan, Step

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
        """Bytes ``step`` will move."""
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
        self._done: set[Step] = set()

    @property
    def fraction(self) -> float:
        """The part of the expected time whose steps are done, 0 to 1."""
        if self._done >= set(self.seconds):
            return 1.0
        return min(1.0, sum(self.seconds[step] for step in self._done) / sum(self.seconds.values()))

    def done(self, step: Step) -> None:
        """A step of the plan was completed; undo steps do not count."""
        if step in self.seconds:
            self._done.add(step)


def _seconds(step: Step, bytes: int) -> float:
    floor = _FLOORS.get(step, _FLOOR)
    return floor + RATES.seconds([step.value], bytes) if bytes else floor
