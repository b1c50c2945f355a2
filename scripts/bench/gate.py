"""The cost of a gate: latency and throughput against the same kernel without one, and memory while the kernel sleeps.

Run ``python scripts/bench/gate.py``; it needs ipykernel and takes about half a minute.  The limits in the last column
are those that the design asks for; the exit status is 3 if one is missed.

A round trip through any ZMQ proxy passes four more threads, and what waking a thread costs is the machine's business.
So libzmq's own proxy, which is C and looks at nothing, is measured beside the gate: where it alone adds nearly all that
is allowed, the gate is allowed a little more than that.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import zmq
from jupyter_client import BlockingKernelClient
from jupyter_client.connect import write_connection_file
from limits import MISSED

from jupyter_gpu_ckpt.gate import wire

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from gate_world import DEADLINE, Kernel, World
from waiting import until

ROUNDS = 400
ALLOWED_MS = 0.3
BESIDE_LIBZMQ_MS = 0.15
BURST = 20_000
SLEEPERS = 40

# Sent past OutStream, which would join the texts to a few messages.
PRINTER = f"""
kernel = get_ipython().kernel
parent = kernel.get_parent('shell')
for i in range({BURST}):
    kernel.session.send(kernel.iopub_socket, 'stream', {{'name': 'stdout', 'text': 'x'}}, parent=parent)
"""

# For the connections that there are.  As it is, a kernel that prints faster than its I/O thread sends drops outputs.
NO_HIGH_WATER = "t = get_ipython().kernel.iopub_thread; t.schedule(lambda: t.socket.set_hwm(0))"


def round_trip(client: BlockingKernelClient, ask: Callable[[], str]) -> float:
    """Seconds from a request to its reply."""
    began = time.perf_counter()
    msg_id = ask()
    while client.get_shell_msg(timeout=DEADLINE)["parent_header"]["msg_id"] != msg_id:
        pass
    return time.perf_counter() - began


def burst(client: BlockingKernelClient, info: dict[str, Any]) -> float:
    """Outputs a second from the kernel's first to its last.

    Read off a bare socket: verifying each message, as a client does, takes longer than any gate, and a direct client
    that reads slower than the kernel prints loses outputs at the kernel's high-water mark.
    """
    with wire.context().socket(zmq.SUB) as reader:
        reader.setsockopt(zmq.RCVHWM, 0)
        reader.connect(wire.address(info, "iopub"))
        reader.subscribe(b"")
        until(lambda: client.kernel_info() and reader.poll(50), "the subscription")
        client.execute(NO_HIGH_WATER, silent=True)
        client.execute(PRINTER, silent=True)
        count, first = 0, 0.0
        while count < BURST:
            assert reader.poll(DEADLINE * 1000), f"{BURST - count} outputs lost"
            if b'"stream"' in wire.split(reader.recv_multipart())[1][wire.HEADER]:
                first = first or time.perf_counter()
                count += 1
        return count / (time.perf_counter() - first)


def resident() -> float:
    """Bytes of this process in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def bare_proxy(stack: ExitStack, back: dict[str, Any], directory: Path) -> dict[str, Any]:
    """libzmq's proxy before the kernel at ``back``, a thread a channel; returns where clients connect to."""
    front: dict[str, Any] = write_connection_file(str(directory / "bare.json"), key=back["key"].encode())[1]
    context: zmq.Context[Any] = zmq.Context()
    for channel in wire.CHANNELS:
        kinds = (zmq.XPUB, zmq.XSUB) if channel == "iopub" else (zmq.ROUTER, zmq.DEALER)
        near, far = (context.socket(kind) for kind in kinds)
        near.bind(wire.address(front, channel))
        far.connect(wire.address(back, channel))
        thread = threading.Thread(target=_proxy, args=(near, far), daemon=True)
        thread.start()
        stack.callback(thread.join)
    stack.callback(context.term)
    return front


def _proxy(near: zmq.Socket[Any], far: zmq.Socket[Any]) -> None:
    with contextlib.suppress(zmq.ContextTerminated):
        zmq.proxy(near, far)
    near.close(linger=0)
    far.close(linger=0)


def connected(stack: ExitStack, info: dict[str, Any]) -> BlockingKernelClient:
    """A client that knows nothing of a gate."""
    client = BlockingKernelClient()
    client.load_connection_info(dict(info))
    client.start_channels()
    stack.callback(client.stop_channels)
    client.wait_for_ready(timeout=DEADLINE)
    return client


def sleeper(stack: ExitStack, kernel: Kernel, directory: Path) -> World:
    """A gate whose kernel sleeps, after it was awake."""
    directory.mkdir()
    world = World(kernel, directory)
    stack.callback(world.gate.stop)
    world.up()
    world.to_sleep()
    return world


def main() -> int:
    """Measure and print; 0 if every limit is met."""
    rows: list[tuple[str, str, str, str, bool]] = []
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        kernel = Kernel()
        stack.callback(kernel.remove)
        world = World(kernel, directory)
        stack.callback(world.gate.stop)
        world.up()
        bare = connected(stack, bare_proxy(stack, kernel.info, directory))
        direct, through = connected(stack, kernel.info), world.client()
        stack.callback(through.stop_channels)

        asks: dict[str, Callable[[BlockingKernelClient], Callable[[], str]]] = {
            "kernel_info round trip, median": lambda client: client.kernel_info,
            "execute round trip, median": lambda client: lambda: client.execute("1", silent=True),
        }
        shuffle = random.Random(1).shuffle
        for what, ask in asks.items():
            times: dict[Any, list[float]] = {direct: [], bare: [], through: []}
            for _ in range(ROUNDS):  # by turns, in any order: so that the moods of machine and kernel hit all alike
                order = list(times)
                shuffle(order)
                for client in order:
                    times[client].append(round_trip(client, ask(client)))
            without, bare_ms, with_gate = (statistics.median(each) * 1e3 for each in times.values())
            added, allowed = with_gate - without, max(ALLOWED_MS, bare_ms - without + BESIDE_LIBZMQ_MS)
            note = f"adds {added:.2f} <= {allowed:.2f} ms (libzmq's own proxy adds {bare_ms - without:.2f})"
            rows.append((what, f"{without:.2f} ms", f"{with_gate:.2f} ms", note, added <= allowed))

        without, with_gate = burst(direct, kernel.info), burst(through, world.front)
        rows.append(("outputs", f"{without:,.0f} /s", f"{with_gate:,.0f} /s", ">= 5,000 /s", with_gate >= 5000))

        sleeper(stack, kernel, directory / "warm")
        before = resident()
        for n in range(SLEEPERS):
            sleeper(stack, kernel, directory / str(n))
        each = (resident() - before) / SLEEPERS / 1e3
        rows.append(("memory of a sleeping gate", "-", f"{each:.0f} kB", "< 300 kB", each < 300))

    print(f"{'':34}{'direct':>14}{'gate':>14}   limit")
    for what, left, right, limit, met in rows:
        print(f"{what:34}{left:>14}{right:>14}   {limit}{'' if met else '   MISSED'}")
    return 0 if all(row[-1] for row in rows) else MISSED


if __name__ == "__main__":
    raise SystemExit(main())
