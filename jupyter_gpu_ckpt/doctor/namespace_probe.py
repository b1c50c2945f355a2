"""Try, in a process of its own, every right that a capsule and CRIU need, and report which ones are refused.

Run as a script (``python -I -S namespace_probe.py '<json>'``), never imported by the server: ``unshare`` cannot be
undone, so the trial needs a process that ends.  Standard library only.

Input ``{"user": bool, "argv": [..], "seconds": float}``: whether to start with a user namespace, and a program (``criu
check``) to run inside with the capabilities that CRIU gets in a capsule.  Output: one JSON object with each tried step
as a key and ``null`` (it works) or ``{"errno": int, "message": str}``; steps that depend on a failed one are absent.
``"run"`` is ``{"status": int, "output": str}``.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any

sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from jupyter_gpu_ckpt.capsule import namespaces
from jupyter_gpu_ckpt.process import syscalls

CLONE_NEWNET = 0x40000000
PTRACE_SEIZE = 0x4206
SIOCSIFFLAGS = 0x8914
IFF_UP = 0x1
SYS_clone3 = 435  # the same on x86_64 and aarch64: numbers above 423 are common to all architectures

#: What confines this process (proc(5)).
ATTRIBUTE = "/proc/self/attr/current"
#: A pid that no process of a fresh pid namespace has yet, below every usual ``kernel.pid_max``.
WANTED_PID = 3000

# PyDLL keeps the interpreter lock during the call: the child of a bare clone3() has this one thread and must hold it.
_libc = ctypes.PyDLL(None, use_errno=True)


def attempt(answers: dict[str, Any], name: str, work: Callable[[], object]) -> bool:
    """Call ``work`` and record the result as step ``name``; return whether it succeeded."""
    try:
        work()
    except OSError as error:
        answers[name] = {"errno": error.errno or 0, "message": error.strerror or str(error)}
        return False
    answers[name] = None
    return True


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def map_own_ids(uid: int, gid: int) -> None:
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"{uid} {uid} 1")
    write("/proc/self/gid_map", f"{gid} {gid} 1")


def unshare_time() -> None:
    syscalls.unshare(syscalls.CLONE_NEWTIME)
    write("/proc/self/timens_offsets", "monotonic 1 0\nboottime 1 0\n")


def unshare_mounts() -> None:
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_SLAVE)


def clone_with_tid() -> None:
    """Call clone3(2) with ``set_tid``, by which CRIU gives a restored process its old pid."""
    wanted = (ctypes.c_int * 1)(WANTED_PID)
    arguments = struct.pack("=11Q", 0, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, ctypes.addressof(wanted), 1, 0)
    pid = _libc.syscall(ctypes.c_long(SYS_clone3), ctypes.c_char_p(arguments), ctypes.c_size_t(len(arguments)))
    if pid == 0:
        os._exit(0)
    if pid < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"clone3 with set_tid: {os.strerror(number)}")
    os.waitpid(pid, 0)


def seize_unrelated() -> None:
    """Attach by ptrace(2) to a process that is no descendant, as CRIU does, which yama's ptrace_scope restricts."""
    target = os.fork()
    if target == 0:
        signal.pause()
        os._exit(0)
    try:
        tracer = os.fork()
        if tracer == 0:
            failed = _libc.ptrace(ctypes.c_long(PTRACE_SEIZE), ctypes.c_int(target), None, None) < 0
            os._exit(ctypes.get_errno() if failed else 0)
        number = os.waitstatus_to_exitcode(os.waitpid(tracer, 0)[1])
    finally:
        os.kill(target, signal.SIGKILL)
        os.waitpid(target, 0)
    if number:
        raise OSError(number, f"ptrace: {os.strerror(abs(number))}")


def apparmor_profile(current: str = ATTRIBUTE) -> str:
    """Return the name of the AppArmor profile that is enforced for this process, or ""."""
    try:
        with open(current) as file:
            label = file.read()
    except OSError:  # this Linux has no such module
        return ""
    name, _, mode = label.strip("\0\n").rpartition(" ")
    return name if mode == "(enforce)" else ""


def enter_own_profile(current: str = ATTRIBUTE) -> None:
    """Enter the AppArmor profile that is enforced already, as CRIU has each thread do that it restores."""
    write(current, f"changeprofile {apparmor_profile(current)}")


def compare_with_itself() -> None:
    syscalls.call("kcmp", os.getpid(), os.getpid(), syscalls.KCMP_FILES, 0, 0)


def copy_descriptor() -> None:
    pidfd = os.pidfd_open(os.getpid())
    os.close(syscalls.pidfd_getfd(pidfd, pidfd))
    os.close(pidfd)


def splice_memory() -> None:
    """Call vmsplice(2), by which CRIU reads the memory of a process."""
    reader, writer = os.pipe()
    page = ctypes.create_string_buffer(16)
    vector = struct.pack("=2Q", ctypes.addressof(page), len(page))
    done = _libc.vmsplice(ctypes.c_int(writer), ctypes.c_char_p(vector), ctypes.c_size_t(1), ctypes.c_uint(0))
    number = ctypes.get_errno()
    os.close(reader)
    os.close(writer)
    if done < 0:
        raise OSError(number, os.strerror(number))


def run_inside(argv: list[str], seconds: float) -> dict[str, Any]:
    """Run a program as CRIU is run in a capsule.

    In a network namespace of its own: ``criu check`` requires TCP repair, a right of the network namespace's owner.  A
    capsule stays in the host's network and never needs it (``--tcp-close``, ``--network-lock skip``).
    """
    syscalls.unshare(CLONE_NEWNET)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:  # CRIU tries TCP repair on 127.0.0.1
        fcntl.ioctl(channel, SIOCSIFFLAGS, struct.pack("=16sH22x", b"lo", IFF_UP))
    if os.geteuid() != 0:  # root keeps its capabilities over execve(2), and may lack some of these by its bounding set
        syscalls.raise_ambient()
    done = subprocess.run(  # the caller of this script ends it if it hangs, with the whole session
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds, check=False
    )
    return {"status": done.returncode, "output": done.stdout.decode(errors="replace")}


def inside(answers: dict[str, Any], argv: list[str], seconds: float) -> None:
    """Try the steps of PID 1 of the new namespaces."""
    if attempt(answers, "proc", namespaces.mount_proc):
        # /proc/sys belongs to the pid namespace that the mount shows: ours, since this mount
        attempt(answers, "ns_last_pid", lambda: write("/proc/sys/kernel/ns_last_pid", str(WANTED_PID - 1000)))
    attempt(answers, "set_tid", clone_with_tid)
    attempt(answers, "ptrace", seize_unrelated)
    if apparmor_profile():
        attempt(answers, "change_profile", enter_own_profile)
    for name, work in (("kcmp", compare_with_itself), ("pidfd_getfd", copy_descriptor), ("vmsplice", splice_memory)):
        attempt(answers, name, work)
    if argv:
        try:
            answers["run"] = run_inside(argv, seconds)
        except (OSError, subprocess.TimeoutExpired) as error:
            answers["run"] = {"status": -1, "output": str(error)}


def main(text: str) -> None:
    request = json.loads(text)
    answers: dict[str, Any] = {}
    uid, gid = os.getuid(), os.getgid()
    if not request["user"] or (
        attempt(answers, "user", lambda: syscalls.unshare(syscalls.CLONE_NEWUSER))
        and attempt(answers, "map", lambda: map_own_ids(uid, gid))
    ):
        mounts = attempt(answers, "mount", unshare_mounts)
        attempt(answers, "time", unshare_time)
        pids = attempt(answers, "pid", lambda: syscalls.unshare(syscalls.CLONE_NEWPID))
        if mounts and pids:  # else the rest would touch the host's
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                with contextlib.suppress(OSError):
                    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
                try:
                    inside(answers, request["argv"], request["seconds"])
                finally:
                    with open(writer, "w") as file:
                        json.dump(answers, file)
                    os._exit(0)
            os.close(writer)
            with open(reader) as file:
                answers = json.loads(file.read() or "{}") or answers
            os.waitpid(child, 0)
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
