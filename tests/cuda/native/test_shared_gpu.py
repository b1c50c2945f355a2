"""Notebooks that share a GPU on which one of them fits: real kernels, gates and library, a double of the driver."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import until
from sharing_kernels import CELL, MIB, SharedHost, sharing
from waiting import until as blocking_until

from jupyter_gpu_ckpt.errors import GpuFull, HostError
from jupyter_gpu_ckpt.lifecycle.plans import State
from jupyter_gpu_ckpt.server import models
from jupyter_gpu_ckpt.sharing.participant import Residence
from jupyter_gpu_ckpt.testing.fake_cuda import FakeGpus

A, B = "GPU-00000000-0000-0000-0000-00000000000a", "GPU-00000000-0000-0000-0000-00000000000b"
KINDS = ("computing", "waiting", "idle")


#: Defines ``grow(mib, file, way)``: allocates more, by one of these ways, on a device that is full until the file is
#: there.
GROW = """
import pathlib, threading
class Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]
class Wanted(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", Location), ("rest", ctypes.c_char * 16)]
def grow(mib, file, way="malloc"):
    driver.double_set_bytes(ctypes.c_size_t(16 << 20))
    def look():
        while not pathlib.Path(file).exists():
            time.sleep(0.01)
        driver.double_set_bytes(ctypes.c_size_t(1 << 40))
        pathlib.Path(file).unlink()
    threading.Thread(target=look, daemon=True).start()
    more, size, pitch = ctypes.c_void_p(), ctypes.c_size_t(mib << 20), ctypes.c_size_t()
    if way == "malloc":
        return runtime.cudaMalloc(ctypes.byref(more), size)
    if way == "pitch":
        width = ctypes.c_size_t(1 << 20)
        return driver.cuMemAllocPitch_v2(ctypes.byref(more), ctypes.byref(pitch), width, ctypes.c_size_t(mib), 16)
    if way == "create":
        wanted = Wanted(1, 0, Location(1, 0))
        return driver.cuMemCreate(ctypes.byref(more), size, ctypes.byref(wanted), ctypes.c_ulonglong())
    return driver.cuMemAllocAsync(ctypes.byref(more), size, None)
"""
#: Defines ``begin(file)``: creates the process's first context on a device that is full until the file is there.
BEGIN = """
import ctypes, pathlib, threading, time
driver = ctypes.CDLL("libcuda.so.1")
def begin(file, create="cuDevicePrimaryCtxRetain"):
    driver.double_set_bytes(ctypes.c_size_t(4 << 30))
    driver.double_fail(create.encode(), ctypes.c_long(1), True, 2)
    def look():
        while not pathlib.Path(file).exists():
            time.sleep(0.01)
        driver.double_fail(b"*", ctypes.c_long(0), False, 0)
        pathlib.Path(file).unlink()
    threading.Thread(target=look, daemon=True).start()
    context = ctypes.c_void_p()
    if create == "cuDevicePrimaryCtxRetain":
        return driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    return getattr(driver, create)(ctypes.byref(context), 0, 0)
"""
#: cudaErrorMemoryAllocation.
NO_MEMORY = "2"


@pytest.fixture
def host(tmp_path, runtime_base, programs, doubles, criu_binary, monkeypatch):
    return SharedHost(tmp_path, runtime_base, programs, doubles, monkeypatch, {A: 100 * MIB})


@contextlib.asynccontextmanager
async def two(host, **traits):
    """Two notebooks of 68 MiB each; the second one has the GPU."""
    async with host.notebook("one", **traits) as one, host.notebook("two", **traits) as two:
        await host.allocate(one, 60, 1, A)
        await asyncio.to_thread(one.lifecycle.yield_gpu)
        await host.allocate(two, 60, 2, A)
        yield one, two


async def test_memory_is_taken_from_the_idle_one_and_a_cell_without_cuda_moves_nothing(host):
    async with two(host) as (one, other):
        states = []
        for kernel in (one, other):
            kernel.provisioner.on_state.append(states.append)
        assert await one.run("print(6 * 7)") == "42"
        assert (states, one.state, other.state) == ([], "off_gpu", "running")
        assert await one.run("n = compute(0.05); print(intact())") == "True"
        assert one.state == "running"
        await until(lambda: other.state == "off_gpu")  # it still leaves when the other one is back
        await until(lambda: sharing(one).participant.turn is None)
        # And back, which the other's cell says on its stderr.
        assert await other.run("n = compute(0.05); print(intact())") == "True"
        await until(lambda: one.state == "off_gpu")
        for kernel in (one, other):
            assert await kernel.run("print(intact(), n > 0)") == "True True"


def looks() -> bool:
    """Return whether the server has a thread that looks at kernels that share GPUs."""
    return any(thread.name == "gpu-ckpt-sharing" for thread in threading.enumerate())


async def test_a_kernel_that_does_not_use_cuda_costs_no_thread_no_file_and_no_call_of_the_driver(host):
    async with host.notebook("one", gpu_sharing="room") as one:
        await until(lambda: not looks())
        assert await one.run("import time; print(6 * 7)") == "42"
        busy = asyncio.create_task(one.run("time.sleep(0.5); print('done')"))
        await until(looks)
        assert await busy == "done"
        await until(lambda: not looks())
        assert "shared GPU" not in await one.run("%gpu_checkpoint --status")
        await until(lambda: not looks())
        assert not host.exchange.directory.exists()
        assert [op for op, _ in host.driver.calls if op.startswith("nvml")] == []
        await host.allocate(one, 60, 1, A)
        await until(lambda: sharing(one).participant.on == (A,))
        assert "shared GPU" in await one.run("%gpu_checkpoint --status")
        assert looks()
    await until(lambda: not looks())
    assert host.exchange.participants == ()


async def test_the_first_call_of_cuda_in_a_long_cell_is_seen(host):
    async with host.notebook("one", gpu_sharing="room") as one:
        await until(lambda: not looks())
        host.driver.start({A: 68 * MIB}, pid=one.lifecycle.capsule.host_pid)
        busy = asyncio.create_task(one.run(CELL.format(bytes=60 * MIB, value=1) + "compute(2.0)"))
        await until(lambda: sharing(one).participant.turn is not None)
        assert not busy.done()
        await busy


async def test_a_restarted_kernel_does_not_take_part_by_the_last_ones_socket(host):
    async with host.notebook("one", gpu_sharing="room") as one:
        await host.allocate(one, 60, 1, A)
        await until(lambda: sharing(one).participant.on == (A,))
        host.driver.remove(one.lifecycle.capsule.host_pid)
        await one.manager.restart_kernel(now=True)
        await one.client.wait_for_ready(timeout=60)
        assert await one.run("print(1)") == "1"
        await until(lambda: not looks())
        assert not sharing(one).participant.on


def replace_by(directory: Path, make: Callable[[Path], object]) -> None:
    """Have something else in the place of a directory, at no moment nothing: kernels would make it again."""
    other = directory.with_name("other")
    make(other)
    at_fdcwd, rename_exchange = -100, 2
    libc = ctypes.CDLL(None, use_errno=True)
    paths = os.fsencode(directory), os.fsencode(other)
    assert libc.renameat2(at_fdcwd, paths[0], at_fdcwd, paths[1], rename_exchange) == 0, ctypes.get_errno()


@pytest.mark.parametrize("where", ["never", "lost", "replaced"])
async def test_where_no_directory_can_be_used_kernels_run_suspend_and_come_back(host, where, caplog):
    """A file in its place, from the beginning or later; or a link, which nobody follows."""
    directory = host.exchange.directory
    if where == "never":
        directory.write_text("")
    async with host.notebook("one", gpu_sharing="room") as one:
        await host.allocate(one, 60, 1, A)
        if where != "never":
            await until(lambda: sharing(one).participant.on == (A,))
            if where == "replaced":
                replace_by(directory, lambda path: path.symlink_to(host.directory))
            else:
                replace_by(directory, Path.touch)
        assert await one.run("print(intact())") == "True"
        await until(lambda: "GPUs cannot be shared now" in caplog.text)
        await one.provisioner.suspend()
        with pytest.raises(HostError, match="directory of the GPU locks"):
            await one.provisioner.resume()
        assert one.state == "suspended"
        directory.unlink()
        assert await one.run("print(intact())") == "True"
        await until(lambda: sharing(one).participant.on == (A,))
    assert caplog.text.count("GPUs cannot be shared now") <= 2, "not at each look"
    assert "A listener failed" not in caplog.text


async def test_without_the_library_a_kernel_takes_part_once_it_has_loaded_the_driver(host):
    async with host.notebook("one", gpu_sharing="room", fast_path="off") as one:
        assert await one.run("print(1)") == "1"
        await until(lambda: not looks())
        host.driver.start({A: 68 * MIB}, pid=one.lifecycle.capsule.host_pid)
        assert await one.run("print(2)") == "2"
        await until(lambda: sharing(one).participant.on == (A,))


async def test_of_two_idle_kernels_the_one_that_is_mirrored_leaves(host):
    kept = {"host_copy_bytes": 1 << 30}
    async with host.notebook("third") as third, host.notebook("one") as one, host.notebook("two", **kept) as two:
        await host.allocate(third, 50, 3, A)
        await asyncio.to_thread(third.lifecycle.yield_gpu)
        for value, kernel in enumerate((one, two), start=1):
            await host.allocate(kernel, 22, value, A)
            await until(lambda kernel=kernel: sharing(kernel).participant.on == (A,))
        assert not sharing(two).participant.mirrored
        assert await two.provisioner.mirror()
        await until(lambda: sharing(two).participant.mirrored)
        assert await third.run("n = compute(0.05); print(intact())") == "True"
        await until(lambda: two.state == "off_gpu")
        assert one.state == "running", "although it has been idle for longer"
        assert not sharing(two).participant.mirrored
        for kernel in (one, two):
            assert await kernel.run("print(intact())") == "True"


async def test_cells_that_compute_at_the_same_time_take_turns_and_all_end(host):
    async with two(host) as (one, other):
        states = []
        for kernel in (one, other):
            kernel.provisioner.on_state.append(lambda state, kernel=kernel: states.append((kernel, state)))
        cells = [kernel.run("n = compute(2.0); print(intact())") for kernel in (one, other)]
        assert await asyncio.gather(*cells) == ["True", "True"]
        moves = [kernel for kernel, state in states if state is State.OFF_GPU]
        assert moves.count(one) >= 1, "taken away in the middle of its cell"
        assert moves.count(other) >= 1
        assert all(sharing(kernel).participant.used > 0 for kernel in (one, other))


async def test_a_cell_says_what_it_waits_for_and_an_interrupt_gives_the_place_back(host):
    async with two(host) as (one, other):
        other.provisioner.agent_requests.protect(3600)  # the idle one keeps its memory
        await until(lambda: sharing(other).participant.on == (A,))
        said = []
        cell = asyncio.create_task(
            one.client.execute_interactive(
                "compute(0.05)",
                timeout=60,
                allow_stdin=False,
                output_hook=lambda m: said.append(m["content"].get("text", m["content"].get("ename", ""))),
            )
        )
        await until(lambda: any("waiting for GPU 0: next" in text for text in said))
        waiting = sharing(one).waiting()
        assert (waiting["gpu"], waiting["place"]) == (A, 1)
        assert other.state == "running"
        document = models.kernel("k", "python3", one.provisioner, None, None, None)
        assert document["gpu_wait"]["place"] == 1
        assert document["gpu_wait"]["index"] == 0
        assert document["off_gpu"], "its other cells run"
        on_gpu = sharing(other).queue(A, {sharing(one).participant.kernel: "k"})
        shown = {state: [(entry["bytes"], entry["kernel"]) for entry in on_gpu.pop(state)] for state in KINDS}
        assert shown == {"computing": [], "waiting": [(68 * MIB, "k")], "idle": [(68 * MIB, None)]}
        assert on_gpu == {"factor": 1, "silent_bytes": 0}
        assert re.search("shared GPU +.*1 other waits", await other.run("%gpu_checkpoint --status"))
        await one.manager.interrupt_kernel()
        reply = await asyncio.wait_for(cell, 60)
        assert reply["content"]["status"] == "error"
        await until(lambda: sharing(one).participant.waiting_since is None)
        assert sharing(one).waiting() is None
        assert one.state == "off_gpu"
        other.provisioner.agent_requests.protect(0)
        assert await one.run("n = compute(0.05); print(intact())") == "True"


@pytest.fixture
def freed(tmp_path, monkeypatch):
    """Have the kernel's own device get memory when its GPU has 40 MiB free; return the file that says so."""
    free, is_free = FakeGpus.free, tmp_path / "is-free"

    def as_the_device_has_it(gpus: FakeGpus, uuid: str) -> int:
        bytes = free(gpus, uuid)
        if bytes >= 40 * MIB and not seen:
            seen.append(bytes)
            is_free.touch()
            blocking_until(lambda: not is_free.exists(), "the kernel's device has it, too")
        return bytes

    seen: list[int] = []
    yield lambda: monkeypatch.setattr(FakeGpus, "free", as_the_device_has_it) or str(is_free)
    assert seen


async def both_are_there(host, one, two) -> None:
    """Have both kernels on GPU A, where ``two`` has what ``one`` will want."""
    await host.allocate(two, 60, 2, A)
    await host.allocate(one, 8, 1, A)
    await one.run(GROW)
    await until(lambda: sharing(one).participant.on == sharing(two).participant.on == (A,))


@pytest.mark.parametrize("other_computes", [False, True])
async def test_an_allocation_waits_until_others_have_left_with_their_memory(host, freed, other_computes):
    async with host.notebook("one") as one, host.notebook("two") as two:
        await both_are_there(host, one, two)
        file = freed()
        if other_computes:
            busy = asyncio.create_task(two.run("n = compute(1.0); print(intact())"))
            await until(lambda: sharing(two).participant.turn is not None)
        assert await one.run(f"print(grow(40, {file!r}), intact())") == "0 True"
        if other_computes:
            assert await busy == "True"
        assert await two.run("print(intact())") == "True"


@pytest.mark.parametrize("way", ["pitch", "create", "in order"])
async def test_other_allocations_wait_likewise(host, freed, way):
    async with host.notebook("one") as one, host.notebook("two") as two:
        await both_are_there(host, one, two)
        assert await one.run(f"print(grow(40, {freed()!r}, {way!r}), intact())") == "0 True"
        await until(lambda: two.state == "off_gpu")


@pytest.mark.parametrize("create", ["cuDevicePrimaryCtxRetain", "cuCtxCreate_v2"])
async def test_the_first_context_of_a_kernel_waits_until_others_have_left(host, freed, create):
    async with host.notebook("one") as one, host.notebook("two") as two:
        await host.allocate(two, 80, 2, A)
        await until(lambda: sharing(two).participant.on == (A,))
        host.driver.start({}, pid=one.lifecycle.capsule.host_pid)
        assert await one.run(BEGIN + f"print(begin({freed()!r}, {create!r}))") == "0"
        await until(lambda: two.state == "off_gpu")
        assert sharing(one).participant.granted_at is not None, "by a turn, as a kernel that comes back"
        await host.allocate(one, 60, 1, A)
        await until(lambda: sharing(one).participant.residence is Residence.PRESENT)
        assert await two.run("print(intact())") == "True"
        await until(lambda: one.state == "off_gpu")
        assert await one.run("print(intact())") == "True"


async def test_memory_that_a_context_had_which_did_not_come_about_is_no_turn(host, freed, tmp_path):
    """The driver has some while it creates one, which may be seen, and gives it back where the rest is missing."""
    async with host.notebook("one") as one, host.notebook("two") as two:
        await host.allocate(two, 80, 2, A)
        await until(lambda: sharing(two).participant.on == (A,))
        pid, missing = one.lifecycle.capsule.host_pid, tmp_path / "missing"
        sharing(one)._takes_part = True  # as by an earlier call of CUDA
        host.driver.start({A: 4 * MIB}, pid=pid)
        wait = f"while not pathlib.Path({str(missing)!r}).exists(): time.sleep(0.01)"
        cell = asyncio.create_task(one.run(f"{BEGIN}\n{wait}\nprint(begin({freed()!r}))"))
        await until(lambda: sharing(one).participant.turn is not None)
        host.driver.start({}, pid=pid)
        missing.touch()
        assert await cell == "0"
        await until(lambda: two.state == "off_gpu")


async def test_a_first_context_that_comes_to_nothing_leaves_its_place_to_others(host, tmp_path):
    """The wish doubles until the kernel may not have as much; then the program gets the driver's error."""
    async with host.notebook("one") as one, host.notebook("two") as two:
        never = str(tmp_path / "never")
        host.driver.start({}, pid=one.lifecycle.capsule.host_pid)
        assert await one.run(BEGIN + f"print(begin({never!r}))") == NO_MEMORY
        await until(lambda: sharing(one).participant.residence is Residence.AWAY)
        assert sharing(one).participant.waiting_since is None
        await host.allocate(two, 80, 2, A)
        assert await two.run("n = compute(0.05); print(intact())") == "True"
        assert await one.run("print('runs')") == "runs"


async def test_an_allocation_that_no_sharing_kernel_stands_in_the_way_of_fails_as_without_sharing(host, tmp_path):
    async with host.notebook("one") as one:
        await host.allocate(one, 8, 1, A)
        host.driver.start({A: 60 * MIB})
        await one.run(GROW)
        never = str(tmp_path / "never")
        assert await one.run(f"print(grow(40, {never!r}), grow(200, {never!r}))") == f"{NO_MEMORY} {NO_MEMORY}"
        assert one.state == "running"
        assert await one.run("n = compute(0.05); print(intact())") == "True"


async def test_four_kernels_run_all_cells_once_and_lose_nothing(host):
    """Two with a long cell, two with short ones that come again and again; messages are answered in order, and once."""
    async with contextlib.AsyncExitStack() as stack:
        kernels = []
        for number in range(4):
            kernel = await stack.enter_async_context(host.notebook(f"k{number}"))
            await host.allocate(kernel, 60, number + 1, A)
            await asyncio.to_thread(kernel.lifecycle.yield_gpu)
            kernels.append(kernel)

        async def run(kernel, cells: int, seconds: float) -> list[str]:
            await kernel.run("ran = []")
            code = f"ran.append(compute({seconds})); print(len(ran), intact())"
            ids = [kernel.client.execute(code) for _ in range(cells)]
            replies = [await asyncio.wait_for(kernel.client.get_shell_msg(), 120) for _ in ids]
            assert [reply["parent_header"]["msg_id"] for reply in replies] == ids
            assert {reply["content"]["status"] for reply in replies} == {"ok"}
            return await kernel.run("print(len(ran), intact())")

        plans = [(1, 2.0), (1, 2.0), (3, 0.1), (3, 0.1)]
        said = await asyncio.gather(*(run(kernel, *plan) for kernel, plan in zip(kernels, plans, strict=True)))
        assert said == ["1 True", "1 True", "3 True", "3 True"]


async def test_an_allocation_beyond_the_whole_gpu_fails_at_once(host, tmp_path, monkeypatch):
    """A kernel that is alone, and runs out of memory, waits for nobody."""
    monkeypatch.setattr("jupyter_gpu_ckpt.kernel.gpu_sharing._SURE_S", 1e9)
    async with host.notebook("one", gpu_sharing="room") as one:
        await host.allocate(one, 8, 1, A)
        await one.run(GROW)
        assert await one.run(f"print(grow(100, {str(tmp_path / 'never')!r}))") == NO_MEMORY
        assert await one.run("print(intact())") == "True"


async def test_beside_programs_that_do_not_share_a_kernel_that_is_the_only_one_to_share_waits_for_nobody(
    host, tmp_path, monkeypatch
):
    async with host.notebook("one", gpu_sharing="room") as one:
        await host.allocate(one, 8, 1, A)
        host.driver.start({A: 60 * MIB})
        await one.run(GROW)
        await until(lambda: sharing(one)._alone_since is not None)
        monkeypatch.setattr("jupyter_gpu_ckpt.kernel.gpu_sharing._SURE_S", 1e6)
        sharing(one)._alone_since = -1e9  # for longer than that
        assert await one.run(f"print(grow(40, {str(tmp_path / 'never')!r}))") == NO_MEMORY
        assert await one.run("print(intact())") == "True"


async def test_in_room_memory_of_programs_that_do_not_share_is_not_waited_for_without_end(host):
    async with host.notebook("one", gpu_sharing="room") as one:
        await host.allocate(one, 60, 1, A)
        await one.provisioner.suspend()
        other = host.driver.start({A: 60 * MIB})
        state = one.lifecycle.kernel
        state.settings = dataclasses.replace(state.settings, reservation=1.0)
        with pytest.raises(GpuFull, match=r"needs 68\.00 MiB on a GPU; .* have 40\.00 MiB of it together"):
            await one.provisioner.resume()
        assert one.state == "suspended"
        host.driver.remove(other)
        assert await one.run("print(intact())") == "True"


async def test_in_room_a_kernel_that_computes_keeps_its_gpu_and_a_wake_waits_for_the_end_of_its_cell(host):
    async with two(host, gpu_sharing="room") as (one, other):
        await one.provisioner.suspend()
        assert one.state == "suspended", "by its user: the process has no cell that could run before it is back"
        seen = []
        other.provisioner.on_state.append(seen.append)
        busy = asyncio.create_task(other.run("n = compute(3.0); print(intact())"))
        await until(lambda: sharing(other).participant.turn is not None)
        assert await one.run("n = compute(0.05); print(intact())") == "True"
        assert busy.done(), "it was not taken away in the middle"
        assert await busy == "True"
        await until(lambda: other.state == "off_gpu")  # it still leaves when the other one is back
        assert (seen, one.state) == ([State.YIELDING, State.OFF_GPU], "running")
