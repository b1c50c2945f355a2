"""Reports of a benchmark that ran, with a figure beyond its limit."""

#: Exit status; 1 is Python's own for what broke.
MISSED = 3
