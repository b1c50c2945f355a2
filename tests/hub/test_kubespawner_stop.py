"""The time KubeSpawner gives a pod to stop: the mixin on a real KubeSpawner with a fake cluster."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from jupyter_gpu_ckpt.errors import ServerSilent
from jupyter_gpu_ckpt.hub.spawn_messages import SpawnMessagesMixin
from jupyter_gpu_ckpt.hub.spawner import CheckpointMixin

kubespawner = pytest.importorskip("kubespawner", reason="pip install 'jupyter_gpu_ckpt[hub-test]'")


class Spawner(CheckpointMixin, SpawnMessagesMixin, kubespawner.KubeSpawner):
    """A spawner configured as in docs/admin/k8s/values.yaml."""

    silent = False

    async def _drain(self) -> float:
        """Drain as `test_spawner` tests it, with the answers of a server."""
        if self.silent:
            raise ServerSilent("It does not answer.")
        return 15.0


class Cluster:
    """Takes a request to delete a pod, at whose end the pod is gone; how long KubeSpawner would have waited for it."""

    def __init__(self, spawner: Spawner) -> None:
        self.spawner = spawner
        self.deleted: list[tuple[int, int]] = []
        self.waits: list[int] = []
        self.pods = {f"{spawner.namespace}/{spawner.pod_name}": {}}

    async def delete_namespaced_pod(self, name, namespace, body, grace_period_seconds):
        self.deleted.append((grace_period_seconds, body.grace_period_seconds))
        self.waits.append(self.spawner.start_timeout)
        self.pods.clear()


@pytest.fixture
def kube(tmp_path, monkeypatch, no_cluster):
    """A spawner and its cluster, by traits."""

    async def watching(replace: bool = False) -> None:
        """No cluster is watched."""

    def make(**traits) -> tuple[Spawner, Cluster]:
        made = Spawner(_mock=True, **traits)
        double = Cluster(made)
        made.api, made._start_watching_pods = double, watching
        monkeypatch.setattr(Spawner, "pod_reflector", SimpleNamespace(pods=double.pods))
        return made, double

    return make


async def test_a_pod_has_the_grace_in_its_manifest(kube):
    spawner, _ = kube(stop_grace=200.5)
    assert (await spawner.get_pod_manifest()).spec.termination_grace_period_seconds == 201


@pytest.mark.parametrize(("configured", "expected"), [(600, 600), (5, 120)])
async def test_a_manifest_with_more_keeps_it(kube, configured, expected):
    spawner, _ = kube(extra_pod_config={"terminationGracePeriodSeconds": configured})
    assert (await spawner.get_pod_manifest()).spec.termination_grace_period_seconds == expected


async def test_a_pod_of_servers_that_are_not_drained_is_as_configured(kube):
    spawner, _ = kube(checkpoint_before_stop=False)
    assert (await spawner.get_pod_manifest()).spec.termination_grace_period_seconds is None


async def test_a_drained_server_has_seconds_for_its_end(kube):
    spawner, cluster = kube()
    assert spawner.delete_grace_period == 1, "KubeSpawner's own"
    await spawner.stop()
    assert cluster.deleted == [(15, 15)]
    assert spawner.delete_grace_period == 1


async def test_one_that_could_not_be_drained_has_its_grace_and_is_waited_for(kube):
    """KubeSpawner waits for ``start_timeout``, and kills the pod that it finds at the next start."""
    spawner, cluster = kube(start_timeout=60)
    spawner.silent = True
    await spawner.stop()
    assert cluster.deleted == [(120, 120)]
    assert cluster.waits[0] > 120
    assert (spawner.delete_grace_period, spawner.start_timeout) == (1, 60)


async def test_one_that_did_not_come_up_is_deleted_as_kubespawner_would(kube):
    spawner, cluster = kube()
    spawner._waiting_for_response = True
    await spawner.stop()
    assert cluster.deleted == [(1, 1)]


async def test_a_stop_at_once_has_none(kube):
    spawner, cluster = kube()
    await spawner.stop(now=True)
    assert cluster.deleted == [(0, 0)]
