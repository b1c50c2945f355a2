"""The server's kernel manager: a kernel that sleeps in an image is neither culled nor counted as running.

A site with a kernel manager of its own puts the mixin before it::

    class OurKernelManager(CheckpointKernelManagerMixin, TheirKernelManager): ...
"""

# mypy: allow-untyped-calls
# (jupyter_server annotates only some of what is overridden here)

from __future__ import annotations

import asyncio
import logging
import math
import time
import weakref
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from jupyter_core.utils import ensure_async
from jupyter_server._tz import utcnow
from jupyter_server.services.kernels.kernelmanager import AsyncMappingKernelManager
from tornado.ioloop import PeriodicCallback
from tornado.web import HTTPError
from traitlets import Integer
from traitlets.config import LoggingConfigurable

from ..errors import BranchDiffers, BranchUnsafe, ChangedFile, GpuCkptError, ImageBusy, ImageNotFound, MissingFile
from ..gate.replies import IDLE_TYPE
from ..kernel.host import BranchPoint
from ..kernel.provisioner import GpuCkptProvisioner, drop_failed_starts
from ..lifecycle.plans import State
from .readiness import Readiness

#: Seconds that a stopping server waits for kernels that are being started.
_STARTS = 60.0

if TYPE_CHECKING:
    _Base = AsyncMappingKernelManager
else:
    # Not the manager itself: the mixin goes before whatever manager there is.
    _Base = LoggingConfigurable

#: The kernel that jupyter_server's culler examines now; to end it means to checkpoint it.
_culling: ContextVar[str | None] = ContextVar("_culling", default=None)


#: What a user can get by asking for it: no fault of the server.
_REFUSALS = BranchDiffers, BranchUnsafe, ChangedFile, ImageBusy, ImageNotFound, MissingFile


class _OneLine(logging.Filter):
    """Log an error of this package once, and in one line: jupyter_client logs it wherever it passes, with a traceback.

    Its code alone, as its text may name private files; the caller gets all of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._logged: weakref.ref[BaseException] | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, GpuCkptError) or error.code == GpuCkptError.code:
            return True  # one that nobody has foreseen needs its traceback
        is_new = self._logged is None or self._logged() is not error
        self._logged = weakref.ref(error)
        record.msg, record.args = "A kernel could not be started, restarted or shut down: %s", (error.code,)
        if isinstance(error, _REFUSALS):
            record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.exc_info = record.exc_text = None
        return is_new


_ONE_LINE = _OneLine()


class CheckpointKernelManagerMixin(_Base):
    """Adapts jupyter_server's rules about idle kernels to kernels that can sleep."""

    checkpointed_expiry = Integer(
        0,
        config=True,
        help="Seconds after which a checkpointed kernel is shut down (checked every cull_interval); 0: never. "
        "Its image is kept, and `jupyter gpu-ckpt prune` may delete it.",
    )

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        getattr(self.log, "logger", self.log).addFilter(_ONE_LINE)  # of its kernels, too, and once for all managers
        #: Called with the id and the provisioner of each kernel that runs (again).
        self.on_kernel: Callable[[str, GpuCkptProvisioner], object] = lambda *_: None
        self.readiness = Readiness()
        #: Seconds for which the idle policy has seen a kernel idle.
        self.idle_seconds: Callable[[str], float] = lambda _: math.inf
        #: Starts a branch of a kernel, with a notebook, and returns its id; None: without a notebook.
        self.start_branch: Callable[[str, BranchPoint], Awaitable[str]] | None = None
        #: Whether the server stops, and no kernel is started any more.
        self._settles = False
        self._expiry_callback: PeriodicCallback | None = None
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    def provisioner_of(self, kernel_id: str) -> GpuCkptProvisioner | None:
        """Return our provisioner of a kernel; None where there is none yet, or another provisioner."""
        provisioner = getattr(self._kernels.get(kernel_id), "provisioner", None)
        return provisioner if isinstance(provisioner, GpuCkptProvisioner) else None

    def _state(self, kernel_id: str) -> State | None:
        """Return the state of a kernel that can be checkpointed; None of any other."""
        provisioner = self.provisioner_of(kernel_id)
        return provisioner.state if provisioner is not None and provisioner.lifecycle is not None else None

    # -- starts that fail

    async def start_kernel(self, **kwargs: Any) -> Any:  # type: ignore[override]
        """Called from REST, from sessions, for branches and to attach; after failure nothing is left of the kernel."""
        if self._settles:
            raise HTTPError(503, "The server is stopping.")
        try:
            return await super().start_kernel(**kwargs)
        except BaseException:
            drop_failed_starts(self)
            raise

    async def settle(self) -> None:
        """Wait for the end of starts, restarts and shutdowns under way; begin no more.  Called from a stopping server.

        So that kernels which are being attached are kept for the next server, as all others are.
        """
        self._settles = True
        await self._wait_for_starts()
        for lock in tuple(self._locks.values()):
            async with lock:
                pass

    async def shutdown_all(self, now: bool = False) -> None:  # type: ignore[override]
        """Called from a stopping server, which would run on after any error: there is none.

        jupyter_client raises for a kernel that is being started or restarted: wait for that, which has a deadline.
        """
        await self.settle()
        drop_failed_starts(self)
        try:
            for provisioner in filter(None, map(self.provisioner_of, self.list_kernel_ids())):
                if provisioner.state is State.CHECKPOINTED:  # its start took too long for the others' way
                    await provisioner.detach_now()
            await super().shutdown_all(now=now)
        except Exception as error:
            self.log.error("Kernels could not be shut down (%s); they are ended.", type(error).__name__)
            self.log.debug("The error was:", exc_info=error)
            left = [ensure_async(kernel.shutdown_kernel(now=True)) for kernel in tuple(self._kernels.values())]
            await asyncio.gather(*left, return_exceptions=True)

    async def _wait_for_starts(self) -> None:
        if starting := [task for kernel_id, task in self._pending_kernels.items() if kernel_id not in self]:
            _, late = await asyncio.wait(starting, timeout=_STARTS)
            for task in late:
                task.cancel()

    # -- how many kernels there are

    def __len__(self) -> int:
        """Return the number of kernels with a process: a sleeping one must not keep ``shutdown_no_activity`` off."""
        return sum(self._state(kernel_id) is not State.CHECKPOINTED for kernel_id in self.list_kernel_ids())

    def __bool__(self) -> bool:
        """Return whether there is any kernel.  Called from a stopping server, to learn whether there are any to end."""
        return bool(self.list_kernel_ids())

    def list_kernels(self) -> Any:
        """Called from REST.  Returns an awaitable, as a gateway does, while kernels are attached or detached."""
        listed = super().list_kernels
        return listed() if self.readiness.is_ready else self._when_ready(listed)

    def kernel_model(self, kernel_id: str) -> Any:
        """Return jupyter_server's model, with ``gpu_ckpt`` for our kernels.  Called for each kernel in a listing.

        Returns an awaitable for a kernel that may still be attached: a reconnecting tab takes a 404 for its end.
        """
        if kernel_id in self or self.readiness.is_ready:
            return self._model(kernel_id)
        return self._when_ready(lambda: self._model(kernel_id))

    async def _when_ready(self, call: Callable[[], Any]) -> Any:
        await self.readiness.wait()
        return call()

    def _model(self, kernel_id: str) -> dict[str, Any]:
        kernel = self._kernels.get(kernel_id)
        if kernel is not None and getattr(kernel, "execution_state", None) is None:
            # jupyter_server has added the kernel but not set these yet: a listing at that moment, as while kernels are
            # attached, would fail as a whole.
            kernel.execution_state, kernel.reason, kernel.last_activity = "starting", "", utcnow()
        model: dict[str, Any] = super().kernel_model(kernel_id)
        if (provisioner := self.provisioner_of(kernel_id)) is not None:
            checkpointable = provisioner.lifecycle is not None
            model["gpu_ckpt"] = {"state": provisioner.state.value, "checkpointable": checkpointable}
        return model

    def start_watching_activity(self, kernel_id: str) -> None:
        """Called from jupyter_server once a kernel is ready, and again after a restart."""
        super().start_watching_activity(kernel_id)
        if (provisioner := self.provisioner_of(kernel_id)) is not None:
            self.on_kernel(kernel_id, provisioner)

    # -- culling

    def track_message_type(self, message_type: Any) -> bool:
        """Return whether a message of this type, or its reply, is a use of the kernel.  Called from jupyter_server."""
        return message_type != IDLE_TYPE and bool(super().track_message_type(message_type))

    def initialize_culler(self) -> None:
        """Called from jupyter_server after the first kernel's start.  Expiry works without culling."""
        super().initialize_culler()
        if self._expiry_callback is None and self.checkpointed_expiry > 0 and self.cull_idle_timeout <= 0:
            interval = self.cull_interval if self.cull_interval > 0 else self.cull_interval_default
            self._expiry_callback = PeriodicCallback(self.cull_kernels, 1000 * interval)
            self._expiry_callback.start()

    async def cull_kernel_if_idle(self, kernel_id: str) -> None:
        """Checkpoint a kernel that would be culled, unless it is protected; shut down a sleeping one that expires.

        Called from the culler, for each kernel.
        """
        provisioner, state = self.provisioner_of(kernel_id), self._state(kernel_id)
        if provisioner is not None and state is not None and provisioner.agent_requests.protection() is not None:
            return
        if state is State.CHECKPOINTED:
            await self._expire(kernel_id)
        elif self.cull_idle_timeout > 0:
            # jupyter_server decides what idle means (connections, busy kernels, the kernelspec's own timeout); its
            # `shutdown_kernel` is turned into a checkpoint.
            token = _culling.set(kernel_id)
            try:
                await super().cull_kernel_if_idle(kernel_id)
            finally:
                _culling.reset(token)

    async def shutdown_kernel(  # type: ignore[override]
        self, kernel_id: str, now: bool = False, restart: bool = False
    ) -> None:
        """Called from REST, sessions and the culler."""
        provisioner = self.provisioner_of(kernel_id)
        died = getattr(self._kernels.get(kernel_id), "execution_state", None) == "dead"
        can_sleep = self._state(kernel_id) not in (None, State.DEAD) and not died
        if _culling.get() == kernel_id and provisioner is not None and can_sleep:
            if self.idle_seconds(kernel_id) < self.cull_idle_timeout:
                # jupyter_server counts messages; a computing thread, or a web server in a notebook, sends none.
                self.log.info("Kernel %s was not culled: it works, although no cell runs.", kernel_id)
                return
            try:
                image = await provisioner.checkpoint()
                self.log.info("Kernel %s was checkpointed instead of culled: image %s", kernel_id, image.id)
            except GpuCkptError as error:
                # It keeps its process: culling frees resources and must not lose data.
                self.log.warning("Kernel %s was not culled: %s", kernel_id, error.code)
            return
        async with self._lock(kernel_id):
            await super().shutdown_kernel(kernel_id, now=now, restart=restart)

    async def restart_kernel(self, kernel_id: str, now: bool = False) -> Any:  # type: ignore[override]
        """Called from REST."""
        async with self._lock(kernel_id):
            if (provisioner := self.provisioner_of(kernel_id)) is not None:
                await provisioner.save_before_restart()
            return await super().restart_kernel(kernel_id, now=now)

    def _lock(self, kernel_id: str) -> asyncio.Lock:
        """Return the lock that orders restarts and shutdowns of a kernel: jupyter_client does not.

        A shutdown in the middle of a restart fails (its ``ready`` is not done), and the kernel lives on.
        """
        return self._locks.setdefault(kernel_id, asyncio.Lock())

    async def _expire(self, kernel_id: str) -> None:
        provisioner = self.provisioner_of(kernel_id)
        image = provisioner.lifecycle.image if provisioner and provisioner.lifecycle else None
        if provisioner is None or image is None or self.checkpointed_expiry <= 0:
            return
        asleep = time.time() - image.manifest.created
        if asleep > self.checkpointed_expiry:
            self.log.warning("Kernel %s expires: it was checkpointed %.0f s ago.", kernel_id, asleep)
            provisioner.keep_image = True
            async with self._lock(kernel_id):
                await super().shutdown_kernel(kernel_id)


class CheckpointKernelManager(CheckpointKernelManagerMixin, AsyncMappingKernelManager):
    """The default kernel manager of servers with the extension."""
