"""Make foreign text, such as file names and process arguments, safe for a terminal and a log."""

from __future__ import annotations


def printable(text: str, most: int | None = None) -> str:
    """Return ``text`` on one line of at most ``most`` characters, with escapes for all that is not printable.

    Control characters (C0, C1), line and paragraph separators, direction marks and lone surrogates become ``\\x1b`` and
    the like (`str.isprintable`): nothing moves the cursor, starts a control sequence, hides or reorders text.
    """
    cut = text if most is None else text[: most + 1]
    shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in cut)
    return shown if most is None or len(shown) <= most else f"{shown[: most - 3]}..."
