"""Run the idle policy: take snapshots of the server's kernels, let `policy` decide, and start its actions."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from traitlets import Bool, Dict, Float, Int, TraitError, default, validate
from traitlets.config import LoggingConfigurable

from ...errors import DriverTooOld, GpuCkptError, InsufficientResources, PreflightError, StateError
from ...kernel.provisioner import GpuCkptProvisioner
from ..periodic_task import PeriodicTask, wait
from .policy import Action, IdleSettings, KernelSnapshot, Policy, Rule, Verb
from .probe import KernelProbe

_RULE_KEYS = ("suspend_after", "checkpoint_after")


class IdlePolicy(LoggingConfigurable):
    """Suspends and checkpoints idle kernels, those of the provisioners by kernel id that ``kernels`` returns."""

    suspend_after = Float(
        300.0, min=0, help="Seconds of idleness after which a kernel with device memory is suspended; 0: never."
    ).tag(config=True)
    checkpoint_after = Float(
        1800.0,
        min=0,
        help="Seconds of idleness after which a kernel with device memory, or a suspended one, is checkpointed; "
        "0: never.",
    ).tag(config=True)
    without_device_memory = Bool(
        False, help="Whether idle kernels without device memory are checkpointed, too, to free host memory."
    ).tag(config=True)
    kernelspecs: Dict[str, Any] = Dict(
        help="Other times for some kernelspecs, by name: {'python3': {'suspend_after': 60, 'checkpoint_after': 0}}. "
        "Missing keys are as for all others."
    ).tag(config=True)
    suspended_memory_limit = Int(
        min=0,
        help="Bytes of host memory that suspended kernels may use together; above it the longest idle ones are "
        "checkpointed before their time.  0: no limit.  Default: half of the host's memory, or of the cgroup's limit.",
    ).tag(config=True)
    max_parallel = Int(2, min=1, help="How many kernels are suspended or checkpointed at once.").tag(config=True)
    interval = Float(5.0, min=0.05, help="Seconds between two rounds over the kernels.").tag(config=True)
    retry_after = Float(
        120.0,
        min=0.05,
        help="Seconds until a kernel that could not be checkpointed now (NOT_NOW and similar) is tried again; after an "
        "error the wait doubles each time.",
    ).tag(config=True)
    longest_retry = Float(3600.0, min=0, help="Seconds to which the wait after an error grows.").tag(config=True)
    notice = Float(
        60.0,
        min=0,
        help="Seconds before an idle kernel is suspended or checkpointed from which on browsers show a countdown; "
        "0: they show none.",
    ).tag(config=True)

    @default("suspended_memory_limit")
    def _default_suspended_memory_limit(self) -> int:
        return memory_of_host() // 2

    @validate("kernelspecs")
    def _known_keys(self, proposal: Any) -> Any:
        for name, rule in proposal["value"].items():
            if not isinstance(rule, Mapping):
                raise TraitError(f"kernelspecs[{name!r}] must be a dictionary of {' and '.join(_RULE_KEYS)}.")
            for key, seconds in rule.items():
                if key not in _RULE_KEYS:
                    raise TraitError(f"kernelspecs[{name!r}] has the keys {' and '.join(_RULE_KEYS)}, not {key!r}.")
                if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
                    raise TraitError(f"kernelspecs[{name!r}][{key!r}] must be seconds, or 0 for never.")
        return proposal["value"]

    def __init__(
        self,
        kernels: Callable[[], Mapping[str, GpuCkptProvisioner]],
        announce: Callable[[str, str | None, float | None], None] = lambda *_: None,
        **kwargs: Any,
    ) -> None:
        """``announce`` is called on the event loop with a kernel's id, the verb that comes within `notice`, and in how
        many seconds; with two None when it does not come any more, or has begun.
        """
        super().__init__(**kwargs)
        self._kernels = kernels
        self._announce = announce
        self._announced: dict[str, tuple[str, float]] = {}
        self._policy = Policy()
        self._probe = KernelProbe(self.log)
        self._rounds = PeriodicTask("gpu-ckpt-idle-policy", self._run)
        self._under_way: set[asyncio.Task[None]] = set()
        self._sooner = asyncio.Event()

    # -- for the extension

    def start(self) -> None:
        """Called from the extension, on its event loop."""
        self._rounds.start()

    async def stop(self) -> None:
        """Stop.  Verbs under way continue in their kernels' threads and are not waited for."""
        await self._rounds.stop()
        tasks = list(self._under_way)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def status(self) -> dict[str, Any]:
        """Return the settings as JSON; times in seconds, memory in bytes."""
        others = ("kernelspecs", "suspended_memory_limit", "without_device_memory", "max_parallel", "notice")
        names = (*_RULE_KEYS, *others)
        traits = {name: getattr(self, name) for name in names}
        return {"running": self._rounds.started, **traits, "under_way": len(self._under_way)}

    def outlook(self, kernel_id: str) -> dict[str, Any] | None:
        """Return the policy's plan for a kernel (`Policy.outlook`), as of the last round; None before its first."""
        return self._policy.outlook(kernel_id, time.monotonic())

    def keep(self, kernel_id: str) -> dict[str, Any] | None:
        """Begin the kernel's idleness anew, as a use would; return its outlook (`Policy.outlook`)."""
        self._policy.keep(kernel_id, time.monotonic())
        self._announce_plan(kernel_id)
        return self.outlook(kernel_id)

    def idle_seconds(self, kernel_id: str) -> float:
        """Return the seconds for which a kernel has been idle; infinite before its first round."""
        outlook = self.outlook(kernel_id)
        return math.inf if outlook is None else float(outlook["idle_s"])

    # -- the rounds

    async def _run(self) -> None:
        while True:
            self._sooner.clear()
            try:
                await self.round()
            except Exception:
                self.log.exception("The idle policy could not inspect the kernels; the next round tries again.")
            await wait(self._sooner, self.interval)

    async def round(self) -> list[Action]:
        """Inspect every kernel once and start the actions that are due; return those."""
        self._policy.settings = self._settings()
        provisioners = dict(self._kernels())
        snapshots = await asyncio.to_thread(self._probe.snapshots, provisioners)
        actions = self._policy.decide(snapshots, time.monotonic())
        by_id = {snapshot.kernel_id: snapshot for snapshot in snapshots}
        for action in actions:
            task = asyncio.create_task(self._act(action, provisioners[action.kernel_id], by_id[action.kernel_id]))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)
        self._announced = {kernel_id: plan for kernel_id, plan in self._announced.items() if kernel_id in by_id}
        for kernel_id in by_id:
            self._announce_plan(kernel_id)
        return actions

    def _announce_plan(self, kernel_id: str) -> None:
        """Announce what comes soon for a kernel, if it differs from what was announced."""
        outlook, before = self.outlook(kernel_id), self._announced.pop(kernel_id, None)
        if outlook is not None and outlook["imminent"]:
            verb, wait = outlook["next"], outlook["next_in_s"]
            at = time.monotonic() + wait
            same = before is not None and before[0] == verb
            if before is not None and same and (abs(at - before[1]) < 1.0 or (wait == 0 and before[1] < at)):
                self._announced[kernel_id] = before
            else:
                self._announced[kernel_id] = verb, at
                self._announce(kernel_id, verb, wait)
        elif before is not None:
            self._announce(kernel_id, None, None)

    async def _act(self, action: Action, provisioner: GpuCkptProvisioner, seen: KernelSnapshot) -> None:
        try:
            gate = provisioner.gate
            if gate is None or provisioner.state is not seen.state or gate.last_activity != seen.last_activity:
                return  # the kernel was used meanwhile
            self.log.info("Kernel %s: %s after %.0f s (%s)", seen.kernel_id, action.verb, action.idle, action.reason)
            try:
                await (provisioner.suspend() if action.verb is Verb.SUSPEND else provisioner.checkpoint())
            except Exception as error:
                if isinstance(error, StateError) and provisioner.state is not seen.state:
                    return  # another verb was faster
                self._failed(action, GpuCkptError.from_exception(error))
            else:
                self._policy.succeeded(action)
            self._probe.forget(action.kernel_id)
            self._sooner.set()  # a slot is free for the next kernel
        finally:
            self._policy.dropped(action)

    def _failed(self, action: Action, error: GpuCkptError) -> None:
        refused = isinstance(error, PreflightError | InsufficientResources | StateError | DriverTooOld)
        is_new = self._policy.failed(action, error.as_dict(), refused=refused, now=time.monotonic())
        log = self.log.debug if not is_new else self.log.info if refused else self.log.warning
        # The code alone: the text of an error may name private files.  `outlook` has all of it.
        log("Kernel %s stays, and will be tried again (%s): %s", action.kernel_id, action.verb, error.code)

    def _settings(self) -> IdleSettings:
        common = {key: getattr(self, key) for key in _RULE_KEYS}
        return IdleSettings(
            rule=Rule(**common),
            rules={name: Rule(**{**common, **rule}) for name, rule in self.kernelspecs.items()},
            memory_limit=self.suspended_memory_limit,
            without_device_memory=self.without_device_memory,
            parallel=self.max_parallel,
            retry_after=self.retry_after,
            longest_retry=self.longest_retry,
            notice=self.notice,
        )


def memory_of_host(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of memory this server may use: the machine's, or the limit of its cgroup (version 2, then 1)."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # ValueError: "max"
            limits.append(int((cgroup / name).read_text()))
    return min(limits)
