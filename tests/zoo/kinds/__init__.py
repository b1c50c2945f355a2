"""The zoo: kinds of process state, each a small program that makes it and asks the system about it.

A kind is a function.  Its body makes the state and returns ``show``, which describes the state canonically, as far as
possible by asking the system itself; state that stands in the way of other kinds comes with ``undo``, too::

    @kind("an eventfd with a count")
    def eventfd():
        fd = os.eventfd(7)
        return lambda: fdinfo(fd)

What is declared of it is what must become of it, for root and for an ordinary user: `KEPT`, `refused`, `announced`,
`documented` or `IMPOSSIBLE`.  One module is one family.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FAMILIES = (
    "descriptors",
    "files",
    "sockets",
    "mappings",
    "threads",
    "signals",
    "timers",
    "attributes",
    "identity",
    "terminals",
    "children",
    "runtime",
    "notebooks",
    "libraries",
)

Show = Callable[[], Any]
Undo = Callable[[], Any]


@dataclass(frozen=True)
class Expectation:
    """The expected outcome of a kind.  ``code`` and ``word``: of the refusal, the announcement or the documentation."""

    what: str
    code: str = ""
    word: str = ""

    def __str__(self) -> str:
        return f"{self.what} ({self.code})" if self.code else self.what


#: The same after every wake.
KEPT = Expectation("kept")
#: The user cannot have such state at all: the system forbids it.
IMPOSSIBLE = Expectation("impossible")


def refused(code: str, word: str) -> Expectation:
    """The checkpoint is refused with that code, in a sentence that has that word in it; the kernel runs on."""
    return Expectation("refused", code, word)


def announced(word: str) -> Expectation:
    """Not kept, and said beforehand: ``%gpu_checkpoint --status`` has that word, and ``show`` has ``lost`` set."""
    return Expectation("announced", word=word)


def documented(word: str) -> Expectation:
    """Not kept, and not to be mended from outside: ``docs/usage.md`` says so in a sentence with that word."""
    return Expectation("documented", word=word)


@dataclass(frozen=True)
class Kind:
    """One kind of state.

    ``alone``: why it shares no kernel with others; empty for most.  ``needs``: a module without which it cannot be.
    ``advice``: what a user does about it, for the table.  ``loss``: what becomes of it otherwise than declared, where
    that is known and not mended yet: its test fails until it is, and the table says so.
    """

    key: str
    name: str
    make: Callable[[], Show | tuple[Show, Undo]]
    root: Expectation
    user: Expectation
    alone: str
    needs: tuple[str, ...]
    advice: str
    loss: str

    @property
    def family(self) -> str:
        return self.key.partition(".")[0]

    def expected(self, who: str) -> Expectation:
        """``who``: "root" or "user"."""
        return self.root if who == "root" else self.user

    def lacking(self) -> list[str]:
        """Modules that are not installed here."""
        return [module for module in self.needs if importlib.util.find_spec(module) is None]


_kinds: dict[str, Kind] = {}


def kind(
    name: str,
    expect: Expectation = KEPT,
    *,
    root: Expectation | None = None,
    user: Expectation | None = None,
    alone: str = "",
    needs: str = "",
    advice: str = "",
    loss: str = "",
) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Declare the function a kind.  ``root`` and ``user`` where one of them differs from ``expect``."""

    def declare(make: Callable[[], Any]) -> Callable[[], Any]:
        key = f"{make.__module__.rpartition('.')[2]}.{make.__name__}"
        assert key not in _kinds, key
        _kinds[key] = Kind(key, name, make, root or expect, user or expect, alone, tuple(needs.split()), advice, loss)
        return make

    return declare


def all_kinds() -> dict[str, Kind]:
    """Every kind by its key, family by family."""
    for family in FAMILIES:
        importlib.import_module(f"kinds.{family}")
    return dict(sorted(_kinds.items(), key=lambda item: FAMILIES.index(item[1].family)))
