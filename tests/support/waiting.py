"""Polling for conditions that no event reports."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(true: Callable[[], T], what: str = "what was waited for", timeout: float = 60, *, longest: float = 0.05) -> T:
    """Poll until ``true()`` is truthy, and return that; a deadline that passes is a failure.  Seconds.

    ``longest``: the longest pause between two looks; longer where many looks would keep a processor busy.
    `harness.until` is the same for a test that runs on an event loop.
    """
    deadline, pause = time.monotonic() + timeout, 0.001
    while not (value := true()):
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return value
