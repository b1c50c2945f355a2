"""Colours, tables and bars on a terminal; plain text without one, and nothing that others wrote moves the cursor."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import time

import pytest
from images import publish

from jupyter_gpu_ckpt.cli.terminal import Column, Terminal, _console, progress

ESCAPE = "\x1b"
WIDE, NARROW = 200, 60


def on_a_terminal(*arguments: str, columns: int = WIDE, **environment: str) -> str:
    """Return the text that a command writes to a terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        variables = {"TERM": "xterm-256color", **environment}
        for name in ("NO_COLOR", "COLUMNS", "LINES"):
            os.environ.pop(name, None)
        os.execvpe(sys.executable, [sys.executable, "-m", "jupyter_gpu_ckpt", *arguments], {**os.environ, **variables})
    written = b""
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:
            break
        if not part:
            break
        written += part
    os.waitpid(pid, 0)
    os.close(terminal)
    return written.decode().replace("\r\n", "\n")


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def test_a_table_in_colour_says_what_the_plain_one_says(store, run):
    ids = [publish(store, kernel_id=f"k{n}", created=time.time() - 7200).id for n in range(2)]
    shown = on_a_terminal("list")
    assert ESCAPE in shown
    assert plain(shown) == run("list").out
    assert all(id in shown for id in ids)


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_who_wants_no_colour_gets_no_escape_sequence_at_all(store, run, environment):
    publish(store)
    assert on_a_terminal("list", **environment) == run("list").out
    shown = on_a_terminal("verify", store.images()[0].id, **environment)  # whose bar moves the cursor, if it can
    assert "is whole" in shown and plain(shown) == shown


def test_on_a_narrow_terminal_no_name_is_cut(store):
    image = publish(store, kernel_id="0c0ffee0-1111-2222-3333-444444444444")
    lines = on_a_terminal("list", columns=NARROW, NO_COLOR="1").splitlines()
    assert f"IMAGE   {image.id}" in lines
    assert "KERNEL  0c0ffee0-1111-2222-3333-444444444444" in lines
    assert max(map(len, lines[2:])) <= NARROW


def test_errors_are_red_on_a_terminal_only(run):
    assert on_a_terminal("inspect", "x").startswith(f"{ESCAPE}[1;31m[IMAGE_NOT_FOUND]{ESCAPE}[0m There is no image")
    assert ESCAPE not in run("inspect", "x").err


def test_a_document_is_the_same_on_a_terminal(store, run):
    publish(store)
    assert on_a_terminal("list", "--json") == run("list", "--json").out


HOSTILE = "[red]a\x1b]0;owned\x07\x1b[31m\u202e:smile:"
SHOWN = r"[red]a\x1b]0;owned\x07\x1b[31m\u202e:smile:"


def test_a_name_is_neither_a_control_sequence_nor_markup(store):
    image = publish(store, kernel_name=HOSTILE, report={HOSTILE: HOSTILE})
    (store.root / HOSTILE).mkdir()
    assert SHOWN in on_a_terminal("list", NO_COLOR="1")
    for text in (on_a_terminal("list"), on_a_terminal("inspect", image.id), on_a_terminal("inspect", f"{HOSTILE}x")):
        assert "\x1b]0" not in text and "\x07" not in text and "\u202e" not in text
        assert SHOWN in plain(text).replace("\\\\", "\\")


class Screen:
    """A stream that says it is a terminal."""

    def __init__(self) -> None:
        self.written = ""

    def write(self, text: str) -> int:
        self.written += text
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [24, 200])
def test_wide_characters_are_aligned_by_their_cells(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    screen = Screen()
    Terminal(screen).table([Column("A"), Column("B", number=True)], [["文件", "1"], ["x", "10"]])
    assert screen.written.splitlines() == ["A      B", "文件   1", "x     10"]
    assert _console(screen).width == columns


def test_progress_is_shown_on_a_terminal(monkeypatch):
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with progress(10 << 20, "Sending [red]", quiet=False) as advance:
        advance(5 << 20)
        time.sleep(0.3)
    assert "Sending [red]" in plain(screen.written) and "5.0/10.0 MiB" in plain(screen.written)


@pytest.mark.parametrize(("quiet", "term"), [(True, "xterm"), (False, "dumb")])
def test_progress_is_not_shown_to_others(monkeypatch, quiet, term):
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", term)
    with progress(10, "Sending", quiet=quiet) as advance:
        advance(5)
    assert screen.written == ""
