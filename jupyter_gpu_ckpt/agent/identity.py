"""Make unique what a branch has in common with the kernel it comes from, before any client reaches it.

Both were one process.  What names messages, files and sessions, and the generators that secrets are drawn from, must
not give the same twice, and what both still use must not end with one of them.  The user's own generators (`random`,
NumPy's and torch's global ones) continue as they were, unless new seeds are wanted.  Nothing is imported that the
kernel has not imported itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import uuid
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from . import probes

#: Bytes for a generator.
_SEED = 64
#: Variables of this project, of whichever environment; and those that it sets for every kernel.
_OURS, _FOR_KERNELS = "JUPYTER_GPU_CKPT", ("LD_PRELOAD", "JPY_PARENT_PID", "USE_LIBUV")


def become_another(kernel: Any, content: Mapping[str, Any], errors: list[str]) -> dict[str, Any]:
    """Make everything unique but the session of the kernel's messages, which is changed by `sign_as`.

    ``content``: that of the request.  What fails is listed in ``errors``.
    """
    probes.probe(errors, "temporary names", _renew_temporary_names, None)
    probes.probe(errors, "uuid", _renew_uuids, None)
    probes.probe(errors, "OpenSSL", reseed_openssl, None)
    probes.probe(errors, "temporary files", _leave_temporary_files, None)
    if content.get("reseed"):
        for name, reseed in _GENERATORS.items():
            if name in sys.modules:
                probes.probe(errors, name, _reseeding(name, reseed), None)
    if "environ" in content:
        probes.probe(errors, "history", lambda: _forget_cells(kernel), None)
        probes.probe(errors, "environment", lambda: _replace_environment(content["environ"]), None)
    if notebook := content.get("notebook"):
        os.environ["JPY_SESSION_NAME"] = notebook
    if directory := content.get("directory"):
        probes.probe(errors, "working directory", lambda: _change_directory(kernel, directory), None)
    return {"session": uuid.uuid4().hex, "pid": os.getpid()}


def sign_as(kernel: Any, session: str, key: str) -> None:
    """Give the kernel's messages another session id and another key.  Called when the reply that names them is sent."""
    kernel.session.digest_history.clear()
    kernel.session.session = session
    kernel.session.message_count = 0
    kernel.session.key = key.encode("ascii")
    kernel.ident = str(uuid.uuid4())


def _renew_temporary_names() -> None:
    tempfile = sys.modules.get("tempfile")
    if tempfile is not None:
        tempfile._name_sequence = None  # type: ignore[attr-defined]  # its generator has a state, and the pid is the same


def _renew_uuids() -> None:
    """Have uuid1 and its like begin anew.  (uuid4 has no state.)"""
    for name in ("_last_timestamp", "_last_timestamp_v6", "_last_timestamp_v7"):
        if hasattr(uuid, name):
            setattr(uuid, name, None)


def reseed_openssl() -> None:
    """Add entropy to the generator of each copy of OpenSSL that is loaded: it notices a fork, not a restore."""
    for path in _loaded("libcrypto"):
        with contextlib.suppress(OSError, AttributeError):
            seed = os.urandom(_SEED)
            ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW).RAND_add(seed, len(seed), ctypes.c_double(len(seed)))
    if (ssl := sys.modules.get("_ssl")) is not None:  # it may be linked into Python itself
        ssl.RAND_add(os.urandom(_SEED), float(_SEED))
    if (rust := sys.modules.get("cryptography.hazmat.bindings._rust")) is not None:  # has a copy of its own linked in
        rust._openssl.lib.RAND_add(os.urandom(_SEED), _SEED, float(_SEED))


def _leave_temporary_files() -> None:
    """Have temporary files and directories that exist by now not removed as this process drops them, or ends.

    The other kernel has the same.  What a program removes itself (``cleanup()``) it removes.
    """
    tempfile = sys.modules.get("tempfile")
    if tempfile is None:
        return
    remove = tempfile.TemporaryDirectory._cleanup.__func__  # type: ignore[attr-defined]
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        if (peeked := finalizer.peek()) is not None and getattr(peeked[1], "__func__", None) is remove:
            finalizer.detach()
    closer = tempfile._TemporaryFileCloser  # type: ignore[attr-defined]
    for each in gc.get_referrers(closer):  # 12 ms with torch, half as long as a look at all objects
        if type(each) is closer:
            each.delete = False


def _forget_cells(kernel: Any) -> None:
    """Number the cells from 1: those of a template are of another notebook.  Its variables stay."""
    shell, manager = kernel.shell, kernel.shell.history_manager
    shell.execution_count = 1
    manager.input_hist_parsed[:] = manager.input_hist_raw[:] = [""]
    manager.output_hist.clear()
    manager.db_input_cache, manager.db_output_cache = [], []


def _loaded(name: str) -> list[str]:
    """Return the paths of loaded libraries with ``name`` in the names of their files."""
    with open("/proc/self/maps", errors="surrogateescape") as maps:
        paths = {line.split(None, 5)[5].rstrip("\n") for line in maps if "/" in line}
    return sorted(path for path in paths if name in os.path.basename(path))


def _reseeding(name: str, reseed: Callable[[Any], object]) -> Callable[[], object]:
    return lambda: reseed(sys.modules[name])


#: How a module's global generator gets a seed of its own.
_GENERATORS: dict[str, Callable[[Any], object]] = {
    "random": lambda random: random.seed(),
    "numpy.random": lambda random: random.seed(),
    "torch": lambda torch: torch.seed(),
}


def _replace_environment(wanted: Mapping[str, str]) -> None:
    """Set ``wanted``, and remove what came from the old environment and was not changed since.

    Linux still shows the environment that the process was started with.
    """
    with open("/proc/self/environ", "rb") as file:
        before = dict(entry.split(b"=", 1) for entry in file.read().split(b"\0") if b"=" in entry)
    for name, value in before.items():
        text = os.fsdecode(name)
        if text.startswith(_OURS) or text in _FOR_KERNELS or text in wanted:
            continue
        if os.environb.get(name) == value:
            del os.environb[name]
    os.environ.update({name: value for name, value in wanted.items() if name not in _FOR_KERNELS})


def _change_directory(kernel: Any, directory: str) -> None:
    """Change the working directory, also where IPython and the search path for modules have noted the old one."""
    with contextlib.suppress(OSError):
        before = os.getcwd()
        sys.path[:] = [directory if each == before else each for each in sys.path]
    os.chdir(directory)
    shell = getattr(kernel, "shell", None)
    for history in (getattr(shell, "user_ns", {}).get("_dh"), getattr(shell, "user_ns_hidden", {}).get("_dh")):
        if isinstance(history, list) and history:
            history[:] = [type(history[0])(directory)]
