"""A copy of device memory that is made in the background, while the program is idle and may continue at any time."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest
from harness import until as until_true
from kept_copy import DIRTY, ENOUGH, OUT, SHORT, extents, swap, write_files
from sharing_kernels import SharedHost
from subject import MIB, Control, Subject, asking, running
from waiting import until

from jupyter_gpu_ckpt.lifecycle import compatibility, host_copies, host_memory, preflight

NOT_SUPPORTED = 801
PAGE = 2 * MIB
A = "GPU-00000000-0000-0000-0000-00000000000a"


@pytest.fixture
def subject(programs, doubles) -> Iterator[Subject]:
    with running(programs, doubles, environment=DIRTY) as subject:
        extents(subject).mkdir(parents=True)
        yield subject


@pytest.fixture
def control(subject) -> Iterator[Control]:
    subject.free(subject.alloc(1, PAGE))  # from the first on the library listens
    with subject.control() as control:
        control.must(f"keep {ENOUGH}")
        yield control


@pytest.fixture
def shared_host(tmp_path, runtime_base, programs, doubles, criu_binary, monkeypatch):
    return SharedHost(tmp_path, runtime_base, programs, doubles, monkeypatch, {A: 100 * MIB})


def mirrored(control: Control) -> int:
    """Mirror to the end; return how many bytes of host memory are kept."""
    control.must("mirror")
    until(lambda: not control.ask("status")["mirrors"], "the mirror has ended")
    return int(control.ask("status")["kept"])


@pytest.mark.parametrize("api", ["cuda", "map", "released", "async"])
def test_after_a_mirror_only_what_has_changed_since_is_copied(subject, control, api):
    number = subject.alloc(1, 24 * MIB, api, "full")
    subject.alloc(1, 6 * MIB, api, "zeros")
    assert mirrored(control) == 24 * MIB
    assert swap(subject, control) == 0
    subject.ask("poke", number, 9 * MIB, 1, 7)
    assert mirrored(control) == 24 * MIB
    subject.ask("poke", number, 4 * MIB, 4 * MIB, 0)
    assert mirrored(control) == 20 * MIB, "zeros take no memory"
    assert swap(subject, control) == 0
    subject.ask("poke", number, 5 * MIB, 1, 7)
    assert swap(subject, control) == 1


def test_where_nothing_has_changed_no_memory_is_pinned_for_copies(subject, control):
    number, pinned = subject.alloc(1, 24 * MIB, "cuda", "full"), []
    for changed in (False, True):
        mirrored(control)
        if changed:
            subject.ask("poke", number, 5 * MIB, 1, 7)
        subject.fail()
        control.must("copy_out")
        pinned.append(subject.calls()["cuMemHostRegister_v2"])
        before = subject.ask("sum")
        control.must("free", "swap_in")
        assert subject.ask("sum") == before
    assert pinned[1] > pinned[0]


def test_a_call_that_uses_the_gpu_ends_it(subject, control):
    subject.alloc(8, 8 * MIB, "cuda", "sparse")
    subject.ask("delay", 20000)  # of each page
    control.must("mirror")
    until(lambda: control.ask("status")["kept"] > 0, "a step is done")
    assert subject.ask("synchronize") == "0"
    until(lambda: not control.ask("status")["mirrors"], "it has ended")
    kept = control.ask("status")["kept"]
    assert 0 < kept < 64 * MIB
    subject.ask("delay", 0)
    assert swap(subject, control) == (64 * MIB - kept) // (2 * MIB)


@pytest.mark.parametrize("end", ["copy_out", "close 0", "keep 0", f"keep {ENOUGH}"])
def test_a_request_ends_it(subject, control, end):
    subject.alloc(8, 8 * MIB, "cuda", "sparse")
    subject.ask("delay", 20000)
    control.must("mirror", "mirror", "status")
    control.must(end)
    assert not control.ask("status")["mirrors"]
    subject.ask("delay", 0)
    control.must("open", f"keep {ENOUGH}")
    swap(subject, control)


def test_it_is_refused_where_nothing_may_be_kept(subject, control, tmp_path):
    assert control.ask("mirror")["cuda"] == NOT_SUPPORTED, "there are no allocations"
    subject.alloc(1, 4 * MIB, "cuda", "full")
    control.must("keep 0")
    assert control.ask("mirror")["cuda"] == NOT_SUPPORTED
    control.must(f"keep {ENOUGH}", "copy_out")
    assert control.ask("mirror")["cuda"] == NOT_SUPPORTED
    control.must("free")
    assert control.ask("mirror")["cuda"] == NOT_SUPPORTED
    control.must("swap_in")
    extents(subject).rename(tmp_path / "moved")
    assert control.ask("mirror")["cuda"] == NOT_SUPPORTED, "there is no directory"
    assert not control.ask("status")["mirrors"]


def test_more_than_the_limit_is_given_up(subject, control):
    subject.alloc(1, 24 * MIB, "cuda", "full")
    control.must(f"keep {22 * MIB}")
    assert mirrored(control) == 0
    assert not [*extents(subject).iterdir()]
    swap(subject, control)


def test_it_is_given_up_when_memory_is_short(in_its_directory, doubles, request):
    files = SHORT["of the machine"]
    request.addfinalizer(lambda: [(in_its_directory.directory / name[1:]).unlink() for name in files])
    with running(in_its_directory, doubles, environment=DIRTY) as subject:
        extents(subject).mkdir(parents=True)
        subject.alloc(8, 8 * MIB, "cuda", "full")
        with subject.control() as control:
            control.must(f"keep {ENOUGH}")
            subject.ask("delay", 20000)
            control.must("mirror")
            write_files(in_its_directory, files)
            until(lambda: not control.ask("status")["mirrors"], "it has ended")
            assert (control.ask("status")["kept"], [*extents(subject).iterdir()]) == (0, [])
        subject.ask("delay", 0)


def test_the_program_ends_a_context_or_itself_meanwhile(subject, control):
    """And frees memory that is being read: the double ends a program whose memory goes under a copy."""
    numbers = [subject.alloc(1, 8 * MIB, api, "full") for api in ("cuda", "map", "cuda", "map", "async", "cuda")]
    subject.ask("delay", 5000)
    for number in numbers[:5]:
        control.must("mirror")
        subject.free(number)
    assert subject.ask("trim") == "0"
    for turn in range(10):
        control.must("mirror")
        time.sleep(0.004 * turn)
        assert subject.ask("reset") == "0"
        out = subject.outstanding()
        assert (out["registered"], out["streams"]) == (0, 0)
        subject.alloc(1, 8 * MIB, "cuda", "full")
    subject.alloc(2, 8 * MIB, "cuda", "full")
    control.must("mirror")
    assert subject.ask("forks", 3) == "3 refused, 0 hung"
    control.must("mirror")  # at its end


FAILING = ("cuStreamCreate", "cuMemHostRegister_v2", OUT, "cuStreamSynchronize", "cuLaunchKernel", "cuModuleLoadData")


@pytest.mark.parametrize("function", FAILING)
def test_what_fails_ends_it_and_nothing_is_believed(subject, control, function):
    subject.alloc(2, 8 * MIB, "cuda", "full")
    subject.fail(function, 1, 999)
    mirrored(control)
    subject.fail()
    swap(subject, control)
    assert mirrored(control) == 16 * MIB
    assert swap(subject, control) == 0
    out = subject.outstanding()
    assert (out["registered"], out["streams"], out["events"]) == (0, 0, 0)


def races(subject: Subject, control: Control, seed: int, rounds: int) -> None:
    """Write, allocate and free while a mirror runs, and swap at any moment of it."""
    source, sizes = random.Random(seed), dict[int, int]()
    for _ in range(rounds):
        while len(sizes) < 3:
            size = source.choice([2, 4, 7, 16, 24]) * MIB
            sizes[subject.alloc(1, size, source.choice(["cuda", "map", "async"]), "sparse")] = size
        subject.ask("delay", source.choice([0, 0, 300, 3000]))
        assert control.ask("mirror")["cuda"] == 0
        for _ in range(source.randrange(12)):
            number = source.choice(sorted(sizes))
            kind = source.randrange(12)
            if kind == 0 and len(sizes) > 1:
                subject.free(number)
                del sizes[number]
            elif kind == 1:
                subject.ask("synchronize")
            elif kind == 2:
                time.sleep(source.random() / 50)
            else:
                at = source.randrange(sizes[number])
                subject.ask("poke", number, at, source.choice([1, 4096, 3 * MIB]), source.randrange(256))
        subject.ask("delay", 0)
        if source.random() < 0.7:
            swap(subject, control)


def test_a_program_that_writes_meanwhile(subject, control):
    races(subject, control, seed=21, rounds=25)


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_a_program_that_writes_meanwhile_for_long(subject, control):
    races(subject, control, seed=22, rounds=1000)


def test_a_mirror_goes_to_an_image_and_comes_back(fast_kernel):
    """The owner that has begun it ends; then the kernel is suspended, and checkpointed after another."""
    kernel = fast_kernel(host_copy_bytes=ENOUGH)
    contents = "[sorted(set(ctypes.string_at(at, size))) for at, size in held]"
    copies = "ctypes.CDLL('libcuda.so.1').double_calls(b'cuMemcpyDtoHAsync_v2')"
    for away, back, value in (("suspend", "resume", 100), ("checkpoint", "wake", 101)):
        assert host_copies.begin_mirror(kernel.lifecycle.kernel)
        assert not kernel.path().mirrored() or not kernel.path().amounts().mirrors
        until(lambda: not kernel.path().amounts().mirrors, "it has ended")
        assert kernel.path().mirrored()
        assert kernel.path().amounts().kept == kernel.blocks
        kernel.program.ask(f"ctypes.memset(held[2][0].value + 30000, {value}, 5)")
        before, made = kernel.program.ask(contents), kernel.program.ask(copies)
        getattr(kernel.lifecycle, away)()
        assert away == "checkpoint" or not kernel.path().mirrored()
        getattr(kernel.lifecycle, back)()
        assert kernel.program.ask(contents) == before
        assert kernel.program.ask(copies) - made == 1


@pytest.mark.parametrize("end", ["ctypes.CDLL('libcuda.so.1').cuCtxSynchronize()", "keep 0"])
def test_one_that_is_complete_is_published_until_the_gpu_is_used_or_it_is_given_up(fast_kernel, end):
    kernel = fast_kernel(host_copy_bytes=ENOUGH)
    path = kernel.path()
    for _ in range(2):
        assert not path.mirrored()
        assert host_copies.begin_mirror(kernel.lifecycle.kernel)
        until(path.mirrored, "it is complete")
        assert host_copies.begin_mirror(kernel.lifecycle.kernel), "another is begun"
        until(path.mirrored, "that is complete, too")
        if end == "keep 0":
            path._keep(0)
        else:
            assert kernel.program.ask(end) == 0


def test_it_ends_no_capture_of_the_program(programs, doubles, runtime_base):
    """Its calls would, but for the mode of its thread: registering memory, loading a kernel, creating a stream."""
    path = runtime_base / "fast"
    with asking(programs, doubles, "stream_ordered.py", path) as ask:
        assert ask("[stream(name) for name in 'st'], alloc('a', 8, 's'), wait()") == ([0, 0], 0, 0)
        assert ask("bool(ctypes.memset(memory['a'], 5, 8 << 20)), begin_capture('t')") == (True, 0)
        until(path.exists, "the library listens")
        (runtime_base / "host-memory" / "gpu-ckpt-extents").mkdir(parents=True)
        with Control(path) as control:
            control.must(f"keep {ENOUGH}")
            assert mirrored(control) == 8 * MIB
        assert ask("end_capture('t')") == 0


@pytest.mark.parametrize("need", ["suspend", "checkpoint", "wake"])
async def test_a_kernel_that_needs_the_memory_gets_it_from_another_s_mirror(shared_host, monkeypatch, need):
    """By default: nothing is configured but that they are kernels of one server."""
    async with shared_host.notebook("one") as one, shared_host.notebook("other") as other:
        for value, kernel in enumerate((one, other), start=1):
            await shared_host.allocate(kernel, 32, value, A)
        paths = [kernel.lifecycle.kernel.fast_path() for kernel in (one, other)]
        if need == "wake":
            await other.provisioner.suspend()
            await other.provisioner.checkpoint()
        assert await one.provisioner.mirror()
        await until_true(paths[0].mirrored)
        assert paths[0].kept_bytes() == 32 * MIB

        def available() -> int:
            return (1 << 40) if not paths[0].kept_bytes() else preflight.MARGIN

        for module in (preflight, host_memory, host_copies, compatibility):
            monkeypatch.setattr(module, "available_memory", available)
        if need != "wake":
            await getattr(other.provisioner, need)()
        assert await other.run("print(intact())") == "True"
        assert paths[0].kept_bytes() == 0
        assert await one.run("print(intact())") == "True"
