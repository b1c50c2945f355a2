"""A page of the documentation as what its reader does: commands to type, files to write, cells to run.

A fenced block says by its language what it is.  Of a language that is not known here a page has none, so that nothing
on it is passed over in silence.

========== ===================================================================================================
`console`  commands after a prompt that names the machine (``hub# ``, ``checkout$ ``), and what they print
`python`,  a file: the first line is a comment with its path
`ini`
`ipython`  a cell, ``In [1]: x``, and what it gives, for the user who sits before a browser
========== ===================================================================================================

A line of three dots in an output stands for any lines, three dots within a line for any text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$|<!-- (the browser is closed) -->", re.MULTILINE | re.DOTALL)
_PROMPT = re.compile(r"^(\w+)[#$] (.+)$")
_CELL = re.compile(r"^In \[(\d+)\]: (.+)$")
_PATH = re.compile(r"^# (/\S+)$")


@dataclass(frozen=True)
class Command:
    """A line typed on a machine."""

    line: int
    machine: str
    text: str
    output: str


@dataclass(frozen=True)
class File:
    """A file written on the hub's machine."""

    line: int
    path: str
    text: str


@dataclass(frozen=True)
class Cell:
    """A cell that is run; ``number`` is the execution count that it shows afterwards."""

    line: int
    number: int
    source: str
    output: str


@dataclass(frozen=True)
class CloseBrowser:
    """The browser is closed."""

    line: int


Step = Command | File | Cell | CloseBrowser


class NotAPage(Exception):
    """The page cannot be followed; the text says where."""


def steps(page: Path) -> list[Step]:
    """All that the page has its reader do, in its order.  Raises `NotAPage`."""
    text = page.read_text()
    if len(re.findall(r"```", text)) != 2 * len(re.findall(r"^```\w*\n.*?^```$", text, re.MULTILINE | re.DOTALL)):
        raise NotAPage(f"{page.name}: a fence is not at the beginning of its line, or without its other half")
    found: list[Step] = []
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        language, body, left = match.groups()
        if left:
            found.append(CloseBrowser(line))
        elif language == "console":
            found += [Command(*one) for one in _typed(_PROMPT, body, line)]
        elif language == "ipython":
            found += [Cell(at, int(number), source, out) for at, number, source, out in _typed(_CELL, body, line)]
        elif language in ("python", "ini"):
            path = _PATH.match(body.partition("\n")[0])
            if path is None:
                raise NotAPage(f"{page.name}:{line}: the first line of a file is a comment with its path")
            found.append(File(line, path.group(1), body))
        else:
            raise NotAPage(f"{page.name}:{line}: nobody knows what to do with a block of the language {language!r}")
    return found


def _typed(prompt: re.Pattern[str], body: str, line: int) -> Iterator[tuple[int, str, str, str]]:
    """For each line after a prompt: where it is, the prompt's name, the line, and the lines below it."""
    pending: tuple[int, str, str] | None = None
    output: list[str] = []
    for at, text in enumerate(body.splitlines(), line + 1):
        if match := prompt.match(text):
            if pending:
                yield (*pending, "\n".join(output))
            pending, output = (at, match.group(1), match.group(2)), []
        elif pending is None:
            raise NotAPage(f"line {at}: an output before any prompt: {text!r}")
        else:
            output.append(text)
    if pending:
        yield (*pending, "\n".join(output))
