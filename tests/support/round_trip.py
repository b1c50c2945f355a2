"""A process that runs code on request, for tests of a dump and a restore."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from waiting import until

from jupyter_gpu_ckpt.capsule.capsule import Capsule

_SUBJECT = """
import os, sys, time
told, said, space = sys.argv[1], sys.argv[2], {}
while True:
    try:
        with open(told) as file:
            code = file.read()
    except FileNotFoundError:
        time.sleep(0.002)
        continue
    os.unlink(told)
    try:
        exec(code, space)
        word = repr(space.pop("answer", None))
    except BaseException as error:
        word = f"{type(error).__name__}: {error}"
    with open(said + ".part", "w") as file:
        file.write(word)
    os.rename(said + ".part", said)
"""


class Subject:
    """A Python in a capsule that runs the test's code and answers with the `repr` of the name ``answer``."""

    def __init__(self, capsule: Capsule) -> None:
        self._told, self._said = capsule.directory / "told", capsule.directory / "said"
        environment = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}
        argv = [sys.executable, "-I", "-S", "-c", _SUBJECT, str(self._told), str(self._said)]
        capsule.spawn(argv, environment, str(capsule.directory))
        assert self.tell("answer = 1") == "1"

    def tell(self, code: str, timeout: float = 30) -> str:
        """Have ``code`` run; the answer, or the error in words."""
        self._said.unlink(missing_ok=True)
        part = self._told.with_name("told.part")
        part.write_text(code)
        part.rename(self._told)
        until(self._said.exists, f"an answer to {code[:200]!r}", timeout)
        return self._said.read_text()


def image(home: Path) -> Path:
    """An empty directory for CRIU's files below ``home``."""
    place = home / "image"
    place.mkdir(0o700, exist_ok=True)
    return place
