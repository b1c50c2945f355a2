"""A kernel that sleeps goes back to a save point without a wake: its image becomes the one of the state before."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

import pytest
from harness import CellFailed, Notebook, notebook

from jupyter_gpu_ckpt.errors import ChangedFile, FilesDiffer, GpuFull, ImageBusy, MissingFile
from jupyter_gpu_ckpt.image import kept_files, layout, save_point
from jupyter_gpu_ckpt.image.image import Image
from jupyter_gpu_ckpt.image.save_point import SavePoint
from jupyter_gpu_ckpt.transfer import archive
from jupyter_gpu_ckpt.transfer.remote import Remote

LOG = "log = open('log', 'w'); n = log.write('then'); log.flush(); x = 1"
MORE = "n = log.write(' and now'); log.flush(); x = 2"


async def asleep(kernel: Notebook, *cells: str) -> Image:
    """Have the kernel fall asleep behind its save point ``one`` and these cells; return the image."""
    await kernel.run(LOG)
    await kernel.provisioner.save("one")
    for cell in cells:
        await kernel.run(cell)
    image: Image = await kernel.provisioner.checkpoint()
    kernel.steps.events.clear()
    return image


def steps(kernel: Notebook) -> Sequence[str]:
    return [event.step for event in kernel.steps.events if event.kind == "started"]


def name(image: Image) -> str:
    point = save_point.of_image(image)
    assert point is not None
    return point.name


async def test_its_image_becomes_the_save_point_by_which_going_back_is_undone(kernel, tmp_path):
    image, states = await asleep(kernel, MORE), []
    kernel.lifecycle.kernel.on_state.append(states.append)
    before = await kernel.provisioner.back("one", "then", b'{"cells": [1]}')
    assert [state.value for state in states] == ["restoring", "running"]
    assert not {"drain", "dump"} & {*steps(kernel)}
    assert steps(kernel).count("criu_restore") == 1
    assert (before.id, before.retired, name(before)[:18]) == (image.id, True, "before going back ")
    store = kernel.lifecycle.engine.store
    assert save_point.notebook(store, before) == b'{"cells": [1]}'
    assert await kernel.run("print(x, log.tell(), open('log').read())") == "1 4 then"
    await kernel.provisioner.back(name(before), "then")
    assert await kernel.run("print(x, log.tell(), open('log').read())") == "2 12 then and now"
    assert all(each.retired for each in store.images())
    await kernel.provisioner.checkpoint()
    assert await kernel.run("print(x)") == "2"


async def test_a_file_that_is_gone_is_put_back_from_the_save_point(kernel, tmp_path):
    await asleep(kernel, "x = 2")
    (tmp_path / "log").unlink()
    with pytest.raises(FilesDiffer) as caught:
        await kernel.provisioner.back("one")
    assert [each["choices"] for each in caught.value.details["files"]] == [["then"]]
    assert not kernel.lifecycle.image.is_save_point, "nothing was changed"
    before = await kernel.provisioner.back("one", "then")
    assert await kernel.run("print(x); n = log.write(' on'); log.flush()") == "1"
    assert (tmp_path / "log").read_text() == "then on"
    await kernel.provisioner.back(name(before), "now")
    assert await kernel.run("print(x)") == "2"


async def test_a_file_that_the_save_point_does_not_have_need_not_be_there(kernel, tmp_path):
    await asleep(kernel, "later = open('later', 'w')")
    (tmp_path / "later").unlink()
    await kernel.provisioner.back("one")
    assert await kernel.run("print(x, 'later' in dir())") == "1 False"


async def test_a_file_that_changed_while_it_slept_is_not_replaced_without_a_copy(kernel, tmp_path):
    """The kernel wakes with it as it is: its image could not be restored with a copy of that."""
    await asleep(kernel, MORE)
    (tmp_path / "log").write_text("of another program")
    before = await kernel.provisioner.back("one", "then")
    assert await kernel.run("print(x, open('log').read())") == "1 then"
    await kernel.provisioner.back(name(before), "then")
    assert await kernel.run("print(x, open('log').read())") == "2 of another program"


async def test_files_that_differ_from_the_save_point_that_it_sleeps_in_are_put_back(kernel, tmp_path):
    """One was changed and one is gone, as on another node that the save point was moved to."""
    await kernel.run(f"{LOG}; other = open('other', 'w'); n = other.write('more'); other.flush()")
    point = kernel.lifecycle.checkpoint(SavePoint("one"))
    (tmp_path / "log").write_text("of another program")
    (tmp_path / "other").unlink()
    with pytest.raises(FilesDiffer) as caught:
        await kernel.provisioner.back("one", "now")
    assert [each["choices"] for each in caught.value.details["files"]] == [["then"]]
    before = await kernel.provisioner.back("one", "then")
    assert (before.id != point.id, name(before)[:18]) == (True, "before going back ")
    assert await kernel.run("print(x, log.tell(), open('log').read(), open('other').read())") == "1 4 then more"
    await kernel.provisioner.back(name(before), "then")
    assert await kernel.run("print(open('log').read(), open('other').read())") == "of another program more"


async def test_one_that_cannot_wake_with_the_files_as_they_are_stays_asleep(kernel, tmp_path):
    """The log is of another program's by now, and shorter than what the kernel has mapped of it."""
    image = await asleep(kernel, MORE, "import mmap, os; m = mmap.mmap(os.open('log', os.O_RDWR), 0)")
    (tmp_path / "log").write_text("")
    with pytest.raises(ChangedFile) as caught:
        await kernel.provisioner.back("one", "then")
    assert caught.value.left == f"the image is kept as {image.id}"
    assert (tmp_path / "log").read_text() == ""
    assert (kernel.state, kernel.lifecycle.image.is_save_point) == ("checkpointed", False)


async def test_a_restore_that_fails_leaves_it_asleep_in_its_present_state(kernel, tmp_path):
    """In a save point, which keeps its name: the next try makes none."""
    image = await asleep(kernel, MORE)

    def fail(event) -> None:
        if (event.kind, event.step) == ("started", "cuda_resume"):
            raise GpuFull("The GPU is full.")

    kernel.provisioner.faults.append(fail)
    for _ in range(2):
        with pytest.raises(GpuFull) as caught:
            await kernel.provisioner.back("one", "then")
        assert (kernel.state, caught.value.left) == ("checkpointed", f"the image is kept as {image.id}")
        assert steps(kernel).count("criu_restore") == 1
        assert (tmp_path / "log").read_text() == "then", "it is replaced, and the next wake has to put it back"
        kernel.steps.events.clear()
    store, kernel_id = kernel.lifecycle.engine.store, kernel.provisioner.kernel_id
    one, present = save_point.of_kernel(store.images(), kernel_id).values()
    assert (present.id, present.retired, one.retired) == (image.id, False, True)
    with pytest.raises(CellFailed, match="GPU_FULL"):
        await kernel.run("print(x)")
    kernel.provisioner.faults.remove(fail)
    assert await kernel.run("print(x, log.tell(), open('log').read())") == "2 12 then and now"
    await kernel.settled("running")
    assert present.retired
    assert not layout.mark(present.path, layout.REPLACED).exists()
    await kernel.provisioner.back("one", "then")
    assert await kernel.run("print(x)") == "1"


async def test_it_goes_back_from_a_save_point_that_it_sleeps_in_which_keeps_its_name(kernel, tmp_path, monkeypatch):
    await asleep(kernel, "x = 2")
    with monkeypatch.context() as patched:
        patched.setattr(kept_files, "put_back", unwritable)
        (tmp_path / "log").unlink()
        with pytest.raises(MissingFile, match="Read-only"):
            await kernel.provisioner.back("one", "then")
    present = kernel.lifecycle.image
    before = await kernel.provisioner.back("one", "then")
    assert (before.id, name(before)) == (present.id, name(present))
    assert await kernel.run("print(x)") == "1"
    assert len(kernel.lifecycle.engine.store.images()) == 2


async def test_to_the_save_point_that_it_sleeps_in_is_a_wake(kernel):
    await kernel.run("x = 1")
    point = kernel.lifecycle.checkpoint(SavePoint("one"))
    kernel.steps.events.clear()
    assert (await kernel.provisioner.back("one")).id == point.id
    assert "dump" not in steps(kernel)
    assert await kernel.run("print(x)") == "1"
    assert [(each.id, each.retired) for each in kernel.lifecycle.engine.store.images()] == [(point.id, True)]


async def test_an_image_in_use_elsewhere_is_left_alone(kernel):
    image = await asleep(kernel, "x = 2")
    image.claim(os.getpid(), lambda _: None)
    with pytest.raises(ImageBusy, match="runs on"):
        await kernel.provisioner.back("one")
    image.withdraw_claim()
    assert not kernel.lifecycle.image.is_save_point
    await kernel.provisioner.back("one")
    assert await kernel.run("print(x)") == "1"


async def test_content_in_the_cold_tier_is_fetched_first(tmp_path, runtime_base, criu_binary):
    url = f"file://{tmp_path}/cold"
    async with notebook(tmp_path, runtime_base, archive_url=url) as kernel:
        image, store = await asleep(kernel, "x = 2"), kernel.lifecycle.engine.store
        one = save_point.find(store.images(), kernel.provisioner.kernel_id, "one")
        for each in (image, one):
            archive.archive(each, store, Remote(url))
            assert each.archived
        before = await kernel.provisioner.back("one")
        assert await kernel.run("print(x)") == "1"
        await kernel.provisioner.back(name(before))
        assert await kernel.run("print(x)") == "2"


async def test_an_encrypted_image_takes_no_copies_so_it_wakes_where_files_are_replaced(
    tmp_path, runtime_base, criu_binary
):
    (key := tmp_path / "key").write_text("ab" * 32)
    key.chmod(0o600)
    async with notebook(tmp_path, runtime_base, encryption_key=f"file:{key}") as kernel:
        image = await asleep(kernel, "x = 2")
        before = await kernel.provisioner.back("one", notebook=b"{}")
        assert ("dump" in steps(kernel), before.id, save_point.has_notebook(before)) == (False, image.id, False)
        assert await kernel.run("print(x)") == "1"
        await kernel.provisioner.back(name(before))
        await kernel.run(MORE.replace("x = 2", "x = 3"))
        await kernel.provisioner.checkpoint()
        before = await kernel.provisioner.back("one", "then", b"{}")
        assert ("dump" in steps(kernel), save_point.has_notebook(before)) == (True, True)
        assert await kernel.run("print(x, open('log').read())") == "1 then"
        await kernel.provisioner.back(name(before), "then")
        assert await kernel.run("print(x, open('log').read())") == "3 then and now"


def unwritable(*_: object, **__: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))
