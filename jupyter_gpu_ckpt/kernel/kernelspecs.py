"""The kernelspec of a kernel that exists already, whose own may have been removed."""

from __future__ import annotations

from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

from ..errors import StateError


def choose(specs: KernelSpecManager, *names: str) -> str:
    """Return the first of ``names`` that is the name of a kernelspec here; empty if all are empty.

    Raises `StateError` if there is none of them.
    """
    wanted = [name for name in names if name]
    for name in wanted:
        try:
            specs.get_kernel_spec(name)
        except NoSuchKernel:
            continue
        return name
    if not wanted:
        return ""
    message = f"The kernel's kernelspec is not here: {' and '.join(map(repr, wanted))}."
    hint, left = f"Install the kernelspec {wanted[-1]!r}.", "the kernel, or its image, is as it was"
    raise StateError(message, hint=hint, left=left)
