"""On a real driver: a program that works without the library works with it, bit for bit.

The names of these tests have ``no_harm`` in them: ``GPU_CHECK_SELECT=no_harm make gpu-check`` runs them alone.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import no_harm_device  # makes the programs of `cuda/native` importable
import no_harm_frameworks
import pytest
from no_harm import PROGRAMS
from programs import HERE as NATIVE_TESTS
from programs import cc, compiler

from jupyter_gpu_ckpt.cuda import fastpath

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

HERE = Path(__file__).parent
#: What a kernel's error does is asked by a program with a kernel (`no_harm_device.after_an_illegal_access`).
ON_THE_DOUBLE = ("a context that has failed",)
#: They use no memory.
NOT_SERVED = ("attributes of no memory", "names by address", "names by library")
#: What is free on the GPU is measured, or used up.
ALONE = ("out of memory", "out of memory while something is freed later", "free memory", "frees in any order")
#: Of `no_harm.c`: what the driver itself does not survive (its files are closed, or used by a child without fork's
#: handlers), what other programs run, and what waits for another program.
NOT_HERE = {"descriptors_that_are_closed", "raw_clone", "few_descriptors", "show", "start", "stays"}
IN_C = [
    each
    for each in re.findall(
        r"PROGRAM\((\w+)\)", (NATIVE_TESTS / "no_harm.c").read_text().partition("#define PROGRAM(name)")[2]
    )
    if each not in NOT_HERE
]


def run(directory: Path, with_library: bool, *command: object) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONWARNINGS": "ignore"}
    if with_library:
        library = fastpath.preload()
        assert library.path is not None, library.why
        variables |= {"LD_PRELOAD": str(library.path), fastpath.VARIABLE: str(directory / "fast")}
    return subprocess.run(list(map(str, command)), env=variables, capture_output=True, text=True, timeout=140, input="")


def parts(output: str) -> dict[str, list[str]]:
    found = re.split(r"^-- (.*)\n", output, flags=re.MULTILINE)
    return dict(zip(found[1::2], map(str.splitlines, found[2::2]), strict=True))


def compare(directory: Path, record, *command: object, served: bool = True) -> None:
    """Run a command with the library and without it; all that differs is in the failure, and recorded."""
    plain, preloaded = (run(directory, each, *command) for each in (False, True))
    assert plain.returncode == 0, plain.stdout[-2000:] + plain.stderr[-2000:]
    theirs, ours = parts(f"-- all\n{plain.stdout}"), parts(f"-- all\n{preloaded.stdout}")
    different = {
        name: [pair for pair in zip(lines, ours.get(name, []), strict=False) if pair[0] != pair[1]][:20]
        or (len(lines), len(ours.get(name, [])))
        for name, lines in theirs.items()
        if ours.get(name) != lines
    }
    record(programs=len(theirs) - 1, different=different)
    assert not different
    assert (preloaded.returncode, preloaded.stderr) == (0, plain.stderr)
    assert (directory / "fast").exists() or not served, "the library served nothing"


@pytest.mark.parametrize("program", [each for each in PROGRAMS if each not in (*ALONE, *ON_THE_DOUBLE)])
def test_no_harm_to_calls_of_the_driver(runtime_base, record, program):
    command = (sys.executable, NATIVE_TESTS / "no_harm.py", "dlsym", program)
    compare(runtime_base, record, *command, served=program not in NOT_SERVED)


def test_no_harm_to_calls_found_by_address(runtime_base, record):
    programs = ("each attribute", "wrong frees", "double frees", "streams of each kind", "names by address")
    command = (NATIVE_TESTS / "no_harm.py", "cuGetProcAddress of itself")
    compare(runtime_base, record, sys.executable, *command, *programs)


@pytest.mark.alone
@pytest.mark.parametrize("program", ALONE)
def test_no_harm_to_programs_that_use_up_the_memory(runtime_base, record, program):
    compare(runtime_base, record, sys.executable, NATIVE_TESTS / "no_harm.py", "dlsym", program)


@pytest.mark.parametrize("program", no_harm_device.PROGRAMS)
def test_no_harm_to_what_only_a_gpu_can_do(runtime_base, record, program):
    served = program not in ("memory of the host", "tables and attributes")
    compare(runtime_base, record, sys.executable, HERE / "no_harm_device.py", program, served=served)


@pytest.fixture(scope="session")
def in_c(tmp_path_factory) -> Path:
    if compiler() is None:
        pytest.skip("there is no C compiler on this machine")
    made = tmp_path_factory.mktemp("no-harm") / "no_harm"
    cc("-std=gnu11", "-O1", "-o", made, NATIVE_TESTS / "no_harm.c", "-ldl", "-lpthread")
    return made


@pytest.mark.parametrize("program", IN_C)
def test_no_harm_to_processes_libraries_and_threads(runtime_base, record, in_c, program):
    if program == "in_a_namespace" and run(runtime_base, False, in_c, program).returncode != 0:
        pytest.skip("this driver does not work in a namespace of its own")
    compare(runtime_base, record, in_c, program, served=False)


# -- NVIDIA's tools


def tool(name: str) -> str:
    """Return the path of a tool of NVIDIA's that is installed, or skip the test."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        # The program itself, not the script in the wheel's ``bin``.
        for file in importlib.metadata.distribution("nvidia-cuda-sanitizer-api").files or ():
            if file.name == name and file.parent.name == name:
                return str(file.locate())
    # CUDA's programs need not be on the path, and Nsight Compute brings the nsys of its own.
    beside = [*Path("/usr/local").glob("cuda*/bin"), *Path("/opt/nvidia").glob("nsight-*/*/host/target-linux-x64")]
    if (found := shutil.which(name, path=os.pathsep.join([os.environ["PATH"], *map(str, beside)]))) is None:
        pytest.skip(f"{name} is not on this machine")
    return found


def watched(directory: Path, with_library: bool, tool: list[str], program: str) -> tuple[list[str], str]:
    """Run a program of `no_harm_device` under a tool; return its lines and what the tool prints."""
    lines = directory / "lines"
    # To a file, so that the tool's own words are apart.
    command = ["sh", "-c", f"exec \"$@\" >'{lines}'", "sh", sys.executable, str(HERE / "no_harm_device.py"), program]
    done = run(directory, with_library, *tool, *command)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return lines.read_text().splitlines(), done.stdout


WATCHED = ("copies", "launches", "graphs", "memory of pools", "arrays and textures")


@pytest.mark.parametrize("program", WATCHED)
def test_no_harm_under_compute_sanitizer(runtime_base, record, program):
    """`GPU_BUNDLE_EXTRA=nvidia-cuda-sanitizer-api scripts/gpu-bundle` makes a bundle with it."""
    memcheck = [tool("compute-sanitizer"), "--tool", "memcheck", "--report-api-errors", "no"]
    (plain, says), (lines, says_too) = (watched(runtime_base, each, memcheck, program) for each in (False, True))
    record(tool=says.splitlines()[-1:], with_library=says_too.splitlines()[-1:])
    assert lines == plain
    assert "ERROR SUMMARY: 0 errors" in says
    assert "ERROR SUMMARY: 0 errors" in says_too
    assert not (runtime_base / "fast").exists(), "what it watches is left to the driver"


def test_compute_sanitizer_finds_the_same_mistakes_with_no_harm(runtime_base, record):
    memcheck = [tool("compute-sanitizer"), "--tool", "memcheck", "--report-api-errors", "no"]
    found = []
    for with_library in (False, True):
        _, says = watched(runtime_base, with_library, memcheck, "beyond an allocation")
        found.append(re.findall(r"Invalid __global__ \w+ of size \d+ bytes|ERROR SUMMARY: .*", says))
    record(found=found)
    assert any(each.startswith("Invalid __global__") for each in found[0]), found
    assert found[0] == found[1]


@pytest.mark.parametrize("program", WATCHED)
def test_no_harm_under_nsys(runtime_base, record, program):
    """Nsight Systems is in no registry: this needs a machine where it is installed."""
    report = runtime_base / "report"
    nsys = [tool("nsys"), "profile", "--trace=cuda", "--sample=none", "--force-overwrite=true", "--output", str(report)]
    (plain, _), (lines, _) = (watched(runtime_base, each, nsys, program) for each in (False, True))
    reports = {path.suffix: path.stat().st_size for path in runtime_base.glob("report*")}
    record(reports=reports)
    assert lines == plain
    assert reports.keys() & {".nsys-rep", ".qdstrm"}  # Nsight Compute's has no importer, and leaves the second


@pytest.mark.parametrize("name", no_harm_frameworks.PROGRAMS)
def test_no_harm_to_frameworks(runtime_base, record, name):
    if lacking := no_harm_frameworks.missing(name):
        pytest.skip(f"not installed on this machine: {', '.join(lacking)}")
    compare(runtime_base, record, sys.executable, HERE / "no_harm_frameworks.py", name, served=name != "jax")
