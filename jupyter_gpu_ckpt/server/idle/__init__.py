"""The idle policy: which kernels should be suspended or checkpointed, and when.

`policy` decides and does no I/O; `probe` and `activity` look, `loop` asks and acts.
"""
