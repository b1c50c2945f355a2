"""The shells complete commands, options, values and images after the one line that `docs/usage.md` names."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pexpect
import pytest
from images import publish

from jupyter_gpu_ckpt.cli.images import InspectCommand, RemoveCommand

pytestmark = pytest.mark.slow  # starts shells, and Python for each completion

LINE = 'eval "$(register-python-argcomplete jupyter jupyter-gpu-ckpt)"'
BIN = str(Path(sys.executable).parent)
PROMPT = "ready> "

SHELLS = {
    "bash": (["--norc", "--noprofile", "-i"], ["bind 'set enable-bracketed-paste off'"]),
    "zsh": (["-f", "-i"], ["autoload -U compinit && compinit -u", "unsetopt zle_bracketed_paste"]),
}


@pytest.fixture(params=SHELLS)
def shell(request, configuration, monkeypatch):
    """A shell in which somebody has typed the line."""
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed on this machine")
    monkeypatch.setenv("PATH", BIN, prepend=":")
    monkeypatch.setenv("PS1", PROMPT)
    monkeypatch.setenv("TERM", "dumb")
    options, setup = SHELLS[request.param]
    spawned = pexpect.spawn(request.param, options, encoding="utf-8", timeout=60, dimensions=(50, 250))
    for line in (f"PS1='{PROMPT}'", *setup, LINE):
        spawned.expect_exact(PROMPT)
        spawned.sendline(line)
    spawned.expect_exact(PROMPT)
    yield spawned
    spawned.close(force=True)


def typed(shell, text: str, wanted: str) -> None:
    """Type and press the tabulator: ``wanted`` is what the line is then."""
    shell.send(f"{text}\t")
    shell.expect(re.escape(wanted))
    shell.sendcontrol("u")
    shell.sendline("")
    shell.expect_exact(PROMPT)


def test_commands_options_values_and_images(shell, store):
    image = publish(store)
    typed(shell, "jupyter gpu-ckpt ver", "jupyter gpu-ckpt verify ")
    typed(shell, "jupyter-gpu-ckpt brea", "jupyter-gpu-ckpt break-claim ")
    typed(shell, "jupyter gpu-ckpt prune --max-b", "prune --max-bytes ")
    typed(shell, "jupyter gpu-ckpt doctor --for g", "--for gpu ")
    typed(shell, "jupyter gpu-ckpt rm ", f"rm {image.id} ")
    typed(shell, f"jupyter gpu-ckpt inspect {image.id[:4]}", f"inspect {image.id} ")


@pytest.mark.parametrize(("kind", "again"), [(InspectCommand, False), (RemoveCommand, True)])
def test_images_are_offered_for_as_many_arguments_as_there_are(store, kind, again):
    image = publish(store)
    command = kind()
    command.load_config_file()
    assert command.complete([]) == [image.id]
    assert command.complete(["another"]) == ([image.id] if again else [])
    assert command.complete([image.id]) == []


def test_the_documents_name_the_line():
    assert LINE in (Path(__file__).resolve().parents[2] / "docs" / "usage.md").read_text()
