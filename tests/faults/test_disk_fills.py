"""A disk of images that others fill at any moment of a checkpoint, a save or a going back."""

from __future__ import annotations

import contextlib
import errno
import functools
import os

import pytest
import small_disk
from faulty import Subject
from harness import notebook

from jupyter_gpu_ckpt.errors import GpuCkptError
from jupyter_gpu_ckpt.image.store import Store

#: Bytes that are left for a dump: less than a file of CRIU's, less than a record of one, and less than all of them.
LEFT = (1 << 12, 1 << 15, 1 << 20)
BALLAST = "import os; ballast = os.urandom(8 << 20)"


class OthersFile:
    """A file that fills the disk at the start of a step, but for some bytes."""

    def __init__(self, directory, step, left):
        self._path, self._step, self._left = directory / "others", step, left

    def __call__(self, event):
        if (event.kind, event.step) != ("started", self._step):
            return
        facts = os.statvfs(self._path.parent)
        with open(self._path, "ab") as file, contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, max(1, facts.f_bavail * facts.f_frsize - self._left))

    def remove(self):
        self._path.unlink(missing_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["checkpoint", "save", "back"])
async def test_a_disk_that_becomes_full_at_any_step_is_named(tmp_path, runtime_base, criu_binary, monkeypatch, verb):
    """Preflight would refuse; here it sees free space, as when others fill the disk meanwhile."""
    monkeypatch.setattr(Store, "free", lambda self: 1 << 40)
    with small_disk.mounted(tmp_path / "images") as resize:
        resize(400 << 20)
        async with notebook(tmp_path, runtime_base, drain_timeout=5.0) as kernel:
            subject, provisioner = await Subject.of(kernel, tmp_path), kernel.provisioner
            if verb == "back":
                await provisioner.save("point")
            given = {"checkpoint": (), "save": ("another",), "back": ("point",)}[verb]
            do = functools.partial(getattr(provisioner, verb), *given)
            steps = []
            provisioner.sinks.append(lambda event: steps.append(event.step) if event.kind == "started" else None)
            await kernel.run(BALLAST)
            await do()
            assert await kernel.run("print(x)") == "41"
            moments = [(step, 0) for step in dict.fromkeys(steps)] + [("dump", left) for left in LEFT]
            codes = {}
            for step, left in moments:
                remove_all_but_point(provisioner.lifecycle.engine.store)
                await kernel.run(BALLAST)
                others = OthersFile(subject.images, step, left)
                provisioner.sinks.append(others)
                try:
                    await do()
                except GpuCkptError as error:
                    codes[step, left] = error.code
                finally:
                    provisioner.sinks.remove(others)
                    others.remove()
                assert await kernel.run("print(x)") == "41"
            assert set(codes.values()) == {"NO_SPACE"}, codes
            assert all(("dump", left) in codes for left in (0, *LEFT))
            subject.close()


def remove_all_but_point(store):
    for image in store.images():
        if image.is_save_point and image.manifest.save_point["name"] != "point":
            store.remove(image, timeout=10.0)  # the end of a going back may still have it


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_an_error_of_a_full_disk_is_no_internal_one(number):
    error = GpuCkptError.from_exception(OSError(number, os.strerror(number), "/images/a"))
    assert (error.code, error.message) == ("NO_SPACE", "The disk of /images/a is full.")
