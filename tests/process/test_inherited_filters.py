"""Processes below a seccomp filter that they have inherited, as in a container: real dumps and restores."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from round_trip import Subject, image

from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.process.inherited_filters import all_inherited

T = TypeVar("T")
#: Filters of a thread are its own: other tests do not inherit this one, which refuses personality(2) by EXDEV.
CONFINE = """
import ctypes, os, struct
libc = ctypes.CDLL(None, use_errno=True)
def confine(number):
    code = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (6, 0, 0, 0x50000 | 18), (6, 0, 0, 0x7FFF0000)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in code))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(program)))
    for words in ((38, 1, 0), (22, 2, ctypes.addressof(header))):
        assert libc.prctl(*map(ctypes.c_ulong, words), 0, 0) == 0, os.strerror(ctypes.get_errno())
"""
PERSONALITY, SYSFS = 135, 139
READ = """
import os
def filters(of):
    with open(f"/proc/self/{of}/status") as file:
        return [line.split()[1] for line in file if line.startswith("Seccomp")]
def refused():
    return libc.personality(ctypes.c_ulong(0xFFFFFFFF)), ctypes.get_errno()
"""


def below_a_filter(work: Callable[[], T]) -> T:
    """Run ``work`` in a thread of its own below a filter: all that it starts inherits it."""
    space: dict[str, Callable[[int], None]] = {}
    exec(CONFINE, space)
    with ThreadPoolExecutor(1, initializer=space["confine"], initargs=(PERSONALITY,)) as pool:
        return pool.submit(work).result(timeout=120)


def test_it_sleeps_and_wakes_below_the_filter_twice_with_threads_and_a_child(criu, home):
    ready = (
        CONFINE + READ + "import threading, time\n"
        "for _ in range(3): threading.Thread(target=time.sleep, args=(1 << 20,), daemon=True).start()\n"
        "child = os.fork()\n"
        "if not child: time.sleep(1 << 20)\n"
        "def answers():\n"
        "    found = {tuple(filters(f'task/{tid}')) for tid in os.listdir('/proc/self/task')}\n"
        "    return found, filters(f'../{child}'), refused()\n"
    )

    def rounds() -> set[str]:
        seen = set()
        with Capsule.create(home) as capsule:
            subject = Subject(capsule)
            assert subject.tell(ready) == "None"
            seen.add(subject.tell("answer = answers()"))
            restored = dump(capsule)
        for last in (False, True):
            with Capsule.create(home) as capsule:
                criu.restore(capsule, image(home), timeout=60, **restored)
                seen.add(subject.tell("answer = answers()"))
                restored = None if last else dump(capsule)
        return seen

    def dump(capsule: Capsule) -> dict[str, Any]:
        """Return what a restore needs."""
        assert capsule.inspect()["refusals"] == []
        shutil.rmtree(image(home))
        criu.dump(capsule, image(home), timeout=60)
        state = capsule.inspect()  # of the stopped processes: it reads what was hidden
        assert state["refusals"] == []
        return {"pid": capsule.inner_pid, "pipes": capsule.pipes, "notes": state["notes"]}

    assert below_a_filter(rounds) == {"({('2', '1')}, ['2', '1'], (-1, 18))"}
    assert not (home / "status").exists()


def test_a_failed_dump_hides_nothing(criu, home, tmp_path):
    """CRIU cannot write its images; the process runs on and sees its filter."""

    def fail():
        with Capsule.create(home) as capsule:
            subject = Subject(capsule)
            subject.tell(CONFINE + READ)
            before = subject.tell("answer = filters('.')")
            try:
                criu.dump(capsule, tmp_path / "missing", timeout=60)
            except Exception as error:
                return str(error), before, subject.tell("answer = filters('.')"), subject.tell("answer = refused()")
            return None

    error, before, after, refused = below_a_filter(fail)
    assert error and before == after == "['2', '1']" and refused == "(-1, 18)"


def test_a_filter_of_its_own_is_refused_even_where_another_is_inherited(home):
    def refusals():
        with Capsule.create(home) as capsule:
            subject = Subject(capsule)
            assert capsule.inspect()["refusals"] == []
            own = (
                "import threading, time; ready = threading.Event()\n"
                f"def run(): confine({SYSFS}); ready.set(); time.sleep(1 << 20)\n"
                "threading.Thread(target=run, daemon=True).start(); assert ready.wait(60)"
            )
            assert subject.tell(CONFINE + own) == "None"
            return [refusal["what"] for refusal in capsule.inspect()["refusals"]]

    (refused,) = below_a_filter(refusals)
    assert "a seccomp filter" in refused


def test_only_filters_that_are_all_the_inits_are_inherited():
    """Also where Linux does not count them (before 5.11), and where the init has none."""
    filtered = {"Seccomp": "2", "Seccomp_filters": "2"}
    assert all_inherited(filtered, filtered)
    assert not all_inherited({**filtered, "Seccomp_filters": "3"}, filtered)
    assert not all_inherited({"Seccomp": "2"}, {"Seccomp": "2"})
    assert not all_inherited(filtered, {"Seccomp": "0", "Seccomp_filters": "0"})
    assert not all_inherited({"Seccomp": "0", "Seccomp_filters": "0"}, {"Seccomp": "0", "Seccomp_filters": "0"})
