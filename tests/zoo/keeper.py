"""Creates kinds of state in real kernels, checkpoints and restores them twice, goes back, and reports the outcome.

A program of its own, so that any user can run it::

    python keeper.py DIRECTORY WHO KEY...

It prints one line of JSON for each kind (`Outcome`), and one for what was left behind (`Leftover`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness import Notebook, alive, descendants, notebook, until
from kinds import KEPT, Kind, all_kinds
from kinds.inside import MARK

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.errors import GpuCkptError

ZOO = Path(__file__).resolve().parent
CYCLES = 2
#: After the cycles a save point is made, and gone back to.
GONE_BACK = "after going back"
#: Kinds that share a kernel.
TOGETHER = 20
#: Seconds within which a cell of the zoo has to end.
CELL = 240
_SUBREAPER = 36


@dataclass(frozen=True)
class Outcome:
    """The outcome of a kind.

    ``what``: "kept"; "refused" with ``code`` and ``text``; "changed" with ``text``, which shows what; "lost" with the
    code of the wake that failed; "impossible" where the system forbade it; "unmade" where its program failed.
    ``announcement``: what ``%gpu_checkpoint --status`` said beforehand, of kinds that have a kernel to themselves.
    ``named``: what a branch was said to have otherwise, before it began.
    """

    key: str
    what: str
    code: str = ""
    text: str = ""
    announcement: str = ""
    seconds: float = 0.0
    named: Sequence[str] = ()

    @property
    def good(self) -> bool:
        """Return whether nothing was lost and the kernel can be used for others."""
        return self.what in ("kept", "changed", "impossible")


class KernelEnded(Exception):
    """The kernel is gone in the middle of a cell."""


class Zoo:
    """A kernel with kinds in it."""

    def __init__(self, kernel: Notebook) -> None:
        self.kernel = kernel

    @classmethod
    @asynccontextmanager
    async def opened(cls, directory: Path) -> AsyncIterator[Zoo]:
        """A fresh kernel below ``directory``, which is new, too."""
        directory.mkdir(parents=True)
        base = Path(tempfile.mkdtemp(prefix="gc-"))
        try:
            async with notebook(directory, base) as kernel:
                assert kernel.lifecycle is not None, "started plainly"
                kernel.provisioner.sinks.remove(kernel.steps)
                zoo = cls(kernel)
                await zoo.prepare()
                yield zoo
        finally:
            shutil.rmtree(base, ignore_errors=True)

    async def prepare(self) -> None:
        """Have the kernel import what makes its kinds."""
        await self.run(f"import sys; sys.path.insert(0, {str(ZOO)!r}); from kinds import inside")

    async def run(self, code: str) -> str:
        """A cell's standard output.  Raises `KernelEnded` as soon as there is no kernel to wait for."""
        cell = asyncio.ensure_future(self.kernel.run(code, CELL))
        while not (await asyncio.wait({cell}, timeout=0.2))[0]:
            if (status := self.kernel.lifecycle.poll()) is not None:
                cell.cancel()
                raise KernelEnded(f"the kernel ended with {status} during: {code[:300]}")
        return cell.result()

    async def ask(self, verb: str, keys: Sequence[str]) -> dict[str, dict[str, str]]:
        """Have the kernel ``make``, ``show`` or ``undo`` them."""
        return self.answers(await self.run(f"inside.{verb}({list(keys)!r})"))

    @staticmethod
    def answers(printed: str) -> dict[str, dict[str, str]]:
        """Return the output of `ask`."""
        line = next(line for line in reversed(printed.splitlines()) if line.startswith(MARK))
        try:
            return json.loads(line.removeprefix(MARK))
        except json.JSONDecodeError as error:
            raise ValueError(f"{error}: {printed!r}") from error

    async def made(self, keys: Sequence[str]) -> tuple[dict[str, str], list[Outcome]]:
        """Make them; what each shows, and those that could not be made."""
        answers = await self.ask("make", keys)
        failed = [unmade(key, answer["error"]) for key, answer in answers.items() if "error" in answer]
        made = [key for key in keys if "error" not in answers[key]]
        shown, again = await self.ask("show", made), await self.ask("show", made)
        for key in made:
            if "error" in shown[key] or shown[key] != again[key]:
                text = shown[key].get("error") or f"shows {shown[key]}, then {again[key]}"
                failed.append(Outcome(key, "unmade", text=text))
        bad = {outcome.key for outcome in failed}
        return {key: shown[key]["value"] for key in made if key not in bad}, failed

    async def cycle(self) -> None:
        """Away and back.  Raises `GpuCkptError`; a wake that fails is tried once more."""
        await self.kernel.provisioner.checkpoint()
        try:
            await self.kernel.provisioner.restore()
        except GpuCkptError:
            await self.kernel.provisioner.restore()

    async def go_back(self) -> None:
        """To a save point that is made now, and away from it.  Raises `GpuCkptError`."""
        provisioner = self.kernel.provisioner
        point = await provisioner.save("point")
        before = await provisioner.back("point", "then")
        for image in (point, before):
            self.kernel.lifecycle.engine.store.remove(image)

    async def seen(self, keys: Iterable[str]) -> dict[str, str]:
        """Return what each shows: its value, or its error as a string of JSON."""
        after = await self.ask("show", list(keys))
        return {key: answer.get("value") or json.dumps(answer["error"]) for key, answer in after.items()}

    async def differences(self, before: dict[str, str], when: str) -> list[Outcome]:
        """Return the values that show otherwise than before."""
        seen = await self.seen(before)
        return [
            Outcome(key, "changed", text=f"{when}: was {before[key]}, is {seen[key]}")
            for key in before
            if seen[key] != before[key]
        ]

    async def announced(self) -> str:
        """Return what a user reads who runs `%gpu_checkpoint --status` before the checkpoint."""
        return await self.run("%gpu_checkpoint --status")

    async def undone(self, keys: Sequence[str]) -> None:
        """Take them back as far as that can be, so that nothing of theirs is left that no kernel would have removed."""
        if self.runs:
            await self.ask("undo", keys)

    @property
    def runs(self) -> bool:
        return self.kernel.state == "running"


def unmade(key: str, error: str) -> Outcome:
    """A kind that could not be made: forbidden, or its program failed."""
    forbidden = error.strip().splitlines()[-1].startswith(("PermissionError", "ValueError: not allowed"))
    return Outcome(key, "impossible" if forbidden else "unmade", text=error)


async def together(directory: Path, keys: Sequence[str]) -> list[Outcome]:
    """Kinds that are to be kept, in one kernel; where it is refused or lost, in two kernels of half of them each."""
    began = time.monotonic()
    outcomes: list[Outcome] = []
    try:
        async with AsyncExitStack() as stack:
            zoo = await stack.enter_async_context(Zoo.opened(directory))
            before, outcomes = await zoo.made(keys)
            stack.push_async_callback(zoo.undone, list(before))
            for number in range(1, CYCLES + 2):
                await (zoo.cycle() if number <= CYCLES else zoo.go_back())
                when = f"after cycle {number}" if number <= CYCLES else GONE_BACK
                changed = await zoo.differences(before, when)
                outcomes += changed
                for outcome in changed:
                    del before[outcome.key]
    except Exception as error:
        if len(keys) == 1:
            return [await alone_in_new(directory.with_name(directory.name + "-alone"), keys[0])]
        half = len(keys) // 2
        print(f"{directory.name} is halved: {type(error).__name__}: {error}"[:300], file=sys.stderr)
        first = await together(directory.with_name(directory.name + "a"), keys[:half])
        return first + await together(directory.with_name(directory.name + "b"), keys[half:])
    share = (time.monotonic() - began) / len(keys)
    return [*outcomes, *(Outcome(key, "kept", seconds=share) for key in before)]


async def alone(zoo: Zoo, key: str) -> Outcome:
    """One kind, in a kernel that has no other now."""
    before, failed = await zoo.made([key])
    if failed:
        return failed[0]
    announcement = await zoo.announced()
    for number in range(1, CYCLES + 1):
        try:
            await zoo.kernel.provisioner.checkpoint()
        except GpuCkptError as error:
            if not zoo.runs:
                return Outcome(key, "lost", error.code, f"{error}", announcement)
            changed = await zoo.differences(before, "after the refusal")
            if changed:
                return dataclasses.replace(changed[0], text=f"{error}; {changed[0].text}")
            said = f"{error} {error.details.get('culprit', '')}"
            return Outcome(key, "refused", error.code, said, announcement)
        try:
            try:
                await zoo.kernel.provisioner.restore()
            except GpuCkptError:
                await zoo.kernel.provisioner.restore()
        except GpuCkptError as error:
            return Outcome(key, "lost", error.code, f"{error} {error.details}", announcement)
        changed = await zoo.differences(before, f"after cycle {number}")
        if changed:
            return dataclasses.replace(changed[0], announcement=announcement)
    try:
        await zoo.go_back()
    except GpuCkptError as error:
        return Outcome(key, "lost", error.code, f"{GONE_BACK}: {error} {error.details}", announcement)
    if changed := await zoo.differences(before, GONE_BACK):
        return dataclasses.replace(changed[0], announcement=announcement)
    return Outcome(key, "kept", announcement=announcement)


async def alone_in_new(directory: Path, key: str, alone: Alone = alone) -> Outcome:
    """One kind in a kernel of its own; whatever else goes wrong is its loss."""
    try:
        async with Zoo.opened(directory) as zoo:
            return await alone(zoo, key)
    except Exception as error:
        return Outcome(key, "lost", type(error).__name__, str(error))


#: What is done with kinds that share a kernel, which begins below a directory, and with one that has it to itself.
Together = Callable[[Path, Sequence[str]], Awaitable[list[Outcome]]]
Alone = Callable[[Zoo, str], Awaitable[Outcome]]


async def one_by_one(directory: Path, keys: Sequence[str], alone: Alone = alone) -> AsyncIterator[Outcome]:
    """Each kind alone, in the same kernel as long as it can be undone: then the kernel must sleep and wake."""
    number, left = 0, list(keys)
    while left:
        number += 1
        async with AsyncExitStack() as stack:
            zoo = await stack.enter_async_context(Zoo.opened(directory.with_name(f"{directory.name}-{number}")))
            while left:
                key, began = left.pop(0), time.monotonic()
                try:
                    outcome = await alone(zoo, key)
                    can_be = outcome.what != "named" and zoo.runs  # what is another kernel's, too, may hang
                    undone = outcome.what == "impossible" or (
                        can_be and (await zoo.ask("undo", [key])).get(key, {}).get("value") == "true"
                    )
                    if undone and outcome.what == "refused":
                        await zoo.cycle()
                except Exception as error:
                    outcome = Outcome(key, "lost", getattr(error, "code", type(error).__name__), str(error))
                    undone = False
                yield dataclasses.replace(outcome, seconds=time.monotonic() - began)
                if not undone:
                    break


def packs(kinds: Iterable[Kind], who: str) -> tuple[list[list[str]], list[str]]:
    """Kinds that share kernels, and those that have one to themselves."""
    sharing, single = [], []
    for kind in kinds:
        (sharing if kind.expected(who) == KEPT and not kind.alone else single).append(kind.key)
    return [sharing[start : start + TOGETHER] for start in range(0, len(sharing), TOGETHER)], single


def belongings() -> set[str]:
    """Return this user's files where things are forgotten: shared memory, temporary files.

    torch keeps a directory for its compiler, wherever it runs.  multiprocessing's is left by a stock kernel, too, whose
    resource tracker outlives SIGTERM (`tests/lifecycle/test_ended_kernels.py` compares them).
    """
    found = set()
    for directory in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        for path in directory.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if path.lstat().st_uid == os.getuid() and not path.name.startswith(("torchinductor_", "pymp-")):
                    found.add(str(path))
    return found


def inodes_of_others() -> set[int]:
    """Inodes that this user's other programs have mapped: tests that run beside these, in the same directories.

    Not names: glibc maps a semaphore before it gives it its name.
    """
    own, found = {os.getpid(), *descendants(os.getpid())}, set()
    for pid in set(procfs.pids()) - own:
        with contextlib.suppress(OSError):
            found |= {int(line.split()[4]) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
    return found


def forgotten(before: set[str]) -> list[str]:
    """Return belongings that were not there ``before``, without what other programs use."""
    left: list[str] = []
    if new := belongings() - before:
        used = inodes_of_others()
        for path in sorted(new):
            with contextlib.suppress(FileNotFoundError):
                if os.lstat(path).st_ino not in used:
                    left.append(path)
    return left


@contextlib.contextmanager
def outside(directory: Path) -> Iterator[None]:
    """Something to connect to that is not the kernel's, named in the environment: two TCP ports and a unix socket.

    The second port is one whose queue is full: a connection to it is for ever being made.
    """
    name = str(directory / "outside.sock")
    with contextlib.ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=100))
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(2):  # the queue takes one more than it says
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        unix = stack.enter_context(socket.socket(socket.AF_UNIX))
        unix.bind(name)
        unix.listen(100)
        os.environ["ZOO_PORT"], os.environ["ZOO_FULL"] = (str(one.getsockname()[1]) for one in (tcp, full))
        os.environ["ZOO_OUTSIDE"] = name
        yield


def say(**fact: object) -> None:
    print(json.dumps(fact), flush=True)


async def main(
    directory: Path,
    who: str,
    keys: Sequence[str],
    together: Together = together,
    alone: Alone = alone,
    apart: Collection[str] = (),
) -> None:
    """Have all kinds tried.  ``apart``: those that share no kernel, beside the ones of which that is declared."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    kinds = all_kinds()
    shared, single = packs([kinds[key] for key in keys if key not in apart], who)
    single += [key for key in keys if key in apart]
    processes = set(descendants(os.getpid()))

    async def rest(before: set[str], keys: Sequence[str]) -> None:
        with contextlib.suppress(AssertionError):
            await until(lambda: not forgotten(before))
        if left := forgotten(before):
            say(left=left, keys=list(keys))

    for number, pack in enumerate(shared):
        before = belongings()
        for outcome in await together(directory / f"pack{number}", pack):
            say(**dataclasses.asdict(outcome))
        await rest(before, pack)
    before = belongings()
    async for outcome in one_by_one(directory / "single", single, alone):
        say(**dataclasses.asdict(outcome))
    await rest(before, single)
    remaining = [pid for pid in alive(descendants(os.getpid())) if pid not in processes]
    if remaining:
        commands = [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200] for pid in remaining]
        say(processes=commands)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    with outside(place):
        asyncio.run(main(place, sys.argv[2], sys.argv[3:]))
