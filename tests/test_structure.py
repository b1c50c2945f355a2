"""The package's structure: what imports what, and class names."""

from __future__ import annotations

import ast
import inspect
import io
import re
import subprocess
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from kubespawner import KubeSpawner

from jupyter_gpu_ckpt.gate.gate import Gate
from jupyter_gpu_ckpt.gate.router import Router
from jupyter_gpu_ckpt.hub.spawner import CheckpointMixin
from jupyter_gpu_ckpt.kernel.provisioner import GpuCkptProvisioner
from jupyter_gpu_ckpt.lifecycle.context import GateProtocol
from jupyter_gpu_ckpt.lifecycle.lifecycle import Lifecycle
from jupyter_gpu_ckpt.lifecycle.steps import STEPS
from jupyter_gpu_ckpt.server.app import GpuCkptApp
from jupyter_gpu_ckpt.server.kernel_manager import CheckpointKernelManager
from jupyter_gpu_ckpt.server.readiness import CheckpointSessionManager

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "jupyter_gpu_ckpt"
#: Imports nothing of the package that is not in this list.
GROUND = {"errors", "trace", "paths", "procfs", "units", "subprocesses", "terminal_text"}


def test_each_class_name_is_defined_once():
    defined: dict[str, list[str]] = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                defined[node.name].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert {name: places for name, places in defined.items() if len(places) > 1} == {}


def test_each_helper_of_the_tests_has_a_name_of_its_own():
    """pytest puts the tests' folders on ``sys.path``: of two helpers with one name the first would be imported."""
    defined: dict[str, list[str]] = defaultdict(list)
    for path in TESTS.rglob("*.py"):
        if path.name != "conftest.py" and not (path.parent / "__init__.py").exists():
            defined[path.name].append(str(path.relative_to(TESTS)))
    assert {name: places for name, places in defined.items() if len(places) > 1} == {}


def _imports(path: Path) -> Iterator[str]:
    """The modules of the package that one of its modules imports, in functions as well, by their names below it."""
    package = ["jupyter_gpu_ckpt", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            base += (node.module or "").split(".") if node.module else []
            if base[:1] == ["jupyter_gpu_ckpt"]:
                yield from ([".".join(base[1:])] if base[1:] else [alias.name for alias in node.names])
        elif isinstance(node, ast.Import):
            names = (alias.name.split(".") for alias in node.names)
            yield from (".".join(name[1:]) for name in names if name[0] == "jupyter_gpu_ckpt")


def _definitions(path: Path) -> Iterator[tuple[str, ast.AST, str | None]]:
    """Module, classes and functions of a file: where each is, its node and its docstring."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{path.relative_to(TESTS.parent)}:{getattr(node, 'lineno', 1)}", node, ast.get_docstring(node)


def _scripts() -> Iterator[Path]:
    """The programs in Python of scripts/, of which some have no suffix."""
    for path in (TESTS.parent / "scripts").rglob("*"):
        if path.is_file() and (path.suffix == ".py" or re.match(rb"#!.*python", path.read_bytes())):
            yield path


def test_docstrings_begin_with_a_verb_or_a_noun_phrase():
    """None begins with a relative clause without a head, or with a pronoun."""
    clauses = "who|what|it|that|whether|which|whose|how|where|when|everything|everybody|nobody|nothing|as|if|\\w+ever"
    found = {}
    for path in [*PACKAGE.rglob("*.py"), *TESTS.rglob("*.py"), *_scripts()]:
        for where, _, text in _definitions(path):
            if text and re.match(rf"({clauses})\b", text, re.IGNORECASE):
                found[where] = text.splitlines()[0]
    assert found == {}


#: Names that nobody who knows the field would look for, and its own words for what they meant.
DIALECT = {
    "leave": "suspend, swap_out, detach, release",
    "must_leave": "begin_suspend",
    "has_to_leave": "should_suspend",
    "leavers": "candidates",
    "vacate": "release, clear",
    "room": "space, headroom, capacity, reservation",
    "make_room": "release_copies, evict",
    "spare": "headroom, slack, reserved, ignore_sigterm",
    "seat": "assign",
    "hurry": "cancel, reconnect",
    "disown": "detach",
    "bury": "record_exit",
    "cool": "archive",
    "mend": "repair, reset",
    "outrun": "supersede",
    "furnish": "create",
    "park": "freeze, stop_threads, drain",
    "parking": "freezer, freeze_threads",
    "arena": "host_memory, device_bytes, malloc_arena",
    "knock": "probe_call",
    "rehearsal": "dry_run",
    "relieve": "drop_readers",
    "premises": "host",
    "errands": "internal_requests",
    "ledger": "pending",
    "go_on": "continue, check_cancelled",
    "goes_on": "continues",
    "in_vain": "cancelled",
}


def _names(path: Path) -> Iterator[str]:
    """The names in a program, without its comments and texts."""
    text = path.read_text()
    if path.suffix in (".c", ".h", ".ts", ".tsx"):
        other = r"""/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\\n])*'|`[^`]*`"""
        yield from re.findall(r"[A-Za-z_]\w*", re.sub(other, " ", text, flags=re.DOTALL))
    else:
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        yield from (token.string for token in tokens if token.type == tokenize.NAME)


def _programs() -> Iterator[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=PACKAGE.parent, capture_output=True, check=True)
    scripts = set(_scripts())
    for name in listed.stdout.decode().split("\0"):
        path = PACKAGE.parent / name
        if path in scripts or (path.suffix in (".py", ".c", ".h", ".ts", ".tsx") and path.exists()):
            yield path


def test_names_are_the_fields_words():
    found = {}
    for path in _programs():
        for name in {name.strip("_").lower() for name in _names(path)} & DIALECT.keys():
            found[f"{path.relative_to(PACKAGE.parent)}: {name}"] = DIALECT[name]
    assert found == {}


def test_names_are_found_beside_comments_and_texts(tmp_path):
    """The test before this one would find nothing without."""
    (tmp_path / "one.py").write_text('def _leave(room): # spare\n    return "mend", room\n')
    (tmp_path / "two.c").write_text('/* spare\n room */ static void vacate(int it) { puts("mend"); } // cool\n')
    assert {*_names(tmp_path / "one.py")} == {"def", "_leave", "room", "return"}
    assert {*_names(tmp_path / "two.c")} == {"static", "void", "vacate", "int", "it", "puts"}


@pytest.mark.parametrize(
    "phrase", [r"(^|[^a-z])(told|whoever|in vain)([^a-z]|$)", r"(^|[^a-z])(go|goes|going|went|gone)[ _-]on([^a-z]|$)"]
)
def test_no_name_or_text_says(phrase):
    """The field's words are error, notice, reply, callback, continue; and a sentence names its subject."""
    named = subprocess.run(["git", "grep", "-liE", phrase], cwd=PACKAGE.parent, capture_output=True)
    assert set(named.stdout.decode().split()) <= {"tests/test_structure.py"}


def test_each_folder_says_its_duty_in_two_sentences():
    for path in PACKAGE.rglob("__init__.py"):
        ((_, _, text), *_) = _definitions(path)
        assert text is not None, path
        assert len(re.findall(r"\.(?:\s|$)", text)) == 2, path


def test_nothing_is_called_by_a_name_that_is_put_together():
    """Requests of other processes are looked up in literal tables, which are allow-lists."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
                assert not isinstance(node.args[1], ast.BinOp | ast.JoinedStr), f"{path}:{node.lineno}"


def test_the_lifecycle_is_one_class_without_mixins_and_steps_are_functions_of_an_attempt():
    for path in (PACKAGE / "lifecycle").glob("*.py"):
        for where, node, _ in _definitions(path):
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base) for base in node.bases}
                assert bases <= {"Protocol", "NamedTuple", "Exception", "enum.Enum", "enum.IntEnum"}, where
    driver = {
        name for name, value in vars(Lifecycle).items() if inspect.isfunction(value) or isinstance(value, property)
    }
    assert len(driver) <= 20, "what does not drive is a function of a `KernelState`"
    for function in STEPS.values():
        assert list(inspect.signature(function).parameters) == ["attempt"]


def test_a_verb_of_the_gate_is_defined_once_and_declared_once_more():
    """By `Router`, and without a signature by `Gate`; the lifecycle, which does not import it, has a protocol."""
    verbs = {name for name, value in vars(Gate).items() if getattr(value, "__wrapped__", None) is not None}
    assert verbs >= {"open", "drain", "release", "sleep", "fail", "request"}
    for name in verbs:
        assert vars(Gate)[name].__wrapped__ is vars(Router)[name]
    protocol = {name for name, value in vars(GateProtocol).items() if inspect.isfunction(value) and name[0] != "_"}
    assert protocol <= verbs
    for name in protocol:
        declared = inspect.signature(vars(GateProtocol)[name]).parameters
        assert list(declared) == list(inspect.signature(vars(Router)[name]).parameters)[: len(declared)], name


def test_the_ground_imports_nothing_above_it():
    for name in GROUND:
        assert set(_imports(PACKAGE / f"{name}.py")) <= GROUND, name


def _graph() -> dict[str, set[str]]:
    """Return the imports of each module of the package, in functions and for types as well."""
    modules = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        package = ["jupyter_gpu_ckpt", *path.relative_to(PACKAGE).parts[:-1]]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                base = [*base, *(node.module.split(".") if node.module else [])]
                for alias in node.names if base[:1] == ["jupyter_gpu_ckpt"] else ():
                    found = ".".join([*base[1:], alias.name])
                    graph[name].add(found if found in modules else ".".join(base[1:]))
            elif isinstance(node, ast.Import):
                graph[name] |= {a.name.partition(".")[2] for a in node.names if a.name.startswith("jupyter_gpu_ckpt.")}
    return graph


def _circle(graph: dict[str, set[str]]) -> list[str]:
    """Names that import each other in a circle; empty where there are none."""
    left = {name: {other for other in imports if other in graph} for name, imports in graph.items()}
    while done := {name for name, imports in left.items() if not imports}:
        left = {name: imports - done for name, imports in left.items() if name not in done}
    return sorted(left)


def test_no_modules_import_each_other_in_a_circle():
    assert _circle({"a": {"b"}, "b": {"a"}, "c": set()}) == ["a", "b"]
    assert _circle(_graph()) == []


def test_folders_have_a_duty_and_no_circle_but_through_kernel_host():
    graph = _graph()
    for directory in {path.parent for path in PACKAGE.rglob("*.py")}:
        assert ast.get_docstring(ast.parse((directory / "__init__.py").read_text())), directory
    folders: dict[str, set[str]] = defaultdict(set)
    for name, imports in graph.items():
        folder = name.partition(".")[0]
        folders[folder] |= {other.partition(".")[0] for other in imports} - {folder}
    assert _circle(folders) == []
    assert "gate" not in folders["lifecycle"]
    assert "lifecycle" not in folders["gate"]


def test_tests_lie_in_folders_as_modules_do():
    """A folder of tests is called after the package's, or is one of those that test a user's whole way."""
    whole = {
        "browser",
        "clients",
        "containers",
        "faults",
        "gpu",
        "guide",
        "nodes",
        "scale",
        "support",
        "upgrade",
        "zoo",
    }
    folders = {path.relative_to(TESTS).parts[0] for path in TESTS.glob("*/**/*.py")}
    assert {name for name in folders - whole if not (PACKAGE / name).is_dir()} == set()
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - folders == {"testing"}


def test_each_file_of_tests_has_a_name_of_its_own():
    """Pytest imports them by their names alone: of two it runs the first, and says so only at the end."""
    names = [path.name for path in TESTS.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


#: Classes whose base classes are other projects': their callers are not in this tree.
HOOKED = [GpuCkptProvisioner, CheckpointKernelManager, CheckpointSessionManager, GpuCkptApp, CheckpointMixin]


def test_hooks_say_who_calls_them():
    """A hook overrides a public method of a class of another project."""
    silent, found = [], 0
    for cls in HOOKED:
        base = KubeSpawner if cls is CheckpointMixin else next(c for c in cls.__mro__ if "gpu_ckpt" not in c.__module__)
        for owner in (each for each in cls.__mro__ if "gpu_ckpt" in each.__module__):
            for name, value in vars(owner).items():
                function = value.fget if isinstance(value, property) else value
                if inspect.isfunction(function) and name[0] != "_" and callable(getattr(base, name, None)):
                    found += 1
                    if "Called " not in (function.__doc__ or ""):
                        silent.append(f"{owner.__name__}.{name}")
    assert found > 25
    assert silent == []


def test_verbs_say_what_is_left_after_a_failure():
    for name in ("suspend", "resume", "checkpoint", "restore"):
        for owner in (Lifecycle, GpuCkptProvisioner):
            assert "After failure" in (getattr(owner, name).__doc__ or ""), (owner, name)
    for name in ("launch", "wake"):
        assert "After failure" in (getattr(Lifecycle, name).__doc__ or ""), name
