"""A kernel's way between GPU, host memory and disk: states, plans and their undo, and the steps that carry them out.

`plans` is pure; `lifecycle.Lifecycle` carries the plans out.  Does not import `gate`: `kernel.host` joins the two.
"""
