"""A real helper process, which tests can kill, in front of a fake driver.

The driver stays in the test's process, as the real one stays in Linux: it finishes its calls, also when the helper has
ended.  ``python -m jupyter_gpu_ckpt.testing.fake_helper ADDRESS`` is the helper.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import threading
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from ..cuda.checkpoint_api import DriverRefused
from ..cuda.helper import real_operations, run
from ..cuda.helper_client import Helper
from .fake_cuda import FakeDriver

#: No call of a fake driver takes long; seconds.
_DEADLINE = 60.0


class FakeHelper(Helper):
    """`helper_client.Helper`, with ``driver`` behind its process.  ``close`` ends the process and its connections."""

    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver
        self._directory = tempfile.TemporaryDirectory(prefix="gc-")
        self._listener = Listener(str(Path(self._directory.name) / "driver"), "AF_UNIX")
        super().__init__([sys.executable, "-m", __name__, str(self._listener.address)])
        threading.Thread(target=self._accept, name="fake-driver", daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection[Any, Any]) -> None:
        with connection, contextlib.suppress(EOFError, OSError):
            op, lane, args = connection.recv()
            answer: tuple[Any, tuple[int, str] | None]
            try:
                answer = (self._driver.call(op, lane=lane, timeout_s=_DEADLINE, **args), None)
            except DriverRefused as refusal:
                answer = (None, (refusal.number, refusal.name))
            connection.send(answer)

    def another(self) -> FakeHelper:
        return FakeHelper(self._driver)

    def close(self) -> None:
        """Close the helper, as `Helper.close` does."""
        super().close()
        self._listener.close()
        self._directory.cleanup()


def _request(address: str, op: str, **args: Any) -> Any:
    with Client(address, "AF_UNIX") as connection:
        connection.send((op, args.get("pid"), args))
        value, refusal = connection.recv()
    if refusal is not None:
        raise DriverRefused(*refusal)
    return value


if __name__ == "__main__":
    run({op: partial(_request, sys.argv[1], op) for op in real_operations()})
