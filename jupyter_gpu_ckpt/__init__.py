"""Suspend, dump, restore and resume Jupyter kernels with their CUDA state.

Importing this package is cheap and touches neither the GPU nor CRIU; see ``docs/`` for how the parts fit together.
"""

__version__ = "0.1.0"
