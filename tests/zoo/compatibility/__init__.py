"""Things that people use in notebooks, each tried in a real kernel that is suspended, checkpointed, woken and moved.

`data`, `computing` and `habits` are the rows, `trial` tries one, `records` keeps what was found, and `page` writes
docs/compatibility.md of it.  ``make compatibility`` does all of that.
"""
