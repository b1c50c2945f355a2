"""What belongs to one kernel id in a server: the provisioner, its directory, its gate, its lifecycle.

`provisioner.GpuCkptProvisioner` is jupyter_client's side, `host` all that one kernel has on this machine.
"""
