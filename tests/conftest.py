"""Fixtures that every test may use."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest
import sweeps
import zmq
from cuda_subject import why_no_gpu
from harness import notebook
from images import publish

from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.criu.criu import Criu
from jupyter_gpu_ckpt.criu.install import find
from jupyter_gpu_ckpt.cuda.helper_client import Helper
from jupyter_gpu_ckpt.image.keys import Keyring
from jupyter_gpu_ckpt.image.store import Image, Store

#: Folders whose files run one after the other.
_GROUPS = {"hub": "machine", "nodes": "machine", "guide": "machine", "browser": "browser"}
#: Folders whose tests start servers, hubs, clusters, browsers, or kernels by the dozen.
_WHOLE = {"browser", "clients", "faults", "gpu", "guide", "hub", "nodes", "scale", "zoo"}
#: What takes minutes in one group or file, the longest first: begun last, it would be waited for alone.
_LONGEST = ["hub", "nodes", "guide", "browser", "test_rootless.py", "faults", "zoo", "test_leaks.py"]


def pytest_configure(config):
    """Tests stop programs by SIGINT, too; a shell has its background jobs ignore that."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(config))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # The context of a client that runs when it is garbage may be collected by any thread of ours, which would wait
    # there for ever for messages that nobody receives.  What clients have closed is destroyed by themselves.
    zmq.Context.__del__ = lambda context: None
    sweeps.set_seed()


def pytest_report_header():
    return f"sweeps: their parts are drawn by {sweeps.SEED}={os.environ[sweeps.SEED]}"


class FailuresAtOnce:
    """Writes why a test has failed when it does, not only at the end: a run may be ended before that."""

    def __init__(self, config):
        self.config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        if report.failed:
            reporter = self.config.pluginmanager.getplugin("terminalreporter")
            reporter.ensure_newline()
            reporter.write_line(f"{report.nodeid} ({report.when}, after {report.duration:.0f} s)", red=True)
            reporter.write_line(str(report.longrepr)[-1500:])


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    """Mark what `make test-fast` leaves out: tests that dump with CRIU, and those of folders that start servers.

    The longest come first, then the slow ones, so that several processes end at about the same time.
    """
    for item in items:
        if _top(item) in _WHOLE or "criu_binary" in item.fixturenames:
            item.add_marker(pytest.mark.slow)
    slow_files = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(
        key=lambda item: (
            _LONGEST.index(_top(item)) if _top(item) in _LONGEST else len(_LONGEST),
            item.path not in slow_files,
        )
    )
    sweeps.mark_rest(items)
    yield
    if rest := sweeps.rest_of_files(items):  # of what -k and -m have chosen
        config.hook.pytest_deselected(items=rest)
        items[:] = [item for item in items if item not in rest]


def _top(item) -> str:
    """The folder of a test below tests/, or its file's name where it lies in none."""
    return item.path.relative_to(Path(__file__).parent).parts[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Send the tests of a file to one process of several (pytest-xdist): they share its fixtures.

    What makes users, clusters and hosts has the machine to itself as far as others do the same; and one browser at a
    time is as much as two cores can draw.  By a scheduler of our own: pytest 9.2 does not show pytest-xdist 3.8 the
    names of its groups (``loadgroup``), and each test went wherever a worker was free.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((group for folder, group in _GROUPS.items() if f"/{folder}/" in f"/{file}"), file)

    config.option.loadscopereorder = False  # it would begin with the groups of most tests, not of the longest ones
    return ByGroup(config, log)


def pytest_terminal_summary(terminalreporter):
    """List the skipped tests' reasons, each once with its count: nobody reads a long list."""
    places = defaultdict(list)
    for report in terminalreporter.stats.get("skipped", ()):
        path, _, reason = report.longrepr
        places[reason.removeprefix("Skipped: ")].append(Path(path).name)
    if places:
        terminalreporter.section("skipped, by reason")
    for reason, names in sorted(places.items(), key=lambda item: -len(item[1])):
        terminalreporter.line(f"{len(names):4} {reason} ({', '.join(sorted(set(names)))})")


@pytest.fixture(scope="session")
def gpu_reason():
    """Why there is no usable GPU, and what to do, or None; asked once."""
    reason = why_no_gpu()
    return reason and f"{reason}: `make gpu-bundle` here, `make gpu-check` where there is a GPU"


@pytest.fixture(scope="session")
def helper():
    """One process at the driver for all tests."""
    helper = Helper()
    yield helper
    helper.close()


@pytest.fixture(scope="session", autouse=True)
def keys(tmp_path_factory):
    """The keys that seal images, away from the user's own; for the processes that tests start, too."""
    directory = tmp_path_factory.mktemp("trust") / "keys"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_GPU_CKPT_KEYS", str(directory))
        yield directory


@pytest.fixture(scope="session")
def criu_binary():
    """The CRIU of this host; without one the tests that need it fail: it is a requirement, not an option."""
    return find()


@pytest.fixture
def runtime_base():
    """A short-pathed directory for sockets: pytest's own are too long for the path of a unix socket."""
    directory = Path(tempfile.mkdtemp(prefix="gc-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
async def kernel(tmp_path, runtime_base, criu_binary):
    """A running kernel in a capsule behind a gate."""
    async with notebook(tmp_path, runtime_base) as running:
        assert running.lifecycle is not None, "started plainly"
        yield running


@pytest.fixture
def directory():
    """A directory with a short path; it cannot be removed while anything is mounted in it."""
    path = Path(tempfile.mkdtemp(prefix="gc-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def home(directory):
    """The directory of a capsule, with one for an image in it."""
    (directory / "image").mkdir(0o700)
    return directory


@pytest.fixture
def capsule(directory):
    with Capsule.create(directory) as capsule:
        yield capsule


@pytest.fixture
def criu(criu_binary):
    return Criu(criu_binary.argv)


@pytest.fixture(scope="module")
def public_directory():
    """A directory that apt's download user and ordinary users can enter, unlike pytest's own."""
    directory = Path(tempfile.mkdtemp(prefix="gpu-ckpt-test-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def store(tmp_path) -> Store:
    """A store of its own for each test."""
    return Store(tmp_path / "images", Keyring(tmp_path / "keys"))


@pytest.fixture
def image(store) -> Image:
    """An image in that store."""
    return publish(store)
