"""Children: they come along, those that left the kernel's tree are refused by name; what is left of others is kept."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import fcntl
import itertools
import mmap
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import termios
import threading
from multiprocessing import resource_tracker, shared_memory

from jupyter_gpu_ckpt import procfs

from . import documented, kind, refused
from .asking import eventually, place

ADVICE = "End it."


def ended(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def waits(pid: int) -> bool:
    """Return whether a process lives and waits for something: as a restore must leave it."""
    return procfs.stat(pid).state in "ST"


@kind("a program that runs beside the notebook (subprocess)")
def program():
    process = subprocess.Popen(["sleep", "1234"])
    return lambda: (process.poll(), waits(process.pid)), lambda: ended(process)


@kind("a program that is stopped (SIGSTOP)")
def stopped():
    process = subprocess.Popen(["sleep", "1235"])
    os.kill(process.pid, signal.SIGSTOP)
    eventually(lambda: procfs.stat(process.pid).state == "T")
    return lambda: (process.poll(), procfs.stat(process.pid).state), lambda: ended(process)


@kind(
    "a stopped program with signals that wait: one that ends it, and one that it handles",
    refused("UNPROVEN_STATE", "waits for"),
    alone="is refused",
    advice="Let it continue, or end it.",
)
def stopped_with_signals():
    ends = subprocess.Popen(["sleep", "1236"])
    code = (
        "import signal, sys\nsignal.signal(signal.SIGUSR1, lambda *_: print('got', flush=True))\n"
        "print('up', flush=True)\nwhile True: signal.pause()"
    )
    handles = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    handles.stdout.readline()
    for process, number in ((ends, signal.SIGTERM), (handles, signal.SIGUSR1)):
        os.kill(process.pid, signal.SIGSTOP)
        eventually(lambda pid=process.pid: procfs.stat(pid).state == "T")
        os.kill(process.pid, number)

    def show():
        return [(procfs.stat(each.pid).state, procfs.status(each.pid)["ShdPnd"]) for each in (ends, handles)]

    def undo():
        os.kill(ends.pid, signal.SIGCONT)
        os.kill(handles.pid, signal.SIGCONT)
        assert ends.wait() == -signal.SIGTERM
        assert handles.stdout.readline() == "got\n"
        ended(handles)

    return show, undo


@kind("a program that answers through pipes")
def answering():
    code = "import sys\nfor number, line in enumerate(sys.stdin): print(number, line.upper(), end='', flush=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    process.stdin.write("before\n")
    asked = itertools.count(1)

    def show():
        if next(asked) == 1:
            assert process.stdout.readline() == "0 BEFORE\n"
        process.stdin.write("again\n")
        return process.stdout.readline().split()[1]

    return show, lambda: ended(process)


@kind("a program in a session of its own (start_new_session), with a child")
def session():
    process = subprocess.Popen(["sh", "-c", "sleep 1241 & wait"], start_new_session=True)
    eventually(lambda: procfs.children(process.pid))
    (child,) = procfs.children(process.pid)

    def show():
        return [(os.getsid(pid) == process.pid, os.getpgid(pid) == process.pid) for pid in (process.pid, child)]

    def undo():
        os.kill(child, signal.SIGKILL)
        ended(process)

    return show, undo


@kind(
    "a process in a group whose leader has ended",
)
def group():
    code = (
        "import os, signal\n"
        "if not (leader := os.fork()): os.setpgid(0, 0); signal.pause()\n"
        "while os.getpgid(leader) != leader: pass\n"
        "if not (other := os.fork()): signal.pause()\n"
        "os.setpgid(other, leader); os.kill(leader, 9); os.waitpid(leader, 0)\n"
        "print(other, flush=True); signal.pause()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    other = int(process.stdout.readline())

    def undo():
        os.kill(other, signal.SIGKILL)
        ended(process)

    return lambda: (os.getpgid(other), os.getpgid(other) not in (other, process.pid, os.getpgrp())), undo


@kind(
    "a pipeline in the foreground of a terminal, whose first command has ended",
    refused("UNPROVEN_STATE", "leader"),
    advice="End it.",
)
def pipeline():
    shell = Shell()
    os.write(shell.master, b"true | sleep 1253\n")
    eventually(lambda: shell.foreground() != shell.process.pid)
    job = shell.foreground()
    eventually(lambda: not os.path.exists(f"/proc/{job}"))
    members = [pid for pid in procfs.children(shell.process.pid) if os.getpgid(pid) == job]
    eventually(lambda: all(map(waits, members)))
    return lambda: (shell.foreground() == job, members, [waits(pid) for pid in members]), shell.end


@kind("a program that reads SIGCHLD when its child stops (script, signalfd)")
def sigchld_of_stops():
    code = (
        "import os, signal, sys\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])\n"
        "if not (child := os.fork()): signal.pause()\n"
        "for line in sys.stdin:\n"
        "    print(signal.SIGCHLD in signal.sigpending(), flush=True)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    eventually(lambda: procfs.children(process.pid))
    (child,) = procfs.children(process.pid)

    def show():
        process.stdin.write("?\n")
        return process.stdout.readline()

    def undo():
        os.kill(child, signal.SIGKILL)
        ended(process)

    return show, undo


@kind("a process that a debugger traces (ptrace)", refused("UNPROVEN_STATE", "traces"), advice=ADVICE)
def traced():
    code = (
        "import ctypes, os, signal\n"
        "if not (child := os.fork()): signal.pause()\n"
        "ctypes.CDLL(None).ptrace(0x4206, child, None, None); print(child, flush=True); signal.pause()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())

    def undo():
        os.kill(child, signal.SIGKILL)
        ended(process)

    return lambda: procfs.status(child)["TracerPid"], undo


@kind(
    "a process whose parent has left their session (setsid)",
    refused("UNPROVEN_STATE", "a session that is not its parent's"),
    advice=ADVICE,
)
def left_behind():
    code = (
        "import os, signal\n"
        "if not (child := os.fork()): signal.pause()\n"
        "os.setsid(); print(child, flush=True); signal.pause()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())

    def undo():
        os.kill(child, signal.SIGKILL)
        ended(process)

    return lambda: (os.getsid(child) == os.getsid(0), os.getsid(process.pid) == process.pid), undo


@kind("a child whose child has ended and was not waited for (a zombie)")
def zombie_of_child():
    process = subprocess.Popen(["sh", "-c", "true & exec sleep 1244"])
    eventually(lambda: [procfs.stat(pid).state for pid in procfs.children(process.pid)] == ["Z"])
    return lambda: [procfs.stat(pid).state for pid in procfs.children(process.pid)], lambda: ended(process)


@kind(
    "ended children that were not waited for, by exit status and signal",
    user=refused("UNPROVEN_STATE", "does not tell how it ended"),
    alone="is refused for an ordinary user, at its second checkpoint",
    advice="Wait for them.",
)
def zombies():
    commands = ["exit 0", "exit 1", "exit 127", "kill -9 $$", "kill -15 $$"]
    pids = [os.posix_spawn("/bin/sh", ["sh", "-c", command], {}) for command in commands]

    def show():
        ends = [os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT) for pid in pids]
        return [(end.si_code, end.si_status) for end in ends]

    return show, lambda: [os.waitpid(pid, 0) for pid in pids]


@kind(
    "an ended child that was not waited for, with an exit status of 128 or more",
    refused("UNPROVEN_STATE", "exit status 137"),
    alone="is refused",
    advice="Wait for it.",
)
def zombie_of_large_status():
    process = subprocess.Popen(["sh", "-c", "exit 137"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    return lambda: os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT).si_status, process.wait


@kind(
    "a program that runs from memory (memfd, fexecve)",
    refused("FILE_UNSUPPORTED", "runs from memory"),
    alone="is refused",
    advice="End it, or start it from a file.",
)
def program_in_memory():
    fd = os.memfd_create("program")
    with open("/bin/cat", "rb") as file:
        os.write(fd, file.read())
    process = subprocess.Popen(
        ["cat"], executable=f"/proc/self/fd/{fd}", pass_fds=[fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    os.close(fd)

    def show():
        process.stdin.write(b"word\n")
        process.stdin.flush()
        return process.stdout.readline().decode()

    return show, lambda: ended(process)


@kind("a program on a terminal of its own (pexpect)")
def on_terminal():
    master, slave = os.openpty()
    process = subprocess.Popen(
        ["cat"], stdin=slave, stdout=slave, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(slave)

    def show():
        os.write(master, b"word\n")
        seen = b""
        while seen.count(b"word") < 2:  # the terminal's echo, and the program's answer
            seen += os.read(master, 1000)
        return seen.decode(), os.tcgetpgrp(master) == process.pid, procfs.stat(process.pid).terminal > 0

    def undo():
        ended(process)
        os.close(master)

    return show, undo


class Shell:
    """An interactive shell on a terminal of its own, by ``/dev/tty`` and by standard input."""

    def __init__(self) -> None:
        self.master, slave = os.openpty()
        environment = {"PATH": os.environ["PATH"], "PS1": ""}
        self.process = subprocess.Popen(
            ["sh", "-i"], stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)
        self.reads("stty -echo; x=3; echo rea''dy\n", "ready")

    def reads(self, text: str, wanted: str) -> str:
        """Type ``text`` and read up to ``wanted``."""
        os.write(self.master, text.encode())
        seen = b""
        while wanted.encode() not in seen:
            seen += os.read(self.master, 1000)
        return wanted

    def foreground(self) -> int:
        """The process group in the foreground of its terminal."""
        return os.tcgetpgrp(self.master)

    def has_tty(self) -> list[str]:
        """Each descriptor of the shell that is open as /dev/tty, with its flags."""
        pid, numbers = self.process.pid, procfs.links(self.process.pid)
        return [f"{number} {procfs.fdinfo(pid, number)['flags']}" for number, name in numbers if name == "/dev/tty"]

    def end(self) -> None:
        """Hang up, which ends the shell and its jobs.

        Linux sends its signal once nobody has the other end of the terminal; a fork of the kernel may have it, too.
        """
        os.close(self.master)
        for pid in procfs.pids():
            with contextlib.suppress(ProcessLookupError):  # ended
                if os.getsid(pid) == self.process.pid:
                    os.kill(pid, signal.SIGHUP)
        self.process.wait()


@kind("an interactive shell on a terminal, which has /dev/tty open")
def shell():
    shell = Shell()
    shell.reads("sleep 1245 & echo rea''dy\n", "ready")

    def show():
        answers = shell.reads("echo =$x=\n", "=3="), shell.reads("jobs\n", "Running")
        return answers, shell.foreground() == shell.process.pid, shell.has_tty()

    return show, shell.end


@kind("a shell whose terminal has another command in the foreground")
def foreground():
    shell = Shell()
    os.write(shell.master, b"sleep 1251\n")
    eventually(lambda: shell.foreground() != shell.process.pid)
    job = shell.foreground()
    return lambda: (shell.foreground() == job, waits(job), shell.has_tty()), shell.end


@kind("a shell with a command that was stopped by a key (Ctrl-Z)")
def stopped_by_key():
    shell = Shell()
    os.write(shell.master, b"sleep 1252\n")
    eventually(lambda: shell.foreground() != shell.process.pid)
    job = shell.foreground()
    shell.reads("\x1a", "Stopped")
    eventually(lambda: shell.foreground() == shell.process.pid)

    def undo():
        os.killpg(job, signal.SIGKILL)
        shell.end()

    return lambda: (shell.reads("jobs\n", "Stopped"), procfs.stat(job).state, shell.has_tty()), undo


@kind("a part of a shell in the background, which has its /dev/tty")
def subshell():
    shell = Shell()
    shell.reads("(while :; do sleep 0.1; done) & echo rea''dy\n", "ready")
    return lambda: (shell.reads("jobs\n", "Running"), shell.process.poll(), shell.has_tty()), shell.end


@kind("a program that reads keys from /dev/tty, and watches it (epoll)")
def keys():
    master, slave = os.openpty()
    code = (
        "import os, select\n"
        "tty = os.open('/dev/tty', os.O_RDWR | os.O_NONBLOCK)\n"
        "other, watched = os.dup(tty), select.epoll(); watched.register(tty, 1); watched.register(other, 1)\n"
        "while True:\n"
        "    ready = sorted(fd for fd, _ in watched.poll())\n"
        "    os.write(tty, f'{ready} {os.read(ready[0], 99)} {os.readlink(f\"/proc/self/fd/{tty}\")}\\n'.encode())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(slave, termios.TIOCSCTTY, 0),
    )  # fmt: skip

    def show():
        os.write(master, b"word\n")
        seen = b""
        while b"/dev/" not in seen or not seen.endswith(b"\n"):
            seen += os.read(master, 1000)
        return seen.decode()

    show()
    os.close(slave)  # before the program has opened it, a read of the other end would fail

    def undo():
        os.close(master)
        ended(process)

    return show, undo


@kind("a program that listens for connections, and one that has been made")
def connected():
    code = "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)\n"
    code += "c = s.accept()[0]\nwhile word := c.recv(9): c.send(word.upper())"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    sock = socket.create_connection(("127.0.0.1", int(process.stdout.readline())))

    def show():
        sock.send(b"word")
        return sock.recv(9).decode()

    def undo():
        sock.close()
        process.wait()
        process.stdout.close()

    return show, undo


@kind("a TCP connection to a forked child that has not read a megabyte yet")
def connected_child():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        mine = socket.create_connection(listener.getsockname())
        its, _ = listener.accept()
    asked, ask = os.pipe()
    pid = os.fork()
    if pid == 0:
        mine.close()
        os.close(ask)
        while os.read(asked, 1):
            data = b""
            while len(data) < 999:
                data += its.recv(999 - len(data))
            its.send(data)
        os._exit(0)
    its.close()
    mine.setblocking(False)
    sent = mine.send(bytes(range(111)) * 9000)
    mine.settimeout(60)

    def show():
        os.write(ask, b"?")
        answer = b""
        while len(answer) < 999:
            answer += mine.recv(999 - len(answer))
        return sent > 500_000, answer == bytes(range(111)) * 9

    def undo():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ask)
        os.close(asked)
        mine.close()

    return show, undo


@kind("a program that listens for connections (subprocess)")
def server():
    code = "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)\n"
    code += "while True:\n    c = s.accept()[0]; c.send(b'hello'); c.close()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    port = int(process.stdout.readline())

    def show():
        with socket.create_connection(("127.0.0.1", port)) as sock:
            return sock.recv(5).decode()

    return show, lambda: ended(process)


@kind(
    "an eventfd that is a semaphore, shared with a forked child",
    refused("UNPROVEN_STATE", "that processes share"),
    advice=ADVICE,
)
def shared_semaphore():
    number = os.eventfd(3, os.EFD_SEMAPHORE)
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)

    def undo():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(number)

    return lambda: waits(pid), undo


@kind("a pair of unix sockets with a forked child, and memory that both share")
def shared():
    mine, its = socket.socketpair()
    memory = mmap.mmap(-1, 1 << 16)
    memory[:5] = b"first"
    pid = os.fork()
    if pid == 0:
        while its.recv(1):
            memory[:5] = bytes(reversed(memory[:5]))
            its.send(b"+")
        os._exit(0)

    def show():
        for _ in range(2):
            mine.send(b"?")
            mine.recv(1)
        return memory[:5].decode()

    def undo():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        memory.close()

    return show, undo


@kind("a program that left its parent (a daemon)")
def daemon():
    shell = subprocess.run(
        ["sh", "-c", "setsid sleep 1236 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True, check=True
    )
    pid = int(shell.stdout)

    def undo():
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not os.path.exists(f"/proc/{pid}"))

    return lambda: os.path.exists(f"/proc/{pid}"), undo


@kind("a background command of a cell (!sleep &)")
def background():
    note = place("background") / "pid"
    os.system(f"sleep 1237 >/dev/null 2>&1 & echo $! > {note}")
    pid = int(note.read_text())

    def undo():
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not os.path.exists(f"/proc/{pid}"))

    return lambda: os.path.exists(f"/proc/{pid}"), undo


@kind("a child that calls itself a resource tracker", alone="may be refused")
def disguised():
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(1238)", "multiprocessing.resource_tracker"]
    )
    return lambda: process.poll(), lambda: ended(process)


@kind("a daemon that calls itself a resource tracker")
def disguised_daemon():
    code = "import time; time.sleep(1240)"
    line = f"setsid {sys.executable} -c '{code}' multiprocessing.resource_tracker >/dev/null 2>&1 & echo $!"
    pid = int(subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True).stdout)

    def undo():
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not os.path.exists(f"/proc/{pid}"))

    return lambda: os.path.exists(f"/proc/{pid}"), undo


@kind("a pool of processes (multiprocessing.Pool)")
def pool():
    workers = multiprocessing.get_context("fork").Pool(2)
    return lambda: workers.map(abs, [-1, -2]), lambda: (workers.terminate(), workers.join())


@kind("a pool of fresh processes (spawn)")
def spawned():
    workers = multiprocessing.get_context("spawn").Pool(2)
    return lambda: workers.map(abs, [-1, -2]), lambda: (workers.terminate(), workers.join())


@kind("a pool of processes of a fork server")
def forkserver():
    workers = multiprocessing.get_context("forkserver").Pool(2)
    return lambda: workers.map(abs, [-1, -2]), lambda: (workers.terminate(), workers.join())


@kind(
    "a pool of processes (ProcessPoolExecutor)",
)
def executor():
    workers = concurrent.futures.ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork"))
    workers.submit(abs, -1).result()
    return lambda: workers.submit(abs, -3).result(), workers.shutdown


def count(ask, answer, value):
    while ask.acquire():
        value.value += 1
        answer.release()


def waiting_process(method):
    context = multiprocessing.get_context(method)
    ask, answer, value = context.Semaphore(0), context.Semaphore(0), context.Value("i", 0)
    process = context.Process(target=count, args=(ask, answer, value), daemon=True)
    process.start()
    asked = itertools.count(1)

    def show():
        ask.release()
        return answer.acquire(timeout=60), value.value == next(asked)

    return show, lambda: (process.kill(), process.join())


@kind("a semaphore that a forked process waits for, and a value that it changes")
def waiting():
    return waiting_process("fork")


@kind("a semaphore that a spawned process waits for, and a value that it changes")
def waiting_spawned():
    return waiting_process("spawn")


@kind("a DataLoader in the middle of an epoch (forked, persistent_workers)", needs="torch")
def dataloader():
    import torch

    loader = torch.utils.data.DataLoader(range(10_000), num_workers=2, persistent_workers=True)
    batches, numbers = iter(loader), itertools.count()
    return lambda: [next(batches).item() == next(numbers) for _ in range(5)], lambda: batches._shutdown_workers()


@kind("a DataLoader in the middle of an epoch (spawned, persistent_workers)", needs="torch")
def dataloader_spawned():
    import torch

    traits = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "spawn"}
    batches, numbers = iter(torch.utils.data.DataLoader(range(10_000), **traits)), itertools.count()
    return lambda: [next(batches).item() == next(numbers) for _ in range(5)], lambda: batches._shutdown_workers()


@kind("the idle pool of workers that torch.compile keeps", needs="torch")
def compile_workers():
    from torch._inductor.compile_worker.subproc_pool import SubprocPool

    pool = SubprocPool(2)
    return lambda: pool.submit(abs, -3).result(60), pool.shutdown


@kind("a manager of shared objects (multiprocessing.Manager)")
def manager():
    server = multiprocessing.get_context("fork").Manager()
    numbers = server.list([1, 2])
    return lambda: list(numbers), server.shutdown


@kind("a forked copy of the kernel")
def forked():
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)

    def undo():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    return lambda: (os.waitpid(pid, os.WNOHANG), waits(pid)), undo


@kind("a program started by asyncio that runs")
def asyncio_program():
    # On a loop of its own, since the kernel's is busy with this cell.
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    process = asyncio.run_coroutine_threadsafe(asyncio.create_subprocess_exec("sleep", "1239"), loop).result(60)

    def undo():
        process.kill()
        asyncio.run_coroutine_threadsafe(process.wait(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()

    return lambda: (process.returncode, waits(process.pid)), undo


@kind("a program that has ended and was not waited for (a zombie)")
def zombie():
    process = subprocess.Popen(["false"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    def show():
        found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        return found.si_pid == process.pid, found.si_status

    return show, lambda: process.wait()


@kind(
    "a program killed by a signal, and not waited for",
    user=refused("UNPROVEN_STATE", "how it ended"),
    advice="Wait for it (only after a wake refused).",
)
def zombie_killed():
    process = subprocess.Popen(["sleep", "99"])
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    def show():
        found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        return found.si_code, found.si_status

    return show, lambda: process.wait()


@kind("a program that has ended, its output not yet read")
def unread_output():
    process = subprocess.Popen(["echo", "its output"], stdout=subprocess.PIPE)
    process.wait()
    seen: list[str] = []

    def show():
        if not seen and process.returncode == 0:
            peeked = process.stdout.peek(100)
            return peeked.decode()
        return "gone"

    return show


@kind("the tracker of shared memory that Python starts (resource_tracker)")
def tracker():
    resource_tracker.ensure_running()
    memory = shared_memory.SharedMemory(create=True, size=100)
    lock = multiprocessing.Lock()

    def show():
        resource_tracker.ensure_running()
        resource_tracker._resource_tracker._check_alive()
        with lock:
            return memory.size > 0, resource_tracker._resource_tracker._pid > 0

    return show


@kind(
    "locks, events and queues for processes, without processes",
)
def process_locks():
    context = multiprocessing.get_context("fork")
    lock, event, value, queue = context.RLock(), context.Event(), context.Value("i", 7), context.Queue()
    lock.acquire()
    event.set()
    queue.put("waiting")
    eventually(lambda: not queue.empty())

    def show():
        word = queue.get(timeout=60)
        queue.put(word)
        eventually(lambda: not queue.empty())
        return event.is_set(), value.value, word, lock.acquire(timeout=1) and lock.release() is None

    return show


@kind(
    "a handler for SIGCHLD beside a child, not called by a wake",
    documented("SIGCHLD"),
    advice="Let a handler ask which child has ended (`os.waitpid` with `WNOHANG`), or set `SA_NOCLDSTOP`.",
)
def stopped_unseen():
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    count = [0]
    before = signal.signal(signal.SIGCHLD, lambda *_: count.__setitem__(0, count[0] + 1))

    def undo():
        signal.signal(signal.SIGCHLD, before)
        child.kill()
        child.wait()

    return lambda: count[0], undo


@kind(
    "what is known of children that have ended (times, usage)",
    documented("RUSAGE_CHILDREN"),
    advice="Measure within a cell.",
)
def usage():
    import resource

    subprocess.run([sys.executable, "-c", "sum(range(10**6))"], check=True)
    counted = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    return lambda: resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime >= counted > 0
