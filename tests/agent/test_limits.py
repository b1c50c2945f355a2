"""A kernel that may have no more threads, descriptors or memory: its magics, checkpoints and wakes."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness import CellFailed, until
from kernel_limits import FILES, LIMITS, NAMES, ordinary_users

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.agent import messages, server_channel
from jupyter_gpu_ckpt.errors import LimitReached

#: So many descriptors a checkpoint opens in the kernel.
CHECKPOINT_NEEDS = 3
#: Bytes of address space that are left: less than Python allocates at once, up to what CRIU needs but a thread not.
#: With a few pages libzmq ends any ipykernel that receives a message.
BYTES = (1 << 18, 1 << 19, 1 << 20, 1 << 22, 1 << 23, 1 << 24)
#: The reply of ipykernel where IPython itself has no memory for a cell.
OUT_OF_MEMORY = "'traceback': [], 'ename': 'MemoryError'"


async def lives(kernel) -> None:
    """Lift the limits in the next cell: the kernel is the same, and answers."""
    assert await kernel.run("lift(); print(x)") == "5"


async def leaves(kernel, limit: str, free: int) -> None:
    """Leave the kernel so many more, while IPython's thread opens nothing for the history.

    It is started before this cell, and ends where it cannot write a line.
    """
    thread = await kernel.run(
        "thread = get_ipython().history_manager.save_thread; print(int(bool(thread) and thread.is_alive()))"
    )
    await until(lambda: history_files(kernel) == ["history.sqlite"] * (1 + int(thread)))
    await kernel.run(f"allow({limit!r}, {free})")
    await until(lambda: {*history_files(kernel)} == {"history.sqlite"})  # and no journal


def history_files(kernel) -> list[str]:
    """Return the names of the history's files that the kernel has open."""
    names = (os.path.basename(target) for _, target in procfs.links(kernel.lifecycle.capsule.host_pid))
    return sorted(name for name in names if name.startswith("history.sqlite"))


async def sleeps_and_wakes(kernel) -> None:
    """Raise `CellFailed` if the checkpoint is refused at once; what the magic has accepted must succeed."""
    kernel.steps.events.clear()
    await kernel.run("%gpu_checkpoint")
    await until(lambda: kernel.state == "checkpointed" or refusal(kernel))
    assert not refusal(kernel), "accepted, and refused later"
    await lives(kernel)


def refusal(kernel) -> str:
    """Return the code with which a step of a checkpoint has failed, if it has."""
    return next((event.code for event in kernel.steps.events if event.kind == "failed" and event.code), "")


@pytest.mark.parametrize("line", ["--status", "--list", "--protect 1h", "--suspend"])
@pytest.mark.parametrize("limit", NAMES)
async def test_a_magic_needs_nothing_that_a_kernel_may_not_have(kernel, limit, line):
    await kernel.run(f"x = 5\n{LIMITS}{FILES}")
    for free in range(6):
        await kernel.run(f"allow({limit!r}, {free})")
        await kernel.run(f"%gpu_checkpoint {line}")
        await lives(kernel)


@pytest.mark.parametrize("limit", NAMES)
async def test_a_checkpoint_succeeds_or_says_what_it_lacks_and_the_kernel_wakes(kernel, limit):
    await kernel.run(f"x = 5\n{LIMITS}{FILES}")
    for free in (*range(9), 12, 20):
        await leaves(kernel, limit, free)
        try:
            await sleeps_and_wakes(kernel)
        except CellFailed as refused:
            assert limit == "NOFILE" and free < CHECKPOINT_NEEDS, refused
            assert "UNPROVEN_STATE" in str(refused) and f"opens {CHECKPOINT_NEEDS} more" in str(refused)
            await lives(kernel)
    await sleeps_and_wakes(kernel)


async def test_without_memory_a_magic_and_a_checkpoint_say_so_and_the_kernel_runs_on(kernel):
    await kernel.run(f"x = 5\n{LIMITS}{FILES}")
    for free in BYTES:
        with address_space(kernel.lifecycle.capsule.host_pid, free):
            try:
                await kernel.run("%gpu_checkpoint --status")
            except CellFailed as refused:
                no_memory = "LIMIT_REACHED: The kernel has reached a limit: it gets no more memory."
                assert no_memory in str(refused) or OUT_OF_MEMORY in str(refused)
            with pytest.raises(LimitReached, match=r"it gets no more memory.*Left behind: the kernel runs on"):
                await kernel.provisioner.checkpoint()
        await lives(kernel)
    await sleeps_and_wakes(kernel)


@contextmanager
def address_space(pid: int, free: int) -> Iterator[None]:
    """Leave a process so many bytes more than it has mapped.  From outside: it may lack the memory to lift that."""
    before = resource.prlimit(pid, resource.RLIMIT_AS)
    used = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (used + free, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_AS, before)


# -- the agent alone


@contextmanager
def limited(kernel: Any, number: int, limit: int) -> Iterator[None]:
    """Lower a soft limit of a running kernel."""
    before = resource.prlimit(kernel.pid, number, (limit, resource.prlimit(kernel.pid, number)[1]))
    try:
        yield
    finally:
        resource.prlimit(kernel.pid, number, before)


def saved(kernel: Any, line: str) -> bool:
    """Return whether a line of the kernel's history is in its file."""
    kernel.run("get_ipython().history_manager.writeout_cache()")
    return line in kernel.run(f"%history -g {line}")


def test_what_could_not_be_opened_again_is_opened_before_the_next_cell_that_may(start: Callable[..., Any]) -> None:
    kernel = start()
    kernel.run("x = 'before'")
    report = kernel.report("quiesce")
    with limited(kernel, resource.RLIMIT_NOFILE, 3):
        errors = kernel.report("thaw")["probe_errors"]
        assert [error.partition(":")[0] for error in errors] == ["pipe", "history"]
        kernel.run("x = 'meanwhile'")
    directory = kernel.run("print(get_ipython().history_manager.hist_file.parent)")
    assert not [name for name in os.listdir(directory) if "corrupt" in name]
    assert saved(kernel, "before") and saved(kernel, "meanwhile")
    again = kernel.report("report")
    assert again["threads"].count("IPythonHistorySavingThread") == 1
    assert sorted(file["path"] for file in again["open_files"]) != sorted(file["path"] for file in report["open_files"])
    code = "import os, sys, time\nif os.fork() == 0:\n    print('of a child', flush=True); os._exit(0)\nos.wait()"
    assert "of a child" in kernel.run(code)


@ordinary_users
def test_history_without_a_thread_is_saved_and_has_one_again_later(start: Callable[..., Any]) -> None:
    kernel = start()
    kernel.report("quiesce")
    with limited(kernel, resource.RLIMIT_NPROC, 1):
        (error,) = kernel.report("thaw")["probe_errors"]
        assert error.startswith("history: RuntimeError")
        kernel.run("x = 'without'")
        assert saved(kernel, "without")
    kernel.run("x = 'with'")
    assert kernel.report("report")["threads"].count("IPythonHistorySavingThread") == 1
    assert kernel.report("quiesce")["probe_errors"] == []
    assert kernel.report("thaw")["probe_errors"] == []


def test_a_quiesce_that_lacks_descriptors_is_undone_and_says_so(start: Callable[..., Any]) -> None:
    kernel = start()
    with limited(kernel, resource.RLIMIT_NOFILE, 3):
        reply = kernel.ask("gpu_ckpt_quiesce_request")
    assert (reply["status"], reply["lacking"]) == ("error", "file descriptors")
    kernel.run("x = 'after'")
    assert saved(kernel, "after")
    assert kernel.report("quiesce")["probe_errors"] == []


# -- texts


def test_a_long_text_is_printed_in_pieces(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[str] = []
    monkeypatch.setattr("builtins.print", lambda text, end, flush: pieces.append(text + end))
    text = "\n".join("x" * number for number in range(300)) + "y" * 30_000
    messages.show(text)
    assert "".join(pieces) == text + "\n"
    assert max(len(piece.encode()) for piece in pieces) <= 8193 and len(pieces) > 5


def test_the_agents_hint_is_that_of_the_error() -> None:
    assert LimitReached.default_hint == server_channel.LIMIT_HINT
    refused = server_channel.RequestRefused("m" * 10_000, "CODE", "h" * 10_000)
    assert len("".join(refused.lines())) < 10_000
