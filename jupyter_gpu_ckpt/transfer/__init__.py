"""Images elsewhere: pushed, pulled, and kept in a cold tier, in parts that prove themselves on arrival.

Uses fsspec for object stores and remote hosts, and plain files for a directory that hosts share.
"""
