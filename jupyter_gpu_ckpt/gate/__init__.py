"""The proxy that clients are connected to while the kernel behind it comes and goes.

`gate.Gate` is its face, `router` its thread; messages are queued, forwarded and answered here, and nothing is known of
CUDA, CRIU or images.
"""
