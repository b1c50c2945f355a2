"""Emit kernels' transitions and steps on jupyter_server's event bus, and log a line for each transition.

The schemas lie in ``events/``; front ends subscribe at ``api/events/subscribe``.
"""

from __future__ import annotations

from logging import Logger
from pathlib import Path
from typing import Any

from jupyter_events import EventLogger

from .monitor import Changed, Failed, Listener, Stepped

SCHEMAS = Path(__file__).with_name("event-schemas")
_BASE = "https://events.jupyter.org/jupyter_gpu_ckpt"
STATE = f"{_BASE}/kernel_state/v1"
STEP = f"{_BASE}/kernel_step/v1"
FAILURE = f"{_BASE}/kernel_failure/v1"
PROTECTION = f"{_BASE}/kernel_protection/v1"
USAGE = f"{_BASE}/gpu_usage/v1"


def register(bus: EventLogger) -> None:
    """Register our schemas; those that are registered already are kept."""
    for schema_id in (STATE, STEP, FAILURE, PROTECTION, USAGE):
        if schema_id not in bus.schemas:
            bus.register_event_schema(SCHEMAS / f"{schema_id.split('/')[-2]}.yaml")


class Events(Listener):
    """A listener of `monitor.KernelMonitor` that emits events."""

    def __init__(self, bus: EventLogger) -> None:
        self.bus = bus
        register(bus)

    def usage(self, document: dict[str, Any]) -> None:
        """Emit GPU memory by kernel."""
        self.bus.emit(schema_id=USAGE, data=document)

    def changed(self, change: Changed) -> None:
        """Emit a change of state."""
        self._emit(
            STATE,
            change.kernel_id,
            state=change.state.value,
            previous=change.previous.value if change.previous else None,
            seconds=change.seconds,
            image=change.image,
            device_bytes=change.device_bytes,
        )

    def stepped(self, step: Stepped) -> None:
        """Emit the progress of a verb."""
        event = step.event
        self._emit(
            STEP,
            event.kernel_id,
            verb=step.verb,
            step=event.step,
            status=event.kind,
            fraction=step.fraction,
            bytes=event.bytes,
            seconds=event.seconds,
            expected_bytes=step.expected_bytes,
            expected_seconds=step.expected_seconds,
            code=event.code,
        )

    def failed(self, failure: Failed) -> None:
        """Emit the failure of a verb."""
        fields = {name: getattr(failure, name) for name in ("verb", "step", "code", "hint", "left")}
        self._emit(FAILURE, failure.kernel_id, **fields)

    def protected(self, kernel_id: str, until: float | None) -> None:
        """Emit that a protection was set, or (None) ended.  Called for `KernelMonitor.on_protected`."""
        self._emit(PROTECTION, kernel_id, protected_until=until)

    def _emit(self, schema_id: str, kernel_id: str, **data: Any) -> None:
        self.bus.emit(schema_id=schema_id, data={"kernel_id": kernel_id, **data})


class Log(Listener):
    """A listener of `monitor.KernelMonitor`: logs each transition as ``key=value``, without paths or user content."""

    def __init__(self, log: Logger) -> None:
        self.log = log

    def changed(self, change: Changed) -> None:
        """Log the line."""
        facts = {
            "kernel": change.kernel_id,
            "from": change.previous.value if change.previous else "-",
            "to": change.state.value,
            "seconds": f"{change.seconds:.3f}",
            "device_bytes": change.device_bytes,
            "image": change.image or "-",
            "code": change.code or "-",
        }
        write = self.log.warning if change.code else self.log.info
        write("gpu_ckpt transition %s", " ".join(f"{name}={value}" for name, value in facts.items()))
