"""A server of a user, run as a program: its kernels share GPUs by the real rules, and their memory is a file for each.

``python sharing_server.py '{"directory": ..., "memory": ..., "gpus": {UUID: bytes}, "kernels": [bytes], ...}'``.  Each
kernel runs cells that need the GPU for some time.  A line is printed for each end of a cell: ``kernel cell``.  Of the
product it has `GpuSharing`, `Exchange`, the policy and the records; its lifecycles and gates are doubles.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from jupyter_gpu_ckpt.cuda.gpus import Gpu
from jupyter_gpu_ckpt.errors import GpuCkptError
from jupyter_gpu_ckpt.kernel.gpu_sharing import GpuSharing
from jupyter_gpu_ckpt.kernel.worker import Worker
from jupyter_gpu_ckpt.lifecycle.context import Cancellation
from jupyter_gpu_ckpt.lifecycle.plans import State
from jupyter_gpu_ckpt.sharing.exchange import Exchange
from jupyter_gpu_ckpt.sharing.policy import Rules
from jupyter_gpu_ckpt.trace import StepEvent, notify

RULES = Rules(first_turn=0.3, turn=0.6, cut=0.15)


def occupied(memory: Path) -> dict[str, int]:
    """Return the bytes of each GPU that kernels of living processes have."""
    found: dict[str, int] = {}
    for path in memory.iterdir():
        if path.name.startswith(".") or not Path("/proc", path.name.partition("-")[0]).exists():
            continue
        try:
            gpu, bytes = path.read_text().split()
        except (FileNotFoundError, ValueError):
            continue
        found[gpu] = found.get(gpu, 0) + int(bytes)
    return found


class FileGpus:
    """GPUs whose memory is in files."""

    def __init__(self, directory: Path, memory: Path, gpus: dict[str, int]) -> None:
        self.lock_directory, self._memory, self._gpus = directory, memory, gpus

    def list(self) -> list[Gpu]:
        used = occupied(self._memory)
        return [
            Gpu(index, uuid, "Double", total, total - used.get(uuid, 0), used.get(uuid, 0), False, False, "")
            for index, (uuid, total) in enumerate(self._gpus.items())
        ]

    def free(self, uuid: str) -> int:
        return self._gpus[uuid] - occupied(self._memory).get(uuid, 0)

    def used_by(self, *kernels: int) -> dict[str, int]:
        found = {}
        for path in self._memory.glob(f"{os.getpid()}-{kernels[0]}"):
            gpu, bytes = path.read_text().split()
            found[gpu] = int(bytes)
        return found


class LifecycleDouble:
    """The moves of one kernel, whose number is its process id; it begins off the GPU."""

    def __init__(self, number: int, bytes: int, gpus: FileGpus, memory: Path, chance: random.Random) -> None:
        self.file = memory / f"{os.getpid()}-{number}"
        self._number, self._bytes, self._gpus, self._chance = number, bytes, gpus, chance
        self.home, self.trace = SimpleNamespace(kernel_id=f"k{number}"), SimpleNamespace(sinks=[])
        self.engine = SimpleNamespace(gpus=gpus, cuda=SimpleNamespace(uses_cuda=lambda pid: True))
        self.state, self.touched, self.on_state = State.OFF_GPU, 0, []
        capsule = SimpleNamespace(host_pid=number, other_processes=list, poll=lambda: None)
        self.kernel = SimpleNamespace(
            admission=None,
            capsule=capsule,
            require_capsule=lambda: capsule,
            engine=self.engine,
            cancellation=Cancellation(),
            saved=SimpleNamespace(cuda=True),
            fast_path=lambda: SimpleNamespace(touches=lambda: self.touched, wanted=lambda: 0),
        )
        self._home = next(iter(gpus._gpus))
        self.moving = threading.Lock()

    def resume(self) -> None:
        self.state = State.RESUMING
        try:
            admitted = self.kernel.admission.admit({self._home: self._bytes}, self._gpus.list(), elsewhere=True)
            self.kernel.admission.renew()
            (gpu,) = self.kernel.admission.participant.on
            assert gpu in admitted.values()
            with self.moving:
                draft = self.file.with_name(f".{self.file.name}")
                draft.write_text(f"{gpu} {self._bytes}")
                draft.rename(self.file)
                self._home = gpu
                time.sleep(self._chance.uniform(0.01, 0.05))
                self.kernel.saved.cuda, self.touched = False, 0
                self.state = State.RUNNING
        except GpuCkptError:
            self.state = State.OFF_GPU
            raise
        finally:
            self.kernel.admission.settle()

    def yield_gpu(self) -> None:
        self._emit("started")
        with self.moving:
            self.state = State.YIELDING
            time.sleep(self._chance.uniform(0.01, 0.05))
            self.file.unlink()
            self.kernel.saved.cuda, self.state = True, State.OFF_GPU
        self._emit("completed")

    def _emit(self, kind) -> None:
        notify(self.trace.sinks, StepEvent(kind, "cuda_suspend", self.home.kernel_id, time.time()))


class Kernel:
    """A kernel that runs cells, one after the other."""

    def __init__(self, number: int, bytes: int, exchange: Exchange, gpus: FileGpus, memory: Path, seed: int) -> None:
        self.chance = random.Random(seed * 100 + number)
        self.number = number
        self.lifecycle = LifecycleDouble(number, bytes, gpus, memory, self.chance)
        self.gate = SimpleNamespace(
            working=False, last_activity=0.0, print_notice=logging.getLogger(f"cell {number}").info
        )
        arguments = (self.lifecycle, self.gate, Worker(f"k{number}"), exchange)
        options = {"turns": True, "visible": None, "announces": False, "is_protected": lambda: False}
        self.sharing = GpuSharing(*arguments, **options, log=logging.getLogger("kernel"))

    def run(self, cells: int, seconds: float) -> None:
        for cell in range(cells):
            time.sleep(self.chance.uniform(0, 0.4))
            self.gate.working = True
            need = self.chance.uniform(0, 2 * seconds)
            while need > 0:
                with self.lifecycle.moving:
                    if self.lifecycle.state is State.RUNNING:
                        need -= 0.005
                    else:
                        self.lifecycle.touched = 1
                time.sleep(0.005)
            self.gate.working = False
            print(self.number, cell, flush=True)


def main() -> None:
    """Run all kernels; the process ends with the last cell and its standard input.  SIGUSR1: log its threads."""
    faulthandler.register(signal.SIGUSR1)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s: %(message)s")
    plan = json.loads(sys.argv[1])
    gpus = FileGpus(Path(plan["directory"]), Path(plan["memory"]), plan["gpus"])
    exchange = Exchange(gpus, RULES)
    kernels = [
        Kernel(number, bytes, exchange, gpus, Path(plan["memory"]), plan["seed"])
        for number, bytes in enumerate(plan["kernels"])
    ]
    threads = [threading.Thread(target=each.run, args=(plan["cells"], plan["seconds"])) for each in kernels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("done", flush=True)
    sys.stdin.read()  # idle kernels give their memory away
    for each in kernels:
        each.sharing.close()


if __name__ == "__main__":
    main()
