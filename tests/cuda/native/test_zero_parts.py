"""Parts of device memory that hold only zeros are found by the GPU, and never copied."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import zero_scan
from programs import build_doubles
from recorder import Recorder
from subject import MIB, Control, Subject, running

#: Copies of parts, out and in; and what finds and writes zeros.
COPIES = ("cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2")
FOUND_BY = ("cuModuleLoadData", "cuModuleGetFunction", "cuMemHostGetDevicePointer_v2", "cuLaunchKernel")
WRITTEN_BY = "cuMemsetD8Async"
#: Fresh device memory of the double holds what somebody else has left.
DIRTY = {"DOUBLE_DIRTY": "1"}
FAULT = 999


def test_the_double_answers_as_the_kernel_must(programs, doubles):
    """`tests/gpu/test_device_zeros.py` runs the same on a GPU."""
    command = [sys.executable, zero_scan.__file__, str(programs.library), "20"]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(doubles)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.fixture(params=["extents", "anonymous memory"])
def subject(request, programs, doubles):
    with running(programs, doubles, environment=DIRTY) as subject:
        if request.param == "extents":
            extents(subject).mkdir(parents=True)
        yield subject


def extents(subject: Subject) -> Path:
    return subject.path.parent / "host-memory" / "gpu-ckpt-extents"


def rounds(subject: Subject, control: Control, copies: int) -> None:
    """Swap out and in twice; each time as many parts are copied."""
    count = subject.ask("check")
    for _ in range(2):
        subject.fail()
        control.must("copy_out", "free")
        assert [subject.calls().get(copy, 0) for copy in COPIES] == [copies, 0]
        control.must("swap_in")
        assert [subject.calls().get(copy, 0) for copy in COPIES] == [copies, copies]
        assert subject.ask("check") == count


@pytest.mark.parametrize("api", ["cuda", "map", "async"])
def test_only_parts_with_other_bytes_are_copied(subject, api):
    """Memory of zeros only, with nothing but zeros behind or before other bytes, and of other bytes."""
    subject.alloc(1, 6 * MIB, api, "zeros")
    subject.alloc(1, 6 * MIB, api, "full")
    subject.alloc(3, 2 * MIB, api, "zeros")
    subject.alloc(1, 34 * MIB, api, "zeros")
    subject.alloc(1, 2 * MIB, api, "full")
    with subject.control() as control:
        rounds(subject, control, copies=4)
        assert subject.calls()[WRITTEN_BY] == 5, "one for each memory of them"
        control.must("copy_out", "free")
        if extents(subject).exists():
            files = sorted(extents(subject).iterdir())
            lengths = [each.stat().st_size for each in files]
            assert lengths[:-1] == [16 * MIB] * (len(files) - 1), "each has its length, whatever it holds"
            assert sum(lengths) == 54 * MIB
            assert sum(each.stat().st_blocks for each in files) * 512 <= 9 * MIB, "zeros take no memory"
        control.must("swap_in")
    subject.intact(7)


def test_what_was_zero_is_copied_when_it_is_not_and_the_other_way_round(subject):
    one = subject.alloc(1, 4 * MIB, "cuda", "zeros")
    subject.alloc(1, 4 * MIB, "cuda", "zeros")
    with subject.control() as control:
        rounds(subject, control, copies=0)
        assert subject.ask("launch", one) == subject.ask("synchronize") == "0"
        last = subject.ask("last", one)
        assert last != "0"
        subject.fail()
        control.must("copy_out", "free", "swap_in")
        assert [subject.calls().get(copy, 0) for copy in COPIES] == [1, 1]
        assert subject.ask("last", one) == last
        subject.free(one)
        subject.alloc(1, 4 * MIB, "cuda", "zeros")
        rounds(subject, control, copies=0)


@pytest.fixture
def without_a_file(programs, doubles):
    """A program whose zeros have one file that cannot be made: a directory has its name."""
    with running(programs, doubles, environment=DIRTY) as subject:
        extents(subject).mkdir(parents=True)
        subject.alloc(1, 34 * MIB, "cuda", "zeros")
        subject.alloc(1, 6 * MIB, "map", "full")
        subject.alloc(2, 20 * MIB, "async", "zeros")
        (extents(subject) / "000001.img").mkdir()
        yield subject


def works_again(subject: Subject, control: Control) -> None:
    subject.intact(4)
    (extents(subject) / "000001.img").rmdir()
    rounds(subject, control, copies=3)


@pytest.mark.parametrize("verb", ["copy_out", "move_out"])
def test_where_files_cannot_have_the_zeros_the_memory_stays(without_a_file, verb):
    """The files get them last, when memory of zeros has been freed already."""
    with without_a_file.control() as control:
        assert control.ask(verb)["cuda"] != 0
        assert control.ask("status")["swapped_out"] == 0
        works_again(without_a_file, control)


def test_zeros_are_known_while_their_files_and_the_memory_cannot_be_had(without_a_file):
    """All other files have them."""
    with without_a_file.control() as control:
        without_a_file.fail("cuMemCreate", 1, 2, lasting=True)
        for verb in ("move_out", "swap_in", "swap_in"):
            assert control.ask(verb)["cuda"] != 0
            assert control.ask("status")["swapped_out"] != 0
        sizes = {file.name: file.stat().st_size for file in extents(without_a_file).iterdir() if file.is_file()}
        assert sizes == {"000000.img": 16 * MIB, "000002.img": 16 * MIB, "000003.img": 16 * MIB, "000004.img": 16 * MIB}
        without_a_file.fail()
        control.must("swap_in")
        works_again(without_a_file, control)


@pytest.mark.parametrize("function", FOUND_BY)
def test_where_the_kernel_cannot_run_all_is_copied(subject, function):
    subject.alloc(2, 4 * MIB, "cuda", "zeros")
    with subject.control() as control:
        subject.fail(function, 1, FAULT, lasting=True)
        control.must("copy_out", "free")
        assert subject.calls()[COPIES[0]] == 4
        control.must("swap_in")
        assert subject.calls()[COPIES[1]] == 4
        subject.fail()
        rounds(subject, control, copies=0)
    subject.intact(2)


def test_where_zeros_cannot_be_written_they_are_copied(subject):
    subject.alloc(2, 4 * MIB, "cuda", "zeros")
    with subject.control() as control:
        subject.fail(WRITTEN_BY, 1, FAULT, lasting=True)
        control.must("copy_out", "free", "swap_in")
        assert [subject.calls()[copy] for copy in COPIES if copy in subject.calls()] == [4]
    subject.intact(2)


def test_zeros_are_written_as_many_parts_at_a_time(sliced, doubles):
    with running(sliced, doubles, environment=DIRTY) as subject:
        subject.alloc(1, 34 * MIB, "cuda", "zeros")
        number = subject.alloc(1, 34 * MIB, "map", "zeros")
        subject.ask("poke", number, 13 * MIB, 1, 7)
        with subject.control() as control:
            rounds(subject, control, copies=1)
            assert subject.calls()[WRITTEN_BY] == 5 + 2 + 3, "8 MiB at most, and none beyond other bytes"
            subject.fail(WRITTEN_BY, 1, FAULT, lasting=True)
            control.must("copy_out", "free", "swap_in")
            assert subject.calls()[COPIES[1]] == 34, "those that the driver does not write are copied"
            subject.fail()
            for nth, result in ((1, FAULT), (2, FAULT), (3, 0)):  # the dry run's, that of the copies, and of zeros
                control.must("copy_out", "free")
                subject.fail("cuStreamCreate", nth, FAULT)
                assert control.ask("swap_in")["cuda"] == result
                subject.fail()
                control.must("swap_in")
        assert subject.ask("last", number) == "0"


def test_work_that_the_driver_does_not_finish_fails_the_copy(subject):
    subject.alloc(1, 4 * MIB, "cuda", "zeros")
    with subject.control() as control:
        subject.fail("cuStreamSynchronize", 2, FAULT)  # after the dry run's
        assert control.ask("copy_out")["cuda"] == FAULT
        subject.fail()
        rounds(subject, control, copies=0)
    subject.intact(1)


def test_the_kernel_is_loaded_once_in_each_context_and_again_in_one_that_has_its_handle(subject):
    def loads(wanted: int) -> None:
        subject.fail()
        control.must("copy_out", "free", "swap_in")
        assert subject.calls().get("cuModuleLoadData", 0) == wanted

    subject.alloc(1, 4 * MIB, "cuda", "zeros")
    with subject.control() as control:
        loads(1)
        loads(0)
        assert subject.ask("context") == "0"
        subject.alloc(1, 4 * MIB, "cu", "zeros")
        loads(1)
        loads(0)
        assert subject.ask("pop") == "0"
    subject.intact(2)


@pytest.mark.parametrize("lacking", [None, "cuCtxGetId"])
def test_a_context_that_was_reset_has_no_kernel_any_more(programs, lacking):
    """Its handle is the next one's; also where the driver gives contexts no numbers."""
    with running(programs, build_doubles(without=lacking)) as subject:
        one = subject.alloc(1, 4 * MIB, "cuda", "zeros")
        with subject.control() as control:
            control.must("copy_out", "free", "swap_in")
            subject.free(one)
            assert subject.ask("reset") == "0"
            subject.alloc(1, 4 * MIB, "cuda", "zeros")
            subject.fail()
            control.must("copy_out", "free", "swap_in")
            assert subject.calls()["cuModuleLoadData"] == 1
        subject.intact(1)


def test_zeros_go_to_an_image_and_come_back(fast_kernel):
    """Also after a restore, which fills the extents anew, and with other zeros the next time."""
    kernel = fast_kernel()
    contents, events = "[set(ctypes.string_at(at, size)) for at, size in held]", Recorder()
    kernel.lifecycle.trace.sinks.append(events)
    kernel.program.ask("ctypes.memset(held[2][0], 0, held[2][1])")
    for wanted in ([{1}, {2}, {0}], [{1}, {0}, {0}]):
        for away, back in (("suspend", "resume"), ("checkpoint", "wake"), ("suspend", "wake")):
            getattr(kernel.lifecycle, away)()
            getattr(kernel.lifecycle, back)()
            assert kernel.program.ask(contents) == wanted
        kernel.program.ask("ctypes.memset(held[1][0], 0, held[1][1])")
    parts = {event.step: [*event.parts] for event in events.completed() if event.parts}
    moments = ("prepared", "first_examined", "opened", "examined", "copied", "closed")
    out = [f"swap_out/{name}" for name in ("freeze", *moments, "lock")]
    assert parts["cuda_suspend"] == ["inspect", "lock", "swap_out", *out, "freeze", "driver"]
    back = [f"swap_in/{name}" for name in ("prepared", "opened", "copied", "closed")]
    assert parts["cuda_resume"] == ["children", "driver", "read", "swap_in", *back]
