"""A kernel wakes under other conditions: another directory, other variables, content fetched from elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

from harness import notebook

from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.transfer.archive import archive
from jupyter_gpu_ckpt.transfer.remote import Remote


def inside(capsule: Capsule, *argv: str) -> tuple[int, str]:
    """Return the output of a program that runs in the capsule."""
    output = capsule.directory / "printed"
    output.unlink(missing_ok=True)
    ran = capsule.run(argv, cwd=Path("/"), output=output, timeout=60, env={"PATH": os.environ["PATH"]})
    return ran.status, output.read_text()


def test_the_directory_of_a_kernel_is_where_it_was(runtime_base):
    (runtime_base / "here").mkdir(mode=0o700)
    there = runtime_base / "old" / "place"
    with Capsule.create(runtime_base / "here", known_as=there) as capsule:
        (runtime_base / "here" / "file").write_text("seen")
        assert inside(capsule, "cat", str(there / "file")) == (0, "seen")
    assert list(there.iterdir()) == [], "only the capsule sees it there"


def test_a_path_that_cannot_be_made_is_covered_for_the_capsule_alone(runtime_base):
    """Here because something else has the name; on a real host because the directory is another user's."""
    (runtime_base / "here").mkdir(mode=0o700)
    (runtime_base / "taken").mkdir()
    (runtime_base / "taken" / "kernels").write_text("a file in the way")
    there = runtime_base / "taken" / "kernels" / "one"
    with Capsule.create(runtime_base / "here", known_as=there) as capsule:
        (runtime_base / "here" / "file").write_text("seen")
        assert inside(capsule, "cat", str(there / "file")) == (0, "seen")
    assert (runtime_base / "taken" / "kernels").read_text() == "a file in the way"


async def test_named_variables_are_fresh_and_no_others(tmp_path, runtime_base, criu_binary, monkeypatch):
    monkeypatch.setenv("FRESH", "then")
    monkeypatch.setenv("KEPT", "then")
    async with notebook(tmp_path, runtime_base, refresh_environment=["FRESH"]) as kernel:
        await kernel.run("import os")
        await kernel.provisioner.checkpoint()
        monkeypatch.setenv("FRESH", "now")
        monkeypatch.setenv("KEPT", "now")
        assert await kernel.run("print(os.environ['FRESH'], os.environ['KEPT'])") == "now then"


async def test_a_wake_brings_archived_content_back(tmp_path, runtime_base, criu_binary):
    url = f"file://{tmp_path}/cold"
    async with notebook(tmp_path, runtime_base, archive_url=url) as kernel:
        await kernel.run("x = 41")
        image = await kernel.provisioner.checkpoint()
        assert archive(image, kernel.lifecycle.engine.store, Remote(url)) > 1_000_000
        assert await kernel.run("print(x + 1)") == "42"
        await kernel.settled("running")
    assert Remote(url).images() == []


async def test_images_in_a_directory_that_all_users_share(tmp_path, runtime_base, criu_binary):
    shared = tmp_path / "images"
    shared.mkdir()
    shared.chmod(0o1777)
    async with notebook(tmp_path, runtime_base) as kernel:
        await kernel.run("x = 41")
        image = await kernel.provisioner.checkpoint()
        own = shared / str(os.geteuid())
        assert (own / image.id).is_dir()
        assert own.stat().st_mode & 0o7777 == 0o700
        assert await kernel.run("print(x + 1)") == "42"
        await kernel.settled("running")
    assert list(shared.iterdir()) == [own]
