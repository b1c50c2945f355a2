"""Kernels of several users share the GPUs of one node: who may compute, who leaves, who waits and for how long.

`participant` has what is known of one kernel, and how events change it; `policy` decides from all of these together.
"""
