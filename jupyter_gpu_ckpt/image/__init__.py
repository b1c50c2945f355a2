"""Images on this node's disk: written as drafts, published by a rename, verified, leased to one restorer, removed.

Nothing here knows of CUDA or CRIU processes; `manifest` says what an image consists of.
"""
