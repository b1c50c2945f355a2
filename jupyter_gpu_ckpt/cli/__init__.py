"""The command line, ``jupyter gpu-ckpt``: a Jupyter application that reads Jupyter's configuration, as kernels do.

`main` has the subcommands, `command` what they share; no command needs a running server.
"""

from .main import main

__all__ = ["main"]
