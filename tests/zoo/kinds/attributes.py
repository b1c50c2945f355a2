"""State that the system keeps about the process: prctl, limits, scheduling, confinement."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys
from pathlib import Path

from . import IMPOSSIBLE, kind, refused
from .asking import error_of, libc, prctl, status, system

WHOLE = "changes the whole process"


@kind("a raised nice value")
def nice():
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + 3)
    return lambda: os.getpriority(os.PRIO_PROCESS, 0)


@kind("a negative nice value", user=IMPOSSIBLE, alone=WHOLE)
def urgent():
    os.setpriority(os.PRIO_PROCESS, 0, -3)
    return lambda: os.getpriority(os.PRIO_PROCESS, 0), lambda: os.setpriority(os.PRIO_PROCESS, 0, 0)


@kind("a scheduling policy (SCHED_BATCH)")
def policy():
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    return lambda: os.sched_getscheduler(0), lambda: os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


@kind(
    "a deadline policy (SCHED_DEADLINE)",
    refused("UNPROVEN_STATE", "deadline"),
    user=IMPOSSIBLE,
    alone=WHOLE,
)
def deadline():
    attributes = struct.pack("IIQiIQQQ", 48, 6, 1, 0, 0, 1_000_000, 100_000_000, 100_000_000)
    system("sched_setattr", 0, ctypes.create_string_buffer(attributes), 0)
    return lambda: os.sched_getscheduler(0), lambda: os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


@kind("CPU affinity", alone=WHOLE)
def affinity():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    return lambda: sorted(os.sched_getaffinity(0)), lambda: os.sched_setaffinity(0, before)


@kind("utilization clamps (uclamp)", alone=WHOLE)
def utilization_clamp():
    attributes = struct.pack("IIQiIQQQII", 56, 0, 0x8 | 0x10 | 0x40, 0, 0, 0, 0, 0, 0, 512)
    if error_of(lambda: system("sched_setattr", 0, ctypes.create_string_buffer(attributes), 0)) != "none":
        raise PermissionError("this system has none")

    def show():
        found = ctypes.create_string_buffer(56)
        system("sched_getattr", 0, found, 56, 0)
        return struct.unpack_from("II", found.raw, 48)

    return show


@kind("I/O priority (ionice)", alone=WHOLE)
def ioprio():
    system("ioprio_set", 1, 0, 2 << 13 | 6)
    return lambda: system("ioprio_get", 1, 0), lambda: system("ioprio_set", 1, 0, 0)


@kind("NUMA memory policy (set_mempolicy)", alone=WHOLE)
def memory_policy():
    mask = ctypes.c_ulong(1)
    system("set_mempolicy", 1, ctypes.byref(mask), 2)

    def show():
        mode = ctypes.c_int()
        system("get_mempolicy", ctypes.byref(mode), None, 0, None, 0)
        return mode.value

    return show, lambda: system("set_mempolicy", 0, None, 0)


@kind("timer slack (PR_SET_TIMERSLACK)", alone=WHOLE)
def timer_slack():
    prctl(29, 123_456)
    return lambda: prctl(30), lambda: prctl(29, 0)


@kind("a parent-death signal (PR_SET_PDEATHSIG)", alone=WHOLE)
def death_signal():
    def ask():
        number = ctypes.c_int()
        libc("prctl", 2, ctypes.byref(number), 0, 0, 0)
        return number.value

    prctl(1, signal.SIGUSR2)
    return ask, lambda: prctl(1, 0)


@kind("a child subreaper (PR_SET_CHILD_SUBREAPER)", alone=WHOLE)
def subreaper():
    def ask():
        number = ctypes.c_int()
        libc("prctl", 37, ctypes.byref(number), 0, 0, 0)
        return number.value

    prctl(36, 1)
    return ask, lambda: prctl(36, 0)


@kind("no new privileges (PR_SET_NO_NEW_PRIVS)", alone="cannot be undone")
def no_new_privileges():
    prctl(38, 1)
    return lambda: (prctl(39), status("NoNewPrivs"))


@kind(
    "not dumpable (PR_SET_DUMPABLE 0)",
    user=refused("UNPROVEN_STATE", "dumpable"),
    alone=WHOLE,
    advice="Set it to 1.",
)
def not_dumpable():
    prctl(4, 0)
    return lambda: prctl(3), lambda: prctl(4, 1)


@kind("no huge pages (PR_SET_THP_DISABLE)", alone=WHOLE)
def no_huge_pages():
    prctl(41, 1)
    return lambda: prctl(42), lambda: prctl(41, 0)


@kind("secure bits (PR_SET_SECUREBITS, PR_SET_KEEPCAPS)", alone=WHOLE)
def keep_capabilities():
    prctl(8, 1)
    return lambda: (prctl(7), prctl(27)), lambda: prctl(8, 0)


@kind("no writable and executable memory (PR_SET_MDWE)", alone="cannot be undone")
def write_xor_execute():
    try:
        prctl(65, 1)
    except OSError as error:
        raise PermissionError("this system has none") from error
    return lambda: prctl(66)


@kind("time-stamp counter setting (PR_GET_TSC)", alone=WHOLE)
def no_time_stamps():
    def ask():
        number = ctypes.c_int()
        libc("prctl", 25, ctypes.byref(number), 0, 0, 0)
        return number.value

    return ask


@kind("speculation mitigations (PR_SET_SPECULATION_CTRL)", alone="cannot be undone")
def speculation():
    if error_of(lambda: prctl(53, 0, 4)) != "none":
        raise PermissionError("this processor has none")
    return lambda: prctl(52, 0)


@kind("memory error policy (PR_MCE_KILL)", alone=WHOLE)
def memory_errors():
    prctl(33, 1, 1)
    return lambda: prctl(34), lambda: prctl(33, 1, 2)


@kind("the process's name (PR_SET_NAME)")
def name():
    Path("/proc/self/comm").write_text("zoo")
    return lambda: (Path("/proc/self/comm").read_text(), Path("/proc/self/stat").read_text().split()[1])


@kind("the process's title, written over its arguments (setproctitle)")
def title():
    low, high = (int(word) for word in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    length = min(high - low, 30)
    ctypes.memmove(low, b"zoo: a title of its own".ljust(length, b"\0")[:length], length)
    return lambda: Path("/proc/self/cmdline").read_text()[:23]


@kind("lowered limits: files, core, stack, locked memory, processes", alone=WHOLE)
def limits():
    chosen = {"NOFILE": 900, "CORE": 12_345, "STACK": 4 << 20, "MEMLOCK": 4096, "SIGPENDING": 77, "RTPRIO": 0}
    before = {}
    for name, soft in chosen.items():
        number = getattr(resource, f"RLIMIT_{name}", 11)
        before[number] = resource.getrlimit(number)
        hard = before[number][1]
        resource.setrlimit(number, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
    return lambda: [resource.getrlimit(number) for number in before], (
        lambda: [resource.setrlimit(number, pair) for number, pair in before.items()]
    )


@kind("a limit on address space just above its use (RLIMIT_AS)", alone=WHOLE)
def address_space():
    before = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * 4096 + (2 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (size, before[1]))
    return lambda: resource.getrlimit(resource.RLIMIT_AS), lambda: resource.setrlimit(resource.RLIMIT_AS, before)


@kind("a limit on open files below the highest descriptor in use", alone=WHOLE)
def below_its_descriptors():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    r, _ = os.pipe()
    os.dup2(r, 800)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
    return lambda: (resource.getrlimit(resource.RLIMIT_NOFILE)[0], os.fstat(800).st_mode), (
        lambda: resource.setrlimit(resource.RLIMIT_NOFILE, before)
    )


@kind("personality: no address randomization", alone=WHOLE)
def personality():
    before = libc("personality", ctypes.c_ulong(0xFFFFFFFF))
    libc("personality", ctypes.c_ulong(before | 0x0040000))
    return lambda: hex(libc("personality", ctypes.c_ulong(0xFFFFFFFF))), lambda: libc(
        "personality", ctypes.c_ulong(before)
    )


@kind("oom_score_adj")
def oom_score():
    Path("/proc/self/oom_score_adj").write_text("333")
    return lambda: Path("/proc/self/oom_score_adj").read_text()


@kind("coredump_filter", alone=WHOLE)
def core_filter():
    before = Path("/proc/self/coredump_filter").read_text()
    Path("/proc/self/coredump_filter").write_text("0x7f")
    return lambda: Path("/proc/self/coredump_filter").read_text(), (
        lambda: Path("/proc/self/coredump_filter").write_text(f"0x{before.strip()}")
    )


@kind("autogroup nice value", alone=WHOLE)
def autogroup():
    path = Path("/proc/self/autogroup")
    if not path.exists() or error_of(lambda: path.write_text("5")) != "none":
        raise PermissionError("this system has none")
    return lambda: path.read_text().split()[-1], lambda: path.write_text("0")


@kind(
    "a keyring with a key in it",
    refused("UNPROVEN_STATE", "keyring"),
    alone="cannot be undone",
    advice="The kernel stays where it is.",
)
def keyring():
    try:
        system("keyctl", 1, ctypes.c_char_p(b"zoo"))
        key = system("add_key", b"user", b"zoo-key", b"secret", 6, -3)
    except OSError as error:
        raise PermissionError("this system has none") from error

    def show():
        found = ctypes.create_string_buffer(20)
        system("keyctl", 11, key, found, 20)
        return found.value.decode(), system("request_key", b"user", b"zoo-key", None, 0) == key

    return show


@kind(
    "confined by Landlock",
    refused("UNPROVEN_STATE", "Landlock"),
    alone="cannot be undone",
    advice="The kernel stays where it is.",
)
def landlock():
    rules = struct.pack("Q", 1 << 12)  # no symbolic links may be made
    try:
        fd = system("landlock_create_ruleset", ctypes.create_string_buffer(rules), 8, 0)
        prctl(38, 1)
        system("landlock_restrict_self", fd, 0)
    except OSError as error:
        raise PermissionError("this system has none") from error
    os.close(fd)
    return lambda: error_of(lambda: os.symlink("a", f"/tmp/zoo-{os.getpid()}-{os.urandom(4).hex()}"))


@kind(
    "confined by a filter of system calls (seccomp)",
    user=refused("UNPROVEN_STATE", "seccomp"),
    alone="cannot be undone",
    advice="The kernel stays where it is.",
)
def seccomp():
    program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000))
    prctl(38, 1)
    system("seccomp", 1, 0, ctypes.create_string_buffer(struct.pack("HxxxxxxP", 1, ctypes.addressof(program))))
    return lambda: (status("Seccomp"), bool(program))


@kind("rounding and exceptions of floating point")
def floating_point():
    library = ctypes.CDLL("libm.so.6")
    library.fesetround(0x400)
    library.feraiseexcept(0x20)
    return lambda: (library.fegetround(), library.fetestexcept(0x3D) & 0x20, 1.0 / 3.0), lambda: library.fesetround(0)


@kind("environment variables, set and deleted")
def environment():
    os.environ["ZOO_SET"] = "päter"
    os.putenv("ZOO_PUT", "beneath")
    library = ctypes.CDLL(None)
    library.getenv.restype = ctypes.c_char_p
    return lambda: (os.environ["ZOO_SET"], library.getenv(b"ZOO_PUT").decode())


@kind("command line, executable and environment in /proc")
def proc_view():
    return lambda: (
        Path("/proc/self/exe").readlink() == Path(sys.executable).resolve(),
        len(Path("/proc/self/environ").read_bytes()) > 10,
        Path("/proc/self/auxv").read_bytes().hex(),
    )
