"""Says when what is being built lacks the front end; all else is in setup.cfg."""

import sys
from pathlib import Path

from setuptools import setup

if not (Path(__file__).parent / "labextension" / "dist" / "package.json").is_file():
    print("jupyter_gpu_ckpt: without the JupyterLab front end; `make labextension` builds it.", file=sys.stderr)

setup()
