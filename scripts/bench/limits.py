"""How a benchmark says that it ran and a figure is beyond its limit."""

#: Exit status; 1 is Python's own for what broke.
MISSED = 3
