"""A driver that also suspends the doubles in processes: calls that do not wait at its lock end a suspended one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from harness import alive
from waiting import until

from jupyter_gpu_ckpt.testing.fake_cuda import FakeDriver, FakeProcess

#: Defines ``query(path)``, in a program that uses the double: threads make calls every 10 ms that do not wait while the
#: driver is locked, one each; the answers of the first are counted.  Each of them ends a suspended process, but for
#: that about free memory, which fails.  ``path``: see `SuspendingDriver`.
QUERIES = """
import ctypes, os, signal, threading, time
queries, errors, heard = [0], [], []
def query(path, libcuda="libcuda.so.1"):
    driver, context = ctypes.CDLL(libcuda), ctypes.c_void_p()
    stream, event, free, total = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    before = ctypes.c_void_p()
    driver.cuCtxGetCurrent(ctypes.byref(before))
    driver.cuCtxSetCurrent(context)
    assert driver.cuStreamCreate(ctypes.byref(stream), 1) == driver.cuEventCreate(ctypes.byref(event), 2) == 0
    assert driver.cuEventRecord(event, stream) == driver.cuCtxSetCurrent(before) == 0
    driver.double_suspend_file(path.encode())
    def run(name, arguments, count):
        driver.cuCtxSetCurrent(context)
        while True:
            if result := driver[name](*arguments):
                errors.append((name, result))
            queries[0] += count
            time.sleep(0.01)
    for at, (name, *arguments) in enumerate((
        ("cuStreamQuery", None),
        ("cuStreamSynchronize", stream),
        ("cuEventQuery", event),
        ("cuEventSynchronize", event),
        ("cuCtxSynchronize",),
        ("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total)),
    )):
        threading.Thread(target=run, args=(name, arguments, at == 0), daemon=True, name=name[:15]).start()
"""


class SuspendingDriver(FakeDriver):
    """A `FakeDriver` that suspends the doubles in processes, too, by a file for each."""

    def __init__(self, gpus: dict[str, int]) -> None:
        super().__init__(gpus)
        self._files: list[tuple[FakeProcess, Path]] = []

    def add_double(self, pid: int, path: Path) -> None:
        """Have the process's double, which watches ``path``, be suspended with the process."""
        self._files.append((self.processes[pid], path))

    def _cuda_checkpoint(self, pid: int) -> None:
        super()._cuda_checkpoint(pid)
        for path in self._files_of(pid):
            path.touch()
            until(lambda path=path: _said(path).exists() or not alive([pid]), "its memory is away")

    def _cuda_restore(self, pid: int, pairs: list[Any]) -> None:
        super()._cuda_restore(pid, pairs)
        for path in self._files_of(pid):
            path.unlink()
            until(lambda path=path: not _said(path).exists() or not alive([pid]), "its memory is back")

    def _files_of(self, pid: int) -> list[Path]:
        return [path for process, path in self._files if process is self.processes[pid]]


def _said(path: Path) -> Path:
    return Path(f"{path}-is-suspended")


def thread_states(pid: int) -> dict[str, set[str]]:
    """The letters of proc_pid_stat(5) of all threads, by their names; t: frozen."""
    found: dict[str, set[str]] = {}
    for task in os.listdir(f"/proc/{pid}/task"):
        line = Path(f"/proc/{pid}/task/{task}/stat").read_text()
        name, _, rest = line.partition("(")[2].rpartition(")")
        found.setdefault(name, set()).add(rest.split()[0])
    return found
