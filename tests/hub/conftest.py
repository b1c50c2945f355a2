"""Fixtures: a hub for a module, and two of its users."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_user import HubUser
from real_hub import PROXY, RealHub, running_hub


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests here have the marker."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.hub)


@pytest.fixture(scope="session")
def hub_reason() -> str | None:
    """Why there can be no hub here; None if there can."""
    pytest.importorskip("jupyterhub", reason="JupyterHub is not installed (the extra `hub-test` has it)")
    pytest.importorskip("jupyterhub_idle_culler", reason="the idle culler is not installed (the extra `hub-test`)")
    if os.geteuid() != 0:
        return "a hub that starts servers as Linux users, and making such users, needs root"
    if shutil.which("useradd") is None:
        return "there is no useradd"
    return None if PROXY.exists() else "the hub's proxy is not installed: `scripts/install-proxy` (needs Node)"


@pytest.fixture
def no_cluster(tmp_path, monkeypatch) -> None:
    """The Kubernetes client's configuration names a cluster that nobody asks anything."""
    cluster = {"name": "none", "cluster": {"server": "http://127.0.0.1:1"}}
    context = {"name": "none", "context": {"cluster": "none", "user": "none"}}
    config = {"clusters": [cluster], "contexts": [context], "users": [{"name": "none", "user": {}}]}
    (tmp_path / "kubeconfig").write_text(json.dumps({**config, "current-context": "none"}))
    loaded = importlib.import_module("kubernetes_asyncio.config.kube_config")
    monkeypatch.setattr(loaded, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))


@pytest.fixture(scope="module")
def hub(hub_reason, criu_binary) -> Iterator[RealHub]:
    """A hub of the module's."""
    if hub_reason is not None:
        pytest.skip(hub_reason)
    with running_hub(criu_binary) as running:
        yield running


@pytest.fixture(scope="module")
def ann(hub: RealHub) -> HubUser:
    return HubUser(hub, hub.add_account("ann"))


@pytest.fixture(scope="module")
def bob(hub: RealHub) -> HubUser:
    return HubUser(hub, hub.add_account("bob"))
