"""Decide which kernels to suspend or checkpoint, from snapshots of them.  No I/O and no clock of its own.

A kernel is idle since a client last used it, it last worked by itself, or it was resumed.  An idle kernel with device
memory is suspended after a while, and checkpointed after a longer while; suspended kernels are checkpointed earlier
when they fill the host's memory.  Kernels without device memory are left alone unless the settings say otherwise.
Times are in seconds, moments by the caller's monotonic clock.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...lifecycle.plans import State

#: States after which a running kernel was resumed by a user.  Not SUSPENDING and DUMPING: from there a kernel comes
#: back by itself when a step fails.
_BEFORE_RESUMED = (State.SUSPENDED, State.RESUMING, State.CHECKPOINTED, State.RESTORING, State.STARTING, State.DEAD)


class Verb(str, enum.Enum):
    """A verb for idle kernels."""

    SUSPEND = "suspend"
    CHECKPOINT = "checkpoint"

    __str__ = str.__str__

    @property
    def leads_to(self) -> State:
        return State.SUSPENDED if self is Verb.SUSPEND else State.CHECKPOINTED


@dataclass(frozen=True)
class Rule:
    """Seconds of idleness after which a kernel is suspended, and after which it is checkpointed; 0: never."""

    suspend_after: float = 300.0
    checkpoint_after: float = 1800.0


@dataclass(frozen=True)
class IdleSettings:
    """The policy's settings: ``rules`` by the name of the kernelspec, ``rule`` for all others; the rest as the traits
    of `loop.IdlePolicy`.
    """

    rule: Rule = field(default_factory=Rule)
    rules: Mapping[str, Rule] = field(default_factory=dict)
    memory_limit: int = 0
    without_device_memory: bool = False
    parallel: int = 2
    retry_after: float = 120.0
    longest_retry: float = 3600.0
    notice: float = 60.0


@dataclass(frozen=True)
class KernelSnapshot:
    """One kernel at one moment.

    ``process``: its pid; a new one means a restore or restart.  ``last_activity``: when a client last used it.
    ``working``: a cell runs, or the kernel cannot be inspected.  ``on_gpu``: it has device memory.  ``computing``: its
    processes worked since the last snapshot, with a cell or without: on a GPU, on a processor, or for a connection that
    they accepted.  ``resident``: bytes of host memory of its processes.  ``protected``: seconds for which its user
    protects it from this policy.
    """

    kernel_id: str
    kernel_name: str
    state: State
    last_activity: float
    process: int | None = None
    working: bool = False
    on_gpu: bool = False
    computing: bool = False
    resident: int = 0
    protected: float = 0.0


@dataclass(frozen=True)
class Action:
    """A decision.  ``reason`` is ``idle`` or ``memory``; ``idle``: seconds of idleness."""

    kernel_id: str
    verb: Verb
    reason: str
    idle: float


@dataclass(frozen=True)
class FailedAttempt:
    """The last attempt, which failed: its error's `as_dict`, and whether only a refusal (nothing broke)."""

    verb: Verb
    error: Mapping[str, Any]
    refused: bool
    times: int
    at: float
    retry_at: float


@dataclass
class _KernelRecord:
    """The policy's memory of a kernel from one round to the next."""

    snapshot: KernelSnapshot
    resumed_at: float
    computed_at: float
    kept_at: float = -math.inf
    failure: FailedAttempt | None = None

    @property
    def idle_since(self) -> float:
        return max(self.snapshot.last_activity, self.resumed_at, self.computed_at, self.kept_at)


class Policy:
    """Decides for all kernels of one server.  Not thread-safe: one caller."""

    def __init__(self, settings: IdleSettings | None = None) -> None:
        self.settings = settings or IdleSettings()
        self._known: dict[str, _KernelRecord] = {}
        self._under_way: dict[str, Action] = {}

    def decide(self, snapshots: Iterable[KernelSnapshot], now: float) -> list[Action]:
        """Return the actions to start now.  Each is under way until `succeeded`, `failed` or `dropped` is called."""
        seen = list(snapshots)
        for snapshot in seen:
            self._update(snapshot, now)
        # Records of kernels under way are kept: these may have no snapshot.
        present = {snapshot.kernel_id for snapshot in seen} | self._under_way.keys()
        self._known = {kernel_id: known for kernel_id, known in self._known.items() if kernel_id in present}
        ready = [snapshot for snapshot in seen if self._may_act(snapshot, now)]
        due = {action.kernel_id: action for action in self._for_idle(ready, now)}
        due.update((action.kernel_id, action) for action in self._for_memory(seen, ready, now))
        chosen = sorted(due.values(), key=self._rank)[: max(0, self.settings.parallel - len(self._under_way))]
        self._under_way.update((action.kernel_id, action) for action in chosen)
        return chosen

    def succeeded(self, action: Action) -> None:
        """Record that the kernel reached the state of the action."""
        self._under_way.pop(action.kernel_id, None)
        if known := self._known.get(action.kernel_id):
            known.failure = None
            # If a user resumes the kernel before the next snapshot, that one differs from this.
            known.snapshot = replace(known.snapshot, state=action.verb.leads_to, on_gpu=False)

    def failed(self, action: Action, error: Mapping[str, Any], *, refused: bool, now: float) -> bool:
        """Record a failed attempt; return False for the same error as the time before."""
        self._under_way.pop(action.kernel_id, None)
        known = self._known.get(action.kernel_id)
        if known is None:
            return False
        before = known.failure
        times = before.times + 1 if before else 1
        wait = self.settings.retry_after
        if not refused:
            wait = max(wait, min(wait * 2.0 ** min(times - 1, 60), self.settings.longest_retry))
        known.failure = FailedAttempt(action.verb, dict(error), refused, times, now, now + wait)
        return before is None or before.error.get("code") != error.get("code")

    def dropped(self, action: Action) -> None:
        """Record that the action was not tried: the kernel was used, or its state changed, in the meantime."""
        self._under_way.pop(action.kernel_id, None)

    def keep(self, kernel_id: str, now: float) -> None:
        """Count this moment as a use of the kernel: the policy waits again as long as for one that was just used."""
        if known := self._known.get(kernel_id):
            known.kept_at = now

    def outlook(self, kernel_id: str, now: float) -> dict[str, Any] | None:
        """Return what the policy will do with a kernel, as JSON; None for an unknown one.

        ``idle_s``; ``under_way`` (a verb or None); ``next`` (a verb or None) and ``next_in_s``; ``imminent``: whether
        that is within the notice, unless the kernel is used; ``protected_s``; ``last_failure``: None, or the error's
        own keys with ``refused``, ``times`` and ``retry_in_s``.
        """
        known = self._known.get(kernel_id)
        if known is None:
            return None
        snapshot, action, failure = known.snapshot, self._under_way.get(kernel_id), known.failure
        idle = 0.0 if snapshot.working else max(0.0, now - known.idle_since)
        verb, wait = self._next(snapshot, idle)
        if failure is not None and not self._may_suspend_instead(snapshot):
            wait = max(wait, failure.retry_at - now)
        wait = max(0.0, wait, snapshot.protected)
        works = snapshot.working or snapshot.computing
        return {
            "idle_s": idle,
            "under_way": action.verb.value if action else None,
            "next": verb.value if verb else None,
            "next_in_s": wait if verb else None,
            "imminent": verb is not None and action is None and not works and wait < self.settings.notice,
            "protected_s": snapshot.protected,
            "last_failure": failure
            and {
                **failure.error,
                "refused": failure.refused,
                "times": failure.times,
                "retry_in_s": max(0.0, failure.retry_at - now),
            },
        }

    def _update(self, snapshot: KernelSnapshot, now: float) -> None:
        # A kernel that is new here is not idle yet, whenever its clients were last active.
        new = _KernelRecord(snapshot, resumed_at=now, computed_at=snapshot.last_activity)
        known = self._known.setdefault(snapshot.kernel_id, new)
        before = known.snapshot
        snapshot = replace(snapshot, process=snapshot.process or before.process)  # 0: not inspected
        replaced = before.state in _BEFORE_RESUMED or snapshot.process != before.process
        if snapshot.state is State.RUNNING and replaced:
            known.resumed_at = now
        if snapshot.computing:
            known.computed_at = now
        used = known.failure is not None and snapshot.last_activity > known.failure.at
        if used or snapshot.state is State.CHECKPOINTED:  # the obstacle may be gone, or was overcome by a user
            known.failure = None
        known.snapshot = snapshot

    def _may_act(self, snapshot: KernelSnapshot, now: float) -> bool:
        failure = self._known[snapshot.kernel_id].failure
        waits = failure is not None and now < failure.retry_at and not self._may_suspend_instead(snapshot)
        works = snapshot.working or snapshot.computing
        return not (works or snapshot.protected > 0 or waits or snapshot.kernel_id in self._under_way)

    def _may_suspend_instead(self, snapshot: KernelSnapshot) -> bool:
        """Return whether a checkpoint was refused without a suspend before it: a suspend can still free the GPU."""
        failure = self._known[snapshot.kernel_id].failure
        refused = failure is not None and failure.refused and failure.verb is Verb.CHECKPOINT
        rule = self.settings.rules.get(snapshot.kernel_name, self.settings.rule)
        return refused and snapshot.state is State.RUNNING and snapshot.on_gpu and rule.suspend_after > 0

    def _rank(self, action: Action) -> tuple[bool, bool, float]:
        """Sort key: host memory first (suspending takes more of it), then what frees a GPU, then idleness."""
        return action.reason != "memory", not self._known[action.kernel_id].snapshot.on_gpu, -action.idle

    def _for_idle(self, ready: Iterable[KernelSnapshot], now: float) -> Iterator[Action]:
        for kernel in ready:
            idle = now - self._known[kernel.kernel_id].idle_since
            verb, wait = self._next(kernel, idle)
            if verb is not None and wait <= 0:
                yield Action(kernel.kernel_id, verb, "idle", idle)

    def _next(self, kernel: KernelSnapshot, idle: float) -> tuple[Verb | None, float]:
        """Return the next verb and the seconds until it is due; of several overdue verbs, the last."""
        if self._may_suspend_instead(kernel):
            return Verb.SUSPEND, 0.0
        plans = list(self._plans(kernel, idle))
        overdue = [plan for plan in plans if plan[1] <= 0]
        if overdue:
            return overdue[-1]
        return plans[0] if plans else (None, math.inf)

    def _plans(self, kernel: KernelSnapshot, idle: float) -> Iterator[tuple[Verb, float]]:
        """Yield the verbs ahead of a kernel in the order of their times, with the seconds until each."""
        rule = self.settings.rules.get(kernel.kernel_name, self.settings.rule)
        running = kernel.state is State.RUNNING
        if running and kernel.on_gpu and rule.suspend_after > 0 and not 0 < rule.checkpoint_after <= rule.suspend_after:
            yield Verb.SUSPEND, rule.suspend_after - idle
        away = kernel.state in (State.SUSPENDED, State.OFF_GPU)
        may_checkpoint = kernel.on_gpu or self.settings.without_device_memory if running else away
        if may_checkpoint and rule.checkpoint_after > 0:
            yield Verb.CHECKPOINT, rule.checkpoint_after - idle

    def _for_memory(
        self, seen: Iterable[KernelSnapshot], ready: Iterable[KernelSnapshot], now: float
    ) -> Iterator[Action]:
        limit = self.settings.memory_limit
        if limit <= 0:
            return
        # Kernels that are being checkpointed will free theirs soon.
        staying = (kernel for kernel in seen if kernel.kernel_id not in self._under_way)
        away = (State.SUSPENDED, State.OFF_GPU)
        excess = sum(kernel.resident for kernel in staying if kernel.state in away) - limit
        suspended = {kernel: self._known[kernel.kernel_id] for kernel in ready if kernel.state in away}
        for kernel, known in sorted(suspended.items(), key=lambda item: item[1].idle_since):
            if excess <= 0:
                return
            excess -= kernel.resident
            yield Action(kernel.kernel_id, Verb.CHECKPOINT, "memory", now - known.idle_since)
