"""Branches, and going back, on another GPU by REST: a whole server, whose GPUs are fakes."""

from __future__ import annotations

from live import server

from jupyter_gpu_ckpt.testing.fake_host import allocation_cell

A = "GPU-00000000-0000-0000-0000-00000000000a"
B = "GPU-00000000-0000-0000-0000-00000000000b"
GIB = 1 << 30
CONFIG = f"""
from pathlib import Path
from jupyter_gpu_ckpt.testing.fake_host import install
install({{{A!r}: 8 << 30, {B!r}: 8 << 30}}, Path(c.GpuCkptProvisioner.image_dir))
"""


def test_a_branch_and_a_going_back_are_on_the_gpu_that_is_chosen(tmp_path, runtime_base, criu_binary):
    with server(tmp_path, runtime_base, config=CONFIG) as running:

        def free() -> list[int]:
            return [gpu["free"] // GIB for gpu in running.get("gpu-ckpt/status")["gpus"]]

        kernel_id = running.start_kernel()
        running.run(kernel_id, allocation_cell({A: 5 * GIB}) + "\nx = 1")
        assert running.do(kernel_id, "save", {"name": "one"})["error"] is None
        assert free() == [3, 8]
        full = running.do(kernel_id, "branch", {"save_point": "one"})["error"]
        assert full["code"] == "GPU_FULL"
        assert f'{{"gpu_map": {{"{A}": "{B}"}}}}' in full["hint"]
        made = running.do(kernel_id, "branch", {"save_point": "one", "gpu_map": {A: B}})
        assert made["error"] is None
        assert free() == [3, 3]
        assert [running.run(each, "print(x)") for each in (kernel_id, made["result"]["kernel_id"])] == ["1", "1"]
        running.ask("DELETE", f"api/kernels/{made['result']['kernel_id']}")
        unknown = running.ask("POST", f"gpu-ckpt/kernels/{kernel_id}/back", json={"name": "one", "gpu_map": {A: "C"}})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (400, "BAD_REQUEST")
        assert running.do(kernel_id, "back", {"name": "one", "gpu_map": {A: B}})["error"] is None
        assert free() == [8, 3]
        assert running.run(kernel_id, "print(x)") == "1"
