"""Random verbs fired at the kernels of a real server, several at a time for each: nothing illegal, lost or left behind.

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
import itertools
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
from jupyter_client.asynchronous import AsyncKernelClient
from live import Server, server
from websocket import WebSocketException, WebSocketTimeoutException

from jupyter_gpu_ckpt.image.store import Store
from jupyter_gpu_ckpt.machine import PLANS, State
from jupyter_gpu_ckpt.server.events import STATE

SEED = "GPU_CKPT_TORTURE_SEED"
GENTLE = {"suspend": 6, "resume": 5, "checkpoint": 6, "restore": 5, "interrupt": 4}
VIOLENT = {**GENTLE, "restart": 3, "shutdown": 2}
#: Requests under way at a time for one kernel.
AT_ONCE = 4
#: Seconds: for a request, and for a wave's accounts to settle.  The machine may be busy with other tests.
PATIENCE = 120.0

RESTING = {State.RUNNING.value, State.SUSPENDED.value, State.CHECKPOINTED.value}
EDGES = {
    (before.value, after.value)
    for (rest, _), plan in PLANS.items()
    if plan is not None
    for before, after in ((rest, plan.via), (plan.via, plan.to), (plan.via, plan.back))
}

# A kernel that comes back from an old image would count some numbers again, and in a life that was over.
CELL = """
import os, signal, time
if "life" not in globals():
    life, count = os.urandom(4).hex(), 0
count += 1
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    time.sleep({pause})
finally:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
print({tag!r}, life, count)
"""

# ipykernel 7 lets an interrupt raise all the while a request is handled, and for a moment after.  One that comes while
# no user code runs costs the reply ("KeyboardInterrupt caught in kernel"), or the kernel: it leaves its event loop with
# status 0.  That happens without us, and would hide what happens because of us; so here cells alone can be interrupted.
STARTUP = """
get_ipython().kernel.pre_handler_hook = get_ipython().kernel.post_handler_hook = lambda: None
"""


@dataclass
class Ending:
    """A restart or a shutdown of one kernel.  Times are monotonic seconds."""

    began: float
    ended: float = float("inf")


@dataclass
class Execution:
    """One execute_request, and all that came for it."""

    tag: str
    sent: float
    replies: list[dict[str, Any]] = field(default_factory=list)
    statuses: list[str] = field(default_factory=list)
    inputs: int = 0
    text: str = ""
    error: str | None = None
    answered: float = float("inf")

    @property
    def complete(self) -> bool:
        """Whether its reply and its idle came."""
        return bool(self.replies) and "idle" in self.statuses

    @property
    def fate(self) -> str:
        """``ok``, ``aborted``, the name of its error, or ``none``."""
        if not self.replies:
            return "none"
        content = self.replies[0]
        return content["ename"] if content["status"] == "error" else content["status"]


class Story:
    """What happened, in the order in which it was seen."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.lines: list[str] = []
        self.wrong: list[str] = []

    def tell(self, kernel_id: str, text: str) -> None:
        self.lines.append(f"{time.monotonic() - self.began:9.3f} {kernel_id[:8]} {text}")

    def accuse(self, kernel_id: str, text: str) -> None:
        self.tell(kernel_id, f"WRONG: {text}")
        self.wrong.append(f"{kernel_id[:8]}: {text}")

    def verdict(self) -> None:
        assert not self.wrong, "\n".join(self.wrong)


class Kernel:
    """One kernel, a stock client on it, and the accounts of both."""

    def __init__(self, running: Server, story: Story, id: str) -> None:
        self.story, self.id = story, id
        self.executions: dict[str, Execution] = {}
        self.endings: list[Ending] = []
        self.interrupted = False
        self.gone = False
        self.client = AsyncKernelClient(connection_file=str(running.home / "runtime" / f"kernel-{id}.json"))
        self.client.load_connection_file()
        self.client.start_channels()
        self._tasks: list[asyncio.Task[None]] = []

    async def ready(self) -> None:
        """Wait for the first answer; from then on everything is accounted for."""
        await self.client.wait_for_ready(timeout=PATIENCE)
        self._tasks = [
            asyncio.create_task(self._collect(self.client.get_shell_msg, self._reply)),
            asyncio.create_task(self._collect(self.client.get_iopub_msg, self._output)),
        ]

    async def _collect(self, get: Callable[..., Awaitable[Any]], take: Callable[[Execution, Any], None]) -> None:
        try:
            while True:
                try:
                    # jupyter_client sends past pyzmq's asyncio socket, which may then miss that something came: a wait
                    # without end has no end, and a new one looks anew.
                    message = await get(timeout=0.5)
                except Empty:
                    continue
                execution = self.executions.get(message["parent_header"].get("msg_id", ""))
                if execution is not None:
                    take(execution, message)
        except Exception as error:
            self.story.accuse(self.id, f"the client failed: {type(error).__name__}: {error}")

    def _reply(self, execution: Execution, message: dict[str, Any]) -> None:
        execution.replies.append(message["content"])
        execution.answered = time.monotonic()
        self.story.tell(self.id, f"{execution.tag} -> {execution.fate}")

    @staticmethod
    def _output(execution: Execution, message: dict[str, Any]) -> None:
        kind, content = message["msg_type"], message["content"]
        if kind == "status":
            execution.statuses.append(content["execution_state"])
        elif kind == "execute_input":
            execution.inputs += 1
        elif kind == "stream" and content["name"] == "stdout":
            execution.text += content["text"]

    def execute(self, tag: str, pause: float) -> None:
        """Send a cell; nobody waits for it."""
        self.story.tell(self.id, f"{tag} execute")
        sent = time.monotonic()
        self.executions[self.client.execute(CELL.format(tag=tag, pause=pause))] = Execution(tag, sent)

    def ended_during(self, began: float, ended: float) -> bool:
        """Whether a restart or shutdown overlaps the time."""
        return any(mark.began <= ended and mark.ended >= began for mark in self.endings)

    def owed(self) -> list[Execution]:
        """Executions that must still be answered: no restart and no shutdown came between."""
        return [
            execution
            for execution in self.executions.values()
            if not execution.complete and not self.ended_during(execution.sent, time.monotonic())
        ]

    def audit(self) -> None:
        """Every message has come once, and each life counts on where it was."""
        lives: list[str] = []
        counts: dict[str, list[int]] = {}
        for execution in self.executions.values():
            violent = self.ended_during(execution.sent, execution.answered)
            self._audit_one(execution, violent)
            if execution.fate == "ok" and (told := execution.text.split())[:1] == [execution.tag]:
                life, count = told[1], int(told[2])
                if lives[-1:] != [life]:
                    lives.append(life)
                counts.setdefault(life, []).append(count)
        if len(lives) != len(set(lives)):
            self.story.accuse(self.id, f"an earlier life came back: {lives}")
        if len(lives) > 1 + len(self.endings):
            self.story.accuse(self.id, f"{len(lives)} lives after {len(self.endings)} restarts")
        broken = sum(execution.fate not in ("ok", "aborted") for execution in self.executions.values())
        missing = 0
        for life, numbers in counts.items():
            if any(after <= before for before, after in itertools.pairwise(numbers)):
                self.story.accuse(self.id, f"life {life} counts {numbers}")
            missing += numbers[-1] - len(numbers)
        if missing > broken:
            self.story.accuse(self.id, f"{missing} cells ran and were not answered, {broken} were broken off")

    def _audit_one(self, execution: Execution, violent: bool) -> None:
        fate, complaints = execution.fate, []
        if len(execution.replies) > 1:
            complaints.append(f"{len(execution.replies)} replies")
        for status, limit in (("busy", 1), ("idle", 1)):
            if execution.statuses.count(status) > limit:
                complaints.append(f"{status} {execution.statuses.count(status)} times")
        if execution.inputs > 1:
            complaints.append("ran more than once")
        if not violent:
            if not execution.complete:
                complaints.append(f"lost: {fate}, {execution.statuses}")
            elif fate == "ok" and not re.fullmatch(rf"{execution.tag} \w+ \d+", execution.text.strip()):
                complaints.append(f"ok, and printed {execution.text!r}")
            elif fate not in ("ok", "KeyboardInterrupt", "aborted"):
                complaints.append(f"ended as {fate}: {execution.replies[0].get('evalue')}")
            elif fate != "ok" and not self.interrupted:
                complaints.append(f"{fate} without an interrupt")
        for complaint in complaints:
            self.story.accuse(self.id, f"{execution.tag}: {complaint}")

    async def close(self) -> None:
        """Listen no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.client.stop_channels()


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
        room = asyncio.Semaphore(AT_ONCE)

        async def fire(verb: str, kernel: Kernel) -> None:
            try:
                await asyncio.wait_for(self._fire(verb, slot, kernel), PATIENCE)
            except Exception as error:
                self.story.accuse(kernel.id, f"{verb}: {type(error).__name__}: {error}")
            finally:
                room.release()

        tasks = []
        for number, (verb, pause, cell) in enumerate(plan):
            await room.acquire()
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
            self._judge(kernel, verb, began, code or str(reply.status_code), set(), {"404", "WRONG_STATE"})
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
            mine = sum(image.manifest.kernel_id == kernel.id for image in images)
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


def descendants(pid: int) -> list[int]:
    """All processes below ``pid``."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *descendants(child)]
    return found


def descriptors(pid: int) -> Counter[str]:
    """What the server has open, by kind."""
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
    config = "c.GpuCkptProvisioner.keep_image_on_shutdown = False"
    with server(home, runtime_base, config=config) as running:
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
