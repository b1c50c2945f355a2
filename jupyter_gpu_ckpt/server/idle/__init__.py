"""The idle policy: decides which kernels are suspended or checkpointed, and when.

`policy` decides and does no I/O; `probe` and `activity` take snapshots of kernels; `loop` runs rounds and verbs.
"""
