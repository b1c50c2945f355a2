"""A kernel's way between GPU, host memory and disk: states, plans and their undo, and the steps that carry them out.

`machine` is pure; `driver.Lifecycle` runs what it plans.  Does not import `gate`: `kernel.host` joins the two.
"""
