"""What a node is, and whether an image can be restored on it.

Facts and fingerprints are taken at a checkpoint and compared before a restore; requirements are published for a hub.
"""
