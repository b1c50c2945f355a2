"""CUDA IPC of served memory: worker processes of multiprocessing map it, and it is left to the driver from then on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from programs import HERE
from subject import MIB, SOCKET_VARIABLE


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_map_the_memory_that_they_are_sent(programs, doubles, runtime_base, method):
    variables = {
        **os.environ,
        "LD_LIBRARY_PATH": str(doubles),
        "LD_PRELOAD": str(programs.library),
        SOCKET_VARIABLE: str(runtime_base / "fast"),
    }
    command = [sys.executable, str(HERE / "shared_memory.py"), method, str(runtime_base / "fast")]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "handle 0",
        "opened by its own process 201",
        # Opened twice at one address, closed once and then for good; what the worker starts has nothing of it.
        "worker [0, 0, 0, True, True, 0, 1, False]",
        "written by the worker True",
        f"allocations {8 * MIB}",
        "exports that are refused [1, 1]",
        "freed 0 0",
        "handles 20",
    ]


def test_shared_memory_is_not_swapped(subject):
    subject.alloc(3, 2 * MIB, density="full")
    assert subject.ask("share", 1) == "0"
    with subject.control() as control:
        for _ in range(2):
            control.must("copy_out")
            assert control.ask("free")["swapped_out"] == 4 * MIB
            assert control.ask("status")["shared"] == 1
            assert subject.outstanding()["mappings"] == 1
            control.must("swap_in")
            subject.intact(3)
    subject.free(1)
    assert subject.outstanding()["mappings"] == 2
    with subject.control() as control:
        assert control.ask("status")["shared"] == 0


#: Starts a program as multiprocessing does, with ``sys.argv[1]`` variables of one name, as only C can have them.
SEVERAL = """
import ctypes, sys
c = ctypes.CDLL(None)
values = [b"LD_PRELOAD=" + b"x" * 4000 for _ in range(int(sys.argv[1]))] + [None]
ctypes.c_void_p.in_dll(c, "environ").value = ctypes.addressof(variables := (ctypes.c_char_p * len(values))(*values))
c.execv(b"/bin/echo", (ctypes.c_char_p * 4)(b"echo", b"--multiprocessing-fork", b"begun", None))
"""


@pytest.mark.parametrize("count", [1, 2, 9])
def test_a_worker_begins_however_long_its_other_preloaded_libraries_are(programs, doubles, runtime_base, count):
    variables = {
        **os.environ,
        "LD_LIBRARY_PATH": str(doubles),
        "LD_PRELOAD": str(programs.library),
        SOCKET_VARIABLE: str(runtime_base / "fast"),
    }
    command = [sys.executable, "-c", SEVERAL, str(count)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "--multiprocessing-fork begun\n")
