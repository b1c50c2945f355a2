"""Explain why Linux or the container refuses a namespace, and name the exact command that fixes it.

Sources: user_namespaces(7), time_namespaces(7), ptrace(2), the kernel's ``Documentation/admin-guide/LSM/Yama.rst``,
Debian's ``kernel.unprivileged_userns_clone`` and Ubuntu's ``kernel.apparmor_restrict_unprivileged_userns``, Docker's
"seccomp security profiles" and ``--security-opt systempaths``, Kubernetes' "Configure a Security Context"
(``procMount`` needs ``hostUsers: false``).
"""

from __future__ import annotations

import errno
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import GpuCkptError

#: The problem in a sentence, and the command, or an empty string.
Fix = tuple[str, str]

NEW_DRIVER = "Install NVIDIA driver 580 or newer, and restart the host."

NATIVE_PARTS = (
    "Install a C compiler (apt-get install gcc libc6-dev), then pip install --force-reinstall jupyter_gpu_ckpt"
)

#: A usual default of ``user.max_*_namespaces`` on a machine with 4 GiB; any number but a tiny one will do.
SOME_NAMESPACES = 15000

_UNCONFINED = "--security-opt seccomp=unconfined --security-opt apparmor=unconfined"
_ROOT_CAPABILITIES = ("SYS_ADMIN", "SYS_PTRACE", "CHECKPOINT_RESTORE", "SYS_TIME", "NET_ADMIN")


class RefusedStep(NamedTuple):
    """The name, errno and system message of a refused step."""

    step: str
    errno: int
    message: str


@dataclass(frozen=True)
class Trial:
    """The results of ``namespace_probe.py``, and the facts about the host that explain them."""

    answers: dict[str, Any]
    root: bool
    container: str
    sysctl: Callable[[str], str | None]
    confined: bool

    def refused(self, *steps: str) -> RefusedStep | None:
        """Return the first refused one of ``steps``."""
        return next((RefusedStep(step, **self.answers[step]) for step in steps if self.answers.get(step)), None)


def container(engine: str, *, root: bool) -> str:
    """Return the options with which a container must be started so that capsules can be created in it."""
    if engine == "kubernetes":
        added = f", capabilities: {{add: [{', '.join(_ROOT_CAPABILITIES)}]}}" if root else ""
        return (
            "In the pod's spec: hostUsers: false, and in the container's securityContext: {procMount: Unmasked, "
            f"seccompProfile: {{type: Unconfined}}, appArmorProfile: {{type: Unconfined}}{added}}}"
        )
    program, unmasked = ("podman", "unmask=ALL") if engine == "podman" else ("docker", "systempaths=unconfined")
    added = "".join(f" --cap-add {name}" for name in _ROOT_CAPABILITIES) if root else ""
    return f"{program} run{added} {_UNCONFINED} --security-opt {unmasked} ..."


def seccomp(trial: Trial) -> str:
    """Return what removes the filter of a container or of a service."""
    if trial.container:
        return container(trial.container, root=trial.root)
    return (
        "Remove SystemCallFilter=, SystemCallArchitectures=, RestrictNamespaces= and the like from the service's unit."
    )


def set_sysctl(name: str, value: int | str) -> str:
    return f"sudo sysctl -w {name}={value}"


def user_namespace(trial: Trial, refused: RefusedStep) -> Fix:
    """Explain a user namespace that was refused, or has no rights."""
    where = " on the container's host" if trial.container else ""
    raise_limit = set_sysctl("user.max_user_namespaces", SOME_NAMESPACES)
    if trial.sysctl("user.max_user_namespaces") == "0":
        return f"User namespaces are switched off{where} (user.max_user_namespaces is 0).", raise_limit
    if trial.sysctl("kernel.unprivileged_userns_clone") == "0":
        fix = set_sysctl("kernel.unprivileged_userns_clone", 1)
        return f"User namespaces are for root only{where} (kernel.unprivileged_userns_clone is 0).", fix
    if refused.errno == errno.ENOSPC:
        return f"The limit of user namespaces is reached{where} (user.max_user_namespaces).", raise_limit
    if apparmor := _apparmor(trial):
        return apparmor
    if trial.container:
        whose = "'s seccomp profile" if trial.confined else ""
        message = f"The container{whose} refuses user namespaces ({refused.message})."
        return message, container(trial.container, root=trial.root)
    if trial.confined:
        message = f"A seccomp filter refuses user namespaces ({refused.message}): a container's or a systemd service's."
        engine = container(trial.container, root=trial.root)
        return message, f"{engine} (or, in the service's unit: RestrictNamespaces=no)"
    return f"User namespaces are refused: {refused.message}.", ""


def namespace(trial: Trial, refused: RefusedStep) -> Fix:
    """Explain a mount, time or pid namespace that was refused."""
    step = refused.step
    if refused.errno == errno.ENOSPC:
        name = f"user.max_{'mnt' if step == 'mount' else step}_namespaces"
        return f"The limit of {step} namespaces is reached ({name}).", set_sysctl(name, SOME_NAMESPACES)
    if refused.errno == errno.EINVAL and step == "time":
        message = "This Linux kernel has no time namespaces, without which a restored kernel's timers stand still."
        return message, "Boot a Linux kernel built with CONFIG_TIME_NS=y."
    if not trial.root and (apparmor := _apparmor(trial)):
        return apparmor
    message = f"A {step} namespace is refused: {refused.message}."
    return message, container(trial.container, root=trial.root) if trial.root or trial.confined else ""


def proc(trial: Trial, refused: RefusedStep, covers: Sequence[str]) -> Fix:
    """Explain a fresh ``/proc`` that was refused."""
    if trial.container:
        hidden = f" ({', '.join(covers)})" if covers else ""
        message = f"The container hides parts of /proc{hidden}, so that Linux refuses a fresh one."
        return message, container(trial.container, root=trial.root)
    if covers:
        message = f"Parts of /proc are mounted over ({', '.join(covers)}), so that Linux refuses a fresh one."
        return message, f"sudo umount {' '.join(shlex.quote(cover) for cover in reversed(covers))}"
    if not trial.root and (apparmor := _apparmor(trial)):
        return apparmor
    return f"A fresh /proc is refused: {refused.message}.", ""


def ptrace(trial: Trial, refused: RefusedStep, scope: str | None) -> Fix:
    """Explain why CRIU could not attach to a process."""
    if scope == "3":
        fix = "echo kernel.yama.ptrace_scope=1 | sudo tee /etc/sysctl.d/99-ptrace.conf && sudo reboot"
        return "CRIU cannot attach to processes: yama's ptrace_scope is 3, until the host is restarted.", fix
    message = f"CRIU cannot attach to processes: {refused.message}."
    return message, container(trial.container, root=trial.root) if trial.confined or trial.container else ""


def apparmor_profile(trial: Trial, refused: RefusedStep) -> Fix:
    """Explain a profile below which kernels would sleep and not wake."""
    message = f"The AppArmor profile forbids to enter itself, so no restored thread gets it: {refused.message}."
    return message, "Give the profile a rule `change_profile` to its own name, and load it again."


def cuda(error: GpuCkptError) -> str:
    """Return the command that installs the missing part of the GPU stack, by the error's reason."""
    return {
        "binding-missing": "pip install 'jupyter_gpu_ckpt[gpu]'",
        "nvml-missing": "pip install 'jupyter_gpu_ckpt[gpu]'",
        "binding-too-old": "pip install --upgrade 'jupyter_gpu_ckpt[gpu]'",
        "symbol-missing": "pip install --upgrade 'jupyter_gpu_ckpt[gpu]'",
        "driver-missing": NEW_DRIVER,
        "driver-too-old": NEW_DRIVER,
    }.get(str(error.details.get("reason")), error.hint)


def _apparmor(trial: Trial) -> Fix | None:
    """Explain Ubuntu 24.04, which grants the namespace without capabilities, so that one of the next steps fails."""
    name = "kernel.apparmor_restrict_unprivileged_userns"
    if trial.sysctl(name) != "1":
        return None
    return f"AppArmor removes the rights of ordinary users' namespaces ({name} is 1).", set_sysctl(name, 0)
