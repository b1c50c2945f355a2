"""Check whether this host can checkpoint kernels, and name the command that fixes what is missing.

`checks` has the list, `probes` the trials, `fixes` the commands.
"""
