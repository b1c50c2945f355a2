"""Emit kernels' transitions and steps on jupyter_server's event bus, and log a line for each transition."""

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
PLAN = f"{_BASE}/kernel_plan/v1"
USAGE = f"{_BASE}/gpu_usage/v1"


class Events(Listener):
    """A listener of `monitor.KernelMonitor` that emits events."""

    def __init__(self, bus: EventLogger) -> None:
        self.bus = bus
        for schema_id in {STATE, STEP, FAILURE, PROTECTION, PLAN, USAGE} - set(bus.schemas.schema_ids):
            bus.register_event_schema(SCHEMAS / f"{schema_id.split('/')[-2]}.yaml")

    def usage(self, document: dict[str, Any]) -> None:
        """Emit GPU memory by kernel."""
        self.bus.emit(schema_id=USAGE, data=document)

    def changed(self, change: Changed) -> None:
        self._emit(
            STATE,
            change.kernel_id,
            state=change.state.value,
            previous=change.previous.value if change.previous else None,
            **_fields(change, "seconds", "image", "device_bytes"),
        )

    def stepped(self, step: Stepped) -> None:
        event = step.event
        self._emit(
            STEP,
            event.kernel_id,
            status=event.kind,
            **_fields(event, "step", "bytes", "seconds", "code"),
            **_fields(step, "verb", "fraction", "expected_bytes", "expected_seconds"),
        )

    def failed(self, failure: Failed) -> None:
        self._emit(FAILURE, failure.kernel_id, **_fields(failure, "verb", "step", "code", "hint", "left"))

    def protected(self, kernel_id: str, until: float | None) -> None:
        self._emit(PROTECTION, kernel_id, protected_until=until)

    def planned(self, kernel_id: str, verb: str | None, seconds: float | None) -> None:
        self._emit(PLAN, kernel_id, next=verb, due_in_s=seconds)

    def _emit(self, schema_id: str, kernel_id: str, **data: Any) -> None:
        self.bus.emit(schema_id=schema_id, data={"kernel_id": kernel_id, **data})


def _fields(of: object, *names: str) -> dict[str, Any]:
    return {name: getattr(of, name) for name in names}


class Log(Listener):
    """A listener of `monitor.KernelMonitor`: logs each transition as ``key=value``, without paths or user content."""

    def __init__(self, log: Logger) -> None:
        self.log = log

    def changed(self, change: Changed) -> None:
        write = self.log.warning if change.code else self.log.info
        write(
            "gpu_ckpt transition kernel=%s from=%s to=%s seconds=%.3f device_bytes=%d image=%s code=%s",
            change.kernel_id,
            change.previous.value if change.previous else "-",
            change.state.value,
            change.seconds,
            change.device_bytes,
            change.image or "-",
            change.code or "-",
        )
