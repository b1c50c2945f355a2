"""Who offers CUDA 13.4's custom storage; that the real driver tells it too is in the contract suite."""

from types import SimpleNamespace

import pytest

from jupyter_gpu_ckpt.engine.custom_storage import NEEDED_SYMBOLS, CustomStorage, look
from jupyter_gpu_ckpt.testing.fake_cuda import FakeCuda, FakeDriver
from jupyter_gpu_ckpt.testing.fake_helper import Before

SUCCESS, INVALID_VALUE, NOT_SUPPORTED = 0, 1, 801


def api(version, lacks="", answer=(SUCCESS, 0x7F00, 0)):
    """``cuda.bindings.driver`` of a driver of this version, without one name; ``answer``: that of cuGetProcAddress."""

    def find(name, asked, flags):
        assert (name, flags) == (b"cuCheckpointOperationComplete", 0)
        return answer if asked <= version else (INVALID_VALUE, None, None)

    names = {name: object for name in NEEDED_SYMBOLS if name != lacks}
    return SimpleNamespace(cuDriverGetVersion=lambda: (SUCCESS, version), cuGetProcAddress=find, **names)


@pytest.mark.parametrize(
    ("there", "cuda", "reason"),
    [
        (api(13000), "13.0", "driver-too-old"),
        (api(13030), "13.3", "driver-too-old"),
        (api(13040, answer=(SUCCESS, 0, 1)), "13.4", "function-missing"),
        (api(13040, answer=(NOT_SUPPORTED, None, None)), "13.4", "function-missing"),
        (api(13040, lacks="cuCheckpointOperationComplete"), "13.4", "binding-too-old"),
        (api(13040, lacks="CUcheckpointCustomStorageInfo"), "13.4", "binding-too-old"),
        (api(13040), "13.4", ""),
        (api(14000), "14.0", ""),
    ],
)
def test_who_offers_it(there, cuda, reason):
    assert look(there) == CustomStorage(cuda, reason)
    assert look(there).offered is (not reason)


def test_drivers_before_it_are_not_asked_for_a_function():
    old = api(12080)
    del old.cuGetProcAddress
    assert look(old) == CustomStorage("12.8", "driver-too-old")


def test_the_answer_comes_through_a_helper_process():
    driver = FakeDriver({})
    helper = Before(driver)
    try:
        for offer in (CustomStorage("13.4"), CustomStorage("13.5", "binding-too-old")):
            driver.custom_storage = offer
            assert FakeCuda(driver, helper).custom_storage() == offer
    finally:
        helper.close()
