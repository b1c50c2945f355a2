"""GPUs, their free memory, and the mapping from old ones to new ones; no GPU needed."""

import os
import subprocess
import sys
import tempfile
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.cuda import gpu_locks
from jupyter_gpu_ckpt.cuda.checkpoint_api import Unavailable
from jupyter_gpu_ckpt.cuda.gpus import Gpus, gpu_mapping
from jupyter_gpu_ckpt.cuda.nvml import Nvml
from jupyter_gpu_ckpt.errors import CudaError, GpuFull, HostError
from jupyter_gpu_ckpt.testing.fake_cuda import FakeDriver, FakeGpus

GIB = 2**30
A, B, C, D = (f"GPU-00000000-0000-0000-0000-00000000000{letter}" for letter in "abcd")


class TestMapping:
    @pytest.mark.parametrize(
        ("saved", "node", "wanted", "mapping"),
        [
            pytest.param([A], [A], None, None, id="same node"),
            pytest.param([A, B], [B, A], None, None, id="same node, other order"),
            pytest.param([A, B], [A, B], {A: A}, None, id="wanted where it is"),
            pytest.param([A], [A, B, C], None, None, id="GPUs were added"),
            pytest.param([A, B], [A, B], {A: B}, {A: B, B: A}, id="the other one: swap"),
            pytest.param([A, B, C], [A, B, C], {A: C}, {A: C, B: B, C: A}, id="swap two of three"),
            pytest.param([A, B, C], [A, B, C], {A: B, B: C}, {A: B, B: C, C: A}, id="round"),
            pytest.param([A], [B], None, {A: B}, id="another node"),
            pytest.param([A, B], [C, D], None, {A: C, B: D}, id="another node, in order"),
            pytest.param([A, B], [C, D], {A: D}, {A: D, B: C}, id="another node, wanted"),
            pytest.param([A, B], [B, C], None, {A: C, B: B}, id="one GPU was replaced"),
            pytest.param([A, B], [B, C], {A: B}, {A: B, B: C}, id="one was replaced, wanted"),
            pytest.param([], [A], None, None, id="no GPU saved"),
        ],
    )
    def test_it_covers_every_gpu_once(self, saved, node, wanted, mapping):
        assert gpu_mapping(saved, node, wanted) == mapping
        if mapping:
            assert list(mapping) == saved
            assert len(set(mapping.values())) == len(saved)

    @pytest.mark.parametrize(
        ("saved", "node", "wanted"),
        [
            ([A], [A], {B: A}),
            ([A], [A], {A: B}),
            ([A, B], [A, B], {A: B, B: B}),
            ([A, A], [A, B], None),
            ([A], [B, B], None),
        ],
    )
    def test_nonsense(self, saved, node, wanted):
        with pytest.raises(ValueError, match="GPU"):
            gpu_mapping(saved, node, wanted)

    def test_a_smaller_node(self):
        with pytest.raises(CudaError) as caught:
            gpu_mapping([A, B], [C])
        assert caught.value.details == {"saved": 2, "node": 1}


@pytest.fixture
def gpus(tmp_path):
    return FakeGpus(FakeDriver({A: 10 * GIB, B: 10 * GIB}), tmp_path / "locks")


class TestReservation:
    def test_the_lock_is_held_during_the_body_only(self, gpus, tmp_path):
        other = FakeGpus(gpus.driver, tmp_path / "locks")
        with gpus.reservation({A: GIB}, 1):
            with pytest.raises(GpuFull) as caught, other.reservation({A: GIB}, 0):
                pytest.fail("the body must not run")
            assert caught.value.details == {"uuid": A, "locked": True}
            with other.reservation({B: GIB}, 0):
                pass
        with other.reservation({A: GIB}, 0):
            pass

    def test_an_error_in_the_body_frees_the_lock(self, gpus):
        with pytest.raises(ZeroDivisionError), gpus.reservation({A: GIB}, 0):
            raise ZeroDivisionError
        with gpus.reservation({A: GIB}, 0):
            pass

    def test_too_little_on_one_of_two(self, gpus):
        gpus.driver.start({B: 9 * GIB})
        with pytest.raises(GpuFull) as caught, gpus.reservation({A: GIB, B: 2 * GIB}, 0):
            pytest.fail("the body must not run")
        assert caught.value.details == {"uuid": B, "needed": 2 * GIB, "free": GIB}
        assert "2.00 GiB" in caught.value.message
        with gpus.reservation({A: GIB, B: GIB}, 0):
            pass

    def test_two_processes_that_want_both_gpus_do_not_deadlock(self, gpus):
        together = threading.Barrier(2, timeout=60)

        def take(needs):
            together.wait()
            for _ in range(20):
                with gpus.reservation(needs, 20):
                    pass
            return True

        with ThreadPoolExecutor(2) as pool:
            assert all(pool.map(take, [{A: 1, B: 1}, {B: 1, A: 1}]))

    def test_free_memory_is_read_under_the_lock(self, gpus):
        """Each of three takes 4 GiB of 10 when that is free: the third must not."""

        def restore(_):
            try:
                with gpus.reservation({A: 4 * GIB}, 20):
                    gpus.driver.start({A: 4 * GIB})
                    return True
            except GpuFull:
                return False

        with ThreadPoolExecutor(3) as pool:
            assert sorted(pool.map(restore, range(3))) == [False, True, True]

    def test_a_process_that_ends_frees_its_lock(self, gpus, tmp_path):
        code = "import sys; from pathlib import Path; from jupyter_gpu_ckpt.cuda import gpu_locks\n"
        code += (
            "with gpu_locks.locked(Path(sys.argv[1]), [sys.argv[2]], 5): print('held', flush=True); sys.stdin.read()"
        )
        command = [sys.executable, "-c", code, str(tmp_path / "locks"), A]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
            assert holder.stdout.readline() == b"held\n"
            with pytest.raises(GpuFull), gpus.reservation({A: 1}, 0.1):
                pytest.fail("the body must not run")
            holder.kill()
            holder.wait()
            with gpus.reservation({A: 1}, 5):
                pass

    @pytest.mark.parametrize(("needs", "error"), [({A: True}, TypeError), ({A: 1.5}, TypeError), ({A: -1}, ValueError)])
    def test_what_is_not_a_number_of_bytes(self, gpus, needs, error):
        with pytest.raises(error), gpus.reservation(needs, 0):
            pytest.fail("the body must not run")

    def test_no_needs(self, gpus):
        with gpus.reservation({}, 0):
            assert not gpus.lock_directory.exists()


class TestLockFiles:
    def test_modes_do_not_depend_on_the_umask(self, tmp_path):
        before = os.umask(0o077)
        try:
            with gpu_locks.locked(tmp_path / "locks", [A], 0):
                pass
        finally:
            os.umask(before)
        assert (tmp_path / "locks").stat().st_mode & 0o7777 == 0o1777
        assert (tmp_path / "locks" / f"{A}.lock").stat().st_mode & 0o7777 == 0o644

    @pytest.mark.skipif(os.geteuid() != 0, reason="needs root: run the tests as root too")
    def test_two_users_share_a_lock(self):
        """In a sticky directory, where ``fs.protected_regular`` applies; the first user created the file."""

        def as_nobody(directory):
            # A fork and no exec: the interpreter may lie where only root can read it.
            child = os.fork()
            if child == 0:
                status = 3
                try:
                    os.setgroups([])
                    os.setresgid(65534, 65534, 65534)
                    os.setresuid(65534, 65534, 65534)
                    with gpu_locks.locked(directory, [A], 0.1):
                        status = 0
                except GpuFull:
                    status = 1
                finally:
                    os._exit(status)
            return {0: "held", 1: "full"}[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]

        with tempfile.TemporaryDirectory() as world:
            os.chmod(world, 0o1777)
            locks = Path(world, "locks")
            with gpu_locks.locked(locks, [A], 0):
                assert as_nobody(locks) == "full"
            assert as_nobody(locks) == "held"
            (locks / f"{A}.lock").unlink()
            assert as_nobody(locks) == "held"
            assert (locks / f"{A}.lock").stat().st_uid == 65534
            with gpu_locks.locked(locks, [A], 0):
                assert as_nobody(locks) == "full"

    def test_a_file_that_was_removed_is_not_locked_any_more(self, tmp_path):
        with gpu_locks.locked(tmp_path, [A], 0):
            (tmp_path / f"{A}.lock").unlink()
            with gpu_locks.locked(tmp_path, [A], 0), pytest.raises(GpuFull), gpu_locks.locked(tmp_path, [A], 0):
                pytest.fail("locked twice")

    def test_a_link_or_a_directory_is_no_lock_file(self, tmp_path):
        (tmp_path / "victim").write_text("")
        (tmp_path / f"{A}.lock").symlink_to(tmp_path / "victim")
        (tmp_path / f"{B}.lock").mkdir()
        os.mkfifo(tmp_path / f"{C}.lock")
        for uuid in (A, B, C):
            with pytest.raises(HostError), gpu_locks.locked(tmp_path, [uuid], 0):
                pytest.fail("locked something else")

    def test_a_link_is_no_lock_directory(self, tmp_path):
        (tmp_path / "locks").symlink_to(tmp_path)
        with pytest.raises(HostError), gpu_locks.locked(tmp_path / "locks", [A], 0):
            pytest.fail("locked elsewhere")

    def test_no_name_leads_out_of_the_directory(self, tmp_path):
        with pytest.raises(ValueError, match="not a GPU UUID"), gpu_locks.locked(tmp_path, ["../x"], 0):
            pytest.fail("locked elsewhere")


class NvmlError(Exception):
    def __init__(self, value):
        self.value = value


def nvml(**changes):
    """A stand-in for pynvml with one GPU."""
    module = types.ModuleType("pynvml")
    module.NVMLError = NvmlError
    module.NVML_ERROR_NOT_SUPPORTED, module.NVML_ERROR_DRIVER_NOT_LOADED = 3, 9
    module.NVML_ERROR_LIBRARY_NOT_FOUND, module.NVML_ERROR_FUNCTION_NOT_FOUND = 12, 13
    module.NVML_ERROR_NO_PERMISSION, module.NVML_ERROR_NOT_FOUND = 4, 6
    module.NVML_DEVICE_MIG_ENABLE = 1
    functions = {
        "Init": lambda: None,
        "SystemGetDriverVersion": lambda: "580.1",
        "SystemGetCudaDriverVersion": lambda: 13020,
        "DeviceGetCount": lambda: 1,
        "DeviceGetHandleByIndex": lambda index: index,
        "DeviceGetHandleByUUID": lambda uuid: 0,
        "DeviceGetMemoryInfo": lambda handle: types.SimpleNamespace(total=10, free=7, used=3),
        "DeviceGetUUID": lambda handle: A,
        "DeviceGetName": lambda handle: "H",
        "DeviceGetMigMode": lambda handle: [0, 1],
        "DeviceGetMPSComputeRunningProcesses": lambda handle: [],
        "DeviceGetComputeRunningProcesses": lambda handle: [types.SimpleNamespace(pid=5, usedGpuMemory=3)],
        "DeviceGetGraphicsRunningProcesses": lambda handle: [types.SimpleNamespace(pid=6, usedGpuMemory=None)],
    }
    for name, function in (functions | changes).items():
        setattr(module, f"nvml{name}", function)
    return module


def fails(number):
    def call(*args):
        raise NvmlError(number)

    return call


class TestNvml:
    def ask(self, monkeypatch, **changes):
        monkeypatch.setitem(sys.modules, "pynvml", nvml(**changes))
        return Nvml()

    def test_a_gpu(self, monkeypatch):
        (gpu,) = self.ask(monkeypatch).gpus()
        expected = {"index": 0, "uuid": A, "name": "H", "total": 10, "free": 7, "used": 3}
        assert gpu == expected | {"mig": False, "mps": False, "driver": "580.1", "cuda": "13.2"}

    @pytest.mark.parametrize("number", [9, 12])
    def test_no_driver_no_gpus(self, monkeypatch, number):
        module = self.ask(monkeypatch, Init=fails(number))
        assert module.gpus() == []
        with pytest.raises(Unavailable):
            module.free(A)

    def test_a_driver_that_does_not_fit_is_an_error(self, monkeypatch):
        with pytest.raises(NvmlError):
            self.ask(monkeypatch, Init=fails(18)).gpus()

    def test_mig_and_mps(self, monkeypatch):
        assert self.ask(monkeypatch, DeviceGetMigMode=lambda handle: [1, 1]).gpus()[0]["mig"]
        assert not self.ask(monkeypatch, DeviceGetMigMode=fails(3)).gpus()[0]["mig"]
        assert self.ask(monkeypatch, DeviceGetMPSComputeRunningProcesses=lambda handle: [1]).gpus()[0]["mps"]
        assert self.ask(monkeypatch, DeviceGetMPSComputeRunningProcesses=fails(3)).gpus()[0]["mps"] is None

    def test_processes(self, monkeypatch):
        assert self.ask(monkeypatch).processes(A) == [(5, 3), (6, None)]
        assert self.ask(monkeypatch).users() == [(A, [(5, 3), (6, None)])]

    @pytest.mark.parametrize("name", ["nvidia-cuda-mps", "python"])
    def test_clients_of_mps_are_listed_where_its_server_is(self, monkeypatch, name):
        """Its name is longer than the 15 bytes that Linux keeps."""
        monkeypatch.setattr(procfs, "stat", lambda pid: types.SimpleNamespace(name=name if pid == 5 else "python"))
        clients = [types.SimpleNamespace(pid=7, usedGpuMemory=2)]
        asked = self.ask(monkeypatch, DeviceGetMPSComputeRunningProcesses=lambda handle: clients)
        expected = [(5, 3), (6, None), *([(7, 2)] if name != "python" else [])]
        assert asked.processes(A) == expected
        assert asked.users() == [(A, expected)]
        assert asked.mps_clients(A) == [7]

    def test_utilisation(self, monkeypatch):
        rates = types.SimpleNamespace(gpu=42, memory=7)
        assert self.ask(monkeypatch, DeviceGetUtilizationRates=lambda handle: rates).utilisation(A) == 42

    def test_who_computes(self, monkeypatch):
        def samples(handle, since_us):
            sample = types.SimpleNamespace
            return [sample(pid=5, timeStamp=since_us + 1, smUtil=30), sample(pid=0, timeStamp=0, smUtil=99)]

        assert self.ask(monkeypatch, DeviceGetProcessUtilization=samples).process_utilisation(A, 1000) == [(5, 30)]

    @pytest.mark.parametrize(("number", "answer"), [(6, []), (3, None), (4, None)])
    def test_nobody_computed_is_another_answer_than_cannot_say(self, monkeypatch, number, answer):
        asked = self.ask(monkeypatch, DeviceGetProcessUtilization=fails(number))
        assert asked.process_utilisation(A, 0) == answer

    def test_other_refusals_are_errors(self, monkeypatch):
        with pytest.raises(NvmlError):
            self.ask(monkeypatch, DeviceGetProcessUtilization=fails(15)).process_utilisation(A, 0)


class TestUtilisation:
    def test_by_process(self, gpus):
        training = gpus.driver.start({A: GIB}, computing=80)
        gpus.driver.start({A: GIB})
        assert gpus.process_utilisation(A, 0.0) == {training: 80}
        assert gpus.process_utilisation(B, 0.0) == {}
        assert (gpus.utilisation(A), gpus.utilisation(B)) == (80, 0)

    def test_the_highest_of_several_samples(self, gpus, monkeypatch):
        monkeypatch.setattr(gpus, "_call", lambda op, **args: [[5, 1], [5, 60], [5, 2]])
        assert gpus.process_utilisation(A, 0.0) == {5: 60}

    def test_where_nvml_gives_no_memory(self, gpus):
        gpus.driver.start({A: GIB}, computing=80)
        gpus.driver.hides_processes = True
        assert gpus.process_utilisation(A, 0.0) is None
        assert gpus.utilisation(A) == 80


def test_memory_unknown_to_nvml_does_not_count_as_none(tmp_path, monkeypatch):
    gpus = FakeGpus(FakeDriver({A: GIB}), tmp_path)
    monkeypatch.setattr(gpus, "_call", lambda op: [[A, [[5, None]]]])
    with pytest.raises(CudaError, match="how much"):
        gpus.used_by(5)
    assert gpus.used_by(6) == {}


def test_what_processes_use_of_all_gpus_is_one_request(gpus, monkeypatch):
    """Of several that take milliseconds each, a suspend would make a dozen."""
    one, other = gpus.driver.start({A: GIB, B: 2 * GIB}), gpus.driver.start({B: GIB})
    requests, call = [], gpus.driver.call
    monkeypatch.setattr(gpus.driver, "call", lambda op, **args: (requests.append(op), call(op, **args))[1])
    assert gpus.used_by(one, other) == {A: GIB, B: 3 * GIB}
    assert requests == ["nvml.users"]


def test_a_process_listed_twice_counts_once(tmp_path, monkeypatch):
    gpus = FakeGpus(FakeDriver({A: GIB}), tmp_path)
    monkeypatch.setattr(gpus, "_call", lambda op, **args: [[5, 10], [5, 12], [6, None], [6, 4], [7, 3], [7, None]])
    assert gpus.processes(A) == {5: 12, 6: 4, 7: 3}


def test_this_host():
    """Through the real helper: a host without an NVIDIA driver has no GPUs, and that is no error."""
    with Gpus() as gpus:
        for gpu in gpus.list():
            assert gpu.total >= gpu.free
