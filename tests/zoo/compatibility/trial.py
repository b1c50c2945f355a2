"""Tries one row: a real kernel is suspended, checkpointed, woken here and elsewhere, and its values compared.

A program of its own, so that any user can run it::

    python trial.py DIRECTORY WHO KEY...

It prints one line of JSON for each row.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "nodes"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import Notebook, notebook
from host import Host

from compatibility.row import Row
from compatibility.rows import rows
from jupyter_gpu_ckpt.errors import GpuCkptError
from jupyter_gpu_ckpt.image.store import Store
from jupyter_gpu_ckpt.transfer.remote import Remote

TESTS = Path(__file__).resolve().parents[2]
#: Seconds that a cell may take on a machine that has other things to do.
CELL = 200
DEADLINES = {"drain_timeout": 60.0, "wake_timeout": 60.0, "start_timeout": 60.0}
#: Where a cell hangs is written down.
WATCHED = f"""
def watch():
    import faulthandler
    faulthandler.cancel_dump_traceback_later()
    watch.to.close()
watch.to = open("stacks", "w")
__import__("faulthandler").dump_traceback_later({CELL - 10}, file=watch.to)
"""
VALUE = "__import__('json').dumps(seen, default=repr)"


class Lost(Exception):
    """A kernel did not come back, or not as it was."""


class _SameHost(Host):
    """Another server on this host, with socket directories of its own: an ordinary user cannot make a second host."""

    def __init__(self, shared: Path, own: Path, base: Path) -> None:
        self.name, self.shared, self.log = "beside", shared, own / "log"
        self._log = self.log.open("wb")
        self._process = subprocess.Popen(
            [sys.executable, str(TESTS / "nodes" / "server.py"), str(shared), str(base)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=shared,
        )


@contextlib.contextmanager
def elsewhere(place: Path, another_host: bool) -> Iterator[Host]:
    """The destination of a moved kernel, with an image directory of its own: another host, or another server here."""
    shared, own = place / "far", place / "far-own"
    own.mkdir()
    base = Path(tempfile.mkdtemp(prefix="gc-"))
    host: Host
    if another_host:
        host = Host("far", shared, own, uptime=1000, boot=str(uuid.uuid4()))
    else:
        host = _SameHost(shared, own, base)
    try:
        yield host
    finally:
        host.close()
        shutil.rmtree(base, ignore_errors=True)


async def value(kernel: Notebook, row: Row) -> str:
    """Return the value that the row's check sees now."""
    printed = await kernel.run(f"{row.check}\nprint('\\n' + {VALUE})", CELL)
    return printed.splitlines()[-1]


async def same(kernel: Notebook, row: Row, before: str, when: str) -> None:
    """Raise `Lost` where the row's check sees something else than ``before``."""
    try:
        now = await value(kernel, row)
    except Exception as error:
        raise Lost(f"{when}: {error}") from error
    if now != before:
        raise Lost(f"{when}: was {before}, is {now}")


async def woken(kernel: Notebook, verb: str) -> None:
    """Resume or restore.  Raises `Lost`."""
    try:
        await (kernel.provisioner.resume if verb == "resume" else kernel.provisioner.restore)()
    except GpuCkptError as error:
        raise Lost(f"{verb}: {error.code}: {error} {error.details}"[:3000]) from error


async def refusal(move: Any) -> dict[str, str] | None:
    """Do what is perhaps refused; the refusal's code and text, or None."""
    try:
        await move()
    except GpuCkptError as error:
        return {"code": error.code, "text": str(error)}
    return None


async def moved(kernel: Notebook, row: Row, before: str, place: Path, who: str) -> dict[str, str]:
    """Push the image of a kernel whose server ends, pull it elsewhere, and wake it there.  Raises `Lost`.

    Return what is found: "yes", or the code with which another host refuses an image that it cannot restore there.
    """
    image = kernel.lifecycle.image
    identity = kernel.provisioner.kernel_id
    kernel.client.stop_channels()
    await kernel.provisioner.detach()
    depot = Remote(f"file://{place}/depot")
    depot.push(image)  # a copy: what is here is deleted with the kernel
    # NVML does not know the processes of a pid namespace by their ids there, which no second machine has.
    with elsewhere(place, another_host=who == "root" and not row.gpu) as host:
        depot.pull(image.id, Store(place / "far" / "images"))
        for command in (["start", identity, "tcp"], ["restore"]):
            answer = host.ask(*command)
            if answer.get("error") == "PORT_TAKEN":  # an address that the other host does not have
                Store(place / "far" / "images").get(image.id)  # it is kept
                return {"moved": answer["error"], "text": answer["message"]}
            if "error" in answer:
                raise Lost(
                    f"{command[0]} elsewhere: {answer['error']}: {answer['message']} {host.log.read_text()[-2000:]}"
                )
        host.send("evaluate", VALUE, row.check)
        now = str(ast.literal_eval(host.hear(CELL)["value"]))
    if now != before:
        raise Lost(f"moved: was {before}, is {now}")
    return {"moved": "yes"}


async def tried(row: Row, place: Path, who: str) -> dict[str, Any]:
    """Return the result of each step: "yes", the code of a refusal, or "" where a step before it was refused."""
    found: dict[str, Any] = {"suspend": "", "checkpoint": "", "wake": "", "moved": "", "text": ""}
    base = Path(tempfile.mkdtemp(prefix="gc-"))
    try:
        async with notebook(place, base, raw_output=place / "raw-output", **DEADLINES) as kernel:
            if kernel.lifecycle is None:
                raise RuntimeError("the kernel was started plainly: `jupyter gpu-ckpt doctor` says why")
            try:
                await kernel.run(WATCHED)
                await kernel.run(row.setup, CELL)
                await kernel.run("watch()")
            except TimeoutError as error:
                raise RuntimeError(f"{error}\n{(place / 'stacks').read_text()[-2500:]}") from error
            before = await value(kernel, row)
            await same(kernel, row, before, "before anything was done")
            found["value"] = before
            if no := await refusal(kernel.provisioner.suspend):
                found |= {"suspend": no["code"], "text": no["text"]}
            else:
                await woken(kernel, "resume")
                found["suspend"] = "yes"
            await same(kernel, row, before, "after the suspend")
            if no := await refusal(kernel.provisioner.checkpoint):
                await same(kernel, row, before, f"after the refusal {no['code']}")
                return found | {"checkpoint": no["code"], "text": no["text"]}
            found["checkpoint"] = "yes"
            await woken(kernel, "restore")
            await same(kernel, row, before, "after the wake")
            found["wake"] = "yes"
            if no := await refusal(kernel.provisioner.checkpoint):
                await same(kernel, row, before, f"after the refusal {no['code']}")
                raise Lost(f"the second checkpoint was refused: {no}")
            found |= await moved(kernel, row, before, place, who)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return found


async def outcome(row: Row, place: Path, who: str) -> dict[str, Any]:
    """`tried`, with ``lost`` where something was, and ``unmade`` where the row's own cells failed."""
    try:
        return await asyncio.wait_for(tried(row, place, who), 500)
    except Lost as error:
        return {"lost": str(error)}
    except Exception as error:
        return {"unmade": f"{type(error).__name__}: {error}"[-3000:]}


def main(place: Path, who: str, keys: list[str]) -> None:
    known = rows()
    for key in keys:
        work = place / key
        (work / "far").mkdir(parents=True)
        os.environ["JUPYTER_GPU_CKPT_KEYS"] = str(work / "far" / "keys")  # both hosts' keys
        found = asyncio.run(outcome(known[key], work, who))
        print(json.dumps({"key": key, "versions": known[key].versions(), **found}), flush=True)
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
    os._exit(0)
