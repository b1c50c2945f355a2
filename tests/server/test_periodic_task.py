"""A task beside the server: begun once, ended with its cleaning up."""

from __future__ import annotations

import asyncio

import pytest

from jupyter_gpu_ckpt.server.periodic_task import PeriodicTask


class Work:
    """Runs until it is cancelled, and then needs a turn of the loop to clean up."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.cancelled, self.may_end, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.may_end.set()

    async def run(self) -> None:
        self.events.append("begun")
        try:
            await asyncio.Event().wait()
        finally:
            self.events.append("cancelled")
            self.cancelled.set()
            await self.may_end.wait()
            self.events.append("ended")
            self.ended.set()


async def test_it_is_begun_once_and_a_stop_waits_for_its_end():
    work = Work()
    background = PeriodicTask("work", work.run)
    assert not background.started
    background.start()
    background.start()
    await asyncio.sleep(0)
    assert [task.get_name() for task in asyncio.all_tasks() if task.get_name() == "work"] == ["work"]
    assert background.started
    await background.stop()
    assert not background.started
    assert work.events == ["begun", "cancelled", "ended"]
    await background.stop()
    background.start()
    await asyncio.sleep(0)
    await background.stop()
    assert work.events == ["begun", "cancelled", "ended"] * 2


async def test_a_stop_that_is_cancelled_itself_says_so():
    work = Work()
    work.may_end.clear()
    background = PeriodicTask("work", work.run)
    background.start()
    await asyncio.sleep(0)
    stopping = asyncio.create_task(background.stop())
    await asyncio.wait_for(work.cancelled.wait(), 60)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    work.may_end.set()
    await asyncio.wait_for(work.ended.wait(), 60)


async def test_work_that_failed_is_no_fault_of_the_stop(caplog):
    async def fail() -> None:
        raise ValueError("a fault")

    background = PeriodicTask("work", fail)
    background.start()
    await asyncio.sleep(0)
    await background.stop()
    assert not background.started
