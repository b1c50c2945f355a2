"""Text for a cell's output: tables, and the output of ``%gpu_checkpoint --status``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from .server_channel import RequestRefused
from .tensors import human


def columns(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table; a last column named ``bytes`` is aligned to the right."""
    table = [heads, *rows]
    widths = [max(map(len, column)) for column in zip(*table)]  # noqa: B905 -- strict is Python 3.10's
    sides = [*"<" * (len(heads) - 1), ">" if heads[-1] == "bytes" else "<"]
    layout = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths))  # noqa: B905
    return "\n".join(layout.format(*row).rstrip() for row in table)


def moment(at: float) -> str:
    """Format a moment (seconds since the epoch) in local time, with the date where that is not today's."""
    local = time.localtime(at)
    return time.strftime("%H:%M" if local[:3] == time.localtime()[:3] else "%Y-%m-%d %H:%M", local)


def status_text(
    status: dict[str, Any], largest: Sequence[Sequence[str]], released: Sequence[str], failure: RequestRefused | None
) -> str:
    """Format the server's reply, the kernel's largest tensors and its last failure."""
    seconds, device = status["seconds"], status["device_bytes"]
    lines = [("state", status["state"])]
    for gpu in status["gpus"]:
        if gpu["uuid"] in device:
            free = f"{human(gpu['free'])} of {human(gpu['total'])} free"
            lines.append(("GPU memory", f"{human(device[gpu['uuid']])} on {gpu['name']} ({free})"))
    if not device:
        lines.append(("GPU memory", "none"))
    if largest:
        first, *others = columns(("variable", "type", "dtype", "shape", "device", "bytes"), largest).splitlines()
        lines += [("largest", first), *(("", line) for line in others)]
    lines.append(("host memory", human(status["process_bytes"])))
    lines.append(("image", f"about {human(status['image_bytes'])}; {human(status['disk_free'])} free on its disk"))
    free = f"{seconds['gpu_free']:.1f} s until the GPU is free, " if device else ""
    times = f"about {free}{seconds['saved']:.1f} s until all is saved, {seconds['back']:.1f} s to come back"
    lines.append(("time", times))
    if status.get("protected_until"):
        lines.append(("protected", f"until {moment(status['protected_until'])}"))
    if released:
        lines.append(("released", ", ".join(released)))
    findings = status["findings"]
    lines.append(("checkpoint", "not now" if any(finding["blocks"] for finding in findings) else "possible"))
    lines += [("", f"{finding['code']}: {finding['text']} {finding['hint']}") for finding in findings]
    if failure is not None:
        lines += [("last failure" if at == 0 else "", line) for at, line in enumerate(failure.lines())]
    return "\n".join(f"{name:13}{text}".rstrip() for name, text in lines)
