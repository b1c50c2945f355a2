"""Ports of this host: those that can be bound."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from jupyter_gpu_ckpt.node import facts


@pytest.fixture
def bound():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock


def test_a_port_that_somebody_has_cannot_be_bound(bound):
    number = bound.getsockname()[1]
    assert facts.unbindable("127.0.0.1", number) == os.strerror(errno.EADDRINUSE)
    bound.close()
    assert facts.unbindable("127.0.0.1", number) == ""


def test_connections_that_end_while_a_port_is_looked_at_are_in_nobodys_way(bound, monkeypatch):
    """They lingered for their minute until just now."""
    number = bound.getsockname()[1]

    def lingers(_: int) -> bool:
        bound.close()
        return False

    monkeypatch.setattr(facts, "_lingers", lingers)
    assert facts.unbindable("127.0.0.1", number) == ""
