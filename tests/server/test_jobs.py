"""Jobs: what has begun when their client is answered."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from jupyter_gpu_ckpt.server.jobs import Jobs


async def test_a_wait_has_begun_when_the_client_is_answered() -> None:
    events, idle = [], asyncio.Event()

    @contextlib.asynccontextmanager
    async def once_idle() -> AsyncIterator[None]:
        events.append("waits")
        await idle.wait()
        yield

    async def back() -> None:
        events.append("goes back")

    job = await Jobs().start("k", "back", {}, back, once_idle())
    assert (events, job.status) == (["waits"], "waiting")
    idle.set()
    while job.status != "done":
        await asyncio.sleep(0)
    assert events == ["waits", "goes back"]


async def test_a_request_equal_to_one_under_way_joins_it() -> None:
    jobs, end = Jobs(), asyncio.Event()
    first = await jobs.start("k", "save", {"name": "a"}, end.wait)
    assert await jobs.start("k", "save", {"name": "a"}, end.wait) is first
    assert await jobs.start("k", "save", {"name": "b"}, end.wait) is not first
    await jobs.stop()
