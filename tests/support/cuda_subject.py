"""A real process with real CUDA state, for tests and benchmarks to checkpoint.

The process (this file run as a program) reads one JSON object a line, ``{"code": ...}``, runs the code in one lasting
namespace and replies ``{"value": ...}`` with the variable ``result`` of the code, or ``{"error": ...}``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from jupyter_gpu_ckpt.cuda.cuda import Cuda
from jupyter_gpu_ckpt.cuda.gpus import Gpus
from jupyter_gpu_ckpt.errors import GpuCkptError

START_TIMEOUT_S = 120.0


class CudaSubject:
    """Start the process and run ``prelude`` in it.  ``environment`` is added to the caller's."""

    def __init__(self, prelude: str = "import torch", environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
            bufsize=0,
        )
        self._unread = b""
        self.pid = self._process.pid
        try:
            self.run(prelude, START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def run(self, code: str, timeout_s: float = 60.0) -> Any:
        """Run the code and return its ``result``."""
        self.send(code)
        return self.receive(timeout_s)

    def send(self, code: str) -> None:
        """Start the code without waiting for it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"code": code}).encode() + b"\n")

    def receive(self, timeout_s: float = 60.0) -> Any:
        """Return the ``result`` of the oldest code sent and not received yet.

        Raises ``TimeoutError`` (also for a locked process), ``EOFError`` if the process ended, and
        ``RuntimeError`` with the traceback if the code failed.
        """
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._process.stdout], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise TimeoutError(f"process {self.pid} did not answer within {timeout_s:g} s")
            chunk = os.read(self._process.stdout.fileno(), 65536)
            if not chunk:
                raise EOFError(f"process {self.pid} ended with status {self._process.wait()}")
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

    def close(self) -> None:
        """End the process, also a locked one."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> CudaSubject:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def why_no_gpu() -> str | None:
    """Return why CUDA processes cannot be checkpointed here, or None if they can."""
    try:
        with Gpus() as gpus:
            if not gpus.list():
                return "this machine has no NVIDIA GPU"
        with Cuda() as cuda:
            cuda.available()
        if importlib.util.find_spec("torch") is None:
            return "torch is not installed"
    except GpuCkptError as error:
        return error.message
    return None


def main() -> None:
    """Run the process."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries is no reply
    namespace: dict[str, Any] = {}
    for line in sys.stdin:
        namespace["result"] = None
        try:
            exec(json.loads(line)["code"], namespace)
            answer = {"value": namespace["result"]}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
