"""One Linux process from the outside: what it is made of, how its threads are stopped, what CRIU forgets of it.

Works by /proc, ptrace(2) and system calls made in the process's name; runs in the capsule's init, without
site-packages.
"""
