"""The JSON documents of REST about kernels, images and the host, as ``openapi.yaml`` describes them.

Functions that read a disk or query a driver say so; they are for a thread, not for the event loop.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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
from ..image.lease import MOMENT
from ..image.store import Image, Store
from ..kernel import templates
from ..kernel.engine import shared_engine
from ..kernel.orphans import Session, only_copy
from ..kernel.provisioner import GpuCkptProvisioner
from ..lifecycle import host_memory, suspend
from ..lifecycle.plans import State
from ..lifecycle.preflight import PreflightFinding, judge_requests
from .jobs import Job
from .monitor import MonitoredKernel


def why_not(provisioner: GpuCkptProvisioner | None) -> str:
    """Return why a kernel without a lifecycle cannot be checkpointed."""
    if provisioner is None:
        return "This kernel was started by another provisioner."
    if provisioner.unfit is None and provisioner.state is State.DEAD:
        return "This kernel has ended, or is being restarted."
    if provisioner.unfit is None:
        return "This kernel was started plainly; restart it once `jupyter gpu-ckpt doctor` finds nothing missing."
    return f"{provisioner.unfit.message} {provisioner.unfit.hint}"


def kernel(
    kernel_id: str,
    name: str,
    provisioner: GpuCkptProvisioner | None,
    monitored: MonitoredKernel | None,
    job: Job | None,
    outlook: dict[str, Any] | None,
) -> dict[str, Any]:
    """Return the document of one kernel.  Blocks nowhere."""
    lifecycle = provisioner.lifecycle if provisioner else None
    image = lifecycle.image if lifecycle else None
    swapped_out = monitored.swapped_out if monitored else None
    progress = monitored.progress if monitored else None
    failure = monitored.failure if monitored else None
    return {
        "id": kernel_id,
        "name": name,
        "state": provisioner.state.value if provisioner else State.RUNNING.value,
        "since": monitored.since if monitored and monitored.state else None,
        "checkpointable": lifecycle is not None,
        "reason": None if lifecycle else why_not(provisioner),
        "image": image.id if image else None,
        "device_bytes_swapped_out": sum(swapped_out.device.values()) if swapped_out else 0,
        "off_gpu": lifecycle is not None and lifecycle.kernel.serves_off_gpu,
        "gpu_wait": provisioner.sharing.waiting() if provisioner and provisioner.sharing else None,
        "progress": progress.fraction if progress else None,
        "failure": failure.for_owner() if failure else None,
        "failures": [each.for_owner() for each in monitored.failures] if monitored else [],
        "job": job.as_dict() if job else None,
        "policy": outlook,
    }


def on_device(provisioner: GpuCkptProvisioner | None) -> dict[str, int] | None:
    """Return a kernel's device memory in bytes by GPU UUID; None where it is unknown.  Queries NVML."""
    lifecycle = provisioner.lifecycle if provisioner else None
    try:
        return host_memory.device_bytes(lifecycle.kernel) if lifecycle else None
    except GpuCkptError:
        return None


def in_memory(provisioner: GpuCkptProvisioner | None) -> dict[str, Any]:
    """Return a kernel's host memory in bytes, and its child processes; None and none if unknown.  Reads ``/proc``."""
    lifecycle = provisioner.lifecycle if provisioner else None
    if lifecycle is None or (lifecycle.capsule is None and lifecycle.state is not State.CHECKPOINTED):
        return {"host_bytes": None, "children": []}
    try:
        bytes, children = host_memory.by_process(lifecycle.kernel) if lifecycle.capsule else (0, [])
    except GpuCkptError:  # it is just ending
        return {"host_bytes": None, "children": []}
    shown = [{"pid": child.pid, "command": child.shown(), "bytes": child.rss} for child in children]
    return {"host_bytes": bytes, "children": shown}


def findings(provisioner: GpuCkptProvisioner) -> dict[str, Any]:
    """Return preflight's findings for a kernel.  Reads ``/proc`` and the disk, queries NVML.

    Raises `StateError` for a kernel that cannot be checkpointed at all, or has no process.
    """
    lifecycle = provisioner.lifecycle
    if lifecycle is None:
        raise StateError(why_not(provisioner))
    if lifecycle.state is State.CHECKPOINTED:
        raise StateError("The kernel is checkpointed already.", hint="Nothing is to be done.")
    requested = requests(provisioner)
    found = [*requested, *suspend.findings(lifecycle.kernel)]
    # Only of a kernel whose checkpoint is refused: to find out costs as much again.
    ok = not any(each.blocks for each in found)
    may_suspend = ok or not any(each.blocks for each in [*requested, *suspend.findings(lifecycle.kernel, writes=False)])
    return {"ok": ok, "may_suspend": may_suspend, "findings": [each.as_dict() for each in found]}


def requests(provisioner: GpuCkptProvisioner) -> list[PreflightFinding]:
    """Return preflight's findings about requests under way.  Waits for the gate's thread."""
    gate = provisioner.gate
    if gate is None:
        return []
    under_way = gate.under_way
    return judge_requests(under_way.cells, under_way.others, awaits_input=under_way.awaits_input)


def image(of: Image, root: Path) -> dict[str, Any]:
    """Return the document of one image, with its notebook's path below ``root``.  Reads the disk."""
    names = ("kernel_id", "kernel_name", "created", "bytes", "device_bytes", "hostname", "criu_version", "steps")
    session, is_only_copy = None, True
    # Another release may have written the session, or have the kernel: the image is listed all the same.
    with contextlib.suppress(ProtocolVersion):
        session = Session.read(of.path)
    with contextlib.suppress(ProtocolVersion):
        is_only_copy = only_copy(of, "") is not None
    return {
        "id": of.id,
        **{name: getattr(of.manifest, name) for name in names},
        "only_copy": is_only_copy,
        "notebook": notebook(session, root),
    }


def notebook(of: Session | None, root: Path) -> str | None:
    """Return a kernel's notebook as a path below ``root``; None if there is none there.  Reads the disk."""
    if of is None or not of.notebook:
        return None
    path = Path(of.notebook)
    return path.relative_to(root).as_posix() if path.is_relative_to(root) and path.is_file() else None


def remove(store: Store, doomed: Image, *, force: bool) -> int:
    """Delete an image and return the bytes freed; `ImageBusy` without ``force`` for one that is needed.

    That is a kernel's only copy, or a template's.
    """
    insist = "add force=true"
    if not force and (refusal := only_copy(doomed, insist) or templates.refusal(doomed, insist)) is not None:
        raise refusal
    return store.remove(doomed, timeout=MOMENT)


def gpus(image_dir: Path) -> list[dict[str, Any]]:
    """Return the GPUs; none where NVML does not work (the doctor says why).  Queries NVML."""
    try:
        return [dataclasses.asdict(gpu) for gpu in shared_engine(image_dir).gpus.list()]
    except GpuCkptError:
        return []


def counts(provisioners: Iterable[GpuCkptProvisioner]) -> dict[str, int]:
    """Count the checkpointable kernels by state."""
    found = Counter(provisioner.state for provisioner in provisioners if provisioner.lifecycle is not None)
    return {state.value: found[state] for state in State}


def http_status(error: GpuCkptError) -> int:
    """Return the HTTP status of an error."""
    return next((status for classes, status in _STATUSES if isinstance(error, classes)), 500)


_STATUSES: tuple[tuple[tuple[type[GpuCkptError], ...], int], ...] = (
    ((ImageNotFound,), 404),
    ((BadRequest,), 400),
    ((HostError,), 503),
    ((StateError, PreflightError, InsufficientResources, ProtocolVersion, ImageError), 409),
)
