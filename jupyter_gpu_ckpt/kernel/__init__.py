"""All that belongs to a kernel id in a server: provisioner, directory, gate, lifecycle.

`provisioner.GpuCkptProvisioner` has jupyter_client's hooks, `host.KernelHost` joins gate and lifecycle.
"""
