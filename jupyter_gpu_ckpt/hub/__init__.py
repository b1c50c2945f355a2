"""JupyterHub's side: kernels are checkpointed before their server is stopped, and wake on a node that fits.

`spawner` and `cull_arbiter` drain servers; `placement`, with `slurm` and `kubernetes`, requests the next node.
"""
