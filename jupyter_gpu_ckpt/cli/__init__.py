"""The command line, ``jupyter gpu-ckpt``: a Jupyter application that reads Jupyter's configuration, as kernels do."""

from .main import main

__all__ = ["main"]
