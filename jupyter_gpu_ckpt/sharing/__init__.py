"""GPUs that kernels of several users share: which of them has its memory on a GPU, and which waits for it.

No daemon and no root: servers read each other's records in a directory that all users share, and each acts on its own.
"""
