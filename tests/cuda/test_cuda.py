"""`Cuda`: what the driver's answers become, and what needs no driver."""

import os
import socket
import subprocess
import sys
import threading

import pytest

from jupyter_gpu_ckpt.cuda.checkpoint_api import DriverRefused
from jupyter_gpu_ckpt.cuda.cuda import Cuda, CudaState
from jupyter_gpu_ckpt.errors import CudaError, CudaTimeout, CudaUnavailable, DriverTooOld, StateError, UnsupportedCuda

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
            ("lock", 500, DriverTooOld),
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

    @pytest.mark.parametrize("files", [["/dev/nvidia0"], []])
    @pytest.mark.parametrize("how", ["by its version", "by a function that it lacks"])
    def test_a_driver_that_is_too_old_has_suspended_nothing(self, monkeypatch, files, how):
        class TooOld(Refuses):
            def call(self, op, **args):
                if how == "by its version":
                    raise DriverTooOld("Old.", reason="driver-too-old")
                super().call(op, **args)

        cuda = Cuda(TooOld(500))
        monkeypatch.setattr(cuda, "uses_cuda", lambda pid: True)
        monkeypatch.setattr(cuda, "device_files", lambda pid: files)
        assert cuda.state(os.getpid()) is (CudaState.RUNNING if files else CudaState.NONE)
        with pytest.raises(DriverTooOld):
            cuda.lock(os.getpid(), 1)

    def test_this_process_has_no_cuda_and_no_helper_is_started_for_it(self):
        with Cuda() as cuda:
            assert cuda.state(os.getpid()) is CudaState.NONE
            assert not cuda.uses_cuda(os.getpid())
            assert cuda.device_files(os.getpid()) == []
            assert cuda._helper.pid is None

    def test_a_process_that_the_driver_knows_is_not_looked_through_again(self, monkeypatch):
        """A millisecond and more for each look; one that has ended has no CUDA, however long its parent leaves it."""
        looked, states = [], {"cuda.state": 0}

        class Answers:
            def call(self, op, **args):
                return states[op]

        cuda = Cuda(Answers())
        read = cuda._read
        monkeypatch.setattr(cuda, "_read", lambda pid, name: looked.append(name) or read(pid, name))
        with subprocess.Popen(["sleep", "1000"]) as sleeps:
            assert not cuda.uses_cuda(sleeps.pid) and looked.count("maps") == 1
            with monkeypatch.context() as patch:
                patch.setattr(cuda, "uses_cuda", lambda pid: True)
                assert cuda.state(sleeps.pid) is CudaState.RUNNING
            assert cuda.uses_cuda(sleeps.pid) and looked.count("maps") == 1
            with monkeypatch.context() as patch:
                patch.setattr(os, "access", lambda path, mode: False)  # it has become one that is not to be looked into
                patch.setattr(cuda, "_is_hidden", lambda pid: False)
                cuda.uses_cuda(sleeps.pid)
                assert looked.count("maps") == 2
            sleeps.kill()
            os.waitid(os.P_PID, sleeps.pid, os.WEXITED | os.WNOWAIT)
            readable = os.access(f"/proc/{sleeps.pid}/fd", os.R_OK)  # one that has ended is for root only
            assert not cuda.uses_cuda(sleeps.pid) and looked.count("maps") == 2 + readable

    def test_the_mappings_of_a_process_are_read_until_the_driver_knows_it(self, monkeypatch):
        """And again where that was another process, or another program that it ran."""
        answers, looked = {}, []

        class Answers:
            def call(self, op, **args):
                if op == "cuda.state" and answers[args["pid"]] is None:
                    raise DriverRefused(3, "CUDA_ERROR_NOT_INITIALIZED")
                return answers.get(args.get("pid"))

        cuda = Cuda(Answers())
        monkeypatch.setattr(cuda, "uses_cuda", lambda pid: looked.append(pid) or True)
        pid = os.getpid()
        for answer, state, looks in (
            (None, CudaState.NONE, 1),
            (0, CudaState.RUNNING, 2),
            (2, CudaState.CHECKPOINTED, 2),
            (None, CudaState.NONE, 2),
            (None, CudaState.NONE, 3),
            (0, CudaState.RUNNING, 4),
        ):
            answers[pid] = answer
            assert cuda.state(pid) is state
            assert len(looked) == looks
        monkeypatch.setattr(cuda, "_started", lambda pid: -1)
        assert cuda.state(pid) is CudaState.RUNNING
        assert len(looked) == 5

    @pytest.mark.parametrize("name", ["\0/tmp/nccl-socket-0-840b4f60b1dfa869", "/tmp/nccl-socket-1-ef1f1062e0c09dd6"])
    def test_a_socket_of_nccl_s_shows_that_a_process_communicates_by_it(self, runtime_base, name):
        """Abstract, or a file (NCCL_IPC_USE_ABSTRACT_SOCKET=0), whose path may have 107 bytes."""
        path = name if name[0] == "\0" else f"{runtime_base}{name}"
        os.makedirs(f"{runtime_base}/tmp")
        with Cuda() as cuda:
            assert not cuda.communicates_by_nccl(os.getpid())
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
                end.bind(path)
                assert cuda.communicates_by_nccl(os.getpid())
                assert not cuda.communicates_by_nccl(os.getppid()), "it is another process's"
            assert not cuda.communicates_by_nccl(os.getpid())

    def test_a_process_group_s_watchdog_shows_that_a_process_communicates_by_nccl(self):
        code = "import ctypes, threading, sys; ready = threading.Event()\n"
        code += "threading.Thread(target=lambda: (ctypes.CDLL(None).prctl(15, b'pt_nccl_watchdg'), ready.set(),"
        code += " sys.stdin.read())).start(); ready.wait(); print(flush=True)"
        with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            with Cuda() as cuda:
                assert cuda.communicates_by_nccl(process.pid)
            process.stdin.close()

    def test_a_thread_is_not_a_process(self):
        ready, finish = threading.Event(), threading.Event()
        thread = threading.Thread(target=lambda: (ready.set(), finish.wait(60)))
        thread.start()
        ready.wait(60)
        try:
            with pytest.raises(ValueError, match="thread of process"):
                Cuda(Refuses(1)).unlock(thread.native_id)
        finally:
            finish.set()
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
        """Each thing that this host lacks has a name."""
        with Cuda() as cuda:
            try:
                cuda.available()
            except CudaUnavailable as error:
                reasons = {"binding-missing", "binding-too-old", "symbol-missing"}
                assert error.details["reason"] in reasons | {"driver-missing", "driver-too-old", "driver-refuses"}
