"""Children of a kernel that comes back run no sooner than its image is not needed any more: what they write counts."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time

import pytest
from harness import notebook, until

from jupyter_gpu_ckpt.trace import StepEvent

#: A child that changes an open file all the time, and the process that it shares its file with.
CHILD = """
_code = "import os, sys, time\\nwhile True:\\n    os.write(1, b'x')\\n    time.sleep(0.002)"
beats = open("beats", "wb")
child = subprocess.Popen([sys.executable, "-c", _code], stdout=beats)
"""
#: The kernel answers nobody without a child.
DEPENDS = """
_asks, _answers = os.pipe(), os.pipe()
if os.fork() == 0:
    while os.read(_asks[0], 1):
        os.write(_answers[1], b"x")
    os._exit(0)
_handlers = get_ipython().kernel.shell_handlers
_without = _handlers["comm_info_request"]
def _with_child(*arguments):
    os.write(_asks[1], b"x")
    os.read(_answers[0], 1)
    return _without(*arguments)
_handlers["comm_info_request"] = _with_child
"""


def size_of(subject) -> int:
    return (subject.directory / "beats").stat().st_size


async def test_children_run_when_the_wake_is_final_and_not_before(subject):
    await subject.run(CHILD)
    await until(lambda: size_of(subject) > 0)
    await subject.provisioner.checkpoint()
    before, seen = size_of(subject), []

    def sink(event: StepEvent) -> None:
        if event.kind == "started" and event.step in ("connect", "thaw", "release"):
            time.sleep(0.1)
            seen.append(size_of(subject))

    subject.provisioner.sinks.append(sink)
    await subject.provisioner.restore()
    assert seen == [before] * 3
    await until(lambda: size_of(subject) > before)
    assert await subject.run("print(child.poll())") == "None"


@pytest.mark.parametrize("step", ["connect", "thaw"])
async def test_a_kernel_that_is_killed_as_it_comes_back_finds_its_files_as_they_were(subject, step):
    """Also at the second try, which comes by itself: none of the attempts has changed what the image needs."""
    await subject.run(CHILD)
    await until(lambda: size_of(subject) > 0)
    await subject.provisioner.checkpoint()
    before, killed = size_of(subject), []

    def sink(event: StepEvent) -> None:
        if (event.kind, event.step) == ("started", step):
            time.sleep(0.1)
            os.kill(subject.capsule.host_pid, signal.SIGKILL)
            killed.append(step)

    subject.provisioner.sinks.append(sink)
    error = await subject.fails(subject.provisioner.restore, "CAPSULE_GONE")
    subject.provisioner.sinks.remove(sink)
    assert killed == [step] * 2
    await subject.stays_away(error)
    assert size_of(subject) == before
    await subject.wakes()
    await until(lambda: size_of(subject) > before)


async def test_a_kernel_that_needs_a_child_to_answer_has_it_at_the_second_try(
    tmp_path, runtime_base, criu_binary, caplog
):
    async with notebook(tmp_path, runtime_base, wake_timeout=6.0) as kernel:
        await kernel.run(f"import os\nx = 41\n{DEPENDS}")
        await kernel.provisioner.checkpoint()
        await kernel.provisioner.restore()
        assert await kernel.run("print(x)") == "41"
    assert [record.message for record in caplog.records if "it is woken once more" in record.message] != []


async def test_a_kernel_that_a_script_starts_is_not_kept_waiting(
    tmp_path, runtime_base, criu_binary, monkeypatch, caplog
):
    """The process that serves the clients is a child, of a shell."""
    caplog.set_level(logging.WARNING)
    place = tmp_path / "kernels" / "script"
    place.mkdir(parents=True)
    argv = ["sh", "-c", '"$@"; exit', "sh", sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (place / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "script", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    async with notebook(tmp_path, runtime_base, kernel_name="script") as kernel:
        await kernel.run("import os\nx = 41")
        assert int(await kernel.run("print(os.getppid())")) == kernel.lifecycle.capsule.inner_pid
        await kernel.provisioner.checkpoint()
        await kernel.provisioner.restore()
        assert await kernel.run("print(x)") == "41"
    assert [record.message for record in caplog.records if "failed" in record.message] == []
