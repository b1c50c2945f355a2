"""Fixtures of the tests of the library for device memory: a CUDA driver of host memory, and what is built with it."""

from __future__ import annotations

import pytest
from programs import Programs, build, build_doubles, compiler
from subject import running


@pytest.fixture(scope="session")
def doubles(tmp_path_factory):
    """The directory of libcuda.so.1 and libcudart.so.13."""
    if compiler() is None:
        pytest.skip("there is no C compiler on this machine")
    return build_doubles(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(scope="session")
def programs(tmp_path_factory, doubles) -> Programs:
    return build(tmp_path_factory.mktemp("native"), doubles)


@pytest.fixture
def subject(programs, doubles):
    with running(programs, doubles) as subject:
        yield subject
