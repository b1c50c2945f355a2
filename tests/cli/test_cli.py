"""``jupyter gpu-ckpt`` as its users start it: a process, its output, its exit status."""

from __future__ import annotations

import json
import os
import queue
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import alive, descendants, until

from jupyter_gpu_ckpt import __version__
from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.kernel.registry import Registration

pytestmark = pytest.mark.timeout(180)

OWNER = Path(__file__).parents[1] / "support" / "owner.py"
JUPYTER = shutil.which("jupyter", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


class Site:
    """One user on one host: the directories that the commands and the kernels' owners share."""

    def __init__(self, directory: Path, runtime_base: Path) -> None:
        self.directory = directory
        self.images = directory / "images"
        self.base = runtime_base / "gpu-ckpt"
        self.env = dict(
            os.environ,
            XDG_RUNTIME_DIR=str(runtime_base),
            JUPYTER_GPU_CKPT_IMAGES=str(self.images),
            JUPYTER_RUNTIME_DIR=str(directory / "runtime"),
            IPYTHONDIR=str(directory / "ipython"),
            COLUMNS="200",
        )
        self.env.pop("PYTEST_CURRENT_TEST", None)
        self.owners: list[Owner] = []

    def command(self, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """``python -m jupyter_gpu_ckpt``, which is what the installed script runs."""
        argv = [sys.executable, "-m", "jupyter_gpu_ckpt", *arguments]
        return subprocess.run(argv, env=env or self.env, cwd=self.directory, capture_output=True, text=True, timeout=60)

    def json(self, *arguments: str) -> Any:
        """The document a command prints; it must be the whole of its stdout."""
        done = self.command(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def error(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        """Exit status and error document of a command that fails; the document is the whole of its output."""
        done = self.command(*arguments, "--json")
        assert done.stderr == ""
        (document,) = json.loads(done.stdout).values()
        assert set(document) == {"code", "message", "hint", "left", "details"}
        return done.returncode, document

    def owner(self) -> Owner:
        """A process with a running kernel."""
        owner = Owner(self.env, self.directory / f"connection-{len(self.owners)}.json")
        self.owners.append(owner)
        owner.facts = owner.answer()
        return owner


class Owner:
    """`owner.py` as a process."""

    def __init__(self, env: dict[str, str], connection_file: Path) -> None:
        self.log = connection_file.with_suffix(".log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(OWNER), str(connection_file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=env,
                text=True,
            )
        self.facts: dict[str, Any] = {}
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def answer(self) -> dict[str, Any]:
        line = self._lines.get(timeout=90)
        assert line, f"the owner ended: {self.log.read_text()}"
        return json.loads(line)

    def ask(self, line: str) -> dict[str, Any]:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)

    def end(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(60)
        finally:
            if self.process.poll() is None:
                self.kill()
            self._reader.join(60)
            self.process.stdout.close()


@pytest.fixture
def site(tmp_path: Path, runtime_base: Path, criu_binary: object) -> Iterator[Site]:
    made = Site(tmp_path, runtime_base)
    yield made
    for owner in made.owners:
        owner.end()


def test_the_installed_script_is_a_jupyter_subcommand(site: Site):
    assert JUPYTER, "jupyter is installed beside this interpreter"
    argv = [JUPYTER, "gpu-ckpt", "--version"]
    done = subprocess.run(argv, env=site.env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, __version__)
    argv = [JUPYTER, "gpu-ckpt", "list", "--json"]
    done = subprocess.run(argv, env=site.env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert json.loads(done.stdout) == {"kernels": [], "images": [], "damaged": [], "refused": None}


def test_doctor_says_whether_and_why_in_json_and_by_its_exit_status(site: Site):
    report = site.json("doctor")
    assert set(report) == {"fit", "reason", "findings"}
    assert report["fit"]["cpu"] is True
    assert report["reason"]["cpu"] in (None, "")
    for finding in report["findings"]:
        assert set(finding) == {"check", "ok", "message", "fix", "level", "needed_for"}
    done = site.command("doctor", "--json", env={**site.env, "JUPYTER_GPU_CKPT_CRIU": "/nowhere/criu"})
    report = json.loads(done.stdout)
    assert done.returncode == 69
    assert report["fit"]["cpu"] is False
    assert any(
        finding["check"] == "criu" and finding["ok"] is False and finding["fix"] for finding in report["findings"]
    )


def test_list_and_inspect_of_a_kernel_that_runs_sleeps_and_runs_again(site: Site):
    owner = site.owner()
    (kernel,) = site.json("list")["kernels"]
    assert kernel == {
        "kernel_id": owner.facts["kernel_id"],
        "kernel_name": "python3",
        "state": "running",
        "pid": owner.facts["pid"],
        "image": None,
        "owner": owner.process.pid,
        "directory": owner.facts["directory"],
        "owned": True,
    }
    assert alive([kernel["pid"]])

    owner.ask("run x = 41")
    id = owner.ask("checkpoint")["image"]
    report = site.json("list")
    (kernel,), (image,) = report["kernels"], report["images"]
    assert (kernel["state"], kernel["pid"], kernel["image"]) == ("checkpointed", None, id)
    assert set(image) == {
        "id",
        "path",
        "bytes",
        "created",
        "kernel_id",
        "kernel_name",
        "hostname",
        "bytes_alone",
        "device_bytes",
        "save_point",
    }
    assert (image["id"], image["kernel_id"], image["device_bytes"]) == (id, kernel["kernel_id"], 0)

    manifest = site.json("inspect", id)
    assert (manifest["id"], manifest["path"], manifest["bytes"]) == (id, image["path"], image["bytes"])
    assert manifest["bytes"] == sum(entry["bytes"] for entry in manifest["files"].values())
    assert {"dump", "quiesce", "drain"} <= set(manifest["steps"])

    text = site.command("list").stdout
    assert kernel["kernel_id"] in text and "checkpointed" in text and id in text
    assert id in site.command("inspect", id).stdout

    assert owner.ask("run x += 1; print(x)")["printed"] == "42"
    owner.ask("run 0")
    report = site.json("list")
    assert ([k["state"] for k in report["kernels"]], report["images"]) == (["running"], [])

    owner.end()
    assert site.json("list") == {"kernels": [], "images": [], "damaged": [], "refused": None}


def test_the_only_copy_of_a_sleeping_kernel_is_not_deleted_without_force(site: Site):
    owner = site.owner()
    id = owner.ask("checkpoint")["image"]
    status, error = site.error("rm", id)
    assert (status, error["code"]) == (66, "IMAGE_BUSY")
    assert "--force" in error["hint"]
    # Wherever this command would look for kernels: the server may keep its sockets elsewhere.
    done = site.command("rm", id, env={**site.env, "XDG_RUNTIME_DIR": str(site.directory)})
    assert done.returncode == 66
    assert (site.images / id).is_dir()

    count = site.json("inspect", id)["bytes"]
    assert site.json("rm", "--force", id) == {"removed": {id: count}}
    assert not (site.images / id).exists()
    assert site.json("list")["images"] == []


def test_kept_images_are_deleted_all_or_none(site: Site):
    """A server that ends in order keeps the images of kernels that sleep."""
    ids = []
    for _ in range(2):
        owner = site.owner()
        ids.append(owner.ask("checkpoint")["image"])
        owner.end()
    assert [image["id"] for image in site.json("list")["images"]] == ids
    status, error = site.error("rm", ids[0], "no-such-image", ids[1])
    assert (status, error["code"]) == (66, "IMAGE_NOT_FOUND")
    assert [image["id"] for image in site.json("list")["images"]] == ids
    assert set(site.json("rm", *ids)["removed"]) == set(ids)
    assert site.json("list")["images"] == []


@pytest.mark.parametrize("name", ["no-such-image", "../images", ".hidden", ""])
@pytest.mark.parametrize("command", ["inspect", "rm"])
def test_an_unknown_image_is_status_66_and_a_json_error(site: Site, command: str, name: str):
    site.images.mkdir(mode=0o700)
    status, error = site.error(command, name)
    assert (status, error["code"]) == (66, "IMAGE_NOT_FOUND")
    assert error["hint"]
    done = site.command(command, name)
    assert done.returncode == 66
    assert done.stderr.startswith("[IMAGE_NOT_FOUND]")


def test_images_lie_elsewhere_by_an_option(site: Site, tmp_path: Path):
    elsewhere = tmp_path / "elsewhere"
    assert site.json("list", "--image-dir", str(elsewhere))["images"] == []
    assert not elsewhere.exists(), "looking makes nothing"


async def test_nothing_survives_the_death_of_the_owner_and_the_next_start_tidies_up(site: Site):
    awake, asleep = site.owner(), site.owner()
    image = asleep.ask("checkpoint")["image"]
    started = descendants(awake.process.pid) + descendants(asleep.process.pid)
    assert awake.facts["pid"] in started
    for owner in (awake, asleep):
        owner.kill()

    await until(lambda: alive(started) == [], timeout=60)
    report = site.json("list")
    assert report["kernels"] == [], "a kernel without a process and without an owner is none"
    assert [kept["id"] for kept in report["images"]] == [image], "what was saved is still there"

    left = [Path(owner.facts["directory"]) for owner in (awake, asleep)]
    assert all(directory.is_dir() for directory in left)
    fresh = site.owner()
    assert not any(directory.exists() for directory in left)
    assert [kernel["kernel_id"] for kernel in site.json("list")["kernels"]] == [fresh.facts["kernel_id"]]
    assert stat.S_IMODE(site.base.stat().st_mode) == 0o700
    status, error = site.error("rm", image)
    assert (status, error["code"]) == (66, "IMAGE_BUSY"), "the next server would attach it"
    assert set(site.json("rm", "--force", image)["removed"]) == {image}


def test_a_kernel_that_runs_without_a_server_is_listed_as_that(site: Site):
    """Its server has stopped, and it could not be checkpointed."""
    directory = site.base / "kernel"
    directory.mkdir(mode=0o700, parents=True)
    site.base.chmod(0o700)
    with Capsule.create(directory) as capsule:
        capsule.spawn(["sleep", "1000"], {"PATH": os.defpath}, "/")
        registration = Registration(directory)
        registration.write(kernel_id="0c0ffee0", kernel_name="python3", state="running", pid=7, image=None)
        capsule.outlive()
        registration.release()
        capsule.detach()
        text = site.command("list").stdout.splitlines()
        (kernel,) = site.json("list")["kernels"]
        Capsule.attach(directory).close()
    assert [word.strip() for word in text[1].split("  ") if word] == ["0c0ffee0", "running, no server", "7", "-"]
    assert text[2] == "A kernel without a server runs on; the next server that you start attaches to it."
    assert (kernel["state"], kernel["owned"]) == ("running", False)


SIDE_BY_SIDE = """
import sys
from pathlib import Path
from jupyter_gpu_ckpt.kernel.directories import make_runtime_dir
from jupyter_gpu_ckpt.kernel.registry import Registration, kernels, reap

base, role = Path(sys.argv[1]), sys.argv[2]
if role == "start":
    for _ in range(200):
        registration = Registration(make_runtime_dir(base))
        registration.write(state="running")
        (own,) = [kernel for kernel in kernels(base) if kernel["directory"] == str(registration.directory)]
        assert own["owned"]
        registration.remove()
while role == "reap" and not (base / "stop").exists():
    assert reap(base) == []
while role == "list" and not (base / "stop").exists():
    kernels(base)
"""


def test_starting_listing_and_reaping_side_by_side_lose_no_directory(runtime_base: Path):
    """A listing or a sweep must not take a fresh directory for an abandoned one, nor its lock."""
    base = runtime_base / "b"
    base.mkdir(mode=0o700)
    argv = [sys.executable, "-c", SIDE_BY_SIDE, str(base)]
    others = [subprocess.Popen([*argv, role]) for role in ("reap", "list")]
    starters = [subprocess.Popen([*argv, "start"]) for _ in range(2)]
    try:
        assert [starter.wait(90) for starter in starters] == [0, 0]
        (base / "stop").touch()
        assert [other.wait(60) for other in others] == [0, 0]
    finally:
        for process in (*starters, *others):
            process.kill()
            process.wait(60)
    assert [path.name for path in base.iterdir()] == ["stop"]
