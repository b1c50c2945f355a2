"""Save points of real kernels, with real CRIU."""

from __future__ import annotations

import pytest

from jupyter_gpu_ckpt.errors import SavePointExists
from jupyter_gpu_ckpt.image import layout, save_point
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


TICKING = """
import threading, time
ticks = 0
def tick():
    global ticks
    while True:
        ticks += 1
        time.sleep(0.001)
threading.Thread(target=tick, daemon=True).start()
values, text = list(range(1000)), "x" * 5000
"""


async def test_a_save_leaves_the_kernel_running_and_a_save_point_with_a_summary(kernel, tmp_path):
    await kernel.run(LINKED)
    await kernel.run(TICKING)
    lifecycle, store = kernel.lifecycle, kernel.lifecycle.engine.store
    pid = lifecycle.capsule.host_pid
    point = lifecycle.save(SavePoint("one"))
    assert (kernel.state, lifecycle.capsule.host_pid, lifecycle.image) == ("running", pid, None)
    assert [event.step for event in kernel.steps.completed()] == [
        *("preflight", "drain", "quiesce", "cuda_suspend", "disconnect", "dump", "continue"),
        *("reserve", "cuda_resume", "unreserve", "connect", "thaw", "release", "keep"),
    ]
    store.check(point)
    assert (point.retired, (point.path / layout.CLAIM).exists()) == (True, False)
    facts = save_point.of_image(point)
    assert facts is not None
    assert facts.cell == 2
    assert [(each["name"], each["type"]) for each in facts.variables[:2]] == [("values", "list"), ("text", "str")]
    assert {"x", "linked", "ticks"} < {each["name"] for each in facts.variables}
    assert facts.variables[0]["bytes"] > 8000

    assert await kernel.run("was = ticks\nwhile ticks == was: pass\nprint(x, linked.read())") == "1 content"
    with pytest.raises(SavePointExists):
        lifecycle.save(SavePoint("one"))
    again = lifecycle.save(SavePoint("two"))  # its dump makes a link of the same name
    assert [image.id for image in store.images()] == [point.id, again.id]

    lifecycle.checkpoint()
    lifecycle.kernel.image = point
    assert await kernel.run("linked.seek(0); print(x, 'was' in dir(), linked.read())") == "1 False content"


async def test_a_suspended_kernel_is_saved_as_it_is(kernel):
    await kernel.run("x = 1")
    await kernel.provisioner.suspend()
    point = kernel.lifecycle.save(SavePoint("one"))
    assert kernel.state == "suspended"
    kernel.lifecycle.engine.store.check(point)
    assert await kernel.run("print(x)") == "1"
