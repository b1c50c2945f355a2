"""Creates kinds of state in real kernels, saves them and begins a branch beside each; reports what became of both.

A program of its own, as `keeper`::

    python brancher.py DIRECTORY WHO KEY...

An `Outcome` here is that of the branch: "kept", "renamed" if it differs in nothing but ports and names that were named
before, or "changed"; "named" if it has what would be one for both kernels, as it said before; "refused" by the save, or
by the branch itself.  "disturbed" is the outcome if the kernel that the branch comes from shows otherwise.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import keeper
from harness import branch_of
from keeper import Outcome, Zoo, alone_in_new, one_by_one, outside

from jupyter_gpu_ckpt.errors import BranchDiffers, BranchUnsafe, ChangedFile, GpuCkptError
from jupyter_gpu_ckpt.kernel.branching import BranchPlan

POINT = "point"
IN_THE_BRANCH = "in the branch"
#: Seconds that a kind may take to show: what sends something to a port or name of old waits for an answer for ever.
PATIENCE = 20.0
#: Of what a branch has otherwise, that which both kernels have: whichever uses it takes it from the other.
ONE_FOR_BOTH = ("pipe", "semaphore")
#: Kinds with such state, or with something of which there must be no branch, which share no kernel.  One that is
#: missing here is found in the time that it takes.
APART = frozenset(
    {
        "children.dataloader_spawned",
        "children.forkserver",
        "children.spawned",
        "children.waiting_spawned",
        "descriptors.fifo_open",
        "files.sqlite_transaction",
        "files.sqlite_wal_writer",
    }
)


def names_in(plan: BranchPlan) -> set[str]:
    """Return ports, addresses and names that were said to be others in a branch."""
    found = set()
    for each in plan.differs:
        if each.kind == "port":
            found |= {str(each.port), each.what.split()[-1].rpartition(":")[0].strip("[]")}
        elif each.kind == "socket":
            found.add(each.what.removeprefix("unix socket ").removeprefix("@"))
    return found


def beyond(was: Any, now: Any, names: set[str]) -> bool:
    """Return whether what a kind shows differs in more than values that have one of the names in them."""
    if isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        return any(beyond(*pair, names) for pair in zip(was, now, strict=True))
    if isinstance(was, dict) and isinstance(now, dict) and was.keys() == now.keys():
        return any(beyond(was[key], now[key], names) for key in was)
    if isinstance(was, list | dict) or isinstance(now, list | dict):
        return True
    return bool(was != now and not any(name in str(was) for name in names))


class UsedByBoth(Exception):
    """Kinds in one kernel have state that would be one for both."""


class Branching:
    """A kernel with kinds in it, its save point, and a branch that begins from there while the kernel lives on."""

    def __init__(self, zoo: Zoo, before: dict[str, str]) -> None:
        self.zoo, self.before = zoo, before
        #: What was named before the branch began: what it has otherwise, then the files that have changed.
        self.named: list[str] = []
        self.saved = False

    async def compare(self, directory: Path) -> list[Outcome]:
        """Return the kinds that show otherwise: in the branch, and in the kernel, also once the branch has ended.

        One with state for both, as it was named, is shown in neither: that may hang.
        Raises `UsedByBoth`, `GpuCkptError` of a save that is refused, `BranchUnsafe`, and what a restore raises.
        """
        provisioner = self.zoo.kernel.provisioner
        await self.zoo.run(f"inside.PATIENCE = {PATIENCE}")
        image = await provisioner.save(POINT)
        self.saved = True
        try:
            plan = await provisioner.branch_plan(POINT)
            self.named = [f"{each.what}: {each.becomes}" for each in plan.differs]
            one_for_both = any(each.kind in ONE_FOR_BOTH for each in plan.differs)
            if one_for_both and len(self.before) > 1:
                raise UsedByBoth
            async with AsyncExitStack() as stack:
                branch = Zoo(await self._begin(stack, image.id, directory))
                if one_for_both:
                    await branch.run("")
                    await self.zoo.run("")
                    return [Outcome(key, "named", named=tuple(self.named)) for key in self.before]
                changed = await self._changed(branch, plan)
                disturbed = await self.zoo.differences(self.before, "beside the branch")
            disturbed += await self.zoo.differences(self.before, "after the branch")
        finally:
            self.zoo.kernel.lifecycle.engine.store.remove(image)
        found = [dataclasses.replace(each, what="disturbed") for each in disturbed]
        return [dataclasses.replace(each, named=tuple(self.named)) for each in [*found, *changed]]

    async def _changed(self, branch: Zoo, plan: BranchPlan) -> list[Outcome]:
        seen, names = await branch.seen(self.before), names_in(plan)
        return [
            Outcome(
                key,
                "changed" if beyond(json.loads(was), json.loads(seen[key]), names) else "renamed",
                text=f"{IN_THE_BRANCH}: was {was}, is {seen[key]}",
            )
            for key, was in self.before.items()
            if seen[key] != was
        ]

    async def _begin(self, stack: AsyncExitStack, image: str, directory: Path) -> Any:
        """Begin a branch as a user does: what is refused is accepted if it can be, each refusal once."""
        how: dict[str, bool] = {}
        while True:
            try:
                return await stack.enter_async_context(branch_of(image, self.zoo.kernel, directory, **how))
            except (BranchDiffers, ChangedFile) as error:
                accepted = "accept_differences" if isinstance(error, BranchDiffers) else "accept_changed_files"
                if accepted in how:
                    raise
                how[accepted] = True
                if isinstance(error, ChangedFile):
                    self.named.append(str(error))


async def together(directory: Path, keys: Sequence[str]) -> list[Outcome]:
    """Kinds in one kernel and one branch of it; those that show otherwise, and all if it failed, again alone."""
    began = time.monotonic()
    try:
        async with AsyncExitStack() as stack:
            zoo = await stack.enter_async_context(Zoo.opened(directory))
            before, outcomes = await zoo.made(keys)
            stack.push_async_callback(zoo.undone, list(before))
            found = await Branching(zoo, before).compare(directory / "branch")
            changed = dict.fromkeys(each.key for each in found)
    except Exception as error:
        if len(keys) == 1:
            return [await alone_in_new(directory.with_name(directory.name + "-alone"), keys[0], alone)]
        half = len(keys) // 2
        print(f"{directory.name} is halved: {type(error).__name__}: {error}"[:300], file=sys.stderr)
        first = await together(directory.with_name(directory.name + "a"), keys[:half])
        return first + await together(directory.with_name(directory.name + "b"), keys[half:])
    share = (time.monotonic() - began) / len(keys)
    outcomes += [each async for each in one_by_one(directory.with_name(f"{directory.name}-each"), list(changed), alone)]
    return [*outcomes, *(Outcome(key, "kept", seconds=share) for key in before if key not in changed)]


async def alone(zoo: Zoo, key: str) -> Outcome:
    """One kind, in a kernel that has no other now, and its branch."""
    before, failed = await zoo.made([key])
    if failed:
        return failed[0]
    announcement = await zoo.announced()
    branching = Branching(zoo, before)
    directory = Path(zoo.kernel.manager.connection_file).with_name(f"branch-{key}")
    try:
        found = await branching.compare(directory)
    except GpuCkptError as error:
        if not zoo.runs:
            return Outcome(key, "lost", error.code, f"{error}", announcement)
        if changed := await zoo.differences(before, "after the refusal"):
            return dataclasses.replace(changed[0], what="disturbed", text=f"{error}; {changed[0].text}")
        if branching.saved and not isinstance(error, BranchUnsafe):
            return Outcome(key, "lost", error.code, f"{error} {error.details}", announcement)
        said = f"{error} {error.details.get('culprit', '')}"
        return Outcome(key, "refused", error.code, said, announcement, named=tuple(branching.named))
    if found:
        return dataclasses.replace(found[0], announcement=announcement)
    return Outcome(key, "kept", announcement=announcement, named=tuple(branching.named))


if __name__ == "__main__":
    place = Path(sys.argv[1])
    with outside(place):
        asyncio.run(keeper.main(place, sys.argv[2], sys.argv[3:], together, alone, APART))
