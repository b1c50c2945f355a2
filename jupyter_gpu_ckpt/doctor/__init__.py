"""Checks whether this host can checkpoint kernels, and the commands that repair what is missing.

`checks` has the list, `probes` try the host's features, `fixes` name the commands.
"""
