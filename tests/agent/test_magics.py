"""%gpu_checkpoint and %gpu_memory, in real kernels that are checkpointed and restored."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from harness import DAEMON, END_DAEMON, CellFailed, notebook, until
from nbclient import NotebookClient

from jupyter_gpu_ckpt.agent.magics import PARSERS, seconds_in
from jupyter_gpu_ckpt.errors import CriuMissing
from jupyter_gpu_ckpt.kernel import provisioner

EXAMPLE = Path(__file__).resolve().parents[2] / "notebooks" / "magics.ipynb"

# Stands for an array of CuPy, Numba or RMM.
ARRAY = """
class Array:
    def __init__(self, address, count=1 << 20):
        self.address, self.count = address, count
    @property
    def __cuda_array_interface__(self):
        return {"shape": (self.count,), "typestr": "<f4", "data": (self.address, False), "version": 3}
"""


async def said(kernel: Any, code: str) -> tuple[str, str, dict[str, Any]]:
    """stdout, stderr and the reply of a cell, whatever became of it."""
    streams = {"stdout": "", "stderr": ""}

    def collect(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream":
            streams[message["content"]["name"]] += message["content"]["text"]

    reply = await kernel.client.execute_interactive(code, timeout=60, output_hook=collect, allow_stdin=False)
    return streams["stdout"], streams["stderr"], reply["content"]


def done(kernel: Any) -> list[str]:
    return [event.step for event in kernel.steps.completed()]


async def test_the_kernel_is_checkpointed_after_the_cell_and_woken_by_the_next(kernel):
    printed = await kernel.run("x = 41\n%gpu_checkpoint\nx += 1")
    assert printed.startswith("Checkpoint after this cell: about ")
    await kernel.settled("checkpointed")
    assert await kernel.run("print(x)") == "42"
    assert await kernel.run("import sys; print('jupyter_gpu_ckpt' in sys.modules)") == "False"


async def test_a_client_that_sends_the_next_cell_at_once_finds_the_kernel_gone(kernel):
    """Nbclient and papermill do so: between the two cells there is no time but what the gate makes."""
    for number in range(3):
        await kernel.run("%gpu_checkpoint")
        assert await kernel.run(f"print({number})") == str(number)
        await kernel.settled("running")
        assert done(kernel).count("discard_image") == number + 1


async def test_suspend_keeps_the_process(kernel):
    pid = kernel.provisioner.pid
    await kernel.run("x = 1\n%gpu_checkpoint --suspend")
    await kernel.settled("suspended")
    assert await kernel.run("print(x)") == "1"
    assert kernel.provisioner.pid == pid


async def test_status_is_answered_while_the_cell_runs_and_changes_nothing(kernel):
    await kernel.run(ARRAY + "weights = Array(1); history = [Array(2, 10)]")
    text = await kernel.run("%gpu_checkpoint --status\nprint('after')")
    facts = {line[:13].strip(): line[13:] for line in text.splitlines()}
    assert facts["state"] == "running" and facts["checkpoint"] == "possible" and facts["GPU memory"] == "none"
    assert facts["image"].startswith("about ") and "s to come back" in facts["time"]
    assert "weights" in text and "4.0 MiB" in text and "history[0]" in text
    assert kernel.state == "running" and done(kernel) == []


async def test_from_an_async_cell_and_from_a_function(kernel):
    assert "possible" in await kernel.run("import asyncio; await asyncio.sleep(0)\n%gpu_checkpoint --status")
    await kernel.run("def sleep():\n    get_ipython().run_line_magic('gpu_checkpoint', '')\nsleep()")
    await kernel.settled("checkpointed")


async def test_what_preflight_refuses_fails_in_the_cell_with_code_and_hint(kernel):
    await kernel.run(DAEMON)
    _, _, reply = await said(kernel, "%gpu_checkpoint")
    assert reply["ename"] == "RequestRefused"
    assert reply["traceback"][0].startswith("CHILD_PROCESSES: The kernel has 1 child process")
    assert reply["traceback"][-1].startswith("Hint: End these child processes")
    assert len(reply["traceback"]) == 3, "no stack of ours"
    assert "not now" in await kernel.run("%gpu_checkpoint --status")
    caught = "try:\n    get_ipython().run_line_magic('gpu_checkpoint', '')\nexcept Exception as e:\n    print(e.code)"
    assert await kernel.run(caught) == "CHILD_PROCESSES"
    await kernel.run(f"{END_DAEMON}%gpu_checkpoint")
    await kernel.settled("checkpointed")


async def test_a_failure_after_the_cell_is_reported_once_in_the_next_cell(kernel):
    def fail(event: Any) -> None:
        if (event.kind, event.step) == ("started", "dump"):
            raise OSError("as asked")

    kernel.provisioner.faults.append(fail)
    await kernel.run("x = 1\n%gpu_checkpoint")
    await until(lambda: any(event.kind == "failed" for event in kernel.steps.events))
    await kernel.settled("running")
    await until(lambda: kernel.provisioner.gate.state == "open")
    printed, complained, reply = "", "", {}
    deadline = time.monotonic() + 60  # the kernel is notified after it serves its clients again
    while not complained and time.monotonic() < deadline:
        printed, complained, reply = await said(kernel, "print(x)")
    assert (printed, reply["status"]) == ("1\n", "ok")
    assert complained.startswith("This kernel was not put to sleep.\nINTERNAL: OSError: as asked\n")
    assert "the kernel runs on" in complained
    assert (await said(kernel, "print(x)"))[1] == ""
    assert "last failure INTERNAL" in await kernel.run("%gpu_checkpoint --status")


async def test_dropped_variables_are_released_and_the_rest_is_saved(kernel):
    await kernel.run(ARRAY + "weights, scratch, other = Array(1), Array(2), 7")
    printed = await kernel.run("%gpu_checkpoint --drop scratch")
    assert printed.splitlines()[0].startswith(
        "Released, not saved: scratch, a __main__.Array <f4 [1048576] on cuda (4.0 MiB)"
    )
    await kernel.settled("checkpointed")
    assert await kernel.run("print(weights.address, other)") == "1 7"
    with pytest.raises(CellFailed, match=r"`scratch` was released by %gpu_checkpoint at .* Create it again"):
        await kernel.run("scratch.address")
    assert "released     scratch" in await kernel.run("%gpu_checkpoint --status")
    await kernel.run("scratch = Array(3)")
    assert await kernel.run("print(scratch.address)") == "3"


async def test_keep_releases_all_other_device_variables_and_only_those(kernel):
    await kernel.run(ARRAY + "a, b, c, n = Array(1), [Array(2)], Array(3), 7\nwith_a = {'a': a}")
    printed = await kernel.run("%gpu_checkpoint --suspend --keep a,c")
    assert printed.startswith("Released, not saved: b, a ") and printed.count("Released, not saved") == 1
    await kernel.settled("suspended")
    assert await kernel.run("print(a.address, c.address, n, with_a['a'] is a)") == "1 3 7 True"
    assert "released at" in await kernel.run("print(repr(b))")


async def test_nothing_is_released_when_the_kernel_stays(kernel):
    await kernel.run(ARRAY + "scratch = Array(2)")

    def fail(event: Any) -> None:
        if (event.kind, event.step) == ("started", "drain"):
            raise OSError("as asked")

    kernel.provisioner.faults.append(fail)
    await kernel.run("%gpu_checkpoint --drop scratch")
    await until(lambda: any(event.kind == "failed" for event in kernel.steps.events))
    kernel.provisioner.faults.remove(fail)
    assert await kernel.run("print(scratch.address)") == "2"
    await kernel.provisioner.checkpoint()  # by anybody else, after another cell: the wish has lapsed
    assert await kernel.run("print(scratch.address)") == "2"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--bogus", "unrecognized arguments: --bogus"),
        ("--save ä ö", 'unrecognized arguments: ö; a name of several words needs quotes, as in "first try"'),
        ("--drop nothere", "There is no variable 'nothere'"),
        ("--drop number", "'number' has no device memory"),
        ("--keep a --drop a", "--keep or --drop, not both"),
        ("--status --suspend", "--delete alone"),
        ("--save a --drop a", "--delete alone"),
        ("--branch a --delete b", "--delete alone"),
        ("--branch --suspend", "--delete alone"),
        ("--save a --accept-changed-files", "are for --branch"),
        ("--save a --gpu 1", "--gpu is for --branch and --back"),
        ("--branch a --gpu one", "invalid int value: 'one'"),
        ("--save ''", "a value that is not empty"),
        ("--delete ''", "a value that is not empty"),
        ("--save a --files then", "--files goes with --back"),
        ("--back a --files log=soon", "'log=soon' is no choice of files"),
        ("--protect soon", "'soon' is not a duration"),
        ("--drop 'a", "No closing quotation"),
    ],
)
async def test_wrong_options_are_one_line(kernel, options, complaint):
    await kernel.run(ARRAY + "number, a = 1, Array(1)")
    _, complained, reply = await said(kernel, f"%gpu_checkpoint {options}")
    assert reply["ename"] == "UsageError"
    assert complaint in complained and len(complained.splitlines()) == 1
    assert kernel.state == "running"


async def test_a_protection_reaches_the_policies_and_ends(kernel):
    agent_requests = kernel.provisioner.agent_requests
    assert agent_requests.protection() is None
    assert "before" in await kernel.run("%gpu_checkpoint --protect 2h")
    assert agent_requests.protection() == pytest.approx(time.time() + 7200, abs=30)
    assert "protected" in await kernel.run("%gpu_checkpoint --status")
    await kernel.run("%gpu_checkpoint\n")  # in so many words: goes all the same
    await kernel.settled("checkpointed")
    day = time.strftime("%Y-%m-%d", time.localtime(time.time() + 365 * 86400))
    assert f" before {day} " in await kernel.run("%gpu_checkpoint --protect 365d")
    assert f"until {day} " in await kernel.run("%gpu_checkpoint --status")
    await kernel.run("%gpu_checkpoint --protect off")
    assert agent_requests.protection() is None


async def test_the_list_shows_the_images_of_others(tmp_path, runtime_base, criu_binary):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    images = str(tmp_path / "images")
    async with (
        notebook(tmp_path / "one", runtime_base, image_dir=images) as one,
        notebook(tmp_path / "two", runtime_base, image_dir=images) as two,
    ):
        assert await two.run("%gpu_checkpoint --list") == "There are no images."
        image = await one.provisioner.checkpoint()
        head, row = (await two.run("%gpu_checkpoint --list")).splitlines()
        assert head.split()[0] == "image" and row.split()[:2] == [image.id, "python3"] and "MiB" in row


async def test_gpu_memory_is_a_table_by_variable(kernel):
    assert await kernel.run("%gpu_memory") == "No variable has device memory."
    await kernel.run(ARRAY + "small, large = Array(1, 10), {'inner': Array(2)}")
    head, first, second, _, total = (await kernel.run("%gpu_memory")).splitlines()
    assert head.split() == ["variable", "type", "dtype", "shape", "device", "bytes"]
    assert first.split()[0] == "large['inner']" and first.endswith("4.0 MiB") and second.split()[0] == "small"
    assert total == "4.0 MiB in 2 tensors."
    assert "1 not shown" in await kernel.run("%gpu_memory --limit 1")


async def test_tab_completes_options_variables_and_times(kernel):
    await kernel.run(ARRAY + "weights, wheels, number = Array(1), Array(2), 3")

    async def complete(code: str) -> list[str]:
        reply = await kernel.client.complete(code, reply=True, timeout=60)
        return reply["content"]["matches"]

    assert {"--suspend", "--status", "--list", "--keep", "--drop", "--protect"} <= set(
        await complete("%gpu_checkpoint --")
    )
    assert "--suspend" in await complete("%gpu_checkpoint --su")  # jedi takes it for `- -sum` as well
    assert {"weights", "wheels"} <= set(await complete("%gpu_checkpoint --drop w"))
    assert "wheels" in await complete("%gpu_checkpoint --keep weights,wh")
    assert {"2h", "off"} <= set(await complete("%gpu_checkpoint --protect "))
    await kernel.provisioner.save("first try")
    for option in ("--back", "--branch", "--delete", "--compare"):
        assert "'first try'" in await complete(f"%gpu_checkpoint {option} "), option
    assert "--limit" in await complete("%gpu_memory --l")
    assert any("gpu_checkpoint" in match for match in await complete("%gpu_ch"))


@pytest.mark.parametrize("magic", sorted(PARSERS))
async def test_help_names_every_option(kernel, magic):
    text = await kernel.run(f"%{magic} --help")
    assert all(option in text for option in PARSERS[magic].options) and text.startswith(f"usage: %{magic}")
    reply = await kernel.client.inspect(f"%{magic}", reply=True, timeout=60)
    assert f"usage: %{magic}" in json.dumps(reply["content"])


@pytest.mark.parametrize(
    ("text", "seconds"), [("45s", 45), ("30m", 1800), ("1h30m", 5400), ("1d", 86400), ("off", 0), ("0", 0)]
)
def test_times(text: str, seconds: int) -> None:
    assert seconds_in(text) == seconds


def test_a_kernel_without_a_server_of_ours_says_so_before_it_waits_for_ever(start: Callable[..., Any]) -> None:
    kernel = start()
    kernel.run("import sys; sys.modules['_jupyter_gpu_ckpt_agent.server_channel'].DEADLINE = 0.2")
    printed = kernel.run(
        "try:\n    get_ipython().run_line_magic('gpu_checkpoint', '')\nexcept Exception as e:\n    print(e.code)"
    )
    assert printed == "KERNEL_SILENT"
    assert kernel.run("%gpu_memory") == "No variable has device memory."


def test_magics_go_with_the_agent(start: Callable[..., Any]) -> None:
    kernel = start()
    kernel.run("%unload_ext _jupyter_gpu_ckpt_agent")
    assert kernel.run("print('gpu_memory' in get_ipython().magics_manager.magics['line'])") == "False"


async def test_the_example_runs_with_as_many_checkpoints_as_it_says(kernel):
    """By nbclient, which sends a cell as soon as the one before has ended."""
    example = nbformat.read(EXAMPLE, as_version=4)
    client = NotebookClient(example, km=kernel.manager, timeout=60)
    client.kc = kernel.client
    client.reset_execution_trackers()
    for number, cell in enumerate(example.cells):
        await client.async_execute_cell(cell, number)
    await kernel.settled("running")
    assert done(kernel).count("criu_restore") == 2 and done(kernel).count("cuda_suspend") == 3
    printed = "".join(output.get("text", "") for cell in example.cells for output in cell.get("outputs", ()))
    assert "ReleasedError: `scratch` was released" in printed and "as if nothing had happened" in printed


async def test_where_the_host_cannot_the_magics_say_why(tmp_path, runtime_base, monkeypatch):
    def unfit(_: Any) -> Any:
        raise CriuMissing("No CRIU of a version that works was found.")

    monkeypatch.setattr(provisioner, "shared_engine", unfit)
    async with notebook(tmp_path, runtime_base) as kernel:
        assert kernel.lifecycle is None
        for option in ("", "--suspend", "--status", "--list", "--protect 1h"):
            _, _, reply = await said(kernel, f"%gpu_checkpoint {option}")
            assert reply["traceback"][0] == "CRIU_MISSING: No CRIU of a version that works was found."
            assert "install-criu" in reply["traceback"][-1]
        assert await kernel.run("%gpu_memory") == "No variable has device memory."
        assert await kernel.run("import os; print([n for n in os.environ if 'GPU_CKPT_PLAIN' in n])") == "[]"
