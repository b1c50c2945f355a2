"""The Jupyter server extension: REST, events, metrics, start and stop of a server, the idle policy.

It works on kernels through `kernel.provisioner`.
"""
