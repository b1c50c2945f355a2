"""Save points that nobody has named: when they are made, what they are good for, and how many are kept."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import notebook
from harness import until as until_async
from live import server, until

from jupyter_gpu_ckpt.errors import GateError
from jupyter_gpu_ckpt.image import save_point
from jupyter_gpu_ckpt.lifecycle.plans import State
from jupyter_gpu_ckpt.server import idle_saves

CONFIG = """
from jupyter_gpu_ckpt.server import idle_saves
idle_saves.INTERVAL = 0.1
c.GpuCkptProvisioner.save_when_idle = 0.01
c.GpuCkptProvisioner.automatic_save_points = 3
"""


@pytest.fixture(scope="module")
def living(tmp_path_factory, module_runtime_base, criu_binary):
    with server(tmp_path_factory.mktemp("automatic"), module_runtime_base) as running:
        yield running


def saves(living, kernel_id: str) -> list[str]:
    """The reasons of the kernel's save points, oldest first."""
    found = living.get(f"gpu-ckpt/kernels/{kernel_id}/saves")
    assert all(each["automatic"] for each in found)
    return [each["name"].partition(" 20")[0] for each in found]


def said(living, kernel_id: str) -> str:
    """Return the output of the first cell of a restarted kernel; empty while it is being restarted."""
    with contextlib.suppress(AssertionError, TimeoutError):
        return str(living.run(kernel_id, "pass"))
    return ""


def newest(living, kernel_id: str) -> str:
    return str(living.get(f"gpu-ckpt/kernels/{kernel_id}/saves")[-1]["name"])


def test_a_restart_can_be_undone(living):
    kernel_id = living.start_kernel()
    living.run(kernel_id, "x = 41")
    assert living.ask("POST", f"api/kernels/{kernel_id}/restart").ok
    assert living.run(kernel_id, "print('x' in dir())") == "False"
    assert saves(living, kernel_id) == ["before a restart"]
    assert living.do(kernel_id, "back", {"name": newest(living, kernel_id)})["error"] is None
    assert living.run(kernel_id, "print(x + 1)") == "42"
    assert saves(living, kernel_id) == ["before a restart", "before going back"]


def test_a_restart_right_behind_the_cell_that_woke_the_kernel_can_be_undone(living):
    kernel_id = living.start_kernel()
    living.run(kernel_id, "x = 41")
    assert living.do(kernel_id, "checkpoint")["error"] is None
    assert living.run(kernel_id, "print(x)") == "41"
    assert living.ask("POST", f"api/kernels/{kernel_id}/restart").ok
    assert saves(living, kernel_id) == ["before a restart"]


@pytest.mark.parametrize("moment", ["asleep", "falling asleep", "waking"])
def test_a_restart_of_a_sleeping_kernel_can_be_undone(living, moment):
    """Its image is there already: it becomes the save point, also while it is being written or restored."""
    kernel_id = living.start_kernel()
    living.run(
        kernel_id, "import multiprocessing, os; x, lock, big = 41, multiprocessing.Lock(), os.urandom(100 << 20)"
    )
    if moment != "falling asleep":
        assert living.do(kernel_id, "checkpoint")["error"] is None
    asleep = [each["id"] for each in living.get("gpu-ckpt/images") if each["kernel_id"] == kernel_id]
    if moment != "asleep":
        verb = "checkpoint" if moment == "falling asleep" else "restore"
        assert living.ask("POST", f"gpu-ckpt/kernels/{kernel_id}/{verb}").ok
    assert living.ask("POST", f"api/kernels/{kernel_id}/restart").ok
    assert living.run(kernel_id, "print('x' in dir())") == "False"
    assert saves(living, kernel_id) == ["before a restart"]
    point = living.get(f"gpu-ckpt/kernels/{kernel_id}/saves")[0]
    assert not point["asleep"]
    assert [point["image"]] == asleep or not asleep  # not a copy
    compared = living.get(f"gpu-ckpt/kernels/{kernel_id}/saves/{point['name']}/compare")
    assert not compared["complete"]  # nobody has listed the variables of an image
    assert compared["gone"] == compared["added"] == []
    for _ in range(2):
        assert living.do(kernel_id, "back", {"name": point["name"]})["error"] is None
        assert living.run(kernel_id, "with lock: print(x + 1)") == "42"
    living.ask("DELETE", f"api/kernels/{kernel_id}")
    assert kernel_id not in [image["kernel_id"] for image in living.get("gpu-ckpt/images")]


def test_files_and_shared_memory_go_back_to_before_the_restart_of_a_sleeping_kernel(living):
    kernel_id = living.start_kernel()
    code = "from multiprocessing.shared_memory import SharedMemory; log = open('log', 'w+'); _ = log.write('then')\n"
    code += "log.flush(); block = SharedMemory(create=True, size=5); block.buf[:] = b'hello'; print(block.name)"
    memory = Path("/dev/shm", living.run(kernel_id, code))
    assert living.do(kernel_id, "checkpoint")["error"] is None
    assert living.ask("POST", f"api/kernels/{kernel_id}/restart").ok
    assert not memory.exists()
    living.run(kernel_id, "_ = open('log', 'a').write(' and now')")
    back = {"name": newest(living, kernel_id), "files": "then"}
    assert living.do(kernel_id, "back", back)["error"] is None
    assert living.run(kernel_id, "_ = log.seek(0); print(log.read(), bytes(block.buf))") == "then b'hello'"
    living.ask("DELETE", f"api/kernels/{kernel_id}")
    assert list(memory.parent.glob(f"{memory.name}*")) == []


def test_a_sleeping_kernel_that_is_too_large_leaves_nothing_at_its_restart(tmp_path, runtime_base, criu_binary):
    with server(tmp_path, runtime_base, config="c.GpuCkptProvisioner.save_before_restarts = 1000") as living:
        kernel_id = living.start_kernel()
        assert living.do(kernel_id, "checkpoint")["error"] is None
        assert living.ask("POST", f"api/kernels/{kernel_id}/restart").ok
        assert living.run(kernel_id, "print(1)") == "1"
        assert living.get("gpu-ckpt/images") == []


def test_a_restart_that_leaves_no_save_point_says_why(tmp_path, runtime_base, criu_binary):
    """REST has nobody to ask; in a browser the restart was confirmed before."""
    with server(tmp_path, runtime_base, config="c.GpuCkptProvisioner.image_quota = 1") as living:
        kernel_id = living.start_kernel()
        living.run(kernel_id, "x = 41")
        assert living.ask("POST", f"api/kernels/{kernel_id}/restart").ok
        notice = living.run(kernel_id, "print('x' in dir())")
        assert "no save point could be made before the restart (QUOTA_EXCEEDED: " in notice
        assert notice.endswith("False")
        assert living.run(kernel_id, "import os; print('JUPYTER_GPU_CKPT_NOTICE' in os.environ)") == "False"
        assert living.ask("DELETE", f"api/kernels/{kernel_id}").ok  # it could not sleep as the server ends


def test_a_restart_of_a_sleeping_kernel_whose_image_is_no_good_says_why(living):
    kernel_id = living.start_kernel()
    assert living.do(kernel_id, "checkpoint")["error"] is None
    (image,) = (living.home / "images").rglob(f"[!.]*-{kernel_id[:8]}-*")
    (image / "manifest.mac").write_text("{}")
    assert living.ask("POST", f"api/kernels/{kernel_id}/restart").ok
    assert "no save point could be made before the restart (IMAGE_FORGED: " in living.run(kernel_id, "pass")


def test_a_busy_kernel_is_restarted_at_once(living):
    kernel_id = living.start_kernel()
    with living.client(kernel_id) as client:
        client.execute("import time; time.sleep(1000)")
        until(lambda: living.get(f"api/kernels/{kernel_id}")["execution_state"] == "busy")
        assert living.ask("POST", f"api/kernels/{kernel_id}/restart").ok
    assert saves(living, kernel_id) == []


def test_before_a_risky_cell_there_is_a_save_point_and_a_kernel_that_dies_in_it_offers_that(living):
    kernel_id = living.start_kernel()
    living.run(kernel_id, "x = 41")
    assert living.run(kernel_id, "\n%%risky\nx += 1\nprint(x)") == "42"
    assert saves(living, kernel_id) == ["before a risky cell"]
    assert living.run(kernel_id, "print('%%risky is no mark here')") == "%%risky is no mark here"
    with living.client(kernel_id) as client:  # nor here: IPython gets that line, and does not know it
        reply = client.execute_interactive("%%risky cell", timeout=60, output_hook=lambda _: None)
    assert reply["content"]["status"] == "error"
    assert saves(living, kernel_id) == ["before a risky cell"]
    with living.client(kernel_id) as client:
        client.execute("%%risky\nimport os; os._exit(3)")
        until(lambda: "restarting kernel" in (living.home / "server.log").read_text())  # a cell before that is lost
    offered = until(lambda: said(living, kernel_id))
    assert len(saves(living, kernel_id)) == 2
    assert "ended with status 3" in offered
    assert f"%gpu_checkpoint --back {newest(living, kernel_id)!r}" in offered
    assert living.do(kernel_id, "back", {"name": newest(living, kernel_id)})["error"] is None
    assert living.run(kernel_id, "print(x)") == "42"


@pytest.mark.parametrize(
    ("cell", "signal"), [("import ctypes; ctypes.string_at(0)", 11), ("import os; os.kill(os.getpid(), 9)", 9)]
)
def test_a_kernel_that_a_signal_ends_offers_its_last_save_point(living, cell, signal):
    kernel_id = living.start_kernel()
    living.run(kernel_id, "x = 41")
    assert living.do(kernel_id, "save", {"name": "one"})["error"] is None
    for _ in range(2):  # the second time there is a save point of the fresh kernel, too
        restarted = living.log.count("restarting kernel")
        with living.client(kernel_id) as client:
            client.execute(cell)
            until(lambda: living.log.count("restarting kernel") > restarted)  # noqa: B023 - a cell before that is lost
        offered = until(lambda: said(living, kernel_id))
        assert f"The kernel was ended by signal {signal}; this is a fresh one." in offered
        assert offered.endswith("to go back to it: %gpu_checkpoint --back one")
        assert living.do(kernel_id, "back", {"name": "one"})["error"] is None
        assert living.run(kernel_id, "print(x)") == "41"


def test_a_risky_cell_does_not_run_without_a_save_point(living):
    kernel_id = living.start_kernel()
    living.run(kernel_id, "import os; ends = os.pipe2(os.O_DIRECT)")
    with living.client(kernel_id) as client:
        reply = client.execute_interactive("%%risky\nends = None", timeout=60, output_hook=lambda _: None)
    assert reply["content"]["ename"] == "FILE_UNSUPPORTED", reply["content"]
    assert "Left behind: the cell has not run." in reply["content"]["traceback"]
    assert saves(living, kernel_id) == []
    assert living.run(kernel_id, "[os.close(end) for end in ends]; print('closed')") == "closed"
    assert living.run(kernel_id, "%%risky\nprint(1)") == "1"
    assert saves(living, kernel_id) == ["before a risky cell"]


def test_an_idle_kernel_is_saved_once_until_it_is_used_again(tmp_path, runtime_base, criu_binary):
    with server(tmp_path, runtime_base, config=CONFIG) as living:
        kernel_id = living.start_kernel()
        for number in range(1, 5):
            living.run(kernel_id, f"x = {number}")
            until(lambda number=number: number in cells(living, kernel_id))
        until(lambda: len(cells(living, kernel_id)) == 3)  # one goes once the newest is there
        assert cells(living, kernel_id) == [1, 3, 4]
        assert saves(living, kernel_id) == ["idle"] * 3


def cells(living, kernel_id: str) -> list[int]:
    """The cells after which the kernel's save points were made, oldest first."""
    return [each["cell"] for each in living.get(f"gpu-ckpt/kernels/{kernel_id}/saves")]


async def test_after_each_cell(tmp_path, runtime_base, criu_binary):
    async with notebook(tmp_path, runtime_base, save_after_cells=True, automatic_save_points=2) as kernel:
        store, id = kernel.lifecycle.engine.store, kernel.provisioner.kernel_id

        def cells() -> dict[int, str]:
            points = map(save_point.of_image, save_point.of_kernel(store.images(), id).values())
            return {point.cell: point.name for point in points if point is not None}

        def keeps() -> int:
            return len([event for event in kernel.steps.completed() if event.step == "keep"])

        for number in range(4):
            await kernel.run(f"x = {number}")
            await until_async(lambda cell=number + 1: cell in cells())  # a cell that comes sooner has its own only
        await until_async(lambda: list(cells()) == [3, 4])
        await until_async(lambda: keeps() == 4)
        kernel.client.execute("import pathlib\nwhile not pathlib.Path('go').exists(): pass")
        for number in range(5):  # all of them are in the kernel before the first has ended
            kernel.client.execute(f"x = {number}")
        await until_async(lambda: kernel.provisioner.gate.under_way.cells == 6)
        (tmp_path / "go").touch()
        await until_async(lambda: list(cells())[-1] == 10)
        assert await kernel.run("print(x)") == "4"
        await until_async(lambda: list(cells()) == [10, 11])
        await until_async(lambda: keeps() >= 6)
        assert keeps() == 6
        assert {name.partition(" 20")[0] for name in cells().values()} == {"after a cell"}
        await kernel.provisioner.back(cells()[10])
        assert await kernel.run("print(x)") == "4"


async def test_a_kernel_whose_gate_has_failed_keeps_no_other_from_being_saved():
    """The rounds continue for the whole life of the server."""
    saved = []

    class Kernel(SimpleNamespace):
        state, save_when_idle, log = State.RUNNING, 0.01, logging.getLogger("kernel")
        lifecycle = None

        async def save_automatically(self, why: str) -> None:
            saved.append(why)

    class FailedGate:
        @property
        def under_way(self):
            raise GateError("The call was cancelled: the gate's thread failed.")

    good = SimpleNamespace(under_way=SimpleNamespace(cells=0), last_activity=0.0, queries=0)
    kernels = {"a": Kernel(gate=FailedGate()), "b": Kernel(gate=good)}
    await idle_saves.IdleSaves(lambda: kernels).round()
    assert saved == ["idle"]


async def test_a_kernel_whose_thread_works_is_saved_again_and_one_that_does_nothing_is_not(kernel):
    provisioner, store = kernel.provisioner, kernel.lifecycle.engine.store
    provisioner.save_when_idle = 0.001
    rounds = idle_saves.IdleSaves(lambda: {provisioner.kernel_id: provisioner})

    def counted() -> int:
        return len(save_point.of_kernel(store.images(), provisioner.kernel_id))

    async def saved(count: int) -> None:
        while counted() < count:
            await rounds.round()
            await asyncio.sleep(0.02)

    await kernel.run("x = 0")
    await asyncio.wait_for(saved(1), 60)
    for _ in range(20):
        await asyncio.sleep(0.02)
        await rounds.round()
    assert counted() == 1, "another would be the same"
    await kernel.run(
        "import threading\ndef train():\n    global x\n    while True: x += 1\n"
        "threading.Thread(target=train, daemon=True).start()"
    )
    await asyncio.wait_for(saved(4), 60)
    points = map(save_point.of_image, save_point.of_kernel(store.images(), provisioner.kernel_id).values())
    assert [point.cell for point in points] == [1, 2, 2, 2], "without another cell"


async def test_a_kernel_that_has_slept_since_its_save_is_not_saved_for_that(kernel):
    provisioner, store = kernel.provisioner, kernel.lifecycle.engine.store
    provisioner.save_when_idle = 0.001
    rounds = idle_saves.IdleSaves(lambda: {provisioner.kernel_id: provisioner})
    await kernel.run("x = 0")
    await asyncio.sleep(0.1)
    await rounds.round()
    await provisioner.checkpoint()
    await provisioner.restore()
    for _ in range(5):
        await asyncio.sleep(0.1)
        await rounds.round()
    assert len(save_point.of_kernel(store.images(), provisioner.kernel_id)) == 1
