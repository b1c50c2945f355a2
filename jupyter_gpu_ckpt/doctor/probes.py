"""The doctor's probes of this host: each is a real trial with a deadline, and can be replaced in a test."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..capsule import root_program
from ..criu import install
from ..criu.install import Check, CriuBinary
from ..cuda import fastpath
from ..cuda.fastpath import Preload, preload
from ..node import facts
from ..procfs import mounts, status, sysctl
from ..subprocesses import run

if TYPE_CHECKING:
    from ..cuda.gpus import Gpu

#: Seconds; a cold start of a conda environment on a network file system takes many.
PYTHON_TIMEOUT_S = 30.0
#: The package of the server extension.
EXTENSION = "jupyter_gpu_ckpt"


@dataclass(frozen=True)
class DirectoryFacts:
    """A directory, or its nearest existing parent.

    ``free`` bytes for an ordinary user; ``filesystem`` as in ``/proc/self/mountinfo``; ``problem`` is empty if a
    private directory (mode 0700) could be created and written there.
    """

    path: Path
    free: int
    filesystem: str
    problem: str = ""


def container() -> str:
    """Return the container engine: ``kubernetes``, ``docker`` or ``podman``; empty outside of containers."""
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    if Path("/run/.containerenv").exists():
        return "podman"
    return "docker" if Path("/.dockerenv").exists() else ""


def proc_covers() -> list[str]:
    """Return the mounts over parts of ``/proc``, except automount points.

    Linux refuses a fresh ``/proc`` to a user namespace while there are any (``mount_too_revealing``, fs/namespace.c).
    """
    points = [mount.point for mount in mounts()]
    return [point for point in points if point.startswith("/proc/") and point != "/proc/sys/fs/binfmt_misc"]


def directory_facts(directory: Path) -> DirectoryFacts:
    """Try whether images could be written to ``directory``, without creating it or leaving a file."""
    existing = directory.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    points = facts.mounts()
    kind = points.get(facts.mount_of(os.path.realpath(existing), points), "unknown")
    return DirectoryFacts(existing, shutil.disk_usage(existing).free, kind, _try_to_write(existing))


def _try_to_write(directory: Path) -> str:
    try:
        with tempfile.TemporaryDirectory(prefix=".gpu-ckpt-doctor-", dir=directory) as trial:
            if os.stat(trial).st_mode & 0o077:
                return "directories in it cannot be made private (mode 0700)"
            with open(f"{trial}/file", "wb") as file:
                file.write(b"x" * 4096)
                file.flush()
                os.fsync(file.fileno())
            os.link(file.name, f"{file.name}-linked")  # claims of images are links
    except OSError as error:
        return error.strerror or str(error)
    return ""


class NoIpykernel(LookupError):
    """The default kernel's ``python``, which may be another environment's than the server's, has no ipykernel."""

    def __init__(self, message: str, python: str) -> None:
        super().__init__(message)
        self.python = python


def default_kernel() -> str:
    """Return the version of ipykernel in the environment of the default kernel.

    Raises `LookupError` if there is no kernel, `NoIpykernel`, `OSError`, `TimeoutError` if its Python fails or hangs.
    """
    try:
        from jupyter_client import kernelspec
    except ImportError:
        raise LookupError("jupyter_client is not installed here") from None
    try:
        argv: Sequence[str] = kernelspec.get_kernel_spec(kernelspec.NATIVE_KERNEL_NAME).argv
    except kernelspec.NoSuchKernel:
        raise LookupError(f"there is no kernel named {kernelspec.NATIVE_KERNEL_NAME}") from None
    # `KernelManager.format_kernel_cmd` replaces a bare "python" by this one
    python = sys.executable if re.fullmatch(r"python[\d.]*", argv[0]) else argv[0]
    program = "import ipykernel; print(ipykernel.__version__)"
    done = run([python, "-c", program], timeout_s=PYTHON_TIMEOUT_S, env=os.environ)
    if done.status != 0:
        raise NoIpykernel(f"{python} cannot import ipykernel: {done.tail(1)}", python)
    return done.out.strip()


def missing_native_parts() -> list[str]:
    """Return the programs in C that this installation lacks, as `checks.NATIVE_PARTS` names them."""
    built = {"fastpath": fastpath.built(), "root": root_program.built()}
    return [name for name, path in built.items() if path is None]


@dataclass(frozen=True)
class ServerExtension:
    """The server extension in this environment: whether servers load it; ``problem``: why it cannot be loaded."""

    enabled: bool
    problem: str = ""


def server_extension(configured: Mapping[str, Any]) -> ServerExtension | None:
    """Look for the server extension as a Jupyter server does; None where no server is installed.

    ``configured``: ``ServerApp.jpserver_extensions`` of the configuration, which has precedence over the files that
    ``jupyter server extension enable``, and packages, put into ``jupyter_server_config.d``.
    """
    try:
        from jupyter_core.paths import jupyter_config_path
        from jupyter_server.extension.config import ExtensionConfigManager
        from jupyter_server.extension.manager import ExtensionPackage
    except ImportError:
        return None
    manager = ExtensionConfigManager(read_config_path=jupyter_config_path())
    found = manager.get_jpserver_extensions()  # type: ignore[no-untyped-call]
    if not {**found, **configured}.get(EXTENSION, False):
        return ServerExtension(False)
    try:
        ExtensionPackage(name=EXTENSION, enabled=True).validate()  # type: ignore[no-untyped-call]
    except Exception as error:  # whatever the import of what it needs raises
        return ServerExtension(True, str(error) or type(error).__name__)
    return ServerExtension(True)


def nvidia_driver() -> str | None:
    """Return the version of the kernel-mode driver; ``None`` without one, ``"0"`` if it is unknown."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "0" if Path("/dev/nvidiactl").exists() else None
    match = re.search(r"Kernel Module\b.*?\s(\d+(?:\.\d+)+)\s", text)
    return match[1] if match else "0"


def require_cuda() -> None:
    """Raise `errors.CudaUnavailable` (``details["reason"]``) if processes cannot be checkpointed on this host."""
    from ..cuda.cuda import Cuda  # starts a helper process: only for a host that has a driver

    with contextlib.closing(Cuda()) as facade:
        facade.available()


def gpus() -> list[Gpu]:
    """Return the GPUs that NVML reports; raises `errors.CudaError`."""
    from ..cuda.gpus import Gpus

    with contextlib.closing(Gpus()) as facade:
        return facade.list()


@dataclass(frozen=True)
class Probes:
    """All probes; tests replace some of them."""

    kernel: Callable[[], platform.uname_result] = platform.uname
    glibc: Callable[[], str] = facts.glibc
    missing_native_parts: Callable[[], list[str]] = missing_native_parts
    is_root: Callable[[], bool] = lambda: os.geteuid() == 0
    status: Callable[[], dict[str, str]] = status
    sysctl: Callable[[str], str | None] = sysctl
    container: Callable[[], str] = container
    proc_covers: Callable[[], list[str]] = proc_covers
    namespaces: Callable[[], dict[str, Any]] = install.probe_namespaces
    criu: Callable[[], CriuBinary] = install.find
    criu_check: Callable[[CriuBinary], Check] = install.check
    directory_facts: Callable[[Path], DirectoryFacts] = directory_facts
    default_kernel: Callable[[], str] = default_kernel
    server_extension: Callable[[Mapping[str, Any]], ServerExtension | None] = server_extension
    nvidia_driver: Callable[[], str | None] = nvidia_driver
    require_cuda: Callable[[], None] = require_cuda
    gpus: Callable[[], list[Gpu]] = gpus
    preload: Callable[[], Preload] = preload
