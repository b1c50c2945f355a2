"""Two notebooks that share a GPU, in the browser: who has a turn, who waits and for how long, and what runs meanwhile.

The GPU is `fake_host`'s, its memory that of the driver's double, with the real library; all else is real.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from desktop import BADGE, STATUS, lab, write_notebook
from fake_gpus import GPU, SUPPORT
from film import PAUSE, Film, for_docs

from jupyter_gpu_ckpt.testing.fake_host import allocation_cell

sys.path.append(str(Path(__file__).resolve().parents[1] / "cuda" / "native"))
from programs import build, build_doubles, compiler
from sharing_kernels import CELL, MIB

CONFIG = f"""
import os, sys
from pathlib import Path
sys.path.append({SUPPORT!r})
from jupyter_gpu_ckpt.cuda import fastpath
from jupyter_gpu_ckpt.kernel import engine
from jupyter_gpu_ckpt.sharing.policy import Rules
from jupyter_gpu_ckpt.lifecycle import context
from jupyter_gpu_ckpt.testing.fake_host import install
from library_accounting import Accounting
context.FastPath = Accounting
images = Path(c.GpuCkptProvisioner.image_dir)
install({{{GPU!r}: {100 * MIB}}}, images)
engine.shared_exchange(engine.shared_engine(images).gpus).rules = Rules({{rules}})
fastpath.has_driver = lambda: True
fastpath.preload = lambda: fastpath.Preload(Path({{library!r}}))
os.environ["LD_LIBRARY_PATH"] = {{doubles!r}}
c.GpuCkptProvisioner.gpu_sharing = "turns"
"""
#: A cell that computes until the test has seen all that there is to see meanwhile, however busy the machine is.
LONG = "import os; n = 0\nwhile not os.path.exists('enough'): n += compute(0.2)\nprint('trained', intact())"
SHORT = 0.5
#: Turns of which a test sees each part; and those of the animation for docs/.
LONG_TURNS, SHORT_TURNS = "first_turn=600.0, turn=600.0, cut=600.0", "first_turn=4.0, turn=4.0, cut=1.0"
#: Opens a notebook beside the one that is there.
BESIDE = """
path => window.jupyterapp.commands.execute('docmanager:open', { path, options: { mode: 'split-right' } })
"""


@pytest.fixture(scope="module", params=[LONG_TURNS])
def jupyter(request, tmp_path_factory, base, chromium, criu_binary):
    if compiler() is None:
        pytest.skip("there is no C compiler on this machine")
    doubles = build_doubles()
    library = build(doubles).library
    found = {"library!r": repr(str(library)), "doubles!r": repr(str(doubles)), "rules": request.param}
    config = CONFIG
    for name, value in found.items():
        config = config.replace(f"{{{name}}}", value)
    with lab(tmp_path_factory.mktemp("turns"), base, config=config) as running:
        yield running


def kernel_of(jupyter, name: str) -> str:
    return next(each["kernel"]["id"] for each in jupyter.get("api/sessions") if each["path"] == name)


def give_memory(jupyter, name: str, value: int) -> str:
    """Give a notebook's kernel memory that fits beside no other's; return its id."""
    kernel_id = kernel_of(jupyter, name)
    jupyter.run(kernel_id, CELL.format(bytes=60 * MIB, value=value))
    jupyter.run(kernel_id, allocation_cell({GPU: 68 * MIB}))
    return kernel_id


def test_the_queue_of_a_shared_gpu_and_a_kernel_off_it(desktop, jupyter):
    with desktop.window(jupyter, width=1440) as window:
        tab = window.tab(write_notebook(jupyter, "train.ipynb", LONG, "print(6 * 7)"))
        page = tab.page
        tab.wait_for_phase("running")
        train = give_memory(jupyter, "train.ipynb", 1)
        jupyter.do(train, "suspend")
        tab.open(write_notebook(jupyter, "plot.ipynb", f"n = compute({SHORT}); print('plotted', intact())", "print(1)"))
        tab.wait_for_phase("running")
        plot = give_memory(jupyter, "plot.ipynb", 2)
        page.locator('li[data-id="gpu-ckpt-panel"]').click()
        panel = page.locator("#gpu-ckpt-panel")
        panel.get_by_text("68.0 MiB of 100 MiB in use").wait_for()

        # The other one's cell takes the idle one's memory; that runs on.
        tab.open("train.ipynb")
        tab.run(0)
        tab.open("plot.ipynb")
        tab.wait_for_phase("off_gpu")
        tab.wait_for_tooltip("off the GPU (others use it)")
        page.locator(BADGE, has_text="68.0 MiB off the GPU").wait_for()
        panel.locator("li", has_text="plot.ipynb").get_by_text("off the GPU (others use it)").wait_for()
        tab.run(1)
        tab.wait_for_output(1, "1")
        tab.wait_for_phase("off_gpu")
        assert jupyter.get(f"gpu-ckpt/kernels/{plot}")["off_gpu"]

        # Its cell that computes waits, and its place is shown wherever the user looks.
        tab.run(0)
        status = page.locator(STATUS, has_text=re.compile(r"^waiting for GPU 0: next, about .+$"))
        status.wait_for()
        queue = panel.locator(".jp-gpuCkpt-queue")
        queue.get_by_text(re.compile(r"^train\.ipynb computes for .* \(68\.0 MiB\)( · .+ left)?$")).wait_for()
        queue.get_by_text(re.compile(r"^1\. plot\.ipynb waits for .* \(68\.0 MiB\)$")).wait_for()
        panel.locator("li", has_text="plot.ipynb").get_by_text("waiting for GPU 0: next").wait_for()
        tab.wait_for_tooltip("waiting for GPU 0: next")
        assert page.locator(".jp-gpuCkpt-waking").count() == 0, "no cell waits for the kernel"
        tab.picture("turns-waiting")

        def with_memory_of_a_silent_server(route):
            response = route.fetch()
            document = response.json()
            for gpu in document["gpus"]:
                gpu["sharing"]["silent_bytes"] += 5 * MIB
            route.fulfill(response=response, json=document)

        page.route("**/gpu-ckpt/gpus*", with_memory_of_a_silent_server)
        queue.get_by_text("5.0 MiB belong to a server that does not answer.").wait_for()
        page.unroute_all()

        # Then it has its turn, and the other one is off the GPU.
        (jupyter.home / "work" / "enough").touch()
        tab.wait_for_output(0, "plotted True")
        tab.wait_for_phase("running")
        status.wait_for(state="hidden")
        queue.wait_for(state="hidden")
        tab.open("train.ipynb")
        tab.wait_for_output(0, "trained True")
        tab.wait_for_phase("off_gpu")
        tab.picture("turns-over")
        tab.quiet()


@for_docs
@pytest.mark.parametrize("jupyter", [SHORT_TURNS], indirect=True)
def test_film_of_two_notebooks_that_share_a_gpu(desktop, jupyter):
    train = "for epoch in range(1, 9):\n    train(1.0)\n    print('epoch', epoch)\nprint('intact:', intact())"
    score = "score(3.0)\nprint('scored, intact:', intact())"
    with desktop.window(jupyter, width=1200, height=480) as window:
        tab = window.tab(write_notebook(jupyter, "train.ipynb", train))
        page = tab.page
        tab.wait_for_phase("running")
        jupyter.run(give_memory(jupyter, "train.ipynb", 1), "train = compute")
        jupyter.do(kernel_of(jupyter, "train.ipynb"), "suspend")
        page.evaluate(BESIDE, write_notebook(jupyter, "score.ipynb", "print('no GPU needed:', 6 * 7)", score))
        right = page.locator(".jp-NotebookPanel", has_text="score(3.0)")
        right.locator('.jp-gpuCkpt-button [data-phase="running"]').wait_for()
        jupyter.run(give_memory(jupyter, "score.ipynb", 2), "score = compute")
        page.locator('li[data-id="gpu-ckpt-panel"]').click()
        page.locator("#gpu-ckpt-panel").get_by_text("68.0 MiB of 100 MiB in use").wait_for()
        page.keyboard.press("Control+B")  # the side bar takes a third of the window
        page.locator("#jp-left-stack").wait_for(state="hidden")

        def run(panel, index):
            panel.locator(".jp-CodeCell").nth(index).locator(".cm-content").click()
            page.keyboard.press("Control+Enter")

        film = Film(tab)
        film.frame(PAUSE)
        run(page.locator(".jp-NotebookPanel", has_text="train(1.0)"), 0)
        film.until(".jp-OutputArea-output", "epoch 2")
        run(right, 0)
        film.until(".jp-OutputArea-output", "no GPU needed: 42")
        film.frame(PAUSE // 2)
        run(right, 1)
        film.until(".jp-OutputArea-output", "scored, intact: True")
        film.frame(PAUSE)
        film.until(".jp-OutputArea-output", "epoch 8")
        film.frame(2 * PAUSE)
        film.save("turns")
        tab.quiet()
