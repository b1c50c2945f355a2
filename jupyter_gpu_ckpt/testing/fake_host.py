"""A host with fake GPUs, for tests of whole servers: everything else about them is real.

In a ``jupyter_server_config.py``::

    from jupyter_gpu_ckpt.testing.fake_host import install
    install({"GPU-a": 8 << 30}, image_dir)

A kernel of that server has device memory once it has run the cell `allocation_cell`; the memory goes with it through
suspend, dump and restore, as in the driver.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .. import procfs
from ..criu.criu import Criu
from ..criu.install import dotted, find
from ..cuda.helper_client import Caller
from ..image.store import Store
from ..kernel.engine import use_engine
from ..lifecycle.context import Engine
from .fake_cuda import CHECKPOINTED, RUNNING, FakeCuda, FakeDriver, FakeGpus, FakeProcess

_MEMORY = "fake-device-memory.json"


def allocation_cell(memory: Mapping[str, int]) -> str:
    """Return the code of a cell that gives its kernel this much device memory (bytes by GPU UUID)."""
    return (
        "import ipykernel.connect, pathlib\n"
        "home = pathlib.Path(ipykernel.connect.get_connection_file()).parent\n"
        f"size = (home / {_MEMORY!r}).write_text({json.dumps(memory)!r})"
    )


class FakeHost(FakeDriver):
    """A driver that recognises kernels by their connection files, in whatever process they are now."""

    def __init__(self, gpus: Mapping[str, int]) -> None:
        super().__init__(gpus)
        #: By their directories; with what a cell has allocated, as it was last seen.
        self._kernels: dict[Path, tuple[int, FakeProcess, str]] = {}
        #: Processes that are branches of one that has run on in that directory.
        self._branches: set[int] = set()

    def call(self, op: str, *, lane: int | None = None, timeout_s: float, **args: Any) -> Any:
        """Called from the facades."""
        for pid in [pid for pid in self.processes if not Path(f"/proc/{pid}").exists()]:
            self.processes.pop(pid, None)
        return super().call(op, lane=lane, timeout_s=timeout_s, **args)

    def track(self, pid: int) -> None:
        """Know the process ``pid``, with the state its kernel had before a dump."""
        home = _home(pid)
        with self._guard:
            if pid in self._branches & self.processes.keys():
                return
            known = self._kernels.get(home) if home is not None else None
            if known is not None and known[0] != pid and known[1].state != CHECKPOINTED and _lives(known[0]):
                state = CHECKPOINTED if known[1].cuda else RUNNING
                self._branches.add(pid)
                self.processes[pid] = FakeProcess(json.loads(known[2] or "{}"), cuda=known[1].cuda, state=state)
                return
            if known is None or (known[0] != pid and known[1].state != CHECKPOINTED):
                known = (pid, FakeProcess(cuda=False), "")
            _, process, seen = known
            if home is not None and process.state != CHECKPOINTED and (home / _MEMORY).exists():
                text = (home / _MEMORY).read_text()
                if text != seen:  # else it may be on another GPU since
                    process.memory, process.cuda, seen = json.loads(text), True, text
            if home is not None:
                self._kernels[home] = (pid, process, seen)
            self.processes[pid] = process


class _Cuda(FakeCuda):
    driver: FakeHost

    def _read(self, pid: int, name: str) -> str:
        self.driver.track(pid)
        return super()._read(pid, name)


def _lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return procfs.stat(pid).state not in "ZX"
    return False


def _home(pid: int) -> Path | None:
    """Return the runtime directory of the kernel with this ``pid``."""
    try:
        arguments = procfs.arguments(pid)
    except OSError:
        return None
    files = [Path(argument) for argument in arguments if argument.endswith("/connection.json")]
    if not files or arguments == _arguments_of_parent(pid):  # a forked child has its arguments
        return None
    return files[0].parent


def _arguments_of_parent(pid: int) -> tuple[str, ...]:
    with contextlib.suppress(OSError):
        return procfs.arguments(procfs.stat(pid).parent)
    return ()


def install(gpus: Mapping[str, int], image_dir: Path, helper: Callable[[FakeHost], Caller] | None = None) -> FakeHost:
    """Give this process's kernels a host with these GPUs (total bytes by UUID).

    ``helper`` makes the driver's caller, for instance a `fake_helper.FakeHelper`; else the driver is called directly.
    """
    driver, binary = FakeHost(gpus), find()
    caller: Caller = helper(driver) if helper is not None else driver
    cards = FakeGpus(driver, image_dir.parent / "gpu-locks", caller)
    use_engine(Engine(Criu(binary.argv), dotted(binary.version), _Cuda(driver, caller), cards, Store(image_dir)))
    return driver
