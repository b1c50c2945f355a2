"""Fixtures of the tests of the library for device memory: a CUDA driver of host memory, and what is built with it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from fast_kernel import FastKernel
from fast_program import Kernel
from programs import SLICED, STAGED, Programs, build, build_doubles, build_library, compiler
from subject import running

from jupyter_gpu_ckpt.cuda import fastpath
from jupyter_gpu_ckpt.lifecycle import context


@pytest.fixture(scope="session")
def doubles() -> Path:
    """The directory of libcuda.so.1 and libcudart.so.13."""
    if compiler() is None:
        pytest.skip("there is no C compiler on this machine")
    return build_doubles()


@pytest.fixture(scope="session")
def programs(doubles) -> Programs:
    return build(doubles)


@pytest.fixture(scope="session")
def sliced(doubles) -> Programs:
    """The programs with a library that examines 1, 2, 4 and so on parts at a time before it copies them."""
    return build(doubles, define=SLICED)


@pytest.fixture(scope="session")
def staged(doubles) -> Programs:
    """The programs with a library that frees all memory before its copy in host memory is complete."""
    return build(doubles, define=STAGED)


@pytest.fixture(scope="session")
def in_its_directory(programs, tmp_path_factory) -> Programs:
    """The programs with a library that reads how much memory there is from files in its directory."""
    directory = tmp_path_factory.mktemp("memory")
    build_library(directory, ["-O2", f'-DMEMORY_FILES="{directory}"'])
    for program in ("loader", "direct", "libsubject.so"):
        (directory / program).symlink_to(programs.directory / program)
    return Programs(directory)


@pytest.fixture
def subject(programs, doubles):
    with running(programs, doubles) as subject:
        yield subject


@pytest.fixture
def kernel(programs, doubles):
    """The program of `fast_program` in a capsule."""
    directory = Path(tempfile.mkdtemp(prefix="gc-"))
    directory.chmod(0o700)
    kernel = Kernel(directory, programs.library, doubles)
    yield kernel
    kernel.capsule.close()
    shutil.rmtree(directory)


@pytest.fixture
def fast_kernel(criu_binary, tmp_path, programs, doubles, monkeypatch):
    """Make the kernel; the driver that suspends counts what moves between it and the GPU."""
    kernels = []

    class Accounting(fastpath.FastPath):
        def swap_out(self, **limits):
            moved = super().swap_out(**limits)
            kernels[0].held()
            return moved

        def swap_in(self, **limits):
            try:
                super().swap_in(**limits)
            finally:
                kernels[0].held()

    monkeypatch.setattr(context, "FastPath", Accounting)
    bases = []

    def make(*, base: Path | None = None, **options) -> FastKernel:
        bases.append(base or Path(tempfile.mkdtemp(prefix="gc-")))
        kernels.append(FastKernel(criu_binary, tmp_path, bases[0], programs, doubles, **options))
        return kernels[0]

    yield make
    for kernel in kernels:
        kernel.lifecycle.terminate()
    for base in bases:
        shutil.rmtree(base.resolve())
        if base.is_symlink():
            base.unlink()
