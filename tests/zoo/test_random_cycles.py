"""Random kinds of state, random kill -9 at random moments: then the kernel runs, or its image restores, never both.

What is killed: CRIU, the capsule's init, the owner (a server), the kernel itself.  A kernel that is killed while it is
the only copy of itself is lost by that, and an error says so; nothing else is ever lost.  ``ZOO_CYCLES``
is the number of cycles, 1,000 by default; each prints its seed, and ``ZOO_SEED`` begins with that one; ``ZOO_VERBS``,
``ZOO_VICTIMS`` and ``ZOO_KINDS`` (their keys) narrow the choice.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import waiting
from harness import alive, descendants
from keeper import packs
from keeping import EVERYBODY, User
from kinds import all_kinds
from table import DOCUMENT, rows

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.capsule import root_process

CYCLES = int(os.environ.get("ZOO_CYCLES", "1000"))
SEED = int(os.environ.get("ZOO_SEED", "20"))
VERBS = os.environ.get("ZOO_VERBS", "checkpoint restore").split()
VICTIMS = os.environ.get("ZOO_VICTIMS", "criu init owner kernel").split()
KINDS = os.environ.get("ZOO_KINDS", "").split()
#: Cycles of one kernel.
LIFE = 10
#: Seconds within which an owner answers, whatever was killed under it.
ANSWER = 120
#: Seconds for which somebody else on this machine may have a port that a sleeping kernel had.
PORTS = 30
#: What two kinds may be refused for that were kept one by one: a child of theirs that hangs, a cell that continues.
REFUSALS = {"CHILD_PROCESSES", "KERNEL_BUSY"}
#: The same, of another code: a child that one kind forks has what another kind keeps from sharing.
SHARED = "an eventfd that is a semaphore and that processes share"
#: Losses of a kernel that was killed while there was no image of it.
LOSS = {"KERNEL_LOST", "CAPSULE_GONE", "KernelEnded"}


def kept(who: str) -> list[str]:
    """The kinds that share a kernel and that this user keeps, as the table says; none that brings much memory.

    Nor one that reads SIGCHLD when a child stops: a CRIU that is killed in the middle of a dump may cause one.
    """
    column = {"root": 1, "user": 2}[who]
    good = {row[0] for row in rows(DOCUMENT.read_text()) if row[column] == "kept"}
    shared, _ = packs([kind for kind in all_kinds().values() if not kind.lacking() and kind.name in good], who)
    return [
        key
        for pack in shared
        for key in pack
        if (not KINDS or key in KINDS)
        and "torch" not in all_kinds()[key].needs
        and not key.endswith(("random_bytes", "children.sigchld_of_stops"))
    ]


class Owner:
    """One process of `wanderer.py`."""

    def __init__(self, user: User, directory: Path, base: Path, *options: str) -> None:
        script = str(Path(__file__).with_name("wanderer.py"))
        self._errors = (directory / "owner.log").open("a")
        self.process = subprocess.Popen(
            user.command(sys.executable, script, str(directory), str(base), *options),
            env=user.environment,
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        #: Of the kernel, as it last said.
        self.state = ""
        threading.Thread(target=self._read, daemon=True).start()
        self.first = self.answer()

    def _read(self) -> None:
        with self.process.stdout as lines:
            for line in lines:
                self._lines.put(line)

    def send(self, *words: str) -> None:
        self.process.stdin.write(" ".join(words) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any] | None:
        """Its next answer; None when it has ended."""
        deadline = time.monotonic() + ANSWER
        while True:
            try:
                answer = json.loads(self._lines.get(timeout=0.02))
                self.state = answer["state"]
                return answer
            except queue.Empty:
                if self.process.poll() is not None and self._lines.empty():
                    return None
                assert time.monotonic() < deadline, "the owner does not answer"

    def ask(self, *words: str) -> dict[str, Any]:
        self.send(*words)
        answer = self.answer()
        assert answer is not None, f"the owner ended during {words[0]}"
        return answer

    def shut_down(self) -> None:
        """Have it end the kernel, and then itself."""
        self.send("end")
        self.process.wait(ANSWER)
        self.end()

    def end(self) -> None:
        """Let it go, with whatever it holds."""
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self._errors.close()


class Wandering:
    """One kernel after the other, their owners, and what became of them."""

    #: The least and the most kinds in one kernel.
    few, most = 3, 8
    #: Options of `wanderer.py`.
    options: tuple[str, ...] = ()
    verbs, refusals = VERBS, REFUSALS
    #: Where a kernel must be for a verb, if it does not run.
    begins: ClassVar = {"restore": "checkpointed"}

    def __init__(self, user: User, name: str, kinds: list[str]) -> None:
        self.user = user
        self.directory = user.own(user.home / name)
        self.base = user.own(user.home / f"{name}r")
        self.kinds = kinds
        self.owner: Owner | None = None
        self.shown: dict[str, str] = {}
        self.usual = dict.fromkeys(self.verbs, 0.5)
        self.last_truths: list[int] = []
        self.doomed: list[int] = []
        self.count: collections.Counter[str] = collections.Counter()

    def errors(self) -> str:
        """Return the owners' stderr."""
        return (self.directory / "owner.log").read_text()

    def left(self) -> list[str]:
        """Return the kernels and images that are left."""
        files = [*self.base.rglob("*"), *(self.directory / "images").rglob("*")]
        processes = [(init, procfs.stat(pid)) for init in self.inits() for pid in (init, *descendants(init))]
        return [*map(str, files), *map(str, processes)]

    # -- processes

    def inits(self) -> list[int]:
        found = []
        for path in Path("/proc").iterdir():
            if path.name.isdigit():
                try:
                    words = (path / "cmdline").read_bytes().decode(errors="replace")
                except OSError:
                    continue
                if "capsule/run_init.py" in words and str(self.base) in words:
                    found.append(int(path.name))
        return found

    def named(self, victim: str) -> list[int]:
        """The processes of that name, now."""
        if victim == "owner":
            return [self.owner.process.pid]
        inits = self.inits()
        if victim == "init":
            return inits
        found = []
        for pid in {below for init in inits for below in descendants(init)} - set(inits):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            is_criu = "dump" in words or "restore" in words
            if victim == "kernel" and not self.is_kernel(pid, inits):
                continue
            if is_criu == (victim == "criu") and any(words) and not (is_criu and self.is_restored(pid)):
                found.append(pid)
        return found

    def is_kernel(self, pid: int, inits: list[int]) -> bool:
        """Return whether a process is the kernel itself; of a killed child the kernel rightly misses the state."""
        with contextlib.suppress(OSError):
            parent, own = procfs.stat(pid).parent, procfs.arguments(pid)
            if (above := procfs.arguments(parent))[:1] == (root_process.NAME,):  # its argument is the kernel
                return procfs.status(pid)["NSpid"].split()[-1] == above[1]
            return parent in inits and own[:1] != (root_process.NAME,)
        return False

    def is_restored(self, pid: int) -> bool:
        """Return whether a process of CRIU's is to become one of the kernel's: its end would be the program's own."""
        with contextlib.suppress(OSError):
            return procfs.stat(procfs.stat(pid).parent).name.startswith("criu")
        return True

    def kill(self, victim: str, dice: random.Random) -> bool:
        """Kill one of them, as soon as there is one; whether there was one before the verb had ended."""
        self.doomed = []
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and self.owner._lines.empty():
            pids = self.named(victim)
            if pids:
                pid = dice.choice(sorted(pids))
                try:
                    # Linux ends what is below an init with it, in its own time; the init does not need its parent.
                    below = descendants(pid) if procfs.stat(pid).name == "gpu-ckpt-init" else []
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    continue
                self.doomed = [pid, *below]
                return True
        return False

    # -- the promise

    def truths(self) -> list[int]:
        script = str(Path(__file__).with_name("wanderer.py"))
        argv = self.user.command(sys.executable, script, str(self.directory), str(self.base), "truths")
        printed = subprocess.run(argv, env=self.user.environment, cwd="/", capture_output=True, text=True, timeout=60)
        assert printed.returncode == 0, printed.stderr
        self.last_truths = json.loads(printed.stdout)
        return self.last_truths

    def begin(self, dice: random.Random) -> None:
        """A fresh kernel with a random combination of kinds."""
        if self.owner is not None:
            self.owner.shut_down()
        for image in (self.directory / "images").glob("*"):
            subprocess.run(["rm", "-rf", str(image)], check=True)
        for _ in range(3):
            self.owner = Owner(self.user, self.directory, self.base, *self.options)
            if self.owner.first is not None or "cannot bind" not in self.errors()[-1000:]:
                break
            self.owner.end()  # another process took a port of its kernel between its choice and its use
        assert self.owner.first is not None, self.errors()[-3000:]
        count = min(len(self.kinds), dice.randint(self.few, self.most))
        answer = self.owner.ask("make", *dice.sample(self.kinds, count))
        # Not every two can be in one kernel; whether each can be made is `test_zoo`'s question.
        self.count.update(f"{key} not made beside others" for key in answer["failed"])
        self.shown = answer["shown"]
        assert self.shown, answer

    def brought_to(self, state: str, may_be_lost: bool = False) -> str:
        """Without any fault: to that state.  The code of the refusal, where a combination is refused, or of its loss.

        ``may_be_lost``: the kernel was killed, and there is no image.
        """
        wake = "resume" if self.owner.state == "suspended" else "restore"
        verb = {"running": wake, "checkpointed": "checkpoint", "suspended": "suspend"}[state]
        deadline = time.monotonic() + PORTS
        while True:
            answer = self.owner.ask(verb)
            if answer.get("error") != "PORT_TAKEN" or time.monotonic() > deadline:
                break
            time.sleep(0.5)
        refused = answer.get("error") in self.refusals or SHARED in answer.get("message", "")
        if answer["state"] == "running" and refused:
            return answer["error"]
        if may_be_lost and answer["state"] == "dead" and answer.get("error") in LOSS:
            return answer["error"]
        assert answer["state"] == state, answer
        return ""

    def shows(self) -> None:
        """The kernel runs and is what it was."""
        answer = self.owner.ask("show", *self.shown)
        assert answer.get("shown") == self.shown, answer

    def cycle(self, seed: int) -> str:
        """One verb, one death at a random moment, and the promise; what became of the kernel."""
        dice = random.Random(seed)
        fresh = dice.random() < 1 / LIFE
        if fresh or self.owner is None:
            self.begin(random.Random(seed))  # what is drawn below is the same whether a kernel is there or not
        verb, victim = dice.choice(self.verbs), dice.choice(VICTIMS)
        if verb in self.begins and (refusal := self.brought_to(self.begins[verb])):
            self.shows()
            self.begin(random.Random(-seed))
            return f"refused beforehand ({refusal}): the same as before"
        return self.after(verb, victim, dice)

    def after(self, verb: str, victim: str, dice: random.Random) -> str:
        """Kill ``victim`` during a verb, and return the kernel's fate."""
        began = time.monotonic()
        self.owner.send(verb)
        time.sleep(dice.uniform(0, 1.1 * self.usual[verb]))
        killed = self.kill(victim, dice)
        answer = self.owner.answer()
        if not killed:
            self.usual[verb] = 0.9 * self.usual[verb] + 0.1 * (time.monotonic() - began)
        waiting.until(lambda: not alive(self.doomed), "what was killed has ended", 60)
        what = f"{verb}, {victim} {'killed' if killed else 'not met'}"
        print(f"({what})", end=" ", flush=True)
        if answer is None or self.owner.process.poll() is not None:
            assert victim == "owner", answer
            self.owner.end()
            waiting.until(lambda: sum(self.truths()) == 1, "the kernel lives or its image can be restored", 60)
            self.owner = Owner(self.user, self.directory, self.base, *self.options)
            answer = self.owner.first
            assert answer is not None, self.errors()[-3000:]
        elif victim == "owner" and killed:  # it had answered before it was killed
            self.owner.process.wait(60)
            self.owner.end()
            waiting.until(lambda: sum(self.truths()) == 1, "the kernel lives or its image can be restored", 60)
            self.owner = Owner(self.user, self.directory, self.base, *self.options)
            answer = self.owner.first
        state = answer["state"]
        if state in ("checkpointed", "suspended"):
            # Of a kernel that is killed just as it is suspended the answer may still be that it is.
            self.brought_to("running", killed and state == "suspended" and victim in ("kernel", "init"))
        shown = self.owner.ask("show", *self.shown)
        if victim in ("kernel", "init") and killed and (shown.get("error") in LOSS or shown["state"] == "dead"):
            self.owner.end()
            waiting.until(lambda: self.truths() == [0, 0], "neither a kernel nor an image", 60)
            self.owner = None
            return f"{what}: killed while it was the only copy, and said so"
        assert shown.get("shown") == self.shown, (what, answer, shown)
        return f"{what}: {state}, the same as before"

    def wander(self, seed: int, cycles: int, name: str) -> None:
        """Go through so many cycles, from ``seed`` on; ``name``: of the variable that begins with another one."""
        try:
            for number in range(seed, seed + cycles):
                print(f"{name}={number}", end=" ", flush=True)
                became = self.cycle(number)
                print(became, flush=True)
                self.count[became] += 1
        except BaseException:
            print("\nwith", *self.shown, "\ntruths:", self.last_truths)
            print(*self.left(), "owner:", self.errors()[-6000:], sep="\n", flush=True)
            raise
        finally:
            self.close()
        print(*(f"{number:5} {what}" for what, number in self.count.most_common()), sep="\n")
        assert sum(number for what, number in self.count.items() if "refused" in what) <= cycles / 5

    def close(self) -> None:
        """End the owner, and the kernel with it."""
        try:
            if self.owner is not None and self.owner.process.poll() is None:
                self.owner.shut_down()
        finally:
            if self.owner is not None:
                self.owner.end()
            for pid in self.inits():  # of a kernel that no owner would take
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        waiting.until(lambda: not alive(self.inits()), "no process is left")


@pytest.mark.parametrize("who", ["root", "user"])
@pytest.mark.parametrize(
    "cycles",
    [
        pytest.param(4, id="few"),
        pytest.param(CYCLES, id="many", marks=[pytest.mark.torture, pytest.mark.timeout(60 + 20 * CYCLES)]),
    ],
)
def test_exactly_one_is_true_after_any_death(zoo, who, cycles):
    if who not in EVERYBODY:
        pytest.skip("an ordinary user cannot be root")
    Wandering(zoo[who], f"w{cycles}", kept(who)).wander(SEED, cycles, "ZOO_SEED")
