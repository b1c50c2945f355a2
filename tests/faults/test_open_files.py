"""Kernels with descriptors near a limit of open files (RLIMIT_NOFILE): they wake, or are refused while they run."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

import pytest

from jupyter_gpu_ckpt.node import fingerprint
from jupyter_gpu_ckpt.process import descriptors

LIMIT = resource.RLIMIT_NOFILE
HARD = resource.getrlimit(LIMIT)[1]
#: Root with CAP_SYS_RESOURCE has every limit that it wants.
MAY_RAISE = descriptors.limit_of_criu() > HARD


@contextlib.contextmanager
def soft_limit(soft: int) -> Iterator[None]:
    """The soft limit of the server, from which capsules and kernels inherit theirs."""
    resource.setrlimit(LIMIT, (soft, HARD))
    try:
        yield
    finally:
        resource.setrlimit(LIMIT, (HARD, HARD))


async def opens(subject, numbers: str) -> None:
    """Give the kernel descriptors with these ``numbers``, as many as its hard limit allows."""
    await subject.run(
        f"import resource\nlimits = resource.getrlimit({LIMIT})\nnumbers = {numbers}\n"
        f"resource.setrlimit({LIMIT}, (limits[1], limits[1]))\nfor number in numbers: _ = os.dup2(0, number)\n"
        f"resource.setrlimit({LIMIT}, limits)"
    )


async def shows(subject) -> str:
    null = os.stat("/dev/null").st_rdev
    return await subject.run(
        f"print(resource.getrlimit({LIMIT}), {{os.fstat(number).st_rdev for number in numbers}} == {{{null}}})"
    )


@pytest.mark.parametrize("numbers", ["range(100, 1010)", "[1023]"], ids=["many", "a high one"])
async def test_the_soft_limit_of_the_server_keeps_no_kernel_asleep(subject, numbers):
    with soft_limit(1024):
        await opens(subject, numbers)
        before = await shows(subject)
        for _ in range(2):
            await subject.leaves_and_wakes()
            assert await shows(subject) == before


async def test_the_highest_number_that_comes_back(subject):
    last = min(descriptors.highest_number(descriptors.limit_of_criu()), HARD - 1)
    await opens(subject, f"[{last}]")
    await subject.leaves_and_wakes()
    assert (await shows(subject)).endswith("True")


async def test_a_number_that_is_too_high_is_refused_while_the_kernel_runs(subject):
    if MAY_RAISE:
        pytest.skip(reason="this user may raise the limit to any number that a kernel can have")
    await opens(subject, f"[{HARD - 1}]")
    error = await subject.fails(subject.provisioner.checkpoint, "UNPROVEN_STATE")
    assert f"a descriptor with the number {HARD - 1}" in error.message
    assert "(RLIMIT_NOFILE)" in error.message
    await subject.runs_on(error)
    await subject.run(f"os.close({HARD - 1})")
    await subject.leaves_and_wakes()


async def test_a_server_with_a_lower_limit_refuses_the_wake_and_keeps_the_image(subject, monkeypatch):
    await opens(subject, "[1023]")
    await subject.provisioner.checkpoint()
    monkeypatch.setattr(fingerprint, "limit_of_criu", lambda: 1024)
    error = await subject.fails(subject.provisioner.restore, "NODE_UNFIT")
    assert "(RLIMIT_NOFILE): wanted 1152 or more, found 1024" in error.message
    assert "ulimit -Hn" in error.hint
    await subject.stays_away(error)
    monkeypatch.undo()
    await subject.wakes()
    assert (await shows(subject)).endswith("True")


async def test_limits_that_cannot_be_set_again_are_named_and_the_kernel_wakes(subject, monkeypatch):
    """CRIU leaves them at its own, and says nothing."""
    await subject.run(f"import resource; resource.setrlimit({LIMIT}, (900, {HARD}))")
    await subject.provisioner.checkpoint()
    restore = subject.kernel.lifecycle.engine.criu.restore

    def with_less(capsule, *arguments, **options):
        resource.prlimit(capsule._init_pid, LIMIT, (500, HARD - 1000))
        return restore(capsule, *arguments, **options)

    monkeypatch.setattr(subject.kernel.lifecycle.engine.criu, "restore", with_less)
    subject.send()
    await subject.wakes()
    hard = HARD if MAY_RAISE else HARD - 1000
    assert await subject.run(f"print(resource.getrlimit({LIMIT}))") == f"(900, {hard})"
    named = f"RLIMIT_NOFILE of process {subject.capsule.inner_pid}, which cannot be more than {hard} here"
    assert (named in await subject.printed("stderr")) != MAY_RAISE
