"""Why the kernel or the container refuses a namespace, in words, and the exact command that mends it.

Sources: user_namespaces(7), time_namespaces(7), ptrace(2), the kernel's ``Documentation/admin-guide/LSM/Yama.rst``,
Debian's
``kernel.unprivileged_userns_clone`` and Ubuntu's ``kernel.apparmor_restrict_unprivileged_userns``, Docker's "seccomp
security profiles" and ``--security-opt systempaths``, Kubernetes' "Configure a Security Context" (``procMount`` needs
``hostUsers: false``).
"""

from __future__ import annotations

import errno
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import GpuCkptError

#: What is wrong, in a sentence, and the command, or an empty string.
Remedy = tuple[str, str]

#: A usual default of ``user.max_*_namespaces`` on a machine with 4 GiB; any number but a tiny one will do.
SOME_NAMESPACES = 15000

_UNCONFINED = "--security-opt seccomp=unconfined --security-opt apparmor=unconfined"
_ROOT_CAPABILITIES = ("SYS_ADMIN", "SYS_PTRACE", "CHECKPOINT_RESTORE")


class RefusedStep(NamedTuple):
    """A step that was refused: its name, errno and the system's words."""

    step: str
    errno: int
    what: str


@dataclass(frozen=True)
class Trial:
    """What ``namespace_probe.py`` answered, and the circumstances in which an answer is understood."""

    answers: dict[str, Any]
    root: bool
    container: str
    sysctl: Callable[[str], str | None]
    confined: bool

    def reached(self, step: str) -> bool:
        return step in self.answers

    def works(self, step: str) -> bool:
        return step in self.answers and self.answers[step] is None

    def refused(self, *steps: str) -> RefusedStep | None:
        """The first of ``steps`` that was refused."""
        return next((RefusedStep(step, **self.answers[step]) for step in steps if self.answers.get(step)), None)


def container(engine: str, *, root: bool) -> str:
    """How to start the container so that a capsule can be made in it."""
    if engine == "kubernetes":
        added = f", capabilities: {{add: [{', '.join(_ROOT_CAPABILITIES)}]}}" if root else ""
        return (
            "In the pod's spec: hostUsers: false, and in the container's securityContext: {procMount: Unmasked, "
            f"seccompProfile: {{type: Unconfined}}, appArmorProfile: {{type: Unconfined}}{added}}}"
        )
    program, unmasked = ("podman", "unmask=ALL") if engine == "podman" else ("docker", "systempaths=unconfined")
    added = "".join(f" --cap-add {name}" for name in _ROOT_CAPABILITIES) if root else ""
    return f"{program} run{added} {_UNCONFINED} --security-opt {unmasked} ..."


def set_sysctl(name: str, value: int | str) -> str:
    return f"sudo sysctl -w {name}={value}"


def user_namespace(trial: Trial, refused: RefusedStep) -> Remedy:
    """A user namespace was refused, or has no rights."""
    where = " on the container's host" if trial.container else ""
    if trial.sysctl("user.max_user_namespaces") == "0":
        mend = set_sysctl("user.max_user_namespaces", SOME_NAMESPACES)
        return f"User namespaces are switched off{where} (user.max_user_namespaces is 0).", mend
    if trial.sysctl("kernel.unprivileged_userns_clone") == "0":
        mend = set_sysctl("kernel.unprivileged_userns_clone", 1)
        return f"User namespaces are for root only{where} (kernel.unprivileged_userns_clone is 0).", mend
    if refused.errno == errno.ENOSPC:
        mend = set_sysctl("user.max_user_namespaces", SOME_NAMESPACES)
        return f"The limit of user namespaces is reached{where} (user.max_user_namespaces).", mend
    if apparmor := _apparmor(trial):
        return apparmor
    if trial.container:
        whose = "'s seccomp profile" if trial.confined else ""
        what = f"The container{whose} refuses user namespaces ({refused.what})."
        return what, container(trial.container, root=trial.root)
    if trial.confined:
        what = f"A seccomp filter refuses user namespaces ({refused.what}): a container's or a systemd service's."
        engine = container(trial.container, root=trial.root)
        return what, f"{engine} (or, in the service's unit: RestrictNamespaces=no)"
    return f"User namespaces are refused: {refused.what}.", ""


def namespace(trial: Trial, refused: RefusedStep) -> Remedy:
    """One of the mount, time and pid namespaces was refused."""
    step = refused.step
    if refused.errno == errno.ENOSPC:
        name = f"user.max_{'mnt' if step == 'mount' else step}_namespaces"
        return f"The limit of {step} namespaces is reached ({name}).", set_sysctl(name, SOME_NAMESPACES)
    if refused.errno == errno.EINVAL and step == "time":
        what = "This Linux kernel has no time namespaces, without which a restored kernel's timers would stand still."
        return what, "Boot a Linux kernel built with CONFIG_TIME_NS=y."
    if not trial.root and (apparmor := _apparmor(trial)):
        return apparmor
    what = f"A {step} namespace is refused: {refused.what}."
    return what, container(trial.container, root=trial.root) if trial.root or trial.confined else ""


def proc(trial: Trial, refused: RefusedStep, covers: Sequence[str]) -> Remedy:
    """A fresh ``/proc`` was refused."""
    if trial.container:
        hidden = f" ({', '.join(covers)})" if covers else ""
        what = f"The container hides parts of /proc{hidden}, so that the kernel refuses a fresh one."
        return what, container(trial.container, root=trial.root)
    if covers:
        what = f"Parts of /proc are mounted over ({', '.join(covers)}), so that the kernel refuses a fresh one."
        return what, f"sudo umount {' '.join(shlex.quote(cover) for cover in reversed(covers))}"
    if not trial.root and (apparmor := _apparmor(trial)):
        return apparmor
    return f"A fresh /proc is refused: {refused.what}.", ""


def ptrace(trial: Trial, refused: RefusedStep, scope: str | None) -> Remedy:
    """CRIU could not attach to a process."""
    if scope == "3":
        what = "CRIU cannot attach to processes: yama's ptrace_scope is 3, which only a restart of the host can undo."
        mend = "echo kernel.yama.ptrace_scope=1 | sudo tee /etc/sysctl.d/99-ptrace.conf && sudo reboot"
        return what, mend
    what = f"CRIU cannot attach to processes: {refused.what}."
    return what, container(trial.container, root=trial.root) if trial.confined or trial.container else ""


def cuda(error: GpuCkptError) -> str:
    """What mends a missing part of the GPU stack; the part is named by number or reason, never by text."""
    driver = "Install NVIDIA driver 580 or newer, and restart the host."
    return {
        "binding-missing": "pip install 'jupyter_gpu_ckpt[gpu]'",
        "nvml-missing": "pip install 'jupyter_gpu_ckpt[gpu]'",
        "binding-too-old": "pip install --upgrade 'jupyter_gpu_ckpt[gpu]'",
        "symbol-missing": "pip install --upgrade 'jupyter_gpu_ckpt[gpu]'",
        "driver-missing": driver,
        "driver-too-old": driver,
    }.get(str(error.details.get("reason")), error.hint)


def _apparmor(trial: Trial) -> Remedy | None:
    """Ubuntu 24.04 grants the namespace and takes its capabilities away, so that any of the next steps fails."""
    name = "kernel.apparmor_restrict_unprivileged_userns"
    if trial.sysctl(name) != "1":
        return None
    return f"AppArmor takes the rights of ordinary users' namespaces away ({name} is 1).", set_sysctl(name, 0)
