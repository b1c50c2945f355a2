"""A ``pre_spawn_hook`` that sends a user to a node on which the sleeping kernels can wake.

In jupyterhub_config.py::

    from jupyter_gpu_ckpt.hub.placement import Placement

    c.Spawner.pre_spawn_hook = Placement(published="/shared/placement/{username}")

and `spawn_messages.SpawnMessagesMixin` before the spawner's class.  The hook reads what the user's last server
published about its sleeping kernels (`node.requirements`), and requests a node that has it from Slurm (batchspawner) or
Kubernetes (KubeSpawner).  If there is none, the user gets any node and a message: the images stay, and their kernels
wake on a node like theirs.

**Permissions.**  Only their owner can read images, and a hub that could would read every secret of every kernel.  So
the user's own server publishes the little that a scheduler needs, in a directory that the hub can read, without any
path, name, or identifier of a kernel or an image.  A user who writes something else there can only send the own server
to another node; the checked form allows a scheduler neither options nor operators.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from traitlets import Bool, Dict, Float, List, Unicode
from traitlets.config import LoggingConfigurable

from ..errors import GpuCkptError, ImageFormat
from ..node.requirements import FILE, MOST_BYTES, VARIABLE, NodeChoice, parse, plan
from . import kubernetes, slurm, spawn_messages

#: Seconds for the end of a command that was killed.
_KILLED = 1.0
_STAYS = "They stay saved, nothing is lost, and they wake on a node like that."


@dataclass(frozen=True)
class Changes:
    """Traits to set on the spawner; none: the scheduler chooses freely.  ``message``: for the user."""

    traits: Mapping[str, Any]
    message: str


class Placement(LoggingConfigurable):
    """Callable as ``Spawner.pre_spawn_hook``."""

    published = Unicode(
        "",
        help="The directory in which a user's server publishes what its sleeping kernels need, as the hub sees it; "
        "{username} is the user's name: escaped as in a URL, or as KubeSpawner does it in volumes.",
    ).tag(config=True)
    publish_to = Unicode(
        "", help="The same directory as the user's server sees it, where that is another path (a volume in a pod)."
    ).tag(config=True)
    without_gpu = Dict(
        help="Traits of the spawner for a user who has nothing on a GPU, no sleeping kernel with CUDA state: for "
        'instance {"req_gres": "", "req_partition": "cpu"}, or {"extra_resource_limits": {}}. Empty: such a user gets '
        "what the spawner is configured for."
    ).tag(config=True)
    gpu_option = Unicode(
        "gpu",
        help="A true value of this name in the spawner's user_options asks for a GPU: without_gpu is not applied.",
    ).tag(config=True)
    feature_names = Dict(
        per_key_traits={kind: Unicode() for kind in slurm.NAMES},
        help="Slurm: how the features are named in slurm.conf, by kind (architecture, linux, glibc, driver, cpu, gpu); "
        "{} is the value. Empty: this kind is not requested.",
    ).tag(config=True)
    sinfo = List(Unicode(), list(slurm.SINFO), help="Slurm: the command that lists the nodes.").tag(config=True)
    list_nodes = Bool(
        False,
        help="Kubernetes: look at the nodes' labels first (the hub needs a ClusterRole to list nodes), and "
        "require a node that fits if there is one. Else such a node is preferred, and Kubernetes chooses.",
    ).tag(config=True)
    timeout = Float(10.0, help="Seconds for reading what is published, and for asking the scheduler.").tag(config=True)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # A spawner may be used for several spawns: each starts from the configured traits.
        self._configured: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        #: Directories that are being read.
        self._reading: set[Path] = set()

    async def __call__(self, spawner: Any) -> None:
        """Called from JupyterHub before each start.  Never prevents a start: at worst the server gets any node."""
        spawn_messages.install(spawner)
        spawn_messages.clear(spawner)
        for name, value in self._configured.pop(spawner, {}).items():
            setattr(spawner, name, value)
        name = _name(spawner)
        if not self.published or name in (".", ".."):
            return
        directory = self.published.replace("{username}", name)
        of_server = (self.publish_to or self.published).replace("{username}", name)
        spawner.environment = {**spawner.environment, VARIABLE: of_server}
        try:
            text = await asyncio.wait_for(self._read(Path(directory)), self.timeout)
            kernels = parse(text) if text is not None else []
            changes = await asyncio.wait_for(self.changes(spawner, plan(kernels)), self.timeout)
        except Exception as error:
            what = error.code if isinstance(error, GpuCkptError) else type(error).__name__
            self.log.warning("%s: no node could be chosen: %s", spawner._log_name, what)
            self.log.debug("No node could be chosen because:", exc_info=error)
            message = f"The node that your sleeping kernels need could not be found out ({what}): you get any. {_STAYS}"
            changes = Changes({}, message)
        self._configured[spawner] = {name: getattr(spawner, name) for name in changes.traits}
        for name, value in changes.traits.items():
            setattr(spawner, name, value)
        if changes.message:
            spawn_messages.add(spawner, changes.message)

    async def _read(self, directory: Path) -> bytes | None:
        """Read what is published, in a thread of its own.  Raises as `read`, `TimeoutError` while an earlier one reads.

        A file server may never answer: the hub's own threads, which are few, must not wait for it, and one such thread
        a directory is enough.
        """
        if directory in self._reading:
            raise TimeoutError
        loop, done = asyncio.get_running_loop(), Future[bytes | None]()

        def run() -> None:
            try:
                done.set_result(read(directory))
            except Exception as error:
                done.set_exception(error)
            finally:
                self._reading.discard(directory)

        done.set_running_or_notify_cancel()  # so that no time-out cancels it, for which its thread is not prepared
        self._reading.add(directory)
        try:
            threading.Thread(target=run, name="gpu-ckpt-placement", daemon=True).start()
        except RuntimeError:  # there are no more threads
            self._reading.discard(directory)
            raise
        return await asyncio.wrap_future(done, loop=loop)

    async def changes(self, spawner: Any, choice: NodeChoice) -> Changes:
        """Return the traits that a choice of node sets on this spawner.  Raises the errors of a failing scheduler."""
        wants_gpu = (spawner.user_options or {}).get(self.gpu_option)
        if not choice.requirements.gpus and self.without_gpu and not wants_gpu:
            made = Changes(dict(self.without_gpu), "Nothing of yours is on a GPU: you get a node without one.")
            if choice.together:
                on_top = await self._scheduled(spawner, choice, made.traits)
                made = Changes({**made.traits, **on_top.traits}, f"{made.message} {on_top.message}")
            return made
        return await self._scheduled(spawner, choice, {}) if choice.together else Changes({}, "")

    async def _scheduled(self, spawner: Any, choice: NodeChoice, before: Mapping[str, Any]) -> Changes:
        for trait, schedule in _SCHEDULERS.items():
            if spawner.has_trait(trait):
                made = await schedule(self, spawner, choice, lambda name: before.get(name, getattr(spawner, name)))
                return Changes(made.traits, f"{made.message}{_others(choice)}")
        return Changes({}, "")

    async def _slurm(self, spawner: Any, choice: NodeChoice, now: Callable[[str], Any]) -> Changes:
        start = asyncio.create_subprocess_exec(
            *self.sinfo,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        starting = asyncio.ensure_future(start)
        try:
            process = await asyncio.shield(starting)  # cancelled half-way it would end the program without its children
            output, _ = await process.communicate()
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):  # it was not started
                await _kill_session(await starting)
            raise
        if process.returncode != 0:
            raise OSError(f"{self.sinfo[0]} ended with status {process.returncode}")
        cluster = slurm.nodes(output.decode(), now("req_partition"))
        request = slurm.sbatch_options(choice.requirements, cluster, {**slurm.NAMES, **self.feature_names})
        if not request.nodes:
            return _nowhere(choice)
        traits: dict[str, Any] = {}
        if request.constraint and spawner.has_trait("req_constraint"):
            traits["req_constraint"] = slurm.both(now("req_constraint"), request.constraint)
        elif request.constraint:
            traits["req_options"] = slurm.with_constraint(now("req_options"), request.constraint)
        if request.gres:
            traits["req_gres"] = slurm.with_gpus(now("req_gres"), request.gres)
        more = f" or one of {len(request.nodes) - 5} more" if len(request.nodes) > 5 else ""
        return Changes(traits, f"{_needs(choice)}: {', '.join(sorted(request.nodes)[:5])}{more} will do.")

    async def _kubernetes(self, spawner: Any, choice: NodeChoice, now: Callable[[str], Any]) -> Changes:
        traits: dict[str, Any] = {}
        if choice.requirements.gpus:
            gpus = {kubernetes.GPU_RESOURCE: str(len(choice.requirements.gpus))}
            traits["extra_resource_limits"] = {**now("extra_resource_limits"), **gpus}
        needs = _needs(choice)
        if not self.list_nodes:
            name = "node_affinity_preferred"
            traits[name] = kubernetes.preferred(kubernetes.expressions(choice.requirements), now(name))
            return Changes(traits, f"{needs}: a node like that is preferred. On another one they stay saved.")
        nodes = await kubernetes.node_labels(spawner.api)
        alternatives = kubernetes.expressions(choice.requirements, {label for node in nodes for label in node})
        if not any(kubernetes.fits(alternatives, node) for node in nodes):
            return _nowhere(choice)
        name = "node_affinity_required"
        traits[name] = kubernetes.required(alternatives, now(name))
        return Changes(traits, f"{needs}: you get a node like that.")


_Scheduler = Callable[[Placement, Any, NodeChoice, Callable[[str], Any]], Awaitable[Changes]]
#: Schedulers by a trait that only their spawners have.
_SCHEDULERS: dict[str, _Scheduler] = {"req_gres": Placement._slurm, "node_affinity_required": Placement._kubernetes}


async def _kill_session(leader: asyncio.subprocess.Process) -> None:
    """Kill a process and its children, which keep its pipe open, and wait a moment for its end."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(leader.wait(), _KILLED)


def read(directory: Path) -> bytes | None:
    """Return the published text, None if there is none.  Raises `OSError`, `ImageFormat`.

    The user can write to the directory: the file may be a link to one of the hub's, a pipe without writer, or endless.
    """
    try:
        handle = os.open(directory / FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            message = "The published needs of the sleeping kernels are not in a plain file."
            raise ImageFormat(message, hint=f"Remove {FILE} from the directory: the user's server writes it again.")
        return file.read(MOST_BYTES + 1)


def _name(spawner: Any) -> str:
    """Return the user's name as a directory's name, as the spawner has it in paths of volumes."""
    if (expand := getattr(spawner, "_expand_user_properties", None)) is not None:
        return str(expand("{username}"))
    return quote(spawner.user.name, safe="@")


def _needs(choice: NodeChoice) -> str:
    whose = "Your sleeping kernel needs" if choice.together == 1 else f"Your {choice.together} sleeping kernels need"
    return f"{whose} {choice.requirements}"


def _nowhere(choice: NodeChoice) -> Changes:
    return Changes({}, f"{_needs(choice)}. No node like that is in service: you get any. {_STAYS}")


def _others(choice: NodeChoice) -> str:
    """Return the message about kernels that need another kind of node than the requested one."""
    wanted, count = "; ".join(sorted({str(each) for each in choice.others})), len(choice.others)
    return f" Another kind of node is needed by {count} more ({wanted}), which stay saved." if count else ""
