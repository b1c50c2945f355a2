"""The parts of a second machine on this one: network, processes, mounts, name and clocks of its own."""

from __future__ import annotations

from pathlib import Path

SPACES = ("--net", "--pid", "--mount", "--uts")


def unshare(*, uptime: int) -> list[str]:
    """The beginning of a command line whose rest runs as PID 1 of a new machine; when it ends, all of that does.

    ``uptime``: seconds it seems to have been up for longer than this one.
    """
    clocks = ["--time", f"--monotonic={uptime}", f"--boottime={uptime}"]
    return ["unshare", *SPACES, *clocks, "--fork", "--kill-child", "--mount-proc"]


def init_of(unshare_pid: int) -> int:
    """The machine's PID 1, as this machine numbers it.  `ValueError` while there is none yet."""
    (init,) = Path(f"/proc/{unshare_pid}/task/{unshare_pid}/children").read_text().split()
    return int(init)


def enter(init: int) -> list[str]:
    """The beginning of a command line whose rest runs on the machine of that PID 1."""
    return ["nsenter", "--target", str(init), *SPACES, "--time"]
