"""The process that calls the CUDA driver (`checkpoint_api`) and NVML (`nvml`).

`helper_client.Helper` runs it as ``python -m jupyter_gpu_ckpt.cuda.helper``.  It is a process of its own because only
the end of its process ends a hung driver call, and because a Jupyter server must not have ``/dev/nvidia*`` open; it is
long-lived because ``cuInit`` takes seconds on a big node.

Wire format, one JSON object a line.  Request: ``{"id", "op", "args"}``.  Reply: ``{"id", "value"}`` or
``{"id", "error": {"kind": "refused", "number", "name"}}`` (the driver's own number), ``{"kind": "unavailable",
"reason", "message"}`` or ``{"kind": "bug", "message"}``.  Requests run in parallel, since the checkpoint of 100 GB
takes 40 s and a query of free memory must not wait for it; the client sends those for one process one at a time.

The process ends on the end of its standard input, after the running calls (at most `DRAIN_S` later): a call cut off in
the middle would leave a kernel half suspended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, TextIO

from .checkpoint_api import CudaDriver, DriverRefused, Unavailable
from .nvml import Nvml

WORKERS = 64
DRAIN_S = 60.0

Operation = Callable[..., Any]


def _outcome(operations: Mapping[str, Operation], request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"value": operations[request["op"]](**request["args"])}
    except DriverRefused as refusal:
        return {"error": {"kind": "refused", "number": refusal.number, "name": refusal.name}}
    except Unavailable as error:
        return {"error": {"kind": "unavailable", "reason": error.reason, "message": error.message}}
    except Exception as error:
        nvml = sys.modules.get("pynvml")
        if nvml is not None and isinstance(error, nvml.NVMLError):
            return {"error": {"kind": "refused", "number": int(error.value), "name": type(error).__name__}}
        return {"error": {"kind": "bug", "message": traceback.format_exc(limit=-3)}}


def serve(requests: Iterable[str], replies: TextIO, operations: Mapping[str, Operation]) -> bool:
    """Run requests in parallel until they end; return False when a call was still running `DRAIN_S` after that."""
    writing, pool, running = threading.Lock(), ThreadPoolExecutor(WORKERS), set[Future[None]]()

    def answer(request: dict[str, Any]) -> None:
        line = json.dumps({"id": request["id"], **_outcome(operations, request)}) + "\n"
        with writing, suppress(OSError):  # no reader any more: the end of standard input follows
            replies.write(line)
            replies.flush()

    for line in requests:
        future = pool.submit(answer, json.loads(line))
        running.add(future)
        future.add_done_callback(running.discard)
    return not wait(list(running), DRAIN_S).not_done


def real_operations() -> dict[str, Operation]:
    cuda, nvml = CudaDriver(), Nvml()
    return {
        "cuda.open": cuda.open,
        "cuda.state": cuda.state,
        "cuda.lock": cuda.lock,
        "cuda.checkpoint": cuda.checkpoint,
        "cuda.restore": cuda.restore,
        "cuda.unlock": cuda.unlock,
        "nvml.open": nvml.open,
        "nvml.gpus": nvml.gpus,
        "nvml.free": nvml.free,
        "nvml.processes": nvml.processes,
        "nvml.users": nvml.users,
        "nvml.mps_clients": nvml.mps_clients,
        "nvml.utilisation": nvml.utilisation,
        "nvml.process_utilisation": nvml.process_utilisation,
    }


def run(operations: Mapping[str, Operation]) -> None:
    """Serve standard input on standard output, then end the process."""
    # Both may be sent to all processes of the server's job; this one is ended by the end of its input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Libraries that print must not print into the replies.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    drained = serve(sys.stdin, replies, operations)
    # Not sys.exit(): it would wait for the pool's threads, one of which may hang in the driver.
    os._exit(0 if drained else 1)


if __name__ == "__main__":
    run(real_operations())
