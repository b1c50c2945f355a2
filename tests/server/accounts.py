"""A kernel of a real server with a stock client on it, and the books of both: what was sent, came, and is owed."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from queue import Empty
from typing import Any

from jupyter_client.asynchronous import AsyncKernelClient
from live import Server

#: Seconds: for a request, and for the books to balance.  The machine may be busy with other tests.
PATIENCE = 120.0

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
        """Return whether its reply and its idle came."""
        return bool(self.replies) and "idle" in self.statuses

    @property
    def fate(self) -> str:
        """``ok``, ``aborted``, the name of its error, or ``none``."""
        if not self.replies:
            return "none"
        content = self.replies[0]
        return content["ename"] if content["status"] == "error" else content["status"]


class Story:
    """The events of a run, in the order in which they were seen."""

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
        """Return whether a restart or shutdown overlaps the time."""
        return any(mark.began <= ended and mark.ended >= began for mark in self.endings)

    def worked_during(self, began: float, ended: float) -> bool:
        """Return whether a cell was under way, or waited for its turn, at some time then."""
        return any(
            execution.sent <= ended and (not execution.complete or execution.answered >= began)
            for execution in self.executions.values()
        )

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
            if execution.fate == "ok" and (words := execution.text.split())[:1] == [execution.tag]:
                life, count = words[1], int(words[2])
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
