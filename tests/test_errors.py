"""The tree of errors keeps its promises: stable codes, hints, JSON."""

from __future__ import annotations

import ast
import errno
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_gpu_ckpt import errors
from jupyter_gpu_ckpt.errors import GpuCkptError
from jupyter_gpu_ckpt.server import models


def tree(base: type[GpuCkptError] = GpuCkptError) -> list[type[GpuCkptError]]:
    return [base, *(found for child in base.__subclasses__() for found in tree(child))]


OURS = [found for found in dict.fromkeys(tree()) if found.__module__ == errors.__name__]

#: Code to exit status.  Both are promises to scripts: a line here may be added, and never be changed.
PROMISED = {
    "INTERNAL": 70,
    "HOST_UNFIT": 69,
    "CRIU_MISSING": 69,
    "CAPSULE_FAILED": 69,
    "CAPSULE_GONE": 70,
    "RUNTIME_DIRECTORY": 73,
    "NOT_NOW": 75,
    "KERNEL_BUSY": 75,
    "CHILD_PROCESSES": 75,
    "DEBUGGER_ATTACHED": 75,
    "LOOPBACK_TCP": 75,
    "DEVICE_HELD": 75,
    "TERMINAL_UNSUPPORTED": 75,
    "CUDA_UNSUPPORTED": 75,
    "NCCL_PEERS": 75,
    "CUDA_IPC": 75,
    "PROFILER_USED": 75,
    "MIG": 75,
    "MANAGED_MEMORY": 75,
    "MPS": 75,
    "INSUFFICIENT_RESOURCES": 75,
    "NO_SPACE": 75,
    "NO_MEMORY": 75,
    "QUOTA_EXCEEDED": 75,
    "LIMIT_REACHED": 75,
    "WRONG_STATE": 65,
    "BAD_REQUEST": 64,
    "KERNEL_LOST": 70,
    "PROTOCOL_VERSION": 76,
    "CUDA_FAILED": 71,
    "CUDA_UNAVAILABLE": 71,
    "DRIVER_TOO_OLD": 71,
    "CUDA_TIMEOUT": 71,
    "GPU_FULL": 75,
    "HELPER_GONE": 71,
    "CRIU_FAILED": 71,
    "PROCESS_ENDED": 71,
    "DUMP_INTERRUPTED": 71,
    "CRIU_TIMEOUT": 71,
    "CRIU_KILLED": 71,
    "FILE_CHANGED": 71,
    "FILE_MISSING": 71,
    "PORT_TAKEN": 71,
    "LOCK_TAKEN": 71,
    "PID_TAKEN": 71,
    "PIPES_EXHAUSTED": 75,
    "DELETED_MAPPING": 71,
    "SOCKET_UNSUPPORTED": 71,
    "FILE_UNSUPPORTED": 71,
    "IMAGE_UNUSABLE": 66,
    "IMAGE_NOT_FOUND": 66,
    "IMAGE_BUSY": 66,
    "IMAGE_FORMAT": 66,
    "IMAGE_DAMAGED": 66,
    "IMAGE_FORGED": 66,
    "IMAGE_STALE": 66,
    "SAVE_POINT_NOT_FOUND": 66,
    "SAVE_POINT_EXISTS": 66,
    "FILES_DIFFER": 66,
    "NOTEBOOK_NOT_REPLACED": 66,
    "KEY_UNUSABLE": 77,
    "STORE_SHARED": 73,
    "STORE_UNSUITABLE": 73,
    "STORE_UNWRITABLE": 73,
    "GATE_FAILED": 70,
    "KERNEL_SILENT": 70,
    "KERNEL_ASLEEP": 70,
    "AGENT_FAILED": 70,
}


@pytest.mark.parametrize("error", OURS, ids=lambda error: error.code)
def test_each_class_explains_itself(error):
    assert error.__doc__
    assert error.default_hint.strip()
    assert error.code == error.code.upper()
    assert 64 <= error.exit_status <= 78, "a number of sysexits.h"


@pytest.mark.parametrize("error", OURS, ids=lambda error: error.code)
def test_no_hint_sends_its_reader_to_the_details(error):
    """A cell shows message and hint alone."""
    assert "details" not in error.default_hint


def test_no_two_classes_share_a_code():
    assert len({error.code for error in OURS}) == len(OURS)


@pytest.mark.parametrize("error", OURS, ids=lambda error: error.code)
def test_only_left_says_what_became_of_the_kernel(error):
    """An error is raised before, in the middle of and after what changes a kernel; its class does not know which."""
    promise = re.compile(r"runs on|untouched|stays asleep|no image of it exists|nothing was written", re.IGNORECASE)
    assert not promise.search(f"{error.__doc__} {error.default_hint}")


@pytest.mark.parametrize("error", [errors.NoSpace, errors.NoMemory, errors.QuotaExceeded])
def test_too_little_memory_is_no_refusal_beforehand(error):
    assert not issubclass(error, errors.PreflightError), "it also comes in the middle of a dump, a wake and a pull"
    assert issubclass(error, errors.InsufficientResources)
    assert models.http_status(error("x")) == 409


def test_a_capsule_that_ended_says_nothing_of_the_host():
    error = errors.CapsuleGone("x")
    assert not isinstance(error, errors.HostError)
    assert models.http_status(error) != 503
    assert error.exit_status != errors.HostError.exit_status


@pytest.mark.parametrize(("code", "status"), PROMISED.items())
def test_promised_codes_and_statuses_stay(code, status):
    assert {error.code: error.exit_status for error in OURS}[code] == status


def test_an_error_says_what_happened_what_is_left_and_what_to_do():
    error = errors.NoSpace("The disk is full.", left="the kernel runs on", needed=7)
    assert str(error).startswith("[NO_SPACE] The disk is full. Left behind: the kernel runs on. Hint: ")
    assert json.loads(json.dumps(error.as_dict())) == {
        "code": "NO_SPACE",
        "message": "The disk is full.",
        "hint": errors.NoSpace.default_hint,
        "left": "the kernel runs on",
        "details": {"needed": 7},
    }


IMAGE = "20261120T153012-0c0ffee0-a97839"
#: A word that a reader would have to replace: as a manual has it, a field that was not filled in, an omission.
PLACEHOLDER = re.compile(r"\b(IMAGE|KERNEL|NAME|PATH|ID|UUID)\b|\{\w*\}|\.\.\.|<\w+>|%s")
#: A command on an image without the image.
HALF = re.compile(r"gpu-ckpt (?:match|verify|inspect|rm|seal|break-claim|pull)(?: --[\w-]+)*(?= *[`\"'.;,)]|$)")


@pytest.mark.parametrize("error", OURS, ids=lambda error: error.code)
def test_commands_in_hints_can_be_run_as_they_are(error):
    hint = error("x", image=IMAGE).hint
    assert not PLACEHOLDER.search(hint), hint
    assert not HALF.search(hint), hint
    if IMAGE in hint:
        assert error("x").hint.endswith("(`jupyter gpu-ckpt list` shows the ids of images.)")
        assert "{" not in error("x").hint


def test_a_hint_with_an_image_of_a_hostile_name():
    hint = errors.ImageDamaged("x", image="a; rm -rf ~\x1b[2J").hint
    assert "`jupyter gpu-ckpt rm 'a; rm -rf ~\\x1b[2J'` deletes it" in hint


def texts(path: Path) -> Iterator[str]:
    """Yield the strings of a module that people may read, with {} for each value; no docstrings, no help of traits."""
    tree = ast.parse(path.read_text())
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(id(node.value))
        if isinstance(node, ast.keyword) and node.arg == "help":
            skipped |= {id(each) for each in ast.walk(node.value)}
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(each) for each in ast.walk(node)} - {id(node)}
        if id(node) in skipped:
            continue
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


PACKAGE = Path(errors.__file__).parent
MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent.name != "cli"]  # which has usages


def test_no_text_has_a_command_that_its_reader_must_complete():
    found = [
        (str(path.relative_to(PACKAGE)), text)
        for path in MODULES
        for text in texts(path)
        if HALF.search(text) or re.search(r"gpu-ckpt [\w-]+(?: --[\w-]+)* [A-Z]{2,}\b", text)
    ]
    assert found == []


def test_a_hint_of_its_own_or_none_at_all():
    assert errors.NoSpace("x", hint="y").hint == "y"
    assert str(errors.NoSpace("x", hint="")) == "[NO_SPACE] x"


@pytest.mark.parametrize(
    ("error", "lacking"),
    [
        (RuntimeError("can't start new thread"), "threads"),
        (BlockingIOError(errno.EAGAIN, "fork"), "threads or processes"),
        (OSError(errno.EMFILE, "open"), "file descriptors"),
        (OSError(errno.ENOMEM, "mmap"), "memory"),
        (MemoryError(), "memory"),
        (RuntimeError("something else"), None),
        (OSError(errno.ENOENT, "open"), None),
    ],
)
def test_an_error_that_a_limit_has_caused_says_so(error, lacking):
    ours = GpuCkptError.from_exception(error)
    if lacking is None:
        assert ours.code == "INTERNAL"
    else:
        assert (ours.code, f"no more {lacking}." in ours.message) == ("LIMIT_REACHED", True)
