"""Find what prevents a checkpoint of this process, or will be different after it.

A probe that fails leaves its default in the report and a line in ``probe_errors``.  No probe changes anything, imports
a library that was not loaded, or reads the user's data.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
import re
import socket
import stat
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from . import gpu_memory, mappings

# Helpers of multiprocessing and loky that only clean up after dead processes and have no user state.
_BENIGN = re.compile(rb"(multiprocessing|loky\.backend)\.(resource_tracker|semaphore_tracker)")

_SO_PEERCRED = getattr(socket, "SO_PEERCRED", 17)


def probe(errors: list[str], name: str, call: Callable[[], Any], default: Any) -> Any:
    """Return ``call()``; if it raises, ``default``, with a line in ``errors``."""
    try:
        return call()
    except Exception as error:
        errors.append(f"{name}: {type(error).__name__}: {error}"[:200])
        return default


def report(
    kernel: Any, pipe_port: int | None, errors: list[str], mapped: list[mappings.Mapping] | None = None
) -> dict[str, Any]:
    """Return the report of a preflight or a quiesce, JSON-serialisable; sizes in bytes.

    ``mapped``: what `mappings.read` returns, if it was just called: Linux writes hundreds of lines for that.
    """
    if mapped is None:
        mapped = probe(errors, "mappings", lambda: mappings.read(all=False), [])
    checks: list[tuple[str, Callable[[], Any], Any]] = [
        ("python", platform.python_version, ""),
        ("ipykernel", lambda: _version("ipykernel"), ""),
        ("ipython", lambda: _version("IPython"), ""),
        ("pid", os.getpid, 0),
        ("threads", lambda: [thread.name for thread in threading.enumerate()], []),
        ("children", children, []),
        ("debugger", lambda: debugger_in_use(kernel), False),
        ("cuda", gpu_memory.report, {"modules": [], "initialized": False, "devices": []}),
        ("jax_preallocates", jax_preallocates, False),
        ("torch_pools", torch_pools, False),
        ("nvml", gpu_memory.nvml_initialized, False),
        ("sockets", lambda: foreign_sockets(own_endpoints(kernel, pipe_port)), []),
        ("deleted_mappings", lambda: mappings.still_deleted(mapped), []),
        ("shm_files", lambda: mappings.living_shared_memory(mapped), []),
        ("open_files", open_files, []),
    ]
    found = {name: probe(errors, name, check, default) for name, check, default in checks}
    return {**found, "rehomed": 0, "trimmed_bytes": 0, "probe_errors": errors}


def _version(module: str) -> str:
    return str(getattr(sys.modules.get(module), "__version__", ""))


def debugger_in_use(kernel: Any) -> bool:
    """Return whether ipykernel's debugger was started, or a client is connected to debugpy."""
    if getattr(getattr(kernel, "debugger", None), "is_started", False):
        return True
    # The public function of debugpy imports its server, and with it pydevd, on first use: not called before that.
    server = sys.modules.get("debugpy.server.api")
    return bool(server is not None and server.is_client_connected())


def jax_preallocates() -> bool:
    """Return whether JAX is loaded and allocates most of each GPU at once (its documentation, "GPU memory allocation").

    The NVIDIA driver 580.159 does not restore these on two GPUs (CUDA_ERROR_INVALID_VALUE; seen with JAX 0.11.2).
    """
    settings = {name: os.environ.get(f"XLA_PYTHON_CLIENT_{name}", "").lower() for name in ("PREALLOCATE", "ALLOCATOR")}
    return (
        "jaxlib" in sys.modules
        and settings["PREALLOCATE"] not in ("false", "0")
        and settings["ALLOCATOR"] != "platform"
    )


def torch_pools() -> bool:
    """Return whether PyTorch has CUDA memory from the driver's own pools (its documentation, "Memory management").

    With two GPUs it lets each use the other's pool.  The NVIDIA driver 580.159 allocates no more from such a pool after
    a suspend (CUDA_ERROR_OUT_OF_MEMORY; seen with torch 2.11).
    """
    torch = sys.modules.get("torch")
    return bool(torch and torch.cuda.is_initialized() and torch.cuda.get_allocator_backend() == "cudaMallocAsync")


def children() -> list[dict[str, Any]]:
    """Return all descendants, zombies included: ``pid``, ``cmd`` (the program's name without arguments), ``benign``."""
    parents: dict[int, int] = {}
    states: dict[int, tuple[str, str]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                text = file.read()
        except OSError:
            continue
        command, rest = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
        parents[int(name)], states[int(name)] = int(rest[1]), (command, rest[0])
    family = {int(os.readlink("/proc/self"))}
    found: list[int] = []
    while more := [pid for pid, parent in sorted(parents.items()) if parent in family and pid not in family]:
        family.update(more)
        found += more
    return [{"pid": pid, "cmd": states[pid][0], "benign": _benign(pid, states[pid][1])} for pid in found]


def _benign(pid: int, state: str) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return state == "Z" or _BENIGN.search(file.read()) is not None
    return state == "Z"  # a zombie


def links(pid: str = "self") -> Iterator[tuple[int, str]]:
    """Yield the open descriptors of a process and their targets, without those closed meanwhile."""
    for number in sorted(map(int, os.listdir(f"/proc/{pid}/fd"))):
        with contextlib.suppress(OSError):
            yield number, os.readlink(f"/proc/{pid}/fd/{number}")


def open_files() -> list[dict[str, Any]]:
    """Return regular files open for writing: ``path``, ``mode`` (``w``, ``rw``, ``a``, ``ra``) and ``size``.

    CRIU refuses the restore when one of them has another size then.
    """
    found = []
    for number, path in links():
        try:
            status, flags = os.stat(f"/proc/self/fd/{number}"), fcntl.fcntl(number, fcntl.F_GETFL)
        except OSError:
            continue  # closed meanwhile
        access = flags & os.O_ACCMODE
        if stat.S_ISREG(status.st_mode) and access != os.O_RDONLY:
            mode = ("r" if access == os.O_RDWR else "") + ("a" if flags & os.O_APPEND else "w")
            found.append({"path": _text(path), "mode": mode, "size": status.st_size})
    return found


# -- sockets ----------------------------------------------------------------------------------------------------------


def own_endpoints(kernel: Any, pipe_port: int | None) -> tuple[set[int], set[str]]:
    """Return TCP ports and unix socket paths of the kernel's own channels."""
    app = getattr(kernel, "parent", None)
    names = ("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port")
    numbers = {port for port in (getattr(app, name, 0) for name in names) if port}
    pipe = {pipe_port} if pipe_port else set()
    if getattr(app, "transport", "tcp") == "ipc":
        return pipe, {f"{app.ip}-{number}" for number in numbers if app is not None}
    return numbers | pipe, set()


def foreign_sockets(own: tuple[set[int], set[str]]) -> list[dict[str, str]]:
    """Return sockets connected to other processes, and listeners: ``kind``, ``local``, ``remote`` and ``inode``.

    Left out: the kernel's own channels, socket pairs within the process, and listening unix sockets, which are
    restored.  Reads /proc/self/net (proc(5)): to make socket objects may switch a user's socket to non-blocking.
    """
    ports, paths = own
    sockets = [(number, target[8:-1]) for number, target in links() if target.startswith("socket:[")]
    known = _described({inode for _, inode in sockets}, ports)
    found = []
    for number, inode in sockets:
        entry = known.get(inode, {"kind": "other", "local": "", "remote": ""})
        if entry.get("kind") == "unix":
            if entry["local"] in paths or _peer_pid(number) == os.getpid():
                continue
            entry = {**entry, "remote": _peer_path(number)}
        if entry:
            found.append({**entry, "inode": inode})
    return found


def _described(inodes: set[str], ports: set[int]) -> dict[str, dict[str, str]]:
    """Return kind and addresses of these sockets by inode; of the kernel's own channels, at ``ports``, nothing.

    Tables are read until all are found: Linux walks all of its hash table for one of TCP or UDP, milliseconds where a
    machine has much memory, and most kernels have unix sockets only.
    """
    found: dict[str, dict[str, str]] = {}
    for row in table("unix"):
        if len(row) < 7:  # it continues the path of a socket that has a line break in it
            continue
        found[row[6]] = {"kind": "unix", "local": row[7] if len(row) > 7 else "", "remote": ""}
    for kind in ("netlink", "tcp", "tcp6", "udp", "udp6"):
        if inodes <= found.keys():
            break
        for row in table(kind):
            if kind == "netlink":
                found[row[9]] = {"kind": kind, "local": f"protocol {row[1]}", "remote": ""}
                continue
            own_channel = {int(row[1][-4:], 16), int(row[2][-4:], 16)} & ports
            entry = {"kind": kind[:3], "local": _address(row[1]), "remote": _address(row[2])}
            found[row[9]] = {} if own_channel else entry
    return found


def table(kind: str) -> list[list[str]]:
    """Return the rows of a file of /proc/self/net (proc(5)), by fields."""
    path = f"/proc/self/net/{kind}"
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace", newline="\n") as file:
        return [line.split() for line in file.readlines()[1:]]
    return []  # a Linux without this family


def _address(text: str) -> str:
    """Format ``0100007F:1F90`` as ``127.0.0.1:8080``, no peer as ``""``.  Words are in the host's byte order."""
    number, port = text.split(":")
    if int(port, 16) == 0 and int(number, 16) == 0:
        return ""
    packed = b"".join(struct.pack("=I", int(number[i : i + 8], 16)) for i in range(0, len(number), 8))
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    host = socket.inet_ntop(family, packed)
    return f"{host}:{int(port, 16)}" if family == socket.AF_INET else f"[{host}]:{int(port, 16)}"


def _peer_pid(descriptor: int) -> int:
    """Return the pid at the other end of a unix socket at its connect (unix(7)); our own for pairs and listeners."""
    credentials, length = (ctypes.c_int * 3)(), ctypes.c_uint(12)
    libc = ctypes.CDLL(None)
    if libc.getsockopt(descriptor, socket.SOL_SOCKET, _SO_PEERCRED, credentials, ctypes.byref(length)) != 0:
        return 0
    return int(credentials[0])


def listens_on(descriptor: int, port: int) -> bool:
    """Return whether a descriptor is a listener of TCP at this port, of IPv4.

    Not by /proc/self/net/tcp, for which Linux walks all of a hash table.
    """
    libc, address, length = ctypes.CDLL(None), ctypes.create_string_buffer(16), ctypes.c_uint(16)
    listens, size = ctypes.c_int(), ctypes.c_uint(4)
    if libc.getsockname(descriptor, address, ctypes.byref(length)) != 0:
        return False
    family, number = struct.unpack_from("=H", address)[0], struct.unpack_from("!H", address, 2)[0]
    if family != socket.AF_INET or number != port:
        return False
    option = libc.getsockopt(
        descriptor, socket.SOL_SOCKET, socket.SO_ACCEPTCONN, ctypes.byref(listens), ctypes.byref(size)
    )
    return bool(option == 0 and listens.value)


def _peer_path(descriptor: int) -> str:
    address, length = ctypes.create_string_buffer(128), ctypes.c_uint(128)
    if ctypes.CDLL(None).getpeername(descriptor, address, ctypes.byref(length)) != 0 or length.value <= 2:
        return ""
    path = address.raw[2 : length.value]
    name = b"@" + path[1:] if path.startswith(b"\0") else path.rstrip(b"\0")
    return name.decode("utf-8", "replace")


def _text(path: str) -> str:
    """Replace the surrogates of undecodable bytes, which cannot be sent as JSON."""
    return path.encode("utf-8", "replace").decode()
