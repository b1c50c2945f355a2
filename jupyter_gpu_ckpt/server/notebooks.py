"""The notebook of a kernel, through the contents manager: read for its save points, and replaced by one of theirs.

It is replaced last, once its kernel is back, and only if it still is what the save point of the present state has: a
server that is killed in between, and another program that writes it, leave the notebook as it was.
"""

# mypy: allow-untyped-calls
# (jupyter_server does not annotate its contents manager)

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from jupyter_core.utils import ensure_async
from jupyter_server.serverapp import ServerApp
from tornado.web import HTTPError

from ..errors import NotebookNotReplaced

#: Seconds that a save waits for the notebook's document.
_TIMEOUT = 10.0


async def path_of(serverapp: ServerApp, kernel_id: str) -> str:
    """Return the path of a kernel's notebook for the contents API; empty if it has none."""
    for session in await ensure_async(serverapp.session_manager.list_sessions()):
        if session["kernel"]["id"] == kernel_id and session["type"] == "notebook":
            return str(session["path"])
    return ""


async def document(serverapp: ServerApp, kernel_id: str) -> bytes | None:
    """Return the notebook of a kernel as it was last written, with its outputs; None where there is none."""
    try:
        path = await path_of(serverapp, kernel_id)
        if not path or not await ensure_async(serverapp.contents_manager.file_exists(path)):
            return None
        return json.dumps(await _read(serverapp, path)).encode()
    except Exception as error:  # of any contents manager: the variables are saved all the same
        serverapp.log.warning("The notebook of kernel %s is not saved: %s", kernel_id, type(error).__name__)
        return None


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


async def require(serverapp: ServerApp, kernel_id: str) -> tuple[str, bytes]:
    """Return path and content of the notebook of a kernel.

    Raises `NotebookNotReplaced` where there is none or it cannot be read: it could not be kept before it is replaced.
    """
    left = "the kernel runs on"
    if not (path := await path_of(serverapp, kernel_id)):
        raise NotebookNotReplaced("No notebook of this server has the kernel.", left=left)
    try:
        return path, json.dumps(await _read(serverapp, path)).encode()
    except Exception as error:
        message = f"{path} cannot be read as it is now, to be kept: {_why(error)}."
        raise NotebookNotReplaced(message, left=left) from error


async def replace(serverapp: ServerApp, path: str, present: bytes, wanted: bytes) -> None:
    """Replace a notebook by ``wanted`` if it is still as in ``present``, which is kept.

    Raises `NotebookNotReplaced`.  After failure the file is as it was found, as far as the contents manager keeps it.
    """
    left = f"the kernel is back at the save point, {path} is as it is on the disk"
    try:
        found, content = await _read(serverapp, path), json.loads(wanted)
        if found == content:
            return
        if found != json.loads(present):
            hint = "Save the notebook and go back once more."
            raise NotebookNotReplaced(f"{path} was changed while the kernel went back.", hint=hint, left=left)
        await ensure_async(
            serverapp.contents_manager.save({"type": "notebook", "format": "json", "content": content}, path)
        )
    except NotebookNotReplaced:
        raise
    except Exception as error:  # of any contents manager
        raise NotebookNotReplaced(f"{path} was not replaced: {_why(error)}.", left=left) from error


async def _read(serverapp: ServerApp, path: str) -> Any:
    """Return the content of a notebook as JSON objects.  Raises what the contents manager raises."""
    return (await ensure_async(serverapp.contents_manager.get(path, content=True, type="notebook")))["content"]


def _why(error: Exception) -> str:
    reason = error.log_message or error.reason if isinstance(error, HTTPError) else None
    return str(reason or error or type(error).__name__).rstrip(".")
