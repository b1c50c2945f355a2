"""A kernel's way between GPU, host memory and disk: states, plans and their undo, and the steps that carry them out.

`plans` is pure, `steps` runs plans, `lifecycle.Lifecycle` has the verbs; `kernel.host` joins this and `gate`.
"""
