"""Suspend, dump, restore and resume Jupyter kernels with their CUDA state.

Importing this package is cheap and touches neither the GPU nor CRIU; see ``docs/`` for how the parts fit together.
"""

from __future__ import annotations

from typing import Any

from ._version import __version__ as __version__


def _jupyter_server_extension_points() -> list[dict[str, object]]:
    """Called from jupyter_server when it looks for this package's extension; nobody else pays for the import."""
    from .server.app import GpuCkptApp

    return [{"module": "jupyter_gpu_ckpt.server.app", "app": GpuCkptApp}]


def __getattr__(name: str) -> Any:
    """``CheckpointPanel`` is imported when it is asked for: it needs ipywidgets, which servers need not have."""
    if name == "CheckpointPanel":
        from .agent.widgets import CheckpointPanel

        return CheckpointPanel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
