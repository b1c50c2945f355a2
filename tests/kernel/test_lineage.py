"""Lineage: each save point descends from the last one that was saved, gone back to, or branched from."""

from __future__ import annotations

import pytest
from harness import Notebook, branch_of, notebook

from jupyter_gpu_ckpt.image import save_point
from jupyter_gpu_ckpt.image.save_point import SavePoint

pytestmark = pytest.mark.asyncio(loop_scope="function")


def lines(kernel: Notebook) -> dict[str, str]:
    """The names of the kernel's save points, without times, and of what they descend from: "" without, "?" if gone."""
    images = kernel.lifecycle.engine.store.images()
    named = {image.id: point.name for image in images if (point := save_point.of_image(image)) is not None}
    own = save_point.of_kernel(images, kernel.provisioner.kernel_id).values()
    facts = [save_point.described(image) for image in own]
    return {
        each["name"].partition(" 20")[0]: (named.get(each["parent"], "?") if each["parent"] else "").partition(" 20")[0]
        for each in facts
    }


async def test_a_line_a_fork_and_an_undo(kernel):
    provisioner = kernel.provisioner
    await kernel.run("x = 1")
    await provisioner.save("one")
    await provisioner.save("two")
    assert lines(kernel) == {"one": "", "two": "one"}
    before = await provisioner.back("one")
    assert lines(kernel) == {"one": "", "two": "one", "before going back": "two"}
    three = await provisioner.save("three")
    assert lines(kernel)["three"] == "one", "a fork"
    point = save_point.of_image(before)
    assert point is not None
    await kernel.run("x = 2")
    undone = await provisioner.back(point.name)
    assert save_point.described(undone)["parent"] == three.id
    await provisioner.save("four")
    assert lines(kernel)["four"] == "before going back", "what was undone to"
    provisioner.store().remove(before)
    assert lines(kernel)["four"] == "?"
    await provisioner.back("four")
    assert await kernel.run("print(x)") == "1"


async def test_a_branch_descends_from_the_point_of_the_other_kernel(kernel, tmp_path):
    await kernel.run("x = 1")
    point = await kernel.provisioner.save("one")
    async with branch_of(point.id, kernel, tmp_path / "branch") as branch:
        await branch.provisioner.checkpoint()
        assert await branch.run("print(x)") == "1"
        await branch.provisioner.save("own")
        await branch.provisioner.save("next")
        assert lines(branch) == {"own": "one", "next": "own"}
    asleep = await kernel.provisioner.checkpoint()
    async with branch_of(asleep.id, kernel, tmp_path / "asleep") as branch:
        await branch.provisioner.save("own")
        assert lines(branch) == {"own": "one"}, "of an image that is no save point, what that descends from"
    assert lines(kernel) == {"one": ""}


async def test_a_restart_begins_anew_and_its_automatic_save_point_does_not(kernel):
    await kernel.provisioner.save("one")
    await kernel.provisioner.save_before_restart()
    await kernel.manager.restart_kernel(now=True)
    await kernel.client.wait_for_ready(timeout=60)
    await kernel.provisioner.save("fresh")
    assert lines(kernel) == {"one": "", "before a restart": "one", "fresh": ""}


@pytest.mark.parametrize("asleep", [True, False])
async def test_the_line_continues_through_sleep_in_another_server(tmp_path, runtime_base, criu_binary, asleep):
    async with notebook(tmp_path, runtime_base) as kernel:
        id = kernel.provisioner.kernel_id
        await kernel.run("x = 1")
        await kernel.provisioner.save("one")
        await kernel.provisioner.save("two")
        await kernel.provisioner.back("one")
        await kernel.provisioner.checkpoint()
        assert await kernel.run("print(x)") == "1"
        await kernel.settled("running")
        await (kernel.provisioner.detach() if asleep else kernel.provisioner.detach_now())
    async with notebook(tmp_path, runtime_base, kernel_id=id) as kernel:
        assert await kernel.run("print(x)") == "1"
        await kernel.settled("running")
        await kernel.provisioner.save("three")
        assert lines(kernel)["three"] == "one"


async def test_a_kernel_that_sleeps_in_its_save_point_descends_from_that(kernel):
    """Its image has become the save point of the state before it went back, and is what an undo brings."""
    await kernel.provisioner.save("one")
    await kernel.provisioner.checkpoint()
    await kernel.provisioner.back("one")
    assert lines(kernel) == {"one": "", "before going back": "one"}
    kernel.lifecycle.checkpoint(SavePoint("asleep"))
    assert await kernel.run("print(1)") == "1"
    await kernel.settled("running")
    await kernel.provisioner.save("two")
    assert lines(kernel)["asleep"] == "one"
    assert lines(kernel)["two"] == "asleep"
