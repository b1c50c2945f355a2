"""Cells that leave a kernel a few more descriptors, threads or bytes, and lift these limits again."""

from __future__ import annotations

import os

import pytest

#: Defines `allow(NAME, COUNT)` and `lift()`; a limit of a name of `resource` is set, so that COUNT more can be had.
LIMITS = """
import os, resource

def used_descriptors():
    numbers = set()
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            os.fstat(number)
        except OSError:  # that of the listing itself
            continue
        numbers.add(number)
    return numbers

def used_tasks():
    tasks = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{pid}").st_uid == os.getuid():
                tasks += len(os.listdir(f"/proc/{pid}/task"))
        except OSError:
            pass
    return tasks

def allow(name, count):
    if name == "NOFILE":
        used, limit = used_descriptors(), 0
        while limit - sum(number < limit for number in used) < count or limit in used:
            limit += 1
    elif name == "NPROC":
        limit = used_tasks() + count
    else:
        limit = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + count
    number = getattr(resource, f"RLIMIT_{name}")
    resource.setrlimit(number, (limit, resource.getrlimit(number)[1]))

def lift():
    for name in ("NOFILE", "NPROC", "AS"):
        number = getattr(resource, f"RLIMIT_{name}")
        resource.setrlimit(number, (resource.getrlimit(number)[1],) * 2)
"""
#: Opens so many files that a report of them is longer than what pyzmq copies (64 KiB).
FILES = """
import tempfile
directory = tempfile.TemporaryDirectory(prefix="files with names that are long enough for their purpose ")
files = [open(f"{directory.name}/{number}", "w") for number in range(900)]
"""
#: Root's threads are not counted.
ordinary_users = pytest.mark.skipif(os.geteuid() == 0, reason="root has no limit of threads; run by test_rootless.py")
#: Limits of a kernel's tasks and descriptors, as parameters of a test.
NAMES = [pytest.param("NPROC", marks=ordinary_users), "NOFILE"]
