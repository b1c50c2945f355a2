"""Host memory that is taken before the blocks leave, and given back where they do not."""

from __future__ import annotations

from pathlib import Path

import pytest
from fast_program import MIB, SIZES
from waiting import until

from jupyter_gpu_ckpt.engine import fastpath

PLENTY = 1 << 40
FREE = "everywhere.cudaFree(held.pop()[0])"
MORE = """exec('''
address = ctypes.c_void_p()
assert everywhere.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(9 << 20)) == 0
ctypes.memset(address, len(held) + 1, 9 << 20)
held.append((address, 9 << 20))
''', globals())"""


def prepared(kernel) -> bool:
    return fastpath.BLOCKS in Path(f"/proc/{kernel.pid}/maps").read_text()


@pytest.mark.parametrize("meanwhile", [None, FREE, MORE], ids=["the same", "fewer", "more"])
def test_what_leaves_takes_what_is_prepared(kernel, meanwhile):
    for _ in range(2):
        kernel.path.prepare(PLENTY)
        assert prepared(kernel)
        if meanwhile:
            kernel.ask(meanwhile)
        total = kernel.path.amounts().bytes
        kernel.lock()
        assert kernel.leave() == total
        assert prepared(kernel)
        kernel.come_back()
        kernel.runs_on()
        until(lambda: not prepared(kernel), "it is given back")


def test_a_host_with_too_little_memory(kernel):
    kernel.path.prepare(sum(SIZES))
    assert not prepared(kernel)
    kernel.path.prepare(sum(SIZES) + 100 * MIB)
    assert prepared(kernel)


def test_nobody_came_for_it(kernel):
    kernel.path.prepare(PLENTY)
    kernel.path.prepare(PLENTY)
    until(lambda: not prepared(kernel), "its owner may have ended, and it is given back")
    kernel.runs_on()


def test_an_image_has_nothing_of_it(kernel):
    """Its threads could not be parked, say, and all is the driver's now."""
    kernel.path.prepare(PLENTY)
    kernel.ask("open('/proc/self/comm', 'w').write('cuda-of-a-user')")
    kernel.lock()
    assert kernel.leave() == 0
    assert prepared(kernel)
    assert kernel.path.blocks() is None
    assert not prepared(kernel)
    kernel.come_back()
    kernel.runs_on()
