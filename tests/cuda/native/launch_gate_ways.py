"""Calls functions that pass the launch gate, found in one of the ways; prints what is not as it should be.

Run as ``python launch_gate_ways.py WAY NAME ...`` with the library and `launch_gate_double.c`.  ``without DRIVER``:
prints whether lookups find the names, with the driver (1) and without it (0).
"""

from __future__ import annotations

import ctypes
import re
import sys

ARGUMENTS = (-7, 1.5, -3, 2.25, 0xABC, -0.125, 1 << 63, 4.5, 1 << 40, 5.5, -1, 6.5, -9, 7.5, 8.5, 9.5, -10.5, 77)
TYPES = (
    ctypes.c_long,
    ctypes.c_double,
    ctypes.c_int,
    ctypes.c_float,
    ctypes.c_void_p,
    ctypes.c_double,
    ctypes.c_ulonglong,
    ctypes.c_double,
    ctypes.c_long,
    ctypes.c_double,
    ctypes.c_long,
    ctypes.c_double,
    ctypes.c_short,
    *[ctypes.c_double] * 4,
    ctypes.c_long,
)
SHOWN = "-7 1.5 -3 2.25 0xabc -0.125 9223372036854775808 4.5 1099511627776 5.5 -1 6.5 -9 7.5 8.5 9.5 -10.5 77"
Function = ctypes.CFUNCTYPE(ctypes.c_int, *TYPES)


def address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def is_ours(at: int) -> bool:
    with open("/proc/self/maps") as maps:
        for line in maps:
            start, end = (int(word, 16) for word in line.split()[0].split("-"))
            if start <= at < end:
                return line.rstrip().endswith("_fastpath.so")
    return False


def check(name: str, at: int, *, gated: bool = True) -> None:
    """Call a function twice, the first time perhaps before the driver is known."""
    for _ in range(2):
        result = Function(at)(*ARGUMENTS)
        noted = ctypes.CDLL("libcuda.so.1").double_noted
        noted.restype = ctypes.c_char_p
        seen = (noted().decode(), result, is_ours(at))
        wanted = (f"{name} {SHOWN}", len(name) * 1000 + ord(name[-1]), gated)
        if seen != wanted:
            print(name, seen, wanted)


def base(name: str) -> str:
    return re.sub(r"_v\d+$", "", re.sub(r"_pt[sd][sz]$", "", name))


def by_link(names: list[str]) -> None:
    linked = ctypes.CDLL("liblinked.so").linked
    linked.restype = ctypes.c_void_p
    for name in names:
        check(name, linked(name.encode()))


def by_dlsym(names: list[str]) -> None:
    library = ctypes.CDLL("libcuda.so.1")
    for name in [*names, "cuLaunchKernel_v99"]:
        check(name, address(library[name]))
    check("cuNotGated", address(library["cuNotGated"]), gated=False)


def by_address(names: list[str]) -> None:
    library, found = ctypes.CDLL("libcuda.so.1"), set()
    function, status = ctypes.c_void_p(), ctypes.c_int()
    for name in sorted({base(name) for name in names}):
        for first in (0, 1000):
            for version in range(first, first + 10):
                arguments = (name.encode(), ctypes.byref(function), version, ctypes.c_ulonglong(2))
                if version % 2:
                    result = library.cuGetProcAddress(*arguments)
                else:
                    result = library.cuGetProcAddress_v2(*arguments, ctypes.byref(status)) or status.value
                if result:
                    break
                one = function.value
                assert library.cuGetProcAddress(*arguments) == 0
                if function.value != one:
                    print(name, "has another address the second time")
                Function(one)(*ARGUMENTS)
                library.double_noted.restype = ctypes.c_char_p
                noted = library.double_noted().decode().removesuffix(f" {SHOWN}")
                check(noted, one)
                found.add(noted)
    wanted = {*names, "cuLaunchKernel_v99"} | {f"inner {name}" for name in (*names, "cuLaunchKernel_v99")}
    if found != wanted:
        print(found ^ wanted)


def without(names: list[str]) -> None:
    """The driver lacks all of the names, or (0) is not there."""
    libraries = [ctypes.CDLL(None)]
    dlsym = libraries[0].dlsym
    dlsym.restype, dlsym.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_char_p)
    if names.pop(0) == "1":
        libraries.append(ctypes.CDLL("libcuda.so.1"))
    for name in names:
        print(name, *(hasattr(library, name) for library in libraries), dlsym(None, name.encode()) is not None)
        print(dlsym(ctypes.c_void_p(-1), name.encode()) is not None)
    if len(libraries) == 2:
        linked = ctypes.CDLL("liblinked.so").linked
        linked.restype = ctypes.c_void_p
        print(Function(linked(names[0].encode()))(*ARGUMENTS))


WAYS = {"link": by_link, "dlsym": by_dlsym, "cuGetProcAddress": by_address, "without": without}


if __name__ == "__main__":
    WAYS[sys.argv[1]](sys.argv[2:])
