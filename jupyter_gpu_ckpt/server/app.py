"""The server extension: with it, every kernel of the server can be checkpointed, and nothing needs configuration.

Enabled by the wheel's ``jupyter_server_config.d/jupyter_gpu_ckpt.json``; configured as ``c.GpuCkptApp`` like any other
part of the server.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from jupyter_client.provisioning.factory import KernelProvisionerFactory
from jupyter_server.extension.application import ExtensionApp
from jupyter_server.gateway.gateway_client import GatewayClient
from jupyter_server.serverapp import ServerApp
from jupyter_server.services.sessions.sessionmanager import SessionManager
from traitlets.config import Config

from .._version import __version__
from ..errors import GpuCkptError, StateError
from ..image.store import Image, Store
from ..kernel.adoption import Orphan, find_orphan
from ..kernel.provisioner import GpuCkptProvisioner
from ..node.requirements import VARIABLE
from . import drain, models
from .cold import ColdTier
from .events import Events, Log
from .gpu_usage import GpuUsage
from .handlers import HANDLERS
from .idle.loop import IdlePolicy
from .jobs import Jobs
from .kernel_manager import CheckpointKernelManager, CheckpointKernelManagerMixin
from .metrics import Metrics
from .monitor import Watcher
from .placement import Publisher
from .readiness import Presence
from .session_manager import CheckpointSessionManager
from .shutdown import Comeback

PROVISIONER = "gpu-ckpt-provisioner"

#: Seconds for which a server that starts waits for its kernels before it answers anything.
_EARLY = 15.0

#: Seconds for which the doctor's word is good: asking it starts processes.
_DIAGNOSIS_KEEPS = 60.0


class GpuCkptApp(ExtensionApp):
    """Installs the provisioner and the kernel manager, and serves REST, events and metrics."""

    name = "gpu_ckpt"
    extension_url = "/"
    load_other_extensions = True
    description = "Checkpoints idle kernels with their CUDA state, and wakes them on demand."
    classes = [CheckpointKernelManager, GpuCkptProvisioner, IdlePolicy, Comeback, GpuUsage]  # noqa: RUF012

    jobs: Jobs
    watcher: Watcher
    store: Store
    idle: IdlePolicy
    cold: ColdTier
    comeback: Comeback
    usage: GpuUsage

    def _link_jupyter_server_extension(self, serverapp: ServerApp) -> None:
        """Called from jupyter_server before it makes its kernel manager: the last moment to say of which class."""
        super()._link_jupyter_server_extension(serverapp)
        serverapp.update_config(defaults(serverapp))
        self.comeback = Comeback(self.provisioners, parent=self)
        serverapp.update_config(self._comeback_defaults(serverapp))
        # Made now: whoever asks for kernelspecs first makes it, and a `KernelSpecManager` without a parent (the
        # doctor's, any library's) would make it without the server's configuration, for good.
        KernelProvisionerFactory.instance(parent=serverapp)

    def _comeback_defaults(self, serverapp: ServerApp) -> Config:
        """Sessions on disk, and kernels that outlive a server that dies, each where the user chose nothing else."""
        made = Config()
        keeps_none = not _is_set(serverapp.config, SessionManager, "database_filepath")
        if self.comeback.adopt and keeps_none:
            database = self.comeback.claim_database(Path(serverapp.root_dir))
            if database is not None:
                made.SessionManager.database_filepath = str(database)
        if self.comeback.orphan_timeout > 0 and not _is_set(serverapp.config, GpuCkptProvisioner, "outlive_server"):
            made.GpuCkptProvisioner.outlive_server = True
        return made

    def initialize_settings(self) -> None:
        """Called from jupyter_server once its kernel manager exists, on its event loop."""
        assert self.serverapp is not None and self.serverapp.event_logger is not None
        # Its own traits' defaults and what the configuration says of them, without a kernel.
        provisioner = GpuCkptProvisioner(config=self.serverapp.config)
        self.store = Store(Path(provisioner.image_dir))
        self._runtime_base = Path(provisioner.runtime_base)
        self.jobs = Jobs()
        self.watcher = Watcher(self.serverapp.io_loop, self.serverapp.log)
        self._metrics = Metrics(self.watcher)
        events = Events(self.serverapp.event_logger)
        self.usage = GpuUsage(self.provisioners, self.watcher, self.store.named, events.usage, parent=self)
        self._publisher = Publisher(self.store, os.environ.get(VARIABLE, ""), self.serverapp.log)
        self.watcher.listeners += [Log(self.serverapp.log), events, self._metrics, self.usage, self._publisher]
        self.watcher.on_protected.append(events.protected)
        self.idle = IdlePolicy(self.provisioners, parent=self)
        self.cold = ColdTier(self.store, provisioner.archive_url, provisioner.archive_after, self.serverapp.log)
        self._diagnosis: tuple[float, dict[str, Any]] | None = None
        self._diagnosing = asyncio.Lock()
        manager, self._presence = self.serverapp.kernel_manager, Presence()
        for one in (manager, self.serverapp.session_manager):
            if isinstance(one, (CheckpointKernelManagerMixin, CheckpointSessionManager)):
                one.presence = self._presence
        if isinstance(manager, CheckpointKernelManagerMixin):
            manager.kernel_listeners.append(self.watcher.follow)
            manager.idle_seconds = self.idle.idle_seconds

    def initialize_handlers(self) -> None:
        """Called from jupyter_server, which puts its base URL before each."""
        self.handlers.extend(HANDLERS)

    def initialize(self) -> None:  # type: ignore[override]  # as in ExtensionApp
        """Called from jupyter_server before it listens: until the kernels are back it shall not answer.

        A tab that reconnects by itself takes a 404 for the end of its kernel, and a new one might make another kernel
        for the same notebook.
        """
        super().initialize()  # type: ignore[no-untyped-call]
        assert self.serverapp is not None
        self._coming: asyncio.Task[None] | None = None
        over = False

        async def come_back() -> None:
            nonlocal over
            try:
                coming = self._come_back()
                # What takes longer (a slow disk) goes on beside the server: whoever has started it, a hub perhaps, does
                # not wait for ever.  Whoever asks for a kernel or a session does, see `presence`.
                await asyncio.wait({coming}, timeout=_EARLY)
                if coming.done():
                    coming.result()
            finally:
                over = True

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            return
        if self.serverapp.show_config or self.serverapp.show_config_json:
            return  # it will print that and end
        try:
            self.serverapp.io_loop.run_sync(come_back)
        except RuntimeError:
            if over:
                raise
            self.serverapp.exit(0)  # a signal stopped the server, and with that the loop

    def _come_back(self) -> asyncio.Task[None]:
        if self._coming is None:
            self._coming = self._presence.coming = asyncio.ensure_future(self._adopt_all())
        return self._coming

    async def _adopt_all(self) -> None:
        assert self.serverapp is not None
        manager, sessions = self.serverapp.kernel_manager, self.serverapp.session_manager
        if isinstance(manager, CheckpointKernelManagerMixin):
            # First: from here on there are kernels that nobody else looks after, should this server not come up.
            self.comeback.watch(self._runtime_base, self.store.named)
            await self.comeback.start(manager, sessions, Path(self.serverapp.root_dir), self._runtime_base, self.store)

    async def _start_jupyter_server_extension(self, serverapp: ServerApp) -> None:
        """Called from jupyter_server when its event loop runs."""
        await self._come_back()  # where it was running before, as in a test or a notebook
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            # jupyter_server handles it on a terminal only; elsewhere (a service, JupyterHub) it would end in the middle
            # of its loop without stopping anything.
            signal.signal(signal.SIGINT, lambda number, frame: serverapp.stop(from_signal=True))
        self.idle.start()
        self.cold.start()
        self.usage.start()
        self._publisher.start()

    def current_activity(self) -> list[dict[str, Any]]:
        """Called from jupyter_server before it shuts down for want of activity: a job under way is some."""
        return [job.as_dict() for job in self.jobs.running()]

    async def stop_extension(self) -> None:
        """Called from jupyter_server when it stops, while its kernels are still there."""
        try:
            await self.usage.stop()
            await self.idle.stop()
            await self.cold.stop()
            await self.comeback.stop()
            await self._publisher.stop()
            await self.jobs.close()
            self.watcher.close()
            self._metrics.close()
        finally:
            # It listens no longer, but serves the connections it has, also once jupyter_server has no kernels any more.
            self._presence.going = True

    # -- what the handlers, the policy and the metrics work on

    def provisioner(self, kernel_id: str) -> GpuCkptProvisioner | None:
        """Our provisioner of a kernel that exists, also under a kernel manager that is not ours; else None."""
        assert self.serverapp is not None
        found = getattr(self.serverapp.kernel_manager.get_kernel(kernel_id), "provisioner", None)
        return found if isinstance(found, GpuCkptProvisioner) else None

    def provisioners(self) -> dict[str, GpuCkptProvisioner]:
        """Our provisioners by kernel id, also of kernels that could only be started plainly."""
        assert self.serverapp is not None
        found = {id: self.provisioner(id) for id in self.serverapp.kernel_manager.list_kernel_ids()}
        return {id: provisioner for id, provisioner in found.items() if provisioner is not None}

    def look(self) -> None:
        """Watch the kernels there are now.  Finds what nobody told: restarts, and kernels of another manager."""
        self.watcher.keep(self.provisioners())

    @property
    def root(self) -> Path:
        """What paths of notebooks are relative to."""
        assert self.serverapp is not None
        return Path(self.serverapp.root_dir)

    async def adopt(self, image: Image) -> None:
        """Serve the kernel that sleeps in an image, under its old id and with its notebook; it sleeps on.

        Raises `StateError` where it has an owner, or is no kernel's only copy any more.
        """
        assert self.serverapp is not None
        kernels, sessions = self.serverapp.kernel_manager, self.serverapp.session_manager
        if not isinstance(kernels, CheckpointKernelManagerMixin):
            raise StateError("This server's kernel manager cannot take over kernels.")
        orphan = await asyncio.to_thread(self._reclaim, image)
        await self.comeback.take_over(kernels, orphan)
        await self.comeback.seat(sessions, orphan, self.root)

    def _reclaim(self, image: Image) -> Orphan:
        """The kernel of an image as one that a server may take over, also where it was shut down; raises as `adopt`."""
        self.store.generations.require_current(image.manifest)
        retired = image.retired
        image.unretire()
        try:
            orphan = find_orphan(image.manifest.kernel_id, self._runtime_base, self.store)
        except GpuCkptError:
            if retired:
                image.retire()
            raise
        if orphan is not None and orphan.image is not None and orphan.image.id == image.id:
            return orphan
        if retired:
            image.retire()
        if orphan is None:
            why, hint = "Another server has the kernel of this image.", "Use it there, or stop that server."
        elif orphan.image is None:
            why = "The kernel of this image has gone on from it, and runs without a server."
            hint = "The next server that is started takes it over as it is now."
        else:
            why, hint = f"The kernel of this image has a newer one, {orphan.image.id}.", "Open that one."
        raise StateError(why, hint=hint, left=f"the image is kept as {image.id}")

    async def park(self) -> dict[str, Any]:
        """Have every kernel sleep in a proved image, so that the server can be stopped; the document of ``park``."""
        assert self.serverapp is not None
        ids = list(self.serverapp.kernel_manager.list_kernel_ids())
        return drain.document(await drain.park(ids, self.provisioners(), self.store, self.serverapp.log))

    async def need(self) -> dict[str, Any]:
        """What `park` would need now."""
        assert self.serverapp is not None
        found = await asyncio.to_thread(drain.need, self.provisioners(), self.serverapp.log, prove=True)
        return dataclasses.asdict(found)

    async def status(self) -> dict[str, Any]:
        """The document of ``status``."""
        directory = self.store.named
        async with self._diagnosing:
            if self._diagnosis is None or time.monotonic() - self._diagnosis[0] > _DIAGNOSIS_KEEPS:
                self._diagnosis = time.monotonic(), await asyncio.to_thread(models.host, directory)
        return {
            "version": __version__,
            "host": self._diagnosis[1],
            "gpus": await asyncio.to_thread(models.gpus, directory),
            "policy": self.idle.status(),
            "kernels": models.counts(self.provisioners().values()),
        }


def defaults(serverapp: ServerApp) -> Config:
    """Our provisioner, kernel manager and session manager, each where the user named no other.

    The configuration is looked at, not the traits: at this moment (`ServerApp.initialize` links extensions before
    ``init_configurables``) reading `ServerApp.kernel_manager_class` would fix it before the gateway's settings are
    known.
    """
    config = serverapp.config
    made = Config()
    factory = KernelProvisionerFactory(parent=serverapp)
    if factory.default_provisioner_name == "local-provisioner" and not _is_set(
        config, KernelProvisionerFactory, "default_provisioner_name"
    ):
        made.KernelProvisionerFactory.default_provisioner_name = PROVISIONER
    # With a gateway the kernels are elsewhere.  Not the singleton: that one is the server's to make.
    gateway = GatewayClient(parent=serverapp)  # type: ignore[no-untyped-call]
    if not gateway.gateway_enabled and not _is_set(config, type(serverapp), "kernel_manager_class"):
        made.ServerApp.kernel_manager_class = CheckpointKernelManager
    if not gateway.gateway_enabled and not _is_set(config, type(serverapp), "session_manager_class"):
        made.ServerApp.session_manager_class = CheckpointSessionManager
    return made


def _is_set(config: Config, owner: type[Any], trait: str) -> bool:
    """Whether the configuration names a value, in the section of the class or of one it derives from."""
    return any(name in config and trait in config[name] for name in owner.section_names())
