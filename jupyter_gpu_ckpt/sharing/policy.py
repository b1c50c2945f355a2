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
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .participant import SWAP_WINDOW_S, Participant, Residence, Turn

#: Seconds between two heartbeats of a server, and without one after which its turns are void.
HEARTBEAT_S = 1.0
SILENT_S = 3.0
#: Seconds a day that a user's protected kernels may keep memory that others wait for; root's file can say otherwise.
PROTECT_BUDGET_S = 3600.0


@dataclass(frozen=True)
class Rules:
    """The lengths of turns in seconds; the same for all servers of a node.

    ``first_turn``: of a cell's first turn.  15 % of the cells that are published of notebook clusters end in it, and
    95 % of those within 45 s where four kernels compete (docs/scale.md).
    ``turn``: of every further one.  A swap of 16 to 48 GiB takes 1.3 to 2.6 s (docs/measurements.md), so that kernels
    which all compute spend 2 to 4 % of the time on swaps.
    ``cut``: after so long a further turn ends for a cell that has had none.

    The thrash guard: where swaps take more than ``swap_share`` of the last ``swap_window`` seconds, further turns
    double, up to ``longest_turn``.
    """

    first_turn: float = 30.0
    turn: float = 60.0
    cut: float = 10.0
    swap_share: float = 0.05
    swap_window: float = SWAP_WINDOW_S
    longest_turn: float = 240.0


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

    Records are in any order; a kernel occurs once.
    """

    now: float
    gpus: tuple[SharedGpu, ...]
    participants: tuple[Participant, ...]
    allotments: Mapping[str, Allotment] = field(default_factory=dict)
    rules: Rules = field(default_factory=Rules)


class SuspendReason(str, enum.Enum):
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
    reason: SuspendReason


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


#: Seconds that a move which was to have ended by now may still take.
_SOON_S = 0.05
#: Seconds that a kernel rather waits for a GPU of its own than share one with another that computes: some swaps.
ALONE_S = 5.0


def others(gpu: str, total: int, free: int, participants: Iterable[Participant], now: float) -> int:
    """Return `SharedGpu.others` from what NVML says of a GPU: the bytes that are used and no participant's.

    While a participant arrives or leaves this is too little by what is not there yet or any more; the check of the free
    memory under the lock makes up for that.
    """
    alive = [each for each in participants if not silent(each, now)]
    known = sum(bytes for each in alive for on, bytes in zip(each.on, each.resident, strict=True) if on == gpu)
    return max(0, total - free - known)


def used(participants: Iterable[Participant], now: float) -> dict[str, float]:
    """Return the seconds of all turns until now, by kernel."""
    return {
        each.kernel: each.used + (max(0.0, now - each.turn.since) if each.turn is not None else 0.0)
        for each in participants
    }


def silent(participant: Participant, now: float) -> bool:
    """Return whether the participant's server has shown no heartbeat for `SILENT_S`."""
    return now - participant.alive_at > SILENT_S


def decide(snapshot: NodeSnapshot) -> Decisions:
    """Return the decisions for all kernels of the node at this moment.

    The same for equal facts, whatever the order of the records.  Between two users the one comes first who was served
    less recently; of one user's kernels likewise.  A cell that has had no turn passes other users, as long as each of
    them is still served after a turn of each other user at most, the swaps between them, and the launch that runs.  It
    passes its own user's kernels as long as its kernel has computed no longer than a turn since any of these waits.
    Nobody behind in the queue delays the start of one before it.
    """
    return _Round(snapshot).decisions()


@dataclass(frozen=True)
class _Queued:
    """A waiting kernel in its place of the queue.  ``cuts``: it may end a further turn after `Rules.cut`."""

    participant: Participant
    cuts: bool


@dataclass(frozen=True)
class _Stay:
    """Memory that is occupied on GPUs, by ``kernel``, or ("") by one that is planned to come.

    From ``end`` on it has to leave if it is needed, from ``cut`` on if one needs it that may cut turns; that takes
    ``leave_seconds``.  ``frees``: as `Participant.frees`.
    """

    kernel: str
    needs: Mapping[str, int]
    begin: float
    end: float
    cut: float
    leave_seconds: float
    frees: bool = False

    def released(self, cuts: bool, early: bool = False) -> float:
        """Return when the memory can be free; for one that arrives ``early``: when it begins to be, for sure."""
        return (self.cut if cuts else self.end) + (0.0 if early and self.frees else self.leave_seconds)


@dataclass(frozen=True)
class _Planned:
    """A start for a waiting kernel: its GPUs in its order, and how long its turn is guaranteed."""

    queued: _Queued
    gpus: tuple[str, ...]
    start: float
    seconds: float


class _Round:
    """One computation of `decide`.  ``stays`` grows by each kernel that is planned."""

    def __init__(self, snapshot: NodeSnapshot) -> None:
        self.now = snapshot.now
        self.gpus = {gpu.uuid: gpu for gpu in sorted(snapshot.gpus, key=lambda gpu: gpu.uuid)}
        self.allotments, self.rules = snapshot.allotments, snapshot.rules
        ordered = sorted(snapshot.participants, key=lambda each: each.kernel)
        self.alive = {each.kernel: each for each in ordered if not silent(each, self.now)}
        self.kernels: dict[str, list[Participant]] = {}
        for each in self.alive.values():
            self.kernels.setdefault(each.user, []).append(each)
        self.served_now = {each.user for each in self.alive.values() if each.turn is not None}
        self.used = used(self.alive.values(), self.now)
        self.protectors = self._protectors()
        self.factors = {uuid: self._factor(uuid) for uuid in self.gpus}
        #: When the last turn ended that was lengthened so, by factor.
        self.lengthened: dict[int, float] = {}
        for each in filter(self._is_factor, self.alive.values()):
            ended = math.inf if each.turn is not None else _served(each)
            self.lengthened[each.factor] = max(ended, self.lengthened.get(each.factor, -math.inf))
        self.stays: list[_Stay] = []

    def decisions(self) -> Decisions:
        waiting = [each for each in self.alive.values() if each.waiting_since is not None]
        factors = {uuid: factor for uuid, (factor, _) in self.factors.items()}
        there = [each for each in self.alive.values() if each.residence is not Residence.AWAY]
        if not waiting and all(each.needs == each.resident for each in there):
            return Decisions(factors=factors)
        self.stays = [self._stay(each) for each in there]
        refusals = {each.kernel: refusal for each in waiting if (refusal := self._never_fits(each)) is not None}
        queue = self._queue([each for each in waiting if each.kernel not in refusals])
        planned = [self._plan(each) for each in queue]
        waits = [number for number, each in enumerate(planned) if each.start > self.now]
        return Decisions(
            grants=tuple(self._grant(each) for each in planned if each.start <= self.now),
            suspends=self._suspends(planned),
            waits=tuple(self._wait(planned[number], [planned[other] for other in waits]) for number in waits),
            refusals=tuple(refusals.values()),
            factors=factors,
            next_at=self._next_at() if waits else None,
        )

    # -- facts

    def _allotment(self, user: str) -> Allotment:
        return self.allotments.get(user, Allotment())

    def _protectors(self) -> set[str]:
        """Return the users whose budget for protected kernels is not used up."""
        used = {user: sum(each.protect_used for each in kernels) for user, kernels in self.kernels.items()}
        return {user for user, seconds in used.items() if seconds < self._allotment(user).protect_budget}

    def _stays_put(self, each: Participant) -> bool:
        """Return whether a kernel on a GPU cannot be asked to leave."""
        busy = each.turn is not None or each.waiting_since is not None
        allowed = each.can_leave and (each.can_pause or not busy)
        return not allowed or (each.protected and each.user in self.protectors)

    def _stay(self, each: Participant) -> _Stay:
        """Return how long a kernel that is on GPUs keeps its memory there, although others wait."""
        moving = self.now if each.moving_since is None else each.moving_since
        if each.residence is Residence.LEAVING:
            left = max(_SOON_S, moving + each.leave_seconds - self.now)
            needs = _by_gpu(each.on, each.resident)
            return _Stay(each.kernel, needs, -math.inf, self.now, self.now, left, each.frees)
        # A kernel that needs more than it has gets it where it is.
        needs = _by_gpu(each.on, [max(pair) for pair in zip(each.resident, each.needs, strict=True)])
        leave_seconds = max(_SOON_S, each.leave_seconds)
        if self._stays_put(each):
            return _Stay(each.kernel, needs, -math.inf, math.inf, math.inf, leave_seconds)
        end = cut = self.now
        if each.residence is Residence.ARRIVING:
            end = cut = max(self.now, moving + each.arrive_seconds)
        if (turn := each.turn) is not None:
            since = end if each.residence is Residence.ARRIVING else turn.since
            end, cut = max(end, since + turn.seconds), max(cut, since + self._least(turn))
        return _Stay(each.kernel, needs, -math.inf, end, cut, leave_seconds)

    def _factor(self, gpu: str) -> tuple[int, float]:
        """Return by how much turns on the GPU are lengthened, and since when.

        They are shortened again below half the limit: turns of half the length swap twice as often.  The factor is that
        of the last turn granted, by whichever user: one beyond the limits is none.
        """
        granted = [each for each in self.alive.values() if gpu in each.was_on and each.granted_at is not None]
        last = max(granted, key=lambda each: (each.granted_at or 0.0, each.kernel), default=None)
        if last is None or not self._is_factor(last):
            return 1, 0.0
        if self.now - last.factor_since < self.rules.swap_window:
            return last.factor, last.factor_since
        swaps = [swap for each in self.alive.values() for swap in each.swaps if gpu in swap.gpus]
        begin = self.now - self.rules.swap_window
        share = sum(max(0.0, min(swap.seconds, swap.ended - begin)) for swap in swaps) / self.rules.swap_window
        if share > self.rules.swap_share and last.factor * 2 * self.rules.turn <= self.rules.longest_turn:
            return last.factor * 2, self.now
        if share < self.rules.swap_share / 2 and last.factor > 1:
            return last.factor // 2, self.now
        return last.factor, last.factor_since

    def _never_fits(self, each: Participant) -> NeverFits | None:
        """Return the refusal of a kernel that would not fit on empty GPUs."""
        sizes = sorted((self.gpus[gpu].total for gpu in set(each.gpus) if gpu in self.gpus), reverse=True)
        needs = sorted(each.needs, reverse=True)
        if len(needs) <= len(sizes) and all(need <= size for need, size in zip(needs, sizes, strict=False)):
            return None
        return NeverFits(each.kernel, max(needs, default=0), max(sizes, default=0))

    # -- the queue

    def _queue(self, waiting: Sequence[Participant]) -> list[_Queued]:
        """Return the waiting kernels in the order in which they are served.

        A user was served when the last turn of any of the user's kernels ended; now, if a kernel has a turn.  Placing a
        kernel in the queue counts as serving its user for a turn, so that others come before the user's next kernel.
        """
        served: dict[str, float] = {}
        for each in self.alive.values():
            last = self.now if each.user in self.served_now else _served(each)
            served[each.user] = max(served.get(each.user, -math.inf), last)
        left = {each.kernel: each for each in waiting}
        queue: list[_Queued] = []
        cuts, placed, seconds = True, set[str](), 0.0
        while left:
            firsts = self._firsts(list(left.values()), placed, served, seconds + self._rest(cuts))
            each, new = min(firsts, key=lambda pair: (not pair[1], served[pair[0].user], *_seniority(pair[0])))
            cuts = cuts and new
            queue.append(_Queued(each, cuts))
            served[each.user] = self.now + len(queue)
            placed.add(each.user)
            seconds += self._next_turn(each.user, [each])
            del left[each.kernel]
        return queue

    def _firsts(
        self, waiting: Sequence[Participant], placed: set[str], served: Mapping[str, float], seconds: float
    ) -> list[tuple[Participant, bool]]:
        """Return each user's next kernel, and whether it is a new cell that passes those of all other users.

        ``seconds``: what is left of turns under way, and the turns of those that are placed in the queue before these.
        """
        by_user: dict[str, list[Participant]] = {}
        for each in waiting:
            by_user.setdefault(each.user, []).append(each)
        slack = self._slack(by_user, served, seconds)
        firsts = []
        for user, kernels in by_user.items():
            fresh = [each for each in kernels if not each.turns]
            new = [each for each in fresh if self._passes(each, [other for other in kernels if other is not each])]
            passes = bool(new) and user not in placed and self._passes_users(user, slack, served)
            firsts.append((min(new or kernels, key=_seniority), passes))
        return firsts

    def _rest(self, cuts: bool) -> float:
        """Return the seconds that turns under way continue; ``cuts``: for a new cell that passes all that wait."""
        turns = [each.turn for each in self.alive.values() if each.turn is not None]
        ends = [turn.since + (self._least(turn) if cuts else turn.seconds) for turn in turns]
        return max(0.0, *(end - self.now for end in ends), 0.0)

    def _least(self, turn: Turn) -> float:
        """Return for how long a turn lasts although a new cell waits."""
        return turn.seconds if turn.first else min(turn.seconds, self.rules.cut)

    def _passes(self, each: Participant, others: Iterable[Participant]) -> bool:
        """Return whether a new cell comes before other kernels of its user.

        It does while its kernel, with its first turn, has computed for a turn at most since any of them waits.
        """
        budget = (self._longest_turn() - self.rules.first_turn) * self._allotment(each.user).weight
        return all(self.used[each.kernel] - other.used_before.get(each.kernel, 0.0) <= budget for other in others)

    def _slack(
        self, waiting: Mapping[str, Sequence[Participant]], served: Mapping[str, float], seconds: float
    ) -> dict[str, float]:
        """Return, by user that waits, the seconds of new cells that may still pass.

        Each user is served after a turn of each other user at most: what it has waited, the ``seconds`` that come in
        any case, and the turns of users that come before it, also of those who have no cell that waits yet.  A turn is
        as long as the longest since it waits: where turns are shortened again, it was among longer ones until then.
        """
        turns = {user: self._next_turn(user, waiting.get(user, ())) for user in self.kernels}
        weights = {user: self._allotment(user).weight for user in self.kernels}
        before, slack = 0.0, {}
        for user in sorted(self.kernels, key=lambda user: (served[user], user)):
            if user in waiting and served[user] <= self.now and user not in self.served_now:  # nor placed once
                since = max(min(_waits(each) for each in waiting[user]), served[user])
                allowed = self._longest_turn_since(since) * (sum(weights.values()) - weights[user])
                slack[user] = allowed - (self.now - since) - seconds - before
            before += turns[user]
        return slack

    def _passes_users(self, user: str, slack: Mapping[str, float], served: Mapping[str, float]) -> bool:
        """Return whether a new cell of a user comes before all other users that wait."""
        first = self._next_turn(user, ())
        return all(
            first <= seconds + (first if (served[user], user) < (served[other], other) else 0.0)
            for other, seconds in slack.items()
            if other != user
        )

    def _longest_turn(self) -> float:
        return self.rules.turn * max((factor for factor, _ in self.factors.values()), default=1)

    def _longest_turn_since(self, since: float) -> float:
        """Return the longest of the turns that are granted now, and of each kernel's last one if it ended since."""
        lengthened = [factor for factor, ended in self.lengthened.items() if ended > since]
        return max(self._longest_turn(), self.rules.turn * max(lengthened, default=1))

    def _is_factor(self, each: Participant) -> bool:
        """Return whether the factor of a kernel's last turn is within the limits: other users may have written it."""
        return 1 <= each.factor <= max(1.0, self.rules.longest_turn / self.rules.turn)

    def _next_turn(self, user: str, waiting: Sequence[Participant]) -> float:
        """Return how long the next turn of a user with these kernels may be; without one, that of a cell to come."""
        begun = any(each.turns for each in waiting)
        return (self._longest_turn() if begun else self.rules.first_turn) * self._allotment(user).weight

    # -- the plan

    def _plan(self, queued: _Queued) -> _Planned:
        """Return the earliest start that delays nobody planned before, and reserve it."""
        each = queued.participant
        allowed, stays = [gpu for gpu in each.gpus if gpu in self.gpus], self.stays
        if each.residence is Residence.PRESENT:  # it starts where it is; its own memory does not keep it out
            stays = [stay for stay in stays if stay.kernel != each.kernel]
            allowed = list(each.on) if all(gpu in self.gpus for gpu in each.on) else []
        crowd = {gpu: sum(gpu in stay.needs and self._computes(stay) for stay in stays) for gpu in allowed}
        found = None
        if each.residence is not Residence.PRESENT:
            alone = self._earliest(queued, [gpu for gpu in allowed if not crowd[gpu]], crowd, stays)
            found = alone if alone is not None and alone.start <= self.now + ALONE_S else None
        found = found or self._earliest(queued, allowed, crowd, stays)
        if found is None:
            return _Planned(queued, (), math.inf, 0.0)
        end = found.start + self._arrival(each) + found.seconds
        self.stays.append(_Stay("", _by_gpu(found.gpus, each.needs), found.start, end, end, each.leave_seconds))
        return found

    def _computes(self, stay: _Stay) -> bool:
        return not stay.kernel or self.alive[stay.kernel].turn is not None

    def _earliest(
        self, queued: _Queued, allowed: Sequence[str], crowd: Mapping[str, int], stays: Sequence[_Stay]
    ) -> _Planned | None:
        """Return the earliest start on some of the allowed GPUs; None if none is known.

        A whole turn must be free of others that are planned before.  At this moment a part of it will do: better than a
        GPU that is idle until a kernel comes that needs several.
        """
        each, arrival = queued.participant, self._arrival(queued.participant)
        relevant = [stay for stay in stays if any(gpu in stay.needs for gpu in allowed)]
        # One that still leaves can go nowhere before it has left.
        first = max((stay.released(False) for stay in stays if stay.kernel == each.kernel), default=self.now)
        times = {stay.released(queued.cuts, each.arrives_early) for stay in relevant}
        whole = max((self._turn_seconds(each, [gpu]) for gpu in allowed), default=0.0)
        for start in sorted({first, *(time for time in times if first < time < math.inf)}):
            lasts = functools.partial(self._free_for, start=start, queued=queued, stays=relevant)
            least = arrival + (min(self.rules.cut, whole) if start == self.now else whole)
            if gpus := _choose(each, allowed, crowd, lasts, least):
                free = min(lasts(gpu, need) for gpu, need in zip(gpus, each.needs, strict=True))
                return _Planned(queued, gpus, start, min(self._turn_seconds(each, gpus), free - arrival))
        return None

    def _free_for(self, gpu: str, need: int, start: float, queued: _Queued, stays: Iterable[_Stay]) -> float:
        """Return for how many seconds from ``start`` on a GPU has as much memory free."""
        free = self.gpus[gpu].total - self.gpus[gpu].others
        cuts, early = queued.cuts, queued.participant.arrives_early
        there = [stay for stay in stays if gpu in stay.needs and stay.released(cuts, early) > start]
        free -= sum(stay.needs[gpu] for stay in there if stay.begin <= start)
        for stay in sorted((stay for stay in there if stay.begin > start), key=lambda stay: stay.begin):
            if free - stay.needs[gpu] < need:  # the other planned ones may have left by then: this is the safe side
                return stay.begin - start if free >= need else 0.0
            free -= stay.needs[gpu]
        return math.inf if free >= need else 0.0

    def _arrival(self, each: Participant) -> float:
        return 0.0 if each.residence is Residence.PRESENT else each.arrive_seconds

    def _turn_seconds(self, each: Participant, gpus: Sequence[str]) -> float:
        weight = self._allotment(each.user).weight
        if not each.turns:
            return self.rules.first_turn * weight
        return self.rules.turn * weight * max(self.factors[gpu][0] for gpu in gpus)

    # -- decisions

    def _grant(self, planned: _Planned) -> GrantTurn:
        each = planned.queued.participant
        factor, since = max(self.factors[gpu] for gpu in planned.gpus)
        turn = Turn(self.now, planned.seconds, first=not each.turns, factor=factor, factor_since=since)
        return GrantTurn(each.kernel, planned.gpus, turn, move=each.residence is not Residence.PRESENT)

    def _wait(self, planned: _Planned, waiting: Sequence[_Planned]) -> WaitFor:
        """Return a kernel's place among those that wait for a GPU which it may use, too."""
        each = planned.queued.participant
        place = 1
        for other in waiting[: waiting.index(planned)]:
            place += not set(each.gpus).isdisjoint(other.queued.participant.gpus)
        known = planned.start < math.inf
        seconds = planned.start - self.now + self._arrival(each) if known else None
        return WaitFor(each.kernel, place, seconds, planned.gpus)

    def _suspends(self, planned: Sequence[_Planned]) -> tuple[SuspendFor, ...]:
        """Return the kernels that have to leave now, for those that start as soon as these have left."""
        granted = {one.queued.participant.kernel for one in planned if one.start <= self.now}
        coming = [each for each in planned if each.start <= self._soon(each, granted)]
        headroom = {uuid: gpu.total - gpu.others for uuid, gpu in self.gpus.items()}
        cutting: set[str] = set()
        for one in coming:
            _reserve(headroom, _by_gpu(one.gpus, one.queued.participant.needs))
            cutting |= set(one.gpus) if one.queued.cuts else set()
        arriving = {one.queued.participant.kernel for one in coming}
        order = {one.queued.participant.kernel: number for number, one in enumerate(planned)}
        candidates = []
        for stay in self.stays:
            if not stay.kernel or stay.kernel in arriving:
                continue
            each = self.alive[stay.kernel]
            if each.residence is Residence.LEAVING:
                continue
            due = stay.cut if cutting.intersection(each.on) else stay.end
            if each.residence is Residence.PRESENT and due <= self.now:
                candidates.append((_worth(each, order), stay))
            else:
                _reserve(headroom, stay.needs)
        found = []
        for _, stay in sorted(candidates, key=lambda pair: pair[0]):
            if all(headroom.get(gpu, 0) >= need for gpu, need in stay.needs.items()):
                _reserve(headroom, stay.needs)
            else:
                each = self.alive[stay.kernel]
                found.append(SuspendFor(stay.kernel, SuspendReason.MEMORY if each.turn is None else SuspendReason.TURN))
        return tuple(sorted(found, key=lambda each: each.kernel))

    def _soon(self, planned: _Planned, granted: set[str]) -> float:
        """Return when the GPUs are free of all that leave them or have to leave them now; ``granted`` kernels stay."""
        others = [stay for stay in self.stays if stay.kernel and stay.kernel not in granted]
        there = [stay for stay in others if any(gpu in stay.needs for gpu in planned.gpus)]
        cuts = planned.queued.cuts
        due = [stay.released(cuts) for stay in there if (stay.cut if cuts else stay.end) <= self.now]
        return max(due, default=self.now) if planned.gpus else -math.inf

    def _next_at(self) -> float | None:
        """Return when the next turn or silence ends."""
        ends = [time for stay in self.stays if stay.kernel for time in (stay.cut, stay.end)]
        silences = [each.alive_at + SILENT_S for each in self.alive.values()]
        later = [time for time in (*ends, *silences) if self.now < time < math.inf]
        return min(later, default=None)


def _waits(each: Participant) -> float:
    return math.inf if each.waiting_since is None else each.waiting_since


def _served(each: Participant) -> float:
    return -math.inf if each.served_at is None else each.served_at


def _seniority(each: Participant) -> tuple[float, float, str]:
    return _served(each), _waits(each), each.kernel


def _worth(each: Participant, order: Mapping[str, int]) -> tuple[float, ...]:
    """Return the order in which kernels stay on a GPU: those that compute, that wait, that are idle.

    Of those that compute the one with the latest turn stays, of the idle ones those without a mirror and then the one
    that was used last.
    """
    if each.turn is not None:
        return (0, -each.turn.since)
    if each.waiting_since is not None:
        return (1, order.get(each.kernel, math.inf))
    return (2, each.mirrored, -each.idle_since)


def _choose(
    each: Participant,
    allowed: Sequence[str],
    crowd: Mapping[str, int],
    lasts: Callable[[str, int], float],
    least: float,
) -> tuple[str, ...]:
    """Return as many GPUs as the kernel needs, each free for ``least`` seconds, or none if there are too few.

    The largest need chooses first: what fits it fits the others, so that no choice is wrong.  GPUs on which few compute
    come first, then the one where that part of the kernel was.
    """
    if each.residence is Residence.PRESENT:
        here = zip(each.on, each.needs, strict=True)
        return each.on if allowed and all(lasts(gpu, need) >= least for gpu, need in here) else ()
    found: dict[int, str] = {}
    for number in sorted(range(len(each.needs)), key=lambda number: (-each.needs[number], number)):
        was = each.was_on[number] if number < len(each.was_on) else ""
        left = [gpu for gpu in allowed if gpu not in found.values()]
        free = [(crowd[gpu], gpu != was, gpu) for gpu in left if lasts(gpu, each.needs[number]) >= least]
        if not free:
            return ()
        found[number] = min(free)[2]
    return tuple(found[number] for number in range(len(each.needs)))


def _by_gpu(gpus: Sequence[str], needs: Sequence[int]) -> dict[str, int]:
    return dict(zip(gpus, needs, strict=True))


def _reserve(headroom: dict[str, int], needs: Mapping[str, int]) -> None:
    for gpu, need in needs.items():
        headroom[gpu] = headroom.get(gpu, 0) - need
