"""No step needs root: the core of the suite, run again by a user who cannot get any right whatever happens.

The user has no entry in the password file, no group but the ones named, no capability in its bounding set, and
``no_new_privs``, under which the set-uid bit of a helper (newuidmap, sudo) has no effect: what works here works by the
rights of an ordinary user alone, because Linux has no way left to give it others.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import sweeps
from everybody import REPOSITORY, needed, opened, readable_criu
from harness import descendants

from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.criu.install import VARIABLE

ROOT = os.geteuid() == 0
UID = 54321
#: Seconds after which many tests together are taken to hang: several times what they take on a busy machine.
HANGS = 600

pytestmark = [pytest.mark.slow, pytest.mark.timeout(HANGS + 60)]
root_only = pytest.mark.skipif(not ROOT, reason="this run is an ordinary user's already: all of it is the proof")


#: Of the tests that root runs, too, this user runs a third in each file in `make test`, and all in `make torture`.
PARTS = pytest.mark.parametrize("part", [pytest.param(1 / 3, id="some"), pytest.param(1, marks=pytest.mark.torture)])


class Nobody:
    """The ordinary user, and everything it starts."""

    def __init__(self, place: Path, criu: str, groups: Sequence[int] = ()) -> None:
        self.home = place / "home"
        self.seen: set[tuple[int, ...]] = set()
        self._stage = place / "stage"
        self._criu = criu
        self._groups = ["--groups", ",".join(map(str, groups))] if groups else ["--clear-groups"]

    def run(self, argv: Sequence[str], *, timeout: float, part: float = 1) -> str:
        """Its standard output.  Fails the test with what it said when it does not end well.

        ``part``: the part of the chosen tests that is run (`sweeps.PART_OF_FILES`).
        """
        drop = ["setpriv", f"--reuid={UID}", f"--regid={UID}", *self._groups, "--no-new-privs", "--bounding-set=-all"]
        drop += ["--inh-caps=-all", "--"]
        environment = {
            "HOME": str(self.home),
            "TMPDIR": str(self.home / "tmp"),
            "PATH": f"{Path(sys.executable).parent}:{os.defpath}",
            "LC_ALL": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
            VARIABLE: self._criu,
            sweeps.SEED: os.environ[sweeps.SEED],
            sweeps.PART_OF_FILES: str(part),
        }
        commands = opened(needed(), self._stage)
        script = f"set -e\n{commands}\ncd {shlex.quote(str(REPOSITORY))}\nexec {shlex.join([*drop, *argv])}"
        private = ["unshare", "--mount", "--propagation", "private"] if commands else []
        with open(self.home.parent / "output", "w+") as output:
            process = subprocess.Popen(
                [*private, "sh", "-c", script], env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
            watching = threading.Event()
            watcher = threading.Thread(target=self._watch, args=(process.pid, watching))
            watcher.start()
            try:
                status = process.wait(timeout)
            finally:
                process.kill()
                process.wait()
                watching.set()
                watcher.join()
            output.seek(0)
            said = output.read()
        assert status == 0, said[-8000:]
        return said

    def _watch(self, pid: int, over: threading.Event) -> None:
        """Note the user ids of every descendant, from when the first process has become the user's."""
        while _uids(pid) != (UID,) * 4:
            if over.wait(0.002):
                return
        while not over.wait(0.05):
            self.seen |= {uids for process in (pid, *descendants(pid)) if (uids := _uids(process))}


def _uids(pid: int) -> tuple[int, ...]:
    """Real, effective, saved and file system user id; empty when the process has gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return ()
    line = next(line for line in text.splitlines() if line.startswith("Uid:"))
    return tuple(int(word) for word in line.split()[1:])


@pytest.fixture
def place():
    """A directory that everybody may enter: pytest's own are root's alone."""
    path = Path(tempfile.mkdtemp(prefix="gc-user-"))
    path.chmod(0o711)
    home = path / "home"
    (home / "tmp").mkdir(parents=True)
    for directory in (home, home / "tmp"):
        os.chown(directory, UID, UID)
        directory.chmod(0o700)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def criu(criu_binary, place) -> str:
    return readable_criu(criu_binary, place)


def pytest_of(*tests: str) -> list[str]:
    """A pytest run that writes nothing into the checkout, without a plugin that takes long to load and has no test."""
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:schemathesis", "--tb=short"]
    return [sys.executable, "-m", "pytest", *options, *tests]


def chosen(part: float) -> list[str]:
    """The option for a part of the tests, or for all, those of torture runs among them."""
    return ["-m", "not torture"] if part < 1 else []


@root_only
@PARTS
def test_the_core_of_the_suite_as_an_ordinary_user(place, criu, part):
    nobody = Nobody(place, criu)
    engine = ["tests/capsule/test_capsule.py", "tests/criu/test_criu.py", "tests/capsule/test_criu_guard.py"]
    engine += [f"tests/process/test_{name}.py" for name in ("process_state", "proven_state", "inherited_filters")]
    engine.append(f"{Path(__file__)}::{test_an_ordinary_users_capsule_maps_that_user_alone.__name__}")
    tests = pytest_of("tests/lifecycle/test_cycle.py", *engine, "-m", "not torture")
    said = nobody.run(tests, timeout=HANGS, part=part)
    assert " passed" in said
    assert " failed" not in said
    assert nobody.seen == {(UID,) * 4}, "some process had another user's id"


@root_only
@pytest.mark.torture
def test_kernels_of_other_kinds_as_an_ordinary_user(place, criu):
    said = Nobody(place, criu).run(pytest_of("tests/server/test_other_kernels.py"), timeout=HANGS)
    assert " passed" in said
    assert " failed" not in said


@root_only
@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param("grew or unix or in_proc or cannot_come_back", id="some"),
        pytest.param(
            "moved or somebody or deleted or written or kill_in or dump", id="more", marks=pytest.mark.torture
        ),
    ],
)
def test_the_faults_of_criu_as_an_ordinary_user(place, criu, chosen):
    """CRIU finds other words for some failures when it lacks root's rights; the codes are the same."""
    nobody = Nobody(place, criu)
    tests = [f"tests/faults/test_{name}.py" for name in ("leaving", "returning", "replaced_files")]
    nobody.run(pytest_of(*tests, "-k", chosen, "-m", "not torture"), timeout=HANGS)
    assert nobody.seen == {(UID,) * 4}


@root_only
@PARTS
def test_the_faults_of_children_as_an_ordinary_user(place, criu, part):
    nobody = Nobody(place, criu)
    tests = ["tests/faults/test_families.py", "tests/faults/test_steps.py", "-k", "family", *chosen(part)]
    nobody.run(pytest_of(*tests), timeout=2 * HANGS, part=part)
    assert nobody.seen == {(UID,) * 4}


@root_only
def test_children_with_device_memory_as_an_ordinary_user(place, criu):
    nobody = Nobody(place, criu)
    chosen = "own_library or memory_of_a_child or owner_ended"
    nobody.run(pytest_of("tests/cuda/native/test_children.py", "-k", chosen), timeout=HANGS)
    assert nobody.seen == {(UID,) * 4}


@root_only
@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_a_server_that_is_killed_during_a_save_or_on_the_way_back_as_an_ordinary_user(place, criu):
    nobody = Nobody(place, criu)
    said = nobody.run(pytest_of("tests/faults/test_killed.py", "-k", "all and save"), timeout=3600)
    assert "1 passed" in said
    assert nobody.seen == {(UID,) * 4}


@root_only
@PARTS
@pytest.mark.timeout(3600)
def test_a_process_that_is_killed_at_any_step_as_an_ordinary_user(place, criu, part):
    nobody = Nobody(place, criu)
    tests = [f"tests/faults/test_{name}_killed.py" for name in ("processes", "branching")]
    nobody.run(pytest_of(*tests, "-k", "a_process", *chosen(part)), timeout=3600, part=part)
    assert nobody.seen == {(UID,) * 4}


@root_only
@PARTS
def test_terminals_and_shared_memory_as_an_ordinary_user(place, criu, part):
    """The group of terminals is none of this user's, and its trackers are no children of ours."""
    nobody = Nobody(place, criu)
    chosen = "a_pair or data or master or half or session or refused or taken_back or awake or restarted or gone"
    tests = ["tests/capsule/test_terminals.py", "tests/lifecycle/test_ended_kernels.py"]
    nobody.run(pytest_of(*tests, "-k", chosen, "-m", "not torture"), timeout=HANGS, part=part)
    assert nobody.seen == {(UID,) * 4}


@root_only
@PARTS
def test_limits_as_an_ordinary_user(place, criu, part):
    """Root's threads are not counted, and its hard limits can be raised."""
    nobody = Nobody(place, criu)
    tests = ["tests/agent/test_limits.py", "tests/process/test_descriptors.py"]
    tests += [f"tests/faults/test_{name}.py" for name in ("no_descriptors", "open_files", "long_names")]
    said = nobody.run(pytest_of(*tests, *chosen(part)), timeout=HANGS, part=part)
    assert " skipped" not in said
    tests, words = ["tests/kernel/test_orphans.py", "tests/agent/test_widgets.py"], "opened_all or no_more_threads"
    nobody.run(pytest_of(*tests, "-k", words, *chosen(part)), timeout=HANGS, part=part)
    assert nobody.seen == {(UID,) * 4}


@root_only
@PARTS
def test_forked_workers_as_an_ordinary_user(place, criu, part):
    """An ordinary user cannot see which page frames processes share; what becomes of these is the same for all."""
    nobody, options = Nobody(place, criu), chosen(part)
    if part < 1:
        options += ["-k", "image_is or since or forks_of or reserved or killed or encrypted or quota"]
    said = nobody.run(pytest_of("tests/lifecycle/test_forked_workers.py", *options), timeout=HANGS, part=part)
    assert " skipped" not in said
    assert nobody.seen == {(UID,) * 4}


@root_only
@PARTS
def test_connections_and_watched_files_as_an_ordinary_user(place, criu, part):
    """Without the right to repair a connection, and to open a file by its handle."""
    nobody = Nobody(place, criu)
    tests = [f"tests/process/test_{name}.py" for name in ("connections", "socket_options", "file_names")]
    tests.append("tests/capsule/test_watched_files.py")
    nobody.run(pytest_of(*tests, "-m", "not torture"), timeout=HANGS, part=part)
    tests = ["tests/process/test_device_files.py", "tests/lifecycle/test_cuda_children.py"]
    nobody.run(
        pytest_of(*tests, "-k", "device_files or inherited or forked or forks_while or files_noted"), timeout=HANGS
    )
    assert nobody.seen == {(UID,) * 4}


@root_only
@PARTS
def test_databases_and_changed_files_as_an_ordinary_user(place, criu, part):
    """The log and the index of a database are made by the capsule's init, in the user's namespace."""
    nobody = Nobody(place, criu)
    tests = ["tests/process/test_sqlite_wal.py", "tests/faults/test_shared_databases.py"]
    tests += ["tests/faults/test_replaced_files.py"]
    words = "sqlite_wal or random or visit or in_a_transaction or has_the_database or nowhere_else or large"
    said = nobody.run(pytest_of(*tests, "-k", words, *chosen(part)), timeout=2 * HANGS, part=part)
    assert " passed" in said
    assert nobody.seen == {(UID,) * 4}


@root_only
@PARTS
def test_the_launch_gate_as_an_ordinary_user(place, criu, part):
    nobody = Nobody(place, criu)
    chosen = "waits or is_seen or not_lock or next_owner"
    tests = pytest_of("tests/cuda/native/test_launch_gate_lifecycle.py", "-k", chosen)
    assert " passed" in nobody.run(tests, timeout=HANGS, part=part)
    assert nobody.seen == {(UID,) * 4}


@root_only
@PARTS
def test_frozen_kernels_as_an_ordinary_user(place, criu, part):
    """The init stops threads of its own user's processes, without a right over any other."""
    nobody = Nobody(place, criu)
    words = "disk or signals or fails_leaves or next_owner or next_server or cannot_be_frozen or end_of or at_once"
    tests = [f"tests/cuda/native/test_suspended_{part}.py" for part in ("calls", "notebook")]
    tests += ["tests/process/test_freezer.py::test_threads_that_could_call_the_driver_are_frozen_and_libzmq_s_serve_on"]
    options = ["-k", f"{words} or could_call", *chosen(part)]
    said = nobody.run(pytest_of(*tests, *options), timeout=HANGS, part=part)
    assert " passed" in said
    assert " skipped" not in said
    assert nobody.seen == {(UID,) * 4}


@root_only
@PARTS
def test_what_has_lost_its_parent_as_an_ordinary_user(place, criu, part):
    """The init traces CRIU, which has more rights than the user, and the process that CRIU restores first."""
    nobody = Nobody(place, criu)
    tests = ["tests/capsule/test_root_process.py", "tests/faults/test_leaving.py"]
    words = "root_process or lost_its_parent"
    nobody.run(pytest_of(*tests, "-k", words, *chosen(part)), timeout=HANGS, part=part)
    assert nobody.seen == {(UID,) * 4}


@root_only
def test_the_limit_of_a_users_pipes(place, criu):
    nobody = Nobody(place, criu)
    said = nobody.run(pytest_of("tests/faults/test_pipes.py", "-k", "other_programs"), timeout=120)
    assert "1 passed" in said


@root_only
def test_a_user_with_supplementary_groups(place, criu):
    """They cannot be mapped into a user namespace without help; the kernel keeps them all the same, as overflow ids."""
    nobody = Nobody(place, criu, groups=(UID, 60001, 60002))
    nobody.run(pytest_of("tests/lifecycle/test_cycle.py", "-k", "everything_is_there or three_cycles"), timeout=120)
    assert nobody.seen == {(UID,) * 4}


@root_only
def test_the_demo_as_an_ordinary_user(place, criu):
    nobody = Nobody(place, criu)
    said = nobody.run([sys.executable, "-m", "jupyter_gpu_ckpt", "demo", "--json"], timeout=180)
    facts = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    assert facts["intact"]
    assert facts["uid"] == UID
    assert nobody.seen == {(UID,) * 4}


@pytest.mark.skipif(ROOT, reason="root has no user namespace; this is run by the ordinary user above")
def test_an_ordinary_users_capsule_maps_that_user_alone(tmp_path):
    """One line, written by the user itself: what newuidmap (set-uid root) writes are ranges of subordinate ids."""
    directory = Path(tempfile.mkdtemp(prefix="gc-"))
    try:
        with Capsule.create(directory) as capsule:
            capsule.spawn(["sleep", "1000"], {"PATH": os.defpath}, "/")
            for name, own in (("uid_map", os.getuid()), ("gid_map", os.getgid())):
                text = Path(f"/proc/{capsule.host_pid}/{name}").read_text()
                assert [int(word) for word in text.split()] == [own, own, 1]
            assert _uids(capsule.host_pid) == (os.getuid(),) * 4
    finally:
        shutil.rmtree(directory)
