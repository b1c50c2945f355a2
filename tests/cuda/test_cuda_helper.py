"""The helper process and its client: lanes, deadlines, deaths."""

import contextlib
import io
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jupyter_gpu_ckpt.cuda.checkpoint_api import DriverRefused
from jupyter_gpu_ckpt.cuda.cuda import Cuda, CudaState
from jupyter_gpu_ckpt.cuda.gpus import Gpus
from jupyter_gpu_ckpt.cuda.helper import serve
from jupyter_gpu_ckpt.cuda.helper_client import Helper
from jupyter_gpu_ckpt.errors import CudaError, CudaTimeout, CudaUnavailable, DriverTooOld, HelperGone

# A helper with operations that do what the driver cannot be asked to.  `wait` blocks until somebody writes the FIFO.
STUB = """
import os, threading
from jupyter_gpu_ckpt.cuda.checkpoint_api import DriverRefused, Unavailable
from jupyter_gpu_ckpt.cuda.helper import run
def refuse(): raise DriverRefused(401, "CUDA_ERROR_ILLEGAL_STATE")
def lack(): raise Unavailable("driver-missing", "No driver.")
def die_first(died):
    if os.path.exists(died): return os.getpid()
    open(died, "w").close()
    os._exit(3)
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
    "cuda.open": lambda: None,
    "cuda.state": die_first,
    "cuda.lock": die_first,
    "bad.open": lack,
    "bad.verb": lambda: None,
})
"""

# The real operations on a driver of CUDA 12.4.
TOO_OLD = """
from jupyter_gpu_ckpt.cuda import checkpoint_api
from jupyter_gpu_ckpt.cuda.helper import real_operations, run
def load(): raise checkpoint_api.Unavailable("driver-too-old", "It supports CUDA 12.4.")
checkpoint_api._load_driver = load
run(real_operations())
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


def wait_for_end(pid, timeout_s=60):
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
        assert helper.call("x.echo", timeout_s=60, value=[1, "ä"]) == [1, "ä"]
        assert helper.call("x.pid", timeout_s=60) == helper.call("x.pid", timeout_s=60) == helper.pid != os.getpid()

    def test_what_libraries_print_is_no_answer(self, helper):
        helper.call("x.print", timeout_s=60)
        assert helper.call("x.echo", timeout_s=60, value=1) == 1

    def test_it_sees_every_gpu_and_none_of_the_users_modules(self, monkeypatch, tmp_path):
        (tmp_path / "cuda.py").write_text("raise SystemExit('imported from the working directory')")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        code = "import os; from jupyter_gpu_ckpt.cuda.helper import run\n"
        code += "run({'x.open': dict, 'x.look': lambda: [os.getcwd(), os.environ.get('CUDA_VISIBLE_DEVICES')]})"
        helper = Helper([sys.executable, "-c", code])
        cwd, visible = helper.call("x.look", timeout_s=60)
        helper.close()
        assert cwd != str(tmp_path)
        assert visible is None

    def test_a_call_that_does_not_answer_is_given_up_and_the_helper_replaced(self, helper):
        before = helper.call("x.pid", timeout_s=60)
        with pytest.raises(CudaTimeout) as caught:
            helper.call("x.hang", lane=5, timeout_s=0.1)
        assert caught.value.details == {"op": "x.hang", "pid": 5}
        assert helper.call("x.pid", timeout_s=60) != before
        wait_for_end(before)

    def test_other_calls_under_way_end_first(self, helper, threads, fifo):
        before = helper.call("x.pid", timeout_s=60)
        waiting = threads.submit(helper.call, "x.wait", lane=1, timeout_s=60, fifo=str(fifo))
        write = os.open(fifo, os.O_WRONLY)  # returns once the helper has opened it for reading: the call is under way
        with pytest.raises(CudaTimeout):
            helper.call("x.hang", lane=2, timeout_s=0.1)
        assert helper.call("x.pid", lane=3, timeout_s=60) != before
        with pytest.raises(CudaTimeout, match="Another call"):
            helper.call("x.echo", lane=2, timeout_s=0.1, value=1)
        os.write(write, b"done")
        os.close(write)
        assert waiting.result(60) == "done"
        wait_for_end(before)
        assert helper.call("x.echo", lane=2, timeout_s=60, value=1) == 1

    def test_calls_for_one_process_run_one_at_a_time(self, helper, threads, fifo):
        pid = helper.call("x.pid", timeout_s=60)
        waiting = threads.submit(helper.call, "x.wait", lane=1, timeout_s=60, fifo=str(fifo))
        write = os.open(fifo, os.O_WRONLY)
        queued = threads.submit(helper.call, "x.echo", lane=1, timeout_s=60, value=1)
        with pytest.raises(CudaTimeout, match="Another call"):
            helper.call("x.echo", lane=1, timeout_s=0.1, value=2)
        assert helper.call("x.echo", lane=2, timeout_s=60, value=3) == 3
        assert not queued.done()
        os.write(write, b"done")
        os.close(write)
        assert waiting.result(60) == "done"
        assert queued.result(60) == 1
        assert helper.call("x.pid", timeout_s=60) == pid, "a wait without an answer is no reason to replace it"

    def test_a_helper_that_dies_in_a_call(self, helper):
        before = helper.call("x.pid", timeout_s=60)
        with pytest.raises(HelperGone) as caught:
            helper.call("x.die", lane=9, timeout_s=60)
        assert caught.value.details["returncode"] == 3
        assert helper.call("x.pid", timeout_s=60) != before

    def test_a_query_is_made_once_more_and_a_change_is_not(self, helper, tmp_path):
        """The first of two changes may or may not have been made."""
        before = helper.call("x.pid", timeout_s=60)
        assert helper.call("cuda.state", timeout_s=60, died=str(tmp_path / "asked")) not in (before, None)
        with pytest.raises(HelperGone):
            helper.call("cuda.lock", timeout_s=60, died=str(tmp_path / "changed"))

    def test_a_helper_killed_in_a_call(self, helper, threads, fifo):
        waiting = threads.submit(helper.call, "x.wait", lane=1, timeout_s=60, fifo=str(fifo))
        write = os.open(fifo, os.O_WRONLY)
        os.kill(helper.pid, signal.SIGKILL)
        with pytest.raises(HelperGone):
            waiting.result(60)
        os.close(write)

    def test_a_helper_that_died_between_two_calls_is_not_missed(self, helper):
        before = helper.call("x.pid", timeout_s=60)
        os.kill(before, signal.SIGKILL)
        wait_for_end(before)
        assert helper.call("x.pid", timeout_s=60) != before

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_polite_signal_to_every_process_of_a_job_is_not_for_the_helper(self, helper, number):
        pid = helper.call("x.pid", timeout_s=60)
        os.kill(pid, number)
        assert helper.call("x.pid", timeout_s=60) == pid

    def test_a_helper_that_cannot_start(self):
        with pytest.raises(HelperGone):
            Helper(["/nonexistent/python"]).call("x.echo", timeout_s=60)
        with pytest.raises(HelperGone):
            Helper([sys.executable, "-c", "raise SystemExit(1)"]).call("x.echo", timeout_s=60)

    def test_refusals_and_lacks(self, helper):
        with pytest.raises(DriverRefused) as refused:
            helper.call("x.refuse", timeout_s=60)
        assert (refused.value.number, refused.value.name) == (401, "CUDA_ERROR_ILLEGAL_STATE")
        for op in ("x.lack", "bad.verb"):
            with pytest.raises(CudaUnavailable) as lacking:
                helper.call(op, timeout_s=60)
            assert lacking.value.details["reason"] == "driver-missing"
        with pytest.raises(CudaError, match="helper failed"):
            helper.call("x.echo", timeout_s=60, wrong=1)

    def test_a_driver_that_is_too_old_is_asked_by_one_helper_that_lives_on(self, monkeypatch):
        with contextlib.closing(Helper([sys.executable, "-c", TOO_OLD])) as helper:
            cuda = Cuda(helper)
            monkeypatch.setattr(cuda, "uses_cuda", lambda pid: True)
            monkeypatch.setattr(cuda, "device_files", lambda pid: ["/dev/nvidia0"])
            for call in (cuda.available, lambda: cuda.lock(os.getpid(), 1)):
                with pytest.raises(DriverTooOld):
                    call()
                assert cuda.state(os.getpid()) is CudaState.RUNNING
            pid = helper.pid
            Gpus(helper).list()  # NVML needs no new driver
            assert helper.pid == pid

    def test_close_lets_calls_under_way_end(self, helper, threads, fifo):
        pid = helper.call("x.pid", timeout_s=60)
        waiting = threads.submit(helper.call, "x.wait", lane=1, timeout_s=60, fifo=str(fifo))
        write = os.open(fifo, os.O_WRONLY)
        closing = threads.submit(helper.close)
        os.write(write, b"done")
        os.close(write)
        assert waiting.result(60) == "done"
        closing.result(60)
        wait_for_end(pid)
        assert helper.pid is None

    def test_it_ends_with_its_caller(self):
        code = "import os, sys; from jupyter_gpu_ckpt.cuda.helper_client import Helper\n"
        code += "helper = Helper([sys.executable, '-c', sys.argv[1]])\n"
        code += "print(helper.call('x.pid', timeout_s=60), flush=True); os._exit(1)"
        caller = subprocess.run([sys.executable, "-c", code, STUB], capture_output=True, timeout=60)
        wait_for_end(int(caller.stdout))
