"""Random verbs sent to the kernels of a real server, several at a time: no illegal state, no loss, no leftovers.

What is fired, at which kernel and after which pause is drawn from one seed; how the requests then interleave is the
machine's affair.  A failure prints the seed and the story: every request, every answer and every transition in the
order in which they were seen here.  Replay::

    GPU_CKPT_TORTURE_SEED=<seed> pytest tests/server/test_torture.py

The requests come in waves, and after each wave all accounts are settled.  In about half of the waves a kernel is spared
restarts and shutdowns: those may cost messages, as they do without us, and so could hide the loss of one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from accounts import PATIENCE, Ending, Kernel, Story
from harness import descendants
from live import Server, server
from websocket import WebSocketException, WebSocketTimeoutException

from jupyter_gpu_ckpt.image.store import Store
from jupyter_gpu_ckpt.lifecycle.plans import PLANS, State
from jupyter_gpu_ckpt.server.events import STATE

SEED = "GPU_CKPT_TORTURE_SEED"
GENTLE = {"suspend": 6, "resume": 5, "checkpoint": 6, "restore": 5, "interrupt": 4}
VIOLENT = {**GENTLE, "restart": 3, "shutdown": 2}
#: Requests under way at a time for one kernel.
AT_ONCE = 4

RESTING = {State.RUNNING.value, State.SUSPENDED.value, State.CHECKPOINTED.value}
EDGES = {
    (before.value, after.value)
    for (rest, _), plan in PLANS.items()
    if plan is not None
    for before, after in ((rest, plan.via), (plan.via, plan.to), (plan.via, plan.back))
}

# ipykernel 7 lets an interrupt raise all the while a request is handled, and for a moment after.  One that comes while
# no user code runs costs the reply ("KeyboardInterrupt caught in kernel"), or the kernel: it leaves its event loop with
# status 0.  That happens without us, and would hide what happens because of us; so here cells alone can be interrupted.
STARTUP = """
get_ipython().kernel.pre_handler_hook = get_ipython().kernel.post_handler_hook = lambda: None
"""


class Torture:
    """The kernels and what is done to them."""

    def __init__(self, running: Server, base: Path, rng: random.Random, story: Story) -> None:
        self.running, self.base, self.rng, self.story = running, base, rng, story
        self.kernels: list[Kernel] = []
        self.past: list[Kernel] = []
        self.fired: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()

    async def start(self) -> Kernel:
        id = await asyncio.to_thread(self.running.start_kernel)
        self.story.tell(id, "started")
        kernel = Kernel(self.running, self.story, id)
        await kernel.ready()
        document = await asyncio.to_thread(self.running.get, f"gpu-ckpt/kernels/{id}")
        assert document["checkpointable"], "started plainly"
        return kernel

    # -- one wave

    async def wave(self, requests: int) -> None:
        """Fire ``requests`` at each kernel, all kernels at once; then settle the accounts."""
        # All that is random is drawn before anything is fired: what happens must not change what comes.
        plans = [self._draw(requests) for _ in self.kernels]
        await asyncio.gather(*(self._fire_all(slot, plan) for slot, plan in enumerate(plans)))
        await self._settle()
        self.story.verdict()

    def _draw(self, requests: int) -> list[tuple[str, float, float | None]]:
        """Verb, pause before it, and (for about half) how long a cell works that is sent along; seconds."""
        weights = self.rng.choice([GENTLE, VIOLENT])
        verbs = self.rng.choices(list(weights), list(weights.values()), k=requests)
        pause = self.rng.choice([0.02, 0.3])
        return [(verb, self.rng.uniform(0, pause), self.rng.choice([None, None, 0.0, 0.2])) for verb in verbs]

    async def _fire_all(self, slot: int, plan: list[tuple[str, float, float | None]]) -> None:
        slots = asyncio.Semaphore(AT_ONCE)

        async def fire(verb: str, kernel: Kernel) -> None:
            try:
                await asyncio.wait_for(self._fire(verb, slot, kernel), PATIENCE)
            except Exception as error:
                self.story.accuse(kernel.id, f"{verb}: {type(error).__name__}: {error}")
            finally:
                slots.release()

        tasks = []
        for number, (verb, pause, cell) in enumerate(plan):
            await slots.acquire()
            await asyncio.sleep(pause)
            kernel = self.kernels[slot]
            if cell is not None:
                self.fired["execute"] += 1
                kernel.execute(f"cell-{self.fired['execute']}", cell)
            self.story.tell(kernel.id, f"{verb} #{number}")
            self.fired[verb] += 1
            tasks.append(asyncio.create_task(fire(verb, kernel)))
        await asyncio.gather(*tasks)

    async def _fire(self, verb: str, slot: int, kernel: Kernel) -> None:
        began = time.monotonic()
        if verb == "restart":
            await self._ending(kernel, verb, "POST", f"api/kernels/{kernel.id}/restart", 200)
        elif verb == "shutdown":
            await self._ending(kernel, verb, "DELETE", f"api/kernels/{kernel.id}", 204)
            if not kernel.gone:
                kernel.gone = True
                kernel.endings.append(Ending(time.monotonic()))  # never to end: it does not come back
                self.past.append(kernel)
                self.kernels[slot] = await self.start()
        elif verb == "interrupt":
            kernel.interrupted = True
            reply = await self._ask(kernel, "POST", f"api/kernels/{kernel.id}/interrupt")
            # Stock jupyter_server: a kernel that is being started or ended cannot be interrupted, and that is a 500.
            self._judge(kernel, verb, began, str(reply.status_code), {"204"}, {"404", "500"})
        else:
            await self._verb(kernel, verb, began)

    async def _ending(self, kernel: Kernel, verb: str, method: str, path: str, fine: int) -> None:
        mark = Ending(time.monotonic())
        others = kernel.endings[:]
        kernel.endings.append(mark)
        reply = await self._ask(kernel, method, path)
        mark.ended = time.monotonic()
        others += [other for other in kernel.endings if other is not mark and other not in others]
        raced = any(other.began <= mark.ended and other.ended >= mark.began for other in others)
        self._outcome(kernel, verb, str(reply.status_code))
        # Where a shutdown was faster; jupyter_server says 500 for whatever goes wrong with a restart, a 404 too.
        gone = {404, 500} if verb == "restart" else {404}
        if reply.status_code != fine and not (raced and reply.status_code in gone):
            self.story.accuse(kernel.id, f"{verb}: {reply.status_code} {reply.text[:300]}")

    async def _verb(self, kernel: Kernel, verb: str, began: float) -> None:
        reply = await self._ask(kernel, "POST", f"gpu-ckpt/kernels/{kernel.id}/{verb}")
        if reply.status_code != 202:
            code = reply.json().get("error", {}).get("code") if reply.status_code != 404 else "404"
            # Refused at once, because of a cell.
            fine = {"KERNEL_BUSY"} if kernel.worked_during(began, time.monotonic()) else set()
            self._judge(kernel, verb, began, code or str(reply.status_code), fine, {"404", "WRONG_STATE"})
            return
        job = reply.json()
        while job["status"] == "running":
            await asyncio.sleep(0.05)
            job = (await self._ask(kernel, "GET", f"gpu-ckpt/jobs/{job['id']}")).json()
        outcome = job["error"]["code"] if job["error"] else "done"
        # A sleeping kernel cannot be suspended or resumed, and a suspended one not be restored.
        fine = {"done"} | ({"WRONG_STATE"} if verb != "checkpoint" else set())
        self._judge(kernel, verb, began, outcome, fine, {"WRONG_STATE", "KERNEL_LOST"}, job["error"])

    def _judge(
        self, kernel: Kernel, verb: str, began: float, outcome: str, fine: set[str], violent: set[str], why: Any = None
    ) -> None:
        """``fine`` may happen at any time, ``violent`` only where a restart or a shutdown overlaps."""
        self._outcome(kernel, verb, outcome)
        if outcome in fine or (outcome in violent and kernel.ended_during(began, time.monotonic())):
            return
        self.story.accuse(kernel.id, f"{verb}: {outcome} {why or ''}")

    def _outcome(self, kernel: Kernel, verb: str, outcome: str) -> None:
        self.outcomes[f"{verb} {outcome}"] += 1
        self.story.tell(kernel.id, f"{verb} -> {outcome}")

    async def _ask(self, kernel: Kernel, method: str, path: str) -> Any:
        return await asyncio.to_thread(self.running.ask, method, path)

    # -- the accounts

    async def _settle(self) -> None:
        kernels = [*self.past, *self.kernels]
        await self._until(lambda: not any(kernel.owed() for kernel in kernels))
        for kernel in kernels:
            kernel.audit()
        for kernel in self.past:
            await kernel.close()
        self.past.clear()
        for kernel in self.kernels:
            await self._at_rest(kernel)
        known = {entry["id"] for entry in await asyncio.to_thread(self.running.get, "api/kernels")}
        if known != {kernel.id for kernel in self.kernels}:
            self.story.accuse("-" * 8, f"the server has {known}")

    async def _at_rest(self, kernel: Kernel) -> None:
        """The kernel is in a state that lasts, with as many processes and images as that state has."""
        seen: list[Any] = [None]

        async def agrees() -> bool:
            document = await asyncio.to_thread(self.running.get, f"gpu-ckpt/kernels/{kernel.id}")
            images = Store(self.running.home / "images").images()
            # A restart leaves an automatic save point, in which the kernel does not sleep.
            mine = sum(image.manifest.kernel_id == kernel.id and not image.retired for image in images)
            state, processes = document["state"], len(self._kernel_processes(kernel.id))
            seen[0] = f"{state}, {processes} processes, {mine} images"
            asleep = state == State.CHECKPOINTED.value
            return state in RESTING and (processes, mine) == ((0, 1) if asleep else (1, 0))

        deadline = time.monotonic() + PATIENCE / 4
        while not await agrees():
            if time.monotonic() > deadline:
                self.story.accuse(kernel.id, f"does not come to rest: {seen[0]}")
                return
            await asyncio.sleep(0.1)
        self.story.tell(kernel.id, f"rests: {seen[0]}")

    def _kernel_processes(self, kernel_id: str) -> list[int]:
        """Processes that were started with the connection file of this kernel."""
        return [
            pid
            for record in self.base.glob("*/kernel.json")
            if f'"{kernel_id}"' in record.read_text()
            for pid in marked([str(record.parent / "connection.json")], names=("cmdline",))
        ]

    async def _until(self, true: Callable[[], bool]) -> None:
        """Poll; when it does not come true in time the audit says what is missing."""
        deadline = time.monotonic() + PATIENCE
        while not true() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    async def end(self) -> None:
        """Shut every kernel down."""
        for kernel in self.kernels:
            kernel.endings.append(Ending(time.monotonic()))
            reply = await self._ask(kernel, "DELETE", f"api/kernels/{kernel.id}")
            self.story.tell(kernel.id, f"the last shutdown -> {reply.status_code}")
            await kernel.close()
            if reply.status_code != 204:
                self.story.accuse(kernel.id, f"the last shutdown: {reply.status_code}")


def marked(marks: list[str], names: tuple[str, ...] = ("cmdline", "environ")) -> list[int]:
    """Living processes with one of ``marks`` in their arguments or environment, wherever in the tree they are now."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            with contextlib.suppress(OSError):
                facts = b"".join((process / name).read_bytes() for name in names)
                if any(mark.encode() in facts for mark in marks):
                    found.append(int(process.name))
    return found


def descriptors(pid: int) -> Counter[str]:
    """Return the server's open descriptors, by kind."""
    kinds: Counter[str] = Counter()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            kinds[re.sub(r"\d+", "N", str(fd.readlink()))] += 1
    return kinds


@contextlib.contextmanager
def transitions(running: Server, story: Story) -> Iterator[None]:
    """Listens on the event bus; a transition that is not of the table is an accusation."""
    over = threading.Event()

    def listen(next_event: Callable[[], dict[str, Any]]) -> None:
        while not over.is_set():
            try:
                event = next_event()
            except WebSocketTimeoutException:
                continue  # a quiet half minute
            except (WebSocketException, OSError, ValueError) as error:  # nothing is no JSON either
                if not over.is_set():
                    story.accuse("-" * 8, f"the event bus fell silent: {type(error).__name__}")
                return
            if event["schema_id"] != STATE:
                continue
            before, after = event["previous"], event["state"]
            story.tell(event["kernel_id"], f"{before} => {after}")
            # Where a kernel was started, or was ended, any state may be the first or the last to be seen.
            if before not in (None, "starting", "dead") and after != "dead" and (before, after) not in EDGES:
                story.accuse(event["kernel_id"], f"illegal transition {before} => {after}")

    with running.events() as next_event:
        listener = threading.Thread(target=listen, args=(next_event,), daemon=True)
        listener.start()
        try:
            yield
        finally:
            over.set()


@pytest.mark.parametrize(
    ("kernels", "waves", "requests"),
    [(2, 3, 10), pytest.param(5, 10, 20, marks=pytest.mark.torture)],
    ids=["sample", "thousand"],
)
async def test_random_verbs_at_once(tmp_path, runtime_base, criu_binary, kernels, waves, requests):
    """``kernels`` times ``waves`` times ``requests`` verbs, and half as many cells."""
    seed = os.environ.get(SEED) or str(random.SystemRandom().randrange(10**9))
    home, story = tmp_path / "home", Story()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(kernels * AT_ONCE + 4))
    startup = home / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "interrupts.py").write_text(STARTUP)
    with server(home, runtime_base) as running:
        try:
            await _torture(running, runtime_base, story, random.Random(seed), kernels, waves, requests)
        except BaseException:
            print(f"{SEED}={seed}", *story.lines, "-- the server's log", running.log[-20_000:], sep="\n")
            raise


async def _torture(
    running: Server, base: Path, story: Story, rng: random.Random, kernels: int, waves: int, requests: int
) -> None:
    pid, marks = running.process.pid, [str(running.home), str(base)]
    torture = Torture(running, base, rng, story)
    # The first kernel brings up what the server keeps: thread pools, the driver's helper.
    torture.kernels = [await torture.start()]
    await torture.end()
    before = {*marked(marks), *descendants(pid)}
    open_before, threads_before = descriptors(pid), len(list(Path(f"/proc/{pid}/task").iterdir()))
    with transitions(running, story):
        torture.kernels = list(await asyncio.gather(*(torture.start() for _ in range(kernels))))
        for _ in range(waves):
            await torture.wave(requests)
        await torture.end()
        story.verdict()
    deadline = time.monotonic() + PATIENCE / 4
    while (left := {*marked(marks), *descendants(pid)} - before) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    assert not left, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]
    assert [path.name for path in base.iterdir()] == []
    assert Store(running.home / "images").images() == []
    assert "KernelRestarter: restarting" not in running.log, "a kernel died by itself"
    grown = {kind: many for kind, many in (descriptors(pid) - open_before).items() if many > 2}
    threads = len(list(Path(f"/proc/{pid}/task").iterdir())) - threads_before
    print(dict(torture.fired), dict(torture.outcomes), f"grown: {grown}, {threads} threads", sep="\n")
    assert sum(torture.fired.values()) - torture.fired["execute"] == kernels * waves * requests
