"""Starting a kernel where its capsule does not live to see it."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest
from harness import notebook
from jupyter_client.connect import LocalPortCache
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.provisioning import KernelProvisionerFactory, LocalProvisioner
from traitlets.config import Config

from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.errors import CapsuleError, CapsuleGone
from jupyter_gpu_ckpt.gate import wire
from jupyter_gpu_ckpt.kernel.provisioner import GpuCkptProvisioner


async def test_a_capsule_that_dies_at_the_start_is_no_reason_for_a_plain_kernel(
    tmp_path, runtime_base, criu_binary, monkeypatch, caplog
):
    """The host is fit: the start fails with the reason, and the next start has a capsule."""
    spawn, made = Capsule.spawn, []

    def killed(self, *arguments):
        made.append(self)
        self.close()
        spawn(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Capsule, "spawn", killed)
        with pytest.raises(CapsuleGone):
            async with notebook(tmp_path, runtime_base):
                pass
    assert len(made) == 1
    assert "started plainly" not in caplog.text
    async with notebook(tmp_path, runtime_base) as kernel:
        assert kernel.lifecycle is not None
        assert await kernel.run("print(6 * 7)") == "42"


async def test_a_host_without_namespaces_gets_a_plain_kernel(tmp_path, runtime_base, criu_binary, monkeypatch):
    def refused(*_, **__):
        raise CapsuleError("The namespaces of the capsule could not be made: Operation not permitted")

    monkeypatch.setattr(Capsule, "create", refused)
    async with notebook(tmp_path, runtime_base) as kernel:
        assert kernel.lifecycle is None
        assert await kernel.run("print(6 * 7)") == "42"


def test_a_kernelspec_opts_out_as_its_page_says():
    page = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "policies.md").read_text()
    (named,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    config = Config()
    config.KernelProvisionerFactory.default_provisioner_name = "gpu-ckpt-provisioner"
    factory = KernelProvisionerFactory(config=config)
    made = {
        name: factory.create_provisioner_instance("id", KernelSpec(argv=[], **metadata), parent=None)
        for name, metadata in {"plain": json.loads(named), "ours": {}}.items()
    }
    assert type(made["plain"]) is LocalProvisioner
    assert type(made["ours"]) is GpuCkptProvisioner


async def test_a_port_that_was_taken_between_its_choice_and_its_use(tmp_path, runtime_base, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        find, number = LocalPortCache.find_available_port, taken.getsockname()[1]
        chosen = []

        def choose(self, ip):
            chosen.append(number if len(chosen) == 1 else find(self, ip))
            return chosen[-1]

        monkeypatch.setattr(LocalPortCache, "find_available_port", choose)
        async with notebook(tmp_path, runtime_base) as kernel:
            assert len(chosen) == 10 and kernel.lifecycle is not None
            ports = [kernel.manager.get_connection_info()[f"{channel}_port"] for channel in wire.CHANNELS]
            assert sorted(ports) == sorted(chosen[5:])
            written = json.loads((tmp_path / "connection.json").read_text())
            assert [written[f"{channel}_port"] for channel in wire.CHANNELS] == ports
            assert await kernel.run("print(1)") == "1"
            await kernel.provisioner.checkpoint()
            assert await kernel.run("print(2)") == "2"
