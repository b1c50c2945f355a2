"""The proxy that clients are connected to while the kernel behind it comes and goes.

`gate.Gate` is its public class, `router` its thread, where messages are queued, forwarded and answered; nothing here
knows of CUDA, CRIU or images.
"""
