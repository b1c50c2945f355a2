"""Texts that others chose write nothing to a terminal: names of files, arguments of processes, errors about them."""

from __future__ import annotations

import asyncio
import json
import os
import sys

import pytest

from jupyter_gpu_ckpt.cli import main
from jupyter_gpu_ckpt.errors import ChangedFile, GpuCkptError
from jupyter_gpu_ckpt.lifecycle import suspend
from jupyter_gpu_ckpt.terminal_text import printable

#: A title for the window, colours, C1's control sequence introducer, a new line, a return, a mark of direction.
HOSTILE = "a\x1b]0;owned\x07\x1b[31m\x9b31m\nrefused\r\u202egpj.exe\u2028b"


def test_what_writes_on_a_terminal_is_shown_instead():
    assert printable(HOSTILE) == (r"a\x1b]0;owned\x07\x1b[31m\x9b31m\nrefused\r\u202egpj.exe\u2028b")
    assert printable("Ä 文件 🙂 a b") == "Ä 文件 🙂 a b"
    assert printable("\udcff") == r"\udcff"


@pytest.mark.parametrize("most", [None, 10])
def test_it_is_one_line_of_bounded_length_that_any_stream_takes(most):
    for number in [*range(0x250), 0xD800, 0x200B, 0x2066, 0xFEFF, 0xE0001, 0x10FFFF]:
        shown = printable(chr(number) * 12, most)
        assert shown.isprintable()
        assert most is None or len(shown) <= most
        shown.encode()


def test_an_error_says_what_it_is_about_in_one_line():
    error = ChangedFile(f"{HOSTILE} was changed.", hint=f"chmod 644 {HOSTILE}", left=HOSTILE, culprit=HOSTILE)
    for text in (str(error), error.message, error.hint, *error.args):
        assert text.isprintable()
    assert error.details["culprit"] == HOSTILE, "programs get it as it is"
    assert error.as_dict()["message"].isprintable()
    assert json.loads(json.dumps(error.as_dict()))["details"]["culprit"] == HOSTILE


async def test_a_changed_file_of_a_hostile_name(kernel, tmp_path, capsys):
    name = HOSTILE + "\udcff"
    await kernel.run(f"f = open({name!r}, 'w'); _ = f.write('x'); f.flush()")
    image = await kernel.provisioner.checkpoint()
    (tmp_path / name).write_text("longer")
    where = ["--image-dir", str(tmp_path / "images")]
    for command in (["match", image.id], ["inspect", image.id], ["list"], ["verify", image.id]):
        main([*command, *where])
        printed = capsys.readouterr()
        for line in (printed.out + printed.err).splitlines():
            assert line.isprintable(), command
        main([*command, *where, "--json"])
        json.loads(capsys.readouterr().out)
    with pytest.raises(GpuCkptError) as caught:
        await kernel.provisioner.restore()
    assert caught.value.code == "FILE_CHANGED"
    assert str(caught.value).isprintable()
    assert all(line.isprintable() for line in caught.value.details["mismatches"])
    kernel.client.execute("1", allow_stdin=True)
    question = await kernel.client.get_stdin_msg(timeout=60)
    assert question["content"]["prompt"].isprintable()
    kernel.client.input("y")
    await kernel.settled("running")


async def test_a_child_of_a_hostile_name(kernel):
    code = "import os, time; os.fork() and os._exit(0); os.setsid(); time.sleep(1000)"
    await kernel.run("import os\nos.kill(os.getppid(), 9)\nwhile os.getppid() != 1: pass")  # else it comes along
    await kernel.run(f"import subprocess; subprocess.run([{sys.executable!r}, '-c', {code!r}, {HOSTILE!r}])")
    with pytest.raises(GpuCkptError) as caught:
        await kernel.provisioner.checkpoint()
    assert caught.value.code == "CHILD_PROCESSES"
    assert caught.value.message.isprintable()
    found = await asyncio.to_thread(suspend.findings, kernel.lifecycle.kernel)
    assert all(finding.text.isprintable() for finding in found)
    os.kill(*caught.value.details["pids"], 9)
