"""One server's part in sharing GPUs: shows its kernels' records, reads those of all servers, decides, and acts.

A server acts for its own kernels only.  Notices between servers are the records themselves: each looks ten times a
second whether the directory has changed, and reads it then, and once a second.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Protocol

from ..cuda import gpu_locks
from ..cuda.gpus import Gpus
from ..errors import GpuCkptError, GpuFull
from . import policy, records
from .allotments import Allotments
from .participant import Participant, Residence
from .policy import (
    HEARTBEAT_S,
    SILENT_S,
    Decisions,
    GrantTurn,
    NeverFits,
    NodeSnapshot,
    Rules,
    SharedGpu,
    SuspendReason,
    WaitFor,
)

#: Seconds between two looks at the directory, and between two readings of it and of the GPUs.
POLL_S, READ_S = 0.1, 1.0
#: Seconds in which a server has to begin what is decided for its kernel; else that is passed over for so many.
IDLE_S, PASSED_OVER_S = 4.0, 30.0
#: Seconds to wait for the lock of a GPU; then the claim is tried again, and after so many without the lock.
_LOCK_S, _BLOCKED_S = 0.5, 0.8
#: Seconds without a heartbeat after which a server takes itself for silent: sooner than others do.
_LATE_S = SILENT_S - 0.5

_log = logging.getLogger(__name__)


class SharedKernel(Protocol):
    """The kernel behind a `Member`.  Called on the exchange's thread, which waits for these calls."""

    def observe(self, now: float) -> bool:
        """Bring the member up to date; return False for a kernel that need not be looked at until it joins again."""

    def begin_suspend(self, reason: SuspendReason) -> None:
        """Begin to move the kernel's memory off the GPU, on another thread; called again until it is done."""


class Member:
    """A kernel of this server that shares GPUs: its record, and what is decided for it.  Thread-safe."""

    def __init__(self, exchange: Exchange, kernel: SharedKernel) -> None:
        self._exchange, self.kernel = exchange, kernel
        self._record = records.OwnRecord(exchange.directory)
        self._lock, self._removed = threading.Lock(), False
        #: Whether others know of the kernel, and how often it joined.
        self.is_shown, self.joins, self.is_detached = False, 0, False
        #: When the record was written last, and the end of the last silence: claims from before are void for others.
        self._written, self._silent_until = -math.inf, -math.inf
        self._participant = Participant(self._record.name, str(os.geteuid()), (), (), 0.0)

    @property
    def participant(self) -> Participant:
        """The facts as they are shown."""
        return self._participant

    def update(self, change: Callable[[Participant], Participant]) -> Participant:
        """Apply ``change`` to the facts, and show them.  Raises `OSError`; the facts are changed all the same."""
        with self._lock:
            changed = change(self._participant)
            if changed == self._participant:
                return changed
            self._participant = changed
            if self._removed:
                return changed
            self.is_shown = True
            self._write()
        self._exchange.poke()
        return changed

    def beat(self) -> None:
        """Show that the server lives, if it is time for that.  Raises `OSError`."""
        with self._lock:
            if self.is_shown and not self._removed and time.monotonic() - self._written >= HEARTBEAT_S / 2:
                self._write()

    def _write(self) -> None:
        now = time.monotonic()
        if now - self._written > _LATE_S:
            self._silent_until = now
        self._record.write(self._participant)
        self._written = now

    def claim_is_valid(self) -> bool:
        """Return whether all others know of the last claim: this server has not been silent since, nor is it now.

        A server that was stopped continues where it was, and others may have been granted its memory meanwhile.
        """
        with self._lock:
            claimed = self._participant.granted_at
            late = time.monotonic() - self._written > _LATE_S
            return claimed is not None and claimed > self._silent_until and not late

    def remove(self) -> None:
        """Delete the record."""
        with self._lock, suppress(OSError):
            self._removed = True
            self._record.remove()


class Exchange:
    """All members of this server.  The thread runs while there are any."""

    def __init__(self, gpus: Gpus, rules: Rules | None = None) -> None:
        self.rules, self.allotments = rules or Rules(), Allotments()
        self.directory = gpus.lock_directory
        self._gpus = gpus
        self._members: dict[str, Member] = {}
        self._changed = threading.Condition()
        self._poked = threading.Event()
        self._thread: threading.Thread | None = None
        self._decisions, self._decided_at = Decisions(), 0.0
        self._participants: tuple[Participant, ...] = ()
        #: Kernels whose servers are silent, and the GPUs, as far as they were read with the last decisions.
        self._silent: tuple[Participant, ...] = ()
        self._shared_gpus: tuple[SharedGpu, ...] = ()
        #: What programs that do not share had of each GPU, by UUID, when nobody moved there.
        self._others: dict[str, int] = {}
        #: Since when a decision stands and is carried out by nobody; until when a kernel is passed over for that.
        self._standing: dict[tuple[str, str], float] = {}
        self._passed_over: dict[tuple[str, str], float] = {}
        #: Since when the lock of claims is another's whenever it is wanted.
        self._blocked_since: float | None = None
        self._failing = False
        #: The error since which nothing was decided.
        self._undecided: Exception | None = None

    # -- members

    def join(self, member: Member) -> None:
        """Have the member's kernel looked at, again and again, as long as its `observe` wants that.

        Does nothing after `detach`.  Raises `RuntimeError` where the process may have no more threads.
        """
        with self._changed:
            if member.is_detached:
                return
            member.joins += 1
            if self._thread is None:
                self._decided_at = time.monotonic()
                thread = threading.Thread(target=self._run, name="gpu-ckpt-sharing", daemon=True)
                thread.start()
                self._thread = thread
            self._members[member.participant.kernel] = member

    def detach(self, member: Member) -> None:
        """End the part of a kernel.  Its memory, if it has any, is another program's for all others."""
        with self._changed:
            member.is_detached = True
            self._members.pop(member.participant.kernel, None)
            self._changed.notify_all()
        member.remove()
        self.poke()

    def poke(self) -> None:
        """Have the thread decide now: a fact has changed."""
        self._poked.set()

    # -- decisions

    @property
    def participants(self) -> tuple[Participant, ...]:
        """The records of all servers, as last read."""
        return self._participants

    @property
    def decisions(self) -> Decisions:
        """The last decisions."""
        return self._decisions

    def decision(self, member: Member) -> GrantTurn | WaitFor | NeverFits | None:
        """Return what was decided last for a member that waits."""
        decisions, name = self._decisions, member.participant.kernel
        found: list[GrantTurn | WaitFor | NeverFits] = [*decisions.grants, *decisions.refusals, *decisions.waits]
        return next((each for each in found if each.kernel == name), None)

    def available(self, uuid: str) -> int | None:
        """Return the bytes of a GPU that kernels which share can have together, None if it is not known."""
        return next((gpu.total - gpu.others for gpu in self._shared_gpus if gpu.uuid == uuid), None)

    def silent_bytes(self, uuid: str) -> int:
        """Return how much of a GPU kernels may have whose servers do not answer: no more than other programs have."""
        known = (pair for each in self._silent for pair in zip(each.on, each.resident, strict=True))
        others = sum(gpu.others for gpu in self._shared_gpus if gpu.uuid == uuid)
        return min(others, sum(bytes for on, bytes in known if on == uuid))

    def failure(self) -> Exception | None:
        """Return why nothing has been decided for so long that nobody should wait for it any more; else None."""
        return self._undecided if time.monotonic() - self._decided_at > SILENT_S else None

    def used(self, now: float) -> dict[str, float]:
        """Return the seconds of all turns of all kernels until ``now``."""
        return policy.used(self._participants, now)

    def wait(self, seconds: float) -> None:
        """Wait for the next decisions, for so many seconds at most."""
        with self._changed:
            self._changed.wait(seconds)

    def should_suspend(self, member: Member) -> bool:
        """Return whether the last decisions want the member off its GPUs."""
        return any(each.kernel == member.participant.kernel for each in self._decisions.suspends)

    def claim(self, member: Member) -> GrantTurn | None:
        """Begin the turn that was decided for a member, if it still is by all facts, under the locks of its GPUs.

        A grant of which another server knows nothing is none: the server that has the locks reads all records again.
        Raises `OSError` and `HostError` where the directory cannot be used.
        """
        if not isinstance(grant := self.decision(member), GrantTurn):
            return None
        # A kernel that stays where it is and needs no more gets no memory: its cells lock nothing.
        gets_memory = grant.move or member.participant.needs != member.participant.resident
        with ExitStack() as locks:
            if gets_memory and not self._locks(locks, grant.gpus):
                return None
            snapshot = self._snapshot()
            grants = policy.decide(snapshot).grants
            again = next((each for each in grants if each.kernel == grant.kernel), None)
            if again is None or again.move is not grant.move or not set(again.gpus) <= set(grant.gpus):
                return None
            before = member.participant
            if not gets_memory and before.needs != before.resident:
                return None
            if again.move and not self._has_memory(before, again, snapshot):
                return None
            counts = False
            try:
                member.update(lambda participant: participant.granted(again.gpus, again.turn, time.monotonic()))
                counts = not again.move or not self._is_contested(member.participant, snapshot)
            finally:  # whether it is contested may not be known: then it is no claim either
                if not counts:
                    member.update(lambda _: before)
            return again if counts else None

    def _locks(self, locks: ExitStack, gpus: tuple[str, ...]) -> bool:
        """Lock claims of these GPUs; return whether to continue.

        Nobody has such a lock for long, but a server that is stopped, or a user who wants others to wait.  So it is
        done without after a while: the lock saves claims that would be contested, and `_is_contested` is sure.  The
        while is short: a server that was stopped in the middle of a claim was waited for `SILENT_S` before that.
        """
        now = time.monotonic()
        try:
            locks.enter_context(gpu_locks.locked(self.directory, gpus, _LOCK_S, kind="claim"))
        except GpuFull:
            self._blocked_since = now if self._blocked_since is None else self._blocked_since
            return time.monotonic() - self._blocked_since > _BLOCKED_S
        self._blocked_since = None
        return True

    def _is_contested(self, mine: Participant, snapshot: NodeSnapshot) -> bool:
        """Return whether another claim of the same GPUs was shown meanwhile, which is before this one.

        Each reads the records once its own is there, so of two at least one sees the other, and the later one yields.
        A server without sharing restores a kernel under the GPU's lock, and reads the records under it: so either it
        sees this claim, or its lock is seen here.
        """
        known = {each.kernel: each.granted_at for each in snapshot.participants}
        for each in records.read(self.directory):
            is_new = each.residence is Residence.ARRIVING and known.get(each.kernel) != each.granted_at
            is_before = (each.granted_at or 0.0, each.kernel) < (mine.granted_at or 0.0, mine.kernel)
            if is_new and is_before and set(each.on).intersection(mine.on):
                return True
        try:
            with gpu_locks.locked(self.directory, mine.on, 0.0):
                return False
        except GpuFull:
            return True

    def _has_memory(self, participant: Participant, grant: GrantTurn, snapshot: NodeSnapshot) -> bool:
        """Return whether the GPUs have the memory free, without that which others are about to fill.

        Of a kernel that arrives early: or will have, as far as others leave it.
        """
        for uuid, needed in zip(grant.gpus, participant.needs, strict=True):
            arriving = sum(
                bytes
                for each in snapshot.participants
                if each.residence is Residence.ARRIVING and each.kernel != participant.kernel
                for on, bytes in zip(each.on, each.resident, strict=True)
                if on == uuid
            )
            if self._gpus.free(uuid) - arriving < needed and not self._will_have(participant, uuid, needed, snapshot):
                return False
        return True

    def _will_have(self, participant: Participant, uuid: str, needed: int, snapshot: NodeSnapshot) -> bool:
        """Return whether a kernel can arrive early on a GPU: what it needs is free, or is becoming free.

        By the records, for NVML's numbers change by the moment; and by what other programs had before the moves, which
        NVML does not tell from what has been freed.  One at a time: two would each find the same memory free.
        """
        there = [each for each in snapshot.participants if uuid in each.on and each.kernel != participant.kernel]
        arrives = any(each.residence is Residence.ARRIVING for each in there)
        if not participant.arrives_early or arrives or not any(each.frees for each in there):
            return False
        stays = [dict(zip(each.on, each.resident, strict=True))[uuid] for each in there if not each.frees]
        gpu = next((each for each in snapshot.gpus if each.uuid == uuid), None)
        return gpu is not None and needed <= gpu.total - max(gpu.others, self._others.get(uuid, 0)) - sum(stays)

    def _note_others(self, gpus: Iterable[SharedGpu], participants: Sequence[Participant]) -> None:
        moves = (Residence.ARRIVING, Residence.LEAVING)
        moving = {uuid for each in participants if each.residence in moves for uuid in each.on}
        self._others |= {gpu.uuid: gpu.others for gpu in gpus if gpu.uuid not in moving}

    def _snapshot(self) -> NodeSnapshot:
        now = time.monotonic()
        own = {name: replace(each.participant, alive_at=now) for name, each in [*self._members.items()]}
        living, silent = records.read_all(self.directory)
        read = {each.kernel: each for each in living}
        known = sorted((read | own).values(), key=lambda each: each.kernel)
        participants = tuple(self._without_idlers(known, now))
        self._participants = participants
        self._silent = tuple(each for each in silent if each.kernel not in own)
        wants = (each.waiting_since is not None or (each.on and each.needs != each.resident) for each in participants)
        self._shared_gpus = ()
        if not any(wants):
            return NodeSnapshot(now, (), participants, rules=self.rules)
        gpus = tuple(
            SharedGpu(gpu.uuid, gpu.total, policy.others(gpu.uuid, gpu.total, gpu.free, participants, now))
            for gpu in self._gpus.list()
        )
        self._shared_gpus = gpus
        self._note_others(gpus, participants)
        allotments = self.allotments.of({each.user for each in participants})
        return NodeSnapshot(now, gpus, participants, allotments, self.rules)

    def _without_idlers(self, participants: list[Participant], now: float) -> Iterator[Participant]:
        """Yield the participants, but as no waiting ones those that do not take what they are granted.

        A server may be in a fault of its own, or a user lie: nobody waits for them.  Likewise one that does not leave
        when it has to cannot leave.
        """
        for each in participants:
            if self._passed_over.get(("grant", each.kernel), -math.inf) > now:
                each = replace(each, waiting_since=None)
            if self._passed_over.get(("suspend", each.kernel), -math.inf) > now:
                each = replace(each, can_leave=False, can_pause=False)
            yield each

    def _note_idlers(self, decisions: Decisions, now: float) -> None:
        """Note how long each decision has been carried out by nobody."""
        if now - self._decided_at > _LATE_S:  # this server was stopped: nobody could do anything of its decisions
            self._standing = {}
        freed = {uuid for each in self._participants if each.frees for uuid in each.on}
        # What becomes free only now may be waited for.
        grants = [("grant", each.kernel) for each in decisions.grants if not freed.intersection(each.gpus)]
        suspends = [("suspend", each.kernel) for each in decisions.suspends]
        moving = {each.kernel for each in self._participants if each.residence is Residence.LEAVING}
        waits = {key: self._standing.get(key, now) for key in [*grants, *suspends] if key[1] not in moving}
        self._standing = {key: since for key, since in waits.items() if now - since < IDLE_S}
        for key in waits.keys() - self._standing.keys():
            _log.warning("A kernel that shares GPUs does not do what it should: it is passed over for a while")
            self._passed_over[key] = now + PASSED_OVER_S
        self._passed_over = {key: until for key, until in self._passed_over.items() if until > now}

    # -- the thread

    def _run(self) -> None:
        stamp, read_at = -1, 0.0
        while True:
            with self._changed:
                if not self._members:
                    self._thread = None
                    self._decisions, self._participants = Decisions(), ()
                    self._silent, self._shared_gpus = (), ()
                    return
            self._poked.wait(POLL_S)
            poked = self._poked.is_set()
            self._poked.clear()
            failure: Exception | None = None
            try:
                now = time.monotonic()
                failure = self._observe(now)
                if not any(member.is_shown for member in [*self._members.values()]):
                    continue
                before, stamp = stamp, self._stamp()
                due = self._decisions.next_at is not None and now >= self._decisions.next_at
                reads = poked or due or stamp != before or now - read_at >= READ_S
                if reads:
                    read_at = now
                    self._decide()
                self._act()
                if failure is not None:
                    raise failure
                if reads:  # else nothing says that the records can be read again
                    self._failing = False
            except Exception as error:
                if not self._failing:  # the first of consecutive failures
                    trace = None if isinstance(error, GpuCkptError | OSError) else error
                    _log.warning("GPUs cannot be shared now; it is tried again: %s", error, exc_info=trace)
                self._failing = True
                if error is not failure:  # that one is of a single kernel, and decisions continue
                    self._undecided = error

    def _observe(self, now: float) -> Exception | None:
        """Bring all members up to date and show that they live, also those beside one that fails; return why it does.

        Raises `OSError` where the directory cannot be used.
        """
        failure = None
        for member in [*self._members.values()]:
            joins = member.joins
            try:
                with suppress(GpuCkptError):  # it ends, or its verb is under way
                    if not member.kernel.observe(now):
                        self._rest(member, joins)
            except Exception as error:
                failure = error
            member.beat()
        return failure

    def _rest(self, member: Member, joins: int) -> None:
        """Look at a member no more, unless it has joined since."""
        with self._changed:
            if member.joins == joins:
                self._members.pop(member.participant.kernel, None)

    def _stamp(self) -> int:
        return os.stat(self.directory).st_mtime_ns

    def _decide(self) -> None:
        snapshot = self._snapshot()
        decisions = policy.decide(snapshot) if snapshot.gpus else Decisions()
        self._note_idlers(decisions, snapshot.now)
        with self._changed:
            self._decisions, self._decided_at, self._undecided = decisions, snapshot.now, None
            self._changed.notify_all()

    def _act(self) -> None:
        for suspend in self._decisions.suspends:
            if (member := self._members.get(suspend.kernel)) is not None:
                member.kernel.begin_suspend(suspend.reason)
        for grant in self._decisions.grants:
            member = self._members.get(grant.kernel)
            # One that has to move is claimed by the thread that moves it.
            if member is not None and not grant.move and member.participant.waiting_since is not None:
                self.claim(member)
