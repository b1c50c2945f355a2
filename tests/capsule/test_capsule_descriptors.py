"""A capsule in a process with many open files, as a server with many kernels has them."""

from __future__ import annotations

import os
import resource
from contextlib import ExitStack

import pytest
from sleepers import ENV

from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.errors import CapsuleError, LimitReached


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


def test_requests_that_fail_leave_no_descriptor_in_the_init(runtime_base):
    with Capsule.create(runtime_base) as capsule, open(os.devnull) as null:

        def descriptors() -> int:
            return len(os.listdir(f"/proc/{capsule._init_pid}/fd"))

        capsule._request({"verb": "status"})  # it has accepted its owner
        before = descriptors()
        with pytest.raises(CapsuleError, match="TypeError"):
            capsule._request({"verb": "status"}, fds=[null.fileno()])
        assert descriptors() == before
        limits, failed = resource.prlimit(capsule._init_pid, resource.RLIMIT_NOFILE), 0
        for free in range(8):  # a program needs its output's and three pipes
            resource.prlimit(capsule._init_pid, resource.RLIMIT_NOFILE, (before + free, limits[1]))
            try:
                capsule.run(["true"], cwd=capsule.directory, output=capsule.directory / "out", timeout=60, env=ENV)
            except LimitReached:
                failed += 1
            assert descriptors() == before, free
        assert failed >= 4
        resource.prlimit(capsule._init_pid, resource.RLIMIT_NOFILE, limits)
        ran = capsule.run(["true"], cwd=capsule.directory, output=capsule.directory / "out", timeout=60, env=ENV)
        assert ran.status == 0
