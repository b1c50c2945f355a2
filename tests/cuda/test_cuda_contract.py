"""One contract for `Cuda` and `Gpus`, over the fake driver and (marked ``gpu``) over the real one.

What a test here asserts, callers may rely on; what the fake does beyond it is the fake's own invention.
"""

import contextlib
import time

import pytest
from cuda_subject import CudaSubject
from harness import alive
from waiting import until

from jupyter_gpu_ckpt.cuda.cuda import Cuda, CudaState
from jupyter_gpu_ckpt.cuda.gpus import Gpus
from jupyter_gpu_ckpt.errors import CudaError, CudaTimeout, GpuFull, StateError
from jupyter_gpu_ckpt.testing.fake_cuda import FakeCuda, FakeDriver, FakeGpus

MIB = 2**20
MEMORY = 256 * MIB
QUERIES = """
import threading, time
def query():
    while True: torch.cuda.default_stream().query(); time.sleep(0.01)
threading.Thread(target=query, daemon=True).start()
"""
FAKE_UUID = "GPU-00000000-0000-0000-0000-000000000001"


class FakeRig:
    def __init__(self, lock_dir):
        self.driver = FakeDriver({FAKE_UUID: 1000 * MIB})
        self.cuda = FakeCuda(self.driver)
        self.gpus = FakeGpus(self.driver, lock_dir)

    def start(self):
        """A process with MEMORY bytes on the first GPU."""
        return self.driver.start({FAKE_UUID: MEMORY})

    def plain(self):
        """A process that never touched CUDA."""
        return self.driver.start()

    @contextlib.contextmanager
    def busy(self, pid):
        """GPU work that outlasts any patience of the body."""
        self.driver.processes[pid].busy = True
        yield
        self.driver.processes[pid].busy = False

    def intact(self, pid):
        """The process runs and its memory holds what it held."""
        process = self.driver.processes[pid]
        return not process.ruined and process.state == 0

    def query(self, pid):
        """From now on a thread of the process asks whether its stream has done its work, every 10 ms."""
        self.driver.processes[pid].queries = True

    def lives(self, pid):
        return pid in self.driver.processes

    def lose_helper(self):
        """The helper dies between two calls: nobody notices."""

    def close(self):
        pass


class RealRig:
    def __init__(self, lock_dir, helper):
        self.helper = helper
        self.cuda = Cuda(helper)
        self.gpus = Gpus(helper, lock_dir=lock_dir)
        self.subjects = {}

    def start(self):
        subject = CudaSubject()
        self.subjects[subject.pid] = subject
        subject.run(f"x = torch.arange({MEMORY} // 4, dtype=torch.int32, device='cuda'); torch.cuda.synchronize()")
        return subject.pid

    def plain(self):
        subject = CudaSubject("")
        self.subjects[subject.pid] = subject
        return subject.pid

    @contextlib.contextmanager
    def busy(self, pid):
        # Spinning kernels of a second or so each, a few deep in the queue.
        self.subjects[pid].run("[torch.cuda._sleep(2_000_000_000) for _ in range(5)]")
        yield
        self.subjects[pid].run("torch.cuda.synchronize()")

    def intact(self, pid):
        return self.subjects[pid].run(
            "result = bool((x == torch.arange(len(x), dtype=x.dtype, device=x.device)).all())"
        )

    def query(self, pid):
        self.subjects[pid].run(QUERIES)

    def lives(self, pid):
        return bool(alive([pid]))

    def lose_helper(self):
        self.helper.close()

    def close(self):
        for subject in self.subjects.values():
            subject.close()


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.gpu)])
def driver(request, tmp_path):
    if request.param == "real":
        reason = request.getfixturevalue("gpu_reason")
        if reason:
            pytest.skip(reason=reason)
        rig = RealRig(tmp_path / "locks", request.getfixturevalue("helper"))
    else:
        rig = FakeRig(tmp_path / "locks")
    yield rig
    rig.close()


class TestContract:
    def test_it_is_available(self, driver):
        driver.cuda.available()

    def test_a_process_without_cuda(self, driver):
        pid = driver.plain()
        assert not driver.cuda.uses_cuda(pid)
        assert driver.cuda.state(pid) is CudaState.NONE
        assert driver.cuda.device_files(pid) == []
        assert driver.gpus.used_by(pid) == {}

    def test_a_process_with_cuda(self, driver):
        pid = driver.start()
        assert driver.cuda.uses_cuda(pid)
        assert driver.cuda.state(pid) is CudaState.RUNNING
        assert "/dev/nvidiactl" in driver.cuda.device_files(pid)
        uuid = driver.gpus.list()[0].uuid
        assert driver.gpus.used_by(pid)[uuid] >= MEMORY
        assert driver.gpus.processes(uuid)[pid] >= MEMORY

    @pytest.mark.alone
    def test_out_and_back(self, driver):
        pid = driver.start()
        uuid = driver.gpus.list()[0].uuid
        needs = driver.gpus.used_by(pid)
        free = driver.gpus.free(uuid)

        driver.cuda.lock(pid, 10)
        assert driver.cuda.state(pid) is CudaState.LOCKED
        driver.cuda.checkpoint(pid)
        assert driver.cuda.state(pid) is CudaState.CHECKPOINTED
        assert driver.cuda.uses_cuda(pid)
        assert driver.cuda.device_files(pid) == []
        assert driver.gpus.used_by(pid) == {}
        assert driver.gpus.free(uuid) >= free + MEMORY

        with driver.gpus.reservation(needs, 1):
            driver.cuda.restore(pid)
        assert driver.cuda.state(pid) is CudaState.LOCKED
        assert driver.gpus.used_by(pid)[uuid] >= MEMORY
        driver.cuda.unlock(pid)
        assert driver.cuda.state(pid) is CudaState.RUNNING
        assert driver.intact(pid)

    def test_verbs_in_the_wrong_state_change_nothing(self, driver):
        pid = driver.start()
        for verb in (driver.cuda.checkpoint, driver.cuda.restore, driver.cuda.unlock):
            with pytest.raises(StateError) as caught:
                verb(pid)
            assert caught.value.details["cuda_result"] == 401
            assert driver.cuda.state(pid) is CudaState.RUNNING
        driver.cuda.lock(pid, 10)
        with pytest.raises(StateError):
            driver.cuda.lock(pid, 10)
        driver.cuda.unlock(pid)
        assert driver.intact(pid)

    def test_a_lock_has_a_deadline_and_leaves_the_process_running(self, driver):
        pid = driver.start()
        with driver.busy(pid):
            with pytest.raises(CudaTimeout):
                driver.cuda.lock(pid, 0.2)
            assert driver.cuda.state(pid) is CudaState.RUNNING
        driver.cuda.lock(pid, 10)
        driver.cuda.unlock(pid)
        assert driver.intact(pid)

    def test_a_call_that_does_not_wait_at_the_lock_ends_a_suspended_process(self, driver):
        pid = driver.start()
        driver.query(pid)
        driver.cuda.lock(pid, 10)
        time.sleep(0.2)
        assert driver.lives(pid)
        driver.cuda.unlock(pid)
        assert driver.intact(pid)
        driver.cuda.lock(pid, 10)
        with contextlib.suppress(CudaError):  # it ends before the driver is done
            driver.cuda.checkpoint(pid)
        until(lambda: not driver.lives(pid), "it has ended")

    def test_a_locked_process_is_unlocked_by_another_helper(self, driver):
        pid = driver.start()
        driver.cuda.lock(pid, 10)
        driver.lose_helper()
        assert driver.cuda.state(pid) is CudaState.LOCKED
        driver.cuda.unlock(pid)
        assert driver.intact(pid)

    def test_no_such_process(self, driver):
        nobody = 2**22 + 1  # beyond the kernel's largest process id
        for question in (driver.cuda.state, driver.cuda.uses_cuda, driver.cuda.device_files, driver.cuda.unlock):
            with pytest.raises(CudaError, match="no process"):
                question(nobody)

    @pytest.mark.parametrize(("pid", "error"), [(True, TypeError), ("1", TypeError), (0, ValueError), (-1, ValueError)])
    def test_what_is_not_a_process_id(self, driver, pid, error):
        for question in (driver.cuda.state, driver.cuda.uses_cuda, driver.cuda.device_files, driver.cuda.checkpoint):
            with pytest.raises(error):
                question(pid)

    @pytest.mark.parametrize(
        ("timeout_s", "error"), [(True, TypeError), (None, TypeError), (0, ValueError), (-1, ValueError)]
    )
    def test_a_lock_without_a_deadline_is_not_to_be_had(self, driver, timeout_s, error):
        with pytest.raises(error):
            driver.cuda.lock(driver.plain(), timeout_s)

    def test_the_gpus(self, driver):
        gpus = driver.gpus.list()
        assert [gpu.index for gpu in gpus] == list(range(len(gpus)))
        for gpu in gpus:
            assert gpu.uuid.startswith("GPU-")
            assert 0 < gpu.free <= gpu.total
            assert not gpu.mig
            assert gpu.driver

    def test_a_gpu_that_is_not_there(self, driver):
        with pytest.raises(CudaError):
            driver.gpus.free("GPU-ffffffff-ffff-ffff-ffff-ffffffffffff")

    @pytest.mark.alone
    def test_too_little_gpu_memory(self, driver):
        gpu = driver.gpus.list()[0]
        with pytest.raises(GpuFull) as caught, driver.gpus.reservation({gpu.uuid: gpu.total + 1}, 1):
            pytest.fail("the body must not run")
        assert caught.value.details["needed"] == gpu.total + 1
        assert caught.value.details["free"] <= gpu.total
        with driver.gpus.reservation({gpu.uuid: 1}, 1):
            pass
