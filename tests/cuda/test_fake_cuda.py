"""Additions of the fake driver to the contract: how the real one destroys a process, and levers for other tests.

The destructions were measured on the real driver; ``tests/gpu`` measures them again.
"""

import pytest

from jupyter_gpu_ckpt.cuda.cuda import CudaState
from jupyter_gpu_ckpt.errors import CudaError, HelperGone, UnsupportedCuda
from jupyter_gpu_ckpt.testing.fake_cuda import FakeCuda, FakeDriver, FakeGpus

A = "GPU-00000000-0000-0000-0000-00000000000a"
B = "GPU-00000000-0000-0000-0000-00000000000b"


@pytest.fixture
def driver():
    return FakeDriver({A: 100, B: 100})


@pytest.fixture
def cuda(driver):
    return FakeCuda(driver)


@pytest.fixture
def away(driver, cuda):
    """A suspended process with 60 bytes on A."""
    pid = driver.start({A: 60})
    cuda.lock(pid, 1)
    cuda.checkpoint(pid)
    return pid


def test_too_little_memory_ruins_for_ever(driver, cuda, away):
    hog = driver.start({A: 50})
    with pytest.raises(CudaError) as caught:
        cuda.restore(away)
    assert caught.value.details["cuda_result"] == 2
    driver.remove(hog)
    with pytest.raises(CudaError) as caught:
        cuda.restore(away)
    assert caught.value.details["cuda_result"] == 304


def test_a_partial_mapping_ruins_for_ever(cuda, away):
    with pytest.raises(CudaError) as caught:
        cuda.restore(away, {A: B})
    assert caught.value.details["cuda_result"] == 1
    with pytest.raises(CudaError):
        cuda.restore(away)


def test_a_whole_mapping_moves(driver, cuda, away, tmp_path):
    cuda.restore(away, {A: B, B: A})
    cuda.unlock(away)
    assert FakeGpus(driver, tmp_path).used_by(away) == {B: 60}


def test_a_suspended_process_is_dumped_and_restored(driver, cuda, away):
    image = driver.remove(away)
    with pytest.raises(CudaError, match="no process"):
        cuda.state(away)
    driver.add(image, away)
    assert cuda.state(away) is CudaState.CHECKPOINTED
    cuda.restore(away)
    cuda.unlock(away)


def test_levers(driver, cuda):
    for trait in ("mps", "profiled"):
        with pytest.raises(UnsupportedCuda):
            cuda.lock(driver.start({A: 1}, **{trait: True}), 1)
    pid = driver.start({A: 1}, unsupported=True)
    cuda.lock(pid, 1)
    with pytest.raises(UnsupportedCuda):
        cuda.checkpoint(pid)
    with pytest.raises(CudaError, match="UNKNOWN"):
        cuda.checkpoint(pid)
    pid = driver.start({A: 1})
    driver.crash_in.add("cuda.lock")
    with pytest.raises(HelperGone):
        cuda.lock(pid, 1)
    cuda.lock(pid, 1)
    driver.refuse["cuda.checkpoint"] = 999
    with pytest.raises(CudaError):
        cuda.checkpoint(pid)
    assert driver.calls.count(("cuda.lock", pid)) == 2


def test_a_process_that_only_uses_nvml(driver, cuda):
    pid = driver.start(nvml=True)
    assert cuda.state(pid) is CudaState.NONE
    assert cuda.device_files(pid) == ["/dev/nvidia0", "/dev/nvidiactl"]
