"""Fakes that other projects may use too: a CUDA driver, a helper, a host.

Each passes the same contract suite as the real thing.
"""
