"""CRIU: found or installed, run for a dump or a restore, and its images and logs read.

Everything the package knows about CRIU's formats and messages is here.
"""
