"""The server extension: makes every kernel of the server checkpointable; configured as ``c.GpuCkptApp``."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.metadata
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
from traitlets import Unicode, default
from traitlets.config import Config, catch_config_error

from .._version import __version__
from ..doctor import checks, fixes
from ..doctor.probes import EXTENSION, missing_native_parts
from ..errors import GpuCkptError, StateError
from ..image.store import Image
from ..kernel.agent_injection import PROVISIONER
from ..kernel.orphans import Orphan, find_orphan
from ..kernel.provisioner import GpuCkptProvisioner
from ..node.requirements import VARIABLE
from . import drain, models, notebooks
from .branches import Branches
from .cold import ColdTier
from .events import Events, Log
from .gpu_usage import GpuUsage
from .handlers import HANDLERS
from .idle.loop import IdlePolicy
from .idle_saves import IdleSaves
from .jobs import Jobs
from .kernel_manager import CheckpointKernelManager, CheckpointKernelManagerMixin
from .metrics import Metrics
from .monitor import KernelMonitor
from .persistence import KernelPersistence
from .placement import Publisher
from .readiness import CheckpointSessionManager, Readiness

#: Seconds for which a starting server attaches kernels before it answers any request.
_ATTACH_TIMEOUT = 15.0

#: Seconds for which the doctor's result is kept: its checks start processes.
_DIAGNOSIS_LIFETIME = 60.0


class GpuCkptApp(ExtensionApp):
    """Installs the provisioner and the kernel manager, and serves REST, events and metrics."""

    name = "gpu_ckpt"
    extension_url = "/"
    load_other_extensions = True
    description = "Checkpoints idle kernels with their CUDA state, and wakes them on demand."
    classes = [CheckpointKernelManager, GpuCkptProvisioner, IdlePolicy, KernelPersistence, GpuUsage]  # noqa: RUF012

    error_page = Unicode(
        help="Address of the page that explains an error, with {code} instead of its code in lower case: the front "
        "end's list of failures links to it.  Default: the runbook below the package's page of documentation, if its "
        "metadata name one.  Empty: no link."
    ).tag(config=True)

    serverapp: ServerApp  # None only before the extension is linked
    #: Whether there is anything to stop: `initialize_settings` was done.
    _is_made = False

    @default("error_page")
    def _default_error_page(self) -> str:
        pages = importlib.metadata.metadata("jupyter_gpu_ckpt").get_all("Project-URL", [])
        documentation = dict(page.split(", ", 1) for page in pages).get("Documentation", "")
        return f"{documentation}/admin/runbook.md#{{code}}" if documentation else ""

    @catch_config_error
    def _link_jupyter_server_extension(self, serverapp: ServerApp) -> None:
        """Called from jupyter_server before it makes its kernel manager: the last moment to choose its class."""
        super()._link_jupyter_server_extension(serverapp)
        serverapp.update_config(defaults(serverapp))
        self.persistence = KernelPersistence(self.provisioners, parent=self)
        serverapp.update_config(self._persistence_defaults(serverapp))
        # Made now: the first request for kernelspecs makes it, and a `KernelSpecManager` without a parent (the
        # doctor's, any library's) would make it without the server's configuration, for good.
        KernelProvisionerFactory.instance(parent=serverapp)

    def _persistence_defaults(self, serverapp: ServerApp) -> Config:
        """Sessions on disk, and kernels that outlive a server that dies, each where the user chose nothing else."""
        made = Config()
        own = self.persistence.attach_on_start and not _is_set(serverapp.config, SessionManager, "database_filepath")
        if own and (database := self.persistence.claim_database(Path(serverapp.root_dir))) is not None:
            made.SessionManager.database_filepath = str(database)
        if self.persistence.orphan_timeout > 0 and not _is_set(serverapp.config, GpuCkptProvisioner, "outlive_server"):
            made.GpuCkptProvisioner.outlive_server = True
        return made

    @catch_config_error
    def initialize_settings(self) -> None:
        """Called from jupyter_server once its kernel manager exists, on its event loop.

        As with a value that the server itself cannot use, it does not start with one that no kernel could start with.
        """
        assert self.serverapp.event_logger is not None
        # For its traits, by their defaults and the configuration; it gets no kernel.
        provisioner = GpuCkptProvisioner(config=self.serverapp.config)
        if missing := missing_native_parts():
            self.serverapp.log.warning("%s To fix it: %s", checks.without(missing), fixes.NATIVE_PARTS)
        self.store = provisioner.store()
        self._provisioner_traits = provisioner.trait_values(config=True)
        self._runtime_base = Path(provisioner.runtime_base)
        self._fast_path = provisioner.fast_path
        self.jobs = Jobs()
        self.monitor = KernelMonitor(self.serverapp.io_loop, self.serverapp.log)
        events = Events(self.serverapp.event_logger)
        self.usage = GpuUsage(self.provisioners, self.monitor, self.store.named, events.usage, parent=self)
        self._metrics = Metrics(self.monitor, self.usage.copied)
        self._publisher = Publisher(self.store, os.environ.get(VARIABLE, ""), self.serverapp.log)
        self.monitor.listeners += [Log(self.serverapp.log), events, self._metrics, self.usage, self._publisher]
        self._idle_saves = IdleSaves(self.provisioners)
        self.idle = IdlePolicy(self.provisioners, announce=self._announce, parent=self)
        self.cold = ColdTier(self.store, provisioner.archive_url, provisioner.archive_after, self.serverapp.log)
        self.branches = Branches(self.serverapp, self.store)
        self._diagnosis: tuple[float, dict[str, Any]] | None = None
        self._diagnosing = asyncio.Lock()
        self._stop: asyncio.Future[None] | None = None
        manager, sessions, self._readiness = self.serverapp.kernel_manager, self.serverapp.session_manager, Readiness()
        if isinstance(sessions, CheckpointSessionManager):
            sessions.readiness = self._readiness
        if isinstance(manager, CheckpointKernelManagerMixin):
            manager.readiness = self._readiness
            manager.on_kernel = self._on_kernel
            manager.start_branch = self.branches.start
            manager.idle_seconds = self.idle.idle_seconds
        self._is_made = True

    def _on_kernel(self, kernel_id: str, provisioner: GpuCkptProvisioner) -> None:
        """Called from the kernel manager with each kernel that it has started or attached."""
        provisioner.document = notebooks.document_for_threads(self.serverapp, kernel_id)
        self.monitor.add(kernel_id, provisioner)

    def initialize_handlers(self) -> None:
        """Called from jupyter_server, which puts its base URL before each."""
        self.handlers.extend(HANDLERS)

    def initialize(self) -> None:  # type: ignore[override]  # as in ExtensionApp
        """Attach kernels before the server listens.  Called from jupyter_server.

        A tab that reconnects by itself takes a 404 for the end of its kernel, and a new tab might start another kernel
        for the same notebook.
        """
        super().initialize()  # type: ignore[no-untyped-call]
        finished = False

        async def attach() -> None:
            nonlocal finished
            try:
                task = self._start_attaching()
                # After the timeout (a slow disk) the server starts all the same: the hub that started it does not wait
                # for ever.  Requests for kernels and sessions still wait, see `readiness`.
                await asyncio.wait({task}, timeout=_ATTACH_TIMEOUT)
                if task.done():
                    task.result()
            finally:
                finished = True

        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            return
        if self.serverapp.show_config or self.serverapp.show_config_json:
            return  # it prints the configuration and ends
        try:
            self.serverapp.io_loop.run_sync(attach)
        except RuntimeError:
            if finished:
                raise
            self.serverapp.exit(0)  # a signal stopped the server, and with it the loop

    def _start_attaching(self) -> asyncio.Task[None]:
        if self._readiness.attaching is None:
            self._readiness.attaching = asyncio.ensure_future(self._attach_all())
        return self._readiness.attaching

    async def _attach_all(self) -> None:
        manager, sessions = self.serverapp.kernel_manager, self.serverapp.session_manager
        if isinstance(manager, CheckpointKernelManagerMixin):
            # First: attached kernels have no other owner, should this server end before it listens.
            self.persistence.start_watchdog(self._provisioner_traits)
            await self.persistence.attach_all(manager, sessions, self.root, self._runtime_base, self.store)

    async def _start_jupyter_server_extension(self, serverapp: ServerApp) -> None:
        """Called from jupyter_server when its event loop runs."""
        await self._start_attaching()  # for a loop that ran before `initialize`, as in a test or a notebook
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            # jupyter_server handles SIGINT on a terminal only; elsewhere (a service, JupyterHub) the server would end
            # in the middle of its loop and stop nothing.
            signal.signal(signal.SIGINT, lambda number, frame: serverapp.stop(from_signal=True))
        self.idle.start()
        self._idle_saves.start()
        self.cold.start()
        self.usage.start()
        self._publisher.start()

    def _announce(self, kernel_id: str, verb: str | None, seconds: float | None) -> None:
        self.monitor.notify(lambda listener: listener.planned(kernel_id, verb, seconds))

    def current_activity(self) -> list[dict[str, Any]]:
        """Return the jobs under way.  Called from jupyter_server before it shuts down for lack of activity."""
        return [job.as_dict() for job in self.jobs.running()]

    async def stop_extension(self) -> None:
        """Called from jupyter_server when it stops, while its kernels are still there, and at each further signal."""
        if not self._is_made:
            return
        if self._stop is None:
            self._stop = asyncio.ensure_future(self._stop_once())
        await asyncio.shield(self._stop)

    async def _stop_once(self) -> None:
        try:
            await self.usage.stop()
            await self.idle.stop()
            await self._idle_saves.stop()
            await self.cold.stop()
            manager = self.serverapp.kernel_manager
            if isinstance(manager, CheckpointKernelManagerMixin):
                await manager.settle()  # a kernel that is being restarted is kept as others are
            await self.persistence.stop()
            await self._publisher.stop()
            await self.jobs.stop()
            self.monitor.keep_only({})
            self._metrics.close()
        finally:
            # The server accepts no connections any more, but serves open ones, also once it has no kernels left.
            self._readiness.stopping = True

    # -- for the handlers, the policy and the metrics

    def provisioner(self, kernel_id: str) -> GpuCkptProvisioner | None:
        """Return our provisioner of an existing kernel, also under a foreign kernel manager; else None."""
        found = getattr(self.serverapp.kernel_manager.get_kernel(kernel_id), "provisioner", None)
        return found if isinstance(found, GpuCkptProvisioner) else None

    def provisioners(self) -> dict[str, GpuCkptProvisioner]:
        """Return our provisioners by kernel id, also of kernels that could only be started plainly."""
        found = {id: self.provisioner(id) for id in self.serverapp.kernel_manager.list_kernel_ids()}
        return {id: provisioner for id, provisioner in found.items() if provisioner is not None}

    def refresh_monitor(self) -> None:
        """Monitor the kernels that exist now: also restarted ones, and those of a foreign kernel manager."""
        self.monitor.keep_only(self.provisioners())

    @property
    def root(self) -> Path:
        """The directory that notebook paths are relative to."""
        return Path(self.serverapp.root_dir)

    async def attach(self, image: Image) -> None:
        """Serve the kernel that sleeps in an image, under its old id and with its notebook; it sleeps on.

        Raises `StateError` if it has an owner, or the image is not the kernel's only copy any more.
        """
        kernels, sessions = self.serverapp.kernel_manager, self.serverapp.session_manager
        if not isinstance(kernels, CheckpointKernelManagerMixin):
            raise StateError("This server's kernel manager cannot attach kernels.")
        orphan = await asyncio.to_thread(self._claim_orphan, image)
        await self.persistence.attach(kernels, orphan)
        await self.persistence.create_session(sessions, orphan, self.root)

    def _claim_orphan(self, image: Image) -> Orphan:
        """Make the kernel of an image one that a server may attach, also after a shutdown; raises as `attach`."""
        self.store.generations.require_current(image.manifest)
        retired = image.retired
        image.unretire()
        try:
            orphan = find_orphan(image.manifest.kernel_id, self._runtime_base, self.store)
            if orphan is not None and orphan.image is not None and orphan.image.id == image.id:
                return orphan
            if orphan is None:
                why, hint = "Another server has the kernel of this image.", "Use it there, or stop that server."
            elif orphan.image is None:
                why = "The kernel of this image has run on since, and runs without a server."
                hint = "The next server that is started attaches it as it is now."
            else:
                why, hint = f"The kernel of this image has a newer one, {orphan.image.id}.", "Open that one."
            raise StateError(why, hint=hint, left=f"the image is kept as {image.id}")
        except GpuCkptError:
            if retired:
                image.retire()
            raise

    async def drain(self) -> dict[str, Any]:
        """Checkpoint every kernel and verify its image; return the result of the job ``drain``."""
        ids = self.serverapp.kernel_manager.list_kernel_ids()
        return await drain.drain(ids, self.provisioners(), self.store, self.serverapp.log)

    async def estimate_drain(self) -> dict[str, Any]:
        """Estimate the work of `drain`."""
        work = await asyncio.to_thread(drain.estimate, self.provisioners(), self.serverapp.log, verify=True)
        return dataclasses.asdict(work)

    async def status(self) -> dict[str, Any]:
        """Return the document of ``status``."""
        directory = self.store.named
        async with self._diagnosing:
            if self._diagnosis is None or time.monotonic() - self._diagnosis[0] > _DIAGNOSIS_LIFETIME:
                options: dict[str, Any] = {"fast_path": self._fast_path, "extensions": {EXTENSION: True}}
                found = await asyncio.to_thread(checks.diagnose, directory, **options)
                self._diagnosis = time.monotonic(), checks.as_json(found)
        return {
            "version": __version__,
            "host": self._diagnosis[1],
            "gpus": await asyncio.to_thread(models.gpus, directory),
            "policy": self.idle.status(),
            "kernels": models.counts(self.provisioners().values()),
            "error_page": self.error_page or None,
        }


def defaults(serverapp: ServerApp) -> Config:
    """Our provisioner, kernel manager and session manager, each where the user named no other.

    Reads the configuration, not the traits: `ServerApp.initialize` links extensions before the gateway's settings are
    known, and reading `ServerApp.kernel_manager_class` would fix it.
    """
    config, made = serverapp.config, Config()
    chosen = _is_set(config, KernelProvisionerFactory, "default_provisioner_name")
    factory = KernelProvisionerFactory(parent=serverapp)
    if not chosen and factory.default_provisioner_name == "local-provisioner":
        made.KernelProvisionerFactory.default_provisioner_name = PROVISIONER
    # With a gateway the kernels are elsewhere.  Not the singleton, which the server makes.
    gateway = GatewayClient(parent=serverapp)  # type: ignore[no-untyped-call]
    ours = {"kernel_manager_class": CheckpointKernelManager, "session_manager_class": CheckpointSessionManager}
    for trait, manager in ours.items():
        if not gateway.gateway_enabled and not _is_set(config, type(serverapp), trait):
            made.ServerApp[trait] = manager
    return made


def _is_set(config: Config, owner: type[Any], trait: str) -> bool:
    """Return whether the configuration names a value, in the section of the class or of one it derives from."""
    return any(name in config and trait in config[name] for name in owner.section_names())
