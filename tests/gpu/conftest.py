"""Common parts of the tests on a real GPU: skipping where there is none, and a file for their measurements."""

import json
import os
from pathlib import Path

import pytest
from cuda_subject import CudaSubject
from harness import RAW_OUTPUT

from jupyter_gpu_ckpt.cuda.cuda import Cuda
from jupyter_gpu_ckpt.cuda.gpus import Gpus


@pytest.fixture(autouse=True)
def _needs_gpus(request):
    """Skip, with the reason, what is marked for GPUs this machine does not have."""
    wanted = 2 if request.node.get_closest_marker("two_gpus") else 1 if request.node.get_closest_marker("gpu") else 0
    if wanted:
        reason = request.getfixturevalue("gpu_reason")
        if reason:
            pytest.skip(reason)
        found = len(request.getfixturevalue("gpus").list())
        if found < wanted:
            pytest.skip(f"needs {wanted} GPUs, this machine has {found}")


@pytest.fixture(scope="session")
def cuda(helper):
    return Cuda(helper)


@pytest.fixture(scope="session")
def gpus(helper, tmp_path_factory):
    return Gpus(helper, lock_dir=tmp_path_factory.mktemp("gpu") / "locks")


@pytest.fixture
def subject():
    """Starts `CudaSubject` processes and ends them after the test."""
    started = []

    def start(*args, **kwargs):
        started.append(CudaSubject(*args, **kwargs))
        return started[-1]

    yield start
    for process in started:
        process.close()


@pytest.fixture
def record(request):
    """Keep a figure or an answer of the driver: shown at the end, and written below $OUT if that is set."""

    def keep(**facts):
        kept = dict(request.node.user_properties) | facts
        request.node.user_properties[:] = kept.items()

    return keep


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Add the kernels' raw stderr (a crash's trace, say) to the report of a failed test."""
    report = yield
    if report.failed and (directory := getattr(item, "funcargs", {}).get("tmp_path")):
        for path in sorted(directory.rglob(RAW_OUTPUT)):
            report.sections.append((f"Raw output of a kernel, {path.name}", path.read_text(errors="replace")[-20000:]))
    return report


def pytest_runtest_logreport(report):
    """A failure is written down at once: a run that reaches its limit says nothing at its end."""
    if report.failed and os.environ.get("OUT") and not hasattr(report, "node"):  # a worker's report, heard of again
        with Path(os.environ["OUT"], f"gpu-failures-uid{os.getuid()}.txt").open("a") as failures:
            output = "".join(f"-- {title}\n{text}\n" for title, text in report.sections if title.startswith("Raw"))
            failures.write(f"{'=' * 100}\n{report.nodeid} ({report.when})\n{report.longreprtext}\n{report.caplog}\n")
            failures.write(output)


def pytest_terminal_summary(terminalreporter):
    records = {
        report.nodeid.rpartition("::")[2]: dict(report.user_properties)
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "call" and report.user_properties
    }
    if not records:
        return
    terminalreporter.section("recorded")
    for name, facts in records.items():
        terminalreporter.write_line(f"{name}: {json.dumps(facts)}")
    if os.environ.get("OUT"):
        path = Path(os.environ["OUT"], f"gpu-records-uid{os.getuid()}.json")
        earlier = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(earlier | records, indent=1) + "\n")
