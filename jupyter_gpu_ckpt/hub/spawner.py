"""A mixin for spawners: a server's kernels are checkpointed and their images verified before the hub stops it.

In ``jupyterhub_config.py``::

    class Spawner(CheckpointMixin, LocalProcessSpawner):
        pass

    c.JupyterHub.spawner_class = Spawner
    c.CheckpointMixin.image_dir = "/srv/gpu-ckpt/{username}"

With a `placement` it precedes its mixin: ``class Spawner(CheckpointMixin, SpawnMessagesMixin, SlurmSpawner)``.  It
covers stops by the user, an administrator, a culler, or a hub that stops its servers as it ends; named servers, too.  A
spawner cannot refuse a stop: JupyterHub removes the server from its proxy before it calls the spawner, and forgets it
whatever the spawner returns.  It can delay the stop (`CheckpointMixin.checkpoint_timeout`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from traitlets import Bool, Float, List, Unicode
from traitlets.config import LoggingConfigurable

from ..errors import GpuCkptError
from ..image.user_directory import VARIABLE as IMAGES
from ..units import size
from .client import MOST_SHOWN, Outcome, ServerClient

#: Traits for the seconds that a server has to end by itself: of LocalProcessSpawner, then of KubeSpawner.
GRACES = ("interrupt_timeout", "term_timeout", "delete_grace_period")

#: KubeSpawner's trait for the seconds that it waits for the end of a deleted pod.  At the next start it kills a pod
#: that still exists, whatever its grace period.
_POD_WAIT = "start_timeout"

#: Seconds for the end of a server without awake kernels, and between two drains.
_EMPTY, _RETRY = 15.0, 2.0


class CheckpointMixin(LoggingConfigurable):
    """Put before a spawner class; uses the attributes of JupyterHub's `Spawner`."""

    checkpoint_before_stop = Bool(
        True, help="Checkpoint the server's kernels, and verify their images, before the server is stopped."
    ).tag(config=True)
    checkpoint_timeout = Float(
        60.0,
        min=0,
        help="Seconds for which kernels that cannot be checkpointed now (a cell runs) delay a stop; the checkpoint is "
        "retried, then the server is stopped anyway. inf: until they can, at most stop_limit. 0: one try.",
    ).tag(config=True)
    stop_grace = Float(
        120.0,
        min=0,
        help="Seconds for the own stop of a server that was not drained, which checkpoints, too. More if the bytes of "
        "its kernels and the host's measured rates require it.",
    ).tag(config=True)
    image_dir = Unicode(
        help="Directory of the users' images, set in the server's environment; {username} and {servername} are "
        "replaced. It must belong to the user, or to root with mode 1777: then each user's is created in it. Empty: "
        "below the user's home, or as the server is configured.",
    ).tag(config=True)
    archive_url = Unicode(
        help="URL of the cold tier, set in the server's environment; {username} and {servername} are replaced."
    ).tag(config=True)
    stop_limit = Float(
        3600.0,
        min=0,
        help="Seconds that a stop takes at most, whatever the server, which its user controls, estimates.",
    ).tag(config=True)
    stop_notes: List[str] = List(help="The spawn page's messages about the last stop.")
    _shown_notes: List[str] = List()
    _start_failed = Bool(False)

    # -- JupyterHub's hooks

    def get_env(self) -> dict[str, str]:
        """Called from the spawner's start."""
        of_spawner: Any = self
        ours = {IMAGES: self.image_dir, "JUPYTER_GPU_CKPT_ARCHIVE": self.archive_url}
        env: dict[str, str] = super().get_env()  # type: ignore[misc]
        return env | {name: of_spawner.format_string(value) for name, value in ours.items() if value}

    def get_state(self) -> dict[str, Any]:
        """Called from the hub, which keeps it in its database."""
        state: dict[str, Any] = super().get_state()  # type: ignore[misc]
        return {**state, "gpu_ckpt_notes": list(self.stop_notes)} if self.stop_notes else state

    def load_state(self, state: dict[str, Any]) -> None:
        """Called from the hub when it creates the spawner of a known server."""
        super().load_state(state)  # type: ignore[misc]
        self.stop_notes = state.get("gpu_ckpt_notes", [])

    def clear_state(self) -> None:
        """Called from the hub before a start and after every end, also that of a failed start."""
        super().clear_state()  # type: ignore[misc]
        if self._is_starting():
            self.stop_notes = list(self._shown_notes)

    async def start(self) -> Any:
        """Called from the hub.  The notes of the last stop are shown during this start, and again if it fails."""
        self._shown_notes, self.stop_notes = list(self.stop_notes), []
        self._start_failed = False
        try:
            return await super().start()  # type: ignore[misc]
        except BaseException:  # the hub cancels a start that takes too long
            self._start_failed = True
            raise

    async def get_pod_manifest(self) -> Any:
        """Called from KubeSpawner's start: evictions and ``kubectl delete`` use the manifest's grace period."""
        pod = await super().get_pod_manifest()  # type: ignore[misc]
        if self.checkpoint_before_stop:
            grace = math.ceil(min(self.stop_grace, self.stop_limit))
            pod.spec.termination_grace_period_seconds = max(pod.spec.termination_grace_period_seconds or 0, grace)
        return pod

    async def progress(self) -> AsyncIterator[dict[str, Any]]:
        """Called from the hub for the page that is shown while the server starts."""
        for note in self.stop_notes or self._shown_notes:  # a page may be opened before `start` is called
            yield {"message": note}
        async for event in super().progress():  # type: ignore[misc]
            yield event

    async def stop(self, now: bool = False) -> None:
        """Called from the hub.  ``now``: stop the server at once; only its own stop checkpoints.

        The same holds for a server whose start failed: it was not used, and the images for it are unchanged.
        """
        seconds = 0.0
        if self.checkpoint_before_stop and not now and not self._is_starting():
            try:
                seconds = await asyncio.wait_for(self._drain(), self.stop_limit)
            except Exception:  # of any kind: the server is to be stopped all the same, gently
                self.log.exception("A server could not be drained.")
                seconds = self.stop_grace
        with self._grace(seconds):
            await super().stop(now=now)  # type: ignore[misc]

    def _is_starting(self) -> bool:
        """Return whether the server has not answered yet, or its start failed."""
        return self._start_failed or bool(getattr(self, "_waiting_for_response", False))

    # -- draining

    async def _drain(self) -> float:
        """Drain the server, if it runs; return the seconds that its own stop may need afterwards."""
        spawner: Any = self
        if spawner.server is None or await spawner.poll() is not None:
            return 0.0
        token = spawner.user.new_api_token(
            note="gpu-ckpt: drains the server before it is stopped",
            scopes=[f"access:servers!server={spawner.user.name}/{spawner.name}"],
            # Deleted below; this is for a hub that ends in between.
            expires_in=None if math.isinf(self.checkpoint_timeout) else int(self.checkpoint_timeout) + 24 * 3600,
        )
        client = ServerClient(spawner.server.url, token, ssl_options=self._certificates())
        try:
            seconds, outcome = await self._drain_with_retries(client)
        finally:
            self._delete_token(token)
        self.stop_notes = notes(outcome)
        return seconds

    async def _drain_with_retries(self, client: ServerClient) -> tuple[float, Outcome | GpuCkptError]:
        """Drain until it succeeds or times out; return the seconds for the server's own stop, and the result."""
        spawner: Any = self
        seconds, until = self.stop_grace, time.monotonic() + self.checkpoint_timeout
        while True:
            outcome: Outcome | GpuCkptError
            try:
                estimate = await client.estimate()
                seconds = max(self.stop_grace, estimate)
                outcome = await client.drain(estimate)
                if outcome.drained:
                    self.log.info("Server %s is drained: %s", spawner._log_name, outcome)
                    return _EMPTY, outcome
            except GpuCkptError as error:
                outcome = error
            final = isinstance(outcome, Outcome) and any(kernel.code == "WRONG_STATE" for kernel in outcome.kernels)
            if final or time.monotonic() + _RETRY > until or await spawner.poll() is not None:
                self.log.warning("Server %s is stopped without being drained: %s", spawner._log_name, outcome)
                return seconds, outcome
            await asyncio.sleep(_RETRY)

    @contextmanager
    def _grace(self, seconds: float) -> Iterator[None]:
        """Raise the seconds that the spawner gives the server to end by itself, for this one stop."""
        seconds = math.ceil(min(seconds, self.stop_limit))
        wanted = {name: seconds for name in GRACES if self.has_trait(name)}
        if "delete_grace_period" in wanted and seconds:
            wanted[_POD_WAIT] = math.ceil(seconds + _EMPTY)
        configured = {name: getattr(self, name) for name in wanted}
        for name, value in wanted.items():
            setattr(self, name, max(value, configured[name]))
        try:
            yield
        finally:
            for name, value in configured.items():
                setattr(self, name, value)

    def _certificates(self) -> Any:
        """Return the hub's certificates, if it talks to servers by TLS (``JupyterHub.internal_ssl``)."""
        from jupyterhub.utils import make_ssl_context

        settings: Any = self.user.settings  # type: ignore[attr-defined]
        key, cert, ca = (settings.get(f"internal_ssl_{part}") for part in ("key", "cert", "ca"))
        return make_ssl_context(key, cert, cafile=ca)

    def _delete_token(self, token: str) -> None:
        from jupyterhub import orm

        database: Any = self.user.db  # type: ignore[attr-defined]
        if (found := orm.APIToken.find(database, token)) is not None:
            database.delete(found)
            database.commit()


def notes(outcome: Outcome | GpuCkptError) -> list[str]:
    """Return the messages about a stop that its user reads at the next start."""
    if isinstance(outcome, GpuCkptError):
        return [f"The last stop could not checkpoint your kernels: {outcome.code}. {outcome.hint}"]
    asleep = [kernel.bytes for kernel in outcome.kernels if kernel.code is None]
    sleep = f"{len(asleep)} of your kernels sleep ({size(sum(asleep))}); the next cell you run wakes each of them."
    failed = [
        f"Kernel {kernel.kernel_id} could not be checkpointed when the server was stopped: {kernel.code}. {kernel.hint}"
        for kernel in outcome.failed[:MOST_SHOWN]
    ]
    more = len(outcome.failed) - len(failed)
    return [sleep] * bool(asleep) + failed + [f"The same holds for {more} more of your kernels."] * bool(more)
