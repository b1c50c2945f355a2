"""JupyterHub's side: servers whose kernels sleep in images before they are stopped, and wake on a node that fits."""
