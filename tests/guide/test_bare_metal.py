"""The administrators' guide for one machine, followed literally on an empty one: the page itself is the input.

Every command is typed as the page has it, every file is written, every cell is run in a browser, in the page's order;
whatever prints something else than the page shows is a failure of the page or of the product.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from comparison import Comparison
from desktop import find_chromium
from fresh_machine import FreshMachine, fresh_machine, why_not
from page import Cell, Command, File, Leave, Step, steps
from terminal import PATIENCE, Terminal
from visitor import Visitor

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "admin" / "bare-metal.md"
USER = "ann"

#: Files go to the hub's machine without a network between: it is a directory here.
_SCP = 'scp() { cp -- "$1" {root}/root/; }\n'


class Reader:
    """Does what the page says."""

    def __init__(self, machine: FreshMachine, place: Path) -> None:
        self._machine, self._place = machine, place
        self._comparison = Comparison()
        self._terminal = Terminal(machine.inside())
        self._visitor: Visitor | None = None

    def follow(self, step: Step) -> str | None:
        """What is wrong; None if all is as the page says."""
        if isinstance(step, File):
            path = self._machine.root / step.path.lstrip("/")
            path.write_text(step.text)
            return None
        if isinstance(step, Leave):
            assert self._visitor is not None, "nobody has come yet"
            self._visitor.leave()
            return None
        if isinstance(step, Cell):
            return self._cell(step)
        if step.text == "systemctl reboot":
            return self._reboot(step)
        status, output = self._type(step)
        wrong = self._comparison.difference(step.output, output)
        if wrong is None and status != 0:
            wrong = f"it ended with status {status}, and printed:\n{output}"
        return wrong

    def _type(self, command: Command) -> tuple[int, str]:
        if command.machine == "hub":
            return self._terminal.run(command.text)
        assert command.machine == "checkout", command.machine
        done = subprocess.run(
            ["bash", "-c", _SCP.replace("{root}", str(self._machine.root)) + command.text],
            cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=PATIENCE,
        )  # fmt: skip
        return done.returncode, done.stdout

    def _reboot(self, command: Command) -> None:
        passwords = self._terminal.passwords
        self._terminal.run(command.text)
        self._terminal.close()  # a shell that stays would be waited for
        self._machine.gone()
        self._machine.boot()
        self._terminal = Terminal(self._machine.inside())
        self._terminal.passwords = passwords

    def _cell(self, cell: Cell) -> str | None:
        if self._visitor is None:
            self._visitor = Visitor(self._machine, self._place, USER, self._terminal.passwords[USER])
        prompt, output = self._visitor.run(cell.source)
        if prompt != f"[{cell.number}]:":
            return f"the cell is {prompt} and not [{cell.number}]: it is another kernel; it gave {output!r}"
        shown = cell.output.removeprefix(f"Out[{cell.number}]: ")
        return self._comparison.difference(shown, output)

    def log(self) -> str:
        """What hub, culler and servers had to say, for whoever has to find out what went wrong."""
        said = [*self._machine.inside(), "journalctl", "--unit=jupyterhub", "--output=cat", "--lines=400"]
        return subprocess.run(said, capture_output=True, text=True, timeout=60).stdout

    def close(self) -> None:
        if self._visitor is not None:
            self._visitor.leave()
        self._terminal.close()


@pytest.fixture
def machine() -> Iterator[FreshMachine]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    pytest.importorskip("playwright", reason="playwright is not installed (the extra `test`)")
    if find_chromium() is None:
        pytest.skip("no Chromium on this host: `apt-get install chromium`")
    with tempfile.TemporaryDirectory(prefix="gc-guide-") as place, fresh_machine(Path(place)) as running:
        yield running


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_the_page_is_followed_from_an_empty_machine(machine: FreshMachine, tmp_path: Path):
    reader = Reader(machine, tmp_path)
    try:
        for step in steps(PAGE):
            print(f"{PAGE.name}:{step.line}: {getattr(step, 'text', step)}".splitlines()[0], flush=True)
            wrong = reader.follow(step)
            if wrong is not None:
                print(reader.log())
            assert wrong is None, f"{PAGE.name}:{step.line}: {getattr(step, 'text', step)}\n{wrong}"
    finally:
        reader.close()
