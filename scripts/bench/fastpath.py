"""Device memory to host memory and back, by size: ``python scripts/bench/fastpath.py [OPTIONS] [GIB ...]``.

For each size a kernel with the library, one that is suspended warm besides (``warm_suspend``), and one without the
library (``fast_path=off``) hold the same tensors and are suspended and resumed; with ``--kinds`` also kernels that get
their memory in other ways (PyTorch's expandable segments and cudaMallocAsync backend, JAX). Each figure is the median
of `ROUNDS`. "GPU free" counts from the request to the moment at which the GPU has none of it (warm: none of the
tensors), with everything the kernel is asked before; "back" to the moment at which the kernel runs. Then the steady
state: a training step, and a loop that allocates, in both kernels in turns. At last the whole way to the disk and
back of `TO_DISK` GiB, beside what that disk writes and reads by itself; and another checkpoint after a twentieth of
the tensors has changed. Of the kinds ``exchange`` and ``exchange-mirrored`` two kernels change places, again and
again, on a GPU where a program that does not share leaves less than `LEFT` GiB: "moves" counts from the begin of the
one's suspend to the moment at which both moves are done, "whole" from the request of the other one's cell to its end.
Both kernels' memory must fit into host memory: ``48 --sizes-only --kinds exchange exchange-mirrored`` needs 110 GiB.
Writes ``fastpath-bench.json`` below ``$OUT`` when that is set.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from device_programs import TORCH_LOOP
from harness import notebook, until

from jupyter_gpu_ckpt.cuda.gpus import Gpus
from jupyter_gpu_ckpt.lifecycle import host_memory

ROUNDS = 5
SIZES = (1, 4, 16, 48)
#: The driver alone is slow, and needs the host memory twice: no more than this, and fewer rounds.
DRIVER_MOST, DRIVER_ROUNDS = 16, 3
TO_DISK = 16
#: What fills the disk's queue when it is measured by itself.
DDS = 8
TURNS = 8
FILL = """
import torch
x = [torch.randint(-1 << 62, 1 << 62, (1 << 24,), device='cuda') for _ in range(8 * {gib})]  # of 128 MiB
torch.cuda.synchronize()
"""
TENTH = "for t in x[::10]: t += 1\ntorch.cuda.synchronize()"
SUM = "print([int(t.sum()) for t in x[::5]])"
#: Without preallocation JAX's own pool grows by what is asked for.
FILL_JAX = """
import jax, jax.numpy as jnp
jax.config.update('jax_enable_x64', True)
key = jax.random.PRNGKey(7)
x = [jax.random.randint(jax.random.fold_in(key, n), (1 << 24,), -1 << 62, 1 << 62, 'int64') for n in range(8 * {gib})]
jax.block_until_ready(x)
"""


@dataclass(frozen=True)
class Kind:
    """A kernel to measure: its provisioner's traits, its environment, the programs that fill the GPU and change it."""

    traits: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)
    fill: str = FILL
    change: str = ""
    mirrors: bool = False
    rounds: int = ROUNDS
    most: int = 1 << 30  #: GiB
    exchanges: bool = False


def _library(fill: str = FILL, **environment: str) -> Kind:
    return Kind({"fast_path": "auto"}, environment, fill)


KINDS = {
    "library": _library(),
    "warm": Kind({"fast_path": "auto", "warm_suspend": True}),
    "kept": Kind({"fast_path": "auto", "host_copy_bytes": 1 << 50}),
    "mirrored": Kind({"fast_path": "auto", "host_copy_bytes": 1 << 50}, change=TENTH, mirrors=True),
    "kept-changed": Kind({"fast_path": "auto", "host_copy_bytes": 1 << 50}, change=TENTH),
    "driver": Kind({"fast_path": "off"}, rounds=DRIVER_ROUNDS, most=DRIVER_MOST),
    "async": _library(PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync"),
    "async-driver": Kind(
        {"fast_path": "off"},
        {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
        rounds=DRIVER_ROUNDS,
        most=DRIVER_MOST,
    ),
    "expandable": _library(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"),
    "jax": _library(FILL_JAX, XLA_PYTHON_CLIENT_PREALLOCATE="false"),
    "jax-preallocated": _library(FILL_JAX),  # three quarters of the card, with so much of them in use
    "exchange": Kind({"gpu_sharing": "turns", "host_copy_bytes": 0}, exchanges=True),
    "exchange-mirrored": Kind(
        {"gpu_sharing": "turns", "host_copy_bytes": 1 << 50}, mirrors=True, exchanges=True, rounds=3
    ),
}
#: GiB of the GPU that are left beside one of two kernels that change places, and what has the rest.
LEFT = 3
HOG = f"""
import sys, torch
torch.cuda.init()
x = torch.empty(torch.cuda.mem_get_info()[0] - ({LEFT} << 30), dtype=torch.uint8, device='cuda')
print('there', flush=True)
sys.stdin.read()
"""
DEFAULT = ["library", "warm", "driver"]
CHANGE = "for t in x[: len(x) // 20]: t += 1\ntorch.cuda.synchronize()"
TRAINING = """
import time, torch
if 'model' not in globals():
    torch.manual_seed(0)
    layers = [torch.nn.TransformerEncoderLayer(1024, 16, batch_first=True) for _ in range(6)]
    model = torch.nn.Sequential(*layers).cuda()
    optimiser, batch = torch.optim.AdamW(model.parameters()), torch.randn(16, 256, 1024, device='cuda')
def step():
    model(batch).square().mean().backward(); optimiser.step(); optimiser.zero_grad()
for _ in range(3): step()
torch.cuda.synchronize(); began = time.perf_counter()
for _ in range(20): step()
torch.cuda.synchronize(); print((time.perf_counter() - began) / 20)
"""


def in_host(pid: int, host_memory: int) -> int:
    """Bytes that the process has in host memory, and its capsule's file system in memory, now."""
    status = Path(f"/proc/{pid}/status").read_text()
    resident = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS"))
    there = os.fstatvfs(host_memory)
    return resident + (there.f_blocks - there.f_bfree) * there.f_frsize


async def peak(kernel: Any) -> int:
    """Peak bytes of host memory during a suspend, sampled a hundred times a second, less those before."""
    capsule = kernel.lifecycle.capsule
    host_memory = capsule.host_memory()
    await until(
        lambda: os.fstatvfs(host_memory).f_bfree == os.fstatvfs(host_memory).f_blocks
    )  # the last return's is given back
    before = most = in_host(capsule.host_pid, host_memory)
    suspended = asyncio.ensure_future(kernel.provisioner.suspend())
    while not suspended.done():
        most = max(most, in_host(capsule.host_pid, host_memory))
        await asyncio.sleep(0.01)
    await suspended
    most = max(most, in_host(capsule.host_pid, host_memory))
    os.close(host_memory)
    return most - before


async def tier(kernel: Any, gib: int, kind: Kind) -> dict[str, Any]:
    """Suspend and resume; seconds of each."""
    await kernel.run(kind.fill.format(gib=gib), timeout=120)
    total = await kernel.run(SUM, timeout=120)
    figures: dict[str, Any] = {"free": [], "back": [], "resumed": []}
    keeps = "host_copy_bytes" in kind.traits
    held = sum(host_memory.device_bytes(kernel.lifecycle.kernel).values())
    for turn in range(kind.rounds + bool(keeps)):
        await asyncio.sleep(1)  # what the last round gives back is not this one's
        if kind.change:
            await kernel.run(kind.change, timeout=120)
            total = await kernel.run(SUM, timeout=120)
        if kind.mirrors:
            began = time.time()
            await begin_mirror(kernel)
            figures.setdefault("mirror", []).append(time.time() - began)
        kernel.steps.events.clear()
        began = time.time()
        await kernel.provisioner.suspend()
        done = {event.step: event for event in kernel.steps.completed()}
        figures["free"].append(done["cuda_suspend"].at - began)
        figures["steps"] = {step: event.seconds for step, event in done.items()}
        figures["parts"] = {f"out {name}": seconds for name, seconds in done["cuda_suspend"].parts.items()}
        began = time.time()
        await kernel.provisioner.resume()
        done = {event.step: event for event in kernel.steps.completed()}
        figures["back"].append(done["cuda_resume"].at - began)
        figures["parts"] |= {f"back {name}": seconds for name, seconds in done["cuda_resume"].parts.items()}
        figures["resumed"].append(time.time() - began)
        if await kernel.run(SUM, timeout=120) != total:
            raise AssertionError("the tensors differ")
        if keeps and turn == 0:  # all was copied
            figures |= {"free": [], "back": [], "resumed": []}
    figures["host_over"] = 0 if keeps else await peak(kernel) - held
    await kernel.provisioner.resume()
    return figures


async def begin_mirror(kernel: Any) -> None:
    """Have host memory get a copy of an idle kernel's device memory, and wait until it is there."""
    path = kernel.lifecycle.kernel.fast_path()
    await kernel.provisioner.mirror()
    await until(lambda: not path.amounts().mirrors)


async def exchange(home: Path, base: Path, gib: int, kind: Kind) -> dict[str, Any]:
    """Have two kernels change places; seconds of each time."""
    figures: dict[str, Any] = {"moves": [], "whole": [], "overlap": []}
    async with contextlib.AsyncExitStack() as stack:
        kernels, totals = [], []
        for number in range(2):
            (home / str(number)).mkdir()
            traits = {**kind.traits, "image_dir": str(home / "images")}
            kernel = await stack.enter_async_context(notebook(home / str(number), base / str(number), **traits))
            await kernel.run(kind.fill.format(gib=gib), timeout=120)
            totals.append(await kernel.run(SUM, timeout=120))
            if not number:
                await asyncio.to_thread(kernel.lifecycle.yield_gpu)
            kernels.append(kernel)
        hog = subprocess.Popen([sys.executable, "-c", HOG], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        stack.callback(hog.wait)
        stack.callback(hog.kill)
        assert hog.stdout is not None and await asyncio.to_thread(hog.stdout.readline) == "there\n"
        for turn in range(2 * kind.rounds + 2):
            coming, leaving = kernels[turn % 2], kernels[1 - turn % 2]
            if kind.mirrors:
                await begin_mirror(leaving)
            await asyncio.sleep(1)  # what the last round gives back is not this one's
            for kernel in kernels:
                kernel.steps.events.clear()
            began = time.time()
            if await coming.run(SUM, timeout=120) != totals[turn % 2]:
                raise AssertionError("the tensors differ")
            whole = time.time() - began
            await until(lambda: leaving.state == "off_gpu")  # noqa: B023
            (away,) = (event for event in leaving.steps.completed() if event.step == "cuda_suspend")
            (back,) = (event for event in coming.steps.completed() if event.step == "cuda_resume")
            if turn >= 2:  # in the first ones, host memory is used for the first time
                first = away.at - (away.seconds or 0.0)
                figures["moves"].append(max(away.at, back.at) - first)
                figures["whole"].append(whole)
                figures["overlap"].append(away.at - (back.at - (back.seconds or 0.0)))
            figures["parts"] = {f"out {name}": seconds for name, seconds in away.parts.items()}
            figures["parts"] |= {f"back {name}": seconds for name, seconds in back.parts.items()}
    return figures


async def sizes(place: Path, base: Path, wanted: list[int], kinds: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for gib in wanted:
        for name in kinds:
            kind = KINDS[name]
            if gib > kind.most:
                continue
            home = place / f"{name}-{gib}"
            home.mkdir()
            if kind.exchanges:
                found[f"{gib} {name}"] = figures = await exchange(home, base, gib, kind)
                shutil.rmtree(home)
                line = "  ".join(f"{k} {statistics.median(figures[k]):.3f} s" for k in ("moves", "whole", "overlap"))
                print(f"{gib:4} GiB  {name:17} {line}", flush=True)
                print("     ", " ".join(f"{k} {seconds:.3f}" for k, seconds in figures["parts"].items()), flush=True)
                continue
            with mock.patch.dict(os.environ, kind.environment):
                async with notebook(home, base, **kind.traits) as kernel:
                    found[f"{gib} {name}"] = await tier(kernel, gib, kind)
            shutil.rmtree(home)
            figures = found[f"{gib} {name}"]
            line = "  ".join(f"{key} {statistics.median(figures[key]):.3f} s" for key in ("free", "back", "resumed"))
            print(
                f"{gib:4} GiB  {name:12} {line}  host memory - device memory {figures['host_over'] / 2**20:.0f} MiB",
                flush=True,
            )
            for key in ("steps", "parts"):  # of the last round
                print("     ", " ".join(f"{name} {seconds:.3f}" for name, seconds in figures[key].items()), flush=True)
    return found


async def steady(place: Path, base: Path) -> dict[str, list[float]]:
    figures: dict[str, list[float]] = {}
    for name in ("with", "without"):
        (place / name).mkdir()
    async with (
        notebook(place / "with", base, fast_path="auto") as ours,
        notebook(place / "without", base, fast_path="off") as stock,
    ):
        for turn in range(TURNS + 1):
            for work, code in (("training", TRAINING), ("allocations", TORCH_LOOP)):
                for name, kernel in (("with", ours), ("without", stock))[:: 1 if turn % 2 else -1]:
                    took = float(await kernel.run(code, timeout=120))
                    if turn:
                        figures.setdefault(f"{work} {name}", []).append(took)
    for work in ("training", "allocations"):
        pairs = zip(figures[f"{work} with"], figures[f"{work} without"], strict=True)
        print(f"{work}: {statistics.median(a / b for a, b in pairs):.4f} of the time without the library", flush=True)
    return figures


def written(place: Path) -> int:
    """Bytes that the disk of ``place`` was given to write, by all (Documentation/block/stat.rst: the seventh field)."""
    os.sync()
    device = place.stat().st_dev
    fields = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text().split()
    return int(fields[6]) * 512


def forget(directory: Path) -> None:
    """Drop the directory's files from the page cache: the next read comes from the disk."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def raw_disk(place: Path) -> dict[str, float]:
    """Bytes per second that dd(1), several of them, write to that disk, flushed, and read, past the page cache."""
    count, found = 64 * TO_DISK // DDS, {}
    files = [place / f"raw-{number}" for number in range(DDS)]
    for name in ("write", "read"):
        began, running = time.time(), []
        for file in files:
            way = [f"of={file}", "if=/dev/zero", "oflag=direct", "conv=fsync"]
            if name == "read":
                way = [f"if={file}", "of=/dev/null", "iflag=direct"]
            running.append(subprocess.Popen(["dd", "bs=16M", f"count={count}", *way], stderr=subprocess.DEVNULL))
        if any(process.wait() for process in running):
            raise OSError("dd(1) did not do it")
        found[name] = (DDS * count << 24) / (time.time() - began)
    for file in files:
        file.unlink()
    print("disk by itself: " + "  ".join(f"{name} {rate / 1e9:.2f} GB/s" for name, rate in found.items()), flush=True)
    return found


async def to_disk(place: Path, base: Path) -> dict[str, Any]:
    home = place / "disk"
    home.mkdir()
    async with notebook(home, base, fast_path="auto") as kernel:
        await kernel.run(FILL.format(gib=TO_DISK), timeout=120)
        total = await kernel.run(SUM, timeout=120)
        kernel.steps.events.clear()
        before, began = written(home), time.time()
        image = await kernel.provisioner.checkpoint()
        leaving = {event.step: event.seconds for event in kernel.steps.completed()}
        whole = {"checkpoint": time.time() - began, "bytes": image.manifest.bytes, "written": written(home) - before}
        kernel.steps.events.clear()
        began = time.time()
        await kernel.run("print(1)", timeout=120)
        whole["wake"] = time.time() - began
        if await kernel.run(SUM, timeout=120) != total:
            raise AssertionError("the tensors differ")
        await kernel.settled("running")
        returning = {event.step: event.seconds for event in kernel.steps.completed()}
        await kernel.run(CHANGE, timeout=120)
        total, before, began = await kernel.run(SUM, timeout=120), written(home), time.time()
        image = await kernel.provisioner.checkpoint()
        whole["second checkpoint"] = time.time() - began
        whole["second written"] = written(home) - before
        forget(image.path)
        began = time.time()
        await kernel.run("print(1)", timeout=120)
        whole["cold wake"] = time.time() - began
        if await kernel.run(SUM, timeout=120) != total:
            raise AssertionError("the tensors differ")
    print(f"{TO_DISK} GiB to disk: {whole}\n  {leaving}\n  {returning}", flush=True)
    return {"whole": whole, "leaving": leaving, "returning": returning, "raw": raw_disk(place)}


def main(wanted: list[int], kinds: list[str], *, sizes_only: bool) -> None:
    """Run it and print it."""
    root, base = Path(tempfile.mkdtemp(prefix="gb-")), Path(tempfile.mkdtemp(prefix="gr-"))
    # A machine whose memory grows on first use would charge that to the first that comes.
    subprocess.run([sys.executable, "-c", f"b = bytearray({max(*wanted, 3 * TO_DISK) + 8} << 30)"], check=True)
    gpu = Gpus().list()[0]
    report: dict[str, Any] = {"gpu": gpu.name, "driver": gpu.driver, "kernel": platform.release(), "uid": os.geteuid()}
    report["time"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    report["sizes"] = asyncio.run(sizes(root, base, wanted, kinds))
    if not sizes_only:
        report["steady"] = asyncio.run(steady(root, base))
        report["disk"] = asyncio.run(to_disk(root, base))
    if os.environ.get("OUT"):
        Path(os.environ["OUT"], "fastpath-bench.json").write_text(json.dumps(report, indent=1))
    shutil.rmtree(root, ignore_errors=True)
    shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Device memory to host memory and back, by size; and to the disk.")
    parser.add_argument("--sizes-only", action="store_true", help="neither the steady state nor the disk")
    parser.add_argument("gib", nargs="*", type=int, default=SIZES, metavar="GIB", help="by default %(default)s")
    parser.add_argument("--kinds", nargs="+", default=DEFAULT, choices=list(KINDS), help="which kernels")
    arguments = parser.parse_args()
    main(list(arguments.gib), arguments.kinds, sizes_only=arguments.sizes_only)
