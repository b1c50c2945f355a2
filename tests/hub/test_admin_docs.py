"""The examples of docs/admin: manifests that Kubernetes' own schemas accept, and configuration that its owners take."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import chart_keys
import pytest
import yaml
from traitlets.config import Config

from jupyter_gpu_ckpt.hub.placement import Placement
from jupyter_gpu_ckpt.node.requirements import FILE, VARIABLE, GpuModel, Requirements, to_json

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install 'jupyter_gpu_ckpt[hub-test]'")
kubespawner = pytest.importorskip("kubespawner", reason="pip install 'jupyter_gpu_ckpt[hub-test]'")
batchspawner = pytest.importorskip("batchspawner", reason="pip install 'jupyter_gpu_ckpt[hub-test]'")

ADMIN = Path(__file__).resolve().parents[2] / "docs" / "admin"
MANIFESTS = sorted(path for path in (ADMIN / "k8s").glob("*.yaml") if path.name != "values.yaml")
#: The first release in which user namespaces for pods are there for good, and the newest whose schemas are installed.
VERSIONS = ("1.36", kubernetes_validate.latest_version())
H200 = GpuModel("NVIDIA H200", 143_771 << 20)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_is_what_kubernetes_takes(path, version):
    for document in yaml.safe_load_all(path.read_text()):
        kubernetes_validate.validate(document, version, strict=True)


def test_the_validator_refuses_what_is_wrong():
    job = yaml.safe_load((ADMIN / "k8s" / "doctor.yaml").read_text())
    job["spec"]["template"]["spec"]["hostUser"] = False
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, VERSIONS[0], strict=True)


def test_the_values_have_keys_and_types_of_the_chart(values):
    """The record of its schema (`chart_keys`) knows only the keys that are used."""
    record = json.loads(chart_keys.RECORD.read_text())
    assert chart_keys.problems(values, record["keys"]) == []
    date = record["chart"].split()[1]
    assert f"as of {date}" in (ADMIN / "kubernetes.md").read_text()


@pytest.mark.parametrize(
    ("path", "wrong", "problem"),
    [
        ("singleuser.extraEnvs", {}, "singleuser.extraEnvs: unknown"),
        ("singleuser.memory.limits", "1G", "singleuser.memory.limits: unknown"),
        ("singleuser.uid", "1000", "singleuser.uid: string, not integer or null"),
        ("hub.extraVolumes", {}, "hub.extraVolumes: object, not array"),
    ],
)
def test_keys_and_types_that_the_chart_lacks_are_found(values, path, wrong, problem):
    *above, name = path.split(".")
    value(values, ".".join(above))[name] = wrong
    assert chart_keys.problems(values, json.loads(chart_keys.RECORD.read_text())["keys"]) == [problem]


#: Values of the chart that become traits of KubeSpawner, as its hub does it.
TRAITS = {
    "uid": "uid",
    "fsGid": "fs_gid",
    "allowPrivilegeEscalation": "allow_privilege_escalation",
    "extraPodConfig": "extra_pod_config",
    "extraEnv": "environment",
    "memory.guarantee": "mem_guarantee",
    "memory.limit": "mem_limit",
    "extraResource.limits": "extra_resource_limits",
    "storage.extraVolumes": "volumes",
    "storage.extraVolumeMounts": "volume_mounts",
}


def value(values: dict[str, Any], path: str) -> Any:
    for name in path.split("."):
        values = values[name]
    return values


@pytest.fixture
def values() -> dict[str, Any]:
    return yaml.safe_load((ADMIN / "k8s" / "values.yaml").read_text())


@pytest.fixture
async def configured(values, tmp_path, monkeypatch, no_cluster) -> tuple[Any, Placement]:
    """The spawner and the hook that the hub has by these values."""
    c = Config()
    c.KubeSpawner = Config(values["hub"]["config"]["KubeSpawner"])
    for path, trait in TRAITS.items():
        c.KubeSpawner[trait] = value(values["singleuser"], path)
    c.KubeSpawner.image = "{name}:{tag}".format(**values["singleuser"]["image"])
    exec(compile(values["hub"]["extraConfig"]["gpu-ckpt"], "values.yaml", "exec"), {"c": c})
    spawner = c.JupyterHub.spawner_class(config=c, _mock=True)
    spawner.user.name = "Ada Byron@Example"
    return spawner, c.Spawner.pre_spawn_hook


async def manifest_of(spawner: Any) -> dict[str, Any]:
    from kubernetes_asyncio.client import ApiClient

    async with ApiClient() as client:
        return client.sanitize_for_serialization(await spawner.get_pod_manifest())


@pytest.mark.parametrize("version", VERSIONS)
async def test_the_pod_that_the_values_make(configured, version):
    spawner, _ = configured
    manifest = await manifest_of(spawner)
    kubernetes_validate.validate(manifest, version, strict=True)
    spec = manifest["spec"]
    (container,) = spec["containers"]
    assert spec["hostUsers"] is False
    assert spec["terminationGracePeriodSeconds"] == 240
    assert container["securityContext"] == {
        "runAsUser": 1000,
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "procMount": "Unmasked",
        "seccompProfile": {"type": "Unconfined"},
        "appArmorProfile": {"type": "Unconfined"},
    }
    assert "privileged" not in container["securityContext"]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_pod_of_a_notebook_of_kubeflow(values, version):
    (block,) = re.findall(r"```yaml\n(.*?)```", (ADMIN / "kubernetes.md").read_text(), re.DOTALL)
    spec = yaml.safe_load(block)["spec"]["template"]["spec"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "example-0"}, "spec": spec}
    kubernetes_validate.validate(pod, version, strict=True)
    (container,) = spec["containers"]
    assert container["securityContext"] == {
        "runAsUser": 1000,
        **values["hub"]["config"]["KubeSpawner"]["container_security_context"],
    }
    assert spec["hostUsers"] is False and spec["terminationGracePeriodSeconds"] == 240


async def test_the_doctor_runs_under_the_same_conditions(configured):
    """Or its word would be about another pod."""
    spawner, _ = configured
    (users,) = (await manifest_of(spawner))["spec"]["containers"]
    job = yaml.safe_load((ADMIN / "k8s" / "doctor.yaml").read_text())["spec"]["template"]["spec"]
    (doctor,) = job["containers"]
    assert {**users["securityContext"], "runAsGroup": 100} == doctor["securityContext"]
    assert job["hostUsers"] is False
    assert job["securityContext"] == {"fsGroup": 100}


async def test_the_pod_of_a_user_whose_kernels_sleep(configured, tmp_path):
    """The hub reads where the pod writes, and the affinity is what Kubernetes takes."""
    spawner, hook = configured
    hook.published = hook.published.replace("/srv", str(tmp_path))
    hook.list_nodes = False
    before = await manifest_of(spawner)
    (mount,) = [one for one in before["spec"]["containers"][0]["volumeMounts"] if one["mountPath"] == "/srv/placement"]
    place = tmp_path / mount["subPath"]
    place.mkdir(parents=True)
    (place / FILE).write_text(to_json([Requirements("x86_64", linux=(6, 1), driver="580.1", gpus=(H200, H200))]))
    await hook(spawner)
    manifest = await manifest_of(spawner)
    kubernetes_validate.validate(manifest, VERSIONS[0], strict=True)
    (container,) = manifest["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert {"name": VARIABLE, "value": "/srv/placement"} in container["env"]
    affinity = manifest["spec"]["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert len(affinity) == 2, "an older major version with a newer minor one, or a newer major one"


async def test_a_user_with_nothing_on_a_gpu_gets_none(configured, tmp_path):
    spawner, hook = configured
    hook.published = hook.published.replace("/srv", str(tmp_path))
    await hook(spawner)
    (container,) = (await manifest_of(spawner))["spec"]["containers"]
    assert "nvidia.com/gpu" not in container["resources"]["limits"]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (ADMIN / page).read_text(), re.DOTALL | re.MULTILINE)


def test_the_configuration_of_the_slurm_page_is_taken():
    """Every section names a class that is there, and every trait one that it has."""
    c = Config()
    named = "# /etc/jupyterhub/jupyterhub_config.py\n"
    (text,) = (text for text in blocks("slurm.md", "python") if text.startswith(named))
    exec(compile(text, "slurm.md", "exec"), {"c": c, "get_config": lambda: c})
    kind = c.JupyterHub.spawner_class
    made = kind(config=c)
    for section in ("Spawner", "SlurmSpawner"):
        for trait, wanted in c[section].items():
            assert made.has_trait(trait), f"{section}.{trait}"
            assert trait == "pre_spawn_hook" or getattr(made, trait) == wanted
    assert made.pre_spawn_hook.published == "/shared/placement/{username}", "a copy, as traitlets makes of all values"
    assert issubclass(kind, batchspawner.SlurmSpawner)


def test_pages_show_the_files_they_name():
    for page in ADMIN.glob("*.md"):
        for name in re.findall(r"\]\((k8s/[^)]+)\)", page.read_text()):
            assert (ADMIN / name).is_file(), f"{page.name}: {name}"


def test_the_examples_are_python():
    for page in ADMIN.glob("*.md"):
        for text in blocks(page.name, "python"):
            ast.parse(text)
