"""REST under ``<base_url>gpu-ckpt/``, as ``openapi.yaml`` describes it.

Every verb needs a user (`authenticated`) who may do it (`authorized`, resource ``gpu_ckpt``), and the XSRF token where
jupyter_server asks for one.  A GET is a program's question, not a user's activity.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from jupyter_server.extension.handler import ExtensionHandlerMixin
from jupyter_server.utils import url_path_join
from tornado import web

from ..errors import BadRequest, GpuCkptError, StateError
from ..image.store import Image, Store
from ..kernel.provisioner import GpuCkptProvisioner
from . import models
from .gpu_usage import GpuUsage
from .idle.loop import IdlePolicy
from .jobs import Jobs
from .monitor import Watcher

OPENAPI = Path(__file__).with_name("openapi.yaml")
VERBS = ("suspend", "resume", "checkpoint", "restore")
_LEAVING = ("suspend", "checkpoint")
_PARAMETERS = {"restore": {"gpu_map", "accept_changed_files"}, "suspend": {"when"}, "checkpoint": {"when"}}

Method = Callable[..., Awaitable[None]]


class Extension(Protocol):
    """What requests are answered with: `app.GpuCkptApp`."""

    store: Store
    jobs: Jobs
    watcher: Watcher
    usage: GpuUsage
    idle: IdlePolicy

    @property
    def root(self) -> Path:
        """What paths of notebooks are relative to."""

    def provisioner(self, kernel_id: str) -> GpuCkptProvisioner | None:
        """The provisioner of a kernel, if it is ours."""

    def look(self) -> None:
        """Watch the kernels there are now."""

    async def adopt(self, image: Image) -> None:
        """Serve the kernel that sleeps in an image."""

    async def park(self) -> dict[str, Any]:
        """Have every kernel sleep in a proved image."""

    async def need(self) -> dict[str, Any]:
        """What `park` would need now."""

    async def status(self) -> dict[str, Any]:
        """The document of ``status``."""


def _told(method: Method) -> Method:
    """Our errors become replies with their own code, hint and what was left behind."""

    @functools.wraps(method)
    async def inner(self: Handler, *args: str) -> None:
        try:
            await method(self, *args)
        except GpuCkptError as error:
            self.set_status(models.http_status(error))
            self.reply({"message": error.message, "error": error.as_dict()})

    return inner


class Handler(ExtensionHandlerMixin, APIHandler):
    """What all of ours share."""

    auth_resource = "gpu_ckpt"
    #: Whether a verb is the user's activity: what a hub asks of a server it is about to stop is none.
    counts = True

    async def prepare(self) -> None:  # type: ignore[override]
        """Called before each request."""
        self._track_activity = self.counts and self.request.method not in ("GET", "HEAD")
        await super().prepare()

    @property
    def app(self) -> Extension:
        """The extension."""
        app: Extension = self.settings[self.name]
        return app

    def reply(self, document: Any) -> None:
        """Finish with a JSON document."""
        self.finish(json.dumps(document))

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Called for whatever else goes wrong.  RFC 9110: a 405 names what is allowed."""
        if status_code == 405:
            self.set_header("Allow", ", ".join(sorted(name for name in ("GET", "POST", "DELETE") if self._has(name))))
        super().write_error(status_code, **kwargs)

    def _has(self, method: str) -> bool:
        return method.lower() in vars(type(self))

    def body(self, allowed: set[str]) -> dict[str, Any]:
        """The request's JSON object, empty if there is none.  Raises `BadRequest`."""
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
        """The image of that id.  Asks the disk.  Raises `BadRequest` for what cannot be an id, and as `Store.get`."""
        if not id.isprintable():
            raise BadRequest("An image's id has no control characters.")
        return self.app.store.get(id)

    def kernel(self, kernel_id: str) -> GpuCkptProvisioner | None:
        """The kernel's provisioner if it is ours.  404 when there is no such kernel."""
        if kernel_id not in self.kernel_manager:
            raise web.HTTPError(404, f"Kernel does not exist: {kernel_id}")
        return self.app.provisioner(kernel_id)

    def document(self, kernel_id: str) -> dict[str, Any]:
        """The kernel's document."""
        provisioner = self.kernel(kernel_id)
        name = self.kernel_manager.get_kernel(kernel_id).kernel_name
        watched, job = self.app.watcher.kernels.get(kernel_id), self.app.jobs.of_kernel(kernel_id)
        return models.kernel(kernel_id, name, provisioner, watched, job, self.app.idle.outlook(kernel_id))


class StatusHandler(Handler):
    """``status``"""

    @web.authenticated
    @authorized
    @_told
    async def get(self) -> None:
        """The host, its GPUs, the policy, and how many kernels are in which state."""
        self.reply(await self.app.status())


class KernelsHandler(Handler):
    """``kernels``"""

    @web.authenticated
    @authorized
    @_told
    async def get(self) -> None:
        """All kernels of this server."""
        self.app.look()
        self.reply([self.document(kernel_id) for kernel_id in self.kernel_manager.list_kernel_ids()])


class KernelHandler(Handler):
    """``kernels/<id>``"""

    @web.authenticated
    @authorized
    @_told
    async def get(self, kernel_id: str) -> None:
        """One kernel, with the device memory it holds now."""
        self.app.look()
        provisioner = self.kernel(kernel_id)
        held = await asyncio.to_thread(models.on_device, provisioner)
        self.reply({**self.document(kernel_id), "device_bytes": held})


class PreflightHandler(Handler):
    """``kernels/<id>/preflight``"""

    @web.authenticated
    @authorized
    @_told
    async def get(self, kernel_id: str) -> None:
        """Whether a checkpoint would be refused now."""
        self.reply(await asyncio.to_thread(models.findings, self.kernel(kernel_id)))


class VerbHandler(Handler):
    """``kernels/<id>/{suspend,resume,checkpoint,restore}``"""

    @web.authenticated
    @authorized
    @_told
    async def post(self, kernel_id: str, verb: str) -> None:
        """Begin; 202 with the job."""
        provisioner = self.kernel(kernel_id)
        if provisioner is None or provisioner.lifecycle is None:
            raise StateError(models.why_not(provisioner))
        parameters = self._parameters(verb)
        arguments = {name: value for name, value in parameters.items() if name != "when"}
        call = functools.partial(_call, provisioner, verb, arguments)
        moment = None
        if parameters.get("when") == "idle":
            moment = provisioner.once_idle()
        elif verb in _LEAVING:
            await asyncio.to_thread(models.require_no_cell, provisioner)
        job = self.app.jobs.start(kernel_id, verb, parameters, call, moment)
        self.set_status(202)
        self.set_header("Location", url_path_join(self.base_url, "gpu-ckpt", "jobs", job.id))
        self.reply(job.as_dict())

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


async def _call(provisioner: GpuCkptProvisioner, verb: str, parameters: dict[str, Any]) -> None:
    call: Callable[..., Awaitable[Any]] = getattr(provisioner, verb)
    await call(**parameters)


class ParkHandler(Handler):
    """``park``"""

    counts = False

    @web.authenticated
    @authorized
    @_told
    async def get(self) -> None:
        """What parking this server would need now."""
        self.reply(await self.app.need())

    @web.authenticated
    @authorized
    @_told
    async def post(self) -> None:
        """Begin to checkpoint every kernel and to prove its image; 202 with the job."""
        self.body(set())
        job = self.app.jobs.start("", "park", {}, self.app.park)
        self.set_status(202)
        self.set_header("Location", url_path_join(self.base_url, "gpu-ckpt", "jobs", job.id))
        self.reply(job.as_dict())


class ProtectHandler(Handler):
    """``kernels/<id>/protect``"""

    @web.authenticated
    @authorized
    @_told
    async def post(self, kernel_id: str) -> None:
        """Keep idle policies off the kernel for some seconds from now; 0 ends that."""
        provisioner = self.kernel(kernel_id)
        if provisioner is None or provisioner.lifecycle is None:
            raise StateError(models.why_not(provisioner))
        body = self.body({"seconds"})
        if "seconds" not in body:
            raise BadRequest("The body must have a field, seconds.")
        self.reply(await asyncio.to_thread(provisioner.agent_requests.protect, body["seconds"]))


class JobHandler(Handler):
    """``jobs/<id>``"""

    @web.authenticated
    @authorized
    @_told
    async def get(self, id: str) -> None:
        """One job."""
        job = self.app.jobs.get(id)
        if job is None:
            raise web.HTTPError(404, "There is no such job, or it ended long ago.")
        self.reply(job.as_dict())

    @web.authenticated
    @authorized
    @_told
    async def delete(self, id: str) -> None:
        """Call off a job that waits for its moment."""
        job = self.app.jobs.get(id)
        if job is None:
            raise web.HTTPError(404, "There is no such job, or it ended long ago.")
        self.app.jobs.cancel(job)
        self.reply(job.as_dict())


class GpusHandler(Handler):
    """``gpus``"""

    @web.authenticated
    @authorized
    @_told
    async def get(self) -> None:
        """Who holds the GPUs' memory, now and during the last hour."""
        self.reply(await self.app.usage.document())


class ImagesHandler(Handler):
    """``images``"""

    @web.authenticated
    @authorized
    @_told
    async def get(self) -> None:
        """All images in the image directory."""
        self.reply(await asyncio.to_thread(models.images, self.app.store, self.app.root))


class ImageHandler(Handler):
    """``images/<id>``"""

    @web.authenticated
    @authorized
    @_told
    async def get(self, id: str) -> None:
        """One image."""
        self.reply(await asyncio.to_thread(lambda: models.image(self.image(id), self.app.root)))

    @web.authenticated
    @authorized
    @_told
    async def delete(self, id: str) -> None:
        """Delete it.  The only copy of a sleeping kernel only with ``force=true``."""
        force = self.get_query_argument("force", "false")
        if force not in ("true", "false"):
            raise BadRequest("force must be true or false.")
        image = await asyncio.to_thread(self.image, id)
        freed = await asyncio.to_thread(models.remove, self.app.store, image, force=force == "true")
        self.reply({"id": id, "bytes": freed})


class AdoptHandler(Handler):
    """``images/<id>/adopt``"""

    @web.authenticated
    @authorized
    @_told
    async def post(self, id: str) -> None:
        """Take over the kernel that sleeps in the image; it sleeps on."""
        self.body(set())
        image = await asyncio.to_thread(self.image, id)
        kernel_id = image.manifest.kernel_id
        if kernel_id not in self.kernel_manager:
            await self.app.adopt(image)
        self.reply(self.document(kernel_id))


class OpenapiHandler(Handler):
    """``openapi.yaml``"""

    @web.authenticated
    @authorized
    @_told
    async def get(self) -> None:
        """The description of all this."""
        self.finish(await asyncio.to_thread(OPENAPI.read_bytes), set_content_type="application/yaml")


HANDLERS: list[tuple[str, type[Handler]]] = [
    (r"gpu-ckpt/status", StatusHandler),
    (r"gpu-ckpt/kernels", KernelsHandler),
    (r"gpu-ckpt/kernels/([^/]+)", KernelHandler),
    (r"gpu-ckpt/kernels/([^/]+)/preflight", PreflightHandler),
    (rf"gpu-ckpt/kernels/([^/]+)/({'|'.join(VERBS)})", VerbHandler),
    (r"gpu-ckpt/kernels/([^/]+)/protect", ProtectHandler),
    (r"gpu-ckpt/park", ParkHandler),
    (r"gpu-ckpt/gpus", GpusHandler),
    (r"gpu-ckpt/jobs/([^/]+)", JobHandler),
    (r"gpu-ckpt/images", ImagesHandler),
    (r"gpu-ckpt/images/([^/]+)", ImageHandler),
    (r"gpu-ckpt/images/([^/]+)/adopt", AdoptHandler),
    (r"gpu-ckpt/openapi\.yaml", OpenapiHandler),
]
