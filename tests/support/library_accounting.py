"""What the library has moved, in the accounts of the driver's fake: which sees only what tests have given a process."""

from __future__ import annotations

from jupyter_gpu_ckpt.cuda.fastpath import FastPath


class Accounting(FastPath):
    """The fast path of a process of `FakeDriver` with memory on one GPU: it has less while the library has some."""

    def swap_out(self, **how) -> int:
        before = self.swapped_out()
        moved = super().swap_out(**how)
        if moved and not before:
            process = self._cuda.driver.processes[self._pid]  # type: ignore[attr-defined]
            process.memory = {uuid: bytes - moved for uuid, bytes in process.memory.items()}
        return moved

    def swap_in(self, **how) -> None:
        moved = self.amounts().swapped_out if self.swapped_out() else 0
        super().swap_in(**how)
        process = self._cuda.driver.processes[self._pid]  # type: ignore[attr-defined]
        process.memory = {uuid: bytes + moved for uuid, bytes in process.memory.items()}
