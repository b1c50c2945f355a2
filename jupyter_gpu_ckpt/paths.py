"""The user's own data directory of this package, below that of Jupyter.

Works without other packages: ``scripts/install-criu`` imports it before pip has installed any.
"""

from __future__ import annotations

import os
from pathlib import Path


def data_directory(*names: str) -> Path:
    """Return ``gpu-ckpt/NAMES...`` below Jupyter's data directory: images, keys, an unpacked CRIU, sessions and others.

    Creates nothing.
    """
    try:
        from jupyter_core.paths import jupyter_data_dir

        jupyter = Path(jupyter_data_dir())
    except ImportError:
        jupyter = _before_jupyter_is_installed()
    return jupyter.joinpath("gpu-ckpt", *names)


def _before_jupyter_is_installed() -> Path:
    """Return the same directory as ``jupyter_core.paths.jupyter_data_dir`` on Linux."""
    if named := os.environ.get("JUPYTER_DATA_DIR"):
        return Path(named)
    if xdg := os.environ.get("XDG_DATA_HOME"):
        return Path(xdg) / "jupyter"
    return Path("~").expanduser().resolve() / ".local" / "share" / "jupyter"
