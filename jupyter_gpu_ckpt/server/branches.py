"""Branches in a server: a new kernel, a copy of the notebook for it, and a session that joins them for front ends."""

# mypy: allow-untyped-calls
# (jupyter_server does not annotate its contents manager)

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from jupyter_core.utils import ensure_async
from jupyter_server.serverapp import ServerApp
from tornado.web import HTTPError

from ..errors import GpuCkptError
from ..image import save_point
from ..image.store import Store
from ..kernel.host import BranchPoint
from . import notebooks


@dataclass(frozen=True)
class Branch:
    """A new kernel; ``notebook`` is the path of its document for the contents API, empty if it has none."""

    kernel_id: str
    notebook: str = ""


class Branches:
    """Starts branches of the kernels of a server."""

    def __init__(self, serverapp: ServerApp, store: Store) -> None:
        self._app, self._store = serverapp, store
        #: Those of this server that run, by the ids of their kernels.
        self.started: dict[str, Branch] = {}

    async def start(self, kernel_id: str, point: BranchPoint) -> str:
        """Start a kernel from an image of kernel ``kernel_id``, with a copy of its notebook; return the new id.

        The copy lies beside the notebook, and is as the notebook was at the point if that was saved with it, else as it
        is now.  After failure there is neither a kernel nor a copy.  Raises as `GpuCkptProvisioner.branch`.
        """
        kernels, sessions = self._app.kernel_manager, self._app.session_manager
        kernel: Any = kernels.get_kernel(kernel_id)
        name = kernel.provisioner.kernelspec_for_branch()
        path = await self._copy_notebook(await notebooks.path_of(self._app, kernel_id), point)
        options: dict[str, Any] = {}
        if path:
            options = {"path": path, "env": sessions.get_kernel_env(path, PurePosixPath(path).name)}
        elif (cwd := getattr(kernel.provisioner, "cwd", None)) is not None:
            options = {"cwd": cwd}
        started = ""
        try:
            started = await kernels.start_kernel(kernel_name=name, branch_of=point, **options)
            fresh: Any = kernels.get_kernel(started)
            fresh.execution_state = "idle"  # it said so before anybody listened
            if path:
                title = PurePosixPath(path).name
                await sessions.create_session(path=path, name=title, type="notebook", kernel_id=started)
        except BaseException:
            if started in kernels:
                await kernels.shutdown_kernel(started, now=True)
            if path:
                with contextlib.suppress(HTTPError, OSError):
                    await ensure_async(self._app.contents_manager.delete(path))
            raise
        self.started = {each: branch for each, branch in self.started.items() if each in kernels}
        self.started[started] = Branch(started, path)
        return started

    async def _copy_notebook(self, path: str, point: BranchPoint) -> str:
        """Copy a notebook to a name of its own; return its path, empty if there is none.  Raises `GpuCkptError`."""
        if not path:
            return ""
        contents = self._app.contents_manager
        try:
            image = await asyncio.to_thread(self._store.get, point.image)
            document = await asyncio.to_thread(save_point.notebook, self._store, image)
            if document is None:
                return str((await ensure_async(contents.copy(path)))["path"])
            directory, _, name = path.rpartition("/")
            free = await ensure_async(contents.increment_filename(name, directory, insert="-Copy"))
            model = {"type": "notebook", "format": "json", "content": json.loads(document)}
            return str((await ensure_async(contents.save(model, f"{directory}/{free}")))["path"])
        except HTTPError as error:
            if error.status_code == 404:  # it was renamed or deleted, or never saved
                return ""
            hint = "Save the notebook under another name, or free space, and try again."
            raise GpuCkptError(f"The notebook could not be copied: {error.log_message}.", hint=hint) from error
