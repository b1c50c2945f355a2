"""The launch gate: every way to a function passes it, with its arguments; closed, calls wait, or are interrupted."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from programs import DOUBLE, HERE, NATIVE, cc
from programs import build as build_library
from subject import MIB, PATIENCE, SOCKET_VARIABLE, Control, running
from waiting import until

from jupyter_gpu_ckpt.process.ptrace import Tracee

NAMES = re.findall(r"F\((\w+)\)", (NATIVE / "launch_gate_names.h").read_text())
NOT_READY, OPERATING_SYSTEM, NOT_FOUND = 600, 304, 500
LACKING = "cuLaunchKernelEx"


def build(directory: Path, *lacking: str) -> Path:
    """The double of the driver, and a library that is linked to it."""
    linked = ["-L", directory, "-l:libcuda.so.1", "-Wl,--unresolved-symbols=ignore-all"]
    options = [f"-D{name}={name}_of_a_newer_driver" for name in lacking]
    cc(*DOUBLE, *options, "-Wl,-soname,libcuda.so.1", "-o", directory / "libcuda.so.1", "launch_gate_double.c")
    cc(*DOUBLE, "-o", directory / "liblinked.so", "launch_gate_linked.c", *linked)
    return directory


@pytest.fixture(scope="session")
def all_functions(tmp_path_factory, programs):
    return build(tmp_path_factory.mktemp("launch-gate"))


def ways(driver: Path, library: Path | None, *words: str) -> str:
    variables = {**os.environ, "LD_LIBRARY_PATH": str(driver)}
    if library is not None:
        variables["LD_PRELOAD"] = str(library)
    command = [sys.executable, HERE / "launch_gate_ways.py", *words]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_names_are_in_the_order_in_which_they_are_found():
    bases = [re.sub(r"_v\d+$", "", re.sub(r"_pt[sd][sz]$", "", name)) for name in NAMES]
    assert bases == sorted(bases)
    assert len(NAMES) == len(set(NAMES)) > 150


@pytest.mark.parametrize("way", ["link", "dlsym", "cuGetProcAddress"])
def test_every_function_is_called_through_the_gate_with_all_its_arguments(all_functions, programs, way):
    """Registers, stack and result; also variants that are not known, and at another address than dlsym's."""
    assert ways(all_functions, programs.library, way, *NAMES) == ""


def test_what_the_driver_lacks_is_not_found(tmp_path, programs):
    driver = build(tmp_path, LACKING, "cuMemcpy")
    for words in (("0", LACKING, "cuMemcpy"), ("0", "cuLaunchKernel")):
        assert ways(driver, programs.library, "without", *words) == ways(driver, None, "without", *words)
    lines = ways(driver, programs.library, "without", "1", LACKING, "cuMemcpy").splitlines()
    assert lines == [f"{LACKING} False False False", "False", "cuMemcpy False False False", "False", str(NOT_FOUND)]


# -- closed


#: Answers expressions, a line each, in the main thread; functions of the driver are called in threads.
PROGRAM = """
import ctypes, os, signal, sys, threading, time
runtime, driver = ctypes.CDLL("libcudart.so.13"), ctypes.CDLL("libcuda.so.1")
address, done = ctypes.c_void_p(), []
assert runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(2 << 20)) == 0
def call():
    runtime.cudaFree(None)
    done.append(driver.cuCtxSynchronize())
def start(count=1):
    for _ in range(count): threading.Thread(target=call, daemon=True).start()
def forked(way):
    child = way()
    if child == 0: os._exit(driver.cuCtxSynchronize() & 127)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
def interrupted(call=driver.cuCtxSynchronize):
    try:
        return call()
    except KeyboardInterrupt:
        return "KeyboardInterrupt"
def by_clone():  # SYS_clone, SIGCHLD: no handlers of fork run
    return ctypes.CDLL(None).syscall(56, 17, 0, 0, 0, 0)
handled = []
print("ready", flush=True)
while line := sys.stdin.readline():
    print(repr(eval(line)), flush=True)
"""


@dataclass
class Caller:
    process: subprocess.Popen[str]
    path: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def begin(self, expression: str) -> None:
        assert self.process.stdin is not None
        print(expression, file=self.process.stdin, flush=True)

    def answer(self) -> object:
        assert self.process.stdout is not None
        return eval(self.process.stdout.readline())

    def ask(self, expression: str) -> object:
        self.begin(expression)
        return self.answer()

    def waits(self) -> None:
        """A thread waits at the gate: futex(2) of the library's word."""
        until(lambda: any(self._in_futex(task) for task in Path(f"/proc/{self.pid}/task").iterdir()), "it waits")

    def _in_futex(self, task: Path) -> bool:
        words = (task / "syscall").read_text().split()
        if words[0] != "202":
            return False
        with open(f"/proc/{self.pid}/maps") as maps:
            ours = [line.split()[0].split("-") for line in maps if "_fastpath.so" in line]
        start, end = int(ours[0][0], 16), int(ours[-1][1], 16)
        return start <= int(words[1], 16) < end


@contextlib.contextmanager
def calling(programs, doubles, directory: Path) -> Iterator[Caller]:
    variables = {
        **os.environ,
        "LD_LIBRARY_PATH": str(doubles),
        "LD_PRELOAD": str(programs.library),
        SOCKET_VARIABLE: str(directory / "fast"),
    }
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(
        command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield Caller(process, directory / "fast")
            assert process.poll() is None
        finally:
            process.kill()
            assert process.stderr is not None
            assert process.stderr.read() == ""


@pytest.fixture
def caller(programs, doubles, runtime_base):
    with calling(programs, doubles, runtime_base) as caller:
        yield caller


def test_a_closed_gate_lets_calls_wait_and_tells_of_them(caller):
    with Control(caller.path) as control:
        assert control.ask("status")["touches"] == 0
        control.must("close 0")
        assert caller.ask("start(3)") is None
        until(lambda: control.ask("status")["touches"] == 3, "all three calls are counted")
        time.sleep(0.05)
        assert caller.ask("done") == []
        control.must("close 0")
        assert control.ask("status")["touches"] == 3, "it was closed before"
        control.must("open")
        until(lambda: caller.ask("done") == [0, 0, 0], "they continue")
        assert caller.ask("driver.cuCtxSynchronize()") == 0
        assert control.ask("status")["touches"] == 3
        control.must("close 0", "open")
        assert control.ask("status")["touches"] == 0


def test_a_gate_that_was_leased_opens_by_itself(caller):
    with Control(caller.path) as control:
        began = time.monotonic()
        control.must("close 300")
    assert caller.ask("driver.cuCtxSynchronize()") == 0
    assert time.monotonic() - began >= 0.3
    with Control(caller.path) as control:  # also while a connection is silent
        control.must("close 100")
        assert caller.ask("driver.cuCtxSynchronize()") == 0
        control.must("close 100", "close 0")
        caller.ask("start()")
        time.sleep(0.3)
        assert caller.ask("done") == []
        control.must("close 1")
        until(lambda: caller.ask("done") == [0], "the last word counts")


def test_a_lease_ends_only_where_the_memory_is(caller):
    with Control(caller.path) as control:
        control.must("close 200", "copy_out", "free")
        assert control.ask("open")["cuda"] == NOT_READY
    caller.ask("start()")
    time.sleep(0.5)
    assert caller.ask("done") == []
    with Control(caller.path) as control:
        control.must("swap_in")
    until(lambda: caller.ask("done") == [0], "it opens when everything is back")


@pytest.mark.parametrize(
    "call",
    [
        "cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(64))",
        "cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(4 << 20))",
        "cuMemAllocPitch_v2(ctypes.byref(address), ctypes.byref(address), ctypes.c_size_t(99), ctypes.c_size_t(9), 4)",
        "cuMemAllocManaged(ctypes.byref(address), ctypes.c_size_t(64), 1)",
    ],
)
def test_functions_that_allocate_wait_too(caller, call):
    """The agent empties the frameworks' caches before a suspend: the next cell begins with an allocation."""
    with Control(caller.path) as control:
        control.must("close 0")
        caller.begin(f"interrupted(lambda: driver.{call})")
        caller.waits()
        caller.process.send_signal(signal.SIGINT)
        assert caller.answer() == "KeyboardInterrupt"
        caller.begin(f"driver.{call}")
        until(lambda: control.ask("status")["touches"] == 2, "both calls are counted")
        caller.waits()
        control.must("open")
        assert caller.answer() == 0


@pytest.mark.parametrize("name", ["cuda-EvtHandlr", "cuda00001400006"])
def test_threads_that_the_driver_may_wait_for_pass(caller, name):
    with Control(caller.path) as control:
        control.must("close 0")
        caller.ask(f"open('/proc/self/comm', 'w').write({name!r})")  # the main thread's
        assert caller.ask("driver.cuCtxSynchronize()") == 0
        assert control.ask("status")["touches"] == 0
        caller.ask("open('/proc/self/comm', 'w').write('cuda-of-a-user')")
        caller.begin("driver.cuCtxSynchronize()")
        caller.waits()
        control.must("open")
        assert caller.answer() == 0


@pytest.mark.parametrize("name", ["gpu-ckpt-copy", "gpu-ckpt-fast", "gpu-ckpt-mine"])
def test_a_program_s_thread_that_is_called_as_the_library_s_waits(caller, name):
    with Control(caller.path) as control:
        control.must("close 0")
        caller.ask(f"open('/proc/self/comm', 'w').write({name!r})")  # the main thread's
        caller.begin("driver.cuCtxSynchronize()")
        caller.waits()
        assert control.ask("status")["touches"] == 1
        control.must("open")
        assert caller.answer() == 0


@pytest.mark.parametrize("function", ["cuEventCreate", "cuMemUnmap"])
def test_the_library_s_own_threads_pass(caller, function):
    """A profiler's callback may call the driver in them, in the middle of a swap."""
    caller.ask(
        "globals().update(seen=[], callback=ctypes.CFUNCTYPE(None)(lambda: seen.append(driver.cuCtxSynchronize())))"
    )
    caller.ask(f"driver.double_call_back({function.encode()!r}, callback) and None")
    with Control(caller.path) as control:
        control.must("close 0", "copy_out", "free")
        assert caller.ask("seen") == [0]
        assert control.ask("status")["touches"] == 0
        control.must("swap_in", "open")


@pytest.mark.parametrize("verb", ["close", "close ", "close -1", "close x", "close 1x", "close 1 1", "open 1"])
def test_garbage_does_not_move_the_gate(caller, verb):
    with Control(caller.path) as control:
        assert control.ask(verb)["cuda"] == 1
    assert caller.ask("driver.cuCtxSynchronize()") == 0


def test_children_find_it_open(caller):
    with Control(caller.path) as control:
        control.must("close 0")
        assert caller.ask("forked(os.fork)") == 0
        assert caller.ask("forked(by_clone)") == 0
        caller.ask("start()")
        caller.waits()
        assert caller.ask("forked(os.fork)") == 0, "nor does a thread that waits keep the process from it"
        control.must("open")


def test_an_interrupt_ends_the_wait_of_the_main_thread(caller):
    with Control(caller.path) as control:
        control.must("close 0")
        caller.begin("interrupted()")
        caller.waits()
        caller.process.send_signal(signal.SIGINT)
        assert caller.answer() == "KeyboardInterrupt"
        caller.ask("[signal.signal(signal.SIGINT, lambda *_: handled.append('SIGINT'))] and None")
        caller.begin("driver.cuCtxSynchronize()")
        caller.waits()
        caller.process.send_signal(signal.SIGINT)
        assert caller.answer() == OPERATING_SYSTEM
        assert caller.ask("handled") == ["SIGINT"]
        control.must("open")
    assert caller.ask("driver.cuCtxSynchronize()") == 0, "an interrupt leaves nothing behind"


def test_no_other_signal_ends_the_wait(caller):
    """Python's handlers do not restart system calls; PyTorch's DataLoader has one of SIGCHLD."""
    with Control(caller.path) as control:
        for name in ("SIGCHLD", "SIGALRM", "SIGUSR1"):
            caller.ask(f"[signal.signal(signal.{name}, lambda *_: handled.append('{name}'))] and None")
        control.must("close 0")
        caller.begin("driver.cuCtxSynchronize()")
        caller.waits()
        for number in (signal.SIGCHLD, signal.SIGALRM, signal.SIGUSR1, signal.SIGSTOP, signal.SIGCONT, signal.SIGWINCH):
            caller.process.send_signal(number)
        time.sleep(0.1)
        caller.waits()
        control.must("open")
        assert caller.answer() == 0
        assert sorted(caller.ask("handled")) == ["SIGALRM", "SIGCHLD", "SIGUSR1"], "they were only delayed"
        caller.ask("signal.siginterrupt(signal.SIGINT, False)")
        assert caller.ask("signal.pthread_sigmask(signal.SIG_BLOCK, [])") == set()


def test_a_tracer_that_comes_and_goes_does_not_end_the_wait(caller):
    """A stop in futex(2), which begins anew; a launch that ran would find no memory."""
    with Control(caller.path) as control:
        control.must("close 0")
        caller.begin("driver.cuCtxSynchronize()")
        caller.waits()
        for _ in range(3):
            with Tracee(caller.pid, running=True):
                pass
            caller.waits()
        assert control.ask("status")["touches"] == 1
        control.must("open")
        assert caller.answer() == 0


def test_a_call_is_all_that_makes_the_library_listen(programs, doubles, runtime_base):
    """A program whose memory is the driver's own can be kept from the GPU, too."""
    source = PROGRAM.replace("cudaMalloc(ctypes.byref(address), ctypes.c_size_t(2 << 20))", "cudaFree(None)")
    assert source != PROGRAM
    variables = {"LD_LIBRARY_PATH": str(doubles), "LD_PRELOAD": str(programs.library)}
    variables[SOCKET_VARIABLE] = str(runtime_base / "fast")
    command = [sys.executable, "-c", source]
    exists = f"os.path.exists({str(runtime_base / 'fast')!r})"
    lines = f"{exists}, driver.cuCtxSynchronize(), {exists}\n"
    done = subprocess.run(
        command, env={**os.environ, **variables}, input=lines, capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.stdout.splitlines()[1:], done.stderr) == (["(False, 0, True)"], "")


def test_on_another_machine_there_is_no_gate_and_no_error(doubles):
    built = build_library(doubles, define=("GPU_CKPT_WITHOUT_DLSYM",))
    with running(built, doubles, direct=True) as subject:
        subject.alloc(1, 4 * MIB)
        with subject.control() as control:
            control.must("close 0")
            assert subject.ask("synchronize") == "0"
            assert control.ask("status")["touches"] == 0
            control.must("open")
