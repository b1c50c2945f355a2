"""A refusal because of a child says which child it is, by its command and pid, before a dump is tried."""

from __future__ import annotations

import errno
import mmap
import os
import re
import sys

import pytest
from round_trip import Subject

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.process import inventory, shared_memory

ROOT = os.geteuid() == 0
#: Of the subject: it starts a program that prints a line when it is as it is to be.
CHILD = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-I", "-S", "-c", {source!r}, "a word of its own"], stdout=-1)
assert child.stdout.readline() == b"ready\\n"
answer = child.pid
"""
#: The source of each, what it is refused for, and the hint.
REFUSED = {
    "its limit of open files": (
        "import resource, time; resource.setrlimit(resource.RLIMIT_NOFILE, (5, 5)); print('ready', flush=True)\n"
        "time.sleep(1000)",
        "a limit of 5 open files (RLIMIT_NOFILE), 3 of them in use, in {named}",
        "6 or more",
    ),
    "a main thread that has ended": (
        "import ctypes, os, threading, time\n"
        "def report():\n"
        "    while open(f'/proc/{os.getpid()}/stat').read().split()[2] != 'Z': time.sleep(0.01)\n"
        "    print('ready', flush=True); time.sleep(1000)\n"
        "threading.Thread(target=report).start(); ctypes.CDLL(None).syscall(60, 0)",
        "a process whose main thread has ended while others run (pthread_exit), process {pid} (python",
        "End that process",
    ),
}
READY = "; print('ready', flush=True); time.sleep(1000)"
REFUSED |= {
    "its namespace": (
        "import ctypes, time; assert not ctypes.CDLL(None).unshare(0x10000000 | 0x40000000)" + READY,
        "a network namespace of its own, of {named}",
        "End the process that needs it, or start that outside of the kernel",
    ),
    "its device": (
        "import ctypes, time; ctypes.CDLL(None).syscall(425, 4, ctypes.create_string_buffer(120))" + READY,
        "an io_uring instance (descriptor 3), of {named}",
        "use asyncio's own loop",
    ),
    "its debugger": (
        "import ctypes, os, time\nif not os.fork(): time.sleep(999)\nlibc = ctypes.CDLL(None)\n"
        "(child,) = map(int, open(f'/proc/self/task/{os.getpid()}/children').read().split())\n"
        "assert libc.ptrace(0x4206, child, 0, 0) == 0" + READY,
        "a process that another one traces (by its debugger, process {pid}), of process ",
        "End the debugger",
    ),
    "its session": (
        "import os, time\nif not os.fork():\n    time.sleep(999)\nos.setsid()" + READY,
        "a process in a session that is not its parent's, of process ",
        "End that process",
    ),
    "its semaphores": (
        "import ctypes, time; libc = ctypes.CDLL(None); s = libc.semget(0, 1, 0o1600)\n"
        "libc.semop(s, ctypes.create_string_buffer(bytes([0, 0, 1, 0, 0, 0])), 1)\n"
        "import signal; signal.signal(15, lambda *_: (libc.semctl(s, 0, 0), exit()))" + READY,
        "System V semaphores that it has changed (semop), of {named}",
        "ipcrm -s",
    ),
}
#: A process that is made by clone(2), with memory or directories of its maker; it ends with that.
SHARING = (
    "import ctypes, time; libc = ctypes.CDLL(None); stack = ctypes.create_string_buffer(65536)\n"
    "top = ctypes.c_void_p(ctypes.addressof(stack) + 65520 & ~15)\n"
    "def end(*_):\n    import os; os.kill(other, 9); os._exit(0)\n"
    "import signal; signal.signal(signal.SIGTERM, end)\n"
    "other = libc.clone(libc.pause, top, {flags} | 17, None); assert other > 0" + READY
)
for share, flag in {"memory (CLONE_VM)": 0x100, "directories (CLONE_FS)": 0x200}.items():
    REFUSED[f"its {share}"] = (
        SHARING.format(flags=flag),
        f"processes that share their {share}, {{named}} and process ",
        "End one of them",
    )
if ROOT:
    REFUSED["its user"] = (
        "import os, time; os.setgid(54321); os.setuid(54321); print('ready', flush=True); time.sleep(1000)",
        "a process of another user, {named}",
        "End that process",
    )
else:
    REFUSED["its secrets"] = (
        "import ctypes, time; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0); print('ready', flush=True); time.sleep(1000)",
        "a process that nobody may look into, {named} (PR_SET_DUMPABLE is 0)",
        "outside of the kernel",
    )


def named(pid: int, source: str) -> str:
    words = (sys.executable, "-I", "-S", "-c", source, "a word of its own")
    return f"process {pid} ({procfs.shown_command(words, '')})"


@pytest.mark.parametrize("kind", REFUSED)
def test_a_child_is_refused_by_its_name(kind, capsule):
    source, what, hint = REFUSED[kind]
    subject = Subject(capsule)
    pid = int(subject.tell(CHILD.format(source=source)))
    refusal, *others = capsule.inspect()["refusals"]
    assert all(each["what"].endswith(named(pid, source)) for each in others)
    subject.tell("child.terminate()")  # what outlives it, it removes
    assert refusal["what"].startswith(what.format(pid=pid, named=named(pid, source)))
    assert hint in refusal["hint"]


@pytest.mark.parametrize("free", [2, 3])
def test_as_many_open_files_as_a_dump_needs_are_enough(free, capsule, criu, home):
    subject = Subject(capsule)
    limit = 3 + free
    source = (
        f"import resource, time; resource.setrlimit(7, ({limit}, {limit})); print('ready', flush=True)\ntime.sleep(99)"
    )
    subject.tell(CHILD.format(source=source))
    assert bool(capsule.inspect()["refusals"]) == (free < inventory._CRIU_DESCRIPTORS)
    if free == inventory._CRIU_DESCRIPTORS:
        criu.dump(capsule, home / "image", timeout=60)


def test_a_setting_of_shared_memory_is_named_in_words():
    file = shared_memory._File("/dev/shm/plasma")
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        memory.madvise(mmap.MADV_DONTDUMP)
        for mapping in procfs.maps(os.getpid()):
            if mapping.name == "/dev/zero (deleted)" and "dd" in shared_memory._flags(os.getpid(), mapping.start):
                file.mapped.append(shared_memory._Mapped(os.getpid(), mapping))
        with pytest.raises(shared_memory.UnsavableSharedMemory) as caught:
            shared_memory._check(file)
    assert caught.value.errno == errno.ENOTSUP
    pattern = r"/dev/shm/plasma: process \d+ \(.*\) has left it out of core dumps \(madvise, MADV_DONTDUMP\)"
    assert re.fullmatch(pattern, caught.value.strerror)
