"""Obstacles in a kernel's process, found by the agent inside it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import types

import pytest

from jupyter_gpu_ckpt.agent import iopub, mappings, probes


@pytest.mark.parametrize(
    ("preallocate", "allocator", "preallocates"),
    [(None, None, True), ("true", "bfc", True), ("false", None, False), ("0", None, False), (None, "platform", False)],
)
def test_whether_jax_takes_the_whole_gpu(monkeypatch, preallocate, allocator, preallocates):
    for name, value in (("PREALLOCATE", preallocate), ("ALLOCATOR", allocator)):
        variable = f"XLA_PYTHON_CLIENT_{name}"
        monkeypatch.delenv(variable, raising=False) if value is None else monkeypatch.setenv(variable, value)
    monkeypatch.delitem(sys.modules, "jaxlib", raising=False)
    assert not probes.jax_preallocates()
    monkeypatch.setitem(sys.modules, "jaxlib", types.ModuleType("jaxlib"))
    assert probes.jax_preallocates() is preallocates


@pytest.mark.parametrize(
    ("initialized", "backend", "found"),
    [(True, "cudaMallocAsync", True), (True, "native", False), (False, "cudaMallocAsync", False)],
)
def test_whether_pytorch_has_memory_of_the_driver_s_pools(monkeypatch, initialized, backend, found):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert not probes.torch_pools()
    cuda = types.SimpleNamespace(is_initialized=lambda: initialized, get_allocator_backend=lambda: backend)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    assert probes.torch_pools() is found


def test_tables_of_sockets_are_read_until_all_are_known(monkeypatch):
    """Each of TCP and UDP takes milliseconds, and a quiesced kernel has unix sockets only."""
    read, table = [], probes.table
    monkeypatch.setattr(probes, "table", lambda kind: (read.append(kind), table(kind))[1])

    def kinds_of(*sockets: socket.socket) -> list[str]:
        numbers = [each.fileno() for each in sockets]
        monkeypatch.setattr(probes, "links", lambda: [(n, os.readlink(f"/proc/self/fd/{n}")) for n in numbers])
        read.clear()
        return sorted(entry["kind"] for entry in probes.foreign_sockets((set(), set())))

    one, other = socket.socketpair()
    with one, other, socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp:
        assert (kinds_of(one, other), read) == ([], ["unix"])
        assert (kinds_of(one, tcp), read) == (["tcp"], ["unix", "netlink", "tcp"])
        udp.bind(("127.0.0.1", 0))
        assert (kinds_of(tcp, udp), read[-1]) == (["tcp", "udp"], "udp")


class Listener:
    """The IOPub thread of a kernel, as far as its listener is concerned; calls are made at once."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._pipe_flag, self._pipe_port = True, self._server.getsockname()[1]
        self._pipe_in = types.SimpleNamespace(socket=types.SimpleNamespace(unbind=lambda address: self._server.close()))

    def schedule(self, call) -> None:
        call()

    @property
    def descriptor(self) -> int:
        return self._server.fileno()


def test_the_end_of_the_listener_is_seen_by_its_descriptor(monkeypatch):
    read, table = [], probes.table
    monkeypatch.setattr(probes, "table", lambda kind: (read.append(kind), table(kind))[1])
    thread = Listener()
    assert iopub.IOPub(types.SimpleNamespace(iopub_thread=thread)).unbind()
    assert (thread.descriptor, read) == (-1, []), "the table of TCP takes milliseconds"


def test_only_a_listener_of_tcp_at_the_port_is_one():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(type=socket.SOCK_DGRAM) as udp:
        port = server.getsockname()[1]
        udp.bind(("127.0.0.1", port))
        with socket.create_connection(("127.0.0.1", port)) as client, server.accept()[0] as accepted:
            assert accepted.getsockname()[1] == port
            found = [probes.listens_on(each.fileno(), port) for each in (server, client, accepted, udp)]
            assert found == [True, False, False, False]
        assert not probes.listens_on(server.fileno(), port + 1)
    one, other = socket.socketpair()
    with one, other, open(os.devnull) as file:
        assert not any(probes.listens_on(each.fileno(), 0) for each in (one, file))


def test_mappings_are_read_once_for_a_report(monkeypatch):
    """Linux writes hundreds of lines anew for each reader."""
    read, calls = mappings.read, []
    monkeypatch.setattr(mappings, "read", lambda **how: calls.append("read") or read(**how))
    report = probes.report(None, None, [])
    assert (report["probe_errors"], calls) == ([], ["read"])
    moved = mappings.rehome()
    assert (moved.still_deleted, len(calls)) == (report["deleted_mappings"], 2)
    assert probes.report(None, None, [], moved.mapped)["deleted_mappings"] == moved.still_deleted and len(calls) == 2


def test_a_listener_that_a_child_has_stays(monkeypatch):
    thread = Listener()
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[thread.descriptor]) as child:
        monkeypatch.setattr(probes, "children", lambda: [{"pid": child.pid}])
        kernel = iopub.IOPub(types.SimpleNamespace(iopub_thread=thread))
        assert not kernel.unbind()
        assert (kernel.complete, thread.descriptor >= 0) == (True, True)
        child.communicate(b"\n")
    assert kernel.unbind()
