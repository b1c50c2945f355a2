"""Whether this host can checkpoint kernels, and the command that fixes what is missing.

`checks` is the list, `probes` the trials behind it, `fixes` the commands.
"""
