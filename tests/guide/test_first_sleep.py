"""The way of a new user: the front page's commands and the tutorial's cells, with the wheel of a release.

In a real JupyterLab, with a browser; at the end the package is uninstalled, and nothing of it is left.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from desktop import Desktop, find_chromium, lab, write_notebook

REPOSITORY = Path(__file__).resolve().parents[2]
FRONT_PAGE = REPOSITORY / "docs/index.md"
PAGE = REPOSITORY / "docs/first-sleep.md"

pytestmark = [pytest.mark.torture, pytest.mark.timeout(2400)]


def commands(page: Path) -> list[str]:
    """Return the commands of a page's first block."""
    block = re.search(r"```console\n(.*?)```", page.read_text(), re.DOTALL)
    assert block is not None
    return re.findall(r"^ *\$ (.+)$", block[1], re.MULTILINE)


def cells() -> list[str]:
    return [
        re.sub("^ {3}", "", text, flags=re.M).strip()
        for text in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    ]


@pytest.fixture
def place(tmp_path, monkeypatch) -> Iterator[Path]:
    """A home in which nothing is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [*os.environ]:
        if name.startswith(("JUPYTER", "XDG_", "IPYTHON", "VIRTUAL_ENV")):
            monkeypatch.delenv(name)
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    yield tmp_path


def files_of_ours(place: Path) -> list[Path]:
    """Return files in directories, or with names, of ours; without those that this test has made."""
    found = [path.relative_to(place) for path in place.rglob("*") if not path.is_dir() or path.is_symlink()]
    return [
        path
        for path in found
        if re.search(r"gpu.ckpt|criu", str(path)) and path.parts[0] != "lab" and path.suffix != ".whl"
    ]


def test_from_the_tutorial_to_a_kernel_that_slept_and_woke_and_back_to_nothing(release_wheel, place, runtime_base):
    if (chromium := find_chromium()) is None:
        pytest.skip("no Chromium on this host: `apt-get install chromium`")
    pytest.importorskip("playwright", reason="playwright is not installed (the extra `test`)")
    began = time.monotonic()
    took: list[str] = []
    wheel = Path(shutil.copy(release_wheel, place))

    def done(what: str) -> None:
        took.append(f"{time.monotonic() - began:4.0f} s  {what}")
        print(took[-1], flush=True)

    *install, start = commands(FRONT_PAGE)
    assert start == "jupyter lab" and commands(PAGE) == commands(REPOSITORY / "README.md")[:-1] == install
    activated = ""
    for command in install:
        command = command.replace("'jupyter_gpu_ckpt[", f"'./{wheel.name}[")
        ran = subprocess.run(["bash", "-c", activated + command], capture_output=True, text=True, timeout=1200)
        activated += f"{command}\n" if command.startswith("source ") else ""
        assert ran.returncode == 0, (command, ran.stdout[-2000:], ran.stderr[-2000:])
        done(command)
    assert "Kernels without CUDA: can be checkpointed here." in ran.stdout
    assert len(files_of_ours(place)) > 100
    (place / ".local/share/jupyter").mkdir(parents=True, exist_ok=True)
    (place / "lab").mkdir()
    (place / "lab/data").symlink_to(place / ".local/share/jupyter")  # the server's is the user's
    first, second = cells()
    (sleep,) = re.findall(r"choose \*(.+?)\*, or run", PAGE.read_text())
    with (
        lab(place / "lab", runtime_base, python=place / "sleeping/bin/python") as running,
        Desktop.open(chromium, place) as desktop,
        desktop.window(running) as window,
    ):
        tab = window.tab(write_notebook(running, "first.ipynb", first, second))
        done("JupyterLab shows the notebook")
        tab.wait_for_phase("running")  # before it has its kernel, JupyterLab drops a cell in silence
        tab.run(0)
        tab.page.locator(".jp-CodeCell").nth(0).locator(".jp-OutputArea-output").first.wait_for()
        numbers = tab.output(0)
        tab.choose(sleep)
        tab.wait_for_phase("checkpointed")
        done("the kernel sleeps")
        listed = subprocess.run(
            [place / "sleeping/bin/jupyter-gpu-ckpt", "list", "--image-dir", place / "lab/images"],
            capture_output=True,
            text=True,
        )
        assert tab.kernel_id()[:8] in listed.stdout, listed
        tab.run(1)
        tab.wait_for_output(1, numbers.removeprefix("[1]:").strip())
        done("it woke, with the same numbers and the same process id")
        tab.quiet()
    uninstall = shlex.split("sleeping/bin/jupyter-gpu-ckpt uninstall --images --image-dir lab/images")
    ran = subprocess.run(uninstall, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    done("uninstalled")
    assert files_of_ours(place) == [] and not [*(place / "lab/images").rglob("*")]
