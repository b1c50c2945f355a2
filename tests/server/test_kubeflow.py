"""Kubeflow's culler reads a server's list of kernels: kernels that sleep do not look used, and stay asleep."""

from __future__ import annotations

from datetime import datetime

from waiting import until


def read(live) -> dict[str, dict]:
    """Return what the notebook controller reads of each kernel."""
    read_by_it = ("execution_state", "last_activity")
    return {kernel["id"]: {name: kernel[name] for name in read_by_it} for kernel in live.get("api/kernels")}


def test_a_sleeping_kernel_is_idle_since_its_last_cell_and_is_not_woken_by_the_culler(live, kernel_id):
    live.run(kernel_id, "x = 41")
    until(
        lambda: read(live)[kernel_id]["execution_state"] == "idle", "the kernel is idle, which it says after its reply"
    )
    before = read(live)[kernel_id]
    live.do(kernel_id, "suspend")
    assert read(live)[kernel_id] == before
    live.do(kernel_id, "resume")
    live.do(kernel_id, "checkpoint")
    for _ in range(3):
        assert read(live)[kernel_id] == before
    assert live.get(f"gpu-ckpt/kernels/{kernel_id}")["state"] == "checkpointed"
    assert live.run(kernel_id, "print(x)") == "41"
    moment = datetime.fromisoformat(read(live)[kernel_id]["last_activity"].replace("Z", "+00:00"))
    assert moment > datetime.fromisoformat(before["last_activity"].replace("Z", "+00:00"))
