"""The program of `subject.c`, and the socket of the library that is preloaded into it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from programs import HERE, Programs
from waiting import until

SOCKET_VARIABLE = "JUPYTER_GPU_CKPT_FAST_SOCKET"
MIB = 1 << 20
#: Seconds that an answer may take, on a busy machine and under a sanitizer.
PATIENCE = 60.0
#: Of `addresses.c`.
KEPT_ADDRESSES = 64


class Control:
    """One connection to the library."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(PATIENCE)
        self.socket.connect(str(path))
        self._lines = self.socket.makefile("rb")

    def __enter__(self) -> Control:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._lines.close()
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def answer(self) -> dict[str, Any]:
        line = self._lines.readline()
        assert line, "the connection was closed"
        return json.loads(line)

    def ask(self, verb: str, descriptors: Sequence[int] = ()) -> dict[str, Any]:
        socket.send_fds(self.socket, [f"{verb}\n".encode()], descriptors)
        return self.answer()

    def hold(self, count: int) -> tuple[dict[str, Any], list[int]]:
        """Request that memory is exported; return the answer, and the descriptors."""
        self.send(f"hold {count}\n".encode())
        line, descriptors, _, _ = socket.recv_fds(self.socket, 4096, 253)
        return json.loads(line), descriptors

    def must(self, *verbs: str) -> None:
        for verb in verbs:
            answer = self.ask(verb)
            assert answer["cuda"] == 0, (verb, answer)


@dataclass
class Subject:
    """The running program.  Each word is answered by a line, and everything said to its standard error is a fault."""

    process: subprocess.Popen[str]
    path: Path
    stderr: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def ask(self, *words: object) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it ended just now
            print(*words, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        assert line, f"{words}: the program ended: {self._said()}"
        return line.rstrip("\n")

    def alloc(self, count: int, size: int, api: str = "cuda", density: str = "sparse") -> int:
        """The number of the first of them."""
        answer = self.ask("alloc", count, size, api, density)
        assert answer.isdigit(), answer
        return int(answer)

    def free(self, number: int) -> None:
        assert self.ask("free", number) == "0"

    def intact(self, count: int) -> None:
        """All contents are what was written; there are ``count`` pieces of memory."""
        assert self.ask("check") == str(count)

    def outstanding(self) -> dict[str, int]:
        return json.loads(self.ask("outstanding"))

    def left(self) -> dict[str, int]:
        """Return what is outstanding, but for the addresses that the library keeps of memory which was freed."""
        out = self.outstanding()
        return {**out, "reservations": max(0, out["reservations"] - KEPT_ADDRESSES)}

    def calls(self) -> dict[str, int]:
        """Calls of the driver since the last `fail`."""
        return json.loads(self.ask("calls"))

    def fail(self, function: str = "*", nth: int = 0, result: int = 999, *, lasting: bool = False) -> None:
        assert self.ask("fail", function, nth, int(lasting), result) == "ok"

    def control(self) -> Control:
        return Control(self.path)

    def end(self) -> None:
        """Have the program end by itself; nothing may be wrong."""
        said = self._said()
        assert (self.process.returncode, said) == (0, ""), (self.process.returncode, said)

    def _said(self) -> str:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # what could not be sent is sent once more
            self.process.stdin.close()
        self.process.wait(PATIENCE)
        return self.stderr.read_text()


@contextlib.contextmanager
def running(
    programs: Programs,
    doubles: Path | None,
    *,
    preload: Sequence[str] | None = None,
    path: Path | None = None,
    direct: bool = False,
    prefix: Sequence[str] = (),
    environment: dict[str, str] | None = None,
) -> Iterator[Subject]:
    """The program with the library preloaded (or ``preload``); it must end well."""
    with tempfile.TemporaryDirectory(prefix="gc-") as home:
        directory = Path(home)
        path = path or directory / "fast"
        libraries = [*programs.first, str(programs.library)] if preload is None else preload
        searched = os.pathsep.join(map(str, [doubles] if doubles else []))
        variables = {
            **os.environ,
            "LD_LIBRARY_PATH": searched,
            "LD_PRELOAD": ":".join(libraries),
            SOCKET_VARIABLE: str(path),
            **(environment or {}),
        }
        with open(directory / "stderr", "w") as stderr:
            process = subprocess.Popen(
                [*prefix, *programs.command(direct=direct)],
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        subject = Subject(process, path, directory / "stderr")
        try:
            yield subject
            subject.end()
        finally:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def listening(subject: Subject) -> None:
    """The library listens from the first large allocation on."""
    until(subject.path.exists, "the library listens")


Ask = Callable[[str], Any]


@contextlib.contextmanager
def asking(programs: Programs, doubles: Path, script: str, socket: Path | None, **variables: str) -> Iterator[Ask]:
    """Run a program in Python that answers expressions, with the library if ``socket`` is given.

    Nothing may be wrong at its end.
    """
    environment = {**os.environ, "LD_LIBRARY_PATH": str(doubles), **variables}
    if socket is not None:
        environment |= {"LD_PRELOAD": str(programs.library), SOCKET_VARIABLE: str(socket)}
    command = [sys.executable, str(HERE / script)]
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None

    def ask(expression: str) -> Any:
        print(expression, file=process.stdin, flush=True)
        line = process.stdout.readline()
        assert line, f"{expression}: {process.communicate(timeout=PATIENCE)[1]}"
        return eval(line)

    try:
        yield ask
        assert process.communicate(timeout=PATIENCE) == ("", "")
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


def same_answers(programs: Programs, doubles: Path, script: str, path: Path, expressions: Sequence[str]) -> None:
    """Check that a program (`asking`) answers the same with the library, which listens at ``path``, and without it."""
    answers = []
    for listening_at in (None, path):
        with asking(programs, doubles, script, listening_at) as ask:
            answers.append([ask(each) for each in expressions])
    assert path.exists()
    assert answers[0] == answers[1]
