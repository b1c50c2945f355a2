"""Kernels of several users share the GPUs of one node: who may compute, who leaves, who waits and for how long.

`participant` has what is known of one kernel, `records` shows it to the servers of all users, and `policy` decides from
all of these together.
"""
