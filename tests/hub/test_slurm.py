"""Culled on one node, awake on another: JupyterHub, batchspawner and Slurm, all of them real."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from machine import User
from slurm_cluster import Cluster, Node, slurm, why_not
from slurm_hub import BIN, Hub, hub, proxy_command

from jupyter_gpu_ckpt.hub import slurm as dialect
from jupyter_gpu_ckpt.image.match import fingerprint
from jupyter_gpu_ckpt.image.requirements import FILE, Gpu, Requirements, of, to_json

pytestmark = [pytest.mark.hub, pytest.mark.timeout(600)]

UID = 54321


def missing() -> str:
    """Why this cannot be run here; empty when it can."""
    packages = [name for name in ("jupyterhub", "batchspawner") if importlib.util.find_spec(name) is None]
    if packages:
        return f"a hub needs {' and '.join(packages)}: pip install 'jupyter_gpu_ckpt[test]'"
    if proxy_command() is None:
        return "a hub needs configurable-http-proxy: scripts/install-slurm"
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
    shutil.copytree(path, "/tmp/h/slurm-scratch/last", dirs_exist_ok=True, symlinks=True, ignore=shutil.ignore_patterns("criu")); shutil.rmtree(path)


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
    with slurm(place, nodes, user) as made:
        yield made


@pytest.fixture(scope="module")
def site(cluster, user, place, criu_binary) -> Iterator[Hub]:
    with hub(cluster, user, place, readable(criu_binary.argv, place)) as made:
        yield made


def readable(argv: tuple[str, ...], place: Path) -> str:
    """A CRIU that an ordinary user may start: root's own may lie, unpacked, in root's home."""
    if len(argv) == 1:
        return argv[0]
    shutil.copytree(Path(argv[-1]).parents[2], place / "criu", symlinks=True)
    for directory, _, files in os.walk(place / "criu"):
        os.chmod(directory, 0o755)
        for name in files:
            if not (path := Path(directory, name)).is_symlink():
                path.chmod(path.stat().st_mode | 0o555)
    return str(place / "criu")


@pytest.fixture
def at_home(site) -> Iterator[Hub]:
    """The user, at work on n1; at the end no server is left and every node takes jobs."""
    yield site
    if site.model():
        site.stop()
    for name, state in site.cluster.nodes().items():
        if state.startswith("drain"):
            site.cluster.resume(name)


def test_a_kernel_comes_back_on_the_node_that_is_like_the_one_it_left(at_home):
    site, cluster, user = at_home, at_home.cluster, at_home.user
    site.start()
    assert site.node() == "n1"
    kernel = site.open("work.ipynb")
    site.run(kernel, "import os, random, socket\nx = list(range(100_000)); random.seed(5); pid = os.getpid()")
    before = site.run(kernel, "print(sum(x), random.getstate()[1][:5])")
    assert site.run(kernel, "print(socket.gethostname())") == "n1"

    site.stop()
    assert not cluster.machines["n1"].processes(user), "nothing of the user's is left on the node"
    cluster.drain("n1")

    told = site.start()
    assert site.node() == "n2", site.told(told)  # Slurm by itself would have taken n3
    assert any("n2 will do" in message for message in told), told
    assert [one["id"] for one in site.get("api/kernels")] == [kernel]
    assert [one["path"] for one in site.get("api/sessions")] == ["work.ipynb"]
    assert site.run(kernel, "print(sum(x), random.getstate()[1][:5])") == before
    assert site.run(kernel, "print(socket.gethostname(), os.getpid() == pid)") == "n2 True"
