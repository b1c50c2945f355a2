"""Comparison of a command's output with a page: letter by letter, but for what differs from one time to the next.

Times, sizes and versions are of the day.  Numbers that name something (pids, images, kernels) differ, too, but the same
name on the page must be the same name on the machine: a process that the page shows twice is the same one.
"""

from __future__ import annotations

import re

#: What differs, by what it is, and what it looks like; the first that fits is taken.
_DIFFERS = {
    "image": r"\b\d{8}T\d{6}-[0-9a-f]{8}-[0-9a-f]{6}\b",
    "time": r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?Z?|\b\d+:\d\d:\d\d\b",
    "kernel": r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b",
    "place": r"(?<=\w):\d+(?=\])",
    "size": r"\b\d+(?:\.\d+)? (?:B|KiB|MiB|GiB|TiB)\b",
    "span": r"\b\d+(?:\.\d+)? (?:s|seconds|min|h|d)\b",
    "version": r"\b\d+\.\d+(?:\.\d+)*(?:-[\w.]+)*\b(?!/)",
    "pid": r"\b\d{3,}\b",
}
#: Those that name something.
_NAMES = ("image", "kernel", "pid")
#: What looks like a version or a pid and is not.
_FIXED = r"\b127\.0\.0\.1(?::\d+)?\b"
_TOKEN = re.compile("|".join([f"(?P<fixed>{_FIXED})", *(f"(?P<{kind}>{look})" for kind, look in _DIFFERS.items())]))


class Comparison:
    """Compares outputs of one run with one page, and remembers which name stands for which."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, str], str] = {}

    def difference(self, shown: str, printed: str) -> str | None:
        """Return the difference of ``printed`` from ``shown``, the page's text; None if there is none."""
        wanted, found = _lines(shown), _lines(printed)
        names: dict[tuple[str, str], str] = {}
        pattern = _pattern(wanted, self._names, names)
        match = re.fullmatch(pattern, "".join(f"{line}\n" for line in found), re.DOTALL)
        if match is None:
            return f"the page shows:\n{_indented(wanted)}\nprinted was:\n{_indented(found)}"
        met = {key: match.group(group) for key, group in names.items()}
        if twice := [value for value in met.values() if list((self._names | met).values()).count(value) > 1]:
            return f"on the page these are two, and here one: {', '.join(twice)}\n{_indented(found)}"
        self._names.update(met)
        return None


def _pattern(wanted: list[str], known: dict[tuple[str, str], str], names: dict[tuple[str, str], str]) -> str:
    """The shown lines as a regular expression; new names go into ``names`` with the groups that they are in."""
    written = []
    for line in wanted:
        if line.strip() == "...":
            written.append(r"(?:[^\n]*\n)*?")
            continue
        written.append(r"[^\n]*?".join(_part(part, known, names) for part in line.split("...")) + "\n")
    return "".join(written)


def _part(text: str, known: dict[tuple[str, str], str], names: dict[tuple[str, str], str]) -> str:
    written, at = [], 0
    for match in _TOKEN.finditer(text):
        written.append(re.escape(text[at : match.start()]))
        written.append(_differing(match, known, names))
        at = match.end()
    return "".join(written) + re.escape(text[at:])


def _differing(match: re.Match[str], known: dict[tuple[str, str], str], names: dict[tuple[str, str], str]) -> str:
    kind, value = match.lastgroup or "", match.group()
    if kind == "fixed":
        return re.escape(value)
    if kind not in _NAMES:
        return f"(?:{_DIFFERS[kind]})"
    key = (kind, value)
    if key in known:
        return re.escape(known[key])
    if key in names:
        return f"(?P={names[key]})"
    names[key] = f"name{len(names)}"
    return f"(?P<{names[key]}>{_DIFFERS[kind]})"


def _lines(text: str) -> list[str]:
    """Without colours and trailing blanks; several blanks are one, as columns are as wide as what is in them."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r\n", "\n")
    lines = [re.sub(r" {2,}", " ", line.rpartition("\r")[2].rstrip()) for line in plain.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _indented(lines: list[str]) -> str:
    return "\n".join(f"    {line}" for line in lines) or "    (nothing)"
