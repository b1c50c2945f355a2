"""Large memory that is mapped populated gets huge pages; all other memory is unchanged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MIB = 1 << 20
#: Maps, and tells what smaps (proc_pid_smaps(5)) says of it, and the error.
_PROGRAM = """
import ctypes, json, mmap, re, sys
size, protection, flags = map(int, sys.argv[1:4])
libc = ctypes.CDLL(None, use_errno=True)
found = getattr(libc, sys.argv[4])
found.restype, found.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
at = found(None, size, protection, flags, -1, 0)
if at == ctypes.c_void_p(-1).value:
    print(json.dumps({"errno": ctypes.get_errno()}))
    sys.exit()
said, inside = {"errno": 0, "Rss": 0, "AnonHugePages": 0}, False
for line in open("/proc/self/smaps"):
    if area := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
        low, high = (int(one, 16) for one in area.groups())
        inside = low < at + size and at < high
    elif inside and (fact := re.match(r"(Rss|AnonHugePages):\\s+(\\d+)", line)):
        said[fact[1]] += int(fact[2]) << 10
if protection & 2:
    ctypes.memset(at, 7, size)
    said["ends"] = [ctypes.string_at(at, 1)[0], ctypes.string_at(at + size - 1, 1)[0]]
print(json.dumps(said))
"""
READ, WRITE = 1, 2
PRIVATE, ANONYMOUS, POPULATE = 0x2, 0x20, 0x8000


def mapped(library: Path | None, size: int, protection: int, flags: int, name: str = "mmap") -> dict:
    environment = {**os.environ, "LD_PRELOAD": str(library) if library else ""}
    words = [sys.executable, "-c", _PROGRAM, *map(str, (size, protection, flags)), name]
    return json.loads(subprocess.run(words, env=environment, capture_output=True, check=True, text=True).stdout)


@pytest.mark.parametrize("name", ["mmap", "mmap64"])
@pytest.mark.parametrize("size", [64 * MIB, 100 * MIB + 4096, 320 * MIB])
def test_populated_memory_is_of_huge_pages(programs, name, size):
    if "[never]" in THP.read_text():
        pytest.skip(f"this system gives no huge pages ({THP})")
    found = mapped(programs.library, size, READ | WRITE, PRIVATE | ANONYMOUS | POPULATE, name)
    assert found["Rss"] >= size
    assert found["AnonHugePages"] >= size - 4 * MIB, "all but the ends"
    assert found["ends"] == [7, 7]


@pytest.mark.parametrize(
    ("size", "protection", "flags"),
    [
        (64 * MIB - 4096, READ | WRITE, PRIVATE | ANONYMOUS | POPULATE),
        (64 * MIB, READ | WRITE, PRIVATE | ANONYMOUS),
        (64 * MIB, READ, PRIVATE | ANONYMOUS | POPULATE),
        (0, READ | WRITE, PRIVATE | ANONYMOUS | POPULATE),
        (1 << 60, READ | WRITE, PRIVATE | ANONYMOUS | POPULATE),
    ],
)
def test_any_other_is_as_without_the_library(programs, size, protection, flags):
    assert mapped(programs.library, size, protection, flags) == mapped(None, size, protection, flags)
