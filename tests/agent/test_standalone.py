"""inside/ runs in other people's environments: what it may need is checked on its source."""

from __future__ import annotations

import ast

import pytest

from jupyter_gpu_ckpt.kernel.agent_injection import LAUNCH

# What launch.py loads into every kernel: all but the panel, which is imported by a user who has this package installed.
NAMES = sorted(path.stem for path in LAUNCH.parent.glob("*.py") if path.stem != "widgets")
STANDARD = {
    *("argparse", "json", "shlex"),
    *(
        "__future__",
        "atexit",
        "collections",
        "contextlib",
        "ctypes",
        "errno",
        "fcntl",
        "gc",
        "hashlib",
        "importlib",
        "logging",
        "math",
        "mmap",
        "multiprocessing",
        "os",
    ),
    *("platform", "re", "runpy", "signal", "socket", "sqlite3", "stat", "struct", "sys", "threading", "time"),
    *("traceback", "types", "typing", "uuid", "weakref"),
}


@pytest.mark.parametrize("name", NAMES)
def test_python_3_8_and_the_kernels_own_libraries_are_enough(name: str) -> None:
    tree = ast.parse((LAUNCH.parent / f"{name}.py").read_text(), feature_version=(3, 8))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            imported.add(str(node.module).partition(".")[0])
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 1  # neighbours only
    assert imported <= STANDARD | {"IPython", "zmq"}
