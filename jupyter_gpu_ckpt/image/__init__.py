"""Images on this node's disk: written as drafts, published by a rename, verified, leased to one restorer, removed."""
