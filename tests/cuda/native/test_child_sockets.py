"""The sockets of the programs that a kernel starts, and of the processes that these fork; what is left undisturbed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from programs import HERE, compiler, why_no_sanitizer
from subject import MIB, SOCKET_VARIABLE, Control
from suspending import thread_states

from jupyter_gpu_ckpt.cuda import fastpath

#: Answers expressions; ``allocate``: a block of 2 MiB, whose result is returned.
PROGRAM = """
import ctypes, os, subprocess, sys
def allocate():
    runtime = ctypes.CDLL("libcudart.so.13")
    return runtime.cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(2 << 20))
def tell(answer):  # in one piece, whatever else writes there
    os.write(1, f"{answer!r}\\n".encode())
forked = []
def fork(then):
    waits, forks = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(forks)
        os.read(waits, 1)  # until the pid is written
        tell(eval(then))
        os.read(waits, 1)  # until its parent ends
        os._exit(0)
    os.close(waits)
    forked.append(forks)
    return pid
for line in sys.stdin:
    tell(eval(line))
    while forked:
        os.write(forked.pop(), b".")
"""


class Program:
    """`PROGRAM`; ``path``: of the kernel's socket."""

    def __init__(self, path: Path, env: dict[str, str]) -> None:
        self.path = path
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def line(self) -> str:
        return self.process.stdout.readline().rstrip("\n")

    def ask(self, expression: str) -> str:
        print(expression, file=self.process.stdin, flush=True)
        return self.line()

    def sockets(self) -> set[str]:
        return {each.name.removeprefix(self.path.name) for each in self.path.parent.glob(f"{self.path.name}*")}

    def socket_of(self, pid: int) -> Path:
        return self.path.with_name(f"{self.path.name}-{pid}")

    def end(self) -> None:
        self.process.stdin.close()
        assert self.process.wait(60) == 0


@pytest.fixture
def variables(programs, doubles, runtime_base) -> dict[str, str]:
    """The environment of a program that a kernel starts."""
    searched = {**os.environ, "LD_LIBRARY_PATH": str(doubles), "LD_PRELOAD": str(programs.library)}
    return {**searched, fastpath.CHILDREN_VARIABLE: str(runtime_base / "fast")}


@pytest.fixture
def child(variables, runtime_base) -> Iterator[Program]:
    child = Program(runtime_base / "fast", variables)
    yield child
    child.process.kill()
    child.process.wait()


def test_a_program_has_a_socket_from_its_first_call_on_and_removes_it_at_its_end(child):
    assert child.ask("1") == "1"
    assert child.sockets() == set()
    assert os.listdir(f"/proc/{child.process.pid}/task") == [str(child.process.pid)], "it has no thread"
    assert child.ask("allocate()") == "0"
    assert child.sockets() == {f"-{child.process.pid}"}
    with Control(child.socket_of(child.process.pid)) as control:
        answer = control.ask("status")
        assert (answer["version"], answer["bytes"]) == (fastpath._VERSION, 2 * MIB)
        control.must("copy_out", "free", "swap_in")
    child.end()
    assert child.sockets() == set()


@pytest.mark.parametrize("first", [None, "listener", "file"])
def test_the_socket_of_a_killed_process_is_in_nobodys_way(child, first):
    """Pids are used again; the socket of one that lives, in another pid namespace, is left to it."""
    path = child.socket_of(child.process.pid)
    with socket.socket(socket.AF_UNIX) as other:
        if first == "file":
            path.touch()
        else:
            other.bind(str(path))
            if first == "listener":
                other.listen()
        assert child.ask("allocate()") == "0"
        if first is None:
            with Control(path) as control:
                assert control.ask("status")["bytes"] == 2 * MIB
        else:
            assert child.sockets() == {path.name.removeprefix(child.path.name)}
            assert path.is_socket() == (first == "listener")
            assert "gpu-ckpt-fast" not in thread_states(child.process.pid), "the driver serves it"


def test_a_process_that_is_forked_before_the_first_call_has_a_socket_of_its_own(child):
    pid = int(child.ask("fork('allocate()')"))
    assert child.line() == "0"
    assert child.sockets() == {f"-{pid}"}
    assert child.ask("allocate()") == "0"
    assert child.sockets() == {f"-{pid}", f"-{child.process.pid}"}
    for each in (pid, child.process.pid):
        with Control(child.socket_of(each)) as control:
            assert control.ask("status")["bytes"] == 2 * MIB
            control.must("copy_out", "free", "swap_in")


def test_a_process_that_is_forked_from_a_user_of_cuda_has_none(child):
    assert child.ask("allocate()") == "0"
    child.ask("fork('allocate()')")
    assert child.line() != ""
    assert child.sockets() == {f"-{child.process.pid}"}


def test_the_kernels_own_forks_do_not_get_its_name(variables, runtime_base):
    kernel = Program(runtime_base / "fast", {**variables, SOCKET_VARIABLE: str(runtime_base / "fast")})
    pid = int(kernel.ask("fork('allocate()')"))
    assert kernel.line() == "0"
    assert kernel.sockets() == {f"-{pid}"}
    assert kernel.ask("allocate()") == "0"
    assert kernel.sockets() == {f"-{pid}", ""}
    kernel.end()


def test_a_program_started_by_a_program_is_served_too_and_others_of_ld_preload_keep_their_place(
    variables, runtime_base
):
    variables["LD_PRELOAD"] = f"libm.so.6:{variables['LD_PRELOAD']}:libresolv.so.2"
    kernel = Program(runtime_base / "fast", {**variables, SOCKET_VARIABLE: str(runtime_base / "fast")})
    shell = "echo $LD_PRELOAD ${" + SOCKET_VARIABLE + "-none}"
    assert kernel.ask(f"subprocess.check_output(['sh', '-c', {shell!r}], text=True)") == repr(
        f"{variables['LD_PRELOAD']} none\n"
    )
    source = f"{PROGRAM.split('for line')[0]}\nprint(allocate(), os.listdir({str(runtime_base)!r}), os.getpid())"
    said = eval(
        kernel.ask(f"subprocess.check_output(['sh', '-c', 'exec \"$0\" -c \"$1\"', sys.executable, {source!r}])")
    )
    pid = said.decode().split()[-1]
    assert said.decode() == f"0 ['fast-{pid}'] {pid}\n"
    kernel.end()


def test_a_program_with_an_address_sanitizer_runs(variables, tmp_path, monkeypatch, programs):
    """A program with it ends at once where another library comes before the sanitizer's, unless that is asked for."""
    if why := why_no_sanitizer("address", "libasan.so", tmp_path):
        pytest.skip(why)
    monkeypatch.setattr(fastpath, "has_driver", lambda: True)
    monkeypatch.setattr(fastpath, "preload", lambda: fastpath.Preload(programs.library))
    (tmp_path / "program.c").write_text("#include <stdlib.h>\nint main(int n, char **v) { return free(malloc(n)), 0; }")
    subprocess.run([compiler() or "cc", "-fsanitize=address", "-o", tmp_path / "program", tmp_path / "program.c"])
    env = {name: value for name, value in variables.items() if name != "ASAN_OPTIONS"}
    refused = subprocess.run([tmp_path / "program"], env=env, capture_output=True, text=True)
    assert refused.returncode != 0 and "does not come first" in refused.stderr
    given = env | fastpath.environment(tmp_path, env)
    assert subprocess.run([tmp_path / "program"], env=given).returncode == 0


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_memory_of_a_child_is_mapped_by_the_kernel_and_by_other_children(variables, runtime_base, method):
    env = {**variables, SOCKET_VARIABLE: str(runtime_base / "fast")}
    command = [sys.executable, str(HERE / "shared_memory.py"), method, str(runtime_base / "fast"), "both"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "worker [0, 0, 0, True, True, 0, 1, True]" in done.stdout.splitlines()
    assert done.stdout.splitlines()[-2:] == ["of a worker, in the kernel 0 True", "of a worker, in another 0 True"]
