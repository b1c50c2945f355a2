"""Text that others chose, such as names of files and arguments of processes, made fit for a terminal and a log."""

from __future__ import annotations


def printable(text: str, most: int | None = None) -> str:
    """Return ``text`` on one line, with escapes for whatever is not a plain character, of at most ``most`` characters.

    Nothing in it moves the cursor, starts a control sequence, hides, or turns the direction of what follows: control
    characters (C0, C1), line and paragraph separators, marks of direction and lone surrogates become ``\\x1b`` and the
    like (`str.isprintable`).
    """
    shown = "".join(
        one if one.isprintable() else ascii(one)[1:-1] for one in (text if most is None else text[: most + 1])
    )
    return shown if most is None or len(shown) <= most else f"{shown[: most - 3]}..."
