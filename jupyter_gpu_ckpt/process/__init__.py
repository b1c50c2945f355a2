"""A Linux process from the outside: an inventory of its state, stopping its threads, settings that CRIU forgets.

Works by /proc, ptrace(2) and system calls made in the process's name; runs in the capsule's init, without
site-packages.
"""
