"""Names in kernelspecs, and the command line of one rewritten so that the kernel starts with the agent inside."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

#: The provisioner's name in kernelspecs and configurations (its entry point).
PROVISIONER = "gpu-ckpt-provisioner"

LAUNCH = Path(__file__).resolve().parent.parent / "agent" / "launch.py"

#: Environment variable of a kernel that was started plainly: the reason, as JSON.  The agent reads and removes it.
PLAIN = "JUPYTER_GPU_CKPT_PLAIN"

#: Environment variable of a fresh kernel under the id of another: what its first cell prints on stderr.
NOTICE = "JUPYTER_GPU_CKPT_NOTICE"

#: Modules that start an ipykernel when run with ``-m``.
KERNEL_MODULES = frozenset({"ipykernel", "ipykernel_launcher"})

# Python's own options (`python --help`).  -c, -h, -V, -? start no kernel; -x would skip the first line of launch.py.
_PLAIN = frozenset("bBdEiIOPqRsSuv")
_VALUED = frozenset("WX")
_PYTHON = re.compile(r"(python|pypy)[^/]*$")


def rewrite(argv: Sequence[str]) -> list[str] | None:
    """Replace ``-m MODULE`` in ``argv`` by launch.py and the module's name; keep all other arguments.

    Return None for a command that is no Python running ipykernel with ``-m``: another language, a wrapper script that
    may not pass arguments on, another module.  Such a kernel runs without an agent.
    """
    if not argv or not _PYTHON.search(argv[0]):
        return None
    flags: list[str] = []
    rest = list(argv[1:])
    while rest:
        word = rest.pop(0)
        if word == "--check-hash-based-pycs" and rest:
            flags += [word, rest.pop(0)]
            continue
        if not word.startswith("-") or word.startswith("--"):
            return None
        letters = word[1:]
        plain = letters[: len(letters) - len(letters.lstrip("".join(_PLAIN)))]
        option, value = letters[len(plain) : len(plain) + 1], letters[len(plain) + 1 :]
        if option == "" and plain:
            flags.append(word)
        elif option in _VALUED and (value or rest):
            flags += [word] if value else [word, rest.pop(0)]
        elif option == "m" and (value or rest):
            module = value or rest.pop(0)
            if module not in KERNEL_MODULES:
                return None
            if plain:
                flags.append(f"-{plain}")
            return [argv[0], *flags, str(LAUNCH), module, *rest]
        else:
            return None
    return None
