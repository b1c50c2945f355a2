"""The three commands of the README's "Use": they exist, and print what they are shown to print."""

from __future__ import annotations

import configparser
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
USE = (ROOT / "README.md").read_text().partition("## Use\n")[2].partition("\n## ")[0]


def transcript() -> dict[str, list[str]]:
    """Return the printed text, by command."""
    shown: dict[str, list[str]] = {}
    for line in USE.partition("```console\n")[2].partition("```")[0].splitlines():
        if line.startswith("$ "):
            shown[line[2:]] = printed = []
        else:
            printed.append(line)
    return shown


def gpu_ckpt(*arguments: str) -> str:
    command = [sys.executable, "-m", "jupyter_gpu_ckpt", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout


def test_there_are_three_commands_and_each_can_be_given():
    install, *ours = transcript()
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    for extras in re.findall(r"jupyter_gpu_ckpt\[([\w,]+)\]", USE):
        assert set(extras.split(",")) <= set(setup["options.extras_require"])
    assert install.startswith("pip install 'jupyter_gpu_ckpt[server]'")
    assert ours == ["jupyter gpu-ckpt install-criu", "jupyter gpu-ckpt doctor"]
    for command in ours:
        assert command.split()[-1] in gpu_ckpt(command.split()[-1], "--help")


def test_the_doctor_checks_what_he_is_shown_to_check():
    shown = transcript()["jupyter gpu-ckpt doctor"]
    checks = {line.split()[1] for line in shown if line.startswith(("ok ", "- "))}
    found = json.loads(gpu_ckpt("doctor", "--json"))
    known = {finding["check"] for finding in found["findings"]}
    assert len(checks) > 10
    assert checks - {"nvidia-driver"} <= known, "on a host with a GPU it has more to say about that"
    verdicts = gpu_ckpt("doctor").splitlines()[-2:]
    assert [line.partition(":")[0] for line in verdicts] == [line.partition(":")[0] for line in shown[-2:]]
