"""REST about save points: ``kernels/<id>/{save,back,saves}``; and the notebook documents that are kept with them."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from jupyter_server.serverapp import ServerApp

from ..errors import BadRequest, GpuCkptError
from ..image import save_point
from ..image.image import Image
from ..kernel.provisioner import GpuCkptProvisioner
from ..lifecycle import going_back
from ..lifecycle.preflight import require
from . import models
from .base_handler import Handler

#: Seconds that a save waits for the notebook's document.
_TIMEOUT = 10.0


async def document(serverapp: ServerApp, kernel_id: str) -> bytes | None:
    """Return the notebook of a kernel as it was last written, with its outputs; None where there is none."""
    try:
        sessions = await serverapp.session_manager.list_sessions()
        path = next((each["path"] for each in sessions if each["kernel"]["id"] == kernel_id), None)
        contents: Any = serverapp.contents_manager
        if path is None or not await _awaited(contents.file_exists(path)):
            return None
        model = await _awaited(contents.get(path, content=True, type="notebook"))
        return json.dumps(model["content"]).encode()
    except Exception as error:  # of any contents manager: the variables are saved all the same
        serverapp.log.warning("The notebook of kernel %s is not saved: %s", kernel_id, type(error).__name__)
        return None


async def _awaited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def document_for_threads(serverapp: ServerApp, kernel_id: str) -> Callable[[], bytes | None]:
    """Return a function that returns `document` on another thread than the event loop's."""

    def wait_for_document() -> bytes | None:
        loop: Any = serverapp.io_loop
        future = asyncio.run_coroutine_threadsafe(document(serverapp, kernel_id), loop.asyncio_loop)
        try:
            return future.result(_TIMEOUT)
        except FutureTimeout:  # not the builtin class until Python 3.11
            future.cancel()
            return None

    return wait_for_document


class SaveHandler(Handler):
    """``kernels/<id>/save``: begin to make a save point; 202 with the job."""

    async def post(self, kernel_id: str) -> None:
        provisioner, parameters = self.checkpointable(kernel_id), self.body({"name", "when"})
        name, turn = _name(parameters), None
        images = await asyncio.to_thread(self.app.store.images)
        save_point.require_free_name(images, kernel_id, name)
        if _when(parameters) == "idle":
            turn = provisioner.once_idle()
        else:
            await asyncio.to_thread(lambda: require(models.requests(provisioner)))

        async def save() -> dict[str, Any]:
            image = await provisioner.save(name, await document(self.serverapp, kernel_id))
            return save_point.described(image)

        self.reply_started(self.app.jobs.start(kernel_id, "save", parameters, save, turn))


class BackHandler(Handler):
    """``kernels/<id>/back``: begin to go back to a save point; 202 with the job."""

    async def post(self, kernel_id: str) -> None:
        provisioner, parameters = self.checkpointable(kernel_id), self.body({"name", "files", "when"})
        name, files, turn = _name(parameters), going_back.require_choice(parameters.get("files")), None
        await asyncio.to_thread(_check, provisioner, name, files)
        if _when(parameters) == "idle":
            turn = provisioner.once_idle()
        else:
            await asyncio.to_thread(lambda: require(models.requests(provisioner)))

        async def back() -> dict[str, Any]:
            before = await provisioner.back(name, files, await document(self.serverapp, kernel_id))
            return save_point.described(before)

        self.reply_started(self.app.jobs.start(kernel_id, "back", parameters, back, turn))


class SavesHandler(Handler):
    """``kernels/<id>/saves``: the save points of a kernel, oldest first."""

    async def get(self, kernel_id: str) -> None:
        self.checkpointable(kernel_id)
        images = await asyncio.to_thread(self.app.store.images)
        self.reply([save_point.described(each) for each in save_point.of_kernel(images, kernel_id).values()])


class SavePointHandler(Handler):
    """``kernels/<id>/saves/<name>``"""

    async def get(self, kernel_id: str, name: str) -> None:
        """Reply with the save point, and the notebook as it was."""
        image = await asyncio.to_thread(self._find, kernel_id, name)
        content = await asyncio.to_thread(save_point.notebook, self.app.store, image)
        self.reply({**save_point.described(image), "notebook": json.loads(content) if content else None})

    async def delete(self, kernel_id: str, name: str) -> None:
        image = await asyncio.to_thread(self._find, kernel_id, name)
        freed = await asyncio.to_thread(functools.partial(models.remove, self.app.store, image, force=False))
        self.reply({"name": name, "bytes": freed})

    def _find(self, kernel_id: str, name: str) -> Image:
        self.checkpointable(kernel_id)
        return save_point.find(self.app.store.images(), kernel_id, name)


class CompareHandler(Handler):
    """``kernels/<id>/saves/<name>/compare``: the variables that differ from another save point, or from the kernel."""

    async def get(self, kernel_id: str, name: str) -> None:
        provisioner, other = self.checkpointable(kernel_id), self.get_query_argument("to", "")
        images = await asyncio.to_thread(self.app.store.images)
        before, *others = (
            save_point.of_image(save_point.find(images, kernel_id, each)) for each in (name, other) if each
        )
        if not others:
            await asyncio.to_thread(lambda: require(models.requests(provisioner)))
            others = [save_point.from_summary(await provisioner.summary())]
        assert before is not None
        assert others[0] is not None
        self.reply({"from": name, "to": other or None, **save_point.compare(before, others[0])})


def _check(provisioner: GpuCkptProvisioner, name: str, files: Any) -> None:
    """Raise what prevents a kernel from going back, as far as it shows while the kernel runs."""
    if (lifecycle := provisioner.lifecycle) is None:
        raise GpuCkptError("The kernel was ended.", hint="Try again.")
    point = save_point.find(lifecycle.engine.store.images(), lifecycle.home.kernel_id, name)
    if not point.archived:  # else its content is fetched first
        going_back.check(lifecycle.kernel, point, files)


def _name(parameters: dict[str, Any]) -> str:
    if not isinstance(name := parameters.get("name"), str):
        raise BadRequest("The body must have a field, name, which is a text.")
    return name


def _when(parameters: dict[str, Any]) -> str:
    if (when := parameters.get("when", "now")) not in ("now", "idle"):
        raise BadRequest('when is "now" or "idle".')
    return str(when)
