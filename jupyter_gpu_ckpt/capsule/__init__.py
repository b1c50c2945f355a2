"""The namespaces one kernel lives in, and the init process that is PID 1 of them.

`capsule.Capsule` is the parent's side, `init` the other end of the same protocol; `criu_guard` keeps a kernel alive
when CRIU is killed while it dumps it.
"""
