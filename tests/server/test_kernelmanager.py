"""Culling, expiry and counting, with real kernels under the extension's manager and without a server."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest
from harness import until
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from jupyter_server._tz import utcnow
from traitlets.config import Config

from jupyter_gpu_ckpt.server.kernelmanager import CheckpointKernelManager


@asynccontextmanager
async def manager(tmp_path, runtime_base, **traits):
    """A kernel manager whose files are in ``tmp_path``."""
    config = Config()
    config.KernelProvisionerFactory.default_provisioner_name = "gpu-ckpt-provisioner"
    config.GpuCkptProvisioner.image_dir = str(tmp_path / "images")
    config.GpuCkptProvisioner.runtime_base = str(runtime_base)
    config.CheckpointKernelManager.update(traits)
    KernelProvisionerFactory.clear_instance()
    KernelProvisionerFactory.instance(config=config)
    made = CheckpointKernelManager(config=config, root_dir=str(tmp_path), connection_dir=str(tmp_path))
    try:
        yield made
    finally:
        for callback in (made._culler_callback, made._expiry_callback):
            if callback is not None:
                callback.stop()
        await made.shutdown_all(now=True)
        KernelProvisionerFactory.clear_instance()


async def start(made, tmp_path) -> str:
    environment = dict(os.environ, IPYTHONDIR=str(tmp_path / "ipython"))
    environment.pop("PYTEST_CURRENT_TEST", None)
    kernel_id = await made.start_kernel(kernel_name="python3", env=environment)
    provisioner = made.provisioner_of(kernel_id)
    await until(lambda: provisioner.gate.state.name == "OPEN", 60)
    return kernel_id


def idle_for(made, kernel_id, seconds) -> None:
    kernel = made.get_kernel(kernel_id)
    kernel.execution_state, kernel.last_activity = "idle", utcnow() - timedelta(seconds=seconds)


async def test_culling_a_live_kernel_checkpoints_it(tmp_path, runtime_base, criu_binary):
    async with manager(tmp_path, runtime_base, cull_idle_timeout=100, cull_interval=3600) as made:
        kernel_id = await start(made, tmp_path)
        idle_for(made, kernel_id, 50)
        await made.cull_kernels()
        assert made.kernel_model(kernel_id)["gpu_ckpt"]["state"] == "running"
        idle_for(made, kernel_id, 200)
        await made.cull_kernels()
        assert made.kernel_model(kernel_id)["gpu_ckpt"]["state"] == "checkpointed"
        await made.cull_kernels()  # never twice, and never for good
        assert kernel_id in made


async def test_a_kernel_that_refuses_is_not_culled(tmp_path, runtime_base, criu_binary):
    async with manager(tmp_path, runtime_base, cull_idle_timeout=100, cull_interval=3600) as made:
        kernel_id = await start(made, tmp_path)
        client = made.get_kernel(kernel_id).client()
        client.start_channels()
        await client.wait_for_ready(timeout=60)
        await client.execute_interactive("import subprocess; p = subprocess.Popen(['sleep', '600'])", timeout=60)
        client.stop_channels()
        idle_for(made, kernel_id, 200)
        await made.cull_kernels()
        assert made.kernel_model(kernel_id)["gpu_ckpt"]["state"] == "running"


async def test_a_checkpointed_kernel_expires_by_its_own_trait_only(tmp_path, runtime_base, criu_binary):
    async with manager(tmp_path, runtime_base, cull_interval=3600, checkpointed_expiry=1000) as made:
        kernel_id = await start(made, tmp_path)
        idle_for(made, kernel_id, 10**6)
        await made.cull_kernels()
        assert made.kernel_model(kernel_id)["gpu_ckpt"]["state"] == "running", "culling of live kernels is off"
        await made.provisioner_of(kernel_id).checkpoint()
        await made.cull_kernels()
        assert kernel_id in made, "its time has not come"
        made.checkpointed_expiry = 0
        await made.cull_kernels()
        assert kernel_id in made, "never"
        made.checkpointed_expiry = 1
        image = made.provisioner_of(kernel_id).lifecycle.image
        await until(lambda: utcnow().timestamp() - image.manifest.created > 1.1)
        await made.cull_kernels()
        assert kernel_id not in made


async def test_sleepers_do_not_count_but_are_there(tmp_path, runtime_base, criu_binary):
    async with manager(tmp_path, runtime_base) as made:
        assert not made
        kernel_id = await start(made, tmp_path)
        assert (len(made), bool(made)) == (1, True)
        await made.provisioner_of(kernel_id).checkpoint()
        assert (len(made), bool(made)) == (0, True), "shutdown_no_activity may fire, and must then shut it down"
        assert [model["id"] for model in made.list_kernels()] == [kernel_id]
        await made.provisioner_of(kernel_id).restore()
        assert len(made) == 1


@pytest.mark.parametrize("state", ["starting", "dead"])
async def test_a_dead_kernel_is_culled_as_ever(tmp_path, runtime_base, criu_binary, state):
    async with manager(tmp_path, runtime_base, cull_idle_timeout=100, cull_interval=3600) as made:
        kernel_id = await start(made, tmp_path)
        idle_for(made, kernel_id, 0)
        made.get_kernel(kernel_id).execution_state = state
        await made.cull_kernels()
        assert (kernel_id in made) == (state != "dead")
