"""Requests of the agent about its own kernel, answered while one of its cells runs.

They come through the gate (`agent.server_channel` is the other end).  They are answered on threads of their own: the
gate's thread must not wait, and the kernel's worker may be busy with the verb that the request is about.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..cuda.gpus import Gpu, pair_of_one
from ..errors import (
    BadRequest,
    GpuCkptError,
    ImageBusy,
    LimitReached,
    NoSpace,
    SavePointExists,
    SavePointNotFound,
    StateError,
)
from ..gate.gate import Gate
from ..image import save_point
from ..image.image import Image
from ..image.lease import MOMENT
from ..lifecycle import cuda_processes, going_back, host_memory, preflight, suspend
from ..lifecycle.lifecycle import Lifecycle
from ..lifecycle.rates import RATES
from .panel import Panel

#: Seconds that a request about save points waits for one that is being published.
_PUBLISH_TIMEOUT = 20.0
# Seconds for the kernel, which reads answers on a thread of its own, to acknowledge one.
_REPLY_TIMEOUT = 10.0

#: Of all kernels.  A cell waits for its answer, so a kernel needs one; made when no other is free.
_THREADS = 64
_pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="gpu-ckpt-agent-requests")

#: Seconds; the end of a longer protection may be no valid date.
LONGEST_PROTECTION = 100 * 365 * 86400


class AgentRequests:
    """Answers for one kernel.

    ``protected_until``: as an earlier server has set it.  ``on_protected``: called with each new value, to store and
    publish it; may raise `OSError`.
    """

    def __init__(
        self,
        log: logging.Logger | logging.LoggerAdapter[Any],
        *,
        protected_until: float | None = None,
        on_protected: Callable[[float | None], None] = lambda _: None,
    ) -> None:
        self._log = log
        self._on_protected = on_protected
        #: Until when no policy may suspend or checkpoint this kernel, seconds since the epoch.  Explicit requests for
        #: it are done all the same.
        self.protected_until = protected_until
        #: The widget in the notebook that shows the kernel's state, if there is one.
        self.panel: Panel | None = None
        #: Returns the kernel's part in sharing GPUs, for people, if it has one.
        self.sharing: Callable[[], str] | None = None
        with contextlib.suppress(RuntimeError):
            _pool.submit(int)  # starts a thread, as long as there are any

    def answer(self, content: dict[str, Any], lifecycle: Lifecycle, gate: Gate) -> None:
        """Called with a request on the gate's thread; the answer is sent through ``gate`` when it is ready.

        Its ``requested`` are the verbs that cells have requested before, and that are not done yet.
        """
        with contextlib.suppress(RuntimeError):  # there are no more threads: one of the pool takes it
            _pool.submit(self._answer, content, lifecycle, gate)

    def report_failure(self, error: GpuCkptError, gate: Gate) -> None:
        """Have the kernel, which runs on, show its user why a verb that was requested in it failed."""
        self._notify_kernel(gate, "gpu_ckpt_failed_request", {"error": error.as_dict()})

    def _answer(self, content: dict[str, Any], lifecycle: Lifecycle, gate: Gate) -> None:
        requested: list[Mapping[str, Any]] = content.get("requested") or []
        verbs: dict[str, Callable[[], dict[str, Any]]] = {
            "status": lambda: self.status(
                lifecycle, content.get("report") or {}, writes=bool(content.get("writes", True))
            ),
            "list": lambda: images(lifecycle),
            "saves": lambda: save_points(lifecycle),
            "may_save": lambda: may_save(lifecycle, str(content.get("name", "")), requested),
            "may_go_back": lambda: may_go_back(
                lifecycle, str(content.get("name", "")), content.get("files"), requested, content.get("gpu")
            ),
            "may_branch": lambda: may_branch(lifecycle, str(content.get("name", "")), requested, content.get("gpu")),
            "compare": lambda: compare(lifecycle, content.get("names"), content.get("present")),
            "delete": lambda: delete(lifecycle, str(content.get("name", ""))),
            "protect": lambda: self.protect(content.get("seconds")),
            "watch": lambda: self._watch(content.get("models"), gate),
        }
        reply: dict[str, Any] = {"id": content.get("id"), "kernel_id": lifecycle.home.kernel_id}
        try:
            if (verb := verbs.get(str(content.get("verb")))) is None:
                raise BadRequest("This server does not know the verb that was requested.", hint="Restart the kernel.")
            reply["answer"] = verb()
        except GpuCkptError as error:
            reply["error"] = error.as_dict()
        except Exception as error:
            self._log.exception("a request of a kernel could not be answered")
            unknown = GpuCkptError(f"The request could not be answered: {type(error).__name__}.")
            limit = GpuCkptError.from_exception(error)
            reply["error"] = (limit if isinstance(limit, LimitReached | NoSpace) else unknown).as_dict()
        self._notify_kernel(gate, "gpu_ckpt_answer_request", reply)

    def _notify_kernel(self, gate: Gate, msg_type: str, content: dict[str, Any]) -> None:
        try:
            gate.request(msg_type, content, _REPLY_TIMEOUT, "control")
        except GpuCkptError as error:  # the kernel is gone, or being checkpointed
            self._log.info("a kernel did not get an answer: %s", error.code)

    # -- the answers

    def status(self, lifecycle: Lifecycle, report: dict[str, Any], *, writes: bool = True) -> dict[str, Any]:
        """Return state, sizes in bytes, times in seconds, and preflight's findings; ``report`` is the agent's.

        ``writes``: whether they are about a checkpoint, or a suspend, which writes no image.
        """
        if lifecycle.capsule is None:
            raise StateError(f"The kernel is {lifecycle.state.value}.")
        device: dict[str, int] = {}
        gpus: list[Gpu] = []
        findings: list[preflight.PreflightFinding] = []
        try:
            if device := host_memory.device_bytes(lifecycle.kernel):
                gpus = lifecycle.engine.gpus.list()
            findings = suspend.findings(lifecycle.kernel, writes=writes)
        except GpuCkptError as error:  # an answer without the GPUs is better than none
            findings.append(preflight.PreflightFinding(error.code, error.message, error))
        tree = lifecycle.capsule.processes()
        own = lifecycle.engine.gpus.used_by(lifecycle.capsule.host_pid) if device else {}
        by_driver = cuda_processes.moved_by_driver(lifecycle.kernel, own)
        findings += preflight.judge_report(report, gpus=len(own), by_driver=by_driver, writes=writes, tree=tree)
        resident = host_memory.resident(lifecycle.kernel)
        estimate = RATES.estimate(resident, sum(device.values()))
        return {
            "state": lifecycle.state.value,
            "device_bytes": device,
            "gpus": [{"uuid": gpu.uuid, "name": gpu.name, "total": gpu.total, "free": gpu.free} for gpu in gpus],
            "process_bytes": resident,
            "image_bytes": estimate.image_bytes,
            "disk_free": lifecycle.engine.store.free(),
            "seconds": {"gpu_free": estimate.gpu_free, "saved": estimate.saved, "back": estimate.back},
            "findings": [finding.as_dict() for finding in findings],
            "protected_until": self.protection(),
            "sharing": self.sharing() if self.sharing is not None else None,
        }

    def protect(self, seconds: Any) -> dict[str, Any]:
        """Keep policies off this kernel for ``seconds`` from now; 0 ends that.  Raises `BadRequest`."""
        # An integer of JSON may be too large for a float, and for `math.isfinite`.
        number = isinstance(seconds, int) or (isinstance(seconds, float) and math.isfinite(seconds))
        if isinstance(seconds, bool) or not number:
            raise BadRequest("A protection lasts a number of seconds.")
        if seconds < 0:
            raise BadRequest("A protection cannot end in the past.")
        if seconds > LONGEST_PROTECTION:
            raise BadRequest(f"A protection lasts at most {LONGEST_PROTECTION} seconds, a hundred years.")
        self.protected_until = time.time() + seconds if seconds else None
        self._on_protected(self.protected_until)
        return {"protected_until": self.protected_until}

    def protection(self) -> float | None:
        """Return until when the kernel is protected, seconds since the epoch; None if it is not."""
        until = self.protected_until
        return until if until is not None and until > time.time() else None

    def _watch(self, models: Any, gate: Gate) -> dict[str, Any]:
        if not isinstance(models, dict) or not {"state", "progress"} <= set(models):
            raise BadRequest("A panel names the widgets to keep up to date.")
        self.panel = Panel({str(name): str(model) for name, model in models.items()}, gate)
        return {}


def images(lifecycle: Lifecycle) -> dict[str, Any]:
    """Return the images of this user, oldest first; sizes in bytes."""
    found = []
    with contextlib.suppress(FileNotFoundError):  # an image was deleted while they were listed
        for image in lifecycle.engine.store.images():
            manifest = image.manifest
            found.append(
                {
                    "id": image.id,
                    "kernel_id": manifest.kernel_id,
                    "kernel_name": manifest.kernel_name,
                    "created": manifest.created,
                    "bytes": manifest.bytes,
                    "device_bytes": sum(manifest.device_bytes.values()),
                    "hostname": manifest.hostname,
                }
            )
    return {"images": found}


def _save_points(lifecycle: Lifecycle) -> list[Image]:
    """Return the images, also of the save that an earlier cell has requested: this one may run before it is published.

    Not by the kernel's lock: a verb may have it that waits for this cell.
    """
    deadline = time.monotonic() + _PUBLISH_TIMEOUT
    while lifecycle.kernel.publishes_save_point and time.monotonic() < deadline:
        time.sleep(0.005)
    return lifecycle.engine.store.images()


def _find(lifecycle: Lifecycle, points: list[Image], name: str) -> Image:
    """Return the save point of this name.  Raises `SavePointNotFound`, `ImageBusy` if it may still be written."""
    try:
        return save_point.find(points, lifecycle.home.kernel_id, name)
    except SavePointNotFound as error:
        if not lifecycle.kernel.publishes_save_point:
            raise
        hint = "Run this cell again in a moment, once it is there."
        message = f"A save point of this kernel is still being written; there is none {name!r} yet."
        raise ImageBusy(message, hint=hint) from error


def save_points(lifecycle: Lifecycle) -> dict[str, Any]:
    """Return the save points of the kernel, oldest first."""
    points = save_point.of_kernel(_save_points(lifecycle), lifecycle.home.kernel_id)
    return {"saves": [save_point.described(each) for each in points.values()]}


def _require_stays(requested: Iterable[Mapping[str, Any]]) -> None:
    """Raise `StateError` if a cell has requested to go back: what is requested after it would find another state."""
    if (name := next((each.get("name") for each in requested if each.get("verb") == "back"), None)) is not None:
        message = f"A cell has requested already that this kernel goes back to {name!r}, which is done before this."
        hint = "Run this in a cell of its own, once the kernel is back."
        raise StateError(message, hint=hint, left=f"the kernel goes back to {name!r} when its cells have ended")


def may_save(lifecycle: Lifecycle, name: str, requested: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Raise `SavePointExists` or `BadRequest` for a name that a save point cannot have.

    ``requested``: the verbs that cells have requested before.  Raises `StateError` if one is to go back.
    """
    _require_stays(requested)
    if _is_saved_first(requested, name):
        raise SavePointExists(f"A cell has requested a save point {name!r} already.", hint="Choose another name.")
    save_point.require_free_name(_save_points(lifecycle), lifecycle.home.kernel_id, name)
    return {}


def _is_saved_first(requested: Iterable[Mapping[str, Any]], name: str) -> bool:
    return any(each.get("verb") == "save" and each.get("name") == name for each in requested)


def gpu_map_to(lifecycle: Lifecycle, used: Mapping[str, int], gpu: Any) -> dict[str, str] | None:
    """Return the mapping to the GPU of that number of a kernel that has so many bytes by GPU; None without a number.

    Raises as `pair_of_one`.
    """
    if gpu is None:
        return None
    if type(gpu) is not int:
        raise BadRequest("A GPU is chosen by its number.")
    return pair_of_one(gpu, used, lifecycle.engine.gpus.list())


def may_branch(
    lifecycle: Lifecycle, name: str, requested: Sequence[Mapping[str, Any]], gpu: Any = None
) -> dict[str, Any]:
    """Raise `StateError` if a cell has requested to go back, `SavePointNotFound` for a name that no save point has.

    ``name``: of a save point, or "" for the kernel as it is.  ``gpu``: the number of the chosen one, or None; raises as
    `gpu_map_to`.
    """
    _require_stays(requested)
    is_made = _is_saved_first(requested, name) or lifecycle.kernel.publishes_save_point  # then the branch waits for it
    point = None
    if name and not is_made:
        point = save_point.find(lifecycle.engine.store.images(), lifecycle.home.kernel_id, name)
    if gpu is not None:
        used = point.manifest.device_bytes if point is not None else host_memory.device_bytes(lifecycle.kernel)
        gpu_map_to(lifecycle, used, gpu)
    return {}


def may_go_back(
    lifecycle: Lifecycle, name: str, files: Any, requested: Sequence[Mapping[str, Any]] = (), gpu: Any = None
) -> dict[str, Any]:
    """Raise what prevents the kernel from going back, as far as it shows while a cell runs.

    ``requested``: the verbs that cells have requested before.  Raises `StateError` if one is to go back, or is a branch
    from the kernel as it is, `ImageBusy` if one is the save that this is about.
    """
    _require_stays(requested)
    if _is_saved_first(requested, name):
        message = f"The save point {name!r} is made when the cells that run or wait have ended."
        raise ImageBusy(message, hint="Go back to it in a cell that you run then.")
    if any(each.get("verb") == "branch" and not each.get("name") for each in requested):
        message = "A branch from this kernel as it is now begins when this cell has ended."
        raise StateError(message, hint="Go back in a cell that you run when the branch is there.")
    point = _find(lifecycle, _save_points(lifecycle), name)
    choice = going_back.require_choice(files)
    if not point.archived:  # else its content is fetched first
        going_back.check(lifecycle.kernel, point, choice, gpu_map_to(lifecycle, point.manifest.device_bytes, gpu))
    return {}


def compare(lifecycle: Lifecycle, names: Any, present: Any) -> dict[str, Any]:
    """Return the variables that differ between two save points, or one and the ``present`` summary of the agent."""
    points = _save_points(lifecycle)
    if not isinstance(names, list) or not 1 <= len(names) <= 2:
        raise BadRequest("One or two save points are compared.")
    before, *others = (save_point.of_image(_find(lifecycle, points, str(name))) for name in names)
    after = others[0] if others else save_point.from_summary(present if isinstance(present, dict) else {})
    assert before is not None
    assert after is not None
    return save_point.compare(before, after)


def delete(lifecycle: Lifecycle, name: str) -> dict[str, Any]:
    """Delete a save point of the kernel."""
    point = _find(lifecycle, _save_points(lifecycle), name)
    # The kernel may just have gone back to it: then its restore still has the lease while cells run already.
    return {"bytes": lifecycle.engine.store.remove(point, timeout=MOMENT)}
