"""Save points: ``python scripts/bench/save_points.py [--gib N [--mirrored] | --template] [--rounds N] [--images DIR]``.

Of a kernel without device memory, or of one with so many GiB of PyTorch's tensors on a GPU, mirrored before each save.

The pause of a save: the seconds for which a cell that is sent at its begin waits, and those for which the kernel's
threads stand still.  Going back: from the request, through the save of the present state, to the first output of a
cell that is sent at once, which uses the device memory.  A branch: from the start of another kernel from the save
point, as a template does it, to its first output; its kernel lives beside it.

``--template``: only a kernel that starts from a template with PyTorch, a context and 64 MiB on a GPU, until its first
output that needs the GPU; without a GPU, with PyTorch and 64 MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from harness import branch_of, notebook, until
from jupyter_client.provisioning import KernelProvisionerFactory
from kernel import first_output
from limits import MISSED
from recorder import Recorder

from jupyter_gpu_ckpt.gate.gate import GateState
from jupyter_gpu_ckpt.kernel import templates

ROUNDS = 12
#: Limits in seconds, of the medians.
PAUSE, BACK = 0.3, 0.4
#: The same of a kernel with 16 GiB on a GPU: its pause by whether it is mirrored, and going back where images are in
#: memory.
GIB, DEVICE_PAUSE, DEVICE_BACK = 16, {True: 1.0, False: 1.6}, 1.5
#: The same of a kernel that starts from a template with PyTorch and a context.
TEMPLATE = 1.0
#: A thread that notes for how long it has not run.
WATCH = """
import threading, time
longest = 0.0
def watch():
    global longest
    before = time.monotonic()
    while True:
        time.sleep(0.001)
        now = time.monotonic()
        longest, before = max(longest, now - before), now
threading.Thread(target=watch, daemon=True).start()
"""
#: Tensors of 1 GiB, no two bytes of which compress well, and a cell that needs all of them.
DEVICE = "import torch; x = [torch.randn(1 << 28, device='cuda') for _ in range({gib})]; torch.cuda.synchronize()"
CONTEXT = """
import torch
x = [torch.arange(1 << 23, device="cuda" if torch.cuda.is_available() else "cpu")]
x[0].sum().item()
"""
USED = "print(sum(each[::4096].sum().item() for each in x))"
#: The steps of a save between which and which the kernel is not served.
_FIRST, _LAST = "drain", "release"


def note(recorder: Recorder, verb: str, steps: dict[str, list[float]]) -> None:
    """Add the seconds of each step of the verb that has ended, and of the steps' parts."""
    for event in recorder.completed():
        for name, seconds in [
            (event.step, event.seconds),
            *((f"{event.step}/{each}", of) for each, of in event.parts.items()),
        ]:
            steps.setdefault(f"{verb}: {name}", []).append(seconds)
    recorder.events.clear()


@contextlib.contextmanager
def watched_from_its_start() -> Iterator[Recorder]:
    """Yield what records the steps of kernels that are started in the body, before there is a kernel."""
    recorder, create = Recorder(), KernelProvisionerFactory.create_provisioner_instance

    def watched(factory, *args, **named):
        provisioner = create(factory, *args, **named)
        provisioner.sinks.append(recorder)
        return provisioner

    with mock.patch.object(KernelProvisionerFactory, "create_provisioner_instance", watched):
        yield recorder


async def mirror(kernel) -> None:
    path = kernel.lifecycle.kernel.fast_path()
    await kernel.provisioner.mirror()
    await until(lambda: not path.amounts().mirrors)


async def branched(kernel, point, directory: Path, cell: str, figures, steps) -> None:
    """Start another kernel from a save point, as a template does, and run a cell in it."""
    began = time.perf_counter()
    with watched_from_its_start() as recorder:
        how = {"accept_differences": True, "is_template": True}
        async with branch_of(point.id, kernel, directory, **how) as branch:
            await branch.run(cell)
            figures["branch"].append(time.perf_counter() - began)
            note(recorder, "branch", steps)


async def rounds(root: Path, options: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    figures: dict[str, list[float]] = {name: [] for name in ("pause", "stop", "save", "back", "branch", "image MB")}
    steps: dict[str, list[float]] = {}
    traits = {"image_dir": str(options.images)} if options.images else {}
    traits |= {"host_copy_bytes": 1 << 50} if options.mirrored else {}
    cell = USED if options.gib or options.template else "print(longest)"
    async with notebook(root, root / "run", **traits) as kernel:
        if options.gib or options.template:
            await kernel.run(CONTEXT if options.template else DEVICE.format(gib=options.gib), timeout=120)
        await kernel.run(WATCH)
        for number in range(options.rounds):
            expected = await kernel.run(cell) if cell == USED else ""
            await kernel.run("longest = 0.0")
            if options.mirrored:
                await mirror(kernel)
            kernel.steps.events.clear()
            began = time.perf_counter()
            point = await kernel.provisioner.save(f"point {number}")
            figures["save"].append(time.perf_counter() - began)
            at = {(event.step, event.kind): event.at for event in kernel.steps.events}
            figures["pause"].append(at[_LAST, "completed"] - at[_FIRST, "started"])
            figures["stop"].append(float(await kernel.run("print(longest)")))
            figures["image MB"].append(point.manifest.bytes / 1e6)
            note(kernel.steps, "save", steps)
            if options.template:
                store = kernel.lifecycle.engine.store
                kernelspecs = mock.patch.dict(os.environ, JUPYTER_DATA_DIR=str(root / "data"))
                with kernelspecs:
                    template = templates.create(store, point, f"bench-{number}", accept_differences=True)
                await branched(kernel, store.get(template.image), root / f"branch{number}", cell, figures, steps)
                with kernelspecs:
                    templates.remove(store, template.name)
                store.remove(point)
                continue
            began = time.perf_counter()
            went = asyncio.ensure_future(kernel.provisioner.back(f"point {number}"))
            while kernel.provisioner.gate.state is GateState.OPEN:  # a cell that is sent now would run before
                await asyncio.sleep(0.001)
            waited = time.perf_counter() - began
            figures["back"].append(waited + await first_output(kernel, cell))
            before = await went
            note(kernel.steps, "back", steps)
            if options.gib:
                assert await kernel.run(USED) == expected, "it went back to other device memory"
            await branched(kernel, point, root / f"branch{number}", cell, figures, steps)
            for image in (point, before):
                kernel.lifecycle.engine.store.remove(image)
    return figures, steps


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=int, default=0, help="of device memory")
    parser.add_argument("--mirrored", action="store_true", help="host memory has a copy of it before each save")
    parser.add_argument("--template", action="store_true", help="only a branch, of a kernel with PyTorch and a context")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--images", type=Path, help="the image directory")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="gpu-ckpt-bench-"))
    try:
        figures, steps = asyncio.run(rounds(root, options))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    middle = {name: statistics.median(values) for name, values in figures.items() if values}
    print(f"A kernel of {middle['image MB']:.0f} MB, median (largest) of {options.rounds}:")
    for name in filter(figures.get, ("pause", "stop", "save", "back", "branch")):
        print(f"  {name:6} {middle[name]:.3f} s ({max(figures[name]):.3f} s)")
    for step, each in steps.items():
        print(f"  {step:40} {statistics.median(each):.3f} s")
    if options.template:
        print(f"A kernel of a template was wanted within {TEMPLATE} s")
        return MISSED if middle["branch"] > TEMPLATE else 0
    if options.gib not in (0, GIB):
        return 0
    pause, back = (DEVICE_PAUSE[options.mirrored], DEVICE_BACK) if options.gib else (PAUSE, BACK)
    missed = middle["pause"] > pause or middle["back"] > back
    if missed:
        print(f"MISSED: a pause of {pause} s and {back} s until the first output after going back were wanted")
    return MISSED if missed else 0


if __name__ == "__main__":
    sys.exit(main())
