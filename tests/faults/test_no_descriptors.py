"""A kernel that takes every descriptor it can get, also those of the connections that are closed for a checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import pytest
import waiting
from harness import CellFailed
from kernel_limits import LIMITS

from jupyter_gpu_ckpt.errors import GpuCkptError
from jupyter_gpu_ckpt.process import descriptors

#: A thread that has all descriptors while there is a file, and says so by another one.
GREEDY = """
import threading, time

def take(directory):
    taken = []
    while True:
        while os.path.exists(f"{directory}/go"):
            try:
                taken.append(os.dup(0))
            except OSError:
                if os.path.exists(f"{directory}/have some"):
                    os.rename(f"{directory}/have some", f"{directory}/have all")
                time.sleep(0.001)
        for descriptor in taken:
            os.close(descriptor)
        if taken:
            taken.clear()
            open(f"{directory}/freed", "w").close()
        time.sleep(0.001)
"""


async def prepare(kernel, directory: Path, *, hard: bool) -> None:
    """Start that thread in a kernel with 20 free descriptors.  ``hard``: the limit is its hard limit, too."""
    (directory / "have some").touch()
    limits = "limit, limit" if hard else "limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]"
    await kernel.run(
        f"""
x = 5
{LIMITS}{GREEDY}
limit = max(used_descriptors()) + 20
resource.setrlimit(resource.RLIMIT_NOFILE, ({limits}))
threading.Thread(target=take, args=({str(directory)!r},), daemon=True).start()
"""
    )


def fail_without_descriptors(directory: Path):
    """Fail a dump once the kernel has taken all descriptors; the connections are closed by then."""

    def fail(event) -> None:
        if (event.kind, event.step) == ("started", "dump"):
            (directory / "go").touch()
            waiting.until((directory / "have all").exists)
            raise OSError("as asked")

    return fail


async def test_the_limit_is_raised_while_the_gate_connects_again(kernel, tmp_path):
    await prepare(kernel, tmp_path, hard=False)
    kernel.provisioner.faults.append(fail_without_descriptors(tmp_path))
    with pytest.raises(GpuCkptError, match="as asked"):
        await kernel.provisioner.checkpoint()
    assert await kernel.run("print(x, resource.getrlimit(resource.RLIMIT_NOFILE)[0] == limit)") == "5 True"
    kernel.provisioner.faults.clear()
    (tmp_path / "go").unlink()
    await kernel.run(f"while not os.path.exists({str(tmp_path / 'freed')!r}): time.sleep(0.01)")
    await kernel.provisioner.checkpoint()
    assert await kernel.run("print(x)") == "5"


async def test_a_kernel_that_can_accept_no_connection_is_left_alone_and_connected_to_later(
    kernel, tmp_path, monkeypatch
):
    monkeypatch.setattr(descriptors, "_raised_limit", contextlib.nullcontext)  # which root can
    await prepare(kernel, tmp_path, hard=True)
    state = kernel.lifecycle.kernel
    state.settings = dataclasses.replace(state.settings, connect=0.5, base=0.5)
    kernel.provisioner.faults.append(fail_without_descriptors(tmp_path))
    with pytest.raises(GpuCkptError, match="as asked"):
        await kernel.provisioner.checkpoint()
    kernel.provisioner.faults.clear()
    with pytest.raises(CellFailed, match="LIMIT_REACHED: The kernel has opened all files that it may"):
        await kernel.run("print(x)")
    (tmp_path / "go").unlink()
    state.settings = dataclasses.replace(state.settings, connect=60.0)
    assert await kernel.run("print(x)") == "5"
    await kernel.provisioner.checkpoint()
    assert await kernel.run("print(x)") == "5"
