"""Ends of commands: exit statuses, errors for people and for programs; and the options there are."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from images import publish

from jupyter_gpu_ckpt import errors
from jupyter_gpu_ckpt.cli import images
from jupyter_gpu_ckpt.cli.main import EXIT_STATUSES, GpuCkptMain, command

ROOT = Path(__file__).resolve().parents[2]

#: Every command, and the options that scripts and documents may use.
OPTIONS = {
    "doctor": ["--image-dir", "--for"],
    "install-criu": ["--prefix", "--force-unpack", "--no-system", "--mirror", "--keyring", "--check"],
    "demo": ["--image-dir", "--kernel", "--timeout"],
    "list": ["--image-dir", "--runtime-base"],
    "inspect": ["--image-dir"],
    "verify": ["--image-dir"],
    "check": ["--image-dir"],
    "rm": ["--image-dir", "--force"],
    "prune": ["--image-dir", "--keep-last", "--max-age", "--max-bytes", "--dry-run"],
    "template": ["--image-dir", "--from", "--accept-differences"],
    "keys": ["--rotate"],
    "seal": ["--image-dir"],
    "break-claim": ["--image-dir"],
    "match": ["--image-dir", "--accept-changed-files", "--gpu-map"],
    "push": ["--image-dir", "--keep"],
    "pull": ["--image-dir", "--keep"],
    "node-features": [],
    "uninstall": ["--image-dir", "--images", "--dry-run"],
}
SHARED = ["--json", "--config", "--generate-config", "--log-level", "--debug", "--help", "--help-all", "--version"]


def test_no_command_is_missing():
    assert set(OPTIONS) == set(GpuCkptMain.subcommands)
    for verb in OPTIONS:
        assert command(verb).verb == verb


@pytest.mark.parametrize("verb", OPTIONS)
def test_every_command_has_a_help_text_with_its_options_and_an_example(run, verb):
    for arguments in ((verb, "--help"), (verb, "-h"), ("help", verb)):
        done = run(*arguments)
        assert (done.status, done.err) == (0, "")
        assert done.out.startswith(f"usage: jupyter gpu-ckpt {verb} [OPTIONS]")
        for option in OPTIONS[verb] + SHARED:
            assert re.search(rf"(?<![\w-]){option}(?![\w-])", done.out), option
        assert f"  jupyter gpu-ckpt {verb}" in done.out.partition("Examples:")[2]
        assert max(map(len, done.out.splitlines())) <= 100
    assert run(verb, "--version").out == run("--version").out


def test_all_traits_are_shown(run):
    shown = run("prune", "--help-all").out
    for trait in ("--PruneCommand.max_age", "--GpuCkptProvisioner.image_dir", "--JupyterApp.config_file"):
        assert trait in shown


WRONG = {
    (): "Which command?",
    ("lst",): "There is no command 'lst'.",
    ("--json",): "Which command?",
    ("--json", "list"): "Options come after the command.",
    ("inspect",): "IMAGE is missing.",
    ("rm",): "IMAGE is missing.",
    ("push", "image"): "URL is missing.",
    ("list", "image"): "'image' is one too many.",
    ("rm", "--froce", "image"): "There is no option --froce.",
    ("prune", "--keep-last", "1", "--dryrun"): "There is no option --dryrun.",
    ("prune", "--keep-last", "1", "--dry-rn"): "There is no option --dry-rn.",
    ("prune", "--max-age"): "Argument --max-age: expected one argument.",
    ("prune", "--keep-last", "few"): "--keep-last: expected an int, not the str 'few'",
    ("prune", "--max-age", "soon"): "'soon' cannot be understood.",
    ("prune",): "No limit is given.",
    ("doctor", "--for", "tpu"): "--for: expected any of ['cpu', 'gpu'], not the str 'tpu'",
    ("match", "image", "--gpu-map", "{"): "--gpu-map is not JSON: ",
    ("match", "image", "--gpu-map", "[]"): "--gpu-map must be an object of UUIDs.",
}


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_what_cannot_be_understood_is_status_64_and_says_what_to_do(store, run, arguments):
    image = publish(store)
    done = run(*arguments, "--json")
    error = done.document["error"]
    assert (done.status, done.err, error["code"]) == (64, "", "BAD_REQUEST")
    assert error["message"].startswith(WRONG[arguments])
    assert error["hint"]
    if "--json" not in arguments:
        done = run(*arguments)
        assert (done.status, done.out) == (64, "")
        assert done.err.splitlines()[:2] == [f"[BAD_REQUEST] {error['message']}", f"Hint: {error['hint']}"]
    assert store.get(image.id), "a misspelt option deletes nothing"


def test_a_misspelt_word_is_corrected(run):
    assert "Did you mean list?" in run("lst").err
    assert "Did you mean --dry-run?" in run("prune", "--dryrun").err


def test_options_may_stand_anywhere(store, run):
    first, second = publish(store), publish(store)
    assert run("rm", first.id, "--force", second.id).status == 0
    assert store.images() == []


def test_every_status_of_an_error_is_documented(run):
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.GpuCkptError)]
    assert {c.exit_status for c in classes} <= set(EXIT_STATUSES)
    text = (ROOT / "docs" / "usage.md").read_text()
    help = run("--help").out
    for status, meaning in EXIT_STATUSES.items():
        assert f"| {status} | {meaning} |" in text
        assert re.search(rf"^  {status} +{re.escape(meaning)}$", help, re.MULTILINE)


def raising(error: BaseException):
    def run(self):
        raise error

    return run


@pytest.mark.parametrize("error", [errors.ImageBusy, errors.CudaError, errors.NoSpace, errors.RemoteFailed])
def test_an_error_of_ours_has_its_own_status_code_hint_and_what_is_left(run, monkeypatch, error):
    monkeypatch.setattr(images.KeysCommand, "run", raising(error("It failed.", left="the image is kept", pid=1)))
    done = run("keys")
    assert (done.status, done.out) == (error.exit_status, "")
    lines = [f"[{error.code}] It failed.", "Left behind: the image is kept.", f"Hint: {error.default_hint}"]
    assert done.err.splitlines() == lines
    done = run("keys", "--json")
    assert (done.status, done.err) == (error.exit_status, "")
    assert done.document == {"error": error("It failed.", left="the image is kept", pid=1).as_dict()}


def test_a_defect_is_an_internal_error_with_a_traceback_on_demand(run, monkeypatch):
    monkeypatch.setattr(images.KeysCommand, "run", raising(ZeroDivisionError("by\x1bzero")))
    done = run("keys")
    assert (done.status, done.err.splitlines()[0]) == (70, r"[INTERNAL] ZeroDivisionError: by\x1bzero")
    assert "--debug" in done.err and "Traceback" not in done.err
    assert run("keys", "--json").document["error"]["code"] == "INTERNAL"
    assert "Traceback" in run("keys", "--debug").err


def test_an_interrupt_is_status_130(run, monkeypatch):
    monkeypatch.setattr(images.KeysCommand, "run", raising(KeyboardInterrupt()))
    assert run("keys") == (130, "", "")


def test_a_reader_that_ends_early_is_no_defect(configuration):
    reader, writer = os.pipe()
    os.close(reader)
    argv = [sys.executable, "-m", "jupyter_gpu_ckpt", "list", "--json"]
    done = subprocess.run(argv, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_command_imports_only_what_it_needs(configuration):
    """The start must stay short; `docs/usage.md` promises nothing, but nobody waits a second for a list."""
    program = """if True:
        import sys
        from jupyter_gpu_ckpt.cli import main
        main([sys.argv[1], "--json"])
        slow = {"rich", "argcomplete", "zmq", "jupyter_client", "tornado", "jupyter_server", "cuda", "fsspec"}
        print(*sorted(slow & set(sys.modules)), file=sys.stderr)
    """
    for verb in ("list", "keys", "check", "--version"):
        done = subprocess.run([sys.executable, "-c", program, verb], capture_output=True, text=True, timeout=60)
        assert done.stderr.strip() == "", verb
