"""The hook, on real spawners of batchspawner and KubeSpawner that are not started."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import until

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.errors import ImageFormat
from jupyter_gpu_ckpt.hub import placement
from jupyter_gpu_ckpt.hub.placement import Placement
from jupyter_gpu_ckpt.hub.spawn_messages import SpawnMessagesMixin
from jupyter_gpu_ckpt.node.requirements import FILE, MOST_BYTES, VARIABLE, GpuModel, Requirements, to_json

batchspawner = pytest.importorskip("batchspawner", reason="pip install 'jupyter_gpu_ckpt[hub-test]'")
kubespawner = pytest.importorskip("kubespawner", reason="pip install 'jupyter_gpu_ckpt[hub-test]'")

H200 = GpuModel("NVIDIA H200", 143_771 << 20)
ON_GPU = Requirements("x86_64", frozenset({"avx"}), (6, 1), "2.36", "580.1", (H200, H200))
PLAIN = Requirements("x86_64", frozenset({"avx"}), (6, 1), "2.36")
NODES = (
    "n1|idle|glibc-2.36,driver-580.1,linux-6.18|gpu:h200:4|9000|cpu*\n"
    "n1|idle|glibc-2.36,driver-580.1,linux-6.18|gpu:h200:4|9000|gpu\n"
    "n3|idle|glibc-2.31|gpu:a100:1|9000|cpu*\n"
)


@pytest.fixture
def published(tmp_path) -> Path:
    (tmp_path / "ada").mkdir()
    return tmp_path


def publish(place: Path, *kernels: Requirements) -> None:
    (place / "ada" / FILE).write_text(to_json(kernels))


def sinfo(said: str) -> list[str]:
    return [sys.executable, "-c", f"print({said!r})"]


def hook(place: Path, **traits) -> Placement:
    return Placement(**{"published": f"{place}/{{username}}", "sinfo": sinfo(NODES), **traits})


def user(name: str = "ada") -> SimpleNamespace:
    return SimpleNamespace(name=name, escaped_name=name, settings={}, id=1)


def slurm(name: str = "ada", kind=None, **traits):
    made = (kind or batchspawner.SlurmSpawner)(**traits)
    made.user = user(name)
    return made


async def messages(spawner) -> list[str]:
    """Return our messages on a page that is opened now."""
    page = spawner.progress()
    try:
        shown = []
        async for event in page:
            if event.get("progress") != 5:
                break
            shown.append(event["message"])
        return shown
    finally:
        await page.aclose()


async def test_features_and_gpus_are_requested_of_slurm(published):
    publish(published, ON_GPU)
    spawner = slurm(req_gres="gpu:1,tmp:10G", req_options="--exclusive")
    await hook(published)(spawner)
    assert spawner.req_gres == "gpu:h200:2,tmp:10G"
    assert spawner.req_options == "--exclusive '--constraint=glibc-2.36&driver-580.1&linux-6.18'"
    assert spawner.environment[VARIABLE] == f"{published}/ada"
    assert await messages(spawner) == [
        "Your sleeping kernel needs 2 x NVIDIA H200, driver 580.1, Linux 6.1 or newer, glibc 2.36, x86_64: n1 will do."
    ]


async def test_a_directory_that_does_not_answer_takes_none_of_the_hubs_threads(published, monkeypatch):
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # of a small hub
    answers, real, asked = threading.Event(), placement.read, []

    def read(directory):
        asked.append(directory)
        answers.wait()
        return real(directory)

    monkeypatch.setattr(placement, "read", read)
    publish(published, ON_GPU)
    place, spawner = hook(published, timeout=0.2), slurm(req_gres="gpu:1")
    try:
        for _ in range(3):
            await place(spawner)
            assert any("could not be found out (TimeoutError)" in message for message in await messages(spawner))
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 60) == "free"
        assert len(asked) == 1
    finally:
        answers.set()
    await until(lambda: not place._reading)
    place.timeout = 60.0
    await place(spawner)
    assert spawner.req_gres == "gpu:h200:2"


async def test_a_spawner_with_a_trait_of_its_own_for_constraints(published):
    from traitlets import Unicode

    class Theirs(batchspawner.SlurmSpawner):
        req_constraint = Unicode("fast|huge")

    publish(published, PLAIN)
    spawner = slurm(kind=Theirs)
    await hook(published)(spawner)
    assert spawner.req_constraint == "(fast|huge)&glibc-2.36&linux-6.18"
    assert spawner.req_options == ""


async def test_each_spawn_starts_from_what_is_configured(published):
    """Or a constraint would stay for a user whose kernels are gone."""
    place, spawner = hook(published), slurm(req_gres="gpu:1")
    for _ in range(2):
        publish(published, ON_GPU)
        await place(spawner)
        assert spawner.req_options.count("constraint") == 1
    publish(published)
    await place(spawner)
    assert (spawner.req_gres, spawner.req_options) == ("gpu:1", "")
    assert not any("needs" in message for message in await notices_or_nothing(spawner))


async def notices_or_nothing(spawner) -> list[str]:
    """The spawner's own words continue for ever."""
    page = spawner.progress()
    first = await anext(page)
    await page.aclose()
    return [first["message"]]


@pytest.mark.parametrize("nodes", [NODES.replace("n1|idle", "n1|drained"), ""], ids=["drained", "none"])
async def test_without_a_matching_node_any_is_used_and_a_message_says_so(published, nodes):
    publish(published, ON_GPU)
    spawner = slurm(req_gres="gpu:1")
    await hook(published, sinfo=sinfo(nodes))(spawner)
    assert (spawner.req_gres, spawner.req_options) == ("gpu:1", "")
    (message,) = await messages(spawner)
    assert "No node like that is in service: you get any. They stay saved, nothing is lost" in message


async def test_a_node_of_another_partition_is_none(published):
    """Slurm would refuse the job."""
    publish(published, ON_GPU)
    spawner = slurm(req_partition="small")
    await hook(published)(spawner)
    assert (spawner.req_gres, spawner.req_options) == ("", "")
    assert "you get any" in (await messages(spawner))[0]


async def test_kernels_that_need_different_nodes(published):
    publish(published, Requirements(gpus=(GpuModel("NVIDIA B200", 1),)), ON_GPU)
    spawner = slurm()
    await hook(published)(spawner)
    assert spawner.req_gres == "gpu:h200:2"
    (message,) = await messages(spawner)
    assert message.endswith("Another kind of node is needed by 1 more (1 x NVIDIA B200), which stay saved.")


@pytest.mark.parametrize(
    "command", [["false"], ["sinfo-that-is-not-there"], [sys.executable, "-c", "print('a|b')"], ["sleep", "60"]]
)
async def test_a_scheduler_that_does_not_answer_keeps_no_server_from_starting(published, command):
    publish(published, ON_GPU)
    spawner = slurm(req_gres="gpu:1")
    await hook(published, sinfo=command, timeout=1.0)(spawner)
    assert (spawner.req_gres, spawner.req_options) == ("gpu:1", "")
    (message,) = await messages(spawner)
    assert "you get any. They stay saved" in message


@pytest.mark.parametrize("when", ["while it starts", "while it runs"])
async def test_nothing_is_left_of_a_scheduler_that_does_not_answer(published, tmp_path, monkeypatch, when):
    publish(published, ON_GPU)
    start_program = asyncio.create_subprocess_exec

    async def slowly(*argv, **options):
        process = await start_program(*argv, **options)
        await asyncio.sleep(1)
        return process

    if when == "while it starts":
        monkeypatch.setattr(asyncio, "create_subprocess_exec", slowly)
    command = ["sh", "-c", f"sleep 1000 & echo $! >{tmp_path}/made && mv {tmp_path}/made {tmp_path}/child; wait"]
    start = asyncio.create_task(hook(published, sinfo=command, timeout=60.0)(slurm()))
    await until((tmp_path / "child").exists)
    start.cancel()
    await asyncio.wait({start})
    child = int((tmp_path / "child").read_text())
    try:
        await until(lambda: procfs.is_ending(child))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


async def test_what_is_published_and_no_publication_keeps_no_server_from_starting(published):
    (published / "ada" / FILE).write_text('{"version": 1, "kernels": [{"driver": "1\\n#SBATCH -A x"}]}')
    spawner = slurm(req_gres="gpu:1")
    await hook(published)(spawner)
    assert (spawner.req_gres, spawner.req_options) == ("gpu:1", "")
    (message,) = await messages(spawner)
    assert "IMAGE_FORMAT" in message and "SBATCH" not in message


@pytest.mark.parametrize("name", ["..", ".", "../eve", "a/b"])
async def test_a_users_name_leads_nowhere_else(published, name):
    outside = published.parent / FILE
    publish(published, ON_GPU)
    outside.write_text((published / "ada" / FILE).read_text())
    spawner = slurm(name)
    await hook(published)(spawner)
    assert spawner.req_options == ""
    assert not spawner.environment.get(VARIABLE, "").startswith(str(published.parent / "eve"))
    outside.unlink()


def test_what_lies_in_a_users_directory_is_not_followed_and_not_waited_for(tmp_path):
    file = tmp_path / FILE
    assert placement.read(tmp_path) is None
    file.symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="symbolic links"):
        placement.read(tmp_path)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ImageFormat):
        placement.read(tmp_path)
    file.unlink()
    file.mkdir()
    with pytest.raises((ImageFormat, OSError)):
        placement.read(tmp_path)
    file.rmdir()
    with file.open("wb") as endless:
        endless.truncate(1 << 40)
    assert len(placement.read(tmp_path)) == MOST_BYTES + 1


# -- a node without a GPU


async def test_who_has_nothing_on_a_gpu_gets_a_node_without(published):
    publish(published, PLAIN)
    spawner = slurm(req_gres="gpu:1", req_partition="gpu")
    await hook(published, without_gpu={"req_gres": "", "req_partition": "cpu"})(spawner)
    assert (spawner.req_gres, spawner.req_partition) == ("", "cpu")
    assert spawner.req_options == "'--constraint=glibc-2.36&linux-6.18'", "the kernels there are come back all the same"


async def test_a_requested_gpu_is_assigned(published):
    spawner = slurm(req_gres="gpu:1")
    spawner.user_options = {"gpu": "yes"}
    await hook(published, without_gpu={"req_gres": ""})(spawner)
    assert spawner.req_gres == "gpu:1"


async def test_a_sleeping_kernels_gpu_is_assigned_without_a_request(published):
    publish(published, ON_GPU)
    spawner = slurm(req_gres="gpu:1")
    await hook(published, without_gpu={"req_gres": ""})(spawner)
    assert spawner.req_gres == "gpu:h200:2"


# -- Kubernetes


@pytest.fixture
def kube(tmp_path, monkeypatch, no_cluster):
    """A KubeSpawner whose cluster nobody asks anything."""

    def make(**traits):
        made = kubespawner.KubeSpawner(_mock=True, **traits)
        made.user = user()
        return made

    return make


async def test_kubernetes_prefers_a_node_where_nobody_may_look(published, kube):
    publish(published, ON_GPU)
    spawner = kube(extra_resource_limits={"example.com/nic": "1"})
    await hook(published, publish_to="/srv/placement")(spawner)
    assert spawner.extra_resource_limits == {"example.com/nic": "1", "nvidia.com/gpu": "2"}
    assert {term["weight"] for term in spawner.node_affinity_preferred} == {100}
    assert not spawner.node_affinity_required
    assert spawner.environment[VARIABLE] == "/srv/placement"


class Api:
    """Answers as the hub's client does, with nodes of these labels."""

    def __init__(self, *labels: dict[str, str]) -> None:
        ready = SimpleNamespace(conditions=[SimpleNamespace(type="Ready", status="True")])
        self._nodes = [
            SimpleNamespace(
                metadata=SimpleNamespace(labels=one), spec=SimpleNamespace(unschedulable=None), status=ready
            )
            for one in labels
        ]

    async def list_node(self):
        return SimpleNamespace(items=self._nodes)


LABELS = {"kubernetes.io/arch": "amd64", "nvidia.com/gpu.product": "NVIDIA-H200"}


async def test_kubernetes_requires_a_node_that_is_there(published, kube):
    publish(published, ON_GPU)
    spawner = kube()
    spawner.api = Api(LABELS, {"kubernetes.io/arch": "amd64"})
    await hook(published, list_nodes=True)(spawner)
    (term,) = spawner.node_affinity_required
    assert {one["key"]: one["values"] for one in term["matchExpressions"]} == {
        name: [value] for name, value in LABELS.items()
    }


async def test_kubernetes_requires_none_that_is_not(published, kube):
    publish(published, ON_GPU)
    spawner = kube()
    spawner.api = Api({**LABELS, "nvidia.com/gpu.product": "NVIDIA-A100"})
    await hook(published, list_nodes=True)(spawner)
    assert not spawner.node_affinity_required
    assert spawner.extra_resource_limits == {}


# -- the page


class Slow(SpawnMessagesMixin):
    """A spawner that says something, and then nothing for long."""

    _log_name = "slow"
    log = logging.getLogger("slow")

    async def progress(self):
        yield {"progress": 1, "message": "theirs"}
        await asyncio.Event().wait()


async def test_a_page_that_was_open_before_shows_it_too():
    spawner = Slow()
    page = spawner.progress()
    assert (await anext(page))["message"] == "theirs"
    following = asyncio.ensure_future(anext(page))
    await asyncio.sleep(0)
    placement.spawn_messages.add(spawner, "ours")
    assert (await asyncio.wait_for(following, 60))["message"] == "ours"
    await page.aclose()


async def test_the_last_message_is_shown_after_the_spawner_has_ended():
    class Quick(Slow):
        async def progress(self):
            placement.spawn_messages.add(self, "ours")
            yield {"progress": 100, "message": "theirs"}

    assert [event["message"] async for event in Quick().progress()] == ["theirs", "ours"]
