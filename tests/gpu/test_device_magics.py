"""The magics on real device tensors."""

from __future__ import annotations

import pytest
from harness import CellFailed

pytestmark = pytest.mark.gpu

MIB = 1 << 20
SETUP = """
import torch
weights = torch.arange(64 << 18, device="cuda", dtype=torch.float32)   # 64 MiB
scratch = torch.rand(256 << 18, device="cuda")                         # 256 MiB that hardly compress
view = weights[:10]
model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(1, 1024, device="cuda")).sum().backward(); optimizer.step()
"""


async def test_tables_name_the_objects_with_device_memory(kernel):
    await kernel.run(SETUP)
    table = await kernel.run("%gpu_memory")
    rows = {line.split()[0]: line for line in table.splitlines() if line}
    assert rows["scratch"].endswith("256.0 MiB") and rows["view"].endswith("64.0 MiB") and "cuda:0" in rows["view"]
    assert "model.weight" in rows and "model.weight.grad" in rows and "weights" not in rows
    assert "allocated" in table
    status = await kernel.run("%gpu_checkpoint --status")
    assert "GPU memory" in status and "until the GPU is free" in status and "possible" in status


async def test_dropped_tensors_leave_the_gpu_and_are_in_no_image(kernel, record):
    await kernel.run(SETUP)
    await kernel.run("scratch")  # so that IPython holds it, too
    whole = await kernel.provisioner.checkpoint()
    whole_bytes = whole.manifest.bytes
    await kernel.run("torch.cuda.memory_allocated()")
    await kernel.settled("running")
    printed = await kernel.run("%gpu_checkpoint --drop scratch")
    assert "Released, not saved: scratch, a torch.Tensor float32 [67108864] on cuda:0 (256.0 MiB)" in printed
    await kernel.settled("checkpointed", timeout=120)
    dropped_bytes = kernel.lifecycle.image.manifest.bytes
    assert whole_bytes - dropped_bytes > 200 * MIB, "256, but images are compressed where that pays"
    assert await kernel.run("print(weights[12345].item(), view[3].item())", timeout=120) == "12345.0 3.0"
    assert int(await kernel.run("print(torch.cuda.memory_allocated())")) < 150 * MIB
    for use in ("scratch + 1", "torch.sum(scratch)", "weights + scratch"):
        with pytest.raises(CellFailed, match="`scratch` was released"):
            await kernel.run(use)
    record(whole_mib=whole_bytes // MIB, dropped_mib=dropped_bytes // MIB)


async def test_keep_saves_a_model_and_nothing_else(kernel):
    await kernel.run(SETUP)
    printed = await kernel.run("%gpu_checkpoint --suspend --keep model")
    names = {line.split(": ")[1].split(",")[0] for line in printed.splitlines() if line.startswith("Released")}
    assert names == {"weights", "scratch", "view", "optimizer"}
    await kernel.settled("suspended", timeout=120)
    assert (
        await kernel.run("print(model(torch.ones(1, 1024, device='cuda')).shape)", timeout=120)
        == "torch.Size([1, 1024])"
    )
    # The model, its gradients, and two workspaces of cuBLAS, 32 MiB each.
    assert int(await kernel.run("print(torch.cuda.memory_allocated())")) < 96 * MIB
