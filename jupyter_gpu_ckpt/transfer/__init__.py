"""Images elsewhere: pushed, pulled, and archived in a cold tier.

`storage` has files wherever fsspec writes; `remote` moves images there and compares each part's hash, `archive` only
their content.
"""
