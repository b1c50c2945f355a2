"""Clients without the key cannot fill the server's memory: neither by not reading, nor by sending."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from gate_world import DEADLINE, World, outputs, reply
from waiting import until

from jupyter_gpu_ckpt.gate import readers, wire
from jupyter_gpu_ckpt.gate.router import Router

pytestmark = pytest.mark.slow  # sends hundreds of megabytes

MIB = 1 << 20

#: Bytes and messages that a reader may be behind the cell.  Where more than 1,000 messages (``ZMQ_SNDHWM``) wait in the
#: kernel for the gate, on a busy machine, libzmq drops the others there; it counts up to 500 as waiting that do not
#: any more (``pipe_t::compute_lwm``).
UNREAD, UNREAD_MESSAGES = 40 * MIB, 450

#: A subscriber in a process of its own, without a key.  It reads nothing (``stuck``), or everything and counts, as
#: the file says.
SUBSCRIBER = """
import os, sys, zmq
address, how, path = sys.argv[1:]
socket = zmq.Context().socket(zmq.SUB)
socket.rcvhwm = 1 if how == "stuck" else 0
socket.subscribe(b"")
socket.connect(address)
socket.recv_multipart()  # the welcome, or something else
file = os.open(path, os.O_WRONLY | os.O_CREAT)
print("there", flush=True)
if how == "stuck":
    sys.stdin.read()
count = 0
while True:
    frames = socket.recv_multipart()
    count += any(b'"display_data"' in frame[:500] for frame in frames)
    os.pwrite(file, b"%9d" % count, 0)
    if any(b"the last one" in frame for frame in frames):
        break
print(count, flush=True)
"""


def cell(count: int, size: int, *, read: Path | None = None) -> str:
    """Code that displays ``count`` outputs of ``size`` bytes as fast as it, or the writer of ``read``, can."""
    ahead = min(UNREAD // size, UNREAD_MESSAGES)
    wait = f"    while number - int(open({str(read)!r}).read() or 0) > {ahead}: time.sleep(0.001)\n"
    return (
        f"import time\nfrom IPython.display import display\ntext = 'x' * {size}\n"
        f"for number in range({count}):\n"
        f"{wait if read else ''}"
        "    display({'text/plain': text}, raw=True)\n"
        "print('the last ' + 'one')"
    )


@contextlib.contextmanager
def subscriber(world: World, how: str, path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SUBSCRIBER, wire.address(world.front, "iopub"), how, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def there(world: World, process: subprocess.Popen[bytes]) -> None:
    """Wait until a subscriber has got something."""
    assert process.stdout is not None
    world.gate.publish("status", {"execution_state": "idle"})
    assert process.stdout.readline() == b"there\n"


def behind(world: World) -> int:
    """Bytes that the slowest reader is behind."""

    def measure(router: Router) -> int:
        router.readers.measure(time.monotonic())
        return max(reader.behind for reader in router.readers._readers.values())

    return world.gate._call(measure)


@contextlib.contextmanager
def peak() -> Iterator[list[int]]:
    """The most memory that this process, and with it the gate, has beyond what it had, in bytes."""
    grown: list[int] = []
    Path("/proc/self/clear_refs").write_text("5")
    before = _high_water()
    yield grown
    grown.append(_high_water() - before)


def _high_water() -> int:
    return int(re.findall(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)[0]) * 1024


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("count", "size"), [(40_000, 9_000), (400, MIB)], ids=["many of 9 kB", "some of 1 MiB"])
def test_a_reader_that_does_not_read_is_dropped_and_the_others_miss_nothing(
    own_world, tmp_path, caplog, count, size
) -> None:
    world, read = own_world, tmp_path / "read"
    world.up()
    client = world.client(hb=False)
    client.iopub_channel.stop()  # the outputs are for the others
    with subscriber(world, "stuck", tmp_path / "stuck") as stuck, subscriber(world, "counts", read) as good:
        there(world, stuck)
        there(world, good)
        with peak() as grown:
            reply_id = client.execute(cell(count, size, read=read))
            until(lambda: "disconnected a client that does not read" in caplog.text, "it was dropped")
            assert good.stdout is not None
            counted = good.stdout.readline()
        assert client.get_shell_msg(timeout=120)["parent_header"]["msg_id"] == reply_id
        assert int(counted) == count, "an output was lost"
        assert grown[0] < 300 * MIB < count * size
        assert caplog.text.count("disconnected a client") == 1


def test_a_reader_that_is_only_slow_to_begin_misses_nothing(own_world, tmp_path, caplog) -> None:
    """A server whose event loop is busy for a moment is such a reader."""
    world = own_world
    world.up()
    client = world.client(hb=False)
    client.iopub_channel.stop()
    with subscriber(world, "counts", tmp_path / "read") as good:
        there(world, good)
        good.send_signal(signal.SIGSTOP)
        client.execute(cell(200, MIB))
        until(lambda: behind(world) > readers.BEHIND, "it is far behind")
        good.send_signal(signal.SIGCONT)
        assert good.stdout is not None
        assert int(good.stdout.readline()) == 200
    assert "disconnected a client" not in caplog.text


def test_outputs_continue_after_a_reader_was_far_behind(own_world, tmp_path, caplog, monkeypatch) -> None:
    """The excess is dropped, and said; the cell's end is not."""
    for name, value in {"BEHIND": 4 * MIB, "FAR_BEHIND": 8 * MIB, "MOST_QUEUED": 4 * MIB, "PATIENCE": 60}.items():
        monkeypatch.setattr(readers, name, value)
    world = own_world
    world.up()
    client = world.client(hb=False)
    with subscriber(world, "counts", tmp_path / "read") as good:
        there(world, good)
        good.send_signal(signal.SIGSTOP)
        msg_id = client.execute(cell(100, MIB))
        reply(client, msg_id)
        good.send_signal(signal.SIGCONT)
        outputs(client, msg_id)  # with the idle at the end
        until(lambda: behind(world) == 0 and "gate: dropped" in caplog.text, "it has read all that is left")
        client.execute("print('the last ' + 'one')")
        assert good.stdout is not None
        assert 8 <= int(good.stdout.readline()) < 100


def test_a_subscriber_of_few_topics_is_not_dropped_as_a_slow_reader(own_world, tmp_path, caplog) -> None:
    world = own_world
    world.up()
    client = world.client(hb=False)
    client.iopub_channel.stop()
    with wire.context().socket(zmq.SUB) as picky, subscriber(world, "counts", tmp_path / "read") as good:
        picky.subscribe(b"nobody")
        picky.connect(wire.address(world.front, "iopub"))
        there(world, good)
        client.execute(cell(300, MIB))
        assert good.stdout is not None
        assert int(good.stdout.readline()) == 300
    assert "disconnected a client" not in caplog.text


def test_who_has_no_key_cannot_fill_the_way_to_a_kernel_that_computes(up: World, tmp_path: Path, caplog) -> None:
    client = up.client()
    go = tmp_path / "go"
    busy = client.execute(f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)")
    until(lambda: up.gate.under_way.cells == 1, "the cell runs")
    forged = client.session.serialize(client.session.msg("execute_request", {"code": "x" * MIB}))
    forged[1] = b"0" * len(forged[1])
    with wire.context().socket(zmq.DEALER) as stranger, peak() as grown:
        stranger.sndhwm = 10
        stranger.connect(wire.address(up.front, "shell"))
        for _ in range(300):
            assert stranger.poll(DEADLINE * 1000, zmq.POLLOUT)
            stranger.send_multipart(forged)
        until(lambda: "forged signature" in caplog.text, "they arrived")
        asked = client.comm_info()  # behind them, or beside
        until(lambda: "comm_info_request" in up.gate.pending, "the gate is through")
        assert up.gate.pending == ["execute_request", "comm_info_request"]
    go.touch()
    reply(client, busy)
    reply(client, asked)
    assert grown[0] < 100 * MIB
    assert len(caplog.records) < 20, "a line each would fill the disk"


def test_heartbeats_that_nobody_wants_back_are_not_kept(up: World) -> None:
    with wire.context().socket(zmq.DEALER) as stranger, peak() as grown:
        stranger.rcvhwm, stranger.sndhwm = 1, 10  # it is in this process, too
        stranger.connect(wire.address(up.front, "hb"))
        for size in (1000, 64 * 1024):
            for _ in range(200 * MIB // size // (1 if size > 1000 else 4)):
                assert stranger.poll(DEADLINE * 1000, zmq.POLLOUT)
                stranger.send(b"x" * size)
    assert grown[0] < 60 * MIB
    with wire.context().socket(zmq.REQ) as heart:
        heart.linger = 0
        heart.connect(wire.address(up.front, "hb"))
        heart.send(b"ping")
        assert heart.poll(DEADLINE * 1000) and heart.recv() == b"ping"
