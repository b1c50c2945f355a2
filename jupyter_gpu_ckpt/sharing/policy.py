"""Decide which kernels compute on the GPUs of a node, which leave them and which wait.  No I/O, no clock, no state.

`decide` is a pure function of a `NodeSnapshot`: the records that all servers of the node publish (`participant`), the
GPUs and the time.  There is no daemon.  Every server computes all decisions and carries out those for its own kernels:
it suspends a kernel of its own that has to leave, and resumes one that is granted a turn.  Equal snapshots give equal
decisions everywhere: kernels are ordered by time, and at the same time by their ids.

Servers may see slightly different snapshots.  This is safe:

- A grant counts only under the locks of its GPUs, which are locked in the order of their UUIDs, so that nobody
  deadlocks.  The server locks them, reads all records again, decides again, and only if the same grant comes out and
  NVML shows the free memory, it publishes `Participant.granted` before it unlocks.  A second server that had come to
  the same result finds the memory occupied in the records.  So the lock decides who is first, and no memory is given
  twice.
- A suspend needs no lock: it only frees memory.  Decided on old records, it costs a swap that was not necessary.
- A wait or its estimate that is a moment old is only a text.

A record whose heartbeat is older than `SILENT_S` belongs to a server that has ended or was stopped.  It neither waits
nor has a turn any more, whatever locks its process still has.  Its memory counts as another program's for as long as
NVML shows it.

Two different things are shared.  *Memory* is taken from idle kernels, only as far as another kernel needs it.  *Turns*
exist only among kernels that compute and whose memory does not fit together; those that fit compute at the same time.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from .participant import Participant, Turn

#: Seconds of a cell's first turn.  A quarter of the cells published of notebook clusters end within it, and of those
#: 95 % within 45 s when four kernels compete (`make scale`).
FIRST_TURN_S = 30.0
#: Seconds of every further turn: at 1.3 to 2.6 s a swap (docs/measurements.md), 2 to 4 % of the time if all compute.
TURN_S = 60.0
#: Seconds after which a further turn ends for a cell that has had none.
CUT_S = 10.0
#: The thrash guard: above this share of `participant.SWAP_WINDOW_S` in swaps turns double ...
SWAP_SHARE = 0.05
#: ... so that a further turn is as long as this at most.
LONGEST_TURN_S = 240.0
#: Seconds between two heartbeats of a server, and without one after which its turns are void.
HEARTBEAT_S = 1.0
SILENT_S = 3.0
#: Seconds a day that a user's protected kernels may keep memory that others wait for; root's file can say otherwise.
PROTECT_BUDGET_S = 3600.0


@dataclass(frozen=True)
class SharedGpu:
    """A GPU of the node: bytes in all, and bytes that programs occupy which are not in the records (`others`)."""

    uuid: str
    total: int
    others: int = 0


@dataclass(frozen=True)
class Allotment:
    """The rights of a user, from a file that belongs to root.

    ``weight``: turns are longer by this factor.  ``protect_budget``: see `PROTECT_BUDGET_S`.
    """

    weight: float = 1.0
    protect_budget: float = PROTECT_BUDGET_S


@dataclass(frozen=True)
class NodeSnapshot:
    """All facts at one moment: ``now`` by the clock of the records.  ``allotments`` by user; others have the default.

    Records are of any order; a kernel occurs once.
    """

    now: float
    gpus: tuple[SharedGpu, ...]
    participants: tuple[Participant, ...]
    allotments: Mapping[str, Allotment] = field(default_factory=dict)


class LeaveReason(str, enum.Enum):
    """The reason why a kernel has to leave."""

    MEMORY = "its memory is needed, and it is idle"
    TURN = "its turn is over"

    __str__ = str.__str__


@dataclass(frozen=True)
class GrantTurn:
    """The kernel may compute on these GPUs, from now on: the memory is free, or its own already.

    ``gpus``: in the kernel's own order, as many as it needs.  ``turn``: to be passed to `Participant.granted`.
    ``move``: its memory has to be moved there.
    """

    kernel: str
    gpus: tuple[str, ...]
    turn: Turn
    move: bool


@dataclass(frozen=True)
class SuspendFor:
    """The kernel has to leave its GPUs now."""

    kernel: str
    reason: LeaveReason


@dataclass(frozen=True)
class WaitFor:
    """The kernel waits.

    ``place``: 1 for the next one, counted among those that wait for one of the GPUs it may use.  ``seconds``: until it
    computes, moves included, as far as the turns under way and the queue say; None where that depends on a program or
    a kernel that cannot be moved.  ``gpus``: those that it will get as far as it is known, else none.
    """

    kernel: str
    place: int
    seconds: float | None
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class NeverFits:
    """No allowed GPUs have as much memory even if they are empty: `GPU_FULL`.  Bytes: needed, and the largest GPU's."""

    kernel: str
    needed: int
    largest: int


@dataclass(frozen=True)
class Decisions:
    """All decisions of one moment; of a kernel none or one, but that one which has to leave may wait as well.

    ``waits`` are in the order of the queue.  ``factors``: by how much turns on each GPU are lengthened now.
    ``next_at``: when time alone changes the decisions next (a turn or a silence ends); None if it does not.
    """

    grants: tuple[GrantTurn, ...] = ()
    suspends: tuple[SuspendFor, ...] = ()
    waits: tuple[WaitFor, ...] = ()
    refusals: tuple[NeverFits, ...] = ()
    factors: Mapping[str, int] = field(default_factory=dict)
    next_at: float | None = None


def others(total: int, free: int, uuid: str, participants: tuple[Participant, ...]) -> int:
    """Return `SharedGpu.others` from what NVML says of a GPU: what is used and is no participant's.

    While a participant arrives or leaves this is too little by what is not there yet or any more; the check of the free
    memory under the lock makes up for that.
    """
    known = sum(bytes for each in participants for on, bytes in zip(each.on, each.resident, strict=True) if on == uuid)
    return max(0, total - free - known)


def silent(participant: Participant, now: float) -> bool:
    """Return whether the participant's server has not shown a heartbeat for `SILENT_S`."""
    return now - participant.alive_at > SILENT_S


def decide(snapshot: NodeSnapshot) -> Decisions:
    """Return the decisions for all kernels of the node at this moment.

    The same for equal facts, whatever the order of the records.  Between two users the one comes first who was served
    less recently; of one user's kernels likewise.  A cell that has had no turn comes before those, but passes everybody
    who waits at most once.  Nobody behind in the queue delays the start of one before it.
    """
    raise NotImplementedError
