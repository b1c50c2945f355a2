"""The administrators' runbook has every error code, and names nothing that does not exist."""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

from jupyter_gpu_ckpt import errors
from jupyter_gpu_ckpt.doctor import checks

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "admin" / "runbook.md").read_text()
CODES = {c.code for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.GpuCkptError)}
ENTRY = re.compile(r"^### (\w+)\n\n(.+?)\n\n(.*?)\n\n", re.MULTILINE | re.DOTALL)
#: Capitals with an underscore that are neither a code nor ours to check.
FOREIGN = {"XDG_RUNTIME_DIR"}


@cache
def help_of(*command: str) -> str:
    asked = [sys.executable, "-m", "jupyter_gpu_ckpt", *command, "--help"]
    return subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout


def test_every_code_has_one_entry_with_all_its_parts():
    found = ENTRY.findall(TEXT)
    assert sorted(code for code, _, _ in found) == sorted(CODES)
    for code, _, parts in found:
        assert re.findall(r"^- \*\*(\w+)\*\*: \S", parts, re.MULTILINE) == ["Safe", "Look", "Do", "Worry"], code


def test_the_index_has_every_code_and_its_section():
    index = dict(re.findall(r"^\| \[`(\w+)`\]\(#\w+\) \| \[(.+?)\]", TEXT, re.MULTILINE))
    sections = {}
    section = ""
    for level, title in re.findall(r"^(##+) (.+)$", TEXT, re.MULTILINE):
        section = title if level == "##" else section
        sections.update({title: section} if level == "###" else {})
    assert index == sections


def test_every_anchor_of_the_page_itself_is_there():
    titles = re.findall(r"^##+ (.+)$", TEXT, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) <= anchors


def test_every_name_in_capitals_is_a_code_or_a_variable_of_ours():
    source = "".join(path.read_text() for path in (ROOT / "jupyter_gpu_ckpt").rglob("*.py"))
    for name in set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", TEXT)) - CODES - FOREIGN:
        assert name.startswith("JUPYTER_GPU_CKPT_"), name
        assert f'"{name}"' in source, name


def test_every_command_and_option_exists():
    commands = re.findall(r"jupyter gpu-ckpt ([^`'|;\n]+)", TEXT)
    assert len(commands) > 40
    for command in commands:
        words = shlex.split(command)
        name = words[: 2 if words[0] == "admin" else 1]
        assert re.search(rf"^\s+{name[0]}\b", help_of(), re.MULTILINE), command
        help = help_of(*name)
        for option in (word for word in words if word.startswith("--")):
            assert re.search(rf"(?<![\w-]){option}(?![\w-])", help), command


def test_every_log_line_is_one_of_ours():
    source = "".join(path.read_text() for path in (ROOT / "jupyter_gpu_ckpt").rglob("*.py"))
    lines = re.findall(r"`((?:Kernel ID|Image ID|Server NAME).+?): (?:CODE|\.\.\.)", TEXT)
    assert len(lines) == 9
    for line in lines:
        said = re.sub(r"ID|NAME|STEP", "%s", line)
        assert said in source, line


def test_every_trait_exists():
    tables = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md") if path.name != "runbook.md")
    named = set(re.findall(r"`((?:GpuCkptProvisioner|KernelPersistence|CheckpointMixin|IdlePolicy)\.\w+)`", TEXT))
    assert len(named) > 8
    for trait in named:
        assert f"| `{trait}` |" in tables, trait


def test_the_checks_are_those_of_the_doctor():
    table = TEXT.split("## Checks of the doctor")[1]
    named = {
        check for cell in re.findall(r"^\| (`.+?) \|", table, re.MULTILINE) for check in re.findall(r"`(.+?)`", cell)
    }
    source = inspect.getsource(checks)
    assert named == set(re.findall(r'(?:Finding\(|judge\(|check(?:, \w+)? = )"([a-z-]+)"', source))
