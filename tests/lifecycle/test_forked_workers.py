"""Workers that share most of their memory since a fork: their image has it once, and they share it again."""

from __future__ import annotations

import os
import signal
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from harness import Notebook, notebook

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.criu import shared_pages, vmas
from jupyter_gpu_ckpt.criu.shared_pages import SharedPages
from jupyter_gpu_ckpt.errors import ImageDamaged, NoSpace, RuntimeDirectory, UnprovenState
from jupyter_gpu_ckpt.image.store import Store
from jupyter_gpu_ckpt.lifecycle import host_memory
from jupyter_gpu_ckpt.transfer import archive
from jupyter_gpu_ckpt.transfer.remote import Remote

pytestmark = pytest.mark.sweep(1 / 2, of="file")

MB = 1_000_000
#: An image with shared pages once is smaller; with those of each process it would be over 400 MB.
ONCE = 130 * MB
#: Each worker has the kernel's memory, and some of its own; `wrong` names those that differ.
WORKERS = """
import hashlib, mmap, multiprocessing, os, random
held = mmap.mmap(-1, 40_000_000, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
held[:] = random.Random(7).randbytes(40_000_000)
expected = hashlib.sha256(held).hexdigest()

def serve(number, pipe):
    own = bytearray(random.Random(number).randbytes(1_000_000))
    for command in iter(pipe.recv, None):
        if command == "change":
            own[::5000] = bytes(byte ^ 1 for byte in own[::5000])
        pipe.send((hashlib.sha256(held).hexdigest(), hashlib.sha256(own).hexdigest()))

context = multiprocessing.get_context("fork")
class Worker:
    def __init__(self, number):
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(number, other), daemon=True)
        self.process.start()
        self.own = bytearray(random.Random(number).randbytes(1_000_000))
    def ask(self, command="show"):
        self.pipe.send(command)
        if command == "change":
            self.own[::5000] = bytes(byte ^ 1 for byte in self.own[::5000])
        return self.pipe.recv() == (expected, hashlib.sha256(self.own).hexdigest())

workers = [Worker(number) for number in range(4)]
def wrong(command="show"):
    return [number for number, one in enumerate(workers) if one.process.is_alive() and not one.ask(command)]
assert not wrong()
"""


def unique(kernel: Notebook) -> int:
    """Bytes of the tree's memory, each shared page once (PSS)."""
    found = 0
    for pid in kernel.lifecycle.capsule.processes():
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        found += next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) << 10
    return found


@asynccontextmanager
async def forked(tmp_path: Path, runtime_base: Path, code: str = WORKERS, **traits):
    async with notebook(tmp_path, runtime_base, **traits) as kernel:
        await kernel.run(code)
        yield kernel


@pytest.fixture
async def forks(tmp_path, runtime_base, criu_binary):
    async with forked(tmp_path, runtime_base) as kernel:
        yield kernel


async def wakes(kernel: Notebook, command: str = "show") -> None:
    assert await kernel.run(f"print(wrong({command!r}))") == "[]"
    await kernel.settled("running")


async def test_an_image_is_as_large_as_what_the_tree_has_of_its_own(forks):
    """Two cycles: after the first the processes share their memory by what CRIU has made of it."""
    for command in ("change", "show"):
        memory = unique(forks)
        image = await forks.provisioner.checkpoint()
        assert image.manifest.bytes <= 1.1 * memory
        assert len(shared_pages.references(image.criu_directory)) == 4
        await wakes(forks, command)
        assert unique(forks) <= 1.2 * memory, "they share it again"
        assert 0.7 * memory <= image.manifest.fingerprint["memory"] <= 1.2 * memory, "of this a wake makes sure"


async def test_tables_that_criu_does_not_take_are_left_out_of_the_second_attempt(forks, monkeypatch):
    damaged = []

    def damage(view, records):
        for path in view.glob("mm-*.img") if records else ():
            path.unlink()  # a link to the image's
            path.write_bytes(b"")
            damaged.append(path)

    await forks.provisioner.checkpoint()
    with monkeypatch.context() as patch:
        patch.setattr(vmas, "replace", damage)
        patch.setattr(vmas, "aligned", lambda directory: vmas.Aligned({"1": b""}, frozenset()))
        await wakes(forks)
    assert damaged, "the first attempt failed"


#: 20 MB at each hundred of addresses.  Next to them the kernel or the worker then has something of its own, which Linux
#: joins with it in the kernel; the worker has a mapping right below the last one.
GROWN = """
import ctypes, hashlib, multiprocessing, random
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
MB, BASE = 1 << 20, 0x200000000000
def new(start, size):
    at = BASE + start * MB
    assert libc.mmap(at, size * MB, 3, 0x100022, -1, 0) == at  # MAP_FIXED_NOREPLACE
    ctypes.memmove(at, random.Random(start).randbytes(size * MB), size * MB)
def content(parts):
    digest = hashlib.sha256()
    for start, size in parts: digest.update((ctypes.c_char * (size * MB)).from_address(BASE + start * MB))
    return digest.hexdigest()
SHARED = [(100 * number, 20) for number in range(6)]
for part in SHARED: new(*part)
def serve(pipe):
    mine = [(220, 5), (295, 5), (496, 2)]
    for part in mine: new(*part)
    pipe.send(content(SHARED + mine))
    for _ in iter(pipe.recv, None): pipe.send(content(SHARED + mine))
context = multiprocessing.get_context("fork")
pairs = [context.Pipe() for _ in range(3)]
workers = [context.Process(target=serve, args=(other,), daemon=True) for _, other in pairs]
for worker in workers: worker.start()
expected = [mine.recv() for mine, _ in pairs]
own = [(20, 5), (95, 5)]
for part in own: new(*part)
expected.append(content(SHARED + own))
def wrong(_):
    for mine, _ in pairs: mine.send("show")
    found = [*(mine.recv() for mine, _ in pairs), content(SHARED + own)]
    return [number for number, each in enumerate(found) if each != expected[number]]
assert not wrong("")
"""


async def test_what_processes_have_allocated_since_the_fork_does_not_keep_them_from_sharing(
    tmp_path, runtime_base, criu_binary
):
    async with forked(tmp_path, runtime_base, GROWN) as kernel:
        for _ in range(2):
            memory = unique(kernel)
            image = await kernel.provisioner.checkpoint()
            await wakes(kernel)
            assert unique(kernel) <= 1.2 * memory
            assert image.manifest.fingerprint["memory"] <= 1.2 * memory
        # What is one mapping is one again: Linux does not move parts of several.
        for start in (0, 95):
            moved = await kernel.run(
                f"print(libc.mremap(BASE + {start} * MB, 25 * MB, 40 * MB, 1), ctypes.get_errno())"
            )
            assert not moved.startswith(f"{(1 << 64) - 1} "), moved


async def test_a_kernel_that_is_alone_has_no_reference(kernel):
    await kernel.run("import os; held = os.urandom(1_000_000)")
    image = await kernel.provisioner.checkpoint()
    assert shared_pages.references(image.criu_directory) == {}
    assert not list(image.criu_directory.glob("shared-pages*"))


async def test_workers_whose_kernel_has_changed_its_memory_since(forks):
    await forks.run("held = random.Random(8).randbytes(40_000_000)")
    memory = unique(forks)
    image = await forks.provisioner.checkpoint()
    assert image.manifest.bytes <= 1.1 * memory
    await wakes(forks, "change")
    await forks.provisioner.checkpoint()
    await wakes(forks)
    assert await forks.run("print(held == random.Random(8).randbytes(40_000_000))") == "True"


NESTED = (
    WORKERS
    + """
def branch(pipe):
    global held
    more = random.Random(9).randbytes(20_000_000)
    def leaf(pipe):
        for _ in iter(pipe.recv, None):
            pipe.send(hashlib.sha256(held[:] + more).hexdigest())
    pairs = [context.Pipe() for _ in range(3)]
    leaves = [context.Process(target=leaf, args=(other,), daemon=True) for _, other in pairs]
    for one in leaves: one.start()
    for _ in iter(pipe.recv, None):
        for mine, _ in pairs: mine.send("show")
        pipe.send({mine.recv() for mine, _ in pairs})
pipe, other = context.Pipe()
trunk = context.Process(target=branch, args=(other,))
trunk.start()
leaves = hashlib.sha256(held[:] + random.Random(9).randbytes(20_000_000)).hexdigest()
def nested():
    pipe.send("show")
    return pipe.recv() == {leaves}
assert nested()
"""
)


async def test_forks_of_forks(tmp_path, runtime_base, criu_binary):
    async with forked(tmp_path, runtime_base, NESTED) as kernel:
        for _ in range(2):
            memory = unique(kernel)
            image = await kernel.provisioner.checkpoint()
            assert image.manifest.bytes <= 1.1 * memory
            assert len(shared_pages.references(image.criu_directory)) == 8
            assert await kernel.run("print(wrong(), nested())") == "[] True"
            await kernel.settled("running")
        await kernel.run("pipe.send(None); trunk.kill()")


RESERVE = "reserved = mmap.mmap(-1, 256 << 30, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | {flags}, 0)"


@pytest.mark.parametrize("by", ["worker", "kernel"])
async def test_more_addresses_are_reserved_than_there_is_memory(tmp_path, runtime_base, criu_binary, by):
    """CRIU maps them writable for a moment: of a process with a parent image, and what its parent process has, too.

    Linux refuses that for so much, unless it is mapped with MAP_NORESERVE (mmap names it since Python 3.13).
    """
    code = {
        "worker": WORKERS.replace("    for command", "    " + RESERVE.format(flags=0) + "\n    for command", 1),
        "kernel": "import mmap\n" + RESERVE.format(flags=0x4000) + WORKERS,
    }[by]
    async with forked(tmp_path, runtime_base, code) as kernel:
        image = await kernel.provisioner.checkpoint()
        assert len(shared_pages.references(image.criu_directory)) == (4 if by == "kernel" else 0)
        await wakes(kernel, "change")


async def test_reserved_addresses_that_count_as_used_and_that_workers_inherit_are_refused(
    tmp_path, runtime_base, criu_binary
):
    """CRIU could not restore them."""
    async with forked(tmp_path, runtime_base, "import mmap\n" + RESERVE.format(flags=0) + WORKERS) as kernel:
        with pytest.raises(UnprovenState, match=r"256\.0 GiB of reserved addresses"):
            await kernel.provisioner.checkpoint()
        assert await kernel.run("print(1)") == "1"


@pytest.mark.parametrize("when", ["before", "meanwhile", "after"])
async def test_a_worker_that_is_killed(forks, monkeypatch, when):
    """The first one, which the others have as their reference."""
    inner = await forks.run("print(workers[0].process.pid)")
    everybody = forks.lifecycle.capsule.processes()
    (pid,) = [pid for pid in everybody if procfs.status(pid)["NSpid"].split()[-1] == inner]
    if when == "before":
        os.kill(pid, signal.SIGKILL)
    if when == "meanwhile":
        finish = SharedPages.finish

        def late(self, check) -> None:
            if procfs.stat(pid).state != "Z":
                os.kill(pid, signal.SIGKILL)
            finish(self, check)

        monkeypatch.setattr(SharedPages, "finish", late)
    await forks.provisioner.checkpoint()
    monkeypatch.undo()
    await wakes(forks, "change")
    if when == "after":
        await forks.run("workers[0].process.kill(); workers[0].process.join()")
    assert await forks.run("print(sum(one.process.is_alive() for one in workers))") == "3"
    await forks.provisioner.checkpoint()
    await wakes(forks)


async def test_encrypted(tmp_path, runtime_base, criu_binary, monkeypatch):
    monkeypatch.setenv("KEY_OF_IMAGES", "0f" * 32)
    memory = tmp_path / "memory"
    memory.mkdir()
    traits = {"encryption_key": "env:KEY_OF_IMAGES", "memory_dir": str(memory)}
    async with forked(tmp_path, runtime_base, **traits) as kernel:
        for command in ("change", "show"):
            before = unique(kernel)
            image = await kernel.provisioner.checkpoint()
            assert image.manifest.encryption is not None
            assert image.manifest.bytes <= 1.1 * before
            await wakes(kernel, command)
    assert [path for path in memory.rglob("*") if path.is_file()] == []


async def test_moved_and_back(forks, tmp_path):
    image = await forks.provisioner.checkpoint()
    store, depot = forks.lifecycle.engine.store, Remote(f"file://{tmp_path}/depot")
    assert depot.push(image, remove_from=store) < ONCE
    assert not image.path.exists()
    depot.pull(image.id, Store(store.root, store.keys))
    await wakes(forks, "change")
    await forks.provisioner.checkpoint()
    await wakes(forks)


async def test_from_the_cold_tier(tmp_path, runtime_base, criu_binary):
    url = f"file://{tmp_path}/cold"
    async with forked(tmp_path, runtime_base, archive_url=url) as kernel:
        image = await kernel.provisioner.checkpoint()
        assert archive.archive(image, kernel.lifecycle.engine.store, Remote(url)) < ONCE
        await wakes(kernel)


async def test_a_quota_and_a_disk_with_space_for_shared_pages_once(tmp_path, runtime_base, criu_binary, monkeypatch):
    async with forked(tmp_path, runtime_base, image_quota=260 * MB) as kernel:
        resident = host_memory.resident(kernel.lifecycle.kernel)
        assert resident > 400 * MB
        monkeypatch.setattr(Store, "free", lambda _: resident)  # and not what an image has beside memory
        await kernel.provisioner.checkpoint()
        await wakes(kernel)
        monkeypatch.setattr(Store, "free", lambda _: 200 * MB)
        with pytest.raises(NoSpace):
            await kernel.provisioner.checkpoint()
        assert kernel.state == "running"


@pytest.mark.parametrize("name", [shared_pages.FILE, "pagemap-*.img", "pages-1.img"])
async def test_a_damaged_part_is_noticed(forks, name):
    image = await forks.provisioner.checkpoint()
    for path in image.criu_directory.glob(name):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(ImageDamaged):
            await forks.provisioner.restore()
        path.write_bytes(content)
    await wakes(forks)


async def test_accepted_changes_of_files_go_with_it(forks, tmp_path):
    """Both want a view of the image."""
    await forks.run("log = open('data.txt', 'w+'); log.write('one'); log.flush()")
    await forks.provisioner.checkpoint()
    (tmp_path / "data.txt").write_text("another one")
    await forks.provisioner.restore(accept_changed_files=True)
    await wakes(forks)


async def test_a_disk_that_is_full_at_the_end_leaves_the_kernel_running(forks, monkeypatch):
    def fail(self, check) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SharedPages, "finish", fail)
    with pytest.raises(NoSpace):
        await forks.provisioner.checkpoint()
    monkeypatch.undo()
    assert forks.state == "running"
    assert not list((forks.lifecycle.engine.store.root).glob(".draft-*"))
    await wakes(forks, "change")
    await forks.provisioner.checkpoint()
    await wakes(forks)


async def test_a_runtime_directory_without_space_for_the_view_keeps_the_image(forks, monkeypatch):
    image = await forks.provisioner.checkpoint()

    def fail(*_) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shared_pages, "add_parents", fail)
        with pytest.raises(RuntimeDirectory, match="No space left"):
            await forks.provisioner.restore()
    assert forks.state == "checkpointed"
    assert image.path.exists()
    await wakes(forks)
    assert not list(forks.lifecycle.kernel.home.runtime_dir.glob("view-*"))
