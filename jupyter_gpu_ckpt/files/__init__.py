"""Files of any kind: atomic writes with a stated durability, direct I/O.

Imports nothing of images, kernels or GPUs.
"""
