"""A process that runs code on request, for tests of a dump and a restore."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from waiting import until

from jupyter_gpu_ckpt.capsule.capsule import Capsule

_SUBJECT = """
import os, sys, time
request, reply, space = sys.argv[1], sys.argv[2], {}
while True:
    try:
        with open(request) as file:
            code = file.read()
    except FileNotFoundError:
        time.sleep(0.002)
        continue
    os.unlink(request)
    try:
        exec(code, space)
        word = repr(space.pop("answer", None))
    except BaseException as error:
        word = f"{type(error).__name__}: {error}"
    with open(reply + ".part", "w") as file:
        file.write(word)
    os.rename(reply + ".part", reply)
"""


class Subject:
    """A Python in a capsule that runs the test's code and answers with the `repr` of the name ``answer``."""

    def __init__(self, capsule: Capsule) -> None:
        self._request, self._reply = capsule.directory / "request", capsule.directory / "reply"
        environment = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}
        argv = [sys.executable, "-I", "-S", "-c", _SUBJECT, str(self._request), str(self._reply)]
        capsule.spawn(argv, environment, str(capsule.directory))
        assert self.tell("answer = 1") == "1"

    def order(self, code: str) -> None:
        """Have ``code`` run, and wait for nothing."""
        part = self._request.with_name("request.part")
        part.write_text(code)
        part.rename(self._request)

    def tell(self, code: str, timeout: float = 30) -> str:
        """Have ``code`` run; the answer, or the error in words."""
        self._reply.unlink(missing_ok=True)
        self.order(code)
        until(self._reply.exists, f"an answer to {code[:200]!r}", timeout)
        return self._reply.read_text()


def image(home: Path) -> Path:
    """An empty directory for CRIU's files below ``home``."""
    place = home / "image"
    place.mkdir(0o700, exist_ok=True)
    return place
