"""The shared GPUs of one node as discrete events; the real policy decides who computes.

`jupyter_gpu_ckpt.sharing.policy.decide` is what every server of a node runs, and `sharing.participant` changes the
records here as there.  What is modelled is the rest: how long moves take, and that kernels which compute on one GPU at
the same time share its speed equally.  Times are seconds of the simulation.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import simpy
from experiment import Use

from jupyter_gpu_ckpt.sharing.participant import Participant, Residence
from jupyter_gpu_ckpt.sharing.policy import (
    SILENT_S,
    Allotment,
    Decisions,
    NodeSnapshot,
    Rules,
    SharedGpu,
    decide,
    silent,
    used,
)

#: Less is nothing: sums of seconds are rounded.
_ROUNDING = 1e-7
#: The heartbeat of a server that runs, and seconds after which a stopped one is silent.
ALIVE = math.inf
SILENCE = SILENT_S + _ROUNDING


@dataclass
class Ran:
    """A cell that ended: when it touched CUDA, when it first computed (None: never), and when it ended."""

    kernel: str
    user: str
    seconds: float
    touched: float
    started: float | None = None
    ended: float = 0.0
    turns: int = 0


@dataclass(eq=False)
class _Cell:
    """A cell under way, with the seconds that are ``left`` of it."""

    ran: Ran
    left: float
    ended: simpy.Event
    speed: float = 0.0
    version: int = 0


@dataclass
class Totals:
    """Seconds: of moves by GPU, of each use of GPUs, of computing and of wanting to by user.

    ``crowded``: seconds of GPUs on which more than one kernel computed.
    """

    swaps: Counter[str] = field(default_factory=Counter)
    uses: Counter[Use] = field(default_factory=Counter)
    crowded: float = 0.0
    computed: Counter[str] = field(default_factory=Counter)
    wanted: Counter[str] = field(default_factory=Counter)
    moves: int = 0


class SharedGpus:
    """The GPUs (bytes by UUID) of one node and the kernels that share them.

    ``seen``: the snapshot that the policy is given, from the true one; for other policies in comparisons.  ``watch``:
    called after each round with the decisions that were carried out.  ``moved``: called when a kernel has moved.
    ``overlap``: whether a kernel moves to a GPU while another one leaves it, and arrives no sooner than that has left.
    """

    def __init__(
        self,
        env: simpy.Environment,
        gpus: Mapping[str, int],
        *,
        rules: Rules | None = None,
        allotments: Mapping[str, Allotment] | None = None,
        seen: Callable[[NodeSnapshot], NodeSnapshot] = lambda snapshot: snapshot,
        watch: Callable[[Decisions], None] = lambda decisions: None,
        moved: Callable[[Participant], None] = lambda record: None,
        overlap: bool = False,
    ) -> None:
        self.env = env
        self.gpus = dict(gpus)
        self.rules = rules or Rules()
        self.allotments = dict(allotments or {})
        self.seen, self.watch, self.moved, self.overlap = seen, watch, moved, overlap
        self.records: dict[str, Participant] = {}
        self.cells: dict[str, _Cell] = {}
        self.totals = Totals()
        #: Bytes by GPU of programs that do not take part.
        self.others: Counter[str] = Counter()
        #: Kernels whose servers do nothing for now, and what they do when they continue.
        self.stopped: dict[str, list[Callable[[], None]]] = {}
        self._last = 0.0
        #: When kernels that are leaving will have left.
        self._leaves: dict[str, float] = {}
        self._due: float | None = None

    # -- events

    def join(self, record: Participant) -> None:
        """Let a kernel take part."""
        self._advance()
        self.records[record.kernel] = record
        self.settle()

    def end(self, kernel: str) -> None:
        """End a kernel, whatever it does."""
        self._advance()
        del self.records[kernel]
        self.stopped.pop(kernel, None)
        if (cell := self.cells.pop(kernel, None)) is not None:
            cell.ended.succeed()
        self.settle()

    def cell(self, kernel: str, seconds: float) -> Generator[simpy.Event, Any, Ran]:
        """Run a cell that computes for so long, from its first CUDA call on."""
        self._advance()
        record = self._early(self.records[kernel].touched(self.env.now, self._used()))
        self.records[kernel] = record
        cell = _Cell(Ran(kernel, record.user, seconds, self.env.now), seconds, self.env.event())
        self.cells[kernel] = cell
        self.settle()
        yield cell.ended
        cell.ran.ended = self.env.now
        return cell.ran

    def interrupt(self, kernel: str) -> None:
        """End the cell of a kernel early, if it has one."""
        if kernel in self.cells:
            self._advance()
            self._cell_ended(kernel)
            self.settle()

    def suspend_idle(self, kernel: str) -> None:
        """Suspend an idle kernel that is on a GPU, because its own server wants that."""
        self._advance()
        self._suspend(kernel)
        self.settle()

    def occupy(self, gpu: str, bytes: int) -> None:
        """Let a program that does not take part occupy so much of a GPU from now on."""
        self._advance()
        self.others[gpu] = bytes
        self.settle()

    def stop(self, kernel: str) -> None:
        """Stop the server of a kernel, which continues computing if it does."""
        if kernel not in self.stopped:
            self._advance()
            self.records[kernel] = replace(self.records[kernel], alive_at=self.env.now)
            self.stopped[kernel] = []
            self._later(SILENCE, self.settle)

    def continue_stopped(self, kernel: str) -> None:
        """Let the stopped server of a kernel run again."""
        if kernel in self.stopped:
            self._advance()
            self.records[kernel] = replace(self.records[kernel], alive_at=ALIVE)
            for event in self.stopped.pop(kernel):
                event()
            self.settle()

    # -- decisions

    def snapshot(self) -> NodeSnapshot:
        """Return what the servers see now."""
        now = self.env.now
        used = Counter(self.others)
        for kernel in self.stopped:
            record = self.records[kernel]
            if silent(record, now):
                used.update(dict(zip(record.on, record.resident, strict=True)))
        gpus = tuple(SharedGpu(uuid, total, used[uuid]) for uuid, total in self.gpus.items())
        return NodeSnapshot(now, gpus, tuple(self.records.values()), self.allotments, self.rules)

    def _used(self) -> dict[str, float]:
        return used(self.records.values(), self.env.now)

    def settle(self) -> None:
        """Count the time until now; decide and obey until nothing is left to do now."""
        self._advance()
        while True:
            decisions = decide(self.seen(self.snapshot()))
            done = [self._grant(grant.kernel, grant.gpus, grant.turn) for grant in decisions.grants]
            done += [self._suspend(suspend.kernel) for suspend in decisions.suspends]
            self.watch(decisions)
            if not any(done):
                break
        self._speeds()
        if decisions.next_at is not None and self._due != decisions.next_at:
            self._due = decisions.next_at
            self._later(decisions.next_at - self.env.now + _ROUNDING, functools.partial(self._look, decisions.next_at))

    def _look(self, due: float) -> None:
        if self._due == due:
            self._due = None
            self.settle()

    def _grant(self, kernel: str, gpus: tuple[str, ...], turn: Any) -> bool:
        if kernel in self.stopped:
            return False
        record = self.records[kernel].granted(gpus, turn, self.env.now)
        self.records[kernel] = record
        self.cells[kernel].ran.turns += 1
        if record.residence is Residence.ARRIVING:
            leaves = [self._leaves[each.kernel] for each in self._leaving(record.on)] if record.arrives_early else []
            wait = max([0.0, *(at - self.env.now - record.arrive_seconds for at in leaves)])
            self._move(kernel, record.arrive_seconds, self._arrived, wait)
        return True

    def _leaving(self, gpus: tuple[str, ...]) -> list[Participant]:
        records = self.records.values()
        return [each for each in records if each.residence is Residence.LEAVING and set(each.on) & set(gpus)]

    def _early(self, record: Participant) -> Participant:
        """Return the record of a kernel that waits or not: with `overlap` one that waits can arrive early."""
        waits = record.residence is Residence.AWAY and record.waiting_since is not None
        return replace(record, arrives_early=True) if self.overlap and waits else record

    def _suspend(self, kernel: str) -> bool:
        if kernel in self.stopped:
            return False
        record = self.records[kernel].leaving(self.env.now, self._used())
        self.records[kernel] = replace(record, frees=self.overlap)
        self._leaves[kernel] = self.env.now + record.leave_seconds
        self._move(kernel, record.leave_seconds, self._left)
        return True

    def _move(self, kernel: str, seconds: float, then: Callable[[str], None], wait: float = 0.0) -> None:
        self.totals.moves += 1
        for gpu in self.records[kernel].on:
            self.totals.swaps[gpu] += seconds
        self._later(seconds + wait, functools.partial(self._server, kernel, functools.partial(then, kernel)))

    def _server(self, kernel: str, event: Callable[[], None]) -> None:
        """Let an event happen, when the server of its kernel runs."""
        if kernel in self.stopped:
            self.stopped[kernel].append(event)
        elif kernel in self.records:
            self._advance()
            event()
            self.settle()

    def _arrived(self, kernel: str) -> None:
        self.records[kernel] = self.records[kernel].arrived(self.env.now)
        self.moved(self.records[kernel])

    def _left(self, kernel: str) -> None:
        self.records[kernel] = self._early(self.records[kernel].left(self.env.now))
        self.moved(self.records[kernel])

    # -- computing

    def computing(self) -> dict[str, _Cell]:
        """Return the cells that compute now."""
        present = {name for name, record in self.records.items() if record.residence is Residence.PRESENT}
        return {name: cell for name, cell in self.cells.items() if name in present and self.records[name].turn}

    def _advance(self) -> None:
        """Count the time since the last event."""
        seconds, self._last = self.env.now - self._last, self.env.now
        if seconds <= 0:
            return
        computing: Counter[str] = Counter()
        for kernel, cell in self.cells.items():
            self.totals.wanted[cell.ran.user] += seconds
            if cell.speed:
                cell.left -= seconds * cell.speed
                self.totals.computed[cell.ran.user] += seconds * cell.speed
                computing.update(self.records[kernel].on)
        there: dict[str, Use] = {}
        for record in self.records.values():
            use = Use.IDLE if record.residence is Residence.PRESENT else Use.MOVING
            there.update({gpu: use for gpu in record.on if there.get(gpu) is not Use.MOVING})
        for gpu in self.gpus:
            self.totals.uses[Use.COMPUTING if computing[gpu] else there.get(gpu, Use.EMPTY)] += seconds
            self.totals.crowded += seconds * (computing[gpu] > 1)

    def _speeds(self) -> None:
        """Set when each cell ends at the speed that it has from now on."""
        computing = self.computing()
        crowd = Counter(gpu for kernel in computing for gpu in self.records[kernel].on)
        for kernel, cell in self.cells.items():
            speed = 1 / max(crowd[gpu] for gpu in self.records[kernel].on) if kernel in computing else 0.0
            if speed and cell.ran.started is None:
                cell.ran.started = self.env.now
            if speed != cell.speed:
                cell.speed = speed
                cell.version += 1
                if speed:
                    self._later(
                        max(0.0, cell.left / speed), functools.partial(self._finish, kernel, cell, cell.version)
                    )

    def _finish(self, kernel: str, cell: _Cell, version: int) -> None:
        if cell.version == version and self.cells.get(kernel) is cell:
            self._advance()
            self._server(kernel, functools.partial(self._cell_ended, kernel))

    def _cell_ended(self, kernel: str) -> None:
        cell = self.cells.pop(kernel, None)
        if cell is not None:
            self.records[kernel] = self.records[kernel].cell_ended(self.env.now)
            cell.ended.succeed()

    def _later(self, seconds: float, event: Callable[[], None]) -> None:
        self.env.timeout(max(0.0, seconds)).callbacks.append(lambda _: event())
