"""The Jupyter server extension: REST, events, metrics, start and stop, the idle policy.  Uses `kernel.provisioner`."""
