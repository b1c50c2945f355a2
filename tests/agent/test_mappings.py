"""Re-homing of deleted mappings, in real kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

MODULE = "import sys; mappings = sys.modules['_jupyter_gpu_ckpt_agent.mappings']"


def deleted(kernel: Any) -> list[str]:
    """The deleted files the kernel maps, except the kernel's own name for anonymous shared memory."""
    lines = [line.split(None, 5)[5] for line in kernel.maps().splitlines() if line.endswith(" (deleted)")]
    return [path for path in lines if not path.startswith("/dev/zero")]


def test_the_semaphores_of_tqdm_are_rehomed_and_tqdm_continues(start: Callable[..., Any]) -> None:
    pytest.importorskip("tqdm", reason="tqdm is missing: pip install tqdm")
    kernel = start()
    kernel.run("from tqdm import tqdm; bar = tqdm(total=4); bar.update(1)")
    assert len(deleted(kernel)) == 1 and deleted(kernel)[0].startswith("/dev/shm/sem.")
    report = kernel.report("quiesce")
    assert report["rehomed"] == 1 and report["deleted_mappings"] == []
    assert deleted(kernel) == []
    assert kernel.report("quiesce")["rehomed"] == 0
    kernel.report("thaw")
    assert kernel.run("bar.update(1); print(bar.n)\nfor _ in tqdm(range(3)): pass") == "2"


def test_a_lock_keeps_its_state_and_works_across_threads(start: Callable[..., Any]) -> None:
    kernel = start()
    kernel.run(
        "import multiprocessing as mp; a, b, c = mp.Lock(), mp.Semaphore(5), mp.RLock();"
        "a.acquire(), b.acquire(), c.acquire()"
    )
    assert kernel.report("quiesce")["rehomed"] == 3 and deleted(kernel) == []
    code = """if True:
        import threading
        print(a.acquire(block=False), b.get_value(), c.acquire(block=False))
        got = []
        def other():
            a.acquire(); got.append("other")
        thread = threading.Thread(target=other); thread.start()
        a.release(); thread.join(60)
        print(got, a.acquire(block=False))"""
    assert kernel.run(code) == "False 4 True\n['other'] False"


def test_a_thread_that_waits_on_a_lock_is_woken_later(start: Callable[..., Any]) -> None:
    """The thread sleeps on the old page; nobody could reach it there after the exchange."""
    kernel = start()
    code = """if True:
        import multiprocessing, threading
        lock, turn = multiprocessing.Lock(), []
        lock.acquire()
        def wait(number):
            with lock:
                turn.append(number)
        threads = [threading.Thread(target=wait, args=(n,)) for n in range(3)]
        for thread in threads: thread.start()
        # until all three sleep in sem_wait: the system call is a futex, by number on every machine
        import os, platform
        futex = {"x86_64": "202", "aarch64": "98"}[platform.machine()]
        def asleep():
            return sum(open(f"/proc/self/task/{t.native_id}/syscall").read().split()[0] == futex for t in threads)
        while asleep() < 3: pass"""
    kernel.run(code)
    assert kernel.report("quiesce")["rehomed"] == 1
    assert (
        kernel.run("print(turn); lock.release(); [t.join(60) for t in threads]; print(sorted(turn))") == "[]\n[0, 1, 2]"
    )


def test_a_lock_that_still_has_a_name_is_mapped_by_that(start: Callable[..., Any]) -> None:
    """Of multiprocessing's context "spawn": a process that is started later opens it by its name."""
    kernel = start()
    kernel.run("import multiprocessing; lock = multiprocessing.get_context('spawn').Lock()")
    assert len(deleted(kernel)) == 1
    report = kernel.report("quiesce")
    assert report["rehomed"] == 1 and report["deleted_mappings"] == [] and deleted(kernel) == []
    code = """if True:
        import _multiprocessing
        same = _multiprocessing.SemLock._rebuild(0, 1, 1, lock._semlock.name)
        print(same.acquire(False), lock.acquire(block=False))"""
    assert kernel.run(code) == "True False"


def test_a_mapping_of_a_living_child_stays(start: Callable[..., Any]) -> None:
    kernel = start()
    code = """if True:
        import multiprocessing, os
        context = multiprocessing.get_context("fork")
        shared, alone = context.Lock(), None
        r, w = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(w); os.read(r, 1); os._exit(0)
        alone = context.Lock()"""
    kernel.run(code)
    report = kernel.report("quiesce")
    assert report["rehomed"] == 1
    assert len(kernel.tcp_sockets()) == 1  # the child holds the listener, too
    assert [(entry["kind"], entry["reason"]) for entry in report["deleted_mappings"]] == [
        ("shared", "another process maps it")
    ]
    assert [child["benign"] for child in report["children"]] == [False]
    kernel.run("os.close(w); os.waitpid(child, 0); None")
    assert kernel.report("quiesce")["rehomed"] == 1 and deleted(kernel) == []


def test_content_and_protection_are_kept(start: Callable[..., Any]) -> None:
    """A file mapping of odd length, read-only and writable, that is longer than its file."""
    kernel = start()
    code = """if True:
        import mmap, os
        def mapped(name, access):
            with open(name, "w+b") as file:
                file.write(bytes(range(256)) * 40 + b"end")
                file.flush()
                view = mmap.mmap(file.fileno(), 0, access=access)
                os.ftruncate(file.fileno(), 4096)
            os.unlink(name)
            return view
        w = mapped("one", mmap.ACCESS_WRITE); r = mapped("two", mmap.ACCESS_READ)
        # mmap keeps a descriptor of its own; native libraries do not, and those are meant here
        for entry in os.listdir("/proc/self/fd"):
            path = f"/proc/self/fd/{entry}"
            if os.path.islink(path) and os.path.basename(os.readlink(path)).split()[0] in ("one", "two"):
                os.close(int(entry))"""
    kernel.run(code)
    report = kernel.report("quiesce")
    assert report["rehomed"] == 2 and report["deleted_mappings"] == [], report
    assert (
        kernel.run("print(w[:4096] == r[:4096] == bytes(range(256)) * 16); w[0] = 7; print(w[0], r[0])") == "True\n7 0"
    )
    lines = [line.split()[1] for line in kernel.maps().splitlines() if line.endswith("/dev/zero (deleted)")]
    assert sorted(lines) == ["r--s", "rw-s"]


def test_a_mapping_that_cannot_be_moved_is_reported(start: Callable[..., Any]) -> None:
    kernel = start()
    code = """if True:
        import mmap, os
        opened = open("opened", "w+b"); opened.write(bytes(8192)); opened.flush()
        kept = mmap.mmap(opened.fileno(), 0)
        os.unlink("opened")
        twice = open("twice", "w+b"); twice.write(bytes(8192)); twice.flush()
        private = mmap.mmap(opened.fileno(), 0, flags=mmap.MAP_PRIVATE)"""
    kernel.run(code)
    report = kernel.report("quiesce")
    (entry,) = report["deleted_mappings"]
    assert entry["path"].endswith("/opened") and entry["reason"] == "open as a descriptor" and entry["size"] == 16384
    assert report["rehomed"] == 0


def test_a_deleted_library_is_reported_as_private(start: Callable[..., Any], tmp_path: Any) -> None:
    kernel = start()
    code = """if True:
        import ctypes, os, shutil, _ctypes
        shutil.copy(_ctypes.__file__, "copy.so")
        ctypes.CDLL("./copy.so")
        os.unlink("copy.so")"""
    kernel.run(code)
    (entry,) = kernel.report("quiesce")["deleted_mappings"]
    assert entry["path"] == str(tmp_path / "copy.so") and entry["kind"] == "private" and entry["size"] > 0


def test_what_was_written_meanwhile_is_not_lost(start: Callable[..., Any]) -> None:
    """A writer without the GIL between copy and exchange: the old mapping is back, with what was written."""
    kernel = start()
    code = (
        MODULE
        + """
if True:
    import ctypes, multiprocessing
    lock = multiprocessing.Semaphore(5)
    real, posts = mappings._libc, []
    class Racing:
        def __init__(self): self.libc = real()
        def __getattr__(self, name): return getattr(self.libc, name)
        def memcpy(self, *arguments):
            done = self.libc.memcpy(*arguments)
            if len(posts) < limit:
                posts.append(1); lock.release()
            return done
    mappings._libc = Racing
    limit = 99
    first = mappings.rehome()
    print(first.done, first.still_deleted[0]["reason"], lock.get_value() - 5 == len(posts) == mappings._ATTEMPTS)
    limit = len(posts) + 1
    second = mappings.rehome()
    print(second.done, second.still_deleted, lock.get_value() - 5 == len(posts))"""
    )
    assert kernel.run(code) == "0 written to while it was copied True\n1 [] True"
    assert deleted(kernel) == []


def test_a_failing_call_leaves_the_mapping(start: Callable[..., Any]) -> None:
    kernel = start()
    code = (
        MODULE
        + """
if True:
    import ctypes, multiprocessing
    lock = multiprocessing.Semaphore(5)
    real = mappings._libc
    before = open("/proc/self/maps").read().count("\\n")
    for name in ("mmap", "mremap", "mprotect", "pread"):
        class Failing:
            def __init__(self): self.libc = real()
            def __getattr__(self, attribute):
                failed = -1 if attribute in ("pread", "mprotect") else mappings._MAP_FAILED
                return (lambda *_: failed) if attribute == name else getattr(self.libc, attribute)
        mappings._libc = Failing
        failed = mappings.rehome()
        print(failed.done, failed.still_deleted[0]["reason"].split(":")[0], lock.get_value())"""
    )
    assert kernel.run(code).split("\n") == ["0 mmap 5", "0 mremap 5", "0 mprotect 5", "0 read 5"]
    assert len(deleted(kernel)) == 1
