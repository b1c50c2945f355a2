"""REST about save points: ``kernels/<id>/{save,back,saves}``."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import Mapping
from typing import Any

from ..errors import BadRequest, GpuCkptError, NotebookNotReplaced, SavePointNotFound
from ..image import save_point
from ..image.image import Image
from ..kernel.provisioner import GpuCkptProvisioner
from ..lifecycle import going_back
from ..lifecycle.context import FilesChoice
from ..lifecycle.preflight import require
from . import models, notebooks
from .base_handler import Handler

_BACK = "the kernel is back at it"
#: Seconds between two looks for a save point that is being saved.
_LOOK_S = 0.05


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
            image = await provisioner.save(name, await notebooks.document(self.serverapp, kernel_id))
            return save_point.described(image)

        self.reply_started(await self.app.jobs.start(kernel_id, "save", parameters, save, turn))


class BackHandler(Handler):
    """``kernels/<id>/back``: begin to go back to a save point; 202 with the job."""

    async def post(self, kernel_id: str) -> None:
        fields = {"name", "files", "when", "notebook", "gpu_map"}
        provisioner, parameters = self.checkpointable(kernel_id), self.body(fields)
        name, files, turn = _name(parameters), going_back.require_choice(parameters.get("files")), None
        if not isinstance(with_notebook := parameters.get("notebook", False), bool):
            raise BadRequest("notebook is true or false.")
        self.require_gpu_map(parameters)
        gpu_map = parameters.get("gpu_map")
        point = await self._checked(provisioner, name, files, gpu_map)
        if with_notebook:
            await self._require_notebooks(kernel_id, point)
        if _when(parameters) == "idle":
            turn = provisioner.once_idle()
        else:
            await asyncio.to_thread(lambda: require(models.requests(provisioner)))

        async def back() -> dict[str, Any]:
            if with_notebook:
                return await self._back_with_notebook(provisioner, name, files, point, gpu_map)
            document = await notebooks.document(self.serverapp, kernel_id)
            before = await provisioner.back(name, files, document, gpu_map=gpu_map)
            return {**save_point.described(before), "notebook": "", "notebook_error": None}

        self.reply_started(await self.app.jobs.start(kernel_id, "back", parameters, back, turn))

    async def _checked(self, provisioner: GpuCkptProvisioner, *choices: Any) -> Image:
        """Return the save point, as `_check`; one that is being saved, or that a cell has requested, is waited for."""
        while provisioner.is_saving or self.app.jobs.is_under_way(provisioner.kernel_id, "save"):
            with contextlib.suppress(SavePointNotFound):
                return await asyncio.to_thread(_check, provisioner, *choices)
            await asyncio.sleep(_LOOK_S)
        return await asyncio.to_thread(_check, provisioner, *choices)

    async def _require_notebooks(self, kernel_id: str, point: Image) -> tuple[str, bytes]:
        """Return path and content of the present notebook.  Raises `NotebookNotReplaced` if one of both is missing."""
        if not save_point.has_notebook(point):
            raise NotebookNotReplaced("The save point has no notebook.", left="the kernel runs on")
        return await notebooks.require(self.serverapp, kernel_id)

    async def _back_with_notebook(
        self,
        provisioner: GpuCkptProvisioner,
        name: str,
        files: FilesChoice,
        point: Image,
        gpu_map: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Go back, then replace the notebook, which is kept with the present state; return the job's result."""
        store = self.app.store
        path, present = await self._require_notebooks(point.manifest.kernel_id, point)
        # Before: the save point may be an automatic one that is too many afterwards.
        wanted = None if point.archived else await asyncio.to_thread(save_point.notebook, store, point)
        before = await provisioner.back(name, files, present, gpu_map=gpu_map)
        error = None
        try:
            if before.path.exists() and await asyncio.to_thread(save_point.notebook, store, before) != present:
                # The image that the kernel slept in is encrypted, or was a save point already.
                raise NotebookNotReplaced("The state before was saved without this notebook.", left=_BACK)
            if wanted is None:  # its content was in the cold tier until now
                wanted = await asyncio.to_thread(save_point.notebook, store, point)
            if wanted is None:
                raise NotebookNotReplaced("The save point has no notebook.", left=_BACK)
            await notebooks.replace(self.serverapp, path, present, wanted)
        except Exception as failure:  # the kernel is back all the same
            error = GpuCkptError.from_exception(failure).as_dict()
        return {**save_point.described(before), "notebook": "" if error else path, "notebook_error": error}


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


def _check(provisioner: GpuCkptProvisioner, name: str, files: FilesChoice, gpu_map: Mapping[str, str] | None) -> Image:
    """Return the save point.  Raises what prevents a kernel from going back, as far as it shows while it runs."""
    if (lifecycle := provisioner.lifecycle) is None:
        raise GpuCkptError("The kernel was ended.", hint="Try again.")
    point = save_point.find(lifecycle.engine.store.images(), lifecycle.home.kernel_id, name)
    if not point.archived:  # else its content is fetched first
        going_back.check(lifecycle.kernel, point, files, gpu_map)
    return point


def _name(parameters: dict[str, Any]) -> str:
    if not isinstance(name := parameters.get("name"), str):
        raise BadRequest("The body must have a field, name, which is a text.")
    return name


def _when(parameters: dict[str, Any]) -> str:
    if (when := parameters.get("when", "now")) not in ("now", "idle"):
        raise BadRequest('when is "now" or "idle".')
    return str(when)
