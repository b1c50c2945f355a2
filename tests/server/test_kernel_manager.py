"""Culling, expiry and counting, with real kernels under the extension's manager and without a server."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest
from harness import DAEMON, until
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from jupyter_server._tz import utcnow
from live import server
from live import until as until_true
from tornado.web import HTTPError
from traitlets.config import Config

from jupyter_gpu_ckpt.gate.replies import IDLE_TYPE
from jupyter_gpu_ckpt.server.kernel_manager import CheckpointKernelManager


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


async def test_a_kernel_info_request_does_not_make_a_sleeping_kernel_less_idle(tmp_path, runtime_base, criu_binary):
    async with manager(tmp_path, runtime_base) as made:
        kernel_id = await start(made, tmp_path)
        await made.provisioner_of(kernel_id).checkpoint()
        kernel = made.get_kernel(kernel_id)
        seen, track = [], made.track_message_type
        made.track_message_type = lambda kind: seen.append(kind) or track(kind)
        client = kernel.client()
        client.start_channels()
        await until(lambda: "iopub_welcome" in seen, 60)  # to jupyter_server a subscription is activity
        idle_for(made, kernel_id, 50)
        before = kernel.last_activity
        client.kernel_info()
        await until(lambda: IDLE_TYPE in seen, 60)
        client.stop_channels()
        assert kernel.last_activity == before
        assert made.kernel_model(kernel_id)["gpu_ckpt"]["state"] == "checkpointed"


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


async def test_a_kernel_that_works_though_no_cell_runs_is_not_culled(tmp_path, runtime_base, criu_binary, caplog):
    caplog.set_level("INFO")
    async with manager(tmp_path, runtime_base, cull_idle_timeout=100, cull_interval=3600) as made:
        kernel_id = await start(made, tmp_path)
        idle_for(made, kernel_id, 200)
        made.idle_seconds = lambda _: 99.0
        await made.cull_kernels()
        assert "was not culled: it works" in caplog.text
        assert made.kernel_model(kernel_id)["gpu_ckpt"]["state"] == "running"
        made.idle_seconds = lambda _: 101.0
        await made.cull_kernels()
        assert made.kernel_model(kernel_id)["gpu_ckpt"]["state"] == "checkpointed"


async def test_a_kernel_that_refuses_is_not_culled_and_the_log_says_the_code(
    tmp_path, runtime_base, criu_binary, caplog
):
    async with manager(tmp_path, runtime_base, cull_idle_timeout=100, cull_interval=3600) as made:
        kernel_id = await start(made, tmp_path)
        client = made.get_kernel(kernel_id).client()
        client.start_channels()
        await client.wait_for_ready(timeout=60)
        await client.execute_interactive(DAEMON, timeout=60)
        client.stop_channels()
        idle_for(made, kernel_id, 200)
        await made.cull_kernels()
        assert made.kernel_model(kernel_id)["gpu_ckpt"]["state"] == "running"
        assert "was not culled: CHILD_PROCESSES" in caplog.text
        assert "sleep" not in caplog.text


async def test_a_protected_kernel_is_neither_culled_nor_expired(tmp_path, runtime_base, criu_binary):
    traits = {"cull_idle_timeout": 100, "cull_interval": 3600, "checkpointed_expiry": 1}
    async with manager(tmp_path, runtime_base, **traits) as made:
        kernel_id = await start(made, tmp_path)
        provisioner = made.provisioner_of(kernel_id)
        provisioner.agent_requests.protect(3600)
        idle_for(made, kernel_id, 200)
        await made.cull_kernels()
        assert made.kernel_model(kernel_id)["gpu_ckpt"]["state"] == "running"
        image = await provisioner.checkpoint()  # its user may ask for it all the same
        await until(lambda: utcnow().timestamp() - image.manifest.created > 1.1)
        await made.cull_kernels()
        assert kernel_id in made
        provisioner.agent_requests.protect(0)
        await made.cull_kernels()
        assert kernel_id not in made


def test_a_server_that_culls_checkpoints_first_and_lets_sleepers_expire(tmp_path, runtime_base, criu_binary):
    config = """
c.MappingKernelManager.cull_idle_timeout = c.MappingKernelManager.cull_interval = 1
c.CheckpointKernelManager.checkpointed_expiry = 3
"""
    with server(tmp_path, runtime_base, config=config) as running, running.events() as next_event:
        kernel_id = running.start_kernel()
        states = []
        while "checkpointed" not in states:
            event = next_event()
            states += [event["state"]] if event["schema_id"].endswith("/kernel_state/v1") else []
        until_true(lambda: "was checkpointed instead of culled" in running.log)
        until_true(lambda: running.get("api/kernels") == [])
        assert f"{kernel_id} expires" in running.log
        (image,) = running.get("gpu-ckpt/images")
        assert (image["kernel_id"], image["only_copy"]) == (kernel_id, False), "kept, for a user who wants it back"


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


async def test_a_kernel_that_is_in_the_map_but_not_marked_yet_spoils_no_listing(tmp_path, runtime_base, criu_binary):
    async with manager(tmp_path, runtime_base) as made:
        kernel_id = await start(made, tmp_path)
        kernel = made.get_kernel(kernel_id)
        kernel.execution_state = None
        del kernel._trait_values["last_activity"]
        assert [model["execution_state"] for model in made.list_kernels()] == ["starting"]


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


async def test_a_stop_during_an_attach_keeps_the_kernel_for_the_next_server(tmp_path, runtime_base, criu_binary):
    async with manager(tmp_path, runtime_base) as made:
        kernel_id = await start(made, tmp_path)
        await made.provisioner_of(kernel_id).detach()
        images = sorted(path.name for path in (tmp_path / "images").glob("2*"))
        assert len(images) == 1
    async with manager(tmp_path, runtime_base) as made:
        attaching = asyncio.ensure_future(made.start_kernel(kernel_id=kernel_id, kernel_name="python3"))
        await until(lambda: kernel_id in made._pending_kernels, 60)
        await made.shutdown_all()
        await attaching
        assert sorted(path.name for path in (tmp_path / "images").glob("2*")) == images
        with pytest.raises(HTTPError, match="stopping"):
            await made.start_kernel(kernel_id=kernel_id, kernel_name="python3")
