"""One kernel's part in sharing GPUs: its facts, from its lifecycle and its gate, and its moves, as they are decided.

The exchange (`sharing.exchange`) calls `observe` and `begin_suspend` on its own thread; the lifecycle calls `admit`
before it moves the kernel to a GPU, and waits there for its turn.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from ..cuda.fastpath import SOCKET
from ..cuda.gpus import Gpu
from ..errors import CapsuleGone, GpuCkptError, GpuFull, GpuWaitCancelled, UnsupportedCuda
from ..gate.gate import Gate
from ..lifecycle import cuda_processes
from ..lifecycle.context import Reason
from ..lifecycle.lifecycle import Lifecycle
from ..lifecycle.plans import State
from ..sharing import policy
from ..sharing.exchange import Exchange, Member
from ..sharing.participant import Participant, Residence
from ..sharing.policy import Decisions, GrantTurn, NeverFits, SuspendReason, WaitFor
from ..trace import StepEvent
from ..units import counted, duration, size
from .worker import Worker

#: Seconds between two measurements of the memory of a kernel that runs a cell, and of an idle one.
_MEASURE_S, _MEASURE_IDLE_S = 1.0, 5.0
#: Seconds after which a move to a GPU that failed is tried again.
_AGAIN_S = 5.0
#: Seconds after which a kernel that could not leave is asked again.
_REFUSED_S = 60.0
#: Seconds for which calls of a kernel that wants more memory wait, should this server end meanwhile; after which it is
#: sure that nobody who shares has it (records are that old); and after an answer until it is noticed as wanted again.
_LEASE_S, _SURE_S, _STILL_S = 5.0, 2.0, 1.0
#: Seconds of a wait of which nothing is said, and between two texts of the same place.
_UNSAID_S, _SAID_S = 0.5, 30.0


class DailySeconds:
    """Seconds of the last day, by the hour, in which something was so."""

    def __init__(self) -> None:
        self._by_hour: dict[int, float] = {}
        self._last: float | None = None

    def used(self, now: float, so: bool) -> float:
        """Count the time since the last call if it was ``so`` then and is now; return the seconds of the last day."""
        hour = int(now // 3600)
        if so and self._last is not None:
            self._by_hour[hour] = self._by_hour.get(hour, 0.0) + now - self._last
        self._last = now if so else None
        self._by_hour = {each: seconds for each, seconds in self._by_hour.items() if each > hour - 24}
        return round(sum(self._by_hour.values()), 0)


class GpuSharing:
    """The part of one kernel, from its first call of CUDA on: before, it has no record, and is looked at in cells only.

    ``turns``: whether it also yields its GPU in the middle of a cell.  ``visible``: CUDA_VISIBLE_DEVICES of the kernel;
    other GPUs are not for it.  ``announces``: each of its processes that calls CUDA has the library, whose socket says
    so; else they are asked.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        gate: Gate,
        worker: Worker,
        exchange: Exchange,
        *,
        turns: bool,
        visible: str | None,
        announces: bool,
        is_protected: Callable[[], bool],
        log: logging.Logger | logging.LoggerAdapter[Any],
    ) -> None:
        self._lifecycle, self._gate, self._worker, self._exchange = lifecycle, gate, worker, exchange
        self._turns, self._visible, self._is_protected, self._log = turns, visible, is_protected, log
        self._announces = announces
        #: Whether the kernel has used CUDA, as far as it is known; and when that was looked for last.
        self._takes_part, self._looked_at = False, float("-inf")
        self._member = Member(exchange, self)
        self._measured = self._refused_at = self._failed_at = self._too_early_at = float("-inf")
        self._move: Future[None] | None = None
        self._protected = DailySeconds()
        self._cancelled = threading.Event()
        self._waits = False
        #: Calls at the launch gate whose place was given back.
        self._ignored = 0
        self._said: tuple[str, float] | None = None
        #: Bytes that an allocation wants, since when, and whether the kernel may have them; and when it was answered.
        self._wanted, self._wanted_since, self._may_have_more = 0, 0.0, False
        self._answered_at: float | None = None
        self._wanted_said = False
        #: Since when no other kernel shares a GPU of this machine.
        self._alone_since: float | None = None
        #: The GPU where a first context waits for memory, and since when it may be created there.
        self._wanted_on = ""
        self._admitted_at: float | None = None
        #: The GPUs of the machine at the last wait.
        self._present: Sequence[Gpu] = ()
        lifecycle.kernel.admission = self
        lifecycle.trace.sinks.append(self._stepped)
        lifecycle.on_state.append(lambda state: self.join())
        self.join()

    def close(self) -> None:
        """End the kernel's part."""
        self._lifecycle.kernel.admission = None
        self._cancelled.set()
        self._exchange.detach(self._member)

    def join(self) -> None:
        """Have the exchange look at the kernel: its state has changed, or a cell begins.  Never blocks."""
        with contextlib.suppress(RuntimeError):  # no more threads now: the next cell tries again
            self._exchange.join(self._member)

    @property
    def participant(self) -> Participant:
        """The facts that are shown to other servers."""
        return self._member.participant

    def waiting(self) -> dict[str, Any] | None:
        """Return the kernel's place in the queue, its GPU, and the seconds until it computes; None without a place."""
        decision = self._exchange.decision(self._member)
        if self.participant.waiting_since is None or not isinstance(decision, WaitFor):
            return None
        since = round(time.monotonic() - self.participant.waiting_since, 1)
        gpu = decision.gpus[0] if decision.gpus else next(iter(self.participant.gpus), None)
        index = next((each.index for each in self._present if each.uuid == gpu), None)
        return {
            "gpu": gpu,
            "index": index,
            "place": decision.place,
            "seconds": decision.seconds,
            "waited": since,
        }

    def queue(self, uuid: str, own: Mapping[str, str]) -> dict[str, Any]:
        """Return who computes on a GPU, waits for it and is idle on it; ``own``: ids of kernels by their records."""
        now = time.monotonic()
        shown = overview(self._exchange.participants, self._exchange.decisions, uuid, own, now)
        return {**shown, "silent_bytes": self._exchange.silent_bytes(uuid)}

    def status(self) -> str:
        """Return, for people, whether the kernel computes or waits, and how many others wait for its GPUs.

        Nothing for a kernel that has not used CUDA.
        """
        if not self._takes_part:
            return ""
        now, mine, waiting = time.monotonic(), self.participant, self.waiting()
        others = [
            each
            for each in self._exchange.participants
            if each.kernel != mine.kernel and each.waiting_since is not None and set(each.gpus) & set(mine.gpus)
        ]
        if waiting is not None:
            state = f"waits: {place_text(waiting['place'], waiting['seconds'])}"
        elif mine.turn is not None:
            state = f"has had its turn for {duration(max(0.0, now - mine.turn.since))}"
        else:
            state = "idle, on its GPU" if mine.on else "idle, off its GPU"
        return f"{state}; {counted(len(others), 'other')} {'waits' if len(others) == 1 else 'wait'}"

    def give_back(self) -> None:
        """Give the kernel's place in the queue back: its cell was interrupted."""
        if self._waits:
            self._cancelled.set()
            self._exchange.poke()

    # -- for the exchange

    def observe(self, now: float) -> bool:
        """Bring the facts up to date: cells that began and ended, memory, calls at the launch gate.

        Return False for a kernel that has not used CUDA, and runs no cell in which it could.
        """
        if not self._takes_part:
            works = self._lifecycle.state is State.RUNNING and self._gate.working
            if not self._has_used_cuda(now, at_once=not works):
                return works
            self._takes_part = True
        state, is_protected = self._lifecycle.state, self._is_protected()
        can_leave = now - self._refused_at > _REFUSED_S
        used = self._protected.used(now, is_protected and self._is_waited_for())
        self._member.update(
            lambda p: replace(
                p,
                protected=is_protected,
                protect_used=used,
                can_leave=can_leave,
                can_pause=can_leave and self._turns,
            )
        )
        if state is State.RUNNING:
            self._observe_running(now)
        elif state is State.OFF_GPU:
            self._observe_off_gpu(now)
        elif state is State.DEAD and self.participant.on:
            self._member.update(lambda p: replace(p.cell_ended(now), residence=Residence.AWAY, on=(), resident=()))
        return True

    def _has_used_cuda(self, now: float, *, at_once: bool) -> bool:
        """Return whether the kernel has used CUDA; without the library not more than every few seconds in a cell."""
        lifecycle = self._lifecycle
        kernel = lifecycle.kernel
        if kernel.saved.cuda:
            return True
        if (capsule := kernel.capsule) is None:
            return False
        if self._announces:
            with contextlib.suppress(OSError):
                return any(capsule.directory.glob(f"{SOCKET}*"))
            return False
        if not at_once and now - self._looked_at < _MEASURE_IDLE_S:
            return False
        self._looked_at = now
        with contextlib.suppress(GpuCkptError):  # it has ended
            return bool(cuda_processes.candidates(kernel))
        return False

    def _is_waited_for(self) -> bool:
        """Return whether others wait for a GPU on which the kernel has memory and does not compute."""
        mine = self.participant
        waiting = (each for each in self._exchange.participants if each.waiting_since is not None)
        return mine.turn is None and any(set(each.gpus).intersection(mine.on) for each in waiting)

    def _observe_running(self, now: float) -> None:
        working, participant = self._gate.working, self.participant
        others = any(each.kernel != participant.kernel for each in self._exchange.participants)
        self._alone_since = None if others else self._alone_since or now
        if working or self._wanted:
            self._observe_wanted(now)
        computes = participant.turn is not None or participant.waiting_since is not None
        recent = working or self._gate.last_activity >= self._measured - _MEASURE_S
        if working is not computes or now - self._measured >= (_MEASURE_S if recent else _MEASURE_IDLE_S):
            self._measured = now
            self._measure()
        if working and not computes and self.participant.residence is Residence.PRESENT:
            self._member.update(lambda p: p.touched(now, self._exchange.used(now)))
        elif computes and not working:
            self._member.update(lambda p: p.cell_ended(now))

    def _observe_wanted(self, now: float) -> None:
        """Have others leave for an allocation of the kernel that finds no free memory, or refuse it.

        Its calls wait at the launch gate meanwhile.  Should the kernel itself have to leave first, it waits for its
        turn with as much more (`admit`), and the allocation is tried again after its return.
        """
        kernel = self._lifecycle.kernel
        wanted = kernel.fast_path().wanted() if kernel.capsule is not None else 0
        is_new = self._answered_at is not None and now - self._answered_at > _STILL_S
        if wanted != self._wanted or is_new:
            self._wanted, self._wanted_since, self._answered_at = wanted, now, None
            self._wanted_on = kernel.fast_path().wanted_on() if wanted else ""
            self._wanted_said = self._may_have_more = False
            self._measured = now
            self._measure()
            if not self.participant.on and self.participant.waiting_since is not None:
                self._member.update(lambda p: p.cell_ended(now))  # the last wish's, of another size
        if not wanted or self._answered_at is not None:
            return
        # A verb closes and opens the gate itself; `acquire` also keeps one from beginning.
        if not kernel.lock.acquire(blocking=False):
            return
        try:
            if self._lifecycle.state is not State.RUNNING:
                return
            kernel.fast_path().close_launch_gate(_LEASE_S)
            if not self.participant.on:
                if self._admitted_to_its_first(wanted, now):
                    self._answered_at = now
                    kernel.fast_path().open_launch_gate()
                return
            if self._may_have(wanted) is not self._may_have_more:
                self._may_have_more = not self._may_have_more
                self._measure()  # which shows others what it needs
            if self._may_have_more and kernel.engine.gpus.free(self.participant.on[0]) < wanted:
                self._say_wanted(wanted, now)
            elif self._may_have_more or self._is_sure(now) or self._exceeds_its_gpu(wanted):
                self._answered_at = now
                kernel.fast_path().open_launch_gate()
        finally:
            kernel.lock.release()

    def _admitted_to_its_first(self, wanted: int, now: float) -> bool:
        """Return whether a kernel without a context may try to create one now: it has a turn, or can have none."""
        if not self._may_have(wanted):
            return self._is_sure(now)
        if self.participant.waiting_since is None:
            self._member.update(lambda p: replace(p, gpus=(self._wanted_on,), needs=(wanted,)))
            self._touch(now)
            return False
        decision = self._exchange.decision(self._member)
        if isinstance(decision, WaitFor):
            self._say_wanted(wanted, now)
        if isinstance(decision, GrantTurn) and self._exchange.claim(self._member) is not None:
            self._admitted_at = now
            return True
        return isinstance(decision, NeverFits)

    def _is_sure(self, now: float) -> bool:
        """Return whether the records are new enough to know that nobody who shares has what is wanted.

        They are at once where nobody else has shared for a while: then a program that runs out of memory need not wait.
        """
        alone = self._alone_since is not None and now - self._alone_since > _SURE_S
        return alone or now - self._wanted_since > _SURE_S

    def _say_wanted(self, wanted: int, now: float) -> None:
        if now - self._wanted_since > _UNSAID_S and not self._wanted_said:
            self._wanted_said = True
            self._print(f"waiting for {size(wanted, 2)} more of the GPU, which others have")

    def _may_have(self, wanted: int) -> bool:
        """Return whether the kernel's GPU has as much memory more, without that of other kernels that share it.

        Its GPU is the one where it has memory; else the one where its first context waits for it.
        """
        mine, now = self.participant, time.monotonic()
        on = mine.on or (self._wanted_on,)
        if mine.residence not in (Residence.PRESENT, Residence.AWAY) or len(on) != 1:
            return False
        gpu = next((each for each in self._lifecycle.kernel.engine.gpus.list() if each.uuid == on[0]), None)
        if gpu is None or self._wanted_on not in ("", gpu.uuid):
            return False
        known = [mine if each.kernel == mine.kernel else each for each in self._exchange.participants]
        outside = policy.others(gpu.uuid, gpu.total, gpu.free, known, now)
        return sum(mine.resident) + wanted <= gpu.total - outside

    def _exceeds_its_gpu(self, wanted: int) -> bool:
        """Return whether the kernel's GPU would not have as much memory more without all other programs."""
        mine = self.participant
        totals = {gpu.uuid: gpu.total for gpu in self._lifecycle.kernel.engine.gpus.list()}
        return len(mine.on) == 1 and mine.resident[0] + wanted > totals.get(mine.on[0], math.inf)

    def _more(self, needs: tuple[int, ...]) -> tuple[int, ...]:
        """Return the needs with what an allocation wants that waits for it."""
        if len(needs) != 1 or not self._may_have_more or self._answered_at is not None:
            return needs
        return (needs[0] + self._wanted,)

    def _touch(self, now: float) -> None:
        """Have the kernel wait for a turn; a cell that has had turns is no new one."""
        used = self._exchange.used(now)

        def touched(p: Participant) -> Participant:
            if p.turns and p.turn is None and p.waiting_since is None:
                return replace(p, waiting_since=now)
            return p.touched(now, used)

        self._member.update(touched)

    def _measure(self) -> None:
        kernel = self._lifecycle.kernel
        used = kernel.engine.gpus.used_by(*cuda_processes.candidates(kernel)) if kernel.capsule is not None else {}
        if self._lifecycle.state is not State.RUNNING:  # a verb has begun meanwhile
            return
        on, bytes = tuple(used), tuple(used.values())
        mirrored = bool(used) and cuda_processes.mirrored(kernel)
        if self.participant.residence is Residence.ARRIVING and self._admitted_at is not None:
            self._arrive(bool(used))
        if not used:
            if self.participant.residence is not Residence.ARRIVING and not self._waits_for_its_first:
                self._member.update(functools.partial(_without_memory, now=time.monotonic()))
        elif self.participant.residence in (Residence.PRESENT, Residence.AWAY):
            gpus = self._allowed(on, kernel.engine.gpus.list()) if set(on) - set(self.participant.gpus) else None
            self._member.update(
                lambda p: replace(
                    p,
                    residence=Residence.PRESENT,
                    on=on,
                    was_on=on,
                    resident=bytes,
                    needs=self._more(bytes),
                    gpus=p.gpus if gpus is None else gpus,
                    mirrored=mirrored,
                )
            )

    @property
    def _waits_for_its_first(self) -> bool:
        return self.participant.residence is Residence.AWAY and self.participant.waiting_since is not None

    def _arrive(self, is_there: bool) -> None:
        """Note that the first context of a kernel that was admitted for it is there, or does not come."""
        now = time.monotonic()
        if is_there:
            self._member.update(lambda p: p.arrived(now))
        elif (self._wanted and self._answered_at is None) or now - (self._admitted_at or now) > _LEASE_S:
            used = self._exchange.used(now)
            self._member.update(lambda p: p.move_failed(now, used).cell_ended(now))
        else:
            return
        self._admitted_at = None

    def _observe_off_gpu(self, now: float) -> None:
        if (self._move is not None and not self._move.done()) or now - self._failed_at < _AGAIN_S:
            return
        if self._lifecycle.kernel.fast_path().touches() > self._ignored:
            self._touch(now)
            self._move = self._worker.submit(self._return)
        elif (self.participant.turns or self.participant.waiting_since is not None) and not self._gate.working:
            self._member.update(lambda p: p.cell_ended(now))
        elif self.participant.waiting_since is not None:  # as a call that came when its memory was about to leave
            self._member.update(lambda p: replace(p, waiting_since=None))

    def _return(self) -> None:
        try:
            if self._lifecycle.state is State.OFF_GPU:
                self._lifecycle.resume()
        except GpuWaitCancelled:
            self._log.info("Kernel %s: its cell does not wait for a GPU any more", self._lifecycle.home.kernel_id)
        except GpuCkptError as error:
            self._failed_at = time.monotonic()
            self._log.warning("Kernel %s has not come back to a GPU: %s", self._lifecycle.home.kernel_id, error)
            with contextlib.suppress(GpuCkptError):
                self._gate.print_notice(f"The kernel does not get its GPU: {error.message} It is tried again.")
        except Exception:
            self._failed_at = time.monotonic()
            self._log.exception("Kernel %s has not come back to a GPU", self._lifecycle.home.kernel_id)

    def begin_suspend(self, reason: SuspendReason) -> None:
        """Begin to move the kernel off the GPU."""
        if self._move is None or self._move.done():
            self._move = self._worker.submit(self._suspend)

    def _suspend(self) -> None:
        lifecycle, kernel_id = self._lifecycle, self._lifecycle.home.kernel_id
        if lifecycle.state is not State.RUNNING or not self._exchange.should_suspend(self._member):
            return
        self._log.info("Kernel %s leaves its GPU for another kernel", kernel_id)
        try:
            try:
                lifecycle.yield_gpu()
            except UnsupportedCuda:
                if self._gate.working:
                    raise
                lifecycle.suspend()
        except GpuCkptError as error:
            self._refused_at = time.monotonic()
            self._log.info("Kernel %s keeps its GPU: %s", kernel_id, error)
        except Exception:
            self._refused_at = time.monotonic()
            self._log.exception("Kernel %s has not left its GPU", kernel_id)

    # -- for the lifecycle

    def admit(
        self,
        needs: Mapping[str, int],
        present: Sequence[Gpu],
        *,
        elsewhere: bool,
        early: bool = False,
        more: bool = True,
    ) -> dict[str, str]:
        """Wait until the kernel may have ``needs`` (bytes by GPU UUID); return the GPU to use for each of these.

        ``elsewhere``: whether others of the same model will do.  ``early``: also for memory that another kernel is
        leaving, which becomes free bit by bit.  ``more``: and for what an allocation wants.  Raises
        `GpuFull` for what never fits, and without turns also for what does not fit beside programs that do not share;
        `GpuWaitCancelled` if the place was given back, the exchange's error where it cannot decide (`OSError` where it
        can have no thread), and as `Cancellation.check`.
        """
        self._takes_part = True
        try:
            self._exchange.join(self._member)
        except RuntimeError as error:  # without a thread nothing is decided
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from error
        self._cancelled.clear()
        home, began, self._present = tuple(needs), time.monotonic(), present
        gpus = self._allowed(home, present) if elsewhere else home
        self._said, self._waits = None, True
        early = early and began - self._too_early_at > _REFUSED_S

        def wait(participant: Participant) -> Participant:
            wanted = self._more(tuple(needs.values())) if more else tuple(needs.values())
            changed = replace(participant, gpus=gpus, needs=wanted, residence=Residence.AWAY, on=(), resident=())
            # What an allocation wants has to be free when that is tried again, at once after the return.
            return replace(changed, arrives_early=early and wanted == tuple(needs.values()))

        try:
            self._member.update(wait)
            self._touch(began)
            while True:
                self._check()
                if (failure := self._exchange.failure()) is not None:
                    raise copy.copy(failure)
                decision = self._exchange.decision(self._member)
                if isinstance(decision, NeverFits):
                    raise _never_fits(decision)
                if isinstance(decision, GrantTurn) and (grant := self._exchange.claim(self._member)) is not None:
                    break
                waited = time.monotonic() - began
                self._say(decision if isinstance(decision, WaitFor) else None, present, waited)
                if not self._turns and waited > self._lifecycle.kernel.settings.reservation:
                    self._check_available(decision)
                self._exchange.wait(0.2)
        except BaseException:
            self._member.update(lambda p: p.cell_ended(time.monotonic()))
            raise
        finally:
            self._waits = False
        if self._said is not None:
            self._print(f"{_named(grant.gpus[0], present)} after {duration(time.monotonic() - began)}")
        return dict(zip(home, grant.gpus, strict=True))

    def renew(self) -> None:
        """Wait anew for the GPUs that the kernel was admitted to, if this process was stopped since; as `admit`."""
        while self.participant.residence is Residence.ARRIVING and not self._member.claim_is_valid():
            needs = dict(zip(self.participant.on, self.participant.needs, strict=True))
            now = time.monotonic()
            used = self._exchange.used(now)
            # Its turn is void, too: with one it would not wait for another.
            self._member.update(functools.partial(Participant.move_failed, now=now, used=used))
            early = self.participant.arrives_early
            self.admit(needs, self._lifecycle.engine.gpus.list(), elsewhere=False, early=early, more=False)

    def settle(self) -> None:
        """Note the end of a move to a GPU, whichever it was."""
        if self.participant.residence is not Residence.ARRIVING:
            return
        self._measured, now = float("-inf"), time.monotonic()
        used = self._exchange.used(now)
        with contextlib.suppress(OSError):  # the directory; the move has ended all the same
            if self._lifecycle.kernel.saved.cuda:
                if self.participant.arrives_early:  # perhaps nobody left, whatever a record said
                    self._too_early_at = now
                self._member.update(lambda p: p.move_failed(now, used).cell_ended(now))
            else:
                self._ignored = 0
                self._member.update(lambda p: _timed(p.arrived(now)))

    def frees(self, begun: bool) -> None:
        """Show whether the kernel's memory becomes free bit by bit from now on, for the next kernel."""
        with contextlib.suppress(OSError):  # then nobody comes early
            self._member.update(lambda p: replace(p, frees=begun and p.residence is Residence.LEAVING))

    def is_alone(self) -> bool:
        """Return whether no other kernel of this node shares GPUs now."""
        return all(each.kernel == self.participant.kernel for each in self._exchange.participants)

    def _check(self) -> None:
        kernel = self._lifecycle.kernel
        kernel.cancellation.check(Reason.DETACH_SOON)
        if kernel.capsule is not None and (status := kernel.capsule.poll()) is not None:
            raise CapsuleGone(f"The kernel's process ended (status {status}).", status=status)
        if self._cancelled.is_set():
            with contextlib.suppress(GpuCkptError):
                self._ignored = kernel.fast_path().touches() if kernel.capsule is not None else 0
            raise GpuWaitCancelled("The cell does not wait for a GPU any more: it was interrupted.")

    def _say(self, decision: WaitFor | None, present: Sequence[Gpu], waited: float) -> None:
        """Print the place in the waiting cell: once it is worth a line, and when it changes.

        Without a decision: it has a turn that it cannot begin, as while a server without sharing has the GPU's lock.
        """
        if waited < (_UNSAID_S if decision is not None else _SURE_S):
            return
        gpus = decision.gpus if decision is not None else ()
        gpu = gpus[0] if gpus else next(iter(self.participant.gpus), "")
        text, about = "another kernel comes to it", ""
        if decision is not None:
            text = place_text(decision.place, None) + self._silent_text(decision)
            about = "" if decision.seconds is None else f", about {duration(decision.seconds)}"
        if self._said is not None and self._said[0] == text and waited - self._said[1] < _SAID_S:
            return
        self._said = (text, waited)
        self._print(f"waiting for {_named(gpu, present)}: {text}{about}")

    def _check_available(self, decision: Any) -> None:
        """Raise `GpuFull` if the memory is that of programs which do not share, of which nobody knows when they end."""
        if not isinstance(decision, WaitFor) or decision.seconds is not None:
            return
        mine, needed = self.participant, max(self.participant.needs)
        found = [self._exchange.available(gpu) for gpu in mine.gpus]
        known = [bytes for bytes in found if bytes is not None]
        if len(known) == len(found) and max(known) < needed:
            message = f"The kernel needs {size(needed, 2)} on a GPU; the kernels that share it have "
            message += f"{size(max(known), 2)} of it together, other programs the rest{self._silent_text(decision)}."
            raise GpuFull(message, left="nothing was changed", needed=needed, free=max(known))

    def _silent_text(self, decision: WaitFor) -> str:
        """Return how much of the GPUs is of servers that do not answer, where nobody knows when it will be free."""
        bytes = max((self._exchange.silent_bytes(gpu) for gpu in self.participant.gpus), default=0)
        if decision.seconds is not None or not bytes:
            return ""
        return f"; {size(bytes, 2)} of it are of a server that does not answer"

    def _print(self, text: str) -> None:
        with contextlib.suppress(GpuCkptError):
            self._gate.print_notice(text)

    def _allowed(self, home: Sequence[str], present: Sequence[Gpu]) -> tuple[str, ...]:
        """Return the GPUs that the kernel may be on: those of the same model that CUDA_VISIBLE_DEVICES does not hide.

        Its own are first, in its own order.  A kernel with several stays on them.
        """
        models = {(gpu.name, gpu.total) for gpu in present if gpu.uuid in home}
        if len(home) != 1 or len(models) != 1:
            return tuple(home)
        named = None if self._visible is None else [word.strip() for word in self._visible.split(",")]

        def is_visible(gpu: Gpu) -> bool:
            return named is None or any(word == str(gpu.index) or gpu.uuid.startswith(word) for word in named if word)

        same = [gpu.uuid for gpu in present if (gpu.name, gpu.total) in models and is_visible(gpu)]
        return (*home, *(uuid for uuid in same if uuid not in home))

    # -- as a sink of the lifecycle's trace

    def _stepped(self, event: StepEvent) -> None:
        with contextlib.suppress(OSError):  # the directory; the facts are changed, and the exchange says so
            self._note_step(event)

    def _note_step(self, event: StepEvent) -> None:
        if event.step == "cuda_resume":  # it may undo a suspend, of which no admission knows
            self._measured = float("-inf")
        if event.step != "cuda_suspend" or self.participant.residence is Residence.AWAY:
            return
        now = time.monotonic()
        used = self._exchange.used(now)
        if event.kind == "started":
            self._ignored = 0
            self._member.update(lambda p: p.leaving(now, used))
        elif event.kind == "completed":
            # It waits again once it calls CUDA: what it computes without needs no turn.
            self._member.update(lambda p: _timed(replace(p.left(now), waiting_since=None)))
        elif event.kind == "failed":
            self._measured = float("-inf")
            self._member.update(lambda p: replace(p.move_failed(now, used), waiting_since=None))


def _without_memory(participant: Participant, now: float) -> Participant:
    """Return the participant with no memory on any GPU, and so without a turn, for which it would not wait again.

    As a process that has freed all, or one whose first context was seen half created before the driver gave it up.
    """
    ended = participant if participant.turn is None else participant.cell_ended(now)
    return replace(ended, residence=Residence.AWAY, on=(), resident=(), needs=())


def _timed(participant: Participant) -> Participant:
    """Return the participant with the time of its last move as the estimate of the next one of its kind."""
    swap = participant.swaps[-1]
    if participant.residence is Residence.AWAY:
        return replace(participant, leave_seconds=swap.seconds)
    return replace(participant, arrive_seconds=swap.seconds)


def overview(
    participants: Iterable[Participant], decisions: Decisions, uuid: str, own: Mapping[str, str], now: float
) -> dict[str, Any]:
    """Return who computes on a GPU, waits for it and is idle on it, of all users: since when and how much, and no more.

    ``own``: kernel ids by the names of records; only these kernels are named.  ``factor``: by how much the thrash guard
    lengthens turns.
    """
    found: dict[str, list[dict[str, Any]]] = {"computing": [], "waiting": [], "idle": []}
    places = {each.kernel: each.place for each in decisions.waits}
    for each in participants:
        more: dict[str, Any] = {"kernel": own.get(each.kernel)}
        if each.waiting_since is not None and uuid in each.gpus:
            state, since, bytes = "waiting", each.waiting_since, sum(each.needs)
            more["place"] = places.get(each.kernel)
        elif uuid in each.on:
            state, since = ("idle", each.idle_since) if each.turn is None else ("computing", each.turn.since)
            bytes = dict(zip(each.on, each.resident, strict=True))[uuid]
            if each.turn is not None:
                more["left"] = round(max(0.0, each.turn.since + each.turn.seconds - now), 1)
        else:
            continue
        found[state].append({"seconds": round(max(0.0, now - since), 1), "bytes": bytes, **more})
    return {
        **{state: sorted(entries, key=_in_order) for state, entries in found.items()},
        "factor": decisions.factors.get(uuid, 1),
    }


def _in_order(entry: Mapping[str, Any]) -> tuple[float, float]:
    """Return the order of entries: by the place in the queue, then the longest first."""
    place = entry.get("place")
    return (math.inf if place is None else place, -entry["seconds"])


def place_text(place: int, seconds: float | None) -> str:
    """Return a place in a queue and its estimate, for people."""
    where = "next" if place == 1 else f"place {place}"
    return where if seconds is None else f"{where}, about {duration(seconds)}"


def _named(uuid: str, present: Sequence[Gpu]) -> str:
    index = next((gpu.index for gpu in present if gpu.uuid == uuid), None)
    return "a GPU" if index is None else f"GPU {index}"


def _never_fits(decision: NeverFits) -> GpuFull:
    message = f"The kernel needs {size(decision.needed, 2)} on a GPU; the largest that it may use has "
    message += f"{size(decision.largest, 2)} without the programs that do not share."
    return GpuFull(message, left="nothing was changed", needed=decision.needed, free=decision.largest)
