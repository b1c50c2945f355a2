"""SIGTERM to every process of a job: the kernel stays, and what it starts does not learn that from it."""

from __future__ import annotations

import signal

CHILDREN = """
import multiprocessing, os, signal, subprocess, sys
def end_of_fork():
    pid = os.fork()
    if pid == 0:
        signal.pause()
    os.kill(pid, signal.SIGTERM)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
started = subprocess.Popen(["sleep", "1000"])
started.terminate()
print({end_of_fork() for _ in range(200)}, started.wait())
"""


async def test_a_kernel_stays_and_its_children_do_not(kernel):
    await kernel.run("import os, signal; x = 41")
    kernel.lifecycle.capsule.signal(signal.SIGTERM)
    assert await kernel.run("os.kill(os.getpid(), signal.SIGTERM); print(x + 1)") == "42"
    assert await kernel.run(CHILDREN) == f"{{{-signal.SIGTERM}}} {-signal.SIGTERM}"


async def test_also_after_a_checkpoint_and_a_wake(kernel):
    await kernel.provisioner.checkpoint()
    assert await kernel.run("import os, signal; os.kill(os.getpid(), signal.SIGTERM); print('here')") == "here"


#: ipykernel waits 14 seconds for a tracker, which ignores SIGTERM; jupyter_client sends it SIGTERM after 2.5,
#: and SIGKILL after 5.
TRACKED = "from multiprocessing import shared_memory; block = shared_memory.SharedMemory(create=True, size=1)"


async def test_a_kernel_that_was_asked_to_shut_down_obeys_as_a_stock_kernel_does(kernel):
    await kernel.run(TRACKED)
    lifecycle = kernel.lifecycle
    await kernel.manager.shutdown_kernel()
    assert lifecycle.poll() not in (None, -signal.SIGKILL)


async def test_so_does_one_that_was_woken(kernel):
    await kernel.run(TRACKED)
    await kernel.provisioner.checkpoint()
    assert await kernel.run("print(bytes(block.buf))") == r"b'\x00'"
    await kernel.settled("running")
    lifecycle = kernel.lifecycle
    await kernel.manager.shutdown_kernel()
    assert lifecycle.poll() not in (None, -signal.SIGKILL)


async def test_a_handler_of_the_users_own_is_left_alone(kernel):
    code = "import os, signal; heard = []; _ = signal.signal(signal.SIGTERM, lambda *a: heard.append(1))"
    await kernel.run(code)
    assert await kernel.run("os.kill(os.getpid(), signal.SIGTERM); print(heard)") == "[1]"
