"""Runs the cells of rows in a kernel, each row in a module of its own: the names of one are not another's."""

from __future__ import annotations

import ast
import inspect
import json
import sys
import traceback
import types
from collections.abc import Mapping

from IPython import get_ipython
from kinds.inside import MARK


def _module(key: str) -> types.ModuleType:
    name = f"row_{key.replace('-', '_')}"
    if name not in sys.modules:
        shell = get_ipython()
        module = sys.modules[name] = types.ModuleType(name)
        vars(module).update({known: shell.user_ns[known] for known in ("In", "Out")}, get_ipython=get_ipython)
    return sys.modules[name]


async def _run(key: str, cell: str) -> str:
    space = vars(_module(key))
    text = get_ipython().transform_cell(cell)
    code = compile(text, f"<{key}>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, space)
    if inspect.iscoroutine(result):
        await result
    return json.dumps(space.get("seen"), default=repr)


async def run(cells: Mapping[str, str]) -> None:
    """Run a cell of each row, and print what it left in ``seen``, or its traceback."""
    answers = {}
    for key, cell in cells.items():
        try:
            answers[key] = {"value": await _run(key, cell)}
        except BaseException:
            answers[key] = {"error": traceback.format_exc(limit=-4)}
    print(f"\n{MARK}{json.dumps(answers)}")
