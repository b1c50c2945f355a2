"""Properties of a node, and the comparison that says whether an image can be restored on it.

Facts and fingerprints are taken at a checkpoint and compared before a restore; requirements are published for a hub.
"""
