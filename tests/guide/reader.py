"""Somebody who does what a page says, word by word, and compares what comes with what the page shows."""

from __future__ import annotations

import subprocess
from pathlib import Path

from comparison import Comparison
from fresh_machine import FreshMachine
from page import Cell, CloseBrowser, Command, File, Step, steps
from terminal import PATIENCE, Terminal
from visitor import Visitor

REPOSITORY = Path(__file__).resolve().parents[2]
#: Who sits before the browser.
USER = "ann"

#: Files go to the machine without a network between: it is a directory here.
_SCP = 'scp() { cp -- "$1" {root}/root/; }\n'


class Reader:
    """Follows ``page`` on ``machine``, whose shell is behind each of ``prompts``; ``checkout$`` is one here."""

    def __init__(self, page: Path, machine: FreshMachine, place: Path, *prompts: str, logs: str) -> None:
        """``place``: for the browser.  ``logs``: a shell command that shows them, when something goes wrong."""
        self._page, self._machine, self._place, self._prompts, self._logs = page, machine, place, prompts, logs
        self._comparison = Comparison()
        self._terminal = Terminal(machine.inside())
        self._visitor: Visitor | None = None

    def read(self) -> None:
        """Do all of it; what turns out otherwise than the page says is an `AssertionError`."""
        try:
            for step in steps(self._page):
                where = f"{self._page.name}:{step.line}: {getattr(step, 'text', step)}"
                print(where.splitlines()[0], flush=True)
                wrong = self.follow(step)
                assert wrong is None, f"{where}\n{wrong}"
        except BaseException:
            print(self.log())
            raise
        finally:
            self.close()

    def follow(self, step: Step) -> str | None:
        """Return the first difference from the page; None if all is as the page says."""
        if isinstance(step, File):
            path = self._machine.root / step.path.lstrip("/")
            path.write_text(step.text)
            return None
        if isinstance(step, CloseBrowser):
            assert self._visitor is not None, "nobody has come yet"
            self._visitor.close_browser()
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
        if command.machine in self._prompts:
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
        """Return the logs of hub, culler and servers, to find out what went wrong."""
        said = [*self._machine.inside(), "sh", "-c", self._logs]
        return subprocess.run(said, capture_output=True, text=True, timeout=60).stdout

    def close(self) -> None:
        if self._visitor is not None:
            self._visitor.close_browser()
        self._terminal.close()
