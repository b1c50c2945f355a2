"""Kernels of other languages and other releases of ipykernel make one round trip, used by a tab as a notebook is.

Variables, plots, interrupts, ``input()``, sleep and wake, a move to a server with other directories, restart, shutdown.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from live import Server, server, until
from tab import OPENING, Tab, tab

from jupyter_gpu_ckpt.image.keys import Keyring
from jupyter_gpu_ckpt.image.store import Store
from jupyter_gpu_ckpt.transfer.remote import Remote

#: Where `scripts/install-kernels` puts kernels.
INSTALLED = Path(sys.prefix) / "kernels"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@dataclass(frozen=True)
class Language:
    """Cells of a language.

    ``count`` adds 1 to the variable that ``begin`` makes 0, and prints it; ``work`` prints "begun" and takes a minute;
    ``ask`` greets a name that it prompts for; ``plot`` shows data of the type ``shown``.  None: there is no such thing.
    """

    begin: str
    count: str
    plot: str
    work: str | None
    ask: str | None
    shown: str = "image/png"


PYTHON = Language(
    begin="x = 0",
    count="x += 1; print(x)",
    plot=f"import base64\nfrom IPython.display import Image, display\ndisplay(Image(base64.b64decode('{PIXEL}')))",
    work="import time\nprint('begun', flush=True)\nfor _ in range(600): time.sleep(0.1)",
    ask="print('hello', input('name? '))",
)
# xeus-python 0.19 ends at SIGINT, and handles interrupt_request after the cell, with this package or without it.
XEUS = Language(PYTHON.begin, PYTHON.count, PYTHON.plot, None, PYTHON.ask)
RAW = Language(
    PYTHON.begin,
    PYTHON.count,
    plot="class Plot:\n    def _repr_html_(self): return '<b>plot</b>'\nPlot()",
    work=None,
    ask=PYTHON.ask,
    shown="text/html",
)
R = Language(
    begin="x <- 0",
    count="x <- x + 1; cat(x)",
    plot="plot(1:3)",
    work="cat('begun'); flush.console(); for (i in 1:600) Sys.sleep(0.1)",
    ask="cat('hello', readline('name? '))",
)
# "begun" comes from the terminal's foreground job: bash by itself misses an interrupt that comes while it starts one.
BASH = Language(
    begin="x=0",
    count="x=$((x + 1)); echo $x",
    plot=f"echo {PIXEL} | base64 -d | display",
    work="sh -c 'echo begun; exec sleep 60'",
    ask=None,
)


@dataclass(frozen=True)
class Kernel:
    """A kernelspec.

    ``module``: what Python runs with ``-m``; None is R.  ``directory``: where it is below `INSTALLED`, if it is there.
    """

    name: str
    language: Language
    module: str | None
    directory: str = ""
    options: tuple[str, ...] = ()

    def install(self, home: Path) -> None:
        """Write it to the data directory of a server."""
        place = home / "data" / "kernels" / self.name
        place.mkdir(parents=True)
        python = (sys.executable, "-m", str(self.module), *self.options, "-f")
        argv = [*(python if self.module else R_COMMAND), "{connection_file}"]
        env = {"PYTHONPATH": str(INSTALLED / self.directory)} if self.directory else {}
        (place / "kernel.json").write_text(
            json.dumps({"argv": argv, "display_name": self.name, "language": "any", "env": env})
        )

    def missing(self) -> str:
        """Why it cannot be used here."""
        if self.module is not None:
            here = (INSTALLED / self.directory).exists()
            return "" if here else f"other kernels are not installed: scripts/install-kernels {sys.prefix}"
        asked = shutil.which("Rscript") and subprocess.run(["Rscript", "-e", "library(IRkernel)"], capture_output=True)
        here = asked and asked.returncode == 0
        return "" if here else "there is no R kernel: apt-get install r-cran-irkernel, or make torture"


IPYKERNEL, XPYTHON = "ipykernel_launcher", "xpython_launcher"
R_COMMAND = ("R", "--slave", "-e", "IRkernel::main()", "--args")
OTHERS = [
    Kernel("ir", R, None),
    Kernel("xpython", XEUS, XPYTHON, "xeus-python"),
    Kernel("xpython-raw", RAW, XPYTHON, "xeus-python", ("--raw",)),
    Kernel("bash", BASH, "bash_kernel", "bash_kernel"),
]
RELEASES = ("6.29.5", "6.30.1", "6.31.0", "7.0.1", "7.1.0", "7.2.0", "7.3.0")
IPYKERNELS = [Kernel(name, PYTHON, IPYKERNEL, name) for name in (f"ipykernel-{release}" for release in RELEASES)]
IPYKERNELS.append(Kernel("ipykernel-installed", PYTHON, IPYKERNEL))


@pytest.fixture(scope="module")
def near(tmp_path_factory, module_runtime_base, criu_binary) -> Iterator[Server]:
    with _server(tmp_path_factory, "near", module_runtime_base, keep=True) as running:
        yield running


@pytest.fixture(scope="module")
def far(tmp_path_factory, criu_binary) -> Iterator[Server]:
    """Another server: images, sockets and everything else are in other directories."""
    with (
        tempfile.TemporaryDirectory(prefix="gc-") as base,
        _server(tmp_path_factory, "far", Path(base), keep=False) as running,
    ):
        yield running


def _server(factory: pytest.TempPathFactory, name: str, base: Path, *, keep: bool):
    home = factory.mktemp(name)
    for kernel in (*OTHERS, *IPYKERNELS):
        kernel.install(home)
    return server(home, base, config=f"c.GpuCkptProvisioner.keep_image_on_shutdown = {keep}")


class Notebook:
    """A kernel and the tab that uses it."""

    def __init__(self, live: Server, kernel_id: str, open_tab: Tab, language: Language) -> None:
        self.live, self.kernel_id, self._tab, self._language = live, kernel_id, open_tab, language

    def run(self, code: str, on_output: Callable[[str], None] = lambda text: None) -> tuple[dict[str, Any], list[Any]]:
        """Run a cell; its reply and outputs.  A prompt for a name gets Ada."""
        content = {"code": code, "silent": False, "store_history": True, "allow_stdin": True, "stop_on_error": True}
        id = self._tab.send("execute_request", content)
        reply, outputs, idle = None, [], False
        while reply is None or not idle:
            message = self._tab.next()
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != id:
                continue
            if kind == "input_request":
                self._tab.send("input_reply", {"value": "Ada"}, "stdin")
            elif kind == "execute_reply":
                reply = content
            elif kind == "status":
                idle = content["execution_state"] == "idle"
            else:
                outputs.append(message)
                on_output(content.get("text", ""))
        return reply, outputs

    def printed(self, code: str) -> str:
        reply, outputs = self.run(code)
        assert reply["status"] == "ok", (reply, outputs)
        return "".join(each["content"]["text"] for each in outputs if each["msg_type"] == "stream").strip()

    def works(self, count: int) -> None:
        """The variable has its value; plots, questions and interrupts work."""
        language = self._language
        assert self.printed(language.count) == str(count)
        _, outputs = self.run(language.plot)
        assert any(language.shown in each["content"].get("data", {}) for each in outputs), outputs
        if language.ask is not None:
            assert self.printed(language.ask).replace("name? ", "").split() == ["hello", "Ada"]
        if language.work is not None:
            reply, _ = self.run(language.work, self._interrupt)
            assert reply["status"] != "ok"

    def _interrupt(self, text: str) -> None:
        if "begun" in text:
            assert self.live.ask("POST", f"api/kernels/{self.kernel_id}/interrupt").status_code == 204

    def reload(self) -> None:
        """Send what a page sends by itself."""
        for request in OPENING:
            self._tab.send(*request)

    def checkpoint(self) -> None:
        job = self.live.do(self.kernel_id, "checkpoint")
        assert (job["status"], job["error"]) == ("done", None)

    @property
    def state(self) -> str:
        return self.live.get(f"api/kernels/{self.kernel_id}")["gpu_ckpt"]["state"]


@pytest.mark.torture
def test_kernels_of_other_kinds_outlive_their_server(tmp_path, runtime_base, criu_binary):
    """The server is killed; the next one attaches the kernels as they are."""
    home = tmp_path / "home"
    kernels = {}
    for kernel in (*OTHERS, *IPYKERNELS[:1]):
        kernel.install(home)
        if not kernel.missing():
            kernels[kernel.name] = kernel
    with server(home, runtime_base) as first:
        ids = {name: start(first, name) for name in kernels}
        for name, kernel in kernels.items():
            with notebook_of(first, ids[name], kernel) as notebook:
                assert notebook.printed(kernel.language.begin) == ""
                notebook.works(1)
                notebook.checkpoint()
                notebook.works(2)
                until(lambda notebook=notebook: notebook.state == "running")
        first.process.kill()
        first.process.wait()
    with server(home, runtime_base) as second:
        until(lambda: len(second.get("api/kernels")) == len(ids))
        for name, kernel in kernels.items():
            with notebook_of(second, ids[name], kernel) as notebook:
                notebook.works(3)
            assert second.ask("DELETE", f"api/kernels/{ids[name]}").status_code == 204


def start(running: Server, name: str) -> str:
    reply = running.ask("POST", "api/kernels", json={"name": name})
    assert reply.status_code == 201, reply.text
    return reply.json()["id"]


@contextlib.contextmanager
def notebook_of(running: Server, kernel_id: str, kernel: Kernel) -> Iterator[Notebook]:
    with tab(running, kernel_id) as open_tab:
        yield Notebook(running, kernel_id, open_tab, kernel.language)


def moved(near: Server, far: Server, kernel_id: str) -> None:
    """Shut the sleeping kernel down here, move its image, attach it there."""
    assert near.ask("DELETE", f"api/kernels/{kernel_id}").status_code == 204
    here, there = (Store(each.home / "images", Keyring()) for each in (near, far))
    (image,) = [image for image in here.images() if image.manifest.kernel_id == kernel_id]
    depot = Remote(f"file://{far.home}/depot")
    depot.push(image, remove_from=here)
    depot.pull(image.id, there)
    reply = far.ask("POST", f"gpu-ckpt/images/{image.id}/attach")
    assert reply.ok, reply.text


def images_of(running: Server, kernel_id: str) -> list[Any]:
    return [
        image for image in Store(running.home / "images", Keyring()).images() if image.manifest.kernel_id == kernel_id
    ]


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("kernel", OTHERS, ids=lambda kernel: kernel.name)
def test_a_kernel_of_another_kind_makes_the_round_trip(near, far, kernel):
    round_trip(near, far, kernel)


@pytest.mark.sweep(1 / 8)
@pytest.mark.parametrize("kernel", IPYKERNELS, ids=lambda kernel: kernel.name)
def test_another_release_of_ipykernel_makes_the_round_trip(near, far, kernel):
    round_trip(near, far, kernel)


def round_trip(near: Server, far: Server, kernel: Kernel) -> None:
    if reason := kernel.missing():
        pytest.skip(reason)
    language, kernel_id = kernel.language, start(near, kernel.name)
    with notebook_of(near, kernel_id, kernel) as notebook:
        assert notebook.printed(language.begin) == ""
        notebook.works(1)
        preflight = near.get(f"gpu-ckpt/kernels/{kernel_id}/preflight")
        assert preflight["ok"], preflight
        codes = {finding["code"] for finding in preflight["findings"]}
        assert ("NO_AGENT" in codes) == (kernel.module != IPYKERNEL), preflight
        notebook.checkpoint()
        notebook.reload()
        assert notebook.state == "checkpointed"
        notebook.works(2)
        until(lambda: notebook.state == "running")
        notebook.checkpoint()
    moved(near, far, kernel_id)
    with notebook_of(far, kernel_id, kernel) as notebook:
        notebook.works(3)
        assert far.ask("POST", f"api/kernels/{kernel_id}/restart").status_code == 200
    with notebook_of(far, kernel_id, kernel) as notebook:
        assert notebook.printed(language.begin) == ""
        assert notebook.printed(language.count) == "1"
        notebook.checkpoint()
    assert far.ask("DELETE", f"api/kernels/{kernel_id}").status_code == 204
    until(lambda: images_of(far, kernel_id) == [])
