"""Kernels outlive their server: checkpointed when it stops, attached when it starts, watched over in between.

A starting server attaches the kernels of this user on this host that no server owns and that were started in or below
its root directory, or by a server of that root directory.  Their sessions (notebook path and name) are kept in a
database of this package, where the user configured none.
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
from typing import Any

from filelock import FileLock, Timeout
from traitlets import Bool, Float
from traitlets.config import LoggingConfigurable

from ..errors import GpuCkptError
from ..image.store import Store
from ..kernel import kernelspecs
from ..kernel.orphans import Orphan, find_orphans
from ..kernel.provisioner import GpuCkptProvisioner
from ..lifecycle.plans import State
from ..paths import data_directory
from . import drain, models
from .kernel_manager import CheckpointKernelManagerMixin


class KernelPersistence(LoggingConfigurable):
    """Attaches kernels at the server's start and checkpoints them at its stop; a part of the server extension."""

    checkpoint_on_stop = Bool(
        True,
        help="Checkpoint the kernels when the server stops, for the next server to attach. If false, kernels that are "
        "awake end with the server.",
    ).tag(config=True)
    attach_on_start = Bool(True, help="Attach the kernels of an earlier server when this one starts.").tag(config=True)
    stop_timeout = Float(
        0.0,
        help="Seconds a stop may take for checkpoints; 0: computed from the bytes and this host's measured rates. "
        "A kernel that is not done by then runs on without a server, until a server attaches it or the watchdog "
        "checkpoints and ends it.",
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

    # -- the server starts

    def claim_database(self, root: Path) -> Path | None:
        """Claim the session database for servers of this root directory; None while another server uses it."""
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

    def start_watchdog(self, provisioner: dict[str, Any]) -> None:
        """Start the watchdog, which notices this process's end by the end of a pipe.

        ``provisioner``: traits of `GpuCkptProvisioner`, as this server's kernels have them.
        """
        if self.orphan_timeout <= 0 or self._watchdog is not None:
            return
        options = {"provisioner": provisioner, "timeout": self.orphan_timeout}
        command = [sys.executable, "-m", "jupyter_gpu_ckpt.server.orphan_watchdog"]
        null = subprocess.DEVNULL
        self._watchdog = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True
        )
        assert self._watchdog.stdin is not None
        try:
            self._watchdog.stdin.write(json.dumps(options).encode() + b"\n")  # not as arguments, which all users see
            self._watchdog.stdin.flush()
        except OSError as error:
            self.log.error("The watchdog of kernels without a server does not run: %s", error.strerror)

    async def attach_all(
        self, kernels: CheckpointKernelManagerMixin, sessions: Any, root: Path, base: Path, store: Store
    ) -> None:
        """Attach the kernels of earlier servers.  Called when the server's event loop runs.

        The first listing drops a session row whose kernel is not there, and may come before the kernels are attached:
        rows are read first and put back.
        """
        if not self.attach_on_start:
            return
        # Also of kernels that do not exist.
        rows = {row["kernel_id"]: dict(row) for row in sessions.cursor.execute("SELECT * FROM session").fetchall()}
        found = await asyncio.to_thread(find_orphans, base, store)
        for id, refusal in found.refused.items():
            self.log.error("Kernel %s could not be attached: %s", id, refusal.code)
        for id, damage in (await asyncio.to_thread(store.damaged)).items():
            self.log.error("The kernel of image %s could not be attached: %s: %s", id, damage.code, damage.message)
        orphans = [
            orphan
            for orphan in found.orphans
            if any(_below(Path(path), root) for path in (orphan.session.path, orphan.session.root) if path)
        ]
        # All at once: a request for a notebook whose kernel is not attached yet might start another kernel.
        calls = (self.attach(kernels, orphan) for orphan in orphans)
        attached = []
        for orphan, error in zip(orphans, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if error is None:
                attached.append(orphan)
            else:  # the image or the living kernel is where it was, and the others are attached
                self._log_failure("Kernel %s could not be attached: %s", orphan.session.kernel_id, error)
        # Of several kernels of one notebook: that of the database, else a living one, else the one seen last.
        attached.sort(key=lambda orphan: orphan.image.manifest.created if orphan.image else float("inf"), reverse=True)
        for orphan in attached:
            if (row := rows.get(orphan.session.kernel_id)) and not await sessions.session_exists(row["path"]):
                await sessions.save_session(**row)
        for orphan in attached:
            if orphan.session.kernel_id not in rows:
                await self.create_session(sessions, orphan, root)

    async def attach(self, kernels: CheckpointKernelManagerMixin, orphan: Orphan) -> None:
        """Have ``kernels`` serve an orphan under its old id; a sleeping one sleeps on.

        Raises `StateError` if its kernelspec is not here.
        """
        session = orphan.session
        specs: Any = kernels.kernel_spec_manager
        name = await asyncio.to_thread(kernelspecs.choose, specs, session.kernel_name, session.fallback_name)
        await kernels.start_kernel(kernel_id=session.kernel_id, kernel_name=name or None)
        # jupyter_server waits for the kernel's first status message; a sleeping kernel sends none until it is woken.
        kernel: Any = kernels.get_kernel(session.kernel_id)
        kernel.execution_state = "idle"

    async def create_session(self, sessions: Any, orphan: Orphan, root: Path) -> None:
        """Give an attached kernel without a row in the database its notebook, if that exists and has no kernel."""
        path = await asyncio.to_thread(models.notebook, orphan.session, root)
        if path is not None and not await sessions.session_exists(path):
            name, id = path.rsplit("/", 1)[-1], orphan.session.kernel_id
            await sessions.create_session(path=path, name=name, type="notebook", kernel_id=id)

    # -- the server stops

    async def stop(self) -> None:
        """Checkpoint and detach all kernels within a common deadline.  Called while the server still has them."""
        kernels = {
            id: kernel
            for id, kernel in self._provisioners().items()
            if kernel.lifecycle is not None and (self.checkpoint_on_stop or kernel.state is State.CHECKPOINTED)
        }
        if kernels:
            await self._detach(kernels)
        if self._watchdog is not None and self._watchdog.stdin is not None:
            self._watchdog.stdin.close()
        if self._database is not None:
            self._database.release()

    async def _detach(self, kernels: dict[str, GpuCkptProvisioner]) -> None:
        for kernel in kernels.values():
            # A detached kernel has no process any more, and would be restarted while the others are still saved.
            if kernel.parent is not None:
                kernel.parent.stop_restarter()
        work = await asyncio.to_thread(drain.estimate, kernels, self.log, verify=False)
        timeout = self.stop_timeout or work.seconds
        tasks = {task: id for id, task in drain.start_limited(kernels, lambda _, kernel: kernel.detach()).items()}
        _, late = await asyncio.wait(tasks, timeout=timeout)
        for task in late:
            self.log.warning("Kernel %s was not checkpointed within %.0f s; it is left as it is.", tasks[task], timeout)
            task.cancel()
        if late:
            cancels = [asyncio.ensure_future(kernels[tasks[task]].detach_now()) for task in late]
            await asyncio.wait(cancels, timeout=drain.GRACE)
        for task in tasks.keys() - late:
            if (error := task.exception()) is not None:
                self._log_failure("Kernel %s could not be saved: %s", tasks[task], error)

    def _log_failure(self, text: str, kernel_id: str, error: BaseException) -> None:
        # The code alone: the text of an error may name private files.
        self.log.error(text, kernel_id, error.code if isinstance(error, GpuCkptError) else type(error).__name__)
        self.log.debug("Kernel %s: the error was:", kernel_id, exc_info=error)


def _below(path: Path, root: Path) -> bool:
    return path.resolve().is_relative_to(root.resolve())
