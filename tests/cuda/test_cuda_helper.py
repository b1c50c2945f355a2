"""The helper process and its caller's side: lanes, deadlines, deaths, and what the driver's answers become."""

import io
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

from jupyter_gpu_ckpt.cuda import helper as cuda_helper
from jupyter_gpu_ckpt.cuda.client import Helper
from jupyter_gpu_ckpt.cuda.driver import Cuda, CudaState
from jupyter_gpu_ckpt.cuda.helper import CudaDriver, DriverRefused, Unavailable, serve
from jupyter_gpu_ckpt.errors import CudaError, CudaTimeout, CudaUnavailable, HelperGone, StateError, UnsupportedCuda

# A helper with operations that do what the driver cannot be asked to.  `wait` blocks until somebody writes the FIFO.
STUB = """
import os, threading
from jupyter_gpu_ckpt.cuda.helper import DriverRefused, Unavailable, run
def refuse(): raise DriverRefused(401, "CUDA_ERROR_ILLEGAL_STATE")
def lack(): raise Unavailable("driver-missing", "No driver.")
run({
    "x.open": lambda: None,
    "x.echo": lambda value: value,
    "x.pid": os.getpid,
    "x.hang": lambda: threading.Event().wait(),
    "x.die": lambda: os._exit(3),
    "x.wait": lambda fifo: open(fifo).read(),
    "x.print": lambda: os.write(1, b"hello from a library\\n"),
    "x.refuse": refuse,
    "x.lack": lack,
    "bad.open": lack,
    "bad.verb": lambda: None,
})
"""


@pytest.fixture
def helper():
    helper = Helper([sys.executable, "-c", STUB])
    yield helper
    # A hung call would keep close() waiting.
    if helper.pid is not None:
        os.kill(helper.pid, signal.SIGKILL)
    helper.close()


@pytest.fixture
def threads():
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def fifo(tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


def wait_for_end(pid, timeout_s=20):
    """Wait until no such process is left (the helper is reaped by its reader thread)."""
    deadline = time.monotonic() + timeout_s
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ready, _, _ = select.select([descriptor], [], [], deadline - time.monotonic())
        assert ready, f"process {pid} still runs"
    finally:
        os.close(descriptor)


class TestServe:
    def run(self, requests, operations):
        answers = io.StringIO()
        assert serve([json.dumps({"id": i, **request}) for i, request in enumerate(requests)], answers, operations)
        return {answer["id"]: answer for answer in map(json.loads, answers.getvalue().splitlines())}

    def test_requests_run_side_by_side(self):
        both_there = threading.Barrier(2, timeout=60)
        answers = self.run([{"op": "meet", "args": {}}] * 2, {"meet": lambda: both_there.wait() >= 0})
        assert all(answer["value"] for answer in answers.values())

    def test_a_failing_operation_is_an_answer(self):
        answers = self.run([{"op": "nothing", "args": {}}, {"op": "div", "args": {}}], {"div": lambda: 1 / 0})
        assert [answers[n]["error"]["kind"] for n in (0, 1)] == ["bug", "bug"]
        assert "ZeroDivisionError" in answers[1]["error"]["message"]


class TestHelper:
    def test_one_process_for_many_calls(self, helper):
        assert helper.pid is None
        assert helper.call("x.echo", timeout_s=20, value=[1, "ä"]) == [1, "ä"]
        assert helper.call("x.pid", timeout_s=20) == helper.call("x.pid", timeout_s=20) == helper.pid != os.getpid()

    def test_what_libraries_print_is_no_answer(self, helper):
        helper.call("x.print", timeout_s=20)
        assert helper.call("x.echo", timeout_s=20, value=1) == 1

    def test_it_sees_every_gpu_and_none_of_the_users_modules(self, monkeypatch, tmp_path):
        (tmp_path / "cuda.py").write_text("raise SystemExit('imported from the working directory')")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        code = "import os; from jupyter_gpu_ckpt.cuda.helper import run\n"
        code += "run({'x.open': dict, 'x.look': lambda: [os.getcwd(), os.environ.get('CUDA_VISIBLE_DEVICES')]})"
        helper = Helper([sys.executable, "-c", code])
        cwd, visible = helper.call("x.look", timeout_s=20)
        helper.close()
        assert cwd != str(tmp_path)
        assert visible is None

    def test_a_call_that_does_not_answer_is_given_up_and_the_helper_replaced(self, helper):
        before = helper.call("x.pid", timeout_s=20)
        with pytest.raises(CudaTimeout) as caught:
            helper.call("x.hang", lane=5, timeout_s=0.1)
        assert caught.value.details == {"op": "x.hang", "pid": 5}
        assert helper.call("x.pid", timeout_s=20) != before
        wait_for_end(before)

    def test_other_calls_under_way_end_first(self, helper, threads, fifo):
        before = helper.call("x.pid", timeout_s=20)
        waiting = threads.submit(helper.call, "x.wait", lane=1, timeout_s=60, fifo=str(fifo))
        write = os.open(fifo, os.O_WRONLY)  # returns once the helper has opened it for reading: the call is under way
        with pytest.raises(CudaTimeout):
            helper.call("x.hang", lane=2, timeout_s=0.1)
        assert helper.call("x.pid", lane=3, timeout_s=20) != before
        with pytest.raises(CudaTimeout, match="Another call"):
            helper.call("x.echo", lane=2, timeout_s=0.1, value=1)
        os.write(write, b"done")
        os.close(write)
        assert waiting.result(20) == "done"
        wait_for_end(before)
        assert helper.call("x.echo", lane=2, timeout_s=20, value=1) == 1

    def test_calls_for_one_process_run_one_at_a_time(self, helper, threads, fifo):
        pid = helper.call("x.pid", timeout_s=20)
        waiting = threads.submit(helper.call, "x.wait", lane=1, timeout_s=60, fifo=str(fifo))
        write = os.open(fifo, os.O_WRONLY)
        queued = threads.submit(helper.call, "x.echo", lane=1, timeout_s=60, value=1)
        with pytest.raises(CudaTimeout, match="Another call"):
            helper.call("x.echo", lane=1, timeout_s=0.1, value=2)
        assert helper.call("x.echo", lane=2, timeout_s=20, value=3) == 3
        assert not queued.done()
        os.write(write, b"done")
        os.close(write)
        assert waiting.result(20) == "done"
        assert queued.result(20) == 1
        assert helper.call("x.pid", timeout_s=20) == pid, "to wait in vain is no reason to replace the helper"

    def test_a_helper_that_dies_in_a_call(self, helper):
        before = helper.call("x.pid", timeout_s=20)
        with pytest.raises(HelperGone) as caught:
            helper.call("x.die", lane=9, timeout_s=20)
        assert caught.value.details["returncode"] == 3
        assert helper.call("x.pid", timeout_s=20) != before

    def test_a_helper_killed_in_a_call(self, helper, threads, fifo):
        waiting = threads.submit(helper.call, "x.wait", lane=1, timeout_s=60, fifo=str(fifo))
        write = os.open(fifo, os.O_WRONLY)
        os.kill(helper.pid, signal.SIGKILL)
        with pytest.raises(HelperGone):
            waiting.result(20)
        os.close(write)

    def test_a_helper_that_died_between_two_calls_is_not_missed(self, helper):
        before = helper.call("x.pid", timeout_s=20)
        os.kill(before, signal.SIGKILL)
        wait_for_end(before)
        assert helper.call("x.pid", timeout_s=20) != before

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_polite_signal_to_every_process_of_a_job_is_not_for_the_helper(self, helper, number):
        pid = helper.call("x.pid", timeout_s=10)
        os.kill(pid, number)
        assert helper.call("x.pid", timeout_s=10) == pid

    def test_a_helper_that_cannot_start(self):
        with pytest.raises(HelperGone):
            Helper(["/nonexistent/python"]).call("x.echo", timeout_s=20)
        with pytest.raises(HelperGone):
            Helper([sys.executable, "-c", "raise SystemExit(1)"]).call("x.echo", timeout_s=20)

    def test_refusals_and_lacks(self, helper):
        with pytest.raises(DriverRefused) as refused:
            helper.call("x.refuse", timeout_s=20)
        assert (refused.value.number, refused.value.name) == (401, "CUDA_ERROR_ILLEGAL_STATE")
        for op in ("x.lack", "bad.verb"):
            with pytest.raises(CudaUnavailable) as lacking:
                helper.call(op, timeout_s=20)
            assert lacking.value.details["reason"] == "driver-missing"
        with pytest.raises(CudaError, match="helper failed"):
            helper.call("x.echo", timeout_s=20, wrong=1)

    def test_close_lets_calls_under_way_end(self, helper, threads, fifo):
        pid = helper.call("x.pid", timeout_s=20)
        waiting = threads.submit(helper.call, "x.wait", lane=1, timeout_s=60, fifo=str(fifo))
        write = os.open(fifo, os.O_WRONLY)
        closing = threads.submit(helper.close)
        os.write(write, b"done")
        os.close(write)
        assert waiting.result(20) == "done"
        closing.result(20)
        wait_for_end(pid)
        assert helper.pid is None

    def test_it_ends_with_its_caller(self):
        code = "import os, sys; from jupyter_gpu_ckpt.cuda.client import Helper\n"
        code += "helper = Helper([sys.executable, '-c', sys.argv[1]])\n"
        code += "print(helper.call('x.pid', timeout_s=20), flush=True); os._exit(1)"
        caller = subprocess.run([sys.executable, "-c", code, STUB], capture_output=True, timeout=60)
        wait_for_end(int(caller.stdout))


class Number(int):
    @property
    def name(self):
        return f"CUDA_ERROR_{int(self)}"


def bindings(**changes):
    """A stand-in for cuda.bindings.driver that records its calls; ``changes`` replaces functions by name."""
    calls = []

    def verb(name):
        return lambda *args: calls.append((name, *args)) or (Number(0), *([2] if name.endswith("GetState") else []))

    class Structure:
        def __init__(self, address=0):
            self.address = address

    module = types.ModuleType("cuda.bindings.driver")
    for name in cuda_helper.NEEDED_SYMBOLS:
        setattr(module, name, verb(name) if name.startswith("cuCheckpoint") else type(name, (Structure,), {}))
    module.cuDriverGetVersion = lambda: (Number(0), 13000)
    module.cuInit = lambda flags: (Number(0),)
    for name, value in changes.items():
        if value is None:
            delattr(module, name)
        else:
            setattr(module, name, value)
    module.calls = calls
    return module


@pytest.fixture
def installed(monkeypatch):
    def install(version, module):
        package = types.ModuleType("cuda.bindings")
        package.__version__ = version
        monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
        monkeypatch.setitem(sys.modules, "cuda.bindings", package)
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", module)
        return module

    return install


def no_library(*args):
    raise RuntimeError("any text")


class TestCudaDriver:
    @pytest.mark.parametrize(
        ("version", "module", "reason"),
        [
            ("13.0.2", None, "binding-missing"),
            ("12.9.0", bindings(), "binding-too-old"),
            ("13.0.1", bindings(), "binding-too-old"),
            ("12.9.5", bindings(CUcheckpointRestoreArgs=None), "symbol-missing"),
            ("13.0.2", bindings(cuDriverGetVersion=no_library), "driver-missing"),
            ("13.0.2", bindings(cuDriverGetVersion=lambda: (Number(0), 12070)), "driver-too-old"),
            ("13.0.2", bindings(cuInit=lambda flags: (Number(100),)), "driver-refuses"),
        ],
    )
    def test_why_it_is_not_available(self, installed, version, module, reason):
        installed(version, module)
        driver = CudaDriver()
        for _ in range(2):
            with pytest.raises(Unavailable) as caught:
                driver.open()
            assert caught.value.reason == reason

    @pytest.mark.parametrize("version", ["12.9.1", "12.9.9.post1", "13.0.2", "13.5.0", "14.0.0rc1"])
    def test_versions_that_do(self, installed, version):
        installed(version, bindings())
        CudaDriver().open()

    def test_the_calls(self, installed):
        module = installed("13.0.2", bindings())
        driver = CudaDriver()
        driver.open()
        driver.lock(5, 1500)
        driver.checkpoint(5)
        assert driver.state(5) == 2
        driver.restore(5, [])
        old, new = "GPU-00000000-0000-0000-0000-000000000001", "GPU-00000000-0000-0000-0000-0000000000ff"
        driver.restore(5, [(old, new), (new, old)])
        driver.unlock(5)
        assert [call[0].removeprefix("cuCheckpointProcess") for call in module.calls] == [
            *("Lock", "Checkpoint", "GetState", "Restore", "Restore", "Unlock")
        ]
        assert module.calls[0][2].timeoutMs == 1500
        assert module.calls[3][1:] == (5, None)
        assert module.calls[4][2].gpuPairsCount == len(module.calls[4][2].gpuPairs) == 2

    def test_a_refusal_is_a_number_and_a_missing_function_a_reason(self, installed):
        refusing = bindings(cuCheckpointProcessUnlock=lambda *args: (Number(401),), cuCheckpointProcessLock=no_library)
        installed("13.0.2", refusing)
        driver = CudaDriver()
        driver.open()
        with pytest.raises(DriverRefused) as refused:
            driver.unlock(1)
        assert refused.value.number == 401
        with pytest.raises(Unavailable) as lacking:
            driver.lock(1, 1)
        assert lacking.value.reason == "driver-too-old"


def test_the_real_structures_take_uuids():
    """Needs cuda-bindings, but no driver."""
    api = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is missing: pip install cuda-bindings")
    driver, seen = CudaDriver(), []

    def restore(pid, args):
        seen.extend((bytes(pair.oldUuid.bytes), bytes(pair.newUuid.bytes)) for pair in args.gpuPairs)
        return (api.CUresult.CUDA_SUCCESS,)

    names = ("CUcheckpointGpuPair", "CUcheckpointRestoreArgs", "CUuuid")
    driver._api = types.SimpleNamespace(
        cuCheckpointProcessRestore=restore, **{name: getattr(api, name) for name in names}
    )
    driver.restore(1, [("GPU-000102030405060708090a0b0c0d0e0f", "GPU-" + "ff" * 16)])
    assert seen == [(bytes(range(16)), b"\xff" * 16)]


ONE = "GPU-00000000-0000-0000-0000-000000000001"
TWO = "GPU-00000000-0000-0000-0000-000000000002"


class Refuses:
    """A caller whose driver refuses with one number."""

    def __init__(self, number):
        self.number = number

    def call(self, op, **args):
        raise DriverRefused(self.number, f"E{self.number}")

    def close(self):
        pass


class TestCuda:
    @pytest.mark.parametrize(
        ("verb", "number", "error"),
        [
            ("lock", 600, CudaTimeout),
            ("checkpoint", 600, CudaError),
            ("unlock", 401, StateError),
            ("checkpoint", 801, UnsupportedCuda),
            ("lock", 500, CudaUnavailable),
            ("restore", 2, CudaError),
            ("restore", 304, CudaError),
        ],
    )
    def test_numbers_become_classes(self, verb, number, error):
        cuda = Cuda(Refuses(number))
        with pytest.raises(error) as caught:
            getattr(cuda, verb)(os.getpid(), *([1] if verb == "lock" else []))
        assert type(caught.value) is error
        assert caught.value.details["cuda_result"] == number
        assert caught.value.details["pid"] == os.getpid()

    def test_this_process_has_no_cuda_and_no_helper_is_started_for_it(self):
        with Cuda() as cuda:
            assert cuda.state(os.getpid()) is CudaState.NONE
            assert not cuda.uses_cuda(os.getpid())
            assert cuda.device_files(os.getpid()) == []
            assert cuda._helper.pid is None

    def test_a_thread_is_not_a_process(self):
        ready, leave = threading.Event(), threading.Event()
        thread = threading.Thread(target=lambda: (ready.set(), leave.wait(60)))
        thread.start()
        ready.wait(60)
        try:
            with pytest.raises(ValueError, match="thread of process"):
                Cuda(Refuses(1)).unlock(thread.native_id)
        finally:
            leave.set()
            thread.join()

    def test_a_success_that_is_none_is_an_error(self):
        class Lies(Refuses):
            def call(self, op, **args):
                return None

        with pytest.raises(CudaError, match="not checkpointed"):
            Cuda(Lies(0)).checkpoint(os.getpid())

    @pytest.mark.parametrize(
        ("mapping", "error"),
        [
            ({1: 2}, TypeError),
            ({"GPU-1": "GPU-2"}, ValueError),
            ({ONE: "x"}, ValueError),
            ({ONE: ONE, TWO: ONE}, ValueError),
        ],
    )
    def test_a_mapping_of_something_else(self, mapping, error):
        with pytest.raises(error):
            Cuda(Refuses(1)).restore(os.getpid(), mapping)

    def test_the_reason_of_this_host(self):
        """Whatever this host lacks has a name."""
        with Cuda() as cuda:
            try:
                cuda.available()
            except CudaUnavailable as error:
                reasons = {"binding-missing", "binding-too-old", "symbol-missing"}
                assert error.details["reason"] in reasons | {"driver-missing", "driver-too-old", "driver-refuses"}
