"""Images elsewhere: pushed, pulled, and archived in a cold tier.  Everything foreign goes through fsspec."""
