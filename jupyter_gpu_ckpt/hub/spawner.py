"""A mixin for spawners: a server's kernels sleep in proved images before the hub stops it.

In ``jupyterhub_config.py``::

    class Spawner(CheckpointMixin, LocalProcessSpawner):
        pass

    c.JupyterHub.spawner_class = Spawner
    c.CheckpointMixin.image_dir = "/srv/gpu-ckpt/{username}"

With a placement (`placement`) it stands before its mixin: ``class Spawner(CheckpointMixin, ToldMixin, SlurmSpawner)``.
It covers whoever stops a server: its user, an administrator, a culler, a hub that takes its servers along; named
servers, too.  A spawner cannot refuse a stop: JupyterHub has taken the server from its proxy before it asks the
spawner, and forgets it whatever the spawner says.  It can take its time (`CheckpointMixin.park_patience`).
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
from .client import Outcome, ServerClient

#: What spawners call the seconds that they leave to a server told to end: LocalProcessSpawner, then KubeSpawner.
GRACES = ("interrupt_timeout", "term_timeout", "delete_grace_period")

#: For as long KubeSpawner waits for the end of a pod that it has deleted.  It kills one that it still finds at the next
#: start, whatever grace that has left.
_WAITS = "start_timeout"

#: Seconds for the end of a server without awake kernels.
_EMPTY = 15.0

_RETRY = 2.0


class CheckpointMixin(LoggingConfigurable):
    """Put before a spawner class; the attributes that it uses are JupyterHub's `Spawner`'s."""

    park_before_stop = Bool(
        True, help="Have the server's kernels checkpointed, and their images proved, before it is stopped."
    ).tag(config=True)
    park_patience = Float(
        60.0,
        min=0,
        help="Seconds for which a stop is held up by kernels that cannot be checkpointed now (a cell runs), tried "
        "again and again; then the server is stopped anyway. inf: until they can, or stop_limit ends. 0: one try.",
    ).tag(config=True)
    stop_grace = Float(
        120.0,
        min=0,
        help="Seconds that a server which could not be parked gets at least for its own stop, which checkpoints, too. "
        "More if the bytes of its kernels and its host's measured rates say so.",
    ).tag(config=True)
    image_dir = Unicode(
        help="Directory of the users' images, told to the server; {username} and {servername} are filled in. It must "
        "be each user's own, or one of root's with mode 1777, below which each user's is made. Empty: "
        "below the user's home, or as the server is configured.",
    ).tag(config=True)
    archive_url = Unicode(
        help="URL of the cold tier, told to the server; {username} and {servername} are filled in."
    ).tag(config=True)
    stop_limit = Float(
        3600.0,
        min=0,
        help="Seconds that a stop may take at most, whatever the server, which its user controls, says that it needs.",
    ).tag(config=True)
    stop_notes: List[str] = List(help="What the spawn page tells of the last stop.")
    _told: List[str] = List()
    _start_failed = Bool(False)

    # -- JupyterHub's hooks

    def get_env(self) -> dict[str, str]:
        """Called from the spawner's start."""
        env: dict[str, str] = super().get_env()  # type: ignore[misc]
        of_spawner: Any = self
        if self.image_dir:
            env[IMAGES] = of_spawner.format_string(self.image_dir)
        if self.archive_url:
            env["JUPYTER_GPU_CKPT_ARCHIVE"] = of_spawner.format_string(self.archive_url)
        return env

    def get_state(self) -> dict[str, Any]:
        """Called from the hub, which keeps it in its database."""
        state: dict[str, Any] = super().get_state()  # type: ignore[misc]
        return {**state, "gpu_ckpt_notes": list(self.stop_notes)} if self.stop_notes else state

    def load_state(self, state: dict[str, Any]) -> None:
        """Called from the hub when it makes the spawner of a server it knows."""
        super().load_state(state)  # type: ignore[misc]
        self.stop_notes = state.get("gpu_ckpt_notes", [])

    def clear_state(self) -> None:
        """Called from the hub before a start and after every end, that of a start that failed, too."""
        super().clear_state()  # type: ignore[misc]
        if self._fails():
            self.stop_notes = list(self._told)

    async def start(self) -> Any:
        """Called from the hub.  The notes of the last stop are told during this start, and again if it fails."""
        self._told, self.stop_notes = list(self.stop_notes), []
        self._start_failed = False
        try:
            return await super().start()  # type: ignore[misc]
        except BaseException:  # the hub cancels a start that takes too long
            self._start_failed = True
            raise

    async def get_pod_manifest(self) -> Any:
        """Called from KubeSpawner's start.

        Who else ends a pod (an eviction, a drained node, ``kubectl delete``) leaves it what its manifest says.
        """
        pod = await super().get_pod_manifest()  # type: ignore[misc]
        if self.park_before_stop:
            grace = math.ceil(min(self.stop_grace, self.stop_limit))
            pod.spec.termination_grace_period_seconds = max(pod.spec.termination_grace_period_seconds or 0, grace)
        return pod

    async def progress(self) -> AsyncIterator[dict[str, Any]]:
        """Called from the hub for the page that a user looks at while the server starts."""
        for note in self.stop_notes or self._told:  # a page may be open before the start is
            yield {"message": note}
        async for event in super().progress():  # type: ignore[misc]
            yield event

    async def stop(self, now: bool = False) -> None:
        """Called from the hub.  ``now``: it is stopped at once, and only its own stop checkpoints.

        So is a server that the hub stops because it did not come up: nobody has used it, and the images that it was to
        adopt are as they were.
        """
        seconds = 0.0
        if self.park_before_stop and not now and not self._fails():
            try:
                seconds = await asyncio.wait_for(self._park(), self.stop_limit)
            except Exception:
                # Whatever it was: a server that its user or an administrator wants stopped is stopped, gently.
                self.log.exception("A server could not be parked.")
                seconds = self.stop_grace
        with self._allowed(seconds):
            await super().stop(now=now)  # type: ignore[misc]

    def _fails(self) -> bool:
        """Whether the server did not come up: an end now is the end of its start."""
        return self._start_failed or bool(getattr(self, "_waiting_for_response", False))

    # -- parking

    async def _park(self) -> float:
        """The seconds that the server's own stop may need then."""
        spawner: Any = self
        if spawner.server is None or await spawner.poll() is not None:
            return 0.0
        token = spawner.user.new_api_token(
            note="gpu-ckpt: parks the server before it is stopped",
            scopes=[f"access:servers!server={spawner.user.name}/{spawner.name}"],
            # Deleted below; this is for a hub that ends in between.
            expires_in=None if math.isinf(self.park_patience) else int(self.park_patience) + 24 * 3600,
        )
        client = ServerClient(spawner.server.url, token, ssl_options=self._certificates())
        try:
            seconds, outcome = await self._try_to_park(client)
        finally:
            self._forget(token)
        self.stop_notes = notes(outcome)
        return seconds

    async def _try_to_park(self, client: ServerClient) -> tuple[float, Outcome | GpuCkptError]:
        """Until it succeeds or patience ends; the seconds that the server's own stop may need, and what came of it."""
        spawner: Any = self
        seconds, until = self.stop_grace, time.monotonic() + self.park_patience
        while True:
            outcome: Outcome | GpuCkptError
            try:
                need = await client.need()
                seconds = max(self.stop_grace, need.seconds)
                outcome = await client.park(need)
                if outcome.parked:
                    self.log.info("Server %s is parked: %s", spawner._log_name, outcome)
                    return _EMPTY, outcome
            except GpuCkptError as error:
                outcome = error
            final = isinstance(outcome, Outcome) and any(kernel.code == "WRONG_STATE" for kernel in outcome.kernels)
            if final or time.monotonic() + _RETRY > until or await spawner.poll() is not None:
                self.log.warning("Server %s is stopped without being parked: %s", spawner._log_name, outcome)
                return seconds, outcome
            await asyncio.sleep(_RETRY)

    @contextmanager
    def _allowed(self, seconds: float) -> Iterator[None]:
        """Raise what the spawner leaves to a server that ends, for this one stop."""
        seconds = math.ceil(min(seconds, self.stop_limit))
        wanted = {name: seconds for name in GRACES if self.has_trait(name)}
        if "delete_grace_period" in wanted and seconds:
            wanted[_WAITS] = math.ceil(seconds + _EMPTY)
        configured = {name: getattr(self, name) for name in wanted}
        for name, value in wanted.items():
            setattr(self, name, max(value, configured[name]))
        try:
            yield
        finally:
            for name, value in configured.items():
                setattr(self, name, value)

    def _certificates(self) -> Any:
        """The hub's own, where it talks to servers by TLS (``JupyterHub.internal_ssl``)."""
        from jupyterhub.utils import make_ssl_context

        settings: Any = self.user.settings  # type: ignore[attr-defined]
        names = (settings.get(f"internal_ssl_{part}") for part in ("key", "cert", "ca"))
        key, cert, ca = names
        return make_ssl_context(key, cert, cafile=ca)

    def _forget(self, token: str) -> None:
        from jupyterhub import orm

        database: Any = self.user.db  # type: ignore[attr-defined]
        found = orm.APIToken.find(database, token)
        if found is not None:
            database.delete(found)
            database.commit()


def notes(outcome: Outcome | GpuCkptError) -> list[str]:
    """What a user is told, when the server starts again, of how it was stopped."""
    if isinstance(outcome, GpuCkptError):
        return [f"The last stop could not checkpoint your kernels: {outcome.code}. {outcome.hint}"]
    told = []
    asleep = [kernel for kernel in outcome.kernels if kernel.code is None]
    if asleep:
        together = size(sum(kernel.bytes for kernel in asleep))
        told.append(f"{len(asleep)} of your kernels sleep ({together}); the next cell you run wakes each of them.")
    told += [
        f"Kernel {kernel.kernel_id} could not be checkpointed when the server was stopped: {kernel.code}. {kernel.hint}"
        for kernel in outcome.kernels
        if kernel.code is not None
    ]
    return told
