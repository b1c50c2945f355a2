"""The Jupyter server extension: REST, events, metrics, start and stop, the idle policy.

`app.GpuCkptApp` puts the parts together; kernels are reached through their `kernel.provisioner`.
"""
