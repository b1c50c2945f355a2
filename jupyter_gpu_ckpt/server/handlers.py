"""REST under ``<base_url>gpu-ckpt/``, as ``openapi.yaml`` describes it; `base_handler` has who may use it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import BadRequest, StateError
from ..kernel.host import BRANCH_FLAGS
from ..kernel.provisioner import GpuCkptProvisioner
from ..lifecycle.plans import State
from ..lifecycle.preflight import require
from . import models
from .base_handler import METHODS, Extension, Handler
from .save_points import BackHandler, CompareHandler, SaveHandler, SavePointHandler, SavesHandler

__all__ = ["HANDLERS", "METHODS", "Extension"]

OPENAPI = Path(__file__).with_name("openapi.yaml")
_PARAMETERS = {"restore": {"gpu_map", "accept_changed_files"}, "suspend": {"when"}, "checkpoint": {"when"}}

#: The method that a request of each verb runs.
VERBS: Mapping[str, Callable[..., Awaitable[Any]]] = {
    "suspend": GpuCkptProvisioner.suspend,
    "resume": GpuCkptProvisioner.resume,
    "checkpoint": GpuCkptProvisioner.checkpoint,
    "restore": GpuCkptProvisioner.restore,
}


class StatusHandler(Handler):
    """``status``: the host, its GPUs, the policy, and how many kernels are in which state."""

    async def get(self) -> None:
        self.reply(await self.app.status())


class KernelsHandler(Handler):
    """``kernels``: all kernels of this server, with their host memory now."""

    async def get(self) -> None:
        self.app.refresh_monitor()
        ids = self.kernel_manager.list_kernel_ids()
        provisioners = [self.app.provisioner(kernel_id) for kernel_id in ids]
        measured = await asyncio.to_thread(lambda: [models.in_memory(each) for each in provisioners])
        there = self.kernel_manager.list_kernel_ids()  # another request may have ended one meanwhile
        self.reply([{**self.document(id), **memory} for id, memory in zip(ids, measured, strict=True) if id in there])


class KernelHandler(Handler):
    """``kernels/<id>``: one kernel, with its memory now."""

    async def get(self, kernel_id: str) -> None:
        self.app.refresh_monitor()
        provisioner = self.kernel(kernel_id)
        on_device = await asyncio.to_thread(models.on_device, provisioner)
        in_memory = await asyncio.to_thread(models.in_memory, provisioner)
        self.reply({**self.document(kernel_id), **in_memory, "device_bytes": on_device})


class PreflightHandler(Handler):
    """``kernels/<id>/preflight``: whether a checkpoint would be refused now."""

    async def get(self, kernel_id: str) -> None:
        self.reply(await asyncio.to_thread(models.findings, self.checkpointable(kernel_id)))


class VerbHandler(Handler):
    """``kernels/<id>/{suspend,resume,checkpoint,restore}``: begin; 202 with the job."""

    async def post(self, kernel_id: str, verb: str) -> None:
        provisioner, parameters, turn = self.checkpointable(kernel_id), self._parameters(verb), None
        arguments = {name: value for name, value in parameters.items() if name != "when"}
        call = functools.partial(VERBS[verb], provisioner, **arguments)
        if parameters.get("when") == "idle":
            turn = provisioner.once_idle()
        elif verb in ("suspend", "checkpoint"):
            await asyncio.to_thread(lambda: require(models.requests(provisioner)))
        self.reply_started(await self.app.jobs.start(kernel_id, verb, parameters, call, turn))

    def _parameters(self, verb: str) -> dict[str, Any]:
        body = self.body(_PARAMETERS.get(verb, set()))
        if body.get("when", "now") not in ("now", "idle"):
            raise BadRequest('when is "now" or "idle".')
        self.require_gpu_map(body)
        if not isinstance(body.get("accept_changed_files", False), bool):
            raise BadRequest("accept_changed_files is true or false.")
        return body


class BranchHandler(Handler):
    """``kernels/<id>/branch``: what a branch would have otherwise; begin one, 202 with the job."""

    async def get(self, kernel_id: str) -> None:
        name = self.get_query_argument("save_point", "")
        self.reply((await self.checkpointable(kernel_id).branch_plan(name)).as_dict())

    async def post(self, kernel_id: str) -> None:
        """Begin a branch; the job's result has the id of the new kernel, and the path of its notebook."""
        provisioner, body = self.checkpointable(kernel_id), self.body({"save_point", "gpu_map", *BRANCH_FLAGS})
        name = body.get("save_point", "")
        if not isinstance(name, str):
            raise BadRequest("save_point is the name of a save point.")
        if not all(isinstance(body.get(flag, False), bool) for flag in BRANCH_FLAGS):
            raise BadRequest(f"{', '.join(BRANCH_FLAGS)} are true or false.")
        self.require_gpu_map(body)
        how = {field: body[field] for field in ("gpu_map", *BRANCH_FLAGS) if field in body}

        async def branch() -> dict[str, Any]:
            started = await provisioner.branch(name, **how)
            made = self.app.branches.started.get(started)
            return {"kernel_id": started, "notebook": made.notebook if made else ""}

        self.reply_started(await self.app.jobs.start(kernel_id, "branch", body, branch))


class DrainHandler(Handler):
    """``drain``"""

    is_activity = False

    async def get(self) -> None:
        self.reply(await self.app.estimate_drain())

    async def post(self) -> None:
        """Begin to checkpoint every kernel and to verify its image; 202 with the job."""
        self.body(set())
        self.reply_started(await self.app.jobs.start("", "drain", {}, self.app.drain))


class ProtectHandler(Handler):
    """``kernels/<id>/protect``: keep idle policies off the kernel for some seconds from now; 0 ends that."""

    async def post(self, kernel_id: str) -> None:
        provisioner = self.checkpointable(kernel_id)
        body = self.body({"seconds"})
        if "seconds" not in body:
            raise BadRequest("The body must have a field, seconds.")
        self.reply(await asyncio.to_thread(provisioner.agent_requests.protect, body["seconds"]))


class KeepHandler(Handler):
    """``kernels/<id>/keep``: begin the kernel's idleness anew, as a cell would."""

    async def post(self, kernel_id: str) -> None:
        provisioner = self.checkpointable(kernel_id)
        self.body(set())
        if provisioner.state not in (State.RUNNING, State.SUSPENDED, State.OFF_GPU):
            raise StateError(f"The kernel is {provisioner.state.value} already.", hint="The next cell wakes it.")
        self.reply({"policy": self.app.idle.keep(kernel_id)})


class JobHandler(Handler):
    """``jobs/<id>``"""

    async def get(self, id: str) -> None:
        self.reply(self.job(id).as_dict())

    async def delete(self, id: str) -> None:
        """Cancel a job that waits until no cell runs."""
        job = self.job(id)
        self.app.jobs.cancel(job)
        self.reply(job.as_dict())


class GpusHandler(Handler):
    """``gpus``: the GPUs' memory by kernel, now and during the last hour."""

    async def get(self) -> None:
        self.reply(await self.app.usage.document())


class ImagesHandler(Handler):
    """``images``: all images in the image directory."""

    async def get(self) -> None:
        self.reply(
            await asyncio.to_thread(lambda: [models.image(each, self.app.root) for each in self.app.store.images()])
        )


class ImageHandler(Handler):
    """``images/<id>``"""

    async def get(self, id: str) -> None:
        self.reply(await asyncio.to_thread(lambda: models.image(self.image(id), self.app.root)))

    async def delete(self, id: str) -> None:
        """Delete an image; the only copy of a sleeping kernel only with ``force=true``."""
        force = self.get_query_argument("force", "false")
        if force not in ("true", "false"):
            raise BadRequest("force must be true or false.")
        image = await asyncio.to_thread(self.image, id)
        freed = await asyncio.to_thread(models.remove, self.app.store, image, force=force == "true")
        self.reply({"id": id, "bytes": freed})


class AttachHandler(Handler):
    """``images/<id>/attach``: attach the kernel that sleeps in the image; it sleeps on."""

    async def post(self, id: str) -> None:
        self.body(set())
        image = await asyncio.to_thread(self.image, id)
        kernel_id = image.manifest.kernel_id
        if kernel_id not in self.kernel_manager:
            await self.app.attach(image)
        self.reply(self.document(kernel_id))


class OpenapiHandler(Handler):
    """``openapi.yaml``: the description of these routes."""

    async def get(self) -> None:
        self.finish(await asyncio.to_thread(OPENAPI.read_bytes), set_content_type="application/yaml")


HANDLERS: list[tuple[str, type[Handler]]] = [
    (r"gpu-ckpt/status", StatusHandler),
    (r"gpu-ckpt/kernels", KernelsHandler),
    (r"gpu-ckpt/kernels/([^/]+)", KernelHandler),
    (r"gpu-ckpt/kernels/([^/]+)/preflight", PreflightHandler),
    (rf"gpu-ckpt/kernels/([^/]+)/({'|'.join(VERBS)})", VerbHandler),
    (r"gpu-ckpt/kernels/([^/]+)/protect", ProtectHandler),
    (r"gpu-ckpt/kernels/([^/]+)/save", SaveHandler),
    (r"gpu-ckpt/kernels/([^/]+)/back", BackHandler),
    (r"gpu-ckpt/kernels/([^/]+)/saves", SavesHandler),
    (r"gpu-ckpt/kernels/([^/]+)/saves/([^/]+)", SavePointHandler),
    (r"gpu-ckpt/kernels/([^/]+)/saves/([^/]+)/compare", CompareHandler),
    (r"gpu-ckpt/kernels/([^/]+)/keep", KeepHandler),
    (r"gpu-ckpt/kernels/([^/]+)/branch", BranchHandler),
    (r"gpu-ckpt/drain", DrainHandler),
    (r"gpu-ckpt/gpus", GpusHandler),
    (r"gpu-ckpt/jobs/([^/]+)", JobHandler),
    (r"gpu-ckpt/images", ImagesHandler),
    (r"gpu-ckpt/images/([^/]+)", ImageHandler),
    (r"gpu-ckpt/images/([^/]+)/attach", AttachHandler),
    (r"gpu-ckpt/openapi\.yaml", OpenapiHandler),
]
