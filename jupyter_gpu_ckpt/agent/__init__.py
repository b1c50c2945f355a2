"""What runs inside the kernel: makes it ready for a checkpoint, takes that back after it, and offers the magics.

Imports of the rest of the package only `errors`: it runs in the environment of the user.
"""
