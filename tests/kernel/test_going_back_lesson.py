"""The lesson about save points, docs/going-back.md: its cells in a real kernel, one after the other."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "going-back.md"


def steps() -> list[tuple[str, str]]:
    """Return each cell, and what the page says that it prints."""
    parts = re.split(r"^\d+\. ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    found = []
    for part in parts:
        (cell,) = re.findall(r"```i?python\n(.*?)```", part, re.DOTALL)
        prints = re.search(r"It prints `(.+?)`", part)
        found.append((textwrap.dedent(cell), prints[1] if prints else ""))
    return found


async def test_every_cell_does_what_the_lesson_says(kernel):
    outputs = {}
    for cell, prints in steps():
        outputs[cell.strip()] = printed = await kernel.run(cell)
        assert not prints or printed == prints, cell
    assert sum(1 for _, prints in steps() if prints) == 3

    def output(option: str) -> str:
        return next(printed for cell, printed in outputs.items() if f"--{option}" in cell)

    assert re.search(r"^visits +changed", output("compare"), re.MULTILINE)
    lines = output("saves").splitlines()
    (automatic,) = [line for line in lines if line.endswith("automatic")]
    assert any(line.startswith("before-cleaning ") for line in lines)
    assert output("delete").startswith("Deleted before-cleaning")
    name = re.split(" {2,}", automatic)[0]
    await kernel.run(f"%gpu_checkpoint --back {name!r}")
    assert await kernel.run("print(len(visits), 'visits')") == "1 visits"
