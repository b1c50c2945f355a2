"""Summarise the variables of a kernel, for the list of its save points.

Runs no code of the user: of a class of theirs the size of the object alone is counted.
"""

from __future__ import annotations

import contextlib
import sys
import types
from typing import Any

from . import tensors
from .digests import Digests

#: Variables in a summary at most, the largest.
MOST = 200
#: Seconds for all digests together: the kernel stands still for a save.
_SECONDS = 0.03
#: Characters of a name, and of a type's.
_LONGEST = 80
#: Packages whose objects have ``nbytes``, an attribute without side effects.
_WITH_NBYTES = frozenset({"numpy", "cupy", "torch", "jax", "jaxlib"})


def summary(shell: Any) -> dict[str, Any]:
    """Return the number of the last cell, and name, type, bytes and `digests` of the variables, the largest first.

    ``left_out``: how many there are beyond `MOST`.  ``shared``: files that all kernels write to, whatever process of
    this one has them open: none of them goes back.
    """
    hidden = getattr(shell, "user_ns_hidden", {})
    found: list[tuple[dict[str, Any], Any]] = [
        ({"name": name[:_LONGEST], "type": type(value).__name__[:_LONGEST], "bytes": _bytes(value)}, value)
        for name, value in tensors.user_variables(shell.user_ns)
        if name not in hidden and name != "Out" and not name.startswith("_") and not isinstance(value, _NO_DATA)
    ]
    found.sort(key=lambda each: (-each[0]["bytes"], each[0]["name"]))
    left_out = len(found[MOST:])
    digests = Digests(_SECONDS)
    for facts, value in reversed(found[:MOST]):  # as many as there is time for
        facts.update(digests.of(value))
    variables = [facts for facts, _ in found[:MOST]]
    found.clear()  # whatever refers to the values
    # The number of the next one; a cell that is being run would have it already.
    cell = max(0, int(shell.execution_count) - 1)
    history = str(getattr(getattr(shell, "history_manager", None), "hist_file", ""))
    shared = [history] if history.startswith("/") else []
    return {"cell": cell, "variables": variables, "left_out": left_out, "shared": shared}


_NO_DATA = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)


def _bytes(value: Any) -> int:
    module = str(type(value).__module__)
    package = module.partition(".")[0]
    with contextlib.suppress(Exception):  # a library in an unexpected state
        if package in _WITH_NBYTES and hasattr(type(value), "nbytes"):
            return int(value.nbytes)
        if package == "pandas" and hasattr(type(value), "memory_usage"):
            used = value.memory_usage()
            return int(used.sum() if hasattr(used, "sum") else used)
    with contextlib.suppress(Exception):
        return sys.getsizeof(value) if module == "builtins" else object.__sizeof__(value)
    return 0
