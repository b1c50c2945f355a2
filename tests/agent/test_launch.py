"""launch.py: the same as ``python -m``, and never in the kernel's way."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jupyter_gpu_ckpt.kernel.agent_injection import LAUNCH, rewrite

PROBE = """
'''A module that tells how it was started.'''
import json, sys
main = sys.modules["__main__"]
print(json.dumps({
    "path": sys.path, "argv": sys.argv, "orig_argv": getattr(sys, "orig_argv", None), "flags": list(sys.flags),
    "names": sorted(vars(main)), "same": vars(main) is globals(), "doc": __doc__, "file": __file__,
    "package": __package__, "spec": __spec__.name, "cached": __cached__, "loader": type(__loader__).__name__,
}))
"""


def both(tmp_path: Path, flags: list[str], module: str, env: dict[str, str] | None = None) -> list[str]:
    """Return the output of ``-m`` and of launch.py; the exit statuses must be the same."""
    results = [
        subprocess.run(
            [sys.executable, *flags, *way, module, "-f", "a b", "--flag"],
            cwd=tmp_path, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=60, check=False,
        )
        for way in (["-m"], [str(LAUNCH)])
    ]  # fmt: skip
    assert results[0].returncode == results[1].returncode
    assert results[0].stderr == results[1].stderr
    return [result.stdout for result in results]


@pytest.mark.parametrize("flags", [[], ["-s", "-u"], ["-Xfrozen_modules=off", "-W", "ignore"], ["-O"], ["-E", "-B"]])
def test_a_module_sees_the_same(tmp_path: Path, flags: list[str]) -> None:
    (tmp_path / "probe_module.py").write_text(PROBE)
    plain, launched = both(tmp_path, flags, "probe_module")
    assert json.loads(plain) == json.loads(launched)
    assert json.loads(launched)["path"][0] == str(tmp_path)


def test_a_package_sees_the_same(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "__main__.py").write_text(PROBE)
    plain, launched = both(tmp_path, [], "package")
    assert json.loads(plain) == json.loads(launched)


@pytest.mark.parametrize("flags", [["-I"], *([["-P"], ["-P", "-s"]] if sys.version_info >= (3, 11) else [])])
def test_isolated_sees_the_same(tmp_path: Path, flags: list[str]) -> None:
    plain, launched = both(tmp_path, flags, "site")  # prints sys.path; a module of ours could not be found
    assert plain == launched
    assert str(tmp_path) not in launched


@pytest.mark.skipif(sys.version_info < (3, 11), reason="PYTHONSAFEPATH is new in Python 3.11")
def test_safe_path_from_the_environment_sees_the_same(tmp_path: Path) -> None:
    plain, launched = both(tmp_path, [], "site", {"PYTHONSAFEPATH": "1"})
    assert plain == launched
    assert f"'{tmp_path}'" not in launched


def test_a_missing_module_fails_the_same(tmp_path: Path) -> None:
    assert both(tmp_path, [], "no_such_module") == ["", ""]


def test_a_deleted_working_directory_is_the_same(tmp_path: Path) -> None:
    gone = [
        sys.executable,
        "-c",
        "import os, sys; os.mkdir('d'); os.chdir('d'); os.rmdir('../d'); os.execv(sys.argv[1], sys.argv[1:])",
    ]
    outputs = [
        subprocess.run([*gone, sys.executable, *way, "site"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True).stdout  # noqa: E501
        for way in (["-m"], [str(LAUNCH)])
    ]  # fmt: skip
    assert outputs[0] == outputs[1]


def test_the_working_directory_shadows_nothing_of_the_agent(tmp_path: Path, start: Callable[..., Any]) -> None:
    for name in ("agent", "history", "mappings", "IPython", "runpy", "logging", "ctypes"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported from the working directory')")
    assert start().report("report")["pid"]


@pytest.mark.parametrize("module", ["ipykernel_launcher", "ipykernel"])
def test_the_kernel_cannot_tell(start: Callable[..., Any], module: str) -> None:
    code = """if True:
        import json, sys
        main = sys.modules["__main__"]
        print(json.dumps([sys.path, sys.argv[0], len(sys.argv), sorted(get_ipython().user_ns), main.__name__]))"""
    launched = start(module=module)
    plain = start(argv=[sys.executable, "-Xfrozen_modules=off", "-m", module, "-f", "{connection_file}"])
    assert json.loads(plain.run(code)) == json.loads(launched.run(code))
    assert plain.run("%who") == launched.run("%who")
    assert launched.report("report")["pid"] == launched.pid


def test_multiprocessing_spawn_works(start: Callable[..., Any]) -> None:
    code = """if True:
        import multiprocessing, operator
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(pool.map(operator.neg, [1, 2]))
        # now, because the kernel and its resource tracker will be killed: the semaphores would stay in /dev/shm
        import gc
        pool.join(); del pool; gc.collect()"""
    assert start().run(code) == "[-1, -2]"


def test_the_users_extensions_and_lines_are_kept(start: Callable[..., Any], ipython_dir: Path, tmp_path: Path) -> None:
    profile = ipython_dir / "profile_default"
    profile.mkdir(parents=True)
    for name in ("configured", "extra", "argument"):
        (tmp_path / f"ext_{name}.py").write_text(f"def load_ipython_extension(ip):\n    ip.user_ns['{name}'] = 1\n")
    (profile / "ipython_kernel_config.py").write_text(
        "c.InteractiveShellApp.extensions = ['ext_configured']\n"
        "c.InteractiveShellApp.extra_extensions = ['ext_extra']\n"
        "c.InteractiveShellApp.exec_lines = ['line = 1', 'import sys', 'arguments = list(sys.argv)']\n"
    )
    kernel = start()
    assert kernel.run("print(configured, extra, line, any('gpu_ckpt' in word for word in arguments))") == "1 1 1 False"
    assert kernel.report("report")["pid"]
    kernel = start(arguments=["--ext=ext_argument"])
    assert kernel.run("print(configured, argument, line)") == "1 1 1"
    assert kernel.report("report")["pid"]


@pytest.mark.parametrize(
    "breakage",
    [
        "raise RuntimeError('on import')",
        "this is no Python",
        "def attach():\n    raise RuntimeError('on attach')",
        "from .no_such_neighbour import x",
    ],
)
def test_a_broken_agent_stops_no_kernel(start: Callable[..., Any], tmp_path: Path, breakage: str) -> None:
    kernel, stderr = broken(start, tmp_path, breakage)
    assert kernel.run("print(6 * 7)") == "42"
    assert (
        kernel.run("import sys; print([name for name in sys.modules if name.startswith('_jupyter_gpu_ckpt_agent')])")
        == "[]"
    )
    (line,) = stderr.read_text().splitlines()
    assert line.startswith("jupyter_gpu_ckpt: no agent in this kernel (")


def test_an_agent_that_does_not_load_stops_no_kernel(start: Callable[..., Any], tmp_path: Path) -> None:
    text = (LAUNCH.parent / "agent.py").read_text()
    kernel, stderr = broken(
        start, tmp_path, text.replace("    agent = Agent(kernel, ip)\n", "    raise RuntimeError\n")
    )
    assert kernel.run("print(6 * 7)") == "42"
    assert stderr.read_text().count("no agent in this kernel (RuntimeError") == 1


def broken(start: Callable[..., Any], tmp_path: Path, agent: str) -> tuple[Any, Path]:
    """A kernel with another agent.py, and the file its stderr goes to."""
    folder, stderr = tmp_path / "inside", tmp_path / "stderr"
    shutil.copytree(LAUNCH.parent, folder)
    (folder / "agent.py").write_text(agent)
    argv = rewrite([sys.executable, "-Xfrozen_modules=off", "-m", "ipykernel_launcher", "-f", "{connection_file}"])
    assert argv is not None
    with open(stderr, "w") as file:
        kernel = start(argv=[word.replace(str(LAUNCH), str(folder / "launch.py")) for word in argv], stderr=file)
    return kernel, stderr


def test_an_environment_without_this_package(start: Callable[..., Any], tmp_path: Path) -> None:
    """Another conda environment, as far as the agent can tell: the same ipykernel, nothing of this project."""
    import ipykernel

    site, installed = tmp_path / "site", Path(ipykernel.__file__).parent.parent
    site.mkdir()
    for entry in installed.iterdir():
        if "gpu_ckpt" not in entry.name and entry.suffix != ".pth":
            (site / entry.name).symlink_to(entry)
    kernel = start(python=sys._base_executable, env={"PYTHONPATH": str(site)})  # type: ignore[attr-defined]
    assert kernel.run("import importlib.util; print(importlib.util.find_spec('jupyter_gpu_ckpt'))") == "None"
    assert kernel.report("quiesce")["probe_errors"] == []
    assert kernel.report("thaw")["probe_errors"] == []
