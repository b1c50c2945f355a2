"""A gate with scripted behaviour, for tests of the lifecycle without clients."""

from __future__ import annotations

from typing import Any

from jupyter_gpu_ckpt.errors import GpuCkptError


class GateDouble:
    """Notes what the lifecycle asks of it; ``fails`` names calls that raise, each once."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails: dict[str, GpuCkptError] = {}
        self.errors_seen: list[GpuCkptError] = []
        #: Of the agent.
        self.report: dict[str, Any] = {}

    def _do(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fails:
            raise self.fails.pop(name)

    def open(self, timeout: float) -> None:
        self._do("open")

    def drain(self, timeout: float) -> None:
        self._do("drain")

    def release(self) -> None:
        self._do("release")

    def close(self) -> None:
        self._do("close")

    def sleep(self) -> None:
        self._do("sleep")

    def kernel_died(self) -> None:
        self._do("kernel_died")

    def prompt(self, text: str, timeout: float) -> str | None:
        self._do("prompt")
        return None

    def notify(self, notice: str) -> None:
        self._do(f"notify {notice}")

    def print_notice(self, text: str) -> None:
        self._do(f"tell {text}")

    def cancel_prompt(self) -> None:
        self._do("cancel_prompt")

    def fail(self, error: GpuCkptError) -> None:
        self.errors_seen.append(error)
        self._do("fail")

    def request(self, msg_type: str, content: dict[str, Any], timeout: float) -> dict[str, Any]:
        self._do(msg_type)
        return {"status": "ok", "report": dict(self.report)}

    @property
    def serves(self) -> bool:
        """Return whether clients reach the kernel now: the last word was `release`."""
        words = [call for call in self.calls if call in ("release", "drain", "sleep", "fail", "close")]
        return not words or words[-1] == "release"
