"""Two programs change places on a device that has memory for one of them: each memory as soon as it is free.

The leaver is stopped in the middle by its driver, so that what the other one can have by then is known.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest
from shared_device import SharedDevice
from subject import MIB, Control, Subject, running
from waiting import until

from jupyter_gpu_ckpt.cuda.cuda import OUT_OF_MEMORY

COUNT, SIZE, FREE = 12, 4 * MIB, 6 * MIB
TOTAL = COUNT * SIZE
#: How many allocations have left when the leaver is stopped, and bytes of those that come into their places.
LEFT = 5
COME = (LEFT * SIZE + FREE) // SIZE * SIZE
COMING, LEAVING = 0, 1
FOR_EVER = "swap_in 60000"


class Pair:
    """The program that comes, swapped out, and the one that leaves, on the device; a connection to each."""

    def __init__(self, device: SharedDevice, coming: Subject, leaving: Subject, to: list[Control]) -> None:
        self.device, self.coming, self.leaving = device, coming, leaving
        self.to_coming, self.to_leaving = to

    def stop_in_the_middle(self, coming: str = FOR_EVER) -> None:
        """Have one come and the other leave, until that is stopped."""
        assert self.leaving.ask("stop", "cuMemUnmap", LEFT) == "ok"
        self.to_coming.send(f"{coming}\n".encode())
        self.to_leaving.send(b"move_out\n")
        until(lambda: self.leaving.ask("waits") == "1", "the leaver is in the middle")
        until(lambda: self.device.used(COMING) == COME, "the other one has what is free")
        assert self.device.used(LEAVING) == TOTAL - LEFT * SIZE

    def changed(self) -> None:
        """Assert that the one is there, with all it had, and the other one gone."""
        assert (self.device.used(COMING), self.device.used(LEAVING)) == (TOTAL, 0)
        self.coming.intact(COUNT)

    def change_back(self) -> None:
        """Have both change places the other way round, and be intact."""
        self.to_leaving.send(f"{FOR_EVER}\n".encode())
        self.to_coming.must("move_out")
        assert self.to_leaving.answer()["cuda"] == 0
        self.leaving.intact(COUNT)
        self.to_leaving.must("move_out")
        self.to_coming.must("swap_in")
        self.coming.intact(COUNT)
        self.to_coming.must("move_out")
        self.to_leaving.must("swap_in")


@contextlib.contextmanager
def pair(programs, doubles, directory, way: str = "cuda", *, ends: bool = True) -> Iterator[Pair]:
    """Both programs, whose memory is of one kind; ``kept``: host memory has a copy of the leaver's.

    ``ends``: whether the one that leaves lives to its end.
    """
    device = SharedDevice(directory / "device", TOTAL + FREE)
    with contextlib.ExitStack() as stack:
        subjects, to = [], []
        for slot in (COMING, LEAVING):
            around = contextlib.nullcontext() if ends or slot == COMING else pytest.raises(AssertionError, match="-9")
            stack.enter_context(around)
            subject = stack.enter_context(running(programs, doubles, environment=device.environment(slot)))
            (subject.path.parent / "host-memory" / "gpu-ckpt-extents").mkdir(parents=True)
            subject.alloc(COUNT, SIZE, "cuda" if way == "kept" else way, "full")
            control = stack.enter_context(subject.control())
            if slot == COMING:
                control.must("move_out")
                assert device.used(COMING) == 0
            elif way == "kept":
                control.must(f"keep {TOTAL}", "copy_out", "free", "swap_in")
                assert control.ask("status")["kept"] == TOTAL
            subjects.append(subject)
            to.append(control)
        yield Pair(device, *subjects, to)


@pytest.mark.parametrize("way", ["cuda", "map", "released", "async", "kept"])
def test_each_memory_comes_as_soon_as_there_is_free_memory(programs, doubles, tmp_path, way):
    with pair(programs, doubles, tmp_path, way) as both:
        both.stop_in_the_middle()
        assert both.leaving.ask("continue") == "ok"
        assert both.to_leaving.answer()["swapped_out"] == TOTAL
        assert both.to_coming.answer()["cuda"] == 0
        both.changed()
        both.change_back()


def test_memory_that_never_comes_is_not_waited_for_without_end(programs, doubles, tmp_path):
    with pair(programs, doubles, tmp_path) as both:
        for verb in ("swap_in 50", "swap_in 0", "swap_in"):
            answer = both.to_coming.ask(verb)
            assert (answer["cuda"], answer["swapped_out"]) == (OUT_OF_MEMORY, TOTAL)
            assert both.device.free == FREE, "others can have what had come already"
        both.leaving.intact(COUNT)
        both.stop_in_the_middle()
        assert both.leaving.ask("continue") == "ok"
        assert [each.answer()["cuda"] for each in (both.to_leaving, both.to_coming)] == [0, 0]
        both.changed()


def test_a_leaver_that_is_killed_in_the_middle_leaves_all_its_memory(programs, doubles, tmp_path):
    with pair(programs, doubles, tmp_path, ends=False) as both:
        both.stop_in_the_middle()
        both.leaving.process.kill()
        both.leaving.process.wait()
        both.device.end(LEAVING)
        assert both.to_coming.answer()["cuda"] == 0
        both.changed()


def test_a_leaver_that_is_stopped_in_the_middle_loses_nothing_and_keeps_nobody(programs, doubles, tmp_path):
    with pair(programs, doubles, tmp_path) as both:
        assert both.leaving.ask("stop", "cuMemUnmap", LEFT) == "ok"
        both.to_leaving.send(b"move_out\n")
        until(lambda: both.leaving.ask("waits") == "1", "the leaver is in the middle")
        os.kill(both.leaving.pid, signal.SIGSTOP)
        answer = both.to_coming.ask("swap_in 200")
        assert (answer["cuda"], answer["swapped_out"]) == (OUT_OF_MEMORY, TOTAL)
        assert both.device.used(COMING) == 0
        os.kill(both.leaving.pid, signal.SIGCONT)
        assert both.leaving.ask("continue") == "ok"
        assert both.to_leaving.answer()["swapped_out"] == TOTAL
        both.to_coming.must("swap_in 0")
        both.changed()
        both.change_back()


@pytest.mark.parametrize("way", ["cuda", "map", "released"])
def test_a_leaver_that_fails_in_the_middle_has_lost_nothing(programs, doubles, tmp_path, way):
    """Another program has what it has freed: that part stays in host memory, the driver has the rest."""
    with pair(programs, doubles, tmp_path, way) as both:
        both.stop_in_the_middle("swap_in 3000")
        both.leaving.fail("cuMemUnmap", 1)
        assert both.leaving.ask("continue") == "ok"
        answer = both.to_leaving.answer()
        assert (answer["cuda"], answer["swapped_out"]) == (999, (LEFT + 1) * SIZE), "the call that waited had begun"
        assert both.device.used(LEAVING) == TOTAL - (LEFT + 1) * SIZE
        assert both.to_coming.answer()["cuda"] == OUT_OF_MEMORY
        assert both.device.used(COMING) == 0
        both.to_leaving.must("swap_in")
        both.leaving.intact(COUNT)
        both.to_leaving.must("move_out")
        both.to_coming.must("swap_in 0")
        both.changed()
