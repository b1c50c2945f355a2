"""Fenced blocks of the documentation: each is executed, parsed, or compared with what it names.

============================ =========================================================================================
`python`                     compiled; traits that it sets exist and take its values; what configures nothing is an
                             example, and is run in a real kernel that is checkpointed before each next block
`ipython`                    compiled; in the README run in that kernel, in lessons by their own tests (`PROGRAMS`), in
                             the guides by ``make guide``
`pycon`                      the lines after a prompt are compiled
`console` (after a prompt),  programs, subcommands, options, extras, targets and files exist
`bash` (each line)
`json`, `yaml`, `ini`        parsed
`text`                       output, drawings and what else cannot be checked
============================ =========================================================================================
"""

from __future__ import annotations

import ast
import configparser
import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from IPython.core.inputtransformer2 import TransformerManager
from traitlets import HasTraits

from jupyter_gpu_ckpt.agent.magics import PARSERS
from jupyter_gpu_ckpt.sharing import allotments

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "labextension" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BIN = Path(sys.executable).parent
LANGUAGES = {"python", "ipython", "pycon", "console", "bash", "json", "yaml", "ini", "text"}
_FENCE = re.compile(r"^( *)```(\S*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_PROMPT = re.compile(r"^(?:\w*[$#]) (.+)$")
_TOP_LEVEL_AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
#: Programs that not every machine has, or whose help needs a cluster or a second page: their options are not checked.
ELSEWHERE = {
    "apparmor_parser",
    "apt-get",
    "docker",
    "helm",
    "journalctl",
    "kubectl",
    "npm",
    "podman",
    "scancel",
    "scontrol",
    "scp",
    "squeue",
    "srun",
    "systemctl",
}
#: Pages with a program or a lesson as a whole, and the test that runs it.
PROGRAMS = {
    "docs/branches.md": "tests/kernel/test_program_example.py",
    "docs/going-back.md": "tests/kernel/test_going_back_lesson.py",
}
#: Programs that pages hand out.
HANDED_OUT = {path.name for path in (ROOT / "docs").rglob("*") if path.is_file() and not path.suffix}
#: Classes that pages configure, by module.
CONFIGURED = {
    "Authenticator": "jupyterhub.auth",
    "CheckpointKernelManagerMixin": "jupyter_gpu_ckpt.server.kernel_manager",
    "CheckpointMixin": "jupyter_gpu_ckpt.hub.spawner",
    "ConfigurableHTTPProxy": "jupyterhub.proxy",
    "GpuCkptProvisioner": "jupyter_gpu_ckpt.kernel.provisioner",
    "GpuUsage": "jupyter_gpu_ckpt.server.gpu_usage",
    "IdleCuller": "jupyterhub_idle_culler",
    "IdlePolicy": "jupyter_gpu_ckpt.server.idle.loop",
    "JupyterHub": "jupyterhub.app",
    "KernelManager": "jupyter_client.manager",
    "KernelPersistence": "jupyter_gpu_ckpt.server.persistence",
    "KernelProvisionerFactory": "jupyter_client.provisioning",
    "Placement": "jupyter_gpu_ckpt.hub.placement",
    "ServerApp": "jupyter_server.serverapp",
    "SlurmSpawner": "batchspawner",
    "Spawner": "jupyterhub.spawner",
}
#: Classes of packages that the index does not have.
NOT_INSTALLED = {"SystemdSpawner"}


class Block(NamedTuple):
    """A fenced block; ``where`` names page and line."""

    where: str
    page: Path
    language: str
    text: str


def _blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text()
        for match in _FENCE.finditer(text):
            indent, language, body = match.groups()
            line = text.count("\n", 0, match.start()) + 1
            lines = [row.removeprefix(indent) for row in body.splitlines()]
            if not language.startswith("{"):  # a directive of the site, which its build checks
                yield Block(f"{page.relative_to(ROOT)}:{line}", page, language, "\n".join(lines) + "\n")


BLOCKS = list(_blocks())


def of(*languages: str) -> list[Any]:
    return [pytest.param(block, id=block.where) for block in BLOCKS if block.language in languages]


def test_every_block_says_what_it_is():
    assert len(BLOCKS) > 60
    assert [block.where for block in BLOCKS if block.language not in LANGUAGES] == []
    for page in PAGES:
        assert page.read_text().count("```") == 2 * len(_FENCE.findall(page.read_text())), page


# -- Python and configuration


def _settings(code: str) -> Iterator[tuple[str, str, ast.expr]]:
    """Yield class, trait and value of each ``c.Class.trait = value``."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Assign) and (match := re.fullmatch(r"c\.(\w+)\.(\w+)", ast.unparse(node.targets[0]))):
            yield match[1], match[2], node.value


def _require_setting(owner: str, trait: str, value: ast.expr | None) -> None:
    if owner in NOT_INSTALLED:
        return
    assert owner in CONFIGURED, f"no class {owner} is known here: add it to CONFIGURED"
    configured: type[HasTraits] = getattr(importlib.import_module(CONFIGURED[owner]), owner)
    assert trait in configured.class_traits(config=True), f"{owner} has no trait {trait}"
    if value is not None and not any(isinstance(node, ast.Name | ast.Attribute) for node in ast.walk(value)):
        instance = configured.__new__(configured)
        configured.class_traits()[trait].validate(instance, eval(ast.unparse(value)))


def _configures(code: str) -> bool:
    """Return whether a block is a configuration file, or a part of one."""
    return bool(re.match(r"# /|# jupyterhub_config.py", code)) or all(
        isinstance(node, ast.Import | ast.ImportFrom) or ast.unparse(node).startswith("c.")
        for node in ast.parse(code).body
    )


@pytest.mark.parametrize("block", of("python"))
def test_python_is_python_and_sets_what_exists(block):
    compile(block.text, block.where, "exec", flags=_TOP_LEVEL_AWAIT)
    for owner, trait, value in _settings(block.text) if _configures(block.text) else ():
        _require_setting(owner, trait, value)


@pytest.mark.parametrize("block", of("ipython", "pycon"))
def test_cells_are_python(block):
    lines = [match[2] for match in re.finditer(r"^(In \[\d+\]: |>>> )(.+)$", block.text, re.MULTILINE)]
    assert lines or block.language == "ipython"
    compile(TransformerManager().transform_cell("\n".join(lines) or block.text), block.where, "exec")
    for name, words in re.findall(r"^%(\w+)([^#\n]*)", block.text, re.MULTILINE):
        PARSERS[name].parse_args(shlex.split(words))


def test_settings_that_sentences_name_exist():
    found = 0
    for page in PAGES:
        for code in re.findall(r"`(c\.\w+\.\w[^`\n]*)`", page.read_text()):
            for owner, trait, value in _settings(code) if "=" in code else ():
                _require_setting(owner, trait, value)
                found += 1
    assert found > 10


@pytest.mark.parametrize("block", of("json"))
def test_json_names_a_provisioner_or_users_that_share_gpus(block):
    document = json.loads(block.text)
    if "metadata" not in document:
        assert all(allotments._allotment(rights) for rights in document.values())
        return
    provisioner = document["metadata"]["kernel_provisioner"]
    assert provisioner["provisioner_name"] in entry_points(group="jupyter_client.kernel_provisioners").names
    for trait in provisioner.get("config", {}):
        _require_setting("GpuCkptProvisioner", trait, None)


@pytest.mark.parametrize("block", of("yaml"))
def test_yaml_is_yaml(block):
    assert all(isinstance(document, dict) for document in yaml.safe_load_all(block.text))


@pytest.mark.parametrize("block", of("ini"))
def test_files_of_other_programs_have_their_form(block):
    """Units have sections; of files without any each line is a setting or an entry."""
    assert re.match(r"# /etc/\S+\n", block.text)
    parser = configparser.ConfigParser(strict=False, allow_no_value=True, interpolation=None)
    parser.read_string(block.text if "systemd" in block.text.partition("\n")[0] else "[all]\n" + block.text)
    assert all(parser[section] for section in parser.sections())


# -- shells


@cache
def _help(*command: str) -> str:
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"there is no {' '.join(command)}: {done.stderr[-300:]}"
    return done.stdout


@cache
def _help_of_others(program: str) -> str:
    """Return what another program says about its options: some do that on stderr, and some end with a failure."""
    done = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


@cache
def _extras() -> set[str]:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return set(setup["options.extras_require"])


def _options(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if word.startswith("--")]


def _require_options(words: list[str], text: str, what: str) -> None:
    for option in _options(words):
        if setting := re.fullmatch(r"--(\w+)\.(\w+)", option):
            _require_setting(setting[1], setting[2], None)
        else:
            assert re.search(rf"(?<![\w-]){option}(?![\w-])", text), f"{what} has no option {option}"


def _jupyter(words: list[str]) -> None:
    name, *rest = words or [""]
    if name != "gpu-ckpt":
        assert not name or name.startswith("-") or (BIN / f"jupyter-{name}").exists(), f"there is no jupyter {name}"
        return
    own = [sys.executable, "-m", "jupyter_gpu_ckpt"]
    if rest and not rest[0].startswith("-") and rest[0].islower():
        assert re.search(rf"^\s+{rest[0]}\b", _help(*own), re.MULTILINE), f"there is no subcommand {rest[0]}"
        own += rest[:1]
    text = _help(*own)
    _require_options([word for word in rest if word not in ("--help", "--help-all")], text, " ".join(own[2:]))


def _pip(words: list[str]) -> None:
    assert words[0] in ("install", "uninstall", "show")
    for extras in re.findall(r"jupyter_gpu_ckpt[\w.-]*\[([\w,]+)\]", " ".join(words)):
        assert set(extras.split(",")) <= _extras()


def _make(words: list[str]) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {word for word in words if "=" not in word} <= targets


def _python(words: list[str]) -> None:
    if words[:1] == ["-m"]:
        if words[1] != "venv":
            _require_options(words[3:], _help(sys.executable, "-m", *words[1:3]), " ".join(words[1:3]))
        return
    assert (ROOT / words[0]).exists()


OWN = {"jupyter": _jupyter, "pip": _pip, "make": _make, "python": _python, "python3": _python}


def _require_command(text: str) -> None:
    """Check the commands of a line of a shell, in those that run others, too."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    command: list[str] = []
    into_file = False
    for word in [*lexer, ";"]:
        if set(word) <= set("<>&") and set(word) & set("<>"):
            into_file = True
        elif set(word) <= set("();|&"):
            _require_program(command)
            command = []
        elif not into_file:
            command.append(word)
        else:
            into_file = False


def _require_program(words: list[str]) -> None:
    while words and (re.match(r"\w+=", words[0]) or words[0] in ("sudo", "do", "done", "for", "nice")):
        words = words[1:] if words[0] != "for" else []
    if not words or (words[0].startswith(("/", "$")) and not (name := Path(words[0]).name)):
        return
    name = Path(words[0]).name
    if name in OWN:
        OWN[name](words[1:])
    elif name == "su":
        _require_command(words[words.index("-c") + 1])
    elif name.startswith("jupyter-"):
        _jupyter([name.removeprefix("jupyter-"), *words[1:]])
    elif name == "eval":
        _require_command(words[1].removeprefix("$(").removesuffix(")"))
    elif words[0].startswith("scripts/"):
        assert (ROOT / words[0]).exists()
    elif name not in HANDED_OUT and not Path(words[0]).is_absolute():
        found = shutil.which(name, path=f"{BIN}:/usr/sbin:/usr/bin:/sbin:/bin")
        assert found or name in ELSEWHERE or _is_builtin(name), f"there is no {name}"
        if found and name not in ELSEWHERE:
            _require_options(words[1:], _help_of_others(found), name)


def _is_builtin(name: str) -> bool:
    return subprocess.run(["bash", "-c", f"type {shlex.quote(name)}"], capture_output=True).returncode == 0


@pytest.mark.parametrize("block", of("console", "bash"))
def test_commands_exist(block):
    """Those of the pages that ``make guide`` follows are run there; here their own programs and options are known."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [match[1] for line in lines if (match := _PROMPT.match(line))]
        assert lines, "a console without a prompt is text"
    for line in lines:
        done = subprocess.run(["bash", "-n", "-c", line], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        for route in re.findall(r"/(gpu-ckpt/\S+)", line) if "curl" in line else ():
            assert _is_route(route), route
        _require_command(line.replace(" ...", ""))


def _is_route(path: str) -> bool:
    routes = yaml.safe_load((ROOT / "jupyter_gpu_ckpt" / "server" / "openapi.yaml").read_text())["paths"]
    patterns = [re.sub(r"\{\w+\}", "[^/]+", route).strip("/") for route in routes]
    return any(re.fullmatch(f"(gpu-ckpt/)?{pattern}", path) for pattern in patterns)


def test_commands_that_sentences_name_exist():
    found = 0
    for page in PAGES:
        text = _FENCE.sub("", page.read_text())
        for line in re.findall(r"`((?:jupyter|pip|make) [^`\n]+|python scripts/[^`\n]+)`", text):
            _require_command(line.replace("[NOTEBOOK]", "NOTEBOOK").replace(" ...", "").replace("...", ""))
            found += 1
    assert found > 60


# -- examples


EXAMPLES = [
    page
    for page in PAGES
    if str(page.relative_to(ROOT)) not in PROGRAMS
    and any(
        block.page == page
        and (
            (block.language == "python" and not _configures(block.text))
            or (block.language == "ipython" and page.name == "README.md")
        )
        for block in BLOCKS
    )
]


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: page.stem)
async def test_examples_run_and_a_kernel_that_slept_continues(page, kernel):
    """Each block of a page wakes the kernel, and values that two of them show are the same."""
    shown: dict[str, str] = {}
    for block in (block for block in BLOCKS if block.page == page and block.language in ("python", "ipython")):
        if block.language == "python" and _configures(block.text):
            continue
        if "manager." in block.text:  # for a program that starts kernels
            code = compile(block.text, block.where, "exec", flags=_TOP_LEVEL_AWAIT)
            await kernel.run("0")
            await kernel.settled("running")
            await eval(code, {"manager": kernel.manager})
        elif "%" in block.text:
            for line in block.text.splitlines():
                await kernel.run(line.partition("#")[0])
        else:
            *_, last = ast.parse(block.text).body
            code = block.text.rstrip()
            if isinstance(last, ast.Expr):
                value = ast.unparse(last.value)
                printed = await kernel.run(f"{code}\nprint(repr({value}))" if "CheckpointPanel" not in code else code)
                assert shown.setdefault(value, printed) == printed
            else:
                await kernel.run(code)
        if kernel.state != "suspended":
            await kernel.settled("running")
            await kernel.provisioner.checkpoint()


def test_programs_of_pages_are_run_by_their_own_tests():
    for page, test in PROGRAMS.items():
        assert (ROOT / page).exists() and (ROOT / page).name in (ROOT / test).read_text()


def test_pages_for_users_have_examples():
    assert {page.stem for page in EXAMPLES} >= {"README", "first-sleep", "magics"}


def test_labels_that_pages_for_users_name_are_those_of_the_front_end():
    """Menus, buttons and headings in italics; those of JupyterLab itself are paths."""
    source = "".join(path.read_text() for path in (ROOT / "labextension" / "src").glob("*.ts*")).replace("\\'", "'")
    pages = [ROOT / "docs" / name for name in ("frontend.md", "usage.md", "first-sleep.md", "going-back.md")]
    named = {label for page in pages for label in re.findall(r"(?<!\*)\*([A-Z][^*→>|\n]+)\*(?!\*)", page.read_text())}
    assert len(named) > 8
    assert {label for label in named if f"'{label}'" not in source and f'"{label}"' not in source} == set()
