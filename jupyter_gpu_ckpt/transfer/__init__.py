"""Images elsewhere: pushed, pulled, and archived in a cold tier.

`remote` copies images over whatever fsspec opens and compares each part's hash; `archive` moves their content.
"""
