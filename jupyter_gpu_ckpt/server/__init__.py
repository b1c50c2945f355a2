"""The Jupyter server extension: REST, events, metrics, stop and start of a server, the idle policy.

Everything here works on kernels through `kernel.provisioner`.
"""
