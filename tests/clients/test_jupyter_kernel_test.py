"""jupyter_kernel_test, the protocol's own suite, on ipykernel behind our gate: as it stands, and waking in every test.

The suite starts its kernels itself, by the name of a kernelspec; it knows nothing of us.
"""
# ruff: noqa: RUF012 - the suite is set up by class attributes

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from unittest import TestCase

import jupyter_kernel_test
import pytest
from jupyter_core.utils import run_sync
from stock import OURS, environment, write_kernelspecs

from jupyter_gpu_ckpt.gate import router
from jupyter_gpu_ckpt.kernel.provisioner import GpuCkptProvisioner

pytestmark = pytest.mark.timeout(180)  # some of the suite's own waits have no deadline

#: Tests whose first message is a question: it may not wake the kernel, so the test brings it back itself.
ASKING = {"test_completion", "test_inspect"}
#: The one question that is answered for a kernel that sleeps.
ANSWERED_ASLEEP = "test_kernel_info"


class OurKernel(TestCase):
    """Lets the suite find our kernelspec, and its kernel leave no trace in the user's history."""

    __test__ = False
    kernel_name = OURS

    @classmethod
    def setUpClass(cls) -> None:
        directory = Path(tempfile.mkdtemp(prefix="gc-"))
        cls.addClassCleanup(shutil.rmtree, directory, ignore_errors=True)
        patch = pytest.MonkeyPatch()
        cls.addClassCleanup(patch.undo)
        patch.setenv("JUPYTER_PATH", str(write_kernelspecs(directory, directory / "run")))
        patch.delenv("PYTEST_CURRENT_TEST", raising=False)
        patch.setattr(router, "UNKNOWN_AFTER", 60.0)  # a busy machine takes longer to wake a kernel
        for name, value in environment(directory).items():
            patch.setenv(name, value)
        super().setUpClass()
        assert cls.provisioner().lifecycle is not None, "it was started plainly"

    def execute_helper(self, *arguments, **options):
        """The suite's own, with more patience than the tenth of a second it has from one output to the next."""
        channel = self.kc.iopub_channel  # type: ignore[attr-defined]
        get = channel.get_msg
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(channel, "get_msg", lambda timeout: get(timeout=max(timeout, 60)))
            return super().execute_helper(*arguments, **options)  # type: ignore[misc]

    @classmethod
    def provisioner(cls) -> GpuCkptProvisioner:
        return cls.km.provisioner  # type: ignore[attr-defined]


class TestIPykernel(OurKernel, jupyter_kernel_test.KernelTests):
    """Started by us, never asleep."""

    __test__ = True
    language_name = "python"
    file_extension = ".py"
    code_hello_world = "print('hello, world')"
    code_stderr = "import sys; print('oh no', file=sys.stderr)"
    completion_samples = [{"text": "zi", "matches": ["zip"]}]
    complete_code_samples = ["1", "print('hello, world')", "def f(x):\n    return x * 2\n\n\n"]
    incomplete_code_samples = ["print('''hello", "def f(x):\n    x * 2"]
    invalid_code_samples = ["import = 7q"]
    code_page_something = "zip?"
    code_generate_error = "raise ValueError('as asked')"
    code_execute_result = [
        {"code": "1+2+3", "result": "6"},
        {"code": "[n * n for n in range(1, 4)]", "result": "[1, 4, 9]"},
    ]
    code_display_data = [
        {"code": "from IPython.display import HTML, display; display(HTML('<b>bold</b>'))", "mime": "text/html"}
    ]
    code_history_pattern = "1?2*"
    # Not "range": IPython numbers its running session 0 there and 1 in "tail", which the suite takes for an error.
    supported_history_operations = ("tail", "search")
    code_inspect_sample = "zip"
    code_clear_output = "from IPython.display import clear_output; clear_output()"


class TestIPykernelThatWasAway(TestIPykernel):
    """Checkpointed before every test, so that it is the test's own message that meets a sleeping kernel."""

    def setUp(self) -> None:
        run_sync(self.provisioner().checkpoint)()
        if self._testMethodName in ASKING:
            run_sync(self.provisioner().restore)()
        else:
            assert self.provisioner().state.value == "checkpointed"

    def tearDown(self) -> None:
        slept_on = self.provisioner().state.value == "checkpointed"
        assert slept_on == (self._testMethodName == ANSWERED_ASLEEP)


class TestIopubWelcome(OurKernel, jupyter_kernel_test.IopubWelcomeTests):
    """A client that subscribes before the kernel is up is welcomed all the same."""

    __test__ = True
    support_iopub_welcome = True
