"""Images elsewhere: pushed, pulled, and archived in a cold tier.

`storage` has files wherever fsspec writes; `remote` moves images there and compares each part's hash, and `archive`
only their content, which fsspec does not do: it neither moves, claims and verifies, nor continues what broke off.
"""
