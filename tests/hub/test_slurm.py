"""Culled on one node, awake on another: JupyterHub, batchspawner and Slurm, all of them real."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from everybody import readable_criu
from machine import User
from slurm_cluster import Cluster, Node, slurm, why_not
from slurm_hub import ACCOUNT, LOOK, PATIENCE, PROXY, Hub, hub
from waiting import until

from jupyter_gpu_ckpt.hub import slurm as dialect
from jupyter_gpu_ckpt.node.match import fingerprint
from jupyter_gpu_ckpt.node.requirements import FILE, GpuModel, Requirements, of, to_json

pytestmark = [pytest.mark.hub, pytest.mark.timeout(600)]

UID = 54321


def missing() -> str:
    """Why this cannot be run here; empty when it can."""
    packages = [name for name in ("jupyterhub", "batchspawner") if importlib.util.find_spec(name) is None]
    if packages:
        return f"a hub needs {' and '.join(packages)}: pip install 'jupyter_gpu_ckpt[hub-test]'"
    if not PROXY.exists():
        return "a hub needs configurable-http-proxy: `scripts/install-proxy` (needs Node)"
    return why_not()


def here() -> list[str]:
    """The features that the nodes have in truth: they are all this machine."""
    return dialect.features(of(fingerprint(files=(), ports=(), criu="")))


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A directory that everybody may enter, and that all machines see."""
    if why := missing():
        pytest.skip(why)
    path = Path(tempfile.mkdtemp(prefix="gc-slurm-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def user(place) -> User:
    home = place / "home"
    home.mkdir(mode=0o700)
    os.chown(home, UID, UID)
    return User("ada", UID, home)


@pytest.fixture(scope="module")
def cluster(place, user) -> Iterator[Cluster]:
    """n1 and n2 are alike; n3 has another C library and lacks a CPU feature, and Slurm prefers it to n2."""
    alike = here()
    other = [one for one in alike if one not in ("cpu-avx", "cpu-fp")]
    other = [one if not one.startswith("glibc-") else "glibc-2.17" for one in other]
    nodes = {
        "n1": Node(tuple(alike), "h200", 2, weight=1),
        "n2": Node(tuple(alike), "h200", 2, weight=3),
        "n3": Node(tuple(other), "a100", 1, weight=2),
    }
    with slurm(place, nodes, [user, ACCOUNT]) as made:
        yield made


@pytest.fixture(scope="module")
def site(cluster, user, place, criu_binary) -> Iterator[Hub]:
    with hub(cluster, user, place, readable_criu(criu_binary, place)) as made:
        yield made


@pytest.fixture
def at_home(site) -> Iterator[Hub]:
    """The user, at work on n1; at the end no server is left and every node takes jobs."""
    yield site
    if site.model():
        site.stop()
    for name, state in site.cluster.nodes().items():
        if state.startswith("drain"):
            site.cluster.resume(name)


CELL = "import os, random, socket\nx = list(range(100_000)); random.seed(5); pid = os.getpid()"
ASK = "print(sum(x), random.getstate()[1][:5])"


@pytest.mark.parametrize("theirs", ["{libc}|glibc-2.17", "glibc-2.17|({libc}&{cpu})", "({libc}|glibc-2.17)|{cpu}"])
def test_slurm_reads_an_administrators_constraint_with_ours_as_both(cluster, theirs):
    own = here()
    libc, cpu = (next(one for one in own if one.startswith(kind)) for kind in ("glibc-", ("cpu-avx", "cpu-fp")))
    option = dialect.with_constraint("-C " + shlex.quote(theirs.format(libc=libc, cpu=cpu)), f"{own[0]}&({cpu}|{cpu})")
    fitting = []
    for name in ("n1", "n2", "n3"):
        with contextlib.suppress(AssertionError):  # sbatch fails where the job could not run
            cluster.head.run("sbatch", "--test-only", f"--nodelist={name}", *shlex.split(option), "--wrap=true")
            fitting.append(name)
    assert fitting == ["n1", "n2"]


def test_a_kernel_comes_back_on_the_node_that_is_like_the_one_it_left(at_home):
    site, cluster, user = at_home, at_home.cluster, at_home.user
    site.start()
    assert site.node() == "n1"
    kernel = site.open("work.ipynb")
    site.run(kernel, CELL)
    before = site.run(kernel, ASK)
    assert site.run(kernel, "print(socket.gethostname())") == "n1"

    site.stop()
    assert "is drained: 1 kernels asleep" in site.log.read_text(), "before its job was cancelled"
    assert not cluster.machines["n1"].processes(user), "nothing of the user's is left on the node"
    cluster.drain("n1")

    messages = site.start()
    assert site.node() == "n2", site.messages(messages)  # Slurm by itself would have taken n3
    assert any("n2 will do" in message for message in messages), messages
    assert any(message.startswith("1 of your kernels sleep") for message in messages), messages
    assert site.run(kernel, ASK) == before
    assert [one["id"] for one in site.get("api/kernels")] == [kernel]
    assert [one["path"] for one in site.get("api/sessions")] == ["work.ipynb"]
    assert site.run(kernel, "print(socket.gethostname(), os.getpid() == pid)") == "n2 True"


def test_a_job_that_slurm_ends_by_itself_leaves_its_kernels_asleep(at_home):
    """An administrator's scancel, a time limit, a preemption: SIGTERM to every process of the job at once."""
    site, cluster = at_home, at_home.cluster
    site.start()
    kernel = site.open("cancelled.ipynb")
    site.run(kernel, CELL)
    before = site.run(kernel, ASK)
    cluster.head.run("scancel", site.model()["state"]["job_id"])
    until(lambda: not cluster.jobs(), "the job has ended", timeout=PATIENCE, longest=LOOK)
    until(lambda: not site.model(), "the hub has noticed", timeout=PATIENCE, longest=LOOK)
    site.start()
    assert site.run(kernel, ASK) == before
    assert site.run(kernel, "print(os.getpid() == pid)") == "True"


def test_without_a_matching_node_a_kernel_sleeps_on_and_its_user_sees_why(at_home):
    site, cluster = at_home, at_home.cluster
    site.start()
    kernel = site.open("waiting.ipynb")
    site.run(kernel, CELL)
    before = site.run(kernel, ASK)
    site.stop()
    for name in ("n1", "n2"):
        cluster.drain(name)
    messages = site.start()
    assert site.node() == "n3"
    assert any("No node like that is in service: you get any." in message for message in messages), messages
    until(lambda: site.serves(kernel), "it is there to be seen, and sleeps", timeout=PATIENCE, longest=LOOK)
    site.stop()
    cluster.resume("n2")
    messages = site.start()
    assert site.node() == "n2", site.messages(messages)
    assert site.run(kernel, ASK) == before


def test_kernels_that_were_on_a_gpu_get_gpus_of_their_model(at_home):
    """A server on a GPU node would have published this: there is no GPU here, and Slurm does not look for one."""
    site = at_home
    gpus = (GpuModel("NVIDIA A100-SXM4-80GB", 80 << 30),)
    published = site.place / "placement" / site.user.name / FILE
    published.write_text(to_json([Requirements(gpus=gpus)]))
    messages = site.start()
    assert site.node() == "n3"
    assert "TresPerNode=gres:gpu:a100:1" in site.job()
    assert any("1 x NVIDIA A100-SXM4-80GB: n3 will do" in message for message in messages), messages


def test_a_user_with_nothing_on_a_gpu_gets_a_node_without(at_home):
    """The hub is configured to request a GPU (see slurm_hub_config.py); an option that requests one gives it."""
    site = at_home
    (site.place / "placement" / site.user.name / FILE).write_text(to_json([]))
    messages = site.start()
    assert "gpu" not in site.job().lower().replace("jupyter_gpu_ckpt", ""), site.job()
    assert any("Nothing of yours is on a GPU" in message for message in messages), messages
