"""A capsule in a process with many open files, as a server with many kernels has them."""

from __future__ import annotations

import os
import resource
from contextlib import ExitStack

import pytest

from jupyter_gpu_ckpt.capsule.capsule import Capsule


def test_descriptors_above_1023(runtime_base):
    wanted, (_, most) = 1100, resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < wanted + 100:
        pytest.skip(reason=f"this user may open {most} files only: raise the hard limit (ulimit -Hn)")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], wanted + 100), most))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        null = stack.enter_context(open(os.devnull))
        for _ in range(wanted):
            stack.callback(os.close, os.dup(null.fileno()))
        capsule = stack.enter_context(Capsule.create(runtime_base))
        capsule.spawn(["sh", "-c", "exit 7"], {"PATH": os.environ["PATH"]}, None)
        assert capsule.wait(60) == 7
