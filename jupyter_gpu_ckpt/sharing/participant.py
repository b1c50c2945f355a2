"""The facts about one kernel that shares GPUs, and how events change them.  No I/O and no clock of its own.

A `Participant` is what its own server publishes in the directory that all users of the node share: nobody else writes
it.  Every method that is named after an event returns the record after that event; the server publishes the result.

Times are seconds of one clock of the node that every process reads alike and nobody sets (``CLOCK_MONOTONIC``).
Memory is in bytes.  A field with a value for each GPU has them in the order in which the kernel numbers its GPUs.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

#: Swaps older than this do not count any more.  Rule of the thrash guard: five minutes.
SWAP_WINDOW_S = 300.0


class Residence(str, enum.Enum):
    """Location of the device memory of a kernel.  In all but `AWAY` it occupies the GPUs in `Participant.on`."""

    AWAY = "away"
    ARRIVING = "arriving"
    PRESENT = "present"
    LEAVING = "leaving"

    __str__ = str.__str__


@dataclass(frozen=True)
class Turn:
    """The right to compute.

    ``since``: when it was granted, and from the end of the move to the GPU on that end.  ``seconds``: guaranteed from
    then on; after that the turn continues until somebody needs the GPU.  ``first``: the first turn of its cell.
    ``factor``: by how much the thrash guard lengthens turns on these GPUs, ``factor_since``: since when.
    """

    since: float
    seconds: float
    first: bool
    factor: int = 1
    factor_since: float = 0.0


@dataclass(frozen=True)
class Swap:
    """One move of a kernel's device memory, off its GPUs or onto them: when it ended, and how long it took."""

    gpus: tuple[str, ...]
    ended: float
    seconds: float


@dataclass(frozen=True)
class Participant:
    """One kernel at one moment.

    ``kernel``: unique on the node.  ``user``: those of one user share what is that user's.  ``gpus``: UUIDs of the GPUs
    that the kernel may use, as far as its device cgroup and CUDA_VISIBLE_DEVICES allow and they are of the model that
    its memory is from.  ``needs``: bytes on each GPU; as many GPUs as values.  ``alive_at``: the last heartbeat.

    ``residence``, ``on``, ``resident``: where its memory is, on which GPUs, and bytes on each; ``was_on``: the GPUs of
    its last stay.  ``moving_since``: when the move under way began.

    ``waiting_since``: when its cell touched CUDA, or lost its turn, if it waits for a turn.  ``used_before``: `used` of
    every kernel of the node at that moment (`policy.used`), by which it is known how often it was passed.  ``turn``:
    set while it computes.  ``turns``: how many this cell has had.  ``served_at``: when its last turn ended.  ``used``:
    seconds of all turns that have ended.  ``idle_since``: when its last cell ended; a kernel that neither waits nor has
    a turn is idle.

    ``mirrored``: host memory has a copy of all, so that it leaves at once.  ``can_leave``: its memory can be moved off
    the GPU when it is idle.  ``can_pause``: in the middle of a cell as well; not where something would break that the
    driver does not restore (registered host memory, IPC), and not if its server shares memory but takes no turns.
    ``frees``: it leaves, and nothing keeps it any more: its memory becomes free bit by bit.  ``arrives_early``: it can
    come to a GPU meanwhile, and take each bit as it becomes free.

    ``protected``: its user protects it from being suspended; ``protect_used``: seconds in which others waited for that
    in the last day, which count against the user's budget.  ``leave_seconds``, ``arrive_seconds``: how long its moves
    take, as last measured or estimated.  ``swaps``: its moves of the last `SWAP_WINDOW_S`.
    """

    kernel: str
    user: str
    gpus: tuple[str, ...]
    needs: tuple[int, ...]
    alive_at: float
    residence: Residence = Residence.AWAY
    on: tuple[str, ...] = ()
    resident: tuple[int, ...] = ()
    was_on: tuple[str, ...] = ()
    moving_since: float | None = None
    waiting_since: float | None = None
    turn: Turn | None = None
    turns: int = 0
    served_at: float | None = None
    idle_since: float = 0.0
    mirrored: bool = False
    can_leave: bool = True
    can_pause: bool = True
    frees: bool = False
    arrives_early: bool = False
    protected: bool = False
    protect_used: float = 0.0
    leave_seconds: float = 0.0
    arrive_seconds: float = 0.0
    swaps: tuple[Swap, ...] = ()
    used: float = 0.0
    used_before: Mapping[str, float] = field(default_factory=dict)
    factor: int = 1
    factor_since: float = 0.0
    granted_at: float | None = None

    # -- events of its cells

    def touched(self, now: float, used: Mapping[str, float]) -> Participant:
        """Record that a cell made its first CUDA call, which waits for a turn.  Again in the same cell: no change.

        ``used``: `policy.used` of all records.
        """
        if self.waiting_since is not None or self.turn is not None:
            return self
        return replace(self, waiting_since=now, used_before=dict(used), turns=0, mirrored=False)

    def cell_ended(self, now: float) -> Participant:
        """Record that the cell ended or was interrupted: its turn, or its place in the queue, is given back."""
        after = replace(self._turn_ended(now), waiting_since=None, used_before={}, turns=0)
        return replace(after, idle_since=now, arrives_early=False)

    def grew(self, needs: tuple[int, ...]) -> Participant:
        """Record that the kernel needs so much memory now.  On the GPU it occupies that much when it was granted."""
        return replace(self, needs=needs)

    # -- events of its moves

    def granted(self, on: tuple[str, ...], turn: Turn, now: float) -> Participant:
        """Record a turn that begins; called under the locks of the GPUs.  A kernel that is not there yet arrives."""
        present = self.residence is Residence.PRESENT
        return replace(
            self,
            residence=Residence.PRESENT if present else Residence.ARRIVING,
            on=on,
            was_on=on,
            resident=self.needs,
            moving_since=None if present else now,
            waiting_since=None,
            used_before={},
            turn=replace(turn, since=now),
            turns=self.turns + 1,
            factor=turn.factor,
            factor_since=turn.factor_since,
            granted_at=now,
            mirrored=False,
        )

    def arrived(self, now: float) -> Participant:
        """Record that its memory is on the GPU; its turn counts from here."""
        turn = replace(self.turn, since=now) if self.turn is not None else None
        return self._moved(replace(self, residence=Residence.PRESENT, turn=turn, arrives_early=False), now)

    def leaving(self, now: float, used: Mapping[str, float]) -> Participant:
        """Record that the suspend began.  In the middle of a cell that ends the turn, and the cell waits again.

        ``used``: as for `touched`.
        """
        return replace(self._waits_again(now, used), residence=Residence.LEAVING, moving_since=now, frees=False)

    def left(self, now: float) -> Participant:
        """Record that its memory is off the GPU."""
        after = self._moved(self, now)
        return replace(after, residence=Residence.AWAY, on=(), resident=(), mirrored=False, frees=False)

    def move_failed(self, now: float, used: Mapping[str, float]) -> Participant:
        """Record that a move failed: one that was to arrive is away and waits, one that was to leave is still there.

        A kernel that cannot leave has to leave no more until its server sets ``can_leave`` and ``can_pause`` again; it
        waits for a turn, which it is granted where it is.
        """
        if self.residence is Residence.ARRIVING:
            away = replace(self, residence=Residence.AWAY, on=(), resident=(), moving_since=None)
            return away._waits_again(now, used)
        there = replace(self, residence=Residence.PRESENT, moving_since=None, frees=False)
        return replace(there, can_leave=False, can_pause=False)

    def _turn_ended(self, now: float) -> Participant:
        if self.turn is None:
            return self
        seconds = max(0.0, now - self.turn.since)
        return replace(self, turn=None, served_at=now, used=self.used + seconds)

    def _waits_again(self, now: float, used: Mapping[str, float]) -> Participant:
        if self.turn is None:
            return self
        return replace(self._turn_ended(now), waiting_since=now, used_before=dict(used))

    def _moved(self, after: Participant, now: float) -> Participant:
        """Return ``after`` with the move that ends ``now`` among its swaps."""
        begin = now if self.moving_since is None else self.moving_since
        recent = tuple(each for each in self.swaps if each.ended > now - SWAP_WINDOW_S)
        return replace(after, moving_since=None, swaps=(*recent, Swap(self.on, now, now - begin)))
