"""Free descriptors of a process, and its limit while something is connected to it."""

from __future__ import annotations

import contextlib
import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.errors import LimitReached
from jupyter_gpu_ckpt.process import descriptors

#: Has 3 descriptors (`subprocess`) and a limit.
SUBJECT = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, tuple(map(int, sys.argv[1:])))
print("ready", flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def process(soft: int, hard: int) -> Iterator[int]:
    argv = [sys.executable, "-c", SUBJECT, str(soft), str(hard)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as subject:
        assert subject.stdout is not None
        subject.stdout.readline()
        yield subject.pid


def limit(pid: int) -> tuple[int, int]:
    return resource.prlimit(pid, resource.RLIMIT_NOFILE)


def test_numbers_below_the_limit_count():
    with process(10, 20) as pid:
        assert descriptors.free(pid) == 7
        assert not descriptors.may_connect(pid)
    assert descriptors.may_connect(pid), "it has ended: nobody knows"


def test_a_limit_that_is_far_is_left_alone():
    with process(1000, 1000) as pid, descriptors.headroom(pid, 0):
        assert limit(pid) == (1000, 1000)


def test_a_soft_limit_is_raised_meanwhile():
    with process(10, 1000) as pid:
        with descriptors.headroom(pid, 0):
            assert limit(pid) == (1000, 1000)
            assert descriptors.may_connect(pid)
        assert limit(pid) == (10, 1000)


def test_a_limit_that_the_program_sets_meanwhile_stays():
    with process(10, 1000) as pid:
        with descriptors.headroom(pid, 0):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (50, 900))
        assert limit(pid) == (50, 900)


def may_raise(pid: int) -> bool:
    """Return whether hard limits may be raised: by root with CAP_SYS_RESOURCE."""
    soft, hard = limit(pid)
    try:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard + 1))
    except (OSError, ValueError):
        return False
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    return True


def test_a_hard_limit_is_raised_by_those_who_may():
    with process(8, 9) as pid:
        if may_raise(pid):
            with descriptors.headroom(pid, 0):
                assert descriptors.may_connect(pid)
        else:
            with pytest.raises(LimitReached, match=r"\(9\)"), descriptors.headroom(pid, 0.1):
                pytest.fail("nothing is to be connected")
        assert limit(pid) == (8, 9)


def test_a_process_that_closes_files_in_time_is_waited_for(monkeypatch):
    numbers = iter([range(9), range(9), range(9), range(3)])
    monkeypatch.setattr(descriptors, "_raised_limit", contextlib.nullcontext)
    monkeypatch.setattr(descriptors.procfs, "descriptors", lambda pid: next(numbers))
    with process(11, 11) as pid, descriptors.headroom(pid, 60):
        assert next(numbers, None) is None


@pytest.mark.parametrize(
    ("limit", "highest"), [(1024, 992), (4096, 4064), (4100, 4064), (20000, 19936), (1 << 20, 1048544)]
)
def test_numbers_that_leave_some_to_criu(limit, highest):
    assert descriptors.highest_number(limit) == highest
    assert descriptors.needed_limit(highest) <= limit < descriptors.needed_limit(highest + 1)


def test_criu_has_the_hard_limit_or_all_there_is_where_it_may_raise_it():
    code = (
        "import resource\nfrom jupyter_gpu_ckpt.process import descriptors\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))\nprint(descriptors.limit_of_criu())\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (100, 200)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    with process(8, 9) as pid:
        assert int(found) == (int(procfs.sysctl("fs.nr_open")) if may_raise(pid) else 200)
