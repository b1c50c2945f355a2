"""``jupyter console --existing`` on a pseudo terminal: a client of another process that knows a connection file."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest
from stock import Blocking, environment, printed

pytestmark = pytest.mark.timeout(120)


#: jupyter_console ends its wait for a cell's output at any idle of its session, so also at that of its own first
#: question if it reads it before the cell's busy - and a cell that wakes the kernel is not busy before the kernel is
#: there.  The output is then shown at the next line, or when it comes by a console that continues listening.
LISTENING = "--ZMQTerminalInteractiveShell.include_other_output=True"


class Console:
    """A console; with its ``simple`` prompt and without echo, what comes back is what it shows."""

    def __init__(self, connection_file: str, directory: Path, *, simple: bool = True) -> None:
        options = ["--no-confirm-exit", LISTENING, *(["--simple-prompt"] if simple else [])]
        settings = {"TERM": "dumb" if simple else "xterm", "NO_COLOR": "1", "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.terminal = pexpect.spawn(
            sys.executable,
            ["-m", "jupyter_console", "--existing", connection_file, *options],
            env=environment(directory) | settings,
            encoding="utf-8",
            echo=False,
            timeout=60,
        )
        self.enter = "\n" if simple else "\r"
        self.terminal.expect_exact("In [")

    def shows(self, line: str, expected: str) -> None:
        """Enter ``line`` and wait for ``expected``, which may come before the next prompt or after it."""
        self.terminal.send(line + self.enter)
        self.terminal.expect_exact(expected)

    def quit(self) -> None:
        """Leave as Ctrl-D does; a console of an existing kernel leaves the kernel alone."""
        self.terminal.sendeof()
        self.terminal.expect(pexpect.EOF)

    def close(self) -> None:
        self.terminal.close(force=True)


@pytest.fixture
def consoles(blocking: Blocking, tmp_path: Path) -> Iterator[list[Console]]:
    """Consoles to close at the end."""
    opened: list[Console] = []
    yield opened
    for console in opened:
        console.close()


@pytest.fixture
def console(blocking: Blocking, consoles: list[Console], tmp_path: Path) -> Console:
    """A console that connected while the kernel was awake."""
    console = Console(blocking.manager.connection_file, tmp_path)
    consoles.append(console)
    return console


def test_a_console_works_and_leaves_the_kernel_running(blocking: Blocking, console: Console):
    console.shows("x = 6 * 7; x", "42")
    console.shows("1 / 0", "ZeroDivisionError")
    console.quit()
    assert printed(blocking.connect(), "print(x)") == "42"


def test_a_kernel_that_is_checkpointed_under_a_console_wakes_by_its_next_line(blocking: Blocking, console: Console):
    console.shows("x = 20 + 21; x", "41")
    for expected in ("42", "43"):
        image = blocking.checkpoint()
        console.shows("x += 1; print(x)", expected)
        blocking.settled("running")
        assert not image.path.exists()


def test_input_of_a_cell_that_woke_the_kernel_reaches_the_console_and_back(blocking: Blocking, console: Console):
    console.shows("x = 20 + 21; x", "41")
    blocking.checkpoint()
    console.shows("name = input('who' + '? ')", "who? ")
    console.shows("Ada", "In [")
    console.shows("print('hello', name, x)", "hello Ada 41")


def test_connecting_to_a_sleeping_kernel_does_not_wake_it_and_the_first_line_does(
    blocking: Blocking, consoles: list[Console], tmp_path: Path
):
    printed(blocking.connect(), "x = 41")
    image = blocking.checkpoint()
    console = Console(blocking.manager.connection_file, tmp_path)  # has its prompt, so it has asked all that it asks
    consoles.append(console)
    assert blocking.state == "checkpointed"
    assert image.path.exists()
    console.shows("x += 1; print(x)", "42")
    blocking.settled("running")


def test_the_lines_of_a_console_with_its_own_prompt_run_each_at_one_enter(
    blocking: Blocking, consoles: list[Console], tmp_path: Path
):
    """Lines are run where the kernel says in a second that they are complete; else the console never asks again."""
    console = Console(blocking.manager.connection_file, tmp_path, simple=False)
    consoles.append(console)
    console.terminal.logfile_read = shown = io.StringIO()
    console.shows("x = 40; print('got', x)", "got 40")
    for expected in ("got 41", "got 42"):
        blocking.checkpoint()
        console.shows("x += 1; print('got', x)", expected)
        blocking.settled("running")
    blocking.checkpoint()
    console.shows("for n in range(3):", "...: ")
    console.shows("print('n is', n)", "...: ")
    console.shows("", "n is 2")
    blocking.checkpoint()
    console.shows("print('and', x)", "and 42")
    assert "did not respond" not in shown.getvalue()
