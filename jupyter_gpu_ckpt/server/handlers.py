"""REST under ``<base_url>gpu-ckpt/``, as ``openapi.yaml`` describes it.

Every verb needs a user (`authenticated`) with permission (`authorized`, resource ``gpu_ckpt``), and an XSRF token where
jupyter_server requires one.  A GET is not counted as a user's activity.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from jupyter_server.extension.handler import ExtensionHandlerMixin
from jupyter_server.utils import url_path_join
from tornado import web

from ..errors import BadRequest, GpuCkptError, StateError
from ..image.store import Image, Store
from ..kernel.provisioner import GpuCkptProvisioner
from ..lifecycle.plans import State
from ..lifecycle.preflight import require
from . import models
from .branches import Branches
from .gpu_usage import GpuUsage
from .idle.loop import IdlePolicy
from .jobs import Job, Jobs
from .monitor import KernelMonitor

OPENAPI = Path(__file__).with_name("openapi.yaml")
METHODS = {"delete", "get", "post"}
_PARAMETERS = {"restore": {"gpu_map", "accept_changed_files"}, "suspend": {"when"}, "checkpoint": {"when"}}
#: Fields of a request for a branch, and those of `BranchPoint`.
_BRANCH_FLAGS = {
    "reseed": "reseed",
    "accept_differences": "accepts_differences",
    "accept_changed_files": "accept_changed_files",
}

#: The method that a request of each verb runs.
VERBS: Mapping[str, Callable[..., Awaitable[Any]]] = {
    "suspend": GpuCkptProvisioner.suspend,
    "resume": GpuCkptProvisioner.resume,
    "checkpoint": GpuCkptProvisioner.checkpoint,
    "restore": GpuCkptProvisioner.restore,
}


class Extension(Protocol):
    """The part of `app.GpuCkptApp` that handlers use."""

    store: Store
    jobs: Jobs
    branches: Branches
    monitor: KernelMonitor
    usage: GpuUsage
    idle: IdlePolicy

    @property
    def root(self) -> Path: ...
    def provisioner(self, kernel_id: str) -> GpuCkptProvisioner | None: ...
    def refresh_monitor(self) -> None: ...
    async def attach(self, image: Image) -> None: ...
    async def drain(self) -> dict[str, Any]: ...
    async def estimate_drain(self) -> dict[str, Any]: ...
    async def status(self) -> dict[str, Any]: ...


def _endpoint(method: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Require a user who is authorized, and turn our errors into replies with code, hint and what was left behind."""

    @functools.wraps(method)
    async def reply_with_errors(self: Handler, *args: str) -> None:
        try:
            await method(self, *args)
        except GpuCkptError as error:
            self.set_status(models.http_status(error))
            self.reply({"message": error.message, "error": error.as_dict()})

    return cast(Callable[..., Awaitable[None]], web.authenticated(authorized(reply_with_errors)))


class Handler(ExtensionHandlerMixin, APIHandler):
    """Base of all handlers of this package; their methods are made endpoints (`_endpoint`)."""

    auth_resource = "gpu_ckpt"
    #: Whether a POST or DELETE counts as the user's activity: a hub's request to a server that it will stop does not.
    is_activity = True

    def __init_subclass__(cls) -> None:
        for name in METHODS & vars(cls).keys():
            setattr(cls, name, _endpoint(getattr(cls, name)))

    async def prepare(self) -> None:  # type: ignore[override]
        self._track_activity = self.is_activity and self.request.method not in ("GET", "HEAD")
        await super().prepare()

    @property
    def app(self) -> Extension:
        app: Extension = self.settings[self.name]
        return app

    def reply(self, document: Any) -> None:
        self.finish(json.dumps(document))

    def reply_started(self, job: Job) -> None:
        """Finish with 202, a job and its location."""
        self.set_status(202)
        self.set_header("Location", url_path_join(self.base_url, "gpu-ckpt", "jobs", job.id))
        self.reply(job.as_dict())

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Called for all other errors.  RFC 9110: a 405 names the methods that are allowed."""
        if status_code == 405:
            self.set_header("Allow", ", ".join(sorted(METHODS & vars(type(self)).keys())).upper())
        super().write_error(status_code, **kwargs)

    def body(self, allowed: set[str]) -> dict[str, Any]:
        """Return the request's JSON object, empty if there is none.  Raises `BadRequest`."""
        if not self.request.body.strip():
            return {}
        try:
            body: Any = json.loads(self.request.body)
        except (ValueError, RecursionError) as error:
            raise BadRequest("The body is not JSON.") from error
        if not isinstance(body, dict) or not set(body) <= allowed:
            fields = f", which may have: {', '.join(sorted(allowed))}" if allowed else " without fields"
            raise BadRequest(f"The body may be empty or an object{fields}.")
        return body

    def image(self, id: str) -> Image:
        """Return the image of that id.  Reads the disk.  Raises `BadRequest` for an invalid id, and as `Store.get`."""
        if not id.isprintable():
            raise BadRequest("An image's id has no control characters.")
        return self.app.store.get(id)

    def kernel(self, kernel_id: str) -> GpuCkptProvisioner | None:
        """Return the kernel's provisioner if it is ours.  404 when there is no such kernel."""
        if kernel_id not in self.kernel_manager:
            raise web.HTTPError(404, f"Kernel does not exist: {kernel_id}")
        return self.app.provisioner(kernel_id)

    def checkpointable(self, kernel_id: str) -> GpuCkptProvisioner:
        """Return the kernel's provisioner.  404 when there is no such kernel, `StateError` if it is a plain one."""
        provisioner = self.kernel(kernel_id)
        if provisioner is None or provisioner.lifecycle is None:
            raise StateError(models.why_not(provisioner))
        return provisioner

    def document(self, kernel_id: str) -> dict[str, Any]:
        provisioner, app = self.kernel(kernel_id), self.app
        name = self.kernel_manager.get_kernel(kernel_id).kernel_name
        monitored, job = app.monitor.kernels.get(kernel_id), app.jobs.of_kernel(kernel_id)
        return models.kernel(kernel_id, name, provisioner, monitored, job, app.idle.outlook(kernel_id))

    def job(self, id: str) -> Job:
        """Return the job.  404 when there is none."""
        if (job := self.app.jobs.get(id)) is None:
            raise web.HTTPError(404, "There is no such job, or it ended long ago.")
        return job


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
        self.reply_started(self.app.jobs.start(kernel_id, verb, parameters, call, turn))

    def _parameters(self, verb: str) -> dict[str, Any]:
        body = self.body(_PARAMETERS.get(verb, set()))
        if body.get("when", "now") not in ("now", "idle"):
            raise BadRequest('when is "now" or "idle".')
        mapping = body.get("gpu_map", {})
        if not isinstance(mapping, dict) or not all(isinstance(uuid, str) for uuid in mapping.values()):
            raise BadRequest("gpu_map must map GPU UUIDs to GPU UUIDs.")
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
        provisioner, body = self.checkpointable(kernel_id), self.body({"save_point", *_BRANCH_FLAGS})
        name = body.get("save_point", "")
        if not isinstance(name, str):
            raise BadRequest("save_point is the name of a save point.")
        if not all(isinstance(body.get(flag, False), bool) for flag in _BRANCH_FLAGS):
            raise BadRequest(f"{', '.join(_BRANCH_FLAGS)} are true or false.")
        flags = {_BRANCH_FLAGS[flag]: body[flag] for flag in _BRANCH_FLAGS if flag in body}

        async def branch() -> dict[str, Any]:
            started = await provisioner.branch(name, **flags)
            made = self.app.branches.started.get(started)
            return {"kernel_id": started, "notebook": made.notebook if made else ""}

        self.reply_started(self.app.jobs.start(kernel_id, "branch", body, branch))


class DrainHandler(Handler):
    """``drain``"""

    is_activity = False

    async def get(self) -> None:
        self.reply(await self.app.estimate_drain())

    async def post(self) -> None:
        """Begin to checkpoint every kernel and to verify its image; 202 with the job."""
        self.body(set())
        self.reply_started(self.app.jobs.start("", "drain", {}, self.app.drain))


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
        if provisioner.state not in (State.RUNNING, State.SUSPENDED):
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
