"""The command line, ``jupyter gpu-ckpt``: a Jupyter application that reads Jupyter's configuration, as the kernels do.

It parses options, prints answers and errors for people or programs, and leaves all the work to the other packages.
"""

from .main import main

__all__ = ["main"]
