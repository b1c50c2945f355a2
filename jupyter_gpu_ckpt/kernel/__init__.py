"""Provisioner, directory, gate and lifecycle of each kernel id in a server.

`provisioner.GpuCkptProvisioner` has jupyter_client's hooks, `host.KernelHost` joins gate and lifecycle.
"""
