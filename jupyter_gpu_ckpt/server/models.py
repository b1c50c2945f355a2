"""The JSON documents of REST about kernels, images and the host, as ``openapi.yaml`` describes them.

Functions that read a disk or query a driver say so; they are for a thread, not for the event loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..doctor import checks
from ..errors import (
    BadRequest,
    GpuCkptError,
    HostError,
    ImageError,
    ImageNotFound,
    InsufficientResources,
    PreflightError,
    ProtocolVersion,
    StateError,
)
from ..image.store import Image, Store
from ..kernel.adoption import Session, only_copy
from ..kernel.engine import shared_engine
from ..kernel.provisioner import GpuCkptProvisioner
from ..lifecycle.machine import State
from ..lifecycle.preflight import PreflightFinding, judge_requests, require
from .jobs import Job
from .monitor import MonitoredKernel, device_bytes

NOT_OURS = "This kernel was started by another provisioner."
PLAIN = "This kernel was started plainly; restart it once `jupyter gpu-ckpt doctor` finds nothing missing."


def why_not(provisioner: GpuCkptProvisioner | None) -> str:
    """Return why a kernel without a lifecycle cannot be checkpointed."""
    if provisioner is None:
        return NOT_OURS
    return PLAIN if provisioner.unfit is None else f"{provisioner.unfit.message} {provisioner.unfit.hint}"


def kernel(
    kernel_id: str,
    name: str,
    provisioner: GpuCkptProvisioner | None,
    monitored: MonitoredKernel | None = None,
    job: Job | None = None,
    outlook: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the document of one kernel.  Blocks nowhere."""
    lifecycle = provisioner.lifecycle if provisioner is not None else None
    image = lifecycle.image if lifecycle is not None else None
    swapped_out = monitored.swapped_out if monitored is not None else None
    failure = monitored.failure if monitored is not None else None
    return {
        "id": kernel_id,
        "name": name,
        "state": provisioner.state.value if provisioner is not None else State.RUNNING.value,
        "since": monitored.since if monitored is not None and monitored.state is not None else None,
        "checkpointable": lifecycle is not None,
        "reason": None if lifecycle is not None else why_not(provisioner),
        "image": image.id if image is not None else None,
        "device_bytes_swapped_out": sum(swapped_out.device.values()) if swapped_out is not None else 0,
        "progress": monitored.progress.fraction if monitored is not None and monitored.progress is not None else None,
        "failure": None
        if failure is None
        else {name: getattr(failure, name) for name in ("verb", "step", "code", "message", "hint", "left", "at")},
        "job": job.as_dict() if job is not None else None,
        "policy": outlook,
    }


def on_device(provisioner: GpuCkptProvisioner | None) -> dict[str, int] | None:
    """Return a kernel's device memory in bytes by GPU UUID; None where it is unknown.  Queries NVML."""
    lifecycle = provisioner.lifecycle if provisioner is not None else None
    try:
        return device_bytes(lifecycle) if lifecycle is not None else None
    except GpuCkptError:
        return None


def findings(provisioner: GpuCkptProvisioner | None) -> dict[str, Any]:
    """Return preflight's findings for a kernel.  Reads ``/proc`` and the disk, queries NVML.

    Raises `StateError` for a kernel that cannot be checkpointed at all, or has no process.
    """
    lifecycle = provisioner.lifecycle if provisioner is not None else None
    if lifecycle is None:
        raise StateError(why_not(provisioner))
    if lifecycle.state is State.CHECKPOINTED:
        raise StateError("The kernel is checkpointed already.", hint="Nothing is to be done.")
    found: list[PreflightFinding] = [*requests(provisioner), *lifecycle.findings()]
    return {
        "ok": not any(finding.blocks for finding in found),
        "findings": [
            {
                "code": finding.code,
                "text": finding.text,
                "blocks": finding.blocks,
                "hint": finding.error.hint if finding.error is not None else "",
            }
            for finding in found
        ],
    }


def requests(provisioner: GpuCkptProvisioner | None) -> list[PreflightFinding]:
    """Return preflight's findings about requests under way.  Waits for the gate's thread."""
    gate = provisioner.gate if provisioner is not None else None
    if gate is None:
        return []
    under_way = gate.under_way
    return judge_requests(under_way.cells, under_way.others)


def require_no_cell(provisioner: GpuCkptProvisioner) -> None:
    """Raise `KernelBusy` while a cell runs.  Waits for the gate's thread."""
    require(requests(provisioner))


def image(of: Image, root: Path) -> dict[str, Any]:
    """Return the document of one image, with its notebook's path below ``root``.  Reads the disk."""
    manifest = of.manifest
    return {
        "id": of.id,
        "kernel_id": manifest.kernel_id,
        "kernel_name": manifest.kernel_name,
        "created": manifest.created,
        "bytes": manifest.bytes,
        "device_bytes": manifest.device_bytes,
        "hostname": manifest.hostname,
        "criu_version": manifest.criu_version,
        "steps": manifest.steps,
        "only_copy": only_copy(of, "") is not None,
        "notebook": notebook(_session(of), root),
    }


def _session(of: Image) -> Session | None:
    try:
        return Session.read(of.path)
    except ProtocolVersion:  # the image is listed all the same
        return None


def images(store: Store, root: Path) -> list[dict[str, Any]]:
    """Return every readable image, oldest first.  Reads the disk."""
    return [image(of, root) for of in store.images()]


def notebook(of: Session | None, root: Path) -> str | None:
    """Return a kernel's notebook as a path below ``root``; None if there is none there.  Reads the disk."""
    if of is None or not of.notebook:
        return None
    path = Path(of.notebook)
    return path.relative_to(root).as_posix() if path.is_relative_to(root) and path.is_file() else None


def remove(store: Store, doomed: Image, *, force: bool) -> int:
    """Delete an image and return the bytes freed; `ImageBusy` for a kernel's only copy without ``force``."""
    if not force and (refusal := only_copy(doomed, "add force=true")) is not None:
        raise refusal
    return store.remove(doomed)


def host(image_dir: Path, fast_path: str) -> dict[str, Any]:
    """Return the doctor's results.  Takes up to some seconds."""
    return checks.as_json(checks.diagnose(image_dir, fast_path=fast_path))


def gpus(image_dir: Path) -> list[dict[str, Any]]:
    """Return the GPUs; none where NVML does not work (the doctor says why).  Queries NVML."""
    try:
        return [dataclasses.asdict(gpu) for gpu in shared_engine(image_dir).gpus.list()]
    except GpuCkptError:
        return []


def counts(provisioners: Iterable[GpuCkptProvisioner]) -> dict[str, int]:
    """Count the checkpointable kernels by state."""
    found = dict.fromkeys((state.value for state in State), 0)
    for provisioner in provisioners:
        if provisioner.lifecycle is not None:
            found[provisioner.state.value] += 1
    return found


def http_status(error: GpuCkptError) -> int:
    """Return the HTTP status of an error."""
    for classes, status in (
        ((ImageNotFound,), 404),
        ((BadRequest,), 400),
        ((HostError,), 503),
        ((StateError, PreflightError, InsufficientResources, ProtocolVersion, ImageError), 409),
    ):
        if isinstance(error, classes):
            return status
    return 500
