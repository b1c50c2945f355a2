"""Branches, and going back, on another GPU by REST and in a cell: a whole server, whose GPUs are fakes."""

from __future__ import annotations

import pytest
from live import server, until

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


def test_a_cell_chooses_the_gpu_by_its_number(tmp_path, runtime_base, criu_binary):
    with server(tmp_path, runtime_base, config=CONFIG) as running:

        def free() -> list[int]:
            return [gpu["free"] // GIB for gpu in running.get("gpu-ckpt/status")["gpus"]]

        def kernels() -> set[str]:
            return {each["id"] for each in running.get("api/kernels")}

        kernel_id = running.start_kernel()
        running.run(kernel_id, "x = 1\n%gpu_checkpoint --save none")
        for cell in ("%gpu_checkpoint --branch --gpu 1", "%gpu_checkpoint --branch none --gpu 1"):
            with pytest.raises(AssertionError, match="uses one; this uses none"):
                running.run(kernel_id, cell)
        running.run(kernel_id, allocation_cell({A: 5 * GIB}) + "\n%gpu_checkpoint --save one")
        until(lambda: len(running.get(f"gpu-ckpt/kernels/{kernel_id}/saves")) == 2)
        for verb in ("--branch one", "--branch", "--back one"):
            with pytest.raises(AssertionError, match="There is no GPU 7 here; there are GPU 0, GPU 1"):
                running.run(kernel_id, f"%gpu_checkpoint {verb} --gpu 7")
        assert (kernels(), free()) == ({kernel_id}, [3, 8])
        running.run(kernel_id, "%gpu_checkpoint --branch one")
        running.run_until(kernel_id, "pass", "`--gpu 1` with --branch or --back")
        running.run(kernel_id, "%gpu_checkpoint --branch one --gpu 1")
        (branch,) = until(lambda: kernels() - {kernel_id})
        until(lambda: running.get(f"gpu-ckpt/kernels/{branch}")["state"] == "running")
        assert [running.run(each, "print(x)").splitlines()[-1] for each in (kernel_id, branch)] == ["1", "1"]
        assert free() == [3, 3]
        running.ask("DELETE", f"api/kernels/{branch}")
        running.run(kernel_id, "x = 2\n%gpu_checkpoint --back one --gpu 1")
        assert running.run(kernel_id, "print(x)") == "1"
        assert free() == [8, 3]
