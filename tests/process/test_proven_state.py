"""A kernel with unproven state is refused; state that CRIU does not save is there after a wake."""

from __future__ import annotations

import os
import socket
import subprocess

import pytest
from harness import notebook
from waiting import until

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.errors import SocketTaken, UnprovenState, UnsupportedFile, UnsupportedSocket
from jupyter_gpu_ckpt.image.draft import Draft
from jupyter_gpu_ckpt.lifecycle import suspend
from jupyter_gpu_ckpt.process import inventory, terminals

ROOT = os.geteuid() == 0

SETTINGS = """
import ctypes, os, select, signal, socket, struct, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
ended = []
signal.signal(signal.SIGTERM, lambda *_: ended.append("SIGTERM"))
libc.prctl(1, int(signal.SIGTERM), 0, 0, 0)
libc.prctl(29, 123456, 0, 0, 0)
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
libc.syscall(251, 1, 0, 2 << 13 | 6)
semaphore = os.eventfd(9, os.EFD_SEMAPHORE | os.EFD_NONBLOCK)
poll = select.epoll(); poll.register(semaphore, select.EPOLLIN)
listener = socket.socket(); listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_FASTOPEN, 5)
listener.bind(("127.0.0.1", 0)); listener.listen()
def settings():
    signal_number = ctypes.c_int()
    libc.prctl(2, ctypes.byref(signal_number), 0, 0, 0)
    return (
        signal_number.value, libc.prctl(30, 0, 0, 0, 0), os.sched_getaffinity(0), libc.syscall(252, 1, 0), ended,
        os.eventfd_read(semaphore), poll.poll(0), listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_FASTOPEN),
    )
print(settings())
"""


async def test_what_criu_forgets_is_there_after_each_of_two_wakes(kernel):
    before = await kernel.run(SETTINGS)
    for _ in range(2):
        await kernel.provisioner.checkpoint()
        assert await kernel.run("print(settings())") == before
        await kernel.run("threading.Thread(target=time.sleep, args=(1 << 20,), daemon=True).start()")  # of a low number
        await kernel.settled("running")
    assert "SIGTERM" not in before


#: Code, the error, and a word of its message.
UNPROVEN = [
    (
        "import ctypes; libc = ctypes.CDLL(None); libc.shmat.restype = ctypes.c_void_p\n"
        "n = libc.shmget(0, 4096, 0o1600); at = libc.shmat(n, None, 0); libc.shmctl(n, 0, None)",
        "libc.shmdt(ctypes.c_void_p(at))",
        UnprovenState,
        "System V shared memory",
    ),
    (
        "import ctypes; libc = ctypes.CDLL(None); ring = libc.syscall(425, 4, ctypes.create_string_buffer(120))",
        "import os; os.close(ring)",
        UnsupportedFile,
        "an io_uring instance (descriptor ",
    ),
    (
        "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(3)\n"
        "c = socket.create_connection(s.getsockname())",
        "s.close(); c.close()",
        UnsupportedSocket,
        "not accepted yet",
    ),
    (
        "import socket; a, b = socket.socketpair(); a.send(b'x'); socket.send_fds(a, [b'y'], [0])",
        "a.close(); b.close()",
        UnsupportedSocket,
        "SCM_RIGHTS",
    ),
    (
        "import socket; a, b = (socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2))\n"
        "a.bind('asks.sock'); b.bind('answers.sock'); c = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "c.sendto(b'nobody', 'answers.sock'); a.sendto(b'question', 'answers.sock')",
        "b.recv(9); assert b.recvfrom(9) == (b'question', 'asks.sock')",
        UnsupportedSocket,
        "from a socket with a name (asks.sock)",
    ),
    (
        "import socket; a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "b.setsockopt(socket.SOL_SOCKET, 29, 1); a.send(b'x')",
        "b.recv(9)",
        UnsupportedSocket,
        "a message with a time stamp (SO_TIMESTAMP)",
    ),
    (
        "import ctypes, os; fd = ctypes.CDLL(None).syscall(434, os.getpid(), os.O_EXCL); assert fd > 0",
        "os.close(fd)",
        UnsupportedFile,
        "a pidfd of a thread (PIDFD_THREAD, descriptor ",
    ),
]


@pytest.mark.parametrize(("code", "end", "error", "words"), UNPROVEN, ids=[words for *_, words in UNPROVEN])
async def test_a_kernel_with_unproven_state_runs_on_and_is_checkpointed_once_it_is_gone(
    kernel, code, end, error, words
):
    await kernel.run(code)
    (finding,) = [finding for finding in suspend.findings(kernel.lifecycle.kernel) if finding.blocks]
    assert words in finding.text
    with pytest.raises(error) as caught:
        await kernel.provisioner.checkpoint()
    assert words in caught.value.message
    assert caught.value.left == "the kernel runs on"
    assert caught.value.hint
    assert "dump" not in {event.step for event in kernel.steps.events}, "it is refused before anything is written"
    assert await kernel.run(f"x = 41\n{end}") == ""
    await kernel.provisioner.checkpoint()
    assert await kernel.run("print(x)") == "41"


LANDLOCK = """
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(38, 1, 0, 0, 0)
ruleset = libc.syscall(444, struct.pack("Q", 1 << 13), 8, 0)  # only: no new names for files across directories
assert ruleset >= 0 and libc.syscall(446, ruleset, 0) == 0
import os; os.close(ruleset)
"""


async def test_a_kernel_confined_by_landlock_is_refused_and_runs_on(kernel):
    await kernel.run(LANDLOCK)
    with pytest.raises(UnprovenState) as caught:
        await kernel.provisioner.checkpoint()
    assert "Landlock" in caught.value.message
    assert "allow_unconfined_wake" in caught.value.hint
    assert not list(kernel.lifecycle.engine.store.root.glob(".draft-*"))
    assert await kernel.run("print(6 * 7)") == "42"


async def test_an_administrator_may_let_it(tmp_path, runtime_base):
    async with notebook(tmp_path, runtime_base, allow_unconfined_wake=True) as kernel:
        await kernel.run(f"{LANDLOCK}\nx = 41")
        await kernel.provisioner.checkpoint()
        assert await kernel.run("print(x)") == "41"


#: A program that gets its system calls as signals where its selector says so (prctl(2)): always, or never now.
DISPATCHES = r"""
import subprocess
source = r'''
#include <sys/prctl.h>
#include <stdio.h>
#include <pthread.h>
#include <unistd.h>
volatile char selector;
void *dispatch(void *all) {
    if (prctl(59, 1, 0, 0, &selector)) return 0;
    puts("ready"); fflush(stdout);
    selector = all != 0;
    while (selector) ;
    for (;;) pause();
}
int main(int count, char **words) {
    pthread_t thread;
    if (words[1][0] == 'm') dispatch(words[1][1] ? &thread : 0);
    pthread_create(&thread, 0, dispatch, 0);
    pthread_join(thread, 0);
}
'''
subprocess.run(["cc", "-pthread", "-x", "c", "-o", "dispatches", "-"], input=source.encode(), check=True)
program = subprocess.Popen(["./dispatches", "WHERE"], stdout=subprocess.PIPE)
assert program.stdout.readline().strip() == b"ready"
"""


@pytest.mark.parametrize("where", ["m", "main and now", "thread"])
async def test_system_calls_that_become_signals_are_refused_and_stay_so(kernel, where):
    await kernel.run(DISPATCHES.replace("WHERE", where))
    with pytest.raises(UnprovenState) as caught:
        await kernel.provisioner.checkpoint()
    assert "PR_SET_SYSCALL_USER_DISPATCH" in caught.value.message
    assert "dispatches" in caught.value.message
    assert caught.value.left == "the kernel runs on"
    assert await kernel.run("print(program.poll()); program.kill(); n = program.wait()") == "None"
    await kernel.provisioner.checkpoint()
    assert await kernel.run("print(n)") == "-9"


@pytest.mark.skipif(ROOT, reason="root may look into any process: `tests/test_rootless.py` runs this as somebody else")
async def test_a_kernel_that_is_not_dumpable_is_refused_in_words(kernel):
    await kernel.run("import ctypes; print(ctypes.CDLL(None).prctl(4, 0, 0, 0, 0))")
    (finding,) = [finding for finding in suspend.findings(kernel.lifecycle.kernel) if finding.blocks]
    assert finding.code == "UNPROVEN_STATE"
    with pytest.raises(UnprovenState) as caught:
        await kernel.provisioner.checkpoint()
    assert "PR_SET_DUMPABLE" in caught.value.message
    assert await kernel.run("ctypes.CDLL(None).prctl(4, 1, 0, 0, 0); x = 41") == ""
    await kernel.provisioner.checkpoint()
    assert await kernel.run("print(x)") == "41"


@pytest.mark.skipif(ROOT, reason="root searches any directory: `tests/test_rootless.py` runs this as somebody else")
@pytest.mark.parametrize(
    ("use", "mode", "words"),
    [
        ("f = open('in/file', 'w+')", 0, "/in/file, in a directory that this user may not search"),
        ("os.chdir('in/side')", 0, "/in/side, in a directory that this user may not search"),
        (
            "f = open('in/file', 'w+'); os.link('in/file', 'in/another'); os.unlink('in/file')",
            0o500,
            "a directory that its user may not write to",
        ),
    ],
    ids=["open", "the working directory", "deleted, with another name"],
)
async def test_a_file_in_a_directory_that_was_closed_after_it_was_opened_is_refused(kernel, use, mode, words):
    """No wake could find it, or remove what the dump makes there."""
    await kernel.run(f"import os; os.makedirs('in/side'); top = os.path.abspath('in'); {use}; os.chmod(top, {mode})")
    with pytest.raises(UnsupportedFile) as caught:
        await kernel.provisioner.checkpoint()
    assert words in caught.value.message
    assert (caught.value.left, "chmod u+" in caught.value.hint) == ("the kernel runs on", True)
    left = "print([name for name in os.listdir(top) if name.startswith('link_remap')])"
    assert await kernel.run(f"os.chmod(top, 0o700); x = 41; {left}") == "[]"
    await kernel.provisioner.checkpoint()
    assert await kernel.run("print(x)") == "41"


async def test_a_socket_that_another_service_has_taken_over_is_left_to_it(kernel, runtime_base):
    path = runtime_base / "service.sock"
    await kernel.run(f"import socket; s = socket.socket(socket.AF_UNIX); s.bind({str(path)!r}); s.listen()")
    await kernel.provisioner.checkpoint()
    path.unlink()
    with socket.socket(socket.AF_UNIX) as service:
        service.bind(str(path))
        service.listen()
        with pytest.raises(SocketTaken) as caught:
            await kernel.provisioner.restore()
        assert str(path) in caught.value.message
        assert kernel.state == "checkpointed"
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            assert service.accept()
    path.unlink()
    await kernel.provisioner.restore()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    assert await kernel.run("print(s.accept()[0] is not None)") == "True"


async def test_a_process_that_lost_its_parent_comes_back_whatever_it_is_called(kernel):
    code = "import sys, time; time.sleep(1000)  # multiprocessing.resource_tracker"
    await kernel.run(
        "import os, sys\n"
        "ready, report = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        os.write(report, str(os.getpid()).encode())\n"
        f"        os.execv(sys.executable, [sys.executable, '-c', {code!r}])\n"
        "    os._exit(0)\n"
        "_ = os.wait()\n"
        "pid = int(os.read(ready, 99))"
    )
    for _ in range(2):
        await kernel.provisioner.checkpoint()
        assert await kernel.run("print(open(f'/proc/{pid}/cmdline').read().split('\\0')[2])") == code


async def test_what_this_machine_lacks_is_said_once_in_the_output_of_the_cell_that_woke_the_kernel(kernel, monkeypatch):
    await kernel.run("x = 41")
    await kernel.provisioner.checkpoint()
    kernel.lifecycle.image.manifest.notes["1"] = {}  # something to put back
    monkeypatch.setattr(Capsule, "reapply", lambda *_: ([], ["CPU affinity [63] of thread 7"], []))
    said = await kernel.run("x += 1", stream="stderr")
    assert said == "This kernel came back without what it was set to: CPU affinity [63] of thread 7"
    assert await kernel.run("x += 1", stream="stderr") == ""
    assert await kernel.run("print(x)") == "43"


def test_what_a_process_shows_as_it_ends_is_no_refusal(monkeypatch):
    """Linux shows an ending process in another control group, for instance."""
    child = subprocess.Popen(["sleep", "1000"])
    inspect = inventory._Process.process

    def ends_meanwhile(process: inventory._Process) -> None:
        inspect(process)
        if process.pid == child.pid:
            child.kill()
            until(lambda: procfs.is_ending(child.pid))
            process.found.refuse("a control group of its own")

    monkeypatch.setattr(inventory._Process, "process", ends_meanwhile)
    found = inventory.inspect(os.getpid(), stopped=False)
    child.wait()
    assert "a control group of its own" not in [refusal["what"] for refusal in found.refusals]
    assert str(child.pid) not in found.inventory | found.notes
    assert str(os.getpid()) in found.inventory


#: A leader of a session on a terminal, as a shell is, in whose foreground a command has ended: reaped or not.
FOREGROUND = """
import os, pty, signal, time
leader, terminal = pty.fork()
if leader == 0:
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    command = os.fork()
    if command == 0:
        os.setpgid(0, 0)
        os.tcsetpgrp(0, os.getpgid(0))
        os._exit(0)
    os.waitid(os.P_PID, command, os.WEXITED | (0 if reap else os.WNOWAIT))
    os.write(1, b"ended")
    time.sleep(1000)
heard = b""
while b"ended" not in heard: heard += os.read(terminal, 100)
"""


async def test_a_terminal_in_whose_foreground_a_command_has_ended_is_refused_after_the_dump_too(kernel, monkeypatch):
    """CRIU cannot make its group again, which it says at the restore only; a shell notices it in a moment."""
    await kernel.run(f"reap, x = True, 41{FOREGROUND}")
    monkeypatch.setattr(terminals, "obstacle", lambda pid: "")
    monkeypatch.setattr(suspend, "_lasting_refusals", lambda kernel: [])  # preflight has come a moment earlier
    tried = []
    monkeypatch.setattr(Draft, "discard", lambda draft, original=Draft.discard: (tried.append(1), original(draft)))
    with pytest.raises(UnprovenState, match="a command has just ended") as caught:
        await kernel.provisioner.checkpoint()
    assert len(tried) == 5, "the moment may have passed"
    assert "Try again" in caught.value.hint
    assert caught.value.left == "the kernel runs on"
    assert await kernel.run("import os; os.kill(leader, 9); os.close(terminal); os.waitpid(leader, 0); print(x)")
    monkeypatch.undo()
    await kernel.provisioner.checkpoint()
    assert await kernel.run("print(x)") == "41"


async def test_a_terminal_in_whose_foreground_is_a_zombie(kernel):
    await kernel.run(f"reap = False{FOREGROUND}")
    for _ in range(2):
        await kernel.provisioner.checkpoint()
        assert await kernel.run("print(os.tcgetpgrp(terminal) != leader)") == "True"
