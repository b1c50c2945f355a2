"""Device memory that another process holds over a swap: its content is copied on the device, or by way of the host."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import fast_program
import pytest
from fast_kernel import CONTEXT, FastKernel
from fast_program import A
from kept_copy import DIRTY
from subject import MIB, Control, Subject, running

from jupyter_gpu_ckpt.errors import CriuError, GpuCkptError
from jupyter_gpu_ckpt.image.save_point import SavePoint
from jupyter_gpu_ckpt.lifecycle.plans import State
from jupyter_gpu_ckpt.trace import StepEvent

IN, ON_DEVICE = "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoDAsync_v2"
FAULT = 999
SIZES = (2 * MIB, 21 * MIB, 5 * MIB)
TOTAL = (2 + 22 + 6) * MIB
#: What of a way back may fail without any memory's being lost.
MAY_FAIL = (
    "cuMemImportFromShareableHandle",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemCreate",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemRelease",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    ON_DEVICE,
)


@pytest.fixture(params=["cuda", "map", "async"])
def subject(request, programs, doubles) -> Iterator[Subject]:
    with running(programs, doubles, environment=DIRTY) as subject:
        for size in SIZES:
            subject.alloc(1, size, request.param, "full")
        yield subject


@contextlib.contextmanager
def control_of(subject: Subject) -> Iterator[Control]:
    with subject.control() as control:
        control.must("copy_out")
        yield control


def files(subject: Subject) -> list[str]:
    """Return the program's descriptors but for the double's own: those of the device's memory."""
    found = {each: os.readlink(f"/proc/{subject.pid}/fd/{each}") for each in os.listdir(f"/proc/{subject.pid}/fd")}
    return sorted(number for number, name in found.items() if not name.startswith("/memfd:exported"))


def close(descriptors: list[int]) -> None:
    for each in descriptors:
        os.close(each)


def back(control: Control, descriptors: list[int]) -> dict[str, int]:
    try:
        return control.ask("swap_in", descriptors)
    finally:
        close(descriptors)


def test_what_is_held_does_not_cross_the_bus(subject):
    for _ in range(3):  # what was copied on the device can be held once more
        with control_of(subject) as control:
            answer, descriptors = control.hold(250)
            assert (answer["exported"], len(descriptors)) == (len(SIZES), len(SIZES))
            assert answer["held"] == answer["bytes"] >= TOTAL - 2 * MIB
            control.must("free")
            before = files(subject)
            subject.fail()
            assert back(control, descriptors)["cuda"] == 0
            made = subject.calls()
            assert (made.get(IN, 0), made[ON_DEVICE]) == (0, len(SIZES))
            assert files(subject) == before, "no descriptor stays in the program"
        subject.intact(len(SIZES))
        assert subject.outstanding()["reservations"] == len(SIZES)


def test_the_largest_are_held_where_not_all_can_be(subject):
    with control_of(subject) as control:
        answer, descriptors = control.hold(1)
        assert (len(descriptors), answer["held"] >= 20 * MIB) == (1, True)
        control.must("free")
        subject.fail()
        assert back(control, descriptors)["cuda"] == 0
        assert subject.calls()[IN] == 4, "one part of the first, three of the last"
    subject.intact(len(SIZES))


def test_without_the_descriptors_all_comes_from_host_memory(subject):
    with control_of(subject) as control:
        _, descriptors = control.hold(250)
        control.must("free")
    close(descriptors)  # their owner has ended
    with subject.control() as control:
        assert back(control, [])["cuda"] == 0
    subject.intact(len(SIZES))


def test_descriptors_that_nobody_wants_are_closed(subject):
    with control_of(subject) as control:
        before = files(subject)
        _, descriptors = control.hold(250)
        for verb in ("status", "nonsense", "hold 0", "free"):
            control.ask(verb, [*descriptors, *descriptors])
            assert files(subject) == before, verb
        assert back(control, [*descriptors, *map(os.dup, descriptors)])["cuda"] == 0
        assert files(subject) == before
    subject.intact(len(SIZES))


@pytest.mark.parametrize("wanted", ["hold 0", "hold 250"])
def test_nothing_is_held_without_a_copy(subject, wanted):
    with subject.control() as control:
        answer, descriptors = control.hold(int(wanted.split()[1]))
        assert (answer["cuda"], answer["exported"], answer["held"], descriptors) == (0, 0, 0, [])


@pytest.mark.slow
@pytest.mark.parametrize("function", MAY_FAIL)
def test_what_cannot_be_copied_on_the_device_comes_from_host_memory(subject, function):
    nth = 0
    while True:
        with control_of(subject) as control:
            _, descriptors = control.hold(250)
            control.must("free")
            subject.fail(function, nth := nth + 1, FAULT)
            answer = back(control, descriptors)
            made = subject.calls().get(function, 0)
            subject.fail()
            if answer["swapped_out"]:
                assert answer["cuda"] == FAULT
                control.must("swap_in")
        subject.intact(len(SIZES))
        if made < nth:
            break
    assert nth > 1, "it was never called"


def test_memory_that_cannot_be_exported_is_not_held(subject):
    with control_of(subject) as control:
        subject.fail("cuMemExportToShareableHandle", 2, FAULT)
        answer, descriptors = control.hold(250)
        subject.fail()
        assert (answer["exported"], len(descriptors)) == (1, 1)
        control.must("free")
        assert back(control, descriptors)["cuda"] == 0
    subject.intact(len(SIZES))


def test_memory_of_a_handle_that_the_program_has_released_is_not_held(programs, doubles):
    with running(programs, doubles) as subject:
        subject.alloc(1, 2 * MIB, "released", "full")
        with control_of(subject) as control:
            assert control.hold(250)[0]["exported"] == 0
            control.must("free", "swap_in")
        subject.intact(1)


# -- a kernel that is saved


def calls(kernel: FastKernel) -> dict[str, int]:
    count = "ctypes.CDLL('libcuda.so.1').double_calls({!r}.encode())"
    return {name: kernel.program.ask(count.format(name)) for name in (IN, ON_DEVICE)}


def test_a_save_leaves_memory_on_the_gpu(fast_kernel):
    kernel = fast_kernel()
    before = calls(kernel)
    for name in ("one", "two"):
        kernel.store.check(kernel.lifecycle.save(SavePoint(name)))
        kernel.runs_on()
    made = calls(kernel)
    assert (made[IN], made[ON_DEVICE] - before[ON_DEVICE]) == (before[IN], 2 * len(fast_program.SIZES))
    kernel.lifecycle.suspend()
    kernel.lifecycle.resume()
    kernel.runs_on()
    assert calls(kernel)[IN] > made[IN], "a suspended kernel leaves the GPU to others"


def test_a_save_needs_room_for_what_the_driver_has_moved_alone(fast_kernel):
    """Another process may have got what is free meanwhile."""
    kernel = fast_kernel()
    free = kernel.driver.gpus[A] - kernel.blocks - CONTEXT

    def take(event: StepEvent) -> None:
        if (event.kind, event.step) == ("started", "dump"):
            kernel.driver.start({A: free + kernel.blocks})

    kernel.lifecycle.kernel.trace.sinks.append(take)
    kernel.lifecycle.save(SavePoint("point"))
    kernel.program.continues()
    assert kernel.lifecycle.state is State.RUNNING


@pytest.mark.parametrize("step", ["dump", "continue", "cuda_resume", "thaw"])
def test_a_save_that_fails_holds_nothing(fast_kernel, step):
    kernel, faults = fast_kernel(), []
    files = len(os.listdir("/proc/self/fd"))

    def fail(event: StepEvent) -> None:
        if (event.kind, event.step, faults) == ("started", step, []):
            faults.append(event)
            raise CriuError("It failed.")

    kernel.lifecycle.kernel.trace.faults.append(fail)
    with pytest.raises(GpuCkptError):
        kernel.lifecycle.save(SavePoint("point"))
    assert faults
    assert len(os.listdir("/proc/self/fd")) <= files
    kernel.lifecycle.wake()
    kernel.runs_on()
