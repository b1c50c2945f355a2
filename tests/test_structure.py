"""The package's structure: what imports what, and class names."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

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


def test_the_ground_imports_nothing_above_it():
    for name in GROUND:
        assert set(_imports(PACKAGE / f"{name}.py")) <= GROUND, name


def _graph() -> dict[str, set[str]]:
    """Which modules of the package each of them imports, in functions and for types as well."""
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
    whole = {"browser", "clients", "faults", "gpu", "guide", "nodes", "scale", "support", "zoo"}
    folders = {path.relative_to(TESTS).parts[0] for path in TESTS.glob("*/**/*.py")}
    assert {name for name in folders - whole if not (PACKAGE / name).is_dir()} == set()
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - folders == {"testing"}


def test_each_file_of_tests_has_a_name_of_its_own():
    """Pytest imports them by their names alone: of two it runs the first, and says so only at the end."""
    names = [path.name for path in TESTS.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
