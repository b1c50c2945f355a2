"""Runs `keeper.py` or `brancher.py` as root or as an ordinary user, where whatever is left behind can be seen."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from everybody import REPOSITORY, needed, opened, readable_criu
from keeper import Outcome, packs
from kinds import Kind

from jupyter_gpu_ckpt.criu.install import VARIABLE, CriuBinary

ROOT = os.geteuid() == 0
#: A user id that nobody has here, without an entry in the password file.
UID = 54323
#: Both kinds of users where that is possible; an ordinary user cannot become root.
EVERYBODY = ("root", "user") if ROOT else ("user",)
#: Seconds that the kinds of a few kernels may take on a machine that has other things to do.
DEADLINE = 900
#: Kinds in `make test`.
SAMPLE = 20
SEED = 20


class User:
    """Root or an ordinary user, with a home of its own.

    Where the tests are root's, it lives in a mount namespace with a /dev/shm of its own: others' shared memory is not
    in sight, and this checkout is, of any owner.
    """

    def __init__(self, who: str, place: Path, criu: CriuBinary, program: str) -> None:
        self.who, self.place, self.home = who, place, place / "home"
        self._program = str(Path(__file__).with_name(program))
        #: What became of each kind that was run.
        self.outcomes: dict[str, Outcome] = {}
        #: What was left behind, each with the kinds that were in the kernels then.
        self.leftovers: list[dict[str, list[str]]] = []
        self._drops = ROOT and who == "user"
        self._packs = 0
        self._holder: subprocess.Popen[bytes] | None = None
        self.place.chmod(0o711)
        for directory in (self.home, self.home / "tmp"):
            self.own(directory)
        self.environment = {
            "HOME": str(self.home),
            "TMPDIR": str(self.home / "tmp"),
            "LOGNAME": who,  # `UID` has no entry that `getpass.getuser` could find
            "PATH": f"{Path(sys.executable).parent}:{os.defpath}",
            "PYTHONPATH": str(REPOSITORY),
            "LC_ALL": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
            VARIABLE: readable_criu(criu, place),
        }
        if not ROOT:
            return
        lines = ["set -e", "mount -t tmpfs -o mode=1777 tmpfs /dev/shm"]
        lines += [opened(needed(), place / "stage")] if self._drops else []
        script = "\n".join([*lines, "echo ready", "exec sleep infinity"])
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", script], stdout=subprocess.PIPE
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"ready\n"

    def close(self) -> None:
        """End what holds the namespace."""
        if self._holder is not None:
            self._holder.kill()
            self._holder.communicate()

    def own(self, directory: Path) -> Path:
        """Make a directory that is this user's alone."""
        directory.mkdir(mode=0o700)
        if self._drops:
            os.chown(directory, UID, UID)
        return directory

    def command(self, *argv: str) -> list[str]:
        """The command line that runs ``argv`` as this user; its first process becomes that of ``argv``."""
        if self._holder is None:
            return list(argv)
        enter = ["nsenter", "--target", str(self._holder.pid), "--mount", "--"]
        if not self._drops:
            return [*enter, *argv]
        drop = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--no-new-privs"]
        return [*enter, *drop, "--bounding-set=-all", "--inh-caps=-all", "--", *argv]

    def keep(self, keys: Sequence[str]) -> None:
        """Run the program over ``keys``, and note what became of them."""
        self._packs += 1
        work = self.own(self.home / f"run{self._packs}")
        argv = self.command(sys.executable, self._program, str(work), self.who, *keys)
        with open(self.place / "errors", "w+") as errors, open(self.place / "facts", "w+") as facts:
            # Files, not pipes: a kernel that was forgotten would hold them open.
            process = subprocess.Popen(
                argv, env=self.environment, cwd="/", stdin=subprocess.DEVNULL, stdout=facts, stderr=errors
            )
            try:
                process.wait(DEADLINE)
            finally:
                process.kill()
                process.wait()
            for file in (errors, facts):
                file.seek(0)
            said, lines = errors.read(), facts.read().splitlines()
        for fact in map(json.loads, lines):
            if "key" in fact:
                self.outcomes[fact["key"]] = Outcome(**fact)
            else:
                self.leftovers.append(fact)
        shutil.rmtree(work, ignore_errors=True)
        for key in keys:
            if key not in self.outcomes:
                self.outcomes[key] = Outcome(key, "lost", "NO_KEEPER", said[-3000:])


@contextmanager
def users(criu: CriuBinary, program: str = "keeper.py") -> Iterator[dict[str, User]]:
    """All users, each with a fresh home that is removed in the end.  ``program``: of this folder, to run over kinds."""
    place = Path(tempfile.mkdtemp(prefix="gc-zoo-"))
    place.chmod(0o711)
    made: dict[str, User] = {}
    try:
        for who in EVERYBODY:
            (place / who).mkdir()
            made[who] = User(who, place / who, criu, program)
        yield made
    finally:
        for user in made.values():
            user.close()
        shutil.rmtree(place, ignore_errors=True)


def sample(kinds: dict[str, Kind]) -> set[str]:
    """A few kinds for `make test`, the same ones each time: of each family, and most of those that are kept."""
    chooser = random.Random(SEED)
    usable = [kind for kind in kinds.values() if not (kind.lacking() or kind.loss or "torch" in kind.needs)]
    shared = [kind.key for kind in usable if not packs([kind], "root")[1] and not packs([kind], "user")[1]]
    single = [kind.key for kind in usable if kind.key not in shared]
    return {*chooser.sample(shared, SAMPLE - 3), *chooser.sample(single, 3)}


def what_does_not_come_back() -> str:
    """Return the section of the user's documentation on what comes back."""
    text = (REPOSITORY / "docs" / "usage.md").read_text()
    return text.partition("## What comes back, and what does not\n")[2].partition("\n## ")[0]


def why_not(kind: Kind, who: str, outcome: Outcome) -> str:
    """Why an outcome is not the declared one; empty where it is."""
    expected = kind.expected(who)
    shown = f"{outcome.what} {outcome.code}: {outcome.text}"
    if expected.what == "announced":
        if outcome.what == "kept":
            return ""  # kept after all is no loss
        good = outcome.what == "changed" and expected.word in outcome.announcement.lower()
        return "" if good else f"{shown}\nbeforehand it was said: {outcome.announcement}"
    if expected.what == "documented":
        if outcome.what == "kept":
            return ""
        return "" if outcome.what == "changed" and expected.word in what_does_not_come_back() else shown
    if outcome.what != expected.what:
        return f"declared {expected}, but {shown}"
    if expected.what == "refused" and (
        outcome.code != expected.code
        or expected.word.lower() not in outcome.text.lower()
        or "runs on" not in outcome.text
    ):
        return f"not refused as {expected.code} with the word {expected.word!r}, but {shown}"
    return ""
