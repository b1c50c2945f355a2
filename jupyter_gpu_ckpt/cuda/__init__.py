"""CUDA: the driver's checkpoint functions, NVML, and the native library that moves device memory at the bus's rate.

One helper process talks to the driver for all kernels of a server; `native/` is preloaded into kernels.
"""
