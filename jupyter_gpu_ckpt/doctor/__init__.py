"""Check whether this host can checkpoint kernels: `checks` has the list, `probes` the trials, `fixes` the commands."""
