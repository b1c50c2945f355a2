"""Which kernels should leave, and when: looks in, decisions out.  No I/O and no clock of its own.

A kernel is idle from the last moment at which a client had it do something, it worked by itself, or it came back.  An
idle kernel that holds device memory is suspended after a while, and checkpointed after a longer while; suspended
kernels are checkpointed before that when they fill the host's memory.  Kernels without device memory are left alone
unless the settings say otherwise: the GPU is what this is for.  All times are in seconds, those of a moment by
the caller's monotonic clock.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...lifecycle.machine import State

#: States after which a running kernel is one that somebody wanted back.  Not those on the way out: from there a kernel
#: comes back by itself when a step fails.
_AWAY = (State.SUSPENDED, State.RESUMING, State.CHECKPOINTED, State.RESTORING, State.STARTING, State.DEAD)


class Verb(str, enum.Enum):
    """What can be done to an idle kernel."""

    SUSPEND = "suspend"
    CHECKPOINT = "checkpoint"

    __str__ = str.__str__

    @property
    def leads_to(self) -> State:
        """The kernel's state afterwards."""
        return State.SUSPENDED if self is Verb.SUSPEND else State.CHECKPOINTED


@dataclass(frozen=True)
class Rule:
    """Seconds of idleness after which a kernel leaves the GPU, and after which it leaves the host; 0: never."""

    suspend_after: float = 300.0
    checkpoint_after: float = 1800.0


@dataclass(frozen=True)
class IdleSettings:
    """How to judge.

    ``rules`` by the name of the kernelspec, ``rule`` for all others.  ``memory_limit``: bytes of host memory that
    suspended kernels may hold together (0: no limit).  ``without_device_memory``: whether kernels that hold none leave,
    too.  ``parallel``: how many verbs run at once.  A kernel that refused
    is asked again after ``retry_after``; after an error the wait doubles each time, up to ``longest_retry``.
    """

    rule: Rule = field(default_factory=Rule)
    rules: Mapping[str, Rule] = field(default_factory=dict)
    memory_limit: int = 0
    without_device_memory: bool = False
    parallel: int = 2
    retry_after: float = 120.0
    longest_retry: float = 3600.0

    def rule_for(self, kernel_name: str) -> Rule:
        """The rule of a kernelspec."""
        return self.rules.get(kernel_name, self.rule)


@dataclass(frozen=True)
class Look:
    """One kernel at one moment.

    ``process``: its pid; another one means that it was restored or restarted.  ``last_activity``: when a client last
    had it do something.  ``working``: it is at it still, or cannot be looked at.  ``on_gpu``: it holds device memory.
    ``computing``: it worked since the last look, though no cell may have run: on a GPU or a processor, or it accepted a
    connection.  ``resident``: bytes of host memory its processes hold.
    ``protected``: seconds for which its user wants it left alone.
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
    """A decision.  ``reason`` is ``idle`` or ``memory``; ``idle`` is for how long the kernel has been, in seconds."""

    kernel_id: str
    verb: Verb
    reason: str
    idle: float


@dataclass(frozen=True)
class Trouble:
    """Why the last try did not succeed, and when comes the next; ``refused``: nothing was broken, it was not the time.

    ``error`` is the error's `as_dict`.
    """

    error: Mapping[str, Any]
    refused: bool
    times: int
    at: float
    retry_at: float


@dataclass
class _KernelRecord:
    """What is known of a kernel between looks."""

    look: Look
    came_back: float
    computed: float
    trouble: Trouble | None = None

    @property
    def idle_since(self) -> float:
        return max(self.look.last_activity, self.came_back, self.computed)


class Policy:
    """Decides for all kernels of one server.  Not thread-safe: one caller."""

    def __init__(self, settings: IdleSettings | None = None) -> None:
        self.settings = settings or IdleSettings()
        self._known: dict[str, _KernelRecord] = {}
        self._under_way: dict[str, Action] = {}

    def decide(self, looks: Iterable[Look], now: float) -> list[Action]:
        """What to begin now.  Each action is under way until `succeeded`, `failed` or `dropped` is told of it."""
        seen = list(looks)
        for look in seen:
            self._note(look, now)
        # A kernel under way is kept: the one who looks may leave out kernels that cannot be looked at in the middle.
        present = {look.kernel_id for look in seen} | self._under_way.keys()
        self._known = {kernel_id: known for kernel_id, known in self._known.items() if kernel_id in present}
        ready = [look for look in seen if self._may_act(look, now)]
        due = {action.kernel_id: action for action in self._for_idle(ready, now)}
        due.update((action.kernel_id, action) for action in self._for_memory(seen, ready, now))
        chosen = sorted(due.values(), key=self._rank)[: max(0, self.settings.parallel - len(self._under_way))]
        self._under_way.update((action.kernel_id, action) for action in chosen)
        return chosen

    def succeeded(self, action: Action) -> None:
        """The kernel is where it should be."""
        self._under_way.pop(action.kernel_id, None)
        if known := self._known.get(action.kernel_id):
            known.trouble = None
            # Whoever has the kernel back before the next look has used it: that look finds it changed.
            known.look = replace(known.look, state=action.verb.leads_to, on_gpu=False)

    def failed(self, action: Action, error: Mapping[str, Any], *, refused: bool, now: float) -> bool:
        """It could not be done; whether that is news: the same error in a row is told once."""
        self._under_way.pop(action.kernel_id, None)
        known = self._known.get(action.kernel_id)
        if known is None:
            return False
        before = known.trouble
        times = before.times + 1 if before else 1
        wait = self.settings.retry_after
        if not refused:
            wait = max(wait, min(wait * 2.0 ** min(times - 1, 60), self.settings.longest_retry))
        known.trouble = Trouble(dict(error), refused, times, now, now + wait)
        return before is None or before.error.get("code") != error.get("code")

    def dropped(self, action: Action) -> None:
        """It was not tried: the kernel was wanted, or moved by somebody else, in the meantime."""
        self._under_way.pop(action.kernel_id, None)

    def outlook(self, kernel_id: str, now: float) -> dict[str, Any] | None:
        """What will become of a kernel, as JSON for people who look; None for an unknown one.

        ``idle_s``; ``under_way`` (a verb or None); ``next`` (a verb or None) and ``next_in_s``; ``protected_s``;
        ``trouble``: None, or the error's own keys with ``refused``, ``times`` and ``retry_in_s``.
        """
        known = self._known.get(kernel_id)
        if known is None:
            return None
        look, action, trouble = known.look, self._under_way.get(kernel_id), known.trouble
        idle = 0.0 if look.working else max(0.0, now - known.idle_since)
        verb, wait = self._next(look, idle)
        if trouble is not None:
            wait = max(wait, trouble.retry_at - now)
        return {
            "idle_s": idle,
            "under_way": action.verb.value if action else None,
            "next": verb.value if verb else None,
            "next_in_s": max(0.0, wait, look.protected) if verb else None,
            "protected_s": look.protected,
            "trouble": trouble
            and {
                **trouble.error,
                "refused": trouble.refused,
                "times": trouble.times,
                "retry_in_s": max(0.0, trouble.retry_at - now),
            },
        }

    def _note(self, look: Look, now: float) -> None:
        known = self._known.get(look.kernel_id)
        if known is None:
            # A kernel that is new here is not idle yet, whenever its clients were last heard.
            known = self._known[look.kernel_id] = _KernelRecord(look, came_back=now, computed=look.last_activity)
        look = replace(look, process=look.process or known.look.process)  # not looked at is not another one
        if look.state is State.RUNNING and (known.look.state in _AWAY or look.process != known.look.process):
            # Somebody wanted it back, perhaps without running anything yet.
            known.came_back = now
        if look.computing:
            known.computed = now
        if known.trouble and (look.last_activity > known.trouble.at or look.state is State.CHECKPOINTED):
            known.trouble = None  # the kernel has been used since, or somebody has overcome whatever was in the way
        known.look = look

    def _may_act(self, look: Look, now: float) -> bool:
        trouble = self._known[look.kernel_id].trouble
        held_back = trouble is not None and now < trouble.retry_at
        at_work = look.working or look.computing
        return not (at_work or look.protected > 0 or held_back or look.kernel_id in self._under_way)

    def _rank(self, action: Action) -> tuple[bool, bool, float]:
        """Host memory first, because suspending takes more of it; then what gives a GPU back; then the longest idle."""
        return action.reason != "memory", not self._known[action.kernel_id].look.on_gpu, -action.idle

    def _for_idle(self, ready: Iterable[Look], now: float) -> Iterator[Action]:
        for look in ready:
            idle = now - self._known[look.kernel_id].idle_since
            verb, wait = self._next(look, idle)
            if verb is not None and wait <= 0:
                yield Action(look.kernel_id, verb, "idle", idle)

    def _next(self, look: Look, idle: float) -> tuple[Verb | None, float]:
        """The verb to come and the seconds until then; of those that are overdue, the last one."""
        plans = list(self._plans(look, idle))
        overdue = [plan for plan in plans if plan[1] <= 0]
        if overdue:
            return overdue[-1]
        return plans[0] if plans else (None, math.inf)

    def _plans(self, look: Look, idle: float) -> Iterator[tuple[Verb, float]]:
        """The verbs before a kernel in the order of their times, each with the seconds until then."""
        rule = self.settings.rule_for(look.kernel_name)
        running = look.state is State.RUNNING
        if running and look.on_gpu and rule.suspend_after > 0 and not 0 < rule.checkpoint_after <= rule.suspend_after:
            yield Verb.SUSPEND, rule.suspend_after - idle
        leaves = look.on_gpu or self.settings.without_device_memory if running else look.state is State.SUSPENDED
        if leaves and rule.checkpoint_after > 0:
            yield Verb.CHECKPOINT, rule.checkpoint_after - idle

    def _for_memory(self, seen: Iterable[Look], ready: Iterable[Look], now: float) -> Iterator[Action]:
        limit = self.settings.memory_limit
        if limit <= 0:
            return
        # What is being written to disk already will be gone soon.
        staying = (look for look in seen if look.state is State.SUSPENDED and look.kernel_id not in self._under_way)
        excess = sum(look.resident for look in staying) - limit
        suspended = (look for look in ready if look.state is State.SUSPENDED)
        for look in sorted(suspended, key=lambda look: self._known[look.kernel_id].idle_since):
            if excess <= 0:
                return
            excess -= look.resident
            yield Action(look.kernel_id, Verb.CHECKPOINT, "memory", now - self._known[look.kernel_id].idle_since)
