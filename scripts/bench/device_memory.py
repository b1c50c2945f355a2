"""The table of docs/performance.md: ``python scripts/bench/device_memory.py [OPTIONS] [ROW ...]``.

Device memory of each framework off the GPU and back, beside the bus alone and the CUDA driver alone in the same run,
with a limit for each figure.  Rows are named in `ROWS`; a group's name (`GROUPS`) stands for its rows, and those that
a row's limit needs are added.  Rows that ``--seconds`` leaves no time for are named.  ``--plan`` only prints what would
be run.

"Tensors off" is the time from the request to the moment at which another process can allocate their memory; "all off"
until the context has left as well; "back" until the kernel runs.  Each is the median of ``--rounds``.  Where another
framework's limit is "torch + 0.1 s", that is PyTorch's figure in the same run.  After each way out and back, sums in
which every bit counts are compared.

An "untouched" kernel is mirrored as a whole, shares its GPU and may be taken from it at any moment; nobody needed the
memory, which is still there.  Its figure is the time of its next cell that uses the GPU, and beside it that of the
same cell of a kernel that is not mirrored.

With 48 GiB twice the exchanges need 104 GiB of host memory, and a GPU of 80 GB.  ``--images`` names the directory of
images; one in memory (/dev/shm/...) leaves the disk out.  Prints a table, writes ``device-memory-bench.json`` below
``$OUT`` after each row, and ends with status 3 if a limit is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import fastpath
from device_programs import PROGRAMS, Program
from harness import notebook
from kernel import first_output
from limits import MISSED

from jupyter_gpu_ckpt.cuda.gpus import Gpus
from jupyter_gpu_ckpt.lifecycle import host_memory
from jupyter_gpu_ckpt.lifecycle.preflight import available_memory

GIB = 1 << 30
#: GiB of the rows of all frameworks, and of those that are mirrored or change places; MiB beside a small context.
EACH, LARGE, SMALL = 16, 48, 64
#: GiB that JAX uses, and that it used before.
USED, PEAK = 2, 20
#: Seconds of a framework beyond PyTorch's, and of what is not bytes or the driver's.
BEYOND, REST, SMALL_REST = 0.1, 0.10, 0.08
#: Turns of a loop that allocates, and of a training, with and without the library.
TURNS, TRAINING_TURNS = 16, 8
#: Pairs of kernels for one that allocates: of two the one may be slower for seconds, and so may the other.
PAIRS = 4
#: Host memory is used once before, by so many processes: a machine's may grow on first use.
WARMERS = 8
#: GiB of host memory that are left then.
UNUSED = 8
#: For cells and programs, in seconds.
DEADLINE = 180
#: Has all threads of a kernel run on one processor.
BIND = """
import os
for each in os.listdir('/proc/self/task'):
    os.sched_setaffinity(int(each), {{{processor}}})
"""
TRAINING = ("PyTorch, a training step", fastpath.TRAINING)

BUS = """
import json, time, torch
pinned = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
device = [torch.ones(1 << 30, dtype=torch.uint8, device='cuda') for _ in range({gib})]
def onto_host(each):
    pinned.copy_(each, non_blocking=True)
def onto_device(each):
    each.copy_(pinned, non_blocking=True)
def seconds(copy):
    torch.cuda.synchronize()
    began = time.perf_counter()
    for each in device:
        copy(each)
    torch.cuda.synchronize()
    return time.perf_counter() - began
ways = dict(out=onto_host, back=onto_device)
found = dict((name, [seconds(copy) for _ in range({rounds} + 1)][1:]) for name, copy in ways.items())
print(json.dumps(found))
"""
#: A program with a context, and the driver's functions for it by themselves.
SUBJECT = """
import sys
{code}
begin()
fill({mib} or 2)
check()
if not {mib}:
    drop()
print('there', flush=True)
sys.stdin.read()
"""
ALONE = """
import json, time
from cuda.core import checkpoint
process = checkpoint.Process({pid})
def seconds(*calls):
    began = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - began
found = dict(out=[], back=[])
for _ in range({rounds} + 1):
    found['out'].append(seconds(lambda: process.lock(timeout_ms=30000), process.checkpoint))
    found['back'].append(seconds(process.restore, process.unlock))
print(json.dumps(dict((name, each[1:]) for name, each in found.items())))
"""
#: A program that has GiB of a GPU, as the library would serve them, releases them, and makes them again.
LARGE_SUBJECT = """
import itertools, sys, time
from cuda.bindings import driver as cu
def do(call, *arguments):
    error, *found = call(*arguments)
    if error != cu.CUresult.CUDA_SUCCESS:
        sys.exit(f'{{call.__name__}}: {{error}}')
    return found[0] if found else None
do(cu.cuInit, 0)
device = do(cu.cuDeviceGet, 0)
do(cu.cuCtxSetCurrent, do(cu.cuDevicePrimaryCtxRetain, device))
size = {gib} << 30
where = cu.CUmemAllocationProp()
where.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
where.requestedHandleTypes = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
where.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
where.location.id = 0
access = cu.CUmemAccessDesc()
access.location = where.location
access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
address = do(cu.cuMemAddressReserve, size, 0, 0, 0)
handle = None
def make():
    global handle
    handle = do(cu.cuMemCreate, size, where, 0)
    do(cu.cuMemMap, address, size, 0, handle, 0)
    do(cu.cuMemSetAccess, address, size, [access], 1)
def use():
    do(cu.cuMemsetD8, address, 1, size)
    do(cu.cuCtxSynchronize)
def release():
    do(cu.cuMemUnmap, address, size)
    do(cu.cuMemRelease, handle)
make()
for line in itertools.chain(['use'], sys.stdin):
    began = time.perf_counter()
    globals()[line.strip()]()
    print(time.perf_counter() - began, flush=True)
"""
#: A program that leaves a little of the GPU free, and then, at each line, takes that and GiB more as soon as it can:
#: all but 256 MiB, because contexts grow meanwhile.  It ends where it does not get them.
TAKER = """
import sys, time
from cuda.bindings import driver as cu
def do(call, *arguments):
    error, *found = call(*arguments)
    if error != cu.CUresult.CUDA_SUCCESS:
        sys.exit(f'{{call.__name__}}: {{error}}')
    return found if len(found) != 1 else found[0]
do(cu.cuInit, 0)
do(cu.cuCtxSetCurrent, do(cu.cuDevicePrimaryCtxRetain, do(cu.cuDeviceGet, 0)))
free, _ = do(cu.cuMemGetInfo)
do(cu.cuMemAlloc, free - (4 << 30))
free, _ = do(cu.cuMemGetInfo)
print('there', flush=True)
for line in sys.stdin:
    end = time.time() + 60
    while time.time() < end:
        error, taken = cu.cuMemAlloc(free + ({gib} << 30) - (256 << 20))
        if error != cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            break
        time.sleep(0.002)
    now = time.time()
    if error != cu.CUresult.CUDA_SUCCESS:
        sys.exit(f'cuMemAlloc: {{error}}')
    do(cu.cuMemFree, taken)
    print(now, flush=True)
"""


@dataclass(frozen=True)
class Figure:
    """One line of the table: its values, and the least and the most that their median may be."""

    what: str
    values: Sequence[float]
    unit: str = "s"
    most: float | None = None
    least: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def met(self) -> bool | None:
        """True if the limits are met; None without a limit."""
        if self.most is None and self.least is None:
            return None
        return (self.most is None or self.median <= self.most) and (self.least is None or self.median >= self.least)

    def line(self) -> str:
        """Return the line of a Markdown table."""
        digits = {"s": 3, "GiB": 1, "%": 1, "": 3, "GB/s": 1}[self.unit]

        def shown(value: float) -> str:
            return f"{value:.{digits}f} {self.unit}".strip()

        measured = shown(self.median)
        if len(self.values) > 1:
            measured += f" ({min(self.values):.{digits}f} to {max(self.values):.{digits}f})"
        limits = [f">= {shown(self.least)}"] if self.least is not None else []
        limits += [f"<= {shown(self.most)}"] if self.most is not None else []
        met = {None: "", True: "met", False: "MISSED"}[self.met]
        return f"| {self.what} | {measured} | {', '.join(limits)} | {met} |"


@dataclass
class Bench:
    """One run: its directories and rounds, and what the rows have measured that the limits of others need."""

    root: Path
    base: Path
    rounds: int
    images: Path | None = None
    medians: dict[str, float] = field(default_factory=dict)
    #: Seconds of the steps and their parts in the first round and the last, by row.
    steps: dict[str, dict[str, float]] = field(default_factory=dict)

    @contextlib.asynccontextmanager
    async def kernel(self, name: str, program: Program, **traits: Any):
        """A kernel with the framework's program, in a directory of its own."""
        home = self.root / name
        home.mkdir()
        images = self.images / name if self.images is not None else home / "images"
        images.mkdir(parents=True, mode=0o700)
        traits = {"fast_path": "auto", "host_copy_bytes": 0, "image_dir": str(images), **traits}
        try:
            with mock.patch.dict(os.environ, program.environment):
                async with notebook(home, self.base, **traits) as kernel:
                    await kernel.run(program.code, timeout=DEADLINE)
                    yield kernel
        finally:
            shutil.rmtree(home, ignore_errors=True)
            shutil.rmtree(images, ignore_errors=True)


def python(code: str) -> Any:
    """Run a program, and return what it prints as JSON."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout)


# -- what is beside it: the bus alone and the driver alone


async def bus(bench: Bench) -> list[Figure]:
    """Pinned copies of as many bytes, both ways."""
    found = await asyncio.to_thread(python, BUS.format(gib=EACH, rounds=bench.rounds))
    figures = []
    for way, values in found.items():
        bench.medians[f"bus {way}"] = statistics.median(values) / EACH  # of one GiB
        figures.append(Figure(f"the bus alone, {EACH} GiB: {way}", values))
        figures.append(Figure(f"the bus alone: {way}", [EACH * GIB / each / 1e9 for each in values], "GB/s"))
    return figures


def driver_alone(mib: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of the driver's lock and checkpoint, and restore and unlock, of a context and so much memory."""
    code = SUBJECT.format(code=PROGRAMS["torch"].code, mib=mib)
    subject = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert subject.stdout is not None
        if subject.stdout.readline() != "there\n":
            raise RuntimeError("the program with a context ended")
        return python(ALONE.format(pid=subject.pid, rounds=rounds))
    finally:
        subject.kill()
        subject.wait()


async def driver(bench: Bench) -> list[Figure]:
    figures = []
    for mib, name in ((0, "a context"), (SMALL, f"a context and {SMALL} MiB")):
        found = await asyncio.to_thread(driver_alone, mib, bench.rounds)
        for way, words in (("out", "lock and checkpoint"), ("back", "restore and unlock")):
            bench.medians[f"driver {mib} {way}"] = statistics.median(found[way])
            figures.append(Figure(f"the driver alone, {name}: {words}", found[way]))
    return figures


def released(gib: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of the driver alone for a process that releases so many GiB, is suspended at once and has them again."""
    from cuda.core import checkpoint

    code = LARGE_SUBJECT.format(gib=gib)
    subject = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert subject.stdin is not None and subject.stdout is not None
    found: dict[str, list[float]] = {"release": [], "lock and checkpoint": [], "restore and unlock": [], "make": []}

    def seconds(*calls: Callable[[], object]) -> float:
        began = time.perf_counter()
        for call in calls:
            call()
        return time.perf_counter() - began

    def timed(word: str) -> float:
        subject.stdin.write(f"{word}\n")
        subject.stdin.flush()
        return float(subject.stdout.readline())

    try:
        float(subject.stdout.readline())
        process = checkpoint.Process(subject.pid)
        for turn in range(rounds + 1):
            values = [
                timed("release"),
                seconds(lambda: process.lock(timeout_ms=30000), process.checkpoint),
                seconds(process.restore, process.unlock),
                timed("make"),
            ]
            timed("use")
            if turn:  # the first one loads what the driver needs
                for name, value in zip(found, values, strict=True):
                    found[name].append(value)
    finally:
        subject.kill()
        subject.wait()
    return found


async def driver_large(bench: Bench) -> list[Figure]:
    """The driver alone, of a context whose process has released as much as JAX takes by default, and `EACH` GiB."""
    figures = []
    for gib in (EACH, int(Gpus().list()[0].total * 0.75) // GIB):
        found = await asyncio.to_thread(released, gib, bench.rounds)
        figures += [Figure(f"the driver alone, {gib} GiB: {name}", values) for name, values in found.items()]
    return figures


# -- a kernel's way off the GPU and back


async def out(kernel: Any) -> dict[str, float]:
    """Suspend; seconds until the tensors are off the GPU, until all is, and of the parts."""
    kernel.steps.events.clear()
    began = time.time()
    await kernel.provisioner.suspend()
    completed = {event.step: event for event in kernel.steps.completed()}
    done = completed["cuda_suspend"]
    whole, parts = done.at - began, done.parts
    steps = {step: event.seconds for step, event in completed.items()}
    steps |= {f"quiesce {name}": seconds for name, seconds in completed["quiesce"].parts.items()}
    steps |= {f"out {name}": seconds for name, seconds in parts.items()}
    since = sum(parts.get(name, 0.0) for name in ("swap_out/lock", "freeze", "driver"))
    return {"all off": whole, "tensors off": whole - since, **steps}


async def back(kernel: Any) -> dict[str, float]:
    """Resume; seconds until the kernel runs, and of the parts."""
    kernel.steps.events.clear()
    began = time.time()
    await kernel.provisioner.resume()
    (done,) = (event for event in kernel.steps.completed() if event.step == "cuda_resume")
    steps = {event.step: event.seconds for event in kernel.steps.completed()}
    steps |= {f"back {name}": seconds for name, seconds in done.parts.items()}
    return {"back": done.at - began, **steps}


async def rounds(
    bench: Bench, row: str, kernel: Any, *, change: bool = False, mirror: bool = False, forget: bool = False
):
    """Suspend and resume as often as wanted, after a change, a mirror, or without the copy; each figure's values."""
    figures: dict[str, list[float]] = {"tensors off": [], "all off": [], "back": []}
    for _ in range(bench.rounds):
        if change:
            await kernel.run("change()", timeout=DEADLINE)
        expected = await kernel.run("print(check())", timeout=DEADLINE)
        if mirror:
            await whole_mirror(kernel)
        if forget:
            kernel.lifecycle.kernel.fast_path().give_up_copy()
        await asyncio.sleep(1)  # what the last round gives back is not this one's
        found = await out(kernel) | await back(kernel)
        for name, values in figures.items():
            values.append(found.pop(name))
        bench.steps.setdefault(f"{row}, first", found)
        bench.steps[row] = found
        if await kernel.run("print(check())", timeout=DEADLINE) != expected:
            raise AssertionError("the memory differs after a suspend")
    return figures


async def whole_mirror(kernel: Any) -> None:
    """Have host memory get a copy of all of the idle kernel's device memory."""
    await fastpath.begin_mirror(kernel)
    if not kernel.lifecycle.kernel.fast_path().mirrored():
        raise AssertionError("the kernel is not mirrored as a whole")


async def by_library(kernel: Any, mib: int, *, begin: bool = True) -> float:
    """Fill the device; percent of the bytes that came on it which the library serves.

    Without ``begin`` the context counts as well.
    """

    def held() -> tuple[int, int]:
        used = sum(host_memory.device_bytes(kernel.lifecycle.kernel).values())
        return used, kernel.lifecycle.kernel.fast_path().amounts().bytes

    used, served = 0, 0
    if begin:
        await kernel.run("begin()", timeout=DEADLINE)
        used, served = held()
    await kernel.run(f"fill({mib})", timeout=DEADLINE)
    used_after, served_after = held()
    return 100 * (served_after - served) / (used_after - used)


async def disk_keeps_all(kernel: Any) -> None:
    """Checkpoint and wake; raise unless every bit is as before."""
    expected = await kernel.run("print(check())", timeout=DEADLINE)
    await kernel.provisioner.checkpoint()
    if await kernel.run("print(check())", timeout=DEADLINE) != expected:
        raise AssertionError("the memory differs after a checkpoint")
    await kernel.settled("running")


async def framework(bench: Bench, name: str) -> list[Figure]:
    """The row of one framework: `EACH` GiB off and back, to the disk and back."""
    program = PROGRAMS[name]
    async with bench.kernel(name, program) as kernel:
        share = await by_library(kernel, EACH << 10, begin=not program.preallocates)
        found = await rounds(bench, name, kernel)
        await disk_keeps_all(kernel)
    if name == "torch":
        moved = {way: EACH * bench.medians[f"bus {way}"] for way in ("out", "back")}
        alone = {way: bench.medians[f"driver 0 {way}"] for way in ("out", "back")}
        most = {
            "tensors off": moved["out"] + REST,
            "all off": moved["out"] + alone["out"] + REST,
            "back": moved["back"] + alone["back"] + REST,
        }
        bench.medians |= {f"torch {what}": statistics.median(values) for what, values in found.items()}
    else:
        most = {what: bench.medians[f"torch {what}"] + BEYOND for what in found}
    title = f"{EACH} GiB, {program.title}"
    figures = [Figure(f"{title}: {what}", values, most=most[what]) for what, values in found.items()]
    return [*figures, Figure(f"{title}: of the bytes by the library", [share], "%", least=95.0)]


async def taken(bench: Bench, name: str) -> list[Figure]:
    """Measure "tensors off" from outside as well: until a process that needs the kernel's bytes has them.

    All but 256 MiB of them (`TAKER`), which is 0.005 s at the rate of the bus; it asks for them all the time.
    """
    figures: dict[str, list[float]] = {"tensors off": [], "another process has their memory": []}
    async with bench.kernel(name, PROGRAMS["torch"]) as kernel:
        await kernel.run(f"begin(); fill({EACH << 10})", timeout=DEADLINE)
        taker = subprocess.Popen(
            [sys.executable, "-c", TAKER.format(gib=EACH)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            assert taker.stdin is not None and taker.stdout is not None
            if await asyncio.to_thread(taker.stdout.readline) != "there\n":
                raise RuntimeError("the process that takes the memory ended")
            for _ in range(bench.rounds):
                await asyncio.sleep(1)
                began = time.time()
                taker.stdin.write("take\n")
                taker.stdin.flush()
                figures["tensors off"].append((await out(kernel))["tensors off"])
                has = float(await asyncio.to_thread(taker.stdout.readline))
                figures["another process has their memory"].append(has - began)
                await back(kernel)
        finally:
            taker.kill()
            taker.wait()
    most = EACH * bench.medians["bus out"] + REST
    return [Figure(f"{EACH} GiB, PyTorch: {what}", values, most=most) for what, values in figures.items()]


async def kept(bench: Bench, name: str) -> list[Figure]:
    """A kernel whose memory is copied as a whole, and whose copy stays, as is the default."""
    async with bench.kernel(name, PROGRAMS["torch"], host_copy_bytes=None) as kernel:
        await kernel.run(f"begin(); fill({EACH << 10})", timeout=DEADLINE)
        found = await rounds(bench, name, kernel, forget=True)
        share = 100 * kernel.lifecycle.kernel.fast_path().kept_bytes() / (EACH * GIB)
    title = f"{EACH} GiB, PyTorch, a copy stays"
    figures = [
        Figure(f"{title}: {what}", values, most=bench.medians[f"torch {what}"] + BEYOND)
        for what, values in found.items()
    ]
    return [*figures, Figure(f"{title}: of the bytes in the end", [share], "%", least=100.0)]


async def jax_as_it_comes(bench: Bench, name: str, *, peak: bool) -> list[Figure]:
    """JAX with three quarters of the GPU, of which it uses little; also after it has used more."""
    program = PROGRAMS["jax-preallocated"]
    async with bench.kernel(name, program) as kernel:
        if peak:
            await kernel.run(f"fill({PEAK << 10}); drop()", timeout=DEADLINE)
        await kernel.run(f"fill({USED << 10})", timeout=DEADLINE)
        found = await rounds(bench, name, kernel)
        memory = await fastpath.peak(kernel) / GIB
        await kernel.provisioner.resume()
    title = f"JAX as it comes, {USED} GiB in use" + (f", {PEAK} GiB before" if peak else "")
    free, back, most = (1.5, 1.1, 24.0) if peak else (1.2, 0.8, 4.0)
    return [
        Figure(f"{title}: tensors off", found["tensors off"], most=free),
        Figure(f"{title}: all off", found["all off"]),
        Figure(f"{title}: back", found["back"], most=back),
        Figure(f"{title}: host memory", [memory], "GiB", most=most),
    ]


# -- host memory that has a copy


async def mirrored(bench: Bench, name: str) -> list[Figure]:
    """A kernel that is mirrored, and one that keeps its copy and has changed a tenth of its memory since."""
    async with bench.kernel(name, PROGRAMS["torch"], host_copy_bytes=1 << 50) as kernel:
        await kernel.run(f"begin(); fill({LARGE << 10})", timeout=DEADLINE)
        unchanged = await rounds(bench, name, kernel, mirror=True)
        changed = await rounds(bench, f"{name}, changed", kernel, change=True)
    title, other = f"{LARGE} GiB, mirrored", f"{LARGE} GiB, a tenth changed since the last suspend"
    return [
        Figure(f"{title}: tensors off", unchanged["tensors off"], most=0.30),
        Figure(f"{title}: all off", unchanged["all off"]),
        Figure(f"{title}, then taken: back", unchanged["back"]),
        Figure(f"{other}: tensors off", changed["tensors off"], most=0.35),
        Figure(f"{other}: all off", changed["all off"]),
        Figure(f"{other}: back", changed["back"]),
    ]


async def untouched(bench: Bench, name: str) -> list[Figure]:
    """The first cell that uses the GPU: of a kernel that is mirrored as a whole, and of one that is not."""
    took: dict[bool, list[float]] = {True: [], False: []}
    async with bench.kernel(name, PROGRAMS["torch"], host_copy_bytes=1 << 50, gpu_sharing="turns") as kernel:
        await kernel.run(f"begin(); fill({LARGE << 10}); touch()", timeout=DEADLINE)
        path = kernel.lifecycle.kernel.fast_path()
        for turn in range(2 * bench.rounds):
            is_mirrored = turn % 2 == 0
            if is_mirrored:
                await whole_mirror(kernel)
            await asyncio.sleep(1)
            if path.mirrored() is not is_mirrored:
                raise AssertionError("the kernel is taken for mirrored, or for not mirrored")
            began = time.perf_counter()
            await kernel.run("touch()", timeout=DEADLINE)
            took[is_mirrored].append(time.perf_counter() - began)
            if path.mirrored():
                raise AssertionError("the cell has not used the GPU")
    title = f"{LARGE} GiB: the first cell that uses the GPU"
    return [
        Figure(f"{title}, mirrored, untouched", took[True], most=0.10),
        Figure(f"{title}, not mirrored", took[False]),
    ]


async def exchange(bench: Bench, name: str) -> list[Figure]:
    """Two kernels that change places beside a program that leaves `fastpath.LEFT` GiB."""
    kind, home = fastpath.KINDS[name], bench.root / name
    home.mkdir()
    try:
        found = await fastpath.exchange(home, bench.base, LARGE, kind)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    bench.steps[name] = found["parts"]
    title = f"two kernels of {LARGE} GiB change places, {'mirrored' if kind.mirrors else 'not mirrored'}"
    return [
        Figure(f"{title}: both moves", found["moves"], most=1.6 if kind.mirrors else 2.2),
        Figure(f"{title}: the other kernel's cell", found["whole"]),
    ]


# -- the small rest, and the price


async def context(bench: Bench, name: str) -> list[Figure]:
    """A context and little memory: beside the driver alone, and to the disk and back."""
    checkpoints, wakes = [], []
    async with bench.kernel(name, PROGRAMS["torch"]) as kernel:
        await kernel.run(f"begin(); fill({SMALL}); touch()", timeout=DEADLINE)
        found = await rounds(bench, name, kernel)
        expected = await kernel.run("print(check())", timeout=DEADLINE)
        for _ in range(bench.rounds):
            kernel.steps.events.clear()
            began = time.perf_counter()
            image = await kernel.provisioner.checkpoint()
            checkpoints.append(time.perf_counter() - began)
            wakes.append(await first_output(kernel, "print(touch())"))
            await kernel.settled("running")
            events = kernel.steps.completed()
            bench.steps[f"{name}, to the disk"] = {event.step: event.seconds for event in events} | {
                f"{event.step}/{part}": seconds for event in events for part, seconds in event.parts.items()
            }
        if await kernel.run("print(check())", timeout=DEADLINE) != expected:
            raise AssertionError("the memory differs after a checkpoint")
    alone = {way: bench.medians[f"driver {SMALL} {way}"] + SMALL_REST for way in ("out", "back")}
    title = f"a context and {SMALL} MiB"
    return [
        Figure(f"{title}: suspend", found["all off"], most=alone["out"]),
        Figure(f"{title}: resume", found["back"], most=alone["back"]),
        Figure(f"{title}: checkpoint, {image.manifest.bytes / 1e6:.0f} MB", checkpoints, most=1.0),
        Figure(f"{title}: wake to the first output that needs the GPU", wakes, most=0.8),
    ]


async def price(bench: Bench, name: str, programs: dict[str, tuple[str, str]], environment: dict[str, str]):
    """Time with the library over time without it, of programs in turns: their titles and sources by name.

    Loops that allocate take turns on one processor: of a virtual machine one may take 1.5 times as long as another, or
    as itself some seconds later, with the library and without it.
    """
    times: dict[str, list[float]] = {}
    empty = Program(name, "", (), environment)
    for pair in range(PAIRS):
        async with (
            bench.kernel(f"{name}-{pair}-with", empty) as ours,
            bench.kernel(f"{name}-{pair}-without", empty, fast_path="off") as stock,
        ):
            for work, (_, code) in programs.items():
                if work == "training":  # it computes in several threads
                    turns = 0 if pair else TRAINING_TURNS + 1
                else:
                    turns = TURNS + 1
                    for kernel in (ours, stock):
                        await kernel.run(BIND.format(processor=max(os.sched_getaffinity(0))))
                for turn in range(turns):
                    for who, kernel in (("with", ours), ("without", stock))[:: 1 if turn % 2 else -1]:
                        took = float(await kernel.run(code, timeout=DEADLINE))
                        if turn:  # the first one loads and compiles
                            times.setdefault(f"{work} {who}", []).append(took)
    figures = []
    for work, (title, _) in programs.items():
        pairs = zip(times[f"{work} with"], times[f"{work} without"], strict=True)
        least, most = (0.99, 1.01) if work == "training" else (None, 1.02)
        figures.append(Figure(f"{title}: with / without the library", [a / b for a, b in pairs], "", most, least))
    return figures


async def loops(bench: Bench, name: str, program: str, *, training: bool = False) -> list[Figure]:
    chosen = PROGRAMS[program]
    programs = {"training": TRAINING} if training else {}
    programs |= {"allocations": (f"{chosen.title}, a loop that allocates", chosen.loop)}
    return await price(bench, name, programs, chosen.environment)


# -- the rows, and the plan


@dataclass(frozen=True)
class Row:
    """The program of a row, about how many seconds it takes, and its needs."""

    run: Callable[[Bench, str], Awaitable[list[Figure]]]
    seconds: float
    needs: tuple[str, ...] = ()
    modules: tuple[str, ...] = ("torch",)
    host_gib: int = 8  #: of host memory, at most


def _each(name: str) -> Row:
    needs = ("bus", "driver") if name == "torch" else ("torch",)
    return Row(framework, 30, needs, PROGRAMS[name].modules, 2 * EACH + 8)


def _loops(program: str, seconds: float, **how: Any) -> Row:
    return Row(lambda bench, name: loops(bench, name, program, **how), seconds, modules=PROGRAMS[program].modules)


ROWS = {
    "bus": Row(lambda bench, _: bus(bench), 15),
    "driver": Row(lambda bench, _: driver(bench), 30),
    "driver-large": Row(lambda bench, _: driver_large(bench), 40, modules=("cuda",)),
    **{name: _each(name) for name in PROGRAMS},
    "taken": Row(taken, 30, ("bus",), ("torch", "cuda"), EACH + 8),
    "kept": Row(kept, 30, ("torch",), host_gib=EACH + 8),
    "jax-peak": Row(
        lambda bench, name: jax_as_it_comes(bench, name, peak=True), 40, modules=("jax",), host_gib=PEAK + 8
    ),
    "jax-small": Row(lambda bench, name: jax_as_it_comes(bench, name, peak=False), 30, modules=("jax",)),
    "context": Row(context, 35, ("driver",)),
    "loops-torch": _loops("torch", 100, training=True),
    "loops-expandable": _loops("expandable", 70),
    "loops-async": _loops("async", 70),
    "loops-cupy": _loops("cupy", 45),
    "loops-cupy-async": _loops("cupy-async", 45),
    "loops-rmm": _loops("rmm", 45),
    "mirrored": Row(mirrored, 90, host_gib=LARGE + 8),
    "untouched": Row(untouched, 60, host_gib=LARGE + 8),
    "exchange": Row(exchange, 80, host_gib=2 * LARGE + 8),
    "exchange-mirrored": Row(exchange, 90, host_gib=2 * LARGE + 8),
}
#: Parts that fit into ten minutes each.
GROUPS = {
    "frameworks": (*PROGRAMS, "taken", "kept", "jax-peak", "jax-small", "driver-large"),
    "large": ("mirrored", "untouched", "exchange", "exchange-mirrored"),
    "rest": ("context", *(name for name in ROWS if name.startswith("loops-"))),
}


def plan(names: Sequence[str]) -> list[str]:
    """Return the rows to run, in order: those named, by themselves or by a group, and those that they need."""
    wanted: list[str] = []

    def add(name: str) -> None:
        for needed in ROWS[name].needs:
            add(needed)
        if name not in wanted:
            wanted.append(name)

    for name in names or ROWS:
        for each in GROUPS.get(name, (name,)):
            add(each)
    return wanted


def missing(row: Row) -> str:
    """Return the first module that the row needs and that is not installed, or ""."""
    return next((name for name in row.modules if importlib.util.find_spec(name) is None), "")


def warm(gib: int) -> None:
    """Use so much host memory once."""
    code = f"b = bytearray({(gib << 30) // WARMERS})"
    for process in [subprocess.Popen([sys.executable, "-c", code]) for _ in range(WARMERS)]:
        process.wait()


@dataclass
class Report:
    """Figures and other outcomes by row; written after each."""

    facts: dict[str, Any]
    figures: dict[str, list[Figure]] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)

    def write(self, bench: Bench) -> None:
        if not os.environ.get("OUT"):
            return
        rows = {
            name: [asdict(figure) | {"median": figure.median, "met": figure.met} for figure in figures]
            for name, figures in self.figures.items()
        }
        report = {**self.facts, "rows": rows, "others": self.others, "steps": bench.steps}
        Path(os.environ["OUT"], "device-memory-bench.json").write_text(json.dumps(report, indent=1))

    def table(self) -> str:
        """Return the Markdown table, and what is not in it."""
        lines = ["| | measured, median (lowest to highest) | limit | |", "|---|---|---|---|"]
        lines += [figure.line() for figures in self.figures.values() for figure in figures]
        return "\n".join([*lines, *(f"{name}: {why}" for name, why in self.others.items())])

    def status(self) -> int:
        """1 if a row broke, `MISSED` if a limit was missed, else 0."""
        if any(why.startswith("broke") for why in self.others.values()):
            return 1
        return MISSED if any(each.met is False for figures in self.figures.values() for each in figures) else 0


def run(names: Sequence[str], bench: Bench, report: Report, *, seconds: float) -> None:
    """Run rows one after the other, as the time allows."""
    end = time.monotonic() + seconds
    for name in names:
        row = ROWS[name]
        lacking = [each for each in row.needs if each not in report.figures]
        if module := missing(row):
            report.others[name] = f"left out: {module} is not installed"
        elif (free := available_memory() // GIB) < row.host_gib:
            report.others[name] = f"left out: it needs {row.host_gib} GiB of host memory, and {free} are free"
        elif lacking:
            report.others[name] = f"left out: there is no figure of {', '.join(lacking)}"
        elif time.monotonic() + row.seconds > end:
            report.others[name] = f"not reached: about {row.seconds:g} s, of which fewer were left"
        else:
            began = time.monotonic()
            try:
                report.figures[name] = asyncio.run(row.run(bench, name))
            except Exception as error:
                traceback.print_exc()
                report.others[name] = f"broke: {type(error).__name__}: {error}"
            took = f"({time.monotonic() - began:.0f} s)"
            print(f"== {name} {took} {report.others.get(name, '')}", flush=True)
            for figure in report.figures.get(name, ()):
                print(figure.line(), flush=True)
            for at, steps in bench.steps.items():
                if at.split(",")[0] == name:
                    print(f"   {at}: " + " ".join(f"{step} {each:.3f}" for step, each in steps.items()), flush=True)
            report.write(bench)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is wanted and print it."""
    parser = argparse.ArgumentParser(description="The table of docs/performance.md, or rows of it.")
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"rows or groups ({', '.join(GROUPS)}); default: all")
    parser.add_argument("--rounds", type=int, default=5, help="of each figure, by default %(default)s")
    parser.add_argument("--seconds", type=float, default=math.inf, help="for all rows, by default as long as it takes")
    parser.add_argument("--images", type=Path, help="the directory of images, by default a temporary one")
    parser.add_argument("--plan", action="store_true", help="print the rows and their seconds, and run nothing")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.rows if name not in {*ROWS, *GROUPS}]:
        parser.error(f"no such row: {', '.join(unknown)}; there are {', '.join([*GROUPS, *ROWS])}")
    names = plan(options.rows)
    if options.plan:
        for name in names:
            print(f"{name:18} about {ROWS[name].seconds:3g} s, {ROWS[name].host_gib:3} GiB of host memory")
        print(f"{'together':18} about {sum(ROWS[name].seconds for name in names):g} s")
        return 0
    root, base = Path(tempfile.mkdtemp(prefix="dm-")), Path(tempfile.mkdtemp(prefix="dr-"))
    began = time.monotonic()
    gpu = Gpus().list()[0]
    facts = {"gpu": gpu.name, "driver": gpu.driver, "kernel": platform.release(), "uid": os.geteuid()}
    facts |= {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "rounds": options.rounds}
    bench, report = Bench(root, base, options.rounds, options.images), Report(facts)
    try:
        warm(min(max(ROWS[name].host_gib for name in names), available_memory() // GIB - UNUSED))
        run(names, bench, report, seconds=options.seconds - (time.monotonic() - began))
    finally:
        shutil.rmtree(root, ignore_errors=True)
        shutil.rmtree(base, ignore_errors=True)
    print("\n" + " ".join(f"{name} {value}" for name, value in facts.items()))
    print(report.table(), flush=True)
    return report.status()


if __name__ == "__main__":
    sys.exit(main())
