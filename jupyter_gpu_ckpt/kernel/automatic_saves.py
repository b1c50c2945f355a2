"""Save points that nobody has named: before a restart or a risky cell, after each cell, while a kernel is idle.

A kernel keeps some (`LifecycleSettings.automatic_save_points`), dense lately and sparse before.
"""

from __future__ import annotations

import json
import shlex
import time

from ..image import save_point
from ..image.image import Image
from ..image.save_point import SavePoint
from ..image.store import Store
from ..lifecycle import going_back, host_memory
from ..lifecycle.lifecycle import Lifecycle

#: Of a kernel's agent, a variable that has it request a save after each cell.
AFTER_CELLS = "JUPYTER_GPU_CKPT_SAVE_AFTER_CELLS"
#: Reasons, as they begin the names of save points.
RESTART, RISKY, CELL, IDLE = "before a restart", "before a risky cell", "after a cell", "idle"
#: The reason of a save point that a branch starts from.
BRANCH = "branch"


def save(lifecycle: Lifecycle, why: str, notebook: bytes | None) -> Image:
    """Make an automatic save point, and delete those that are too many.  Raises as `Lifecycle.save`."""
    name = going_back.automatic_name(why, lifecycle.engine.store.images(), lifecycle.home.kernel_id)
    image = lifecycle.save(SavePoint(name, automatic=True), notebook)
    going_back.thin_out(lifecycle.kernel)
    return image


def keep_image(lifecycle: Lifecycle, why: str, notebook: bytes | None) -> Image | None:
    """Make an automatic save point of the image that the kernel slept in when it was ended.

    Return None where the kernel's other thread has just dealt with it.  Raises as `save_point.of_sleep`; then the image
    is as it was.
    """
    kernel = lifecycle.kernel
    with kernel.lock:
        store = kernel.engine.store
        if (image := kernel.image) is None:
            return None
        name = going_back.automatic_name(why, store.images(), lifecycle.home.kernel_id)
        point = SavePoint(name, automatic=True, left_out=1, parent=kernel.parent)
        kept = save_point.of_sleep(store, image, point, notebook, kernel.settings.kept_file_bytes)
        kernel.image = None
        going_back.thin_out(kernel)
        return kept


def size(lifecycle: Lifecycle) -> int:
    """Return the bytes that a save point of a kernel may have, host and device memory.  Raises `GpuCkptError`."""
    return host_memory.resident(lifecycle.kernel) + sum(host_memory.device_bytes(lifecycle.kernel).values())


def offer(store: Store, kernel_id: str, status: int | None, *, has_magic: bool) -> str:
    """Return what the user of a kernel reads that has taken the place of one that died; empty without save points.

    Not offered is the state of a fresh kernel, from which it has gone back after it died before.
    """
    points = [*save_point.of_kernel(store.images(), kernel_id).items()]
    if not points:
        return ""
    name, image = next((each for each in reversed(points) if _has_state(each[1])), points[-1])
    at = time.strftime("%H:%M", time.localtime(image.manifest.created))
    how = f"was ended by signal {-status}" if status is not None and status < 0 else f"ended with status {status}"
    last = f"Its last save point is from {at}; to go back to it"
    return f"The kernel {how}; this is a fresh one. {last}: {_way_back(kernel_id, name, has_magic=has_magic)}"


def _has_state(image: Image) -> bool:
    """Return whether a save point has variables, as far as that is known."""
    point = save_point.of_image(image)
    return point is not None and bool(point.variables or point.left_out)


def _way_back(kernel_id: str, name: str, *, has_magic: bool) -> str:
    """Return how the kernel goes back: without an agent it has no magic."""
    if has_magic:
        return f"%gpu_checkpoint --back {shlex.quote(name)}"
    return f"the GPU panel in the browser, or POST gpu-ckpt/kernels/{kernel_id}/back with {json.dumps({'name': name})}"
