"""Can this kernel be checkpointed now, and if not, why, in a notebook user's words.

Looks from outside, without disturbing the kernel (`look`), and at the agent's report from inside (`judge_report`).  A
`PreflightFinding` that blocks carries the error that is raised for it; the others are warnings for the user to know
beforehand.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import procfs
from ..errors import (
    ChildProcesses,
    DebuggerAttached,
    DeletedMapping,
    GpuCkptError,
    KernelBusy,
    NoMemory,
    NoSpace,
    UnprovenState,
    UnsupportedCuda,
    UnsupportedFile,
    UnsupportedSocket,
    UnsupportedTerminal,
)
from ..process import terminals
from ..units import size

#: The agent's reason for a deleted file that is still mapped, before a quiesce has tried to mend that
#: (`agent.mappings.still_deleted`).
NOT_TRIED = "not tried"

#: Room an image needs beyond the memory it holds, in bytes: CRIU's tables, the manifest, ghost files.
MARGIN = 64 << 20

#: The program of a child that holds nothing but the names of shared memory to clean up: it travels with the kernel.
_BENIGN = re.compile(
    r"from (multiprocessing\.(resource_tracker|semaphore_tracker|forkserver)|(\w+\.)*loky\.backend\.resource_tracker) "
    r"import main; ?main\(.*\)"
)
#: Characters of a command line that are shown of a process.
_SHOWN = 100

#: The debugger's other half: debugpy starts it as a process of its own, which leaves the kernel's tree.
_DEBUGGER = re.compile(r"debugpy[/.]adapter")


#: The error for what is not proven to come back, by what it is about.
_UNPROVEN: dict[str, type[GpuCkptError]] = {
    "file": UnsupportedFile,
    "socket": UnsupportedSocket,
    "state": UnprovenState,
}


@dataclass(frozen=True)
class PreflightFinding:
    """One answer.  ``error`` is set when it forbids a checkpoint; ``text`` is for the user either way."""

    code: str
    text: str
    error: GpuCkptError | None = None

    @property
    def blocks(self) -> bool:
        """Whether a checkpoint is refused because of it."""
        return self.error is not None


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

    def cleans_up_for(self, kernel: int) -> bool:
        """Whether it is a child of ``kernel`` that only cleans up: a program of Python's own, by ``python -c``."""
        code = self.arguments[self.arguments.index("-c") + 1 :][:1] if "-c" in self.arguments else ()
        return self.parent == kernel and any(_BENIGN.fullmatch(text) for text in code)

    def shown(self) -> str:
        """Its command line for people: no directories but the last, and where it is long, beginning and end.

        Workers of a pool differ at the end.
        """
        words = [f".../{'/'.join(word.split('/')[-2:])}" if word.count("/") > 2 else word for word in self.arguments]
        words[:1] = [word.rpartition("/")[2] for word in words[:1]]
        text = re.sub(r"[\x00-\x1f\x7f-\x9f]+", " ", " ".join(words)).strip() or self.command
        return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}"


def read_process(pid: int) -> Process | None:
    """The process, or None when it has gone.  ``rss`` in bytes."""
    with contextlib.suppress(OSError, ValueError):
        arguments, status = procfs.arguments(pid), procfs.status(pid)
        return Process(
            pid,
            " ".join(arguments).strip() or status.get("Name", "?"),
            status.get("State", "?")[0],
            int(status.get("VmRSS", "0 kB").split()[0]) * 1024,
            int(status.get("PPid", "0")),
            arguments,
        )
    return None


def available_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Host memory that can be taken without swapping, in bytes: ``MemAvailable``, or less in a container.

    A container's limit is that of its cgroup (version 2); pages of files it used and needs no more do not count.
    """
    match = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    available = int(match.group(1)) * 1024 if match else 0
    with contextlib.suppress(OSError, ValueError):  # ValueError: "max"
        limit, used = (int((cgroup / f"memory.{name}").read_text()) for name in ("max", "current"))
        idle = re.search(r"^inactive_file (\d+)", (cgroup / "memory.stat").read_text(), re.MULTILINE)
        available = min(available, limit - used + (int(idle.group(1)) if idle else 0))
    return available


def image_bytes(on_device: int, processes: Iterable[Process]) -> int:
    """What an image may need at most, in bytes: device memory, host memory, CRIU's own."""
    return on_device + MARGIN + sum(process.rss for process in processes)


def look(
    *,
    kernel_pid: int,
    companions: Iterable[int],
    device_bytes: Mapping[str, int],
    disk_free: int | None,
    has_agent: bool = False,
    away: int = 0,
    spillable: Callable[[], int] = int,
    over_quota: Callable[[int], GpuCkptError | None] = lambda needed: None,
) -> list[PreflightFinding]:
    """Findings from outside.

    Parameters
    ----------
    kernel_pid:
        The kernel, as the host numbers it.
    companions:
        Every other process of its capsule: children, and what they left behind when they became daemons.
    device_bytes:
        Device memory the kernel holds, in bytes by GPU UUID.
    disk_free:
        Bytes free where the image goes; None for a suspend, which writes none.
    has_agent:
        Whether the kernel has an agent, which ends a debugger that was turned off.
    away:
        Bytes of device memory that are in host memory already, and in no process.
    spillable:
        Asked where host memory is too small for the device memory: bytes of it that can go to the disk instead.
    over_quota:
        Why an image of so many bytes may not be made, if it may not.
    """
    findings = []
    kernel = read_process(kernel_pid)
    others = [process for process in map(read_process, companions) if process and process.state not in "ZX"]
    adapters = [process for process in others if _DEBUGGER.search(process.command)]
    if any(not has_agent or _is_used(adapter) for adapter in adapters):
        hint = None if has_agent else "Its adapter ends only with the kernel: restart the kernel."
        findings.append(blocking(DebuggerAttached("The kernel's debugger is in use.", hint=hint)))
    unwelcome = [one for one in others if one not in adapters and not one.cleans_up_for(kernel_pid)]
    if unwelcome:
        names = ", ".join(f"{process.shown()} (pid {process.pid})" for process in unwelcome[:3])
        more = f" and {len(unwelcome) - 3} more" if len(unwelcome) > 3 else ""
        findings.append(
            blocking(
                ChildProcesses(
                    f"The kernel has {len(unwelcome)} living child process(es): {names}{more}.",
                    pids=[process.pid for process in unwelcome],
                )
            )
        )
    if disk_free is not None and (obstacle := terminals.obstacle(kernel_pid)):
        findings.append(blocking(UnsupportedTerminal(f"The kernel's terminals could not come back: {obstacle}.")))
    on_device = sum(device_bytes.values())
    to_host = on_device
    if on_device and (available := available_memory()) < to_host + MARGIN:
        to_host -= spillable()
        available = available_memory()  # its library may have been at giving some back, after a return
    if on_device and available < to_host + MARGIN:
        findings.append(
            blocking(
                NoMemory(
                    f"The kernel holds {size(on_device, 2)} on the GPU; {size(available, 2)} of host memory are free.",
                    needed=to_host + MARGIN,
                    free=available,
                )
            )
        )
    needed = image_bytes(on_device + away, [*others, *([kernel] if kernel else [])])
    if disk_free is not None and disk_free < needed:
        findings.append(
            blocking(
                NoSpace(
                    f"The image may need {size(needed, 2)}; {size(disk_free, 2)} are free.",
                    needed=needed,
                    free=disk_free,
                )
            )
        )
    if disk_free is not None and (refused := over_quota(needed)) is not None:
        findings.append(blocking(refused))
    return findings


def undumpable(pid: int) -> PreflightFinding | None:
    """Whether the kernel hides itself from everybody but root (PR_SET_DUMPABLE): nobody can tell what it holds."""
    if os.access(f"/proc/{pid}/fd", os.R_OK) or procfs.is_ending(pid):
        return None
    return blocking(
        UnprovenState(
            "The kernel is not dumpable (PR_SET_DUMPABLE is 0): nobody may look into it.",
            hint="In the kernel, ctypes.CDLL(None).prctl(4, 1, 0, 0, 0) makes it dumpable again.",
        )
    )


def judge_state(refusals: Iterable[Mapping[str, str]]) -> list[PreflightFinding]:
    """Findings from what the kernel's processes are made of (`inventory.inspect`)."""
    return [
        blocking(
            _UNPROVEN[refusal["kind"]](
                f"The kernel has {refusal['what']}: that would not come back from a checkpoint.",
                hint=refusal["hint"] or None,
                culprit=refusal["what"],
            )
        )
        for refusal in refusals
    ]


def _is_used(adapter: Process) -> bool:
    """Whether a client is connected to a debugger's adapter, at the port that its command line names."""
    found = re.search(r" --port (\d+)( |$)", adapter.command)
    if found is None:
        return True
    port, connected = f":{int(found[1]):04X}", "01"
    rows = [*procfs.sockets("tcp", adapter.pid), *procfs.sockets("tcp6", adapter.pid)]
    return any(row[1].endswith(port) and row[3] == connected for row in rows)


def judge_requests(cells: int, others: Sequence[str]) -> list[PreflightFinding]:
    """Findings from what clients have the kernel do: cells that run or wait in it, the types of other requests."""
    findings = []
    if cells:
        behind = f", and {cells - 1} more wait behind it" if cells > 1 else ""
        hint = "Have the kernel leave when the cell has finished, or interrupt the cell and try again."
        busy = KernelBusy(f"A cell is running{behind}.", hint=hint, left="the kernel runs on", cells=cells)
        findings.append(blocking(busy))
    if others:
        types = ", ".join(sorted(set(others)))
        findings.append(
            PreflightFinding("REQUESTS", f"The kernel still owes answers, for which it is given a moment: {types}.")
        )
    return findings


def judge_report(report: Mapping[str, Any], *, gpus: int = 0) -> list[PreflightFinding]:
    """Findings from the agent's report, of a kernel that holds memory of so many ``gpus``."""
    findings = []
    if gpus > 1 and report.get("jax_preallocates"):
        findings.append(
            blocking(
                UnsupportedCuda(
                    "JAX has preallocated memory on several GPUs, which the NVIDIA driver does not bring back.",
                    hint="Start the kernel with XLA_PYTHON_CLIENT_PREALLOCATE=false, or show it one GPU "
                    "(CUDA_VISIBLE_DEVICES).",
                )
            )
        )
    if report.get("debugger"):
        findings.append(blocking(DebuggerAttached("The kernel's debugger is in use.")))
    # Root's CRIU opens them through /proc/PID/map_files, an ordinary user's may not.
    stays = [each for each in report.get("deleted_mappings") or () if each.get("reason") != NOT_TRIED]
    if stays and os.geteuid() != 0:
        path = stays[0]["path"]
        findings.append(blocking(DeletedMapping(f"The kernel maps {path}, which was deleted.", culprit=path)))
    outside = report.get("sockets") or []
    if outside:
        findings.append(
            PreflightFinding("CONNECTIONS", f"{len(outside)} open connection(s) to the outside will come back closed.")
        )
    return findings


def open_connections(pid: int, directory: Path) -> Counter[str]:
    """Unix connections to each socket bound below ``directory``, in ``pid``'s network namespace.

    From ``/proc/PID/net/unix``, whose sixth column is 03 for a connected socket.  Empty when the process has gone.
    """
    rows = [row for row in procfs.sockets("unix", pid) if len(row) > 7 and row[5] == "03"]
    return Counter(row[7] for row in rows if row[7].startswith(f"{directory}/"))


def require(findings: Iterable[PreflightFinding]) -> None:
    """Raise the error of the first finding that blocks."""
    for finding in findings:
        if finding.error is not None:
            raise finding.error
