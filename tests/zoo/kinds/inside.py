"""Runs in the kernel: makes kinds of state, shows them, undoes them.  Answers are one line of JSON."""

from __future__ import annotations

import importlib
import json
import signal
import threading
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from . import _kinds

#: Begins the line of the answer; whatever else a cell prints is the kinds' own.
MARK = "zoo: "

#: Seconds that a kind may take to make, show or undo.
PATIENCE = 90.0

_living: dict[str, tuple[Callable[[], Any], Callable[[], Any] | None]] = {}


def _each(keys: Iterable[str], act: Callable[[str], Any]) -> None:
    """Print what ``act`` returns for each key, or the traceback of what it raised."""
    answers: dict[str, Any] = {}
    for key in keys:
        # A wait for something that was lost lasts for ever: it is interrupted, and that is reported.
        alarm = threading.Timer(PATIENCE, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
        alarm.start()
        try:
            answers[key] = {"value": json.dumps(act(key), default=repr, sort_keys=True)}
        except BaseException:
            answers[key] = {"error": traceback.format_exc(limit=-4)}
        alarm.cancel()
    print(f"\n{MARK}{json.dumps(answers)}")


def _make(key: str) -> None:
    family, _, _ = key.partition(".")
    importlib.import_module(f"kinds.{family}")
    made = _kinds[key].make()
    _living[key] = made if isinstance(made, tuple) else (made, None)


def make(keys: list[str]) -> None:
    """Make them, in this order."""
    _each(keys, _make)


def show(keys: list[str]) -> None:
    """Describe them."""
    _each(keys, lambda key: _living[key][0]())


def _undo(key: str) -> bool:
    _, undo = _living.pop(key)
    if undo is not None:
        undo()
    return undo is not None


def undo(keys: list[str]) -> None:
    """Take them back; whether each can be."""
    _each(keys, _undo)
