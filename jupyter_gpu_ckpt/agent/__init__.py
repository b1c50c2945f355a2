"""The agent inside the kernel: prepares it for a checkpoint, undoes that afterwards, and offers the magics.

Runs in the user's environment: of the rest of the package it imports only `errors`.
"""
