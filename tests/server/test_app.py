"""The extension installs itself where the user left the defaults, and nowhere else."""

from __future__ import annotations

import email
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from jupyter_server.serverapp import ServerApp
from jupyter_server.services.kernels.kernelmanager import AsyncMappingKernelManager
from jupyter_server.services.sessions.sessionmanager import SessionManager
from live import until
from traitlets.config import Config

from jupyter_gpu_ckpt.kernel.agent_injection import PROVISIONER
from jupyter_gpu_ckpt.server.app import GpuCkptApp, defaults
from jupyter_gpu_ckpt.server.kernel_manager import CheckpointKernelManager
from jupyter_gpu_ckpt.server.readiness import CheckpointSessionManager

ROOT = Path(__file__).resolve().parents[2]


def chosen(config: Config) -> tuple[object, object]:
    """Return the names that the extension would add to a server of that configuration."""
    made = defaults(ServerApp(config=config))
    return (
        made.KernelProvisionerFactory.get("default_provisioner_name"),
        made.ServerApp.get("kernel_manager_class"),
        made.ServerApp.get("session_manager_class"),
    )


def test_defaults_are_replaced():
    assert chosen(Config()) == (PROVISIONER, CheckpointKernelManager, CheckpointSessionManager)


def test_a_named_provisioner_stays():
    config = Config()
    config.KernelProvisionerFactory.default_provisioner_name = "local-provisioner"
    assert chosen(config) == (None, CheckpointKernelManager, CheckpointSessionManager)


def test_a_provisioner_named_by_the_environment_stays(monkeypatch):
    monkeypatch.setenv(KernelProvisionerFactory.default_provisioner_name_env, "somebody-elses")
    assert chosen(Config()) == (None, CheckpointKernelManager, CheckpointSessionManager)


def test_a_named_kernel_manager_stays():
    config = Config()
    config.ServerApp.kernel_manager_class = AsyncMappingKernelManager
    assert chosen(config) == (PROVISIONER, None, CheckpointSessionManager)


def test_a_named_session_manager_stays():
    config = Config()
    config.ServerApp.session_manager_class = SessionManager
    assert chosen(config) == (PROVISIONER, CheckpointKernelManager, None)


def test_with_a_gateway_the_gateways_manager_stays():
    config = Config()
    config.GatewayClient.url = "http://127.0.0.1:9"
    assert chosen(config) == (PROVISIONER, None, None)


def test_importing_the_package_does_not_import_the_server():
    code = (
        "import sys, jupyter_gpu_ckpt; print([m for m in sys.modules if m.startswith(('jupyter_server', 'tornado'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_jupyter_server_extension_list_shows_it(tmp_path):
    file = tmp_path / "jupyter_server_config.d" / "jupyter_gpu_ckpt.json"
    file.parent.mkdir()
    file.write_text((ROOT / "jupyter_gpu_ckpt" / "server" / file.name).read_text())
    command = [sys.executable, "-m", "jupyter_server.extension.serverextension", "list"]
    environment = {"PATH": "", "HOME": str(tmp_path), "JUPYTER_CONFIG_DIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    said = done.stdout + done.stderr
    assert "jupyter_gpu_ckpt" in said and "OK" in said, said
    assert "not found" not in said


@pytest.mark.parametrize("option", ["GpuCkptProvisioner.automatic_save_points=0", "KernelPersistence.orphan_timeout=x"])
def test_a_server_does_not_start_with_a_value_that_cannot_be_used(tmp_path, option):
    """The same as with one of its own: no kernel could start in it, and it could not stop its extensions."""
    directories = {f"JUPYTER_{each}_DIR": str(tmp_path / each) for each in ("CONFIG", "RUNTIME", "DATA")}
    command = [sys.executable, "-m", "jupyter_server", "--no-browser", "--allow-root", "--port=0", f"--{option}"]
    ended = subprocess.run(command, env=os.environ | directories, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "Bad config encountered during initialization" in ended.stderr
    assert option.partition("=")[0].rpartition(".")[2] in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_server_needs_no_configuration_for_it(live, kernel_id):
    model = live.get(f"api/kernels/{kernel_id}")
    assert model["gpu_ckpt"] == {"state": "running", "checkpointable": True}
    assert "jupyter_gpu_ckpt | extension was successfully loaded." in live.log


def test_a_kernel_sleeps_in_a_listing_and_wakes_on_execute(live, kernel_id):
    live.run(kernel_id, "x = 41")
    assert live.do(kernel_id, "checkpoint")["status"] == "done"
    for _ in range(3):  # listing wakes nothing
        (model,) = (model for model in live.get("api/kernels") if model["id"] == kernel_id)
        assert model["gpu_ckpt"]["state"] == "checkpointed"
    assert live.run(kernel_id, "print(x + 1)") == "42"
    until(lambda: live.get(f"api/kernels/{kernel_id}")["gpu_ckpt"]["state"] == "running")


def test_restarting_a_checkpointed_kernel_gives_a_fresh_one(live, kernel_id):
    live.run(kernel_id, "x = 1")
    live.do(kernel_id, "checkpoint")
    assert live.ask("POST", f"api/kernels/{kernel_id}/restart").status_code == 200
    assert live.run(kernel_id, "print('x' in globals())") == "False"
    document = live.get(f"gpu-ckpt/kernels/{kernel_id}")
    assert (document["state"], document["image"]) == ("running", None)
    assert live.do(kernel_id, "checkpoint")["status"] == "done"


def test_the_page_about_errors_is_the_runbook_that_the_packages_metadata_lead_to_if_they_do(monkeypatch):
    def page(metadata: str) -> str:
        monkeypatch.setattr(importlib.metadata, "metadata", lambda name: email.message_from_string(metadata))
        return GpuCkptApp().error_page

    pages = "Project-URL: Source, https://code.example/\nProject-URL: Documentation, https://code.example/docs\n"
    assert page(pages) == "https://code.example/docs/admin/runbook.md#{code}"
    assert page("Name: jupyter_gpu_ckpt\n") == ""
