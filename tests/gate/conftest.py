"""Fixtures: a real ipykernel behind a gate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gate_world import Kernel, World


@pytest.fixture(scope="module")
def shared_kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    yield kernel
    kernel.remove()


@pytest.fixture
def own_kernel() -> Iterator[Kernel]:
    """For a test that kills it."""
    kernel = Kernel()
    yield kernel
    kernel.remove()


def _world(kernel: Kernel, directory: Path) -> Iterator[World]:
    made = World(kernel, directory)
    yield made
    for client in made.clients:
        client.stop_channels()
    made.gate.stop()


@pytest.fixture
def world(shared_kernel: Kernel, tmp_path: Path) -> Iterator[World]:
    """A gate, not yet started, before a kernel that the module's tests share."""
    yield from _world(shared_kernel, tmp_path)


@pytest.fixture
def own_world(own_kernel: Kernel, tmp_path: Path) -> Iterator[World]:
    """A gate, not yet started, before a kernel of its own."""
    yield from _world(own_kernel, tmp_path)


@pytest.fixture
def up(world: World) -> World:
    """A gate that is open."""
    world.up()
    return world
