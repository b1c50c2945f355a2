"""The calls of the driver's checkpoint functions, on a stand-in for cuda-bindings."""

import sys
import types

import pytest

from jupyter_gpu_ckpt.cuda import checkpoint_api
from jupyter_gpu_ckpt.cuda.checkpoint_api import CudaDriver, DriverRefused, Unavailable


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
    for name in checkpoint_api.NEEDED_SYMBOLS:
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
