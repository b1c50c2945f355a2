"""Count what the library has moved in the driver's fake, which knows only what tests have given a process."""

from __future__ import annotations

from jupyter_gpu_ckpt.cuda.fastpath import FastPath


class Accounting(FastPath):
    """The fast path of a process of `FakeDriver` with memory on one GPU: it has less while the library has some."""

    def swap_out(self, **how) -> int:
        moved = super().swap_out(**how)
        self._cuda.driver.processes[self._pid].moved = moved  # type: ignore[attr-defined]
        return moved

    def swap_in(self, **how) -> None:
        super().swap_in(**how)
        self._cuda.driver.processes[self._pid].moved = 0  # type: ignore[attr-defined]
