"""Images on this node's disk: written as drafts, published by a rename, verified, leased to one restorer, removed.

`store.Store` finds and deletes them, `manifest` has their facts; images elsewhere are the business of `transfer`.
"""
