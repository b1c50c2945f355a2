"""A kernel that ends leaves no files or processes, like a stock kernel, however it ends, awake or asleep."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from harness import alive, notebook, until
from jupyter_client.manager import AsyncKernelManager
from waiting import until as wait_until

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.criu.criu import Criu
from jupyter_gpu_ckpt.errors import CapsuleGone, GpuCkptError, KernelLost, NoSpace
from jupyter_gpu_ckpt.lifecycle import dump
from jupyter_gpu_ckpt.lifecycle.context import Attempt, PartlyDone
from jupyter_gpu_ckpt.lifecycle.plans import Step
from jupyter_gpu_ckpt.lifecycle.steps import STEPS

pytestmark = pytest.mark.sweep(1 / 2, of="file")

#: Shared memory, a semaphore and a folder such as joblib's, each registered with the resource tracker.
MAKE = """
import json, os, sys, tempfile
from multiprocessing import resource_tracker, shared_memory
import _multiprocessing
block = shared_memory.SharedMemory(create=True, size=1 << 20)
block.buf[:5] = b"hello"
name = f"/gc-test-{os.getpid()}-{os.urandom(4).hex()}"
lock = _multiprocessing.SemLock(1, 1, 1, name, False)
resource_tracker.register(name, "semaphore")
print(json.dumps([f"/dev/shm/{block.name}", f"/dev/shm/sem.{name[1:]}"]))
"""


#: The same, by a child process: the kernel does not know of it.
MAKE_IN_CHILD = """
import json, multiprocessing
def work(pipe):
    from multiprocessing import shared_memory
    made = shared_memory.SharedMemory(create=True, size=1 << 20)
    made.buf[:5] = b"hello"
    pipe.send(made.name)
    while pipe.recv():
        pipe.send(bytes(made.buf[:5]))
context = multiprocessing.get_context("fork")
pipe, other = context.Pipe()
worker = context.Process(target=work, args=(other,), daemon=True)
worker.start()
print(json.dumps([f"/dev/shm/{pipe.recv()}"]))
"""
#: A file and a folder that Python removes at exit.
MAKE_FOR_EXIT = """
import json, tempfile
made, folder = tempfile.NamedTemporaryFile(), tempfile.TemporaryDirectory()
names = [made.name, folder.name]
print(json.dumps(names))
"""
SHOW, SHOW_OF_CHILD = "print(bytes(block.buf[:5]))", "pipe.send(True); print(pipe.recv())"


async def make(kernel, code: str = MAKE) -> list[Path]:
    made = [Path(path) for path in json.loads(await kernel.run(code))]
    assert all(path.exists() for path in made)
    return made


def left(made: list[Path]) -> list[Path]:
    found = [path for path in made if path.exists()]
    for path in found:
        path.unlink()
    return found


async def shut_down(kernel) -> None:
    await kernel.manager.shutdown_kernel()


async def shut_down_now(kernel) -> None:
    await kernel.manager.shutdown_kernel(now=True)


async def restart(kernel) -> None:
    await kernel.manager.restart_kernel()


async def crash(kernel) -> None:
    kernel.client.execute("import os; os._exit(7)")
    await until(lambda: kernel.lifecycle.poll() is not None)


async def be_killed(kernel) -> None:
    os.kill(kernel.lifecycle.capsule.host_pid, signal.SIGKILL)
    await until(lambda: kernel.lifecycle.poll() is not None)


ENDS = [shut_down, shut_down_now, restart, crash, be_killed]


@pytest.mark.parametrize("end", ENDS)
async def test_an_awake_kernel_leaves_no_shared_memory(kernel, end):
    made = await make(kernel)
    await end(kernel)
    assert left(made) == []


async def test_a_stock_kernel_leaves_none_either(tmp_path):
    """The measure for all other tests here."""
    manager = AsyncKernelManager(kernel_name="python3", connection_file=str(tmp_path / "connection.json"))
    await manager.start_kernel(env=dict(os.environ, IPYTHONDIR=str(tmp_path / "ipython")), cwd=str(tmp_path))
    client = manager.client()
    client.start_channels()
    try:
        await client.wait_for_ready(timeout=60)
        printed = []
        await client.execute_interactive(
            MAKE, timeout=60, output_hook=lambda message: printed.append(message["content"].get("text", ""))
        )
        made = [Path(path) for path in json.loads("".join(printed))]
    finally:
        client.stop_channels()
        await manager.shutdown_kernel()
    await until(lambda: not any(path.exists() for path in made))


@pytest.fixture(scope="module")
def files_left(criu_binary):
    """The files that each kernel of `ended_program` has left, by its kind."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount an empty /dev/shm")
    empty = 'mount -t tmpfs -o mode=1777 none /dev/shm && exec "$@"'
    unshare = ["unshare", "--mount", "--propagation", "private", "sh", "-c", empty, "sh"]
    program = [sys.executable, str(Path(__file__).with_name("ended_program.py"))]
    with tempfile.TemporaryDirectory(prefix="gc-") as directory:  # a short one: sockets have paths in it
        places = {"TMPDIR": "tmp", "XDG_RUNTIME_DIR": "run", "JUPYTER_RUNTIME_DIR": "jupyter"}
        places |= {"JUPYTER_GPU_CKPT_KEYS": "keys", "IPYTHONDIR": "work/ipython"}
        environment = dict(os.environ, **{name: f"{directory}/{place}" for name, place in places.items()})
        ran = subprocess.run([*unshare, *program], env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.parametrize("kind", ["awake", "woken", "asleep"])
def test_a_kernel_leaves_the_files_that_a_stock_kernel_leaves(files_left, kind):
    """In /dev/shm, the temporary directory and both runtime directories; ours adds the empty one of its user."""
    assert any("pymp" in path for path in files_left["stock"]), "a stock kernel has ended a child that leaves some"
    assert [path for path in files_left[kind] if path != "XDG_RUNTIME_DIR: gpu-ckpt"] == files_left["stock"]


@pytest.mark.parametrize("sleeps", [False, True], ids=["awake", "woken"])
async def test_a_kernel_without_children_removes_what_python_does_at_exit(kernel, sleeps):
    """With children it is chance whether Python gets that far, in a stock kernel, too."""
    made = await make(kernel, MAKE_FOR_EXIT)
    if sleeps:
        await kernel.provisioner.checkpoint()
        assert await kernel.run("print(made.name == names[0])") == "True"
        await kernel.settled("running")
    await kernel.manager.shutdown_kernel()
    assert [path for path in made if path.exists()] == []


@pytest.mark.parametrize("end", ENDS)
async def test_a_kernel_that_was_restored_leaves_none_either(kernel, end):
    made = await make(kernel)
    await kernel.provisioner.checkpoint()
    assert all(path.exists() for path in made), "its image needs them"
    assert await kernel.run("print(bytes(block.buf[:5]))") == "b'hello'"
    await kernel.settled("running")
    await end(kernel)
    assert left(made) == []


async def test_a_sleeping_kernel_that_is_restarted_leaves_none(kernel):
    made = await make(kernel)
    await kernel.provisioner.checkpoint()
    await kernel.manager.restart_kernel()
    assert left(made) == []


async def test_the_image_of_a_kernel_that_is_shut_down_takes_them_along(tmp_path, runtime_base, criu_binary):
    async with notebook(tmp_path, runtime_base, keep_image_on_shutdown=True) as kernel:
        made = await make(kernel)
        image = await kernel.provisioner.checkpoint()
        store = kernel.lifecycle.engine.store
        await kernel.manager.shutdown_kernel()
        assert all(path.exists() for path in made), "who brings it back needs them"
        store.remove(image)
    assert left(made) == []


async def test_what_another_made_under_the_same_name_stays(kernel):
    made = await make(kernel)
    await kernel.provisioner.checkpoint()
    made[0].unlink()
    made[0].write_bytes(b"another's")
    await kernel.manager.restart_kernel()
    assert left(made) == made[:1]


async def test_an_unpublished_image_takes_nothing_along(kernel, monkeypatch):
    """Its kernel lives, and works with its shared memory."""
    made = await make(kernel)

    def publish_and_fail(attempt: Attempt) -> None:
        dump.publish(attempt)
        raise PartlyDone from NoSpace("The disk is full after all.")

    monkeypatch.setitem(STEPS, Step.PUBLISH, publish_and_fail)
    with pytest.raises(NoSpace):
        await kernel.provisioner.checkpoint()
    assert kernel.lifecycle.engine.store.images() == []
    assert all(path.exists() for path in made)
    assert await kernel.run("print(bytes(block.buf[:5]))") == "b'hello'"


@pytest.mark.parametrize(("code", "show"), [(MAKE, SHOW), (MAKE_IN_CHILD, SHOW_OF_CHILD)], ids=["kernel", "child"])
async def test_a_kernel_that_is_killed_as_it_wakes_has_its_shared_memory_when_it_is_woken_again(
    kernel, monkeypatch, code, show
):
    """Once its children run, its resource trackers do, too, and remove what they track."""
    made = await make(kernel, code)
    await kernel.provisioner.checkpoint()
    removed = []

    def killed(attempt: Attempt) -> None:
        capsule = kernel.lifecycle.capsule
        capsule.unfreeze_threads(all=True)  # the release does that before it forwards messages
        for pid in capsule.processes():
            with contextlib.suppress(*procfs.GONE):  # one ended with the one before
                if "tracker" not in " ".join(procfs.arguments(pid)):
                    os.kill(pid, signal.SIGKILL)
        removed.append(wait_until(lambda: not any(path.exists() for path in made), "what the trackers do"))
        raise CapsuleGone("killed")

    with monkeypatch.context() as patched:
        patched.setitem(STEPS, Step.RELEASE, killed)
        with pytest.raises(GpuCkptError):
            await kernel.provisioner.restore()
    assert removed == [True]  # an assertion in a step is an error of the verb, too
    assert kernel.state == "checkpointed"
    assert await kernel.run(show) == "b'hello'"
    await kernel.settled("running")
    await kernel.manager.shutdown_kernel()
    assert left([*made, *(found for path in made for found in path.parent.glob(f"{path.name}*"))]) == []


async def test_a_kernel_that_is_killed_after_its_dump_has_no_image_without_its_settings(kernel, monkeypatch):
    """The settings that CRIU does not save are read from the stopped process, and there is nothing to read any more."""
    await kernel.run("import os; os.sched_setaffinity(0, {0})")
    inspect, write = Capsule.inspect, Criu.dump

    def kill_and_inspect(capsule: Capsule, **options: Any) -> dict[str, Any]:
        os.kill(capsule.host_pid, signal.SIGKILL)
        wait_until(lambda: procfs.is_ending(capsule.host_pid), "the end of the kernel")
        return inspect(capsule, **options)

    def dump_and_kill(*args: Any, **options: Any) -> None:
        write(*args, **options)
        monkeypatch.setattr(Capsule, "inspect", kill_and_inspect)

    monkeypatch.setattr(Criu, "dump", dump_and_kill)
    with pytest.raises(KernelLost):
        await kernel.provisioner.checkpoint()
    assert kernel.lifecycle.engine.store.images() == []


async def test_a_kernel_whose_capsule_is_killed_is_not_called_running_while_it_dies(kernel, monkeypatch):
    """The connection to the init ends first, and Linux has to free the kernel's memory."""

    def killed(attempt: Attempt) -> None:
        threading.Timer(0.5, os.kill, (kernel.lifecycle.capsule.host_pid, signal.SIGKILL)).start()
        raise CapsuleGone("The capsule ended.")

    monkeypatch.setitem(STEPS, Step.QUIESCE, killed)
    with pytest.raises(KernelLost):
        await kernel.provisioner.checkpoint()
    assert kernel.state == "dead"


async def test_a_tracker_that_does_not_end_delays_nobody_for_long(kernel):
    """One that is stopped, or that a grandchild keeps from seeing the end, has two seconds."""
    made = await make(kernel)
    await kernel.run(
        "import signal; from multiprocessing.resource_tracker import _resource_tracker as t; os.kill(t._pid, 19)"
    )
    processes = [kernel.lifecycle.capsule.host_pid, *kernel.lifecycle.capsule.other_processes()]
    await kernel.manager.shutdown_kernel(now=True)
    assert alive(processes) == []
    assert len(left(made)) == 2


async def test_a_kernel_whose_server_is_gone_leaves_none(kernel):
    """The capsule's init sees to it: there is no owner any more to ask for anything."""
    made = await make(kernel)
    capsule = kernel.lifecycle.capsule
    processes = [capsule.host_pid, *capsule.other_processes()]
    capsule.detach()
    wait_until(lambda: alive(processes) == [], "the end of the capsule")
    assert left(made) == []
