"""Programs find the library's functions in whichever way they look them up; results and errors stay the driver's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from conformance import PROGRAMS, WAYS
from programs import DOUBLE, HERE, NATIVE, Programs, build, cc
from subject import MIB, SOCKET_VARIABLE, Control, running


def run(
    doubles: Path, directory: Path, preload: Sequence[object], *command: object
) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "LD_LIBRARY_PATH": str(doubles), SOCKET_VARIABLE: str(directory / "fast")}
    if preload:
        variables["LD_PRELOAD"] = ":".join(map(str, preload))
    return subprocess.run(list(map(str, command)), env=variables, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("way", WAYS)
def test_results_and_errors_are_the_same_with_and_without_the_library(programs, doubles, runtime_base, way):
    command = [sys.executable, HERE / "conformance.py", way, *PROGRAMS]
    plain = run(doubles, runtime_base, [], *command)
    assert (plain.returncode, plain.stderr, (runtime_base / "fast").exists()) == (0, "", False)
    served = run(doubles, runtime_base, [programs.library], *command)
    assert (runtime_base / "fast").exists(), "the library served nothing"
    assert (served.returncode, served.stderr) == (0, "")
    assert served.stdout.splitlines() == plain.stdout.splitlines()


#: Prints how many bytes the library serves, after an allocation by each way to the driver.
EACH_WAY = """
import ctypes, json, socket, sys
sys.path.insert(0, sys.argv[1])
from conformance import Program, WAYS
def status():
    with socket.socket(socket.AF_UNIX) as control:
        control.connect(sys.argv[2])
        control.sendall(b"status\\n")
        return json.loads(control.recv(4096))["bytes"]
served, kept = [], []
for way in WAYS:
    kept.append(Program(way))
    assert kept[-1].alloc("it", 4 << 20) == 0
    served.append(status())
runtime, address, pitch = ctypes.CDLL("libcudart.so.13"), ctypes.c_void_p(), ctypes.c_size_t()
assert runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(4 << 20)) == 0
served.append(status())
rows = (ctypes.byref(address), ctypes.byref(pitch), ctypes.c_size_t(4096), ctypes.c_size_t(1024), 4)
assert kept[0].cu["cuMemAllocPitch"](*rows) == 0
served.append(status())
before = ctypes.CDLL(None).neighbour_calls() if hasattr(ctypes.CDLL(None), "neighbour_calls") else 0
import os
print(json.dumps([served, os.getppid() == int(sys.argv[3]), before]))
"""


def each_way(doubles: Path, directory: Path, preload: Sequence[object]) -> tuple[list[int], bool, int]:
    done = run(doubles, directory, preload, sys.executable, "-c", EACH_WAY, HERE, directory / "fast", os.getpid())
    assert (done.returncode, done.stderr) == (0, "")
    served, same_parent, calls = json.loads(done.stdout)
    return served, same_parent, calls


SERVED = [count * 4 * MIB for count in range(1, len(WAYS) + 3)]


def test_an_allocation_is_served_whichever_way_the_driver_is_found(programs, doubles, runtime_base):
    assert each_way(doubles, runtime_base, [programs.library]) == (SERVED, True, 0)


#: Frees memory during a capture; prints how many allocations are mapped, then and after its end, seen or not.
CAPTURE = """
import ctypes, sys
sys.path.insert(0, sys.argv[1])
from conformance import GLOBAL, MIB, RELAXED, Pointer, Program
program, library = Program("dlsym"), ctypes.CDLL("libcuda.so.1")
def mapped():
    counts = (ctypes.c_size_t * 8)()
    library.double_outstanding(counts)
    return counts[3]
for seen in (True, False):
    program.alloc("it", 8 * MIB)
    stream, graph, mode = program.stream(), ctypes.c_void_p(), ctypes.c_int(RELAXED)
    program.cu["cuStreamBeginCapture"](stream, GLOBAL)
    program.cu["cuThreadExchangeStreamCaptureMode"](ctypes.byref(mode))
    program.say(program.free("it"), mapped())
    program.cu["cuThreadExchangeStreamCaptureMode"](ctypes.byref(mode))
    if seen:
        program.say(program.cu["cuStreamEndCapture"](stream, ctypes.byref(graph)), mapped())
    else:
        library.double_end_capture(stream)
        program.say(program.alloc("next", 8 * MIB), mapped())
        program.say(program.free("next"), mapped())
"""


def test_memory_freed_during_a_capture_is_given_back_when_that_has_ended(programs, doubles, runtime_base):
    """Also if the library does not see the end."""
    done = run(doubles, runtime_base, [programs.library], sys.executable, "-c", CAPTURE, HERE)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["0 1", "0 0", "0 1", "0 1", "0 0"]


@pytest.fixture(scope="session")
def neighbours(tmp_path_factory, doubles) -> Path:
    """Other libraries that are preloaded, and a program without shared libraries."""
    directory = tmp_path_factory.mktemp("neighbours")
    cc(*DOUBLE, "-o", directory / "next.so", "neighbour.c", "-ldl")
    cc(*DOUBLE, "-DOTHER_DLSYM", "-o", directory / "dlsym.so", "neighbour.c", "-ldl")
    return directory


@pytest.mark.parametrize("first", [True, False], ids=["before the other", "after the other"])
def test_other_preloaded_libraries_find_the_next_definition(programs, doubles, neighbours, runtime_base, first):
    """Also of functions whose names begin as the driver's do, and while memory is being allocated."""
    both = [programs.library, neighbours / "next.so"]
    served, same_parent, calls = each_way(doubles, runtime_base, both if first else both[::-1])
    assert (served, same_parent) == (SERVED, True)
    assert calls >= 2


def test_another_library_that_stands_in_for_dlsym_is_still_asked(programs, doubles, neighbours, runtime_base):
    served, same_parent, calls = each_way(doubles, runtime_base, [programs.library, neighbours / "dlsym.so"])
    assert (served, same_parent) == (SERVED, True)
    assert calls > 10, "each lookup passes it"


def test_before_the_library_it_takes_the_lookups_and_all_is_the_driver_s(programs, doubles, neighbours, runtime_base):
    command = [sys.executable, HERE / "conformance.py", "dlsym", "sizes", "frees"]
    plain = run(doubles, runtime_base, [], *command)
    preloaded = run(doubles, runtime_base, [neighbours / "dlsym.so", programs.library], *command)
    assert (preloaded.stdout, preloaded.stderr) == (plain.stdout, "")


def test_beside_jemalloc(programs, doubles, runtime_base):
    found = sorted(Path("/usr/lib").glob("*/libjemalloc.so*"))
    if not found:
        pytest.skip("jemalloc is not installed here")
    for both in ([programs.library, found[0]], [found[0], programs.library]):
        assert each_way(doubles, runtime_base, both)[0] == SERVED
        (runtime_base / "fast").unlink()


def test_programs_without_shared_libraries_and_of_other_users_are_as_ever(programs, doubles, tmp_path, runtime_base):
    source, static = tmp_path / "static.c", tmp_path / "static"
    source.write_text('#include <stdio.h>\nint main(void) { return puts("as ever") < 0; }\n')
    cc("-static", "-o", static, source)
    commands = [static]
    if os.geteuid() == 0:
        set_user_id = tmp_path / "echo"
        shutil.copy("/bin/echo", set_user_id)
        os.chown(set_user_id, 65534, 65534)
        set_user_id.chmod(0o4755)
        commands.append(set_user_id)
    for command in commands:
        plain, preloaded = (run(doubles, runtime_base, each, command, "as ever") for each in ([], [programs.library]))
        assert (preloaded.returncode, preloaded.stdout, preloaded.stderr) == (0, plain.stdout, "")


def test_without_the_jump_names_that_are_linked_are_served(doubles):
    """On another machine than x86-64: as `lookup.h` says."""
    built = build(doubles, define=("GPU_CKPT_WITHOUT_DLSYM",))
    with running(built, doubles, direct=True) as subject:
        subject.alloc(1, 4 * MIB, "cuda", "full")
        with Control(subject.path) as control:
            assert control.ask("status")["bytes"] == 4 * MIB
            control.must("copy_out", "free", "swap_in")
        subject.intact(1)
        subject.free(0)
        assert subject.outstanding()["used"] == 0


def test_the_functions_that_programs_get_are_exported_by_name(programs: Programs):
    """No other name of the library's can be taken for one of the program's."""
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", programs.library], capture_output=True, text=True, check=True
    ).stdout
    names = {line.split()[2] for line in listed.splitlines()}
    declared, gated = (NATIVE / "driver.h").read_text(), (NATIVE / "launch_gate_names.h").read_text()
    ours = {"dlsym", "execv", "gpu_ckpt_knows_rwlocks", "mmap", "mmap64"}
    assert all(f"F({name}, " in declared or f"F({name})" in gated for name in names - ours) and ours <= names
