"""The program of the lesson for programmers, as the page has it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "branches.md"


def test_the_program_prints_what_the_page_shows(tmp_path, runtime_base, criu_binary):
    page = PAGE.read_text()
    program, shown = (
        textwrap.dedent(re.search(rf"```{kind}\n(.*?)```", page, re.DOTALL)[1]) for kind in ("python", "text")
    )
    (tmp_path / "two_ways.py").write_text(program)
    environment = {**os.environ, "JUPYTER_GPU_CKPT_IMAGES": str(tmp_path / "images")}
    environment |= {"XDG_RUNTIME_DIR": str(runtime_base), "IPYTHONDIR": str(tmp_path / "ipython")}
    done = subprocess.run(
        [sys.executable, "two_ways.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == shown
    kept = [path for path in (tmp_path / "images").iterdir() if not path.name.startswith(".")]
    assert len(kept) == 1, "the save point alone is left"
