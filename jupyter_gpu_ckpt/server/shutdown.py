"""A server stops and its kernels stay: checkpointed on the way down, adopted on the way up, watched over in between.

Which kernels come back: those of this user on this host that no server owns and that were started in or below this
server's root directory, or by a server of that root directory.  Their sessions (notebook path and name) are kept in a
database of ours, where the user configured none.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock, Timeout
from traitlets import Bool, Float
from traitlets.config import LoggingConfigurable

from ..errors import GpuCkptError
from ..image.store import Store
from ..kernel.adoption import Orphan, find_all
from ..kernel.provisioner import GpuCkptProvisioner
from ..lifecycle.machine import State
from ..paths import data_directory
from . import drain, models


class Kernels(Protocol):
    """What is needed of the server's kernel manager (`AsyncMappingKernelManager`)."""

    async def start_kernel(self, **kwargs: Any) -> str:
        """Start a kernel; ours adopts one of that id that nobody owns."""

    def get_kernel(self, kernel_id: str) -> Any:
        """The manager of one kernel."""


class Comeback(LoggingConfigurable):
    """Adopts at the start, checkpoints at the stop; a part of the server extension."""

    checkpoint_on_stop = Bool(
        True,
        help="Checkpoint the kernels when the server stops, for the next one to adopt; else those that are awake end "
        "with it.",
    ).tag(config=True)
    adopt = Bool(True, help="Adopt kernels that an earlier server left, when this one starts.").tag(config=True)
    stop_timeout = Float(
        0.0,
        help="Seconds a stop may take for checkpoints; 0: computed from the bytes and this host's measured rates. "
        "A kernel that is not done by then runs on without a server, and is adopted or ended by the watchdog.",
    ).tag(config=True)
    orphan_timeout = Float(
        3600.0,
        help="Seconds after which the watchdog checkpoints and ends kernels that run on without a server; 0: no "
        "watchdog, and kernels end when the server dies.",
    ).tag(config=True)

    def __init__(self, provisioners: Callable[[], dict[str, GpuCkptProvisioner]], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._provisioners = provisioners
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._database: FileLock | None = None

    # -- the way up

    def claim_database(self, root: Path) -> Path | None:
        """A session database for servers of this root directory; None while another server uses it.

        Called before the server makes its session manager.
        """
        directory = data_directory("sessions")
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        name = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16]
        lock = FileLock(directory / f"{name}.lock", timeout=0, mode=0o600, thread_local=False)
        try:
            lock.acquire()
        except Timeout:
            return None
        self._database = lock
        return directory / f"{name}.sqlite"

    def watch(self, base: Path, image_dir: Path) -> None:
        """Start the watchdog: it notices this process's end by the end of a pipe."""
        if self.orphan_timeout <= 0 or self._watchdog is not None:
            return
        options = {"base": str(base), "image_dir": str(image_dir), "timeout": self.orphan_timeout}
        self._watchdog = subprocess.Popen(
            [sys.executable, "-m", "jupyter_gpu_ckpt.server.orphan_watchdog", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    async def start(self, kernels: Kernels, sessions: Any, root: Path, base: Path, store: Store) -> list[str]:
        """Adopt; returns the ids.  Called when the server's event loop runs.

        A session row whose kernel is not there is dropped by the first listing, which may come before us: rows are read
        first and put back.
        """
        if not self.adopt:
            return []
        rows = {row["kernel_id"]: dict(row) for row in _rows(sessions)}
        found = await asyncio.to_thread(find_all, base, store)
        for id, refusal in found.refused.items():
            self.log.error("Kernel %s could not be adopted: %s", id, refusal.code)
        ours = [
            orphan
            for orphan in found.orphans
            if any(_below(Path(place), root) for place in (orphan.session.path, orphan.session.root) if place)
        ]
        # All at once: whoever asks for a notebook whose kernel is not back yet might be given another kernel.
        coming = (self.take_over(kernels, orphan) for orphan in ours)
        adopted = []
        for orphan, error in zip(ours, await asyncio.gather(*coming, return_exceptions=True), strict=True):
            if error is not None:
                # Whatever it was, the image or the living kernel is where it was, and the others come back.
                self.log.error("Kernel %s could not be adopted: %s", orphan.session.kernel_id, _code(error))
                self.log.debug("It could not be adopted because:", exc_info=error)
            else:
                adopted.append(orphan)
        # Of several kernels of one notebook: that of the database, else one that lives, else the one seen last.
        adopted.sort(key=lambda one: one.image.manifest.created if one.image else float("inf"), reverse=True)
        for orphan in adopted:
            if (row := rows.get(orphan.session.kernel_id)) and not await sessions.session_exists(row["path"]):
                await sessions.save_session(**{name: row[name] for name in _ROW})
        for orphan in adopted:
            if orphan.session.kernel_id not in rows:
                await self.seat(sessions, orphan, root)
        return [orphan.session.kernel_id for orphan in adopted]

    async def take_over(self, kernels: Kernels, orphan: Orphan) -> None:
        """Have ``kernels`` serve an orphan under its old id; one that sleeps sleeps on."""
        session = orphan.session
        await kernels.start_kernel(kernel_id=session.kernel_id, kernel_name=session.kernel_name or None)
        manager = kernels.get_kernel(session.kernel_id)
        # jupyter_server waits for the kernel's own word; one that sleeps says nothing until it is woken.
        manager.execution_state = "idle"

    async def seat(self, sessions: Any, orphan: Orphan, root: Path) -> None:
        """Give an adopted kernel the notebook it was started for, if that is there and has no other kernel.

        For a kernel without a row in the database: that was lost, or is in another server's hands, or elsewhere.
        """
        path = await asyncio.to_thread(models.notebook, orphan.session, root)
        if path is not None and not await sessions.session_exists(path):
            name, id = path.rsplit("/", 1)[-1], orphan.session.kernel_id
            await sessions.create_session(path=path, name=name, type="notebook", kernel_id=id)

    # -- the way down

    async def stop(self) -> None:
        """Called when the server stops, while its kernels are still there: each leaves, within a common deadline."""
        kernels = {
            id: one
            for id, one in self._provisioners().items()
            if one.lifecycle is not None and (self.checkpoint_on_stop or one.state is State.CHECKPOINTED)
        }
        if kernels:
            for one in kernels.values():
                # One that has left has no process any more, and would be started anew while the others still leave.
                if one.parent is not None:
                    one.parent.stop_restarter()
            needed = await asyncio.to_thread(drain.need, kernels, self.log, prove=False)
            timeout = self.stop_timeout or needed.seconds
            begun = await drain.leaving(kernels, lambda _, one: one.detach())
            tasks = {task: id for id, task in begun.items()}
            _, late = await asyncio.wait(tasks, timeout=timeout)
            for task in late:
                self.log.warning(
                    "Kernel %s was not checkpointed within %.0f s; it is left as it is.", tasks[task], timeout
                )
                task.cancel()
            if late:
                await asyncio.wait(
                    [asyncio.ensure_future(kernels[tasks[task]].detach_now()) for task in late], timeout=drain.GRACE
                )
            for task in tasks.keys() - late:
                if (error := task.exception()) is not None:
                    self.log.error("Kernel %s could not be left: %s", tasks[task], _code(error))
                    self.log.debug("It could not be left because:", exc_info=error)
        if self._watchdog is not None and self._watchdog.stdin is not None:
            self._watchdog.stdin.close()
        if self._database is not None:
            self._database.release()


#: Columns of jupyter_server's session table that make a session.
_ROW = ("session_id", "path", "name", "type", "kernel_id")


def _rows(sessions: Any) -> list[Any]:
    """The rows of the session database, kernels or not."""
    cursor = sessions.connection.cursor()
    sessions.cursor  # noqa: B018 - makes the table of a fresh database
    cursor.execute("SELECT * FROM session")
    rows: list[Any] = cursor.fetchall()
    return rows


def _below(path: Path, root: Path) -> bool:
    return path.resolve().is_relative_to(root.resolve())


def _code(error: BaseException) -> str:
    """What may stand in a log: the text of an error may name what is the user's own."""
    return error.code if isinstance(error, GpuCkptError) else type(error).__name__
