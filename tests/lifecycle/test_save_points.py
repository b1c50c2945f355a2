"""Save points of real kernels, with real CRIU."""

from __future__ import annotations

from jupyter_gpu_ckpt.image.save_point import SavePoint

#: A file that is open under a name that was deleted, while it has another: CRIU makes a link of it.
LINKED = """
import os
x = 1
with open("first", "w") as file: file.write("content")
os.link("first", "second")
linked = open("first"); os.unlink("first")
"""


async def test_a_kernel_comes_back_from_its_save_point_as_often_as_it_is_wanted(kernel, tmp_path):
    await kernel.run(LINKED)
    lifecycle = kernel.lifecycle
    point = lifecycle.checkpoint(SavePoint("one"))
    assert not point.retired, "the kernel sleeps in it"
    assert await kernel.run("print(x); x = 2") == "1"
    await kernel.settled("running")
    assert (point.path.exists(), point.retired) == (True, True)
    for _ in range(2):  # IPython has saved lines of these numbers before
        asleep = lifecycle.checkpoint()
        lifecycle.kernel.image = point
        assert await kernel.run("print(x, linked.read()); x = 3") == "1 content"
        await kernel.settled("running")
        lifecycle.engine.store.check(point)
        lifecycle.engine.store.remove(asleep)
    assert lifecycle.engine.store.images() == [point]
    lifecycle.engine.store.remove(point)
    assert [path.name for path in tmp_path.glob("*link_remap*")] == []
