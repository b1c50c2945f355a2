"""Children: those that live are refused by name, what is left of the others is kept."""

from __future__ import annotations

import asyncio
import concurrent.futures
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from multiprocessing import resource_tracker, shared_memory

from . import documented, kind, refused
from .asking import eventually, place

CODE = "CHILD_PROCESSES"
ADVICE = "End it."


def ended(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()


@kind("a program that runs beside the notebook (subprocess)", refused(CODE, "sleep 1234"), advice=ADVICE)
def program():
    process = subprocess.Popen(["sleep", "1234"])
    return lambda: process.poll(), lambda: ended(process)


@kind("a program that is stopped (SIGSTOP)", refused(CODE, "sleep 1235"), advice=ADVICE)
def stopped():
    process = subprocess.Popen(["sleep", "1235"])
    os.kill(process.pid, signal.SIGSTOP)
    return lambda: process.poll(), lambda: ended(process)


@kind("a program that left its parent (a daemon)", refused(CODE, "sleep 1236"), advice=ADVICE)
def daemon():
    shell = subprocess.run(
        ["sh", "-c", "setsid sleep 1236 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True, check=True
    )
    pid = int(shell.stdout)

    def undo():
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not os.path.exists(f"/proc/{pid}"))

    return lambda: os.path.exists(f"/proc/{pid}"), undo


@kind("a background command of a cell (!sleep &)", refused(CODE, "sleep 1237"), advice=ADVICE)
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


@kind("a daemon that calls itself a resource tracker", refused(CODE, "multiprocessing.resource_tracker"), advice=ADVICE)
def disguised_daemon():
    code = "import time; time.sleep(1240)"
    line = f"setsid {sys.executable} -c '{code}' multiprocessing.resource_tracker >/dev/null 2>&1 & echo $!"
    pid = int(subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True).stdout)

    def undo():
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not os.path.exists(f"/proc/{pid}"))

    return lambda: os.path.exists(f"/proc/{pid}"), undo


@kind("a pool of processes (multiprocessing.Pool)", refused(CODE, "python"), advice="Close the pool.")
def pool():
    workers = multiprocessing.get_context("fork").Pool(2)
    return lambda: workers.map(abs, [-1, -2]), lambda: (workers.terminate(), workers.join())


@kind("a pool of processes (ProcessPoolExecutor)", refused(CODE, "python"), advice="Shut it down.")
def executor():
    workers = concurrent.futures.ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork"))
    workers.submit(abs, -1).result()
    return lambda: workers.submit(abs, -3).result(), workers.shutdown


@kind("a manager of shared objects (multiprocessing.Manager)", refused(CODE, "python"), advice="Shut it down.")
def manager():
    server = multiprocessing.get_context("fork").Manager()
    numbers = server.list([1, 2])
    return lambda: list(numbers), server.shutdown


@kind("a forked copy of the kernel", refused(CODE, "python"), advice=ADVICE)
def forked():
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)

    def undo():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    return lambda: os.waitpid(pid, os.WNOHANG), undo


@kind("a program started by asyncio that runs", refused(CODE, "sleep 1239"), advice=ADVICE)
def asyncio_program():
    # On a loop of its own, since the kernel's is busy with this cell.
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    process = asyncio.run_coroutine_threadsafe(asyncio.create_subprocess_exec("sleep", "1239"), loop).result(20)

    def undo():
        process.kill()
        asyncio.run_coroutine_threadsafe(process.wait(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()

    return lambda: process.returncode, undo


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
    user=refused("DELETED_MAPPING", "deleted"),
    advice="Delete shared values (multiprocessing.Value, Array).",
)
def process_locks():
    context = multiprocessing.get_context("fork")
    lock, event, value, queue = context.RLock(), context.Event(), context.Value("i", 7), context.Queue()
    lock.acquire()
    event.set()
    queue.put("waiting")
    eventually(lambda: not queue.empty())

    def show():
        word = queue.get(timeout=20)
        queue.put(word)
        eventually(lambda: not queue.empty())
        return event.is_set(), value.value, word, lock.acquire(timeout=1) and lock.release() is None

    return show


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
