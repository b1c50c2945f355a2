"""The base of the handlers of REST: users, permissions, bodies, and replies to errors.

Every verb needs a user (`authenticated`) with permission (`authorized`, resource ``gpu_ckpt``), and an XSRF token where
jupyter_server requires one.  A GET is not counted as a user's activity.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Awaitable, Callable, Mapping
from http.client import responses
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
from . import models
from .branches import Branches
from .gpu_usage import GpuUsage
from .idle.loop import IdlePolicy
from .jobs import Job, Jobs
from .monitor import KernelMonitor

METHODS = {"delete", "get", "post"}


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
        """Called for all other errors, also of jupyter_server.  RFC 9110: a 405 names the methods that are allowed."""
        if status_code == 405:
            self.set_header("Allow", ", ".join(sorted(METHODS & vars(type(self)).keys())).upper())
        foreign = kwargs.get("exc_info", (None, None))[1]
        if isinstance(foreign, web.HTTPError):
            message = foreign.log_message or foreign.reason or responses.get(status_code, "Unknown HTTP error")
            error: GpuCkptError = BadRequest(message) if status_code < 500 else GpuCkptError(message, hint="")
        else:
            error = GpuCkptError("Unhandled error")
        self.log.warning("wrote error: %r", error.message)
        self.set_header("Content-Type", "application/json")
        self.reply({"message": error.message, "error": error.as_dict()})

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

    @staticmethod
    def require_gpu_map(body: Mapping[str, Any]) -> None:
        """Raise `BadRequest` for a body whose ``gpu_map`` does not map GPUs."""
        mapping = body.get("gpu_map", {})
        if not isinstance(mapping, dict) or not all(isinstance(uuid, str) for uuid in mapping.values()):
            raise BadRequest("gpu_map must map GPU UUIDs to GPU UUIDs.")

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
