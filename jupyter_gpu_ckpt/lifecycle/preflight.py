"""Preflight: find the reasons why a kernel cannot be checkpointed now, in a notebook user's words.

`inspect` looks at the kernel from outside, without disturbing it; `judge_report` the agent's report from inside.  A
`PreflightFinding` that blocks has the error that is raised for it; the others are warnings for the user.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import errors, procfs
from ..errors import GpuCkptError
from ..process import connections, terminals
from ..units import counted, size

#: Bytes of an image beside memory: CRIU's tables, the manifest, ghost files.
MARGIN = 64 << 20
#: The part of host memory that is free where extents stay that a kernel does not need (as in `memory_pressure.c`), and
#: its least bytes: programs may allocate as many until these extents are given up.
RESERVED_PART, LEAST_RESERVED = 8, 2 << 30
#: Processes whose pages a dump may have written more often than the image will have them.
_LEAD = 2

#: The debugger's adapter: debugpy starts it as a process of its own, which is no child of the kernel.
_DEBUGGER = re.compile(r"debugpy[/.]adapter")
#: How ``/proc/net/tcp6`` begins an IPv4 address.
_MAPPED = "0000000000000000FFFF0000"
#: States of a TCP connection there.
_ESTABLISHED, _CLOSE_WAIT = "01", "08"
#: The error for what is not proven to be restored, by its kind.
_UNPROVEN = {
    "file": errors.UnsupportedFile,
    "socket": errors.UnsupportedSocket,
    "state": errors.UnprovenState,
    "moment": errors.UnprovenState,
}
#: Ends a warning of space.
_BUT_ZEROS = "Device memory that holds only zeros needs none; that shows when it leaves the GPU."


@dataclass(frozen=True)
class PreflightFinding:
    """A reason why a checkpoint is refused (``error``), or a warning; ``text`` is for the user."""

    code: str
    text: str
    error: GpuCkptError | None = None

    @property
    def blocks(self) -> bool:
        """Return whether a checkpoint is refused."""
        return self.error is not None

    def as_dict(self) -> dict[str, Any]:
        """Return the finding for JSON."""
        hint = self.error.hint if self.error else ""
        return {"code": self.code, "text": self.text, "blocks": self.blocks, "hint": hint}


#: Of a kernel that is no ipykernel, or is started by a program of its own.
WITHOUT_AGENT = PreflightFinding(
    "NO_AGENT",
    "Nothing prepares this kernel from inside, as the agent prepares ipykernel: caches of GPU libraries are saved, TCP"
    " ports must be free when it wakes, environment variables are not refreshed.",
)


def blocking(error: GpuCkptError) -> PreflightFinding:
    return PreflightFinding(error.code, error.message, error)


@dataclass(frozen=True)
class Process:
    """A process as ``/proc`` shows it."""

    pid: int
    command: str
    state: str
    rss: int
    parent: int = 0
    arguments: tuple[str, ...] = ()

    def shown(self) -> str:
        """Return the command line for people (`procfs.shown_command`)."""
        return procfs.shown_command(self.arguments, self.command)


def read_process(pid: int) -> Process | None:
    """Return the process, or None when it has ended.  ``rss`` in bytes."""
    with contextlib.suppress(OSError, ValueError):
        arguments, status = procfs.arguments(pid), procfs.status(pid)
        command, rss = " ".join(arguments).strip() or status.get("Name", "?"), status.get("VmRSS", "0 kB").split()[0]
        state, parent = status.get("State", "?")[0], int(status.get("PPid", "0"))
        return Process(pid, command, state, int(rss) * 1024, parent, arguments)
    return None


def available_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of host memory that are available without swapping, within the limit of a container.

    A container's limit is that of its cgroup (version 2); its inactive pages of files are available.
    """
    available = _of_machine("MemAvailable")
    with contextlib.suppress(OSError, ValueError):  # ValueError: "max"
        limit, used = (int((cgroup / f"memory.{name}").read_text()) for name in ("max", "current"))
        idle = re.search(r"^inactive_file (\d+)", (cgroup / "memory.stat").read_text(), re.MULTILINE)
        available = min(available, limit - used + (int(idle.group(1)) if idle else 0))
    return available


def all_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of host memory of this machine, or of its container if that may have less."""
    all = _of_machine("MemTotal")
    with contextlib.suppress(OSError, ValueError):  # ValueError: "max"
        all = min(all, int((cgroup / "memory.max").read_text()))
    return all


def reserved_memory() -> int:
    """Return the bytes of host memory that stay free beside copies of device memory; 0: there is too little for any."""
    reserved = all_memory() // RESERVED_PART
    return reserved if reserved >= LEAST_RESERVED else 0


def _of_machine(name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(match.group(1)) * 1024 if match else 0


def image_bytes(on_device: int, processes: Iterable[Process]) -> int:
    """Return the bytes that an image needs at most: device memory, host memory, CRIU's own."""
    return on_device + MARGIN + sum(process.rss for process in processes)


def unique_bytes(processes: Iterable[Process]) -> int:
    """Return the bytes of host memory of processes, with the pages that they share counted once.

    An image has such pages once (`criu.shared_pages`).  This takes long (`procfs.proportional_bytes`): it is for where
    the sum of `Process.rss` is too much.
    """
    return sum(map(_proportional, processes))


def _proportional(process: Process) -> int:
    with contextlib.suppress(*procfs.GONE):
        try:
            return min(process.rss, procfs.proportional_bytes(process.pid))
        except PermissionError:
            return process.rss
    return 0


def lead_bytes(processes: Iterable[Process]) -> int:
    """Return the bytes by which a dump may exceed its image meanwhile: pages that are written and not dropped yet.

    CRIU writes the next process while those of the last one are compared (measured: 2 of 8 workers).
    """
    return _LEAD * max((process.rss for process in processes), default=0)


def inspect(
    *,
    kernel_pid: int,
    companions: Iterable[int],
    device_bytes: Mapping[str, int],
    disk_free: int | None,
    has_agent: bool = False,
    swapped_out: int = 0,
    kept: int = 0,
    release_copies: Callable[[int], object] = lambda bytes: None,
    spillable: Callable[[], int] = int,
    zeros: Callable[[], int] = int,
    over_quota: Callable[[int], GpuCkptError | None] = lambda needed: None,
    why_not: Callable[[int], str] = lambda pid: "",
) -> list[PreflightFinding]:
    """Return the findings from outside.  All block but those on space that the image may turn out not to need.

    ``companions``: every other process of the kernel's capsule, also daemons.  ``device_bytes``: by GPU UUID.
    ``disk_free``: bytes for the image; None for a suspend, which writes none.  ``has_agent``: whether an agent ends a
    debugger that was turned off.  ``swapped_out``: bytes of device memory in host memory, and in no process.
    ``kept``: bytes of host memory that have a copy of device memory already.
    ``release_copies``: called with the bytes that are needed of host memory where it is too small; may free some.
    ``spillable``: called where host memory is too small, returns the bytes of device memory that can go to the disk.
    ``zeros``: called where the disk or the quota is too small, returns how many bytes of device memory may be zeros,
    which are not in an image: that shows when the kernel's library moves them.
    ``over_quota``: returns why an image of so many bytes is refused, if it is.  ``why_not``: returns why one of
    the ``companions`` prevents a suspend or a checkpoint, if it does.
    """
    refusals: list[GpuCkptError] = []
    unsure: list[GpuCkptError] = []
    kernel = read_process(kernel_pid)
    others = _living(companions)
    adapters = [process for process in others if _DEBUGGER.search(process.command)]
    if any(not has_agent or _is_used(adapter) for adapter in adapters):
        hint = None if has_agent else "Its adapter ends only with the kernel: restart the kernel."
        refusals.append(errors.DebuggerAttached("The kernel's debugger is in use.", hint=hint))
    beside = [process for process in others if process not in adapters]
    if (error := _children(beside, why_not)) is not None:
        refusals.append(error)
    dumped = [kernel_pid, *(process.pid for process in beside)] if disk_free is not None else []
    if (traced := _traced(dumped)) is not None:
        refusals.append(traced)
    for pid in dumped:
        if obstacle := terminals.obstacle(pid):
            refusals.append(errors.UnsupportedTerminal(f"The kernel's terminals could not come back: {obstacle}."))
            break
    to_host = on_device = sum(device_bytes.values())
    if on_device and available_memory() + kept < to_host + MARGIN:
        release_copies(to_host + MARGIN - kept)
    if on_device and (available := available_memory() + kept) < to_host + MARGIN:
        to_host -= spillable()
        available = available_memory() + kept  # the kernel's library may have been freeing some, after a resume
    if on_device and available < to_host + MARGIN:
        message = f"The kernel has {size(on_device, 2)} on the GPU; {size(available, 2)} of host memory are free."
        refusals.append(errors.NoMemory(message, needed=to_host + MARGIN, free=available))
    if disk_free is not None:
        processes = [*others, *([kernel] if kernel else [])]
        needed = written = image_bytes(on_device + swapped_out, processes)
        refused = over_quota(needed)
        if processes[1:] and (disk_free < needed or refused is not None):
            needed += unique_bytes(processes) - sum(process.rss for process in processes)
            written = min(written, needed + lead_bytes(processes))
            refused = over_quota(needed)
        fewer = min(zeros(), on_device) if disk_free < written or refused is not None else 0
        if disk_free < written:
            no_space = _no_space(written, disk_free)
            (refusals if disk_free < written - fewer else unsure).append(no_space)
        if refused is not None:
            (refusals if over_quota(needed - fewer) is not None else unsure).append(refused)
    warnings = [PreflightFinding(error.code, f"{error.message} {_BUT_ZEROS} {error.hint}") for error in unsure]
    return [*map(blocking, refusals), *warnings]


def require_space(needed: int, free: int) -> None:
    """Raise `NoSpace` if an image needs more bytes than are free."""
    if free < needed:
        raise _no_space(needed, free)


def _no_space(needed: int, free: int) -> errors.NoSpace:
    message = f"The image may need {size(needed, 2)}; {size(free, 2)} are free."
    return errors.NoSpace(message, needed=needed, free=free)


def _living(pids: Iterable[int]) -> list[Process]:
    return [process for process in map(read_process, pids) if process and process.state not in "ZX"]


def _children(processes: Iterable[Process], why_not: Callable[[int], str]) -> errors.ChildProcesses | None:
    """Return the error for processes beside the kernel, if ``why_not`` has a reason against some of them."""
    refused = [(process, reason) for process in processes if (reason := why_not(process.pid))]
    if not refused:
        return None
    names = ", ".join(f"{process.shown()} (pid {process.pid}: {reason})" for process, reason in refused[:3])
    more = f" and {len(refused) - 3} more" if len(refused) > 3 else ""
    verb = "prevents" if len(refused) == 1 else "prevent"
    message = f"The kernel has {counted(len(refused), 'child process')} that {verb} it: {names}{more}."
    return errors.ChildProcesses(message, pids=[process.pid for process, _ in refused])


def _traced(pids: Iterable[int]) -> errors.UnprovenState | None:
    """Return the error for a process that one outside the capsule traces: CRIU, a tracer as well, cannot attach to it.

    The capsule's init traces processes that are frozen, and the inventory sees those that another one of them traces.
    """
    for pid in pids:
        with contextlib.suppress(OSError):  # one of the two has ended
            tracer = int(procfs.status(pid)["TracerPid"])
            if tracer and len(procfs.status(tracer)["NSpid"].split()) == 1:
                message = f"The kernel's process {pid} is traced by {procfs.described(tracer)}."
                hint = "End the tracer (a debugger, strace, a profiler), or detach it, and try again."
                return errors.UnprovenState(message, hint=hint, culprit=tracer)
    return None


def judge_suspended(
    companions: Iterable[int], why_not: Callable[[int], str], report: Mapping[str, Any]
) -> list[PreflightFinding]:
    """Return the findings against a dump that did not matter to a suspend; ``report`` is the agent's, of that time.

    ``companions``, ``why_not``: as for `inspect`.
    """
    error = _children(_living(companions), why_not)
    return [*map(blocking, [error] if error is not None else []), *judge_report(report)]


def undumpable(pid: int) -> PreflightFinding | None:
    """Return a finding for a kernel that only root may inspect (PR_SET_DUMPABLE)."""
    if os.access(f"/proc/{pid}/fd", os.R_OK) or procfs.is_ending(pid):
        return None
    message = "The kernel is not dumpable (PR_SET_DUMPABLE is 0): its memory cannot be read."
    hint = "In the kernel, ctypes.CDLL(None).prctl(4, 1, 0, 0, 0) makes it dumpable again."
    return blocking(errors.UnprovenState(message, hint=hint))


def judge_state(refusals: Iterable[Mapping[str, str]]) -> list[PreflightFinding]:
    """Return the findings from the refusals of `inventory.inspect`."""
    found = []
    for refusal in refusals:
        what, hint = refusal["what"], refusal["hint"] or None
        message = f"The kernel has {what}: that would not come back from a checkpoint."
        passes: dict[str, Any] = {"passes": True} if refusal["kind"] == "moment" else {}
        found.append(blocking(_UNPROVEN[refusal["kind"]](message, hint=hint, culprit=what, **passes)))
    return found


def _is_used(adapter: Process) -> bool:
    """Return whether a client is connected to a debugger's adapter, at the port that its command line names."""
    if (found := re.search(r" --port (\d+)( |$)", adapter.command)) is None:
        return True
    port, connected = f":{int(found[1]):04X}", "01"
    # Not by its descriptors: one that hides them counts as used, too, while somebody is connected to the port.
    return any(row[1].endswith(port) and row[3] == connected for row in _tcp_table(adapter.pid))


def judge_requests(cells: int, others: Sequence[str], *, awaits_input: bool = False) -> list[PreflightFinding]:
    """Return the findings from what clients requested: cells that run or wait, the types of other requests.

    ``awaits_input``: the running cell waits for an answer of its user.
    """
    findings = []
    if cells:
        behind = f", and {cells - 1} more wait behind it" if cells > 1 else ""
        what, hint = "A cell is running", "Try again when the cell has finished, or interrupt the cell first."
        if awaits_input:
            what, hint = "A cell waits for input", errors.KernelBusy.hint_for_input
        busy = errors.KernelBusy(f"{what}{behind}.", hint=hint, left="the kernel runs on", cells=cells)
        findings.append(blocking(busy))
    if others:
        types = ", ".join(sorted(set(others)))
        text = f"The kernel still owes answers, for which it is given a moment: {types}."
        findings.append(PreflightFinding("REQUESTS", text))
    return findings


def jax_on_several_gpus() -> errors.UnsupportedCuda:
    """Return the refusal of what the NVIDIA driver 580.159 does not restore (`agent.probes.jax_preallocates`)."""
    message = "JAX has preallocated memory on several GPUs, which the NVIDIA driver does not bring back."
    hint = (
        "Start the kernel with the library for device memory (`fast_path`), with XLA_PYTHON_CLIENT_PREALLOCATE=false, "
    )
    return errors.UnsupportedCuda(message, hint=hint + "or show it one GPU (CUDA_VISIBLE_DEVICES).")


def _pools_of_several_gpus() -> errors.UnsupportedCuda:
    """Return the refusal of what the NVIDIA driver 580.159 spoils (`agent.probes.torch_pools`)."""
    message = (
        "PyTorch's backend cudaMallocAsync lets several GPUs use each other's pools, from which the NVIDIA driver "
    )
    hint = "Start the kernel without backend:cudaMallocAsync in PYTORCH_CUDA_ALLOC_CONF, or show it one GPU "
    return errors.UnsupportedCuda(message + "allocates no more after a suspend.", hint=hint + "(CUDA_VISIBLE_DEVICES).")


def judge_report(
    report: Mapping[str, Any],
    *,
    gpus: int = 0,
    by_driver: bool = False,
    writes: bool = True,
    tree: Sequence[int] = (),
) -> list[PreflightFinding]:
    """Return the findings from the agent's report, of a kernel that has memory of so many ``gpus``.

    ``by_driver``: whether the driver moves most of that memory.  ``writes``: an image is to be written; a suspend does
    not.  ``tree``: the processes of the kernel's tree, itself first; connections between them come back.
    """
    findings = []
    if gpus > 1 and by_driver and report.get("jax_preallocates"):
        findings.append(blocking(jax_on_several_gpus()))
    if gpus > 1 and report.get("torch_pools"):
        findings.append(blocking(_pools_of_several_gpus()))
    if report.get("debugger"):
        findings.append(blocking(errors.DebuggerAttached("The kernel's debugger is in use.")))
    # Root's CRIU opens them through /proc/PID/map_files, an ordinary user's may not.  Shared ones get a name first.
    deleted = [each for each in report.get("deleted_mappings") or () if each.get("kind") != "shared"]
    if writes and deleted and os.geteuid() != 0:
        path = deleted[0]["path"]
        findings.append(blocking(errors.DeletedMapping(f"The kernel maps {path}, which was deleted.", culprit=path)))
    # Listeners, and sockets of UDP and netlink, come back as they are; what cannot be saved the dump refuses.
    connected = [each for each in report.get("sockets") or () if each.get("kind") == "tcp" and each.get("remote")]
    if connected:
        inside = inside_connections(tree)
        if outside := [each for each in connected if each.get("inode") not in inside]:
            unread = sum(_outside(connections.holders(tree[:1]), inside).values())
            findings.append(PreflightFinding("CONNECTIONS", f"{_closed_later(len(outside), unread)}."))
    return findings


def inside_connections(pids: Iterable[int]) -> set[str]:
    """Return the inodes of TCP sockets that come back, of these processes.

    They are connected with each other, or their other end was closed and they have its last bytes to read.
    """
    by_inode = connections.holders(pids)
    rows = _tcp_rows(by_inode)
    own_rows = [row for row in rows if row[9] in by_inode]
    ends = {row[9]: (row[1].removeprefix(_MAPPED), row[2].removeprefix(_MAPPED)) for row in own_rows}
    both = set(ends.values())
    inside = {inode for inode, (own, peer) in ends.items() if (peer, own) in both and own != peer}
    return inside | connections.closed_by_peer(ends.keys() - inside, rows).keys()


def judge_connections(pids: Iterable[int], tree: Iterable[int]) -> list[PreflightFinding]:
    """Return the finding about TCP connections of processes in which no agent is, but for those within the ``tree``.

    They come back closed, and SIGPIPE ends a program that writes to one and has no handler (bash, most C programs).
    """
    processes = [process for process in _living(pids) if not _DEBUGGER.search(process.command)]
    sockets_of = {process.pid: connections.holders([process.pid]) for process in processes}
    ends = {inode: end for of_process in sockets_of.values() for inode, end in of_process.items()}
    table = _outside(ends, inside_connections(tree)) if ends else {}
    connected: dict[str, list[Process]] = {}
    for process in processes:
        for inode in sockets_of[process.pid].keys() & table.keys():
            connected.setdefault(inode, []).append(process)
    if not connected:
        return []
    fragile = {
        process.pid: process for of_end in connected.values() for process in of_end if _sigpipe_ends(process.pid)
    }
    names = ", ".join(f"{process.shown()} (pid {process.pid})" for process in list(fragile.values())[:3])
    also = f" A write to one then ends {names} (SIGPIPE)." if fragile else ""
    text = f"{_closed_later(len(connected), sum(table[inode] for inode in connected))}.{also}"
    return [PreflightFinding("CONNECTIONS", text)]


def _outside(by_inode: Mapping[str, connections.Descriptor], inside: Container[str]) -> dict[str, int]:
    """Return unread bytes by the inode of a socket, of open TCP connections ``by_inode`` that are not ``inside``.

    An end that the other side has closed counts while it has unread bytes.
    """
    found = {}
    for row in _tcp_rows(by_inode):
        unread = int(row[4].rpartition(":")[2], 16)
        if row[3] == _CLOSE_WAIT:
            unread = max(0, unread - 1)  # Linux counts the end as a byte
        counts = row[3] == _ESTABLISHED or (row[3] == _CLOSE_WAIT and unread)
        if counts and row[9] in by_inode and row[9] not in inside:
            found[row[9]] = unread
    return found


def _tcp_rows(by_inode: Mapping[str, connections.Descriptor]) -> list[list[str]]:
    """Return the rows of ``/proc/net/tcp`` and ``tcp6`` where the sockets ``by_inode`` are, if any."""
    return next((_tcp_table(pid) for pid, _ in by_inode.values()), [])


def _tcp_table(pid: int) -> list[list[str]]:
    return [row for kind in ("tcp", "tcp6") for row in procfs.sockets(kind, pid)]


def _closed_later(count: int, unread: int) -> str:
    text = f"{counted(count, 'open connection')} to the outside will come back closed"
    where = "it" if count == 1 else "them"
    lost = f", and {counted(unread, 'byte')} in {where} that nobody has read yet will be lost"
    return f"{text}{lost}" if unread else text


def _sigpipe_ends(pid: int) -> bool:
    """Return whether a process neither ignores nor handles SIGPIPE."""
    try:
        status = procfs.status(pid)
        return not (int(status["SigIgn"], 16) | int(status["SigCgt"], 16)) >> (signal.SIGPIPE - 1) & 1
    except (OSError, KeyError, ValueError):  # it ends
        return False


def open_connections(pid: int, prefixes: tuple[str, ...], known: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the unix connections that ``pid`` has open itself, of sockets whose paths begin with one of ``prefixes``.

    The path by the inode.  ``known``: connections that were open before, which need not be in the table to be found.
    From ``/proc/PID/net/unix``, whose sixth column is 03 for a connected socket.  A forked child inherits them and
    keeps its copies, which do not matter once both ends are closed.  Empty when the process has ended.
    """
    rows = [row for row in procfs.unix_sockets(pid) if len(row) > 7 and row[5] == "03"]
    found = {**(known or {}), **{row[6]: row[7] for row in rows if row[7].startswith(prefixes)}}
    with contextlib.suppress(OSError):
        own = {target for _, target in procfs.links(pid)}
        return {inode: path for inode, path in found.items() if f"socket:[{inode}]" in own}
    return {}


def require(findings: Iterable[PreflightFinding]) -> None:
    """Raise the error of the first finding that blocks."""
    for finding in findings:
        if finding.error is not None:
            raise finding.error
