"""On a real driver: each way to the driver is served, and results and errors are those without the library."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import notebook

from jupyter_gpu_ckpt.cuda import fastpath

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

HERE = Path(__file__).parent
CONFORMANCE = HERE.parent / "cuda" / "native" / "conformance.py"
#: (program, ways): of `conformance.py`; each way finds the same functions, so one of them runs everything.
ALL = (
    "sizes",
    "frees",
    "pitches",
    "frees in order",
    "captures",
    "without a context",
    "contexts that end",
    "children",
    "unknown names",
)
WAYS = {
    "dlsym": ALL,
    "cuGetProcAddress": ("sizes", "frees"),
    "cuGetProcAddress_v2": ("sizes", "frees in order", "captures"),
    "cuGetProcAddress of itself": ("sizes", "frees"),
}


def run(directory: Path, with_library: bool, *command: object) -> subprocess.CompletedProcess[str]:
    """Run a Python program; its first use of large memory makes the library listen at ``directory / "fast"``."""
    # Warnings name the process: of a fork in a program with threads, in Python 3.12.
    variables = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONWARNINGS": "ignore"}
    if with_library:
        library = fastpath.preload()
        assert library.path is not None, library.why
        variables |= {"LD_PRELOAD": str(library.path), fastpath.VARIABLE: str(directory / "fast")}
    return subprocess.run(
        [sys.executable, *map(str, command)], env=variables, capture_output=True, text=True, timeout=280
    )


@pytest.mark.parametrize(
    "program",
    # Other tests' memory changes what is free on the GPU.
    [pytest.param(each, marks=pytest.mark.alone) if each == "contexts that end" else each for each in ALL],
)
def test_results_and_errors_are_the_same_with_and_without_the_library(runtime_base, program):
    for way in (way for way, chosen in WAYS.items() if program in chosen):
        plain, served = (run(runtime_base, each, CONFORMANCE, way, program) for each in (False, True))
        assert plain.returncode == 0, plain.stderr
        assert (served.returncode, served.stderr) == (0, plain.stderr), way
        assert served.stdout.splitlines() == plain.stdout.splitlines(), way
        assert (runtime_base / "fast").exists(), f"{way}: the library served nothing"
        (runtime_base / "fast").unlink()


@pytest.mark.parametrize("framework", ["torch", "cupy", "numba", "triton", "jax"])
def test_each_way_is_served_and_has_the_same_results(runtime_base, framework, record):
    needed = "numba.cuda" if framework == "numba" else framework
    if importlib.util.find_spec(needed.partition(".")[0]) is None or importlib.util.find_spec(needed) is None:
        pytest.skip(f"{framework} is not installed on this machine")
    plain, served = (
        run(runtime_base, each, HERE / "framework_ways.py", framework, runtime_base / "fast") for each in (False, True)
    )
    assert plain.returncode == 0, plain.stderr
    assert served.returncode == 0, served.stderr
    ours, theirs = json.loads(served.stdout), json.loads(plain.stdout)
    record(served=ours["served"])
    assert ours["digests"] == theirs["digests"]
    assert theirs["served"] == 0
    if framework != "jax":  # it maps its memory itself (cuMemCreate)
        assert 1 << 24 <= ours["served"] < 1 << 30


def test_tensors_go_through_queues_of_torch_multiprocessing(runtime_base):
    """Served memory is mapped by a worker, and a worker's by the program (CUDA IPC)."""
    plain, served = (run(runtime_base, each, HERE / "torch_queue.py") for each in (False, True))
    assert plain.returncode == 0, plain.stderr
    assert served.returncode == 0, served.stderr
    assert served.stdout == plain.stdout
    assert (runtime_base / "fast").exists(), "the library served nothing"


@pytest.mark.parametrize("framework", ["cupy", "numba"])
async def test_what_is_not_pytorch_is_swapped_out_too(tmp_path, runtime_base, framework, record):
    needed = "numba.cuda" if framework == "numba" else framework
    pytest.importorskip(needed, reason=f"{framework} is not installed on this machine")
    async with notebook(tmp_path, runtime_base, fast_path="auto") as kernel:
        await kernel.run(
            f"import sys, hashlib; sys.path.insert(0, {str(HERE)!r}); import framework_ways\n"
            f"kept, results = framework_ways.FRAMEWORKS[{framework!r}]()\n"
            "def digest(): return hashlib.sha256(b''.join(\n"
            "    (x.copy_to_host() if hasattr(x, 'copy_to_host') else x.get()).tobytes() for x in kept)).hexdigest()\n"
            "before = digest()",
            120,
        )
        path = fastpath.FastPath(kernel.lifecycle.capsule, kernel.lifecycle.engine.cuda)
        assert path.amounts().bytes >= 1 << 24
        await kernel.provisioner.suspend()
        record(swapped_out=path.amounts().swapped_out)
        assert path.amounts().swapped_out >= 1 << 24
        assert await kernel.run("print(digest() == before)", 60) == "True"
        await kernel.settled("running")
        await kernel.provisioner.checkpoint()
        assert await kernel.run("print(digest() == before)", 120) == "True"


@pytest.mark.parametrize("fast_path", ["auto", "off"])
async def test_registered_host_memory_can_be_copied_from_afterwards(tmp_path, runtime_base, fast_path, record):
    """Records what of a registration (cudaHostRegister) is left after each tier."""
    async with notebook(tmp_path, runtime_base, fast_path=fast_path) as kernel:
        await kernel.run(
            "import torch\n"
            "cudart, keep = torch.cuda.cudart(), torch.ones(1 << 22, device='cuda')\n"
            "def register():\n"
            "    host = torch.arange(1 << 20)\n"
            "    return host, int(cudart.cudaHostRegister(host.data_ptr(), host.numel() * 8, 0))\n"
            "def left(host):\n"
            "    there = host.to('cuda', non_blocking=True); torch.cuda.synchronize()\n"
            "    same = bool((there.cpu() == torch.arange(1 << 20)).all())\n"
            "    return same, host.is_pinned(), int(cudart.cudaHostUnregister(host.data_ptr()))\n",
            120,
        )
        for verb in ("suspend", "checkpoint"):
            assert await kernel.run("host, result = register(); print(result)") == "0"
            await getattr(kernel.provisioner, verb)()
            said = await kernel.run("print(*left(host))", 120)
            record(**{f"after {verb}: same, pinned, unregistered": said})
            assert said.split()[0] == "True"
            await kernel.settled("running")
