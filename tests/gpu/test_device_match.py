"""An image with device state on a node that is not like the one it was made on: refused before the driver is asked."""

from __future__ import annotations

import copy
import dataclasses

import pytest
from harness import notebook

from jupyter_gpu_ckpt.errors import BadRequest
from jupyter_gpu_ckpt.lifecycle import compatibility

pytestmark = pytest.mark.gpu


def fields(manifest, engine, **options) -> list[str]:
    found = compatibility.mismatches(manifest, engine.store, engine.gpus, engine.criu_version, **options)
    return [mismatch.field for mismatch in found if mismatch.hard]


def elsewhere(manifest, **changes):
    """The manifest as if the node of the checkpoint had been another."""
    wanted = copy.deepcopy(manifest.fingerprint)
    for key, value in changes.items():
        if key == "gpu":
            wanted["gpus"][0] |= value
        else:
            wanted[key] = value
    return dataclasses.replace(manifest, fingerprint=wanted)


async def test_the_images_own_node_matches_and_others_do_not(kernel):
    await kernel.run("import torch; x = torch.ones(1 << 20, device='cuda')")
    image = await kernel.provisioner.checkpoint()
    manifest, engine = image.manifest, kernel.lifecycle.engine
    wanted = manifest.fingerprint
    assert wanted["driver"] and wanted["cuda"][0].isdigit()
    assert any("libcuda.so" in path for path in wanted["files"])
    assert fields(manifest, engine) == []
    first = wanted["gpus"][0]["uuid"]
    assert fields(elsewhere(manifest, driver="1.0"), engine) == ["driver"]
    assert fields(elsewhere(manifest, cuda="1.0"), engine) == ["cuda"]
    assert fields(elsewhere(manifest, gpu={"name": "another"}), engine) == ["gpu_model"]
    assert fields(elsewhere(manifest, gpu={"total": 1 << 50}), engine) == ["gpu_memory"]
    assert fields(elsewhere(manifest, device_bytes={first: 1 << 50}), engine) == ["device_memory"]
    assert fields(elsewhere(manifest, gpus=[*wanted["gpus"], wanted["gpus"][0]]), engine) == ["gpu_count"]
    assert await kernel.run("print(x.sum().item())") == "1048576.0"


@pytest.mark.two_gpus
async def test_a_partial_mapping_is_completed_and_a_wrong_one_refused(tmp_path, runtime_base, criu_binary):
    async with notebook(tmp_path, runtime_base) as kernel:
        engine = kernel.lifecycle.engine
        zero, one = (gpu.uuid for gpu in engine.gpus.list()[:2])
        await kernel.run("import torch; x = torch.ones(1 << 20, device='cuda:0')")
        image = await kernel.provisioner.checkpoint()
        with pytest.raises(BadRequest, match="unknown GPU"):
            fields(image.manifest, engine, gpu_map={zero: "GPU-of-another-node"})
        await kernel.provisioner.restore(gpu_map={zero: one})  # and what was on the other one comes to this one
        assert set(engine.gpus.used_by(kernel.lifecycle.capsule.host_pid)) == {one}
        assert await kernel.run("print(x.sum().item())") == "1048576.0"
