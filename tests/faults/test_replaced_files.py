"""Files that are others of the same size by the time the kernel wakes, and what only looks as if it were one."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import stat
import subprocess
import threading
import time
from pathlib import Path

import pytest
from harness import until

from jupyter_gpu_ckpt.cli import main
from jupyter_gpu_ckpt.criu import images
from jupyter_gpu_ckpt.errors import CriuKilled, GpuCkptError
from jupyter_gpu_ckpt.image.layout import RESTORING, mark
from jupyter_gpu_ckpt.image.store import Image
from jupyter_gpu_ckpt.lifecycle.plans import Step
from jupyter_gpu_ckpt.lifecycle.steps import STEPS
from jupyter_gpu_ckpt.node.hashes import AT_ONCE, FILE, Hashes

pytestmark = pytest.mark.sweep(1 / 2, of="file")

SIZE = 65536
MAP = """
import mmap
descriptor = os.open('array', os.O_RDWR if {writes} else os.O_RDONLY)
array = mmap.mmap(descriptor, 0, flags=mmap.{sharing}, prot=mmap.{protection})
os.close(descriptor)
"""
#: How the kernel uses the file ``array``: what it runs, and what it says of the file's first byte.
USES = {
    "open for reading": ("f = open('array', 'rb', buffering=0)", "os.pread(f.fileno(), 1, 0)"),
    "open for writing": ("f = open('array', 'r+b', buffering=0)", "os.pread(f.fileno(), 1, 0)"),
    "mapped privately": (MAP.format(writes=0, sharing="MAP_PRIVATE", protection="PROT_READ"), "array[:1]"),
    "mapped read-only": (MAP.format(writes=0, sharing="MAP_SHARED", protection="PROT_READ"), "array[:1]"),
    "mapped and written": (
        MAP.format(writes=1, sharing="MAP_SHARED", protection="PROT_READ | mmap.PROT_WRITE"),
        "array[:1]",
    ),
}


def rewrite(path: Path) -> None:
    """Other bytes in the same file."""
    path.write_bytes(b"n" * SIZE)


def rewrite_unseen(path: Path) -> None:
    """The same, with the old time put back."""
    facts = path.stat()
    path.write_bytes(b"n" * SIZE)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def replace(path: Path) -> None:
    """Another file of that name."""
    path.with_name("new").write_bytes(b"n" * SIZE)
    path.with_name("new").rename(path)


def replace_by_link(path: Path) -> None:
    """A symbolic link of that name to another file."""
    path.with_name("new").write_bytes(b"n" * SIZE)
    path.unlink()
    path.symlink_to("new")


@pytest.fixture
def array(subject) -> Path:
    path = subject.directory / "array"
    path.write_bytes(b"o" * SIZE)
    return path


@pytest.mark.sweep
@pytest.mark.parametrize("use", USES)
async def test_another_content_of_the_same_size_is_named_and_taken_on_demand(subject, array, use):
    opens, reads = USES[use]
    await subject.run(opens)
    for change in (rewrite, rewrite_unseen, replace, replace_by_link):
        array.write_bytes(b"o" * SIZE)
        await subject.provisioner.checkpoint()
        change(array)
        error = await subject.fails(subject.provisioner.restore, "FILE_CHANGED")
        assert error.details["culprit"] == str(array), change
        assert "criu_restore" not in [event.step for event in subject.kernel.steps.events]
        await subject.stays_away(error)
        await subject.provisioner.restore(accept_changed_files=True)
        assert await subject.run(f"print(x, {reads})") == "41 b'n'", change
        subject.kernel.steps.events.clear()


def touch(path: Path) -> None:
    path.touch()


def rewrite_the_same(path: Path) -> None:
    path.write_bytes(b"o" * SIZE)


def restore_a_backup(path: Path) -> None:
    shutil.copy2(path, path.with_name("backup"))
    path.unlink()
    path.with_name("backup").rename(path)


def move_away_and_back(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.with_name("elsewhere").rename(path)


def link(path: Path) -> None:
    path.with_name("link").hardlink_to(path)


@pytest.mark.sweep
@pytest.mark.parametrize("use", USES)
async def test_the_same_content_is_no_change_whatever_was_done_to_the_file(subject, array, use):
    opens, reads = USES[use]
    await subject.run(opens)
    for harmless in (touch, rewrite_the_same, restore_a_backup, move_away_and_back, link):
        await subject.provisioner.checkpoint()
        harmless(array)
        await subject.provisioner.restore()
        assert await subject.run(f"print(x, {reads})") == "41 b'o'", harmless


#: More than a checkpoint reads of files that it does not know yet.
LARGE = AT_ONCE + 1_000_000


@pytest.fixture
def large(subject) -> Path:
    path = subject.directory / "array"
    path.write_bytes(b"o" * LARGE)
    return path


def rewrite_one_byte_unseen(path: Path) -> None:
    """A new version comes in the place of the old one, as ``rsync --inplace --times`` brings it."""
    facts = path.stat()
    with path.open("r+b") as file:
        file.seek(LARGE // 2)
        file.write(b"n")
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


async def has_hash_of(subject, image: Image, path: Path) -> None:
    """Wait until a file that was new at the checkpoint is hashed."""
    facts = image.manifest.fingerprint["files"][str(path)]
    await until(lambda: Hashes(subject.images).known(facts))


@pytest.mark.parametrize("use", ["open for reading", "mapped privately", "mapped and written"])
@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
async def test_a_byte_of_a_large_file_that_was_changed_unseen(subject, large, use, later, monkeypatch):
    """Its time of modification is put back; a checkpoint has no time to hash it."""
    if not later:
        monkeypatch.setattr(Hashes, "begin", lambda hashes: None)
    opens, reads = USES[use]
    reads = reads.replace("1, 0)", f"1, {LARGE // 2})").replace("[:1]", f"[{LARGE // 2}:][:1]")
    await subject.run(opens)
    image = await subject.provisioner.checkpoint()
    assert "blake3" not in image.manifest.fingerprint["files"][str(large)]
    if later:
        await has_hash_of(subject, image, large)
    rewrite_one_byte_unseen(large)
    error = await subject.fails(subject.provisioner.restore, "FILE_CHANGED")
    assert error.details["culprit"] == str(large)
    assert error.message.endswith("found changed (ctime).") is not later
    assert f"`jupyter gpu-ckpt match {image.id} --accept-changed-files`" in error.hint
    await subject.stays_away(error)
    assert main(["match", image.id, "--image-dir", str(subject.images), "--accept-changed-files"]) == 0
    await subject.wakes()
    assert await subject.run(f"print({reads})") == "b'n'"


async def test_a_large_file_that_has_another_name_is_the_same_if_there_was_time_to_hash_it(subject, large):
    await subject.run(USES["mapped privately"][0])
    for harmless in (link, move_away_and_back):
        image = await subject.provisioner.checkpoint()
        await has_hash_of(subject, image, large)
        harmless(large)
        await subject.wakes()
    assert await subject.run("print(array[:1])") == "b'o'"


async def test_nothing_is_read_on_a_wake_while_nothing_changed(subject, array, monkeypatch):
    await subject.run(USES["mapped privately"][0])
    await subject.provisioner.checkpoint()

    def read(path: str):
        raise AssertionError(f"{path} was read")

    monkeypatch.setattr("jupyter_gpu_ckpt.node.hashes.open_regular", read)
    monkeypatch.setattr("jupyter_gpu_ckpt.node.facts.open_regular", read)
    await subject.wakes()


async def test_what_the_kernel_itself_wrote_last_is_no_change(subject, array):
    await subject.run(USES["mapped and written"][0])
    await subject.run("out = open('out', 'w')")
    for round in range(3):
        await subject.run(f"array[0] = {round}; _ = out.write('{round}'); out.flush()")
        await subject.leaves_and_wakes()
    assert await subject.run("out.close(); print(open('out').read(), array[0])") == "012 2"


async def test_program_code_without_a_build_id_is_never_taken_as_it_is(subject):
    source = subject.directory / "lib.c"
    library = subject.directory / "lib.so"
    for number in (1, 2):
        source.write_text(f"int f(void) {{ return {number}; }}")
        out = library if number == 1 else subject.directory / "new.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-Wl,--build-id=none", "-o", out, source], check=True)
    assert library.stat().st_size == (subject.directory / "new.so").stat().st_size
    old = library.read_bytes()
    await subject.run("import ctypes; lib = ctypes.CDLL('./lib.so')")
    await subject.provisioner.checkpoint()
    (subject.directory / "new.so").replace(library)
    error = await subject.fails(lambda: subject.provisioner.restore(accept_changed_files=True), "FILE_CHANGED")
    assert error.details["culprit"] == str(library)
    assert "program code" in error.hint
    library.write_bytes(old)
    await subject.provisioner.restore()
    assert await subject.run("print(lib.f())") == "1"


@pytest.mark.parametrize("use", ["os.chdir('place')", "place = os.open('place', os.O_RDONLY)"], ids=["cwd", "open"])
async def test_another_directory_of_the_same_name(subject, use):
    place = subject.directory / "place"
    place.mkdir()
    (place / "old").touch()
    await subject.run(use)
    await subject.provisioner.checkpoint()
    place.rename(subject.directory / "aside")
    place.mkdir()
    error = await subject.fails(subject.provisioner.restore, "FILE_CHANGED")
    assert error.details["culprit"] == str(place)
    place.rmdir()
    (subject.directory / "aside").rename(place)
    (place / "new").touch()  # what is in a directory may change
    await subject.provisioner.restore()
    listed = await subject.run("print(sorted(os.listdir(place if 'place' in globals() else '.')))")
    assert listed == "['new', 'old']"


@pytest.mark.parametrize("use", ["f = open('array', 'rb')", "f = open('array', 'a')", *[USES["mapped privately"][0]]])
async def test_a_named_pipe_at_the_path_of_a_file_is_refused_at_once(subject, array, use):
    await subject.run(use)
    await subject.provisioner.checkpoint()
    aside = array.rename(array.with_name("aside"))
    os.mkfifo(array)
    error = await asyncio.wait_for(subject.fails(subject.provisioner.restore, "FILE_CHANGED"), 30)
    assert f"{array}: wanted a file, found a named pipe" in error.message
    error = await subject.fails(lambda: subject.provisioner.restore(accept_changed_files=True), "FILE_CHANGED")
    await subject.stays_away(error)
    array.unlink()
    aside.rename(array)
    await subject.wakes()


async def test_a_kernel_can_be_ended_that_waits_for_a_named_pipe_created_after_the_check(subject, array, monkeypatch):
    """CRIU itself opens the pipe, and waits; ending the kernel ends CRIU."""
    await subject.run(USES["open for reading"][0])
    await subject.provisioner.checkpoint()
    lifecycle = subject.kernel.lifecycle
    restore = lifecycle.engine.criu.restore

    def swapped(*args, **kwargs):
        array.unlink()
        os.mkfifo(array)
        return restore(*args, **kwargs)

    def waits() -> bool:
        """Return whether CRIU has opened the pipe, and waits for somebody who writes to it (fs/pipe.c)."""
        attempt = lifecycle.kernel.attempt
        capsule = attempt.restoring if attempt is not None else None
        return capsule is not None and any(wchan(pid) == "wait_for_partner" for pid in capsule.other_processes())

    monkeypatch.setattr(lifecycle.engine.criu, "restore", swapped)
    wake = asyncio.ensure_future(subject.provisioner.restore())
    await until(waits)
    await asyncio.wait_for(subject.kernel.manager.shutdown_kernel(now=True), 30)
    with pytest.raises(GpuCkptError) as caught:
        await asyncio.wait_for(wake, 60)
    assert caught.value.code == "KERNEL_LOST"
    assert stat.S_ISFIFO(array.stat().st_mode)


def wchan(pid: int) -> str:
    """Return where in Linux a process waits (proc_pid_wchan(5)); empty when it has gone."""
    try:
        return Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return ""


@pytest.mark.parametrize("ends", ["shutdown", "detach"])
async def test_nobody_waits_for_a_large_file_to_be_read(subject, array, ends, monkeypatch):
    """Its owner ends the kernel, or detaches from it, while a wake finds out whether a file is the same."""
    await subject.run(USES["open for reading"][0])
    await subject.provisioner.checkpoint()
    array.touch()
    reading, of = threading.Event(), Hashes.of

    def endless(self, path, facts, cancelled=lambda: False):
        if path != str(array):
            return of(self, path, facts, cancelled)
        reading.set()
        while not cancelled():
            time.sleep(0.001)
        return ""

    monkeypatch.setattr(Hashes, "of", endless)
    lifecycle = subject.kernel.lifecycle
    wake = asyncio.ensure_future(subject.provisioner.restore())
    await until(reading.is_set)
    if ends == "shutdown":
        await asyncio.wait_for(subject.kernel.manager.shutdown_kernel(now=True), 30)
    else:
        await asyncio.wait_for(asyncio.to_thread(lifecycle.detach), 30)
    with pytest.raises(GpuCkptError) as caught:
        await asyncio.wait_for(wake, 60)
    assert caught.value.code == ("KERNEL_LOST" if ends == "shutdown" else "CRIU_FAILED")


# -- what is in /proc


async def test_open_files_of_the_kernel_in_proc_come_back(subject):
    await subject.run(
        "files = [open(f'/proc/{name}') for name in ('self/status', 'self/stat', 'self/maps', 'meminfo', 'stat')]\n"
        "place = os.open('/proc/self/fd', os.O_RDONLY)\n"
        "sys_file = open('/sys/class/net/lo/ifindex')\n"
        "_ = [file.read() for file in files]"
    )
    for _ in range(2):
        await subject.leaves_and_wakes()
        code = "print(f'{files[0].seek(0)} {files[0].read().count(chr(10)) > 20} {len(os.listdir(place)) > 5}')"
        assert await subject.run(code) == "0 True True"
        assert await subject.run("_ = sys_file.seek(0); print(sys_file.read().strip())") == "1"


@pytest.mark.parametrize(
    "holds",
    ["held = open(f'/proc/self/task/{thread.native_id}/stat')", "os.chdir('/proc/self')"],
    ids=["of a thread", "working directory"],
)
async def test_what_cannot_come_back_is_named_before_the_kernel_has_left(subject, holds):
    await subject.run("import threading; event = threading.Event(); thread = threading.Thread(target=event.wait)")
    await subject.run(f"thread.daemon = True; thread.start(); here = os.getcwd(); {holds}")
    error = await subject.fails(subject.provisioner.checkpoint, "FILE_UNSUPPORTED")
    assert error.details["culprit"].startswith("/proc/")
    assert error.details["culprit"] in error.message
    await subject.runs_on(error)
    await subject.run("os.chdir(here); _ = 'held' in globals() and held.close(); event.set(); thread.join()")
    await subject.leaves_and_wakes()


# -- names that a dump makes


async def deleted(subject) -> Path:
    """The kernel has a file open whose name was deleted, and which has another one."""
    await subject.run(
        "_ = open('first', 'w').write('kept'); os.link('first', 'second'); f = open('first'); os.unlink('first')"
    )
    return subject.directory


def made(directory: Path) -> list[Path]:
    return list(directory.glob("link_remap.*"))


async def test_a_wake_consumes_the_name_that_the_dump_made(subject):
    directory = await deleted(subject)
    for _ in range(2):
        await subject.provisioner.checkpoint()
        assert len(made(directory)) == 1
        await subject.provisioner.restore()
        assert made(directory) == []
    assert await subject.run("print(f.read())") == "kept"


async def test_an_image_that_is_dropped_takes_the_name_with_it(subject):
    directory = await deleted(subject)
    image = await subject.provisioner.checkpoint()
    assert len(made(directory)) == 1
    mine = directory / "link_remap.999"
    mine.write_text("of the user")
    subject.kernel.lifecycle.engine.store.remove(image)
    assert made(directory) == [mine]
    assert (directory / "second").read_text() == "kept"


async def test_a_wake_that_fails_after_criu_can_be_tried_again(subject, monkeypatch):
    """CRIU removes the names that the dump made, and makes the files of sockets anew."""
    directory = await deleted(subject)
    path = str(directory / "socket")
    await subject.run(f"import socket; s = socket.socket(socket.AF_UNIX); s.bind({path!r}); s.listen()")
    await subject.provisioner.checkpoint()
    (name,) = made(directory)

    def fail(attempt):
        assert not name.exists(), "CRIU has consumed it"
        raise GpuCkptError("broken")

    with monkeypatch.context() as patched:
        patched.setitem(STEPS, Step.CUDA_RESUME, fail)
        with pytest.raises(GpuCkptError, match="broken"):
            await subject.provisioner.restore()
    assert name.exists()
    await subject.provisioner.restore()
    assert made(directory) == []
    assert await subject.run("print(f.read(), os.fstat(f.fileno()).st_nlink)") == "kept 1"
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
    assert await subject.run("print(s.accept()[0] is not None)") == "True"


@pytest.mark.parametrize("home", ["there", "deleted"])
async def test_what_a_killed_restore_has_left_is_in_nobodys_way(subject, home):
    """CRIU makes a deleted file for a moment, in the nearest directory that exists."""
    directory = subject.directory
    await subject.run("os.mkdir('home'); f = open('home/gone', 'w+'); _ = f.write('kept'); f.flush()")
    await subject.run("os.unlink('home/gone')" + ("; os.rmdir('home')" if home == "deleted" else ""))
    left = directory / ("home" if home == "there" else "") / "gone.cr.1.ghost"
    image = await subject.provisioner.checkpoint()
    assert images.ghost_names(image.path / "criu") == [str(directory / "home" / left.name)]
    left.write_text("half")
    if home == "deleted":  # else CRIU removes the file as it fails, and the second try succeeds
        with pytest.raises(GpuCkptError):
            await subject.provisioner.restore()
        assert left.exists(), "it may be of another kernel's restore"
    mark(image.path, RESTORING).touch()
    await subject.provisioner.restore()
    assert not left.exists()
    assert not mark(image.path, RESTORING).exists()
    assert await subject.run("print(f.seek(0), f.read())") == "0 kept"
    image = await subject.provisioner.checkpoint()
    left.write_text("half")
    mark(image.path, RESTORING).touch()
    subject.kernel.lifecycle.engine.store.remove(image)
    assert not left.exists()


async def test_what_a_killed_restore_of_a_save_point_has_left_is_in_no_other_image_s_way(subject):
    """The kernel's images have the same deleted file, for which CRIU makes the same name."""
    await subject.run("os.mkdir('home'); f = open('home/gone', 'w+'); _ = f.write('kept'); f.flush()")
    await subject.run("os.unlink('home/gone'); os.rmdir('home')")
    point = await subject.provisioner.save("point")
    image = await subject.provisioner.checkpoint()
    (name,) = images.ghost_names(point.path / "criu")
    assert images.ghost_names(image.path / "criu") == [name]
    left = subject.directory / Path(name).name
    left.write_text("half")
    mark(point.path, RESTORING).touch()
    await subject.provisioner.restore()
    assert not left.exists()
    assert not mark(point.path, RESTORING).exists()
    assert await subject.run("print(f.seek(0), f.read())") == "0 kept"


async def test_a_dump_that_was_killed_leaves_no_name(subject, monkeypatch):
    """A file that was there before stays, also where it is the same file: it may be of another kernel's image."""
    directory = await deleted(subject)
    lifecycle = subject.kernel.lifecycle
    before, ours, other = (directory / f"link_remap.{number}" for number in (7, 8, 9))
    before.hardlink_to(directory / "second")

    def dump(*_, **options):
        ours.hardlink_to(directory / "second")
        other.write_text("of the user")
        raise CriuKilled("killed")

    with monkeypatch.context() as patched:
        patched.setattr(lifecycle.engine.criu, "dump", dump)
        with pytest.raises(CriuKilled):
            await subject.provisioner.checkpoint()
    assert sorted(made(directory)) == [before, other]
    assert await subject.run("print(f.read())") == "kept"


async def test_a_kernel_that_is_shut_down_asleep_leaves_no_name(subject):
    directory = await deleted(subject)
    await subject.provisioner.checkpoint()
    assert len(made(directory)) == 1
    await subject.kernel.manager.shutdown_kernel()
    assert made(directory) == []
    assert (directory / "second").read_text() == "kept"


async def test_a_name_that_is_another_file_by_now_stays(subject):
    directory = await deleted(subject)
    image = await subject.provisioner.checkpoint()
    (name,) = made(directory)
    name.unlink()
    name.write_text("of the user")
    subject.kernel.lifecycle.engine.store.remove(image)
    assert name.read_text() == "of the user"


async def test_an_image_that_was_moved_leaves_the_name_to_where_it_went(subject):
    directory = await deleted(subject)
    image = await subject.provisioner.checkpoint()
    (name,) = made(directory)
    subject.kernel.lifecycle.engine.store.remove(image, moved=True)
    assert made(directory) == [name]


async def test_an_old_image_leaves_the_name_of_the_next_one_alone(subject):
    """Both have it, of the same file: the kernel came back from the first one, and left again."""
    directory = await deleted(subject)
    old = await subject.provisioner.checkpoint()
    (name,) = made(directory)
    await subject.provisioner.restore()
    await subject.provisioner.checkpoint()
    assert made(directory) == [name]
    copy = subject.images / old.id
    shutil.copytree(subject.kernel.lifecycle.image.path, copy)
    subject.kernel.lifecycle.engine.store.remove(type(old)(copy, old.manifest))
    assert made(directory) == [name]
    await subject.wakes()


async def test_a_checkpoint_that_is_undone_leaves_no_name(subject, monkeypatch):
    directory = await deleted(subject)
    images = subject.images

    def publish(self, *_, **__):
        assert made(directory)
        raise OSError("no")

    monkeypatch.setattr("jupyter_gpu_ckpt.image.draft.Draft.publish", publish)
    error = await subject.fails(subject.provisioner.checkpoint, "INTERNAL")
    monkeypatch.undo()
    assert made(directory) == []
    await subject.runs_on(error)
    await subject.leaves_and_wakes()
    assert not [path for path in images.iterdir() if path.name.startswith(FILE) and path.name != FILE]
