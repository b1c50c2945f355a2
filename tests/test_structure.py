"""The package's structure: what imports what, and class names."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "jupyter_gpu_ckpt"
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
