"""Suspend, checkpoint and wake with device memory, beside the bare tools: ``python scripts/bench/gpu.py [GIB]``.

Bare is what a careful administrator would type: cuda.core's lock and checkpoint, ``criu dump``, ``sync``; then ``criu
restore``, cuda.core's restore and unlock.  Ours is a kernel of the provisioner, checkpointed and woken by a client's
message.  Both hold the same tensors.  Prints a table; writes ``gpu-bench.json`` below ``$OUT`` when that is set.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from harness import notebook
from jupyter_client.manager import start_new_async_kernel

from jupyter_gpu_ckpt.criu.criu import OPTIONS
from jupyter_gpu_ckpt.criu.install import find
from jupyter_gpu_ckpt.cuda.gpus import Gpus

ROUNDS = 3
#: Of the steady state, an even number.
TURNS = 10
FILL = "import torch; x = [torch.randn(1 << 28, device='cuda') for _ in range({gib})]; torch.cuda.synchronize()"
MATMUL = """
import torch
torch.manual_seed(0)
a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
for _ in range(20): a @ b
begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
begin.record()
for _ in range(200): a @ b
end.record(); torch.cuda.synchronize()
print(begin.elapsed_time(end) / 200)
"""
SMALL = """
import time
import torch
z = torch.ones(1024, device="cuda")
for _ in range(2000): z.add_(1)
torch.cuda.synchronize(); began = time.perf_counter()
for _ in range(20000): z.add_(1)
torch.cuda.synchronize()
print((time.perf_counter() - began) / 20000 * 1e6)
"""
BARE = """
import os, signal, sys, time
{fill}
total = sum(float(t.double().sum()) for t in x)
torch.cuda.empty_cache()  # as the agent does: bare saves the same bytes
def check(*_):
    same = sum(float(t.double().sum()) for t in x) == total
    open(sys.argv[1] + "/checked", "w").write(str(same))
signal.signal(signal.SIGUSR1, check)
open(sys.argv[1] + "/ready", "w").close()
while True: time.sleep(0.01)
"""


def wait_for(path: Path, seconds: float = 120) -> str:
    deadline = time.monotonic() + seconds
    while not path.exists() or (path.name == "checked" and not path.read_text()):
        if time.monotonic() > deadline:
            raise TimeoutError(path)
        time.sleep(0.005)
    return path.read_text()


def bare(gib: int, place: Path) -> dict[str, float]:
    """One cycle by hand; seconds by phase."""
    from cuda.core import checkpoint as cuda

    place.mkdir()
    images = place / "images"
    images.mkdir()
    with open(place / "out", "w") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", BARE.format(fill=FILL.format(gib=gib)), str(place)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    wait_for(place / "ready")
    seconds: dict[str, float] = {}

    def timed(name: str, call, *args, **kwargs) -> None:
        began = time.perf_counter()
        call(*args, **kwargs)
        seconds[name] = time.perf_counter() - began

    def criu(verb: str, *options: str) -> None:
        common = [word for option in OPTIONS for word in option]
        command = [*find().argv, verb, "-D", str(images), "-o", f"{verb}.log", *common, *options]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if result.returncode:
            raise RuntimeError((images / f"{verb}.log").read_text()[-2000:] + result.stderr)

    target = cuda.Process(process.pid)
    timed("lock", target.lock, timeout_ms=30000)
    timed("cuda checkpoint", target.checkpoint)
    timed("criu dump", criu, "dump", "-t", str(process.pid))
    process.wait(60)
    timed("sync", os.sync)
    size = sum(path.stat().st_size for path in images.iterdir())
    timed("criu restore", criu, "restore", "--restore-detached", "--pidfile", "pid")
    target = cuda.Process(int((images / "pid").read_text()))
    timed("cuda restore", target.restore)
    timed("unlock", target.unlock)
    os.kill(target.pid, 10)
    if wait_for(place / "checked") != "True":
        raise AssertionError("bare: the tensors differ")
    os.kill(target.pid, 9)
    shutil.rmtree(place)
    return {**seconds, "bytes": size}


async def ours(gib: int, place: Path, base: Path) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """One cycle of a kernel: steps of the checkpoint, steps of the wake, total seconds."""
    place.mkdir()
    async with notebook(place, base) as kernel:
        await kernel.run(FILL.format(gib=gib), timeout=120)
        total = await kernel.run("print(sum(float(t.double().sum()) for t in x))")
        began = time.perf_counter()
        image = await kernel.provisioner.checkpoint()
        whole = {"checkpoint": time.perf_counter() - began, "bytes": image.manifest.bytes}
        leaving = {event.step: event.seconds for event in kernel.steps.completed()}
        kernel.steps.events.clear()
        began = time.perf_counter()
        await kernel.run("print(1)")
        whole["wake"] = time.perf_counter() - began
        if await kernel.run("print(sum(float(t.double().sum()) for t in x))") != total:
            raise AssertionError("ours: the tensors differ")
        await kernel.settled("running")
        returning = {event.step: event.seconds for event in kernel.steps.completed()}
    shutil.rmtree(place)
    return leaving, returning, whole


async def overhead(place: Path, base: Path) -> dict[str, list[float]]:
    """Milliseconds a matmul and microseconds a small kernel take in our kernel and in a stock one.

    Both kernels live all the while.  They take turns, and take turns at being first: clocks and temperature of a GPU
    drift by more than what is looked for.
    """
    figures: dict[str, list[float]] = {name: [] for name in ("matmul in", "matmul out", "small in", "small out")}
    place.mkdir()
    stock, client = await start_new_async_kernel(cwd=str(place))
    try:
        async with notebook(place, base) as kernel:

            async def outside(code: str) -> str:
                said: list[str] = []
                hook = lambda message: said.append(message["content"].get("text", ""))  # noqa: E731
                await client.execute_interactive(code, output_hook=hook, timeout=120)
                return "".join(said)

            for number in range(TURNS + 1):
                for name, code in (("matmul", MATMUL), ("small", SMALL)):
                    for where in ("in", "out") if number % 2 else ("out", "in"):
                        took = float(await (kernel.run(code) if where == "in" else outside(code)))
                        if number:  # the first turn loads and compiles
                            figures[f"{name} {where}"].append(took)
    finally:
        client.stop_channels()
        await stock.shutdown_kernel(now=True)
    return figures


def main(gib: int) -> None:
    """Run everything and print it."""
    root = Path(tempfile.mkdtemp(prefix="gb-"))
    base = Path(tempfile.mkdtemp(prefix="gr-"))
    # A machine whose memory grows on first use would charge that to the first that comes.
    subprocess.run([sys.executable, "-c", f"b = bytearray({3 * gib + 8} << 30)"], check=True)
    gpu = Gpus().list()[0]
    report: dict[str, object] = {
        "gpu": gpu.name,
        "driver": gpu.driver,
        "kernel": platform.release(),
        "criu": ".".join(map(str, find().version)),
        "gib": gib,
        "uid": os.geteuid(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    rounds = {"bare": [], "leaving": [], "returning": [], "whole": []}
    for number in range(ROUNDS):
        if os.geteuid() == 0:
            rounds["bare"].append(bare(gib, root / f"bare{number}"))
        leaving, returning, whole = asyncio.run(ours(gib, root / f"ours{number}", base))
        rounds["leaving"].append(leaving)
        rounds["returning"].append(returning)
        rounds["whole"].append(whole)
    report["rounds"] = rounds
    report["overhead"] = asyncio.run(overhead(root / "overhead", base))
    for name, runs in rounds.items():
        print(f"\n{name} (median of {len(runs)})")
        for phase in runs[0] if runs else ():
            middle = statistics.median(run.get(phase, 0.0) for run in runs)
            if phase == "bytes":
                print(f"  {phase:16} {middle / 2**30:9.2f} GiB")
            else:
                rate = f"{gib * 2**30 / middle / 1e9:8.2f} GB/s" if middle > 0.05 else ""
                print(f"  {phase:16} {middle:9.3f} s {rate}")
    for name in ("matmul", "small"):
        inside, outside = (statistics.median(report["overhead"][f"{name} {where}"]) for where in ("in", "out"))
        pairs = zip(*(report["overhead"][f"{name} {where}"] for where in ("in", "out")), strict=True)
        ratios = [ours / stock for ours, stock in pairs]
        print(f"\n{name}: {inside:.4f} inside, {outside:.4f} outside the capsule, ratio {inside / outside:.4f};")
        print(f"  of the turns {statistics.median(ratios):.4f} ({min(ratios):.4f} to {max(ratios):.4f})")
    if os.environ.get("OUT"):
        Path(os.environ["OUT"], "gpu-bench.json").write_text(json.dumps(report, indent=1))
    shutil.rmtree(root, ignore_errors=True)
    shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8)
