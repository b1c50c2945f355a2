"""The agent's three requests, against real kernels."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

AGENT = "agent = getattr(get_ipython(), '_jupyter_gpu_ckpt_agent')"
FORK_AND_PRINT = """if True:
    import os, sys
    child = os.fork()
    if child == 0:
        print("from the child", flush=True)
        os._exit(0)
    print(os.waitpid(child, 0)[1])"""


def history_files(kernel: Any) -> list[str]:
    """Without its journal, which is there while IPython's own thread writes."""
    return [target for target in kernel.descriptors() if target.endswith("history.sqlite")]


def wait_for_history_files(kernel: Any) -> None:
    """Wait for the manager's connection and that of IPython's saving thread, which opens its own when it runs."""
    deadline = time.monotonic() + 60
    while (files := history_files(kernel)) != files[:1] * 2 or not files:
        assert time.monotonic() < deadline, files
        time.sleep(0.01)


def test_quiesce_leaves_no_tcp_and_no_database_and_thaw_brings_them_back(start: Callable[..., Any]) -> None:
    kernel = start()
    port = kernel.tcp_sockets()
    assert len(port) == 1
    wait_for_history_files(kernel)
    report = kernel.report("quiesce", {"trim": True, "files": True})
    assert kernel.tcp_sockets() == [] and history_files(kernel) == []
    assert report["probe_errors"] == [] and report["sockets"] == [] and report["open_files"] == []
    assert "IPythonHistorySavingThread" not in report["threads"]
    assert kernel.report("thaw", {"environ": {}})["probe_errors"] == []
    assert kernel.tcp_sockets() == port
    wait_for_history_files(kernel)
    assert "IPythonHistorySavingThread" in kernel.report("report")["threads"]


def test_a_stream_of_many_handlers_is_flushed_once(start: Callable[..., Any]) -> None:
    """PyTorch has forty of ipykernel's, where each flush waits for another thread."""
    kernel = start()
    kernel.run(
        """if True:
        import io, logging
        flushes = []
        class Stream(io.StringIO):
            def flush(self): flushes.append("stream")
        class Handler(logging.StreamHandler):
            def flush(self): flushes.append("handler")
        stream, closed = Stream(), io.StringIO()
        closed.close()
        for number in range(40): logging.getLogger(f"of.{number}").addHandler(logging.StreamHandler(stream))
        logging.getLogger("own").addHandler(Handler(stream))
        logging.getLogger("closed").addHandler(logging.StreamHandler(closed))"""
    )
    assert kernel.report("quiesce")["probe_errors"] == []
    kernel.report("thaw")
    assert kernel.run("print(sorted(flushes))").strip() == "['handler', 'stream']"


def test_everything_is_idempotent(start: Callable[..., Any]) -> None:
    kernel = start()
    port = kernel.tcp_sockets()
    assert kernel.report("thaw")["probe_errors"] == []
    for _ in range(3):
        assert kernel.report("quiesce")["probe_errors"] == []
        assert kernel.tcp_sockets() == [] and history_files(kernel) == []
    for _ in range(2):
        assert kernel.report("thaw")["probe_errors"] == []
        assert kernel.tcp_sockets() == port
        wait_for_history_files(kernel)


@pytest.mark.parametrize(("given", "seen"), [({}, "0"), ({"USE_LIBUV": "1"}, "1")])
def test_the_store_of_torch_distributed_does_without_io_uring_unless_its_user_says_otherwise(
    start: Callable[..., Any], given: dict[str, str], seen: str
) -> None:
    assert start(env=given).run("import os; print(os.environ['USE_LIBUV'])").strip() == seen


def test_a_report_changes_nothing(start: Callable[..., Any]) -> None:
    kernel = start()
    before = sorted(kernel.descriptors()), kernel.tcp_sockets()
    report = kernel.report("report")
    assert (sorted(kernel.descriptors()), kernel.tcp_sockets()) == before
    assert report["pid"] == kernel.pid and report["rehomed"] == report["trimmed_bytes"] == 0
    assert report["python"] == ".".join(map(str, sys.version_info[:3]))
    assert report["ipykernel"] and report["ipython"] and report["probe_errors"] == []
    assert report["cuda"] == {"modules": [], "initialized": False, "devices": []}
    assert (report["children"], report["sockets"], report["debugger"], report["nvml"]) == ([], [], False, False)


def test_parts_of_a_report_can_be_requested(start: Callable[..., Any]) -> None:
    kernel = start()
    kernel.run("import gc, weakref; gc.disable()\nclass C: pass\nx = C(); x.x = x; w = weakref.ref(x); del x")
    kernel.report("quiesce", {"trim": False, "files": False})
    assert len(kernel.tcp_sockets()) == 1
    wait_for_history_files(kernel)
    assert kernel.run("print(w() is None)") == "False"
    kernel.report("quiesce", {"trim": True, "files": False})
    assert len(kernel.tcp_sockets()) == 1
    assert kernel.run("print(w() is None)") == "True"


def test_a_suspend_waits_for_old_garbage_only_if_the_kernel_has_not_been_in_use(start: Callable[..., Any]) -> None:
    kernel = start()
    made = "import gc, weakref; gc.disable()\nclass C: pass\nx = C(); x.x = x; w = weakref.ref(x); gc.collect()"
    kernel.run(f"{made}; del x\ny = C(); y.y = y; young = weakref.ref(y); del y")
    kernel.report("quiesce", {"trim": True, "files": False, "writes": False})
    assert kernel.run("print(w() is None, young() is None)") == "False True"
    kernel.report("quiesce", {"trim": True, "files": False, "writes": True, "bytes": 3 << 30})
    assert kernel.run("print(w() is None)") == "False", "a dump of little memory was kept waiting"
    kernel.report("quiesce", {"trim": True, "files": False, "writes": True, "bytes": 4 << 30})
    assert kernel.run("print(w() is None)") == "True"
    kernel.run(f"{made}; del x")
    kernel.run("import sys; sys.modules[type(get_ipython()._jupyter_gpu_ckpt_agent).__module__]._JUST_USED_S = 0.0")
    kernel.report("quiesce", {"trim": True, "files": False, "writes": False})
    assert kernel.run("print(w() is None)") == "True"


def test_the_way_back_from_a_state_that_was_just_in_use_does_not_wait_for_its_old_garbage(
    start: Callable[..., Any],
) -> None:
    kernel = start()
    kernel.run(
        "import gc, weakref; gc.disable()\nclass C: pass\nx = C(); x.x = x; w = weakref.ref(x); gc.collect(); del x"
    )
    kernel.report("quiesce", {"trim": True, "files": False, "writes": True, "goes_back": True})
    assert kernel.run("print(w() is None)") == "False"
    kernel.report("quiesce", {"trim": True, "files": False, "writes": True, "goes_back": False})
    assert kernel.run("print(w() is None)") == "True"


def test_garbage_that_was_collected_a_moment_ago_is_not_looked_for_again(start: Callable[..., Any]) -> None:
    kernel = start()
    made = "import gc, weakref; gc.disable()\nclass C: pass\nx = C(); x.x = x; w = weakref.ref(x); gc.collect(); del x"
    kernel.run(made)
    assert kernel.report("collect", {}) == {"probe_errors": []}
    assert kernel.run("print(w() is None)") == "True"
    kernel.run(made)
    kernel.report("quiesce", {"trim": True, "files": False})
    assert kernel.run("print(w() is None)") == "False"
    module = "import sys; sys.modules[type(get_ipython()._jupyter_gpu_ckpt_agent).__module__]"
    kernel.run(f"{module}._JUST_COLLECTED_S = 0.0")
    kernel.report("quiesce", {"trim": True, "files": False})
    assert kernel.run("print(w() is None)") == "True"


def test_python_collects_nothing_by_itself_during_a_request(start: Callable[..., Any]) -> None:
    """A look through all objects takes 0.2 s with a framework."""
    kernel = start()
    agent = "get_ipython()._jupyter_gpu_ckpt_agent"
    kernel.run(f"import gc; seen = []; {agent}.on_quiesce.append(lambda: seen.append(gc.isenabled()))")
    kernel.run(f"{agent}.on_thaw.append(lambda: seen.append(gc.isenabled()))")
    kernel.report("quiesce", {"trim": True, "files": True})
    kernel.report("thaw")
    assert kernel.run("print(seen, gc.isenabled())") == "[False, False] True"
    kernel.run("gc.disable()")
    kernel.report("quiesce", {"trim": True, "files": False})
    assert kernel.run("print(gc.isenabled())") == "False", "a program that does without it still does"


@pytest.mark.parametrize("own", [True, False], ids=["collects", "does without"])
def test_a_child_of_another_thread_collects_as_the_program_does(start: Callable[..., Any], own: bool) -> None:
    """A fork during a request, whose end the child never sees."""
    kernel = start()
    kernel.run(
        f"""
import gc, os
def fork():
    if not (pid := os.fork()):
        os._exit(gc.isenabled())
    seen.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
seen = []
gc.enable() if {own} else gc.disable()
get_ipython()._jupyter_gpu_ckpt_agent.on_quiesce.append(fork)
"""
    )
    kernel.report("quiesce", {"trim": True, "files": False})
    assert kernel.run("print(seen, gc.isenabled())") == f"[{own:d}] {own}"


def test_an_interrupt_during_a_request_leaves_collections_on(start: Callable[..., Any]) -> None:
    kernel = start()
    kernel.run("import gc\ndef stop():\n    seen.append(gc.isenabled())\n    raise KeyboardInterrupt\nseen = []")
    kernel.run("get_ipython()._jupyter_gpu_ckpt_agent.on_quiesce.append(stop)")
    reply = kernel.ask("gpu_ckpt_quiesce_request", {"trim": True, "files": False})
    assert (reply["status"], reply["ename"]) == ("error", "KeyboardInterrupt")
    assert kernel.run("print(seen, gc.isenabled())") == "[False] True"


def test_a_save_does_not_look_for_old_garbage_where_cuda_is_not_initialised(start: Callable[..., Any]) -> None:
    """Though a library is loaded that could use a GPU: an imported framework makes it long to look."""
    kernel = start()
    kernel.run("import sys, types; sys.modules['cupy'] = types.ModuleType('cupy')")
    made = "import gc, weakref; gc.disable()\nclass C: pass\nx = C(); x.x = x; w = weakref.ref(x); gc.collect(); del x"
    kernel.run(made)
    report = kernel.report("quiesce", {"trim": True, "files": False, "summary": True})
    assert report["cuda"]["modules"] == ["cupy"] and not report["cuda"]["initialized"]
    assert kernel.run("print(w() is None)") == "False"
    kernel.report("quiesce", {"trim": True, "files": False})
    assert kernel.run("print(w() is None)") == "True"


def test_output_of_forked_children_comes_on_the_same_port(start: Callable[..., Any]) -> None:
    kernel = start()
    kernel.report("quiesce")
    kernel.report("thaw")
    said = kernel.run(FORK_AND_PRINT)  # of two processes, whose lines may end after each other's
    assert sorted(said.replace("from the child", "from the child\n").split()) == ["0", "child", "from", "the"]


def test_a_taken_port_is_replaced(start: Callable[..., Any]) -> None:
    kernel = start()
    port = int(kernel.tcp_sockets()[0].split(":")[1], 16)
    kernel.report("quiesce")
    with socket.create_server(("127.0.0.1", port)):
        report = kernel.report("thaw")
        assert report["pipe_port"] not in (None, port) and report["probe_errors"] == []
        said = kernel.run(FORK_AND_PRINT)  # of two processes, whose lines may end after each other's
    assert sorted(said.replace("from the child", "from the child\n").split()) == ["0", "child", "from", "the"]
    # and that one survives another round
    kernel.report("quiesce")
    assert kernel.tcp_sockets() == []
    assert kernel.report("thaw")["pipe_port"] == report["pipe_port"]


@pytest.mark.parametrize("step", ["_history.close", "_iopub.unbind"])
def test_a_failed_quiesce_is_undone(start: Callable[..., Any], step: str) -> None:
    kernel = start()
    port = kernel.tcp_sockets()
    # The step does its work and fails then: the worst moment.
    kernel.run(f"""if True:
        {AGENT}
        def fail(work=agent.{step}):
            work()
            raise OSError("no luck")
        agent.{step} = fail""")
    reply = kernel.ask("gpu_ckpt_quiesce_request", {"trim": True, "files": True})
    assert (reply["status"], reply["ename"], reply["evalue"]) == ("error", "OSError", "no luck")
    assert any("no luck" in line for line in reply["traceback"])
    assert kernel.tcp_sockets() == port
    wait_for_history_files(kernel)
    assert kernel.run("print(1)") == "1"


def test_a_quiesced_kernel_that_nobody_thaws_heals_itself_before_the_next_cell(start: Callable[..., Any]) -> None:
    kernel = start()
    port = kernel.tcp_sockets()
    kernel.report("quiesce")
    assert kernel.run("print(1)") == "1"
    assert kernel.tcp_sockets() == port
    wait_for_history_files(kernel)
    said = kernel.run(FORK_AND_PRINT)  # of two processes, whose lines may end after each other's
    assert sorted(said.replace("from the child", "from the child\n").split()) == ["0", "child", "from", "the"]


def test_random_numbers_continue_as_if_nothing_had_been(start: Callable[..., Any]) -> None:
    pytest.importorskip("numpy", reason="numpy is missing: pip install numpy")
    kernel = start()
    kernel.run("import random, numpy, pickle; random.seed(1); numpy.random.seed(1); rng = numpy.random.default_rng(1)")
    state = "print(hash(pickle.dumps((random.getstate(), numpy.random.get_state(), rng.bit_generator.state))))"
    before = kernel.run(state)
    kernel.report("quiesce")
    kernel.report("thaw", {"environ": {"A": "1"}})
    assert kernel.run(state) == before


def test_the_users_names_stay_as_they_are(start: Callable[..., Any]) -> None:
    kernel = start()
    kernel.run("a = 1")
    names = "print(sorted(name for name in globals() if not name.startswith('_i')))"
    before = kernel.run(names)
    kernel.report("quiesce")
    kernel.report("thaw")
    assert kernel.run(names) == before


def test_environment_variables_are_refreshed(start: Callable[..., Any]) -> None:
    kernel = start(env={"STALE": "old", "GONE": "x", "KEPT": "y"})
    kernel.report("thaw", {"environ": {"STALE": "new", "GONE": None, "NEVER": None, "FRESH": ""}})
    seen = kernel.run(
        "import os, json; print(json.dumps({n: os.environ.get(n) for n in ('STALE','GONE','KEPT','FRESH')}))"
    )
    assert json.loads(seen) == {"STALE": "new", "GONE": None, "KEPT": "y", "FRESH": ""}


@pytest.mark.parametrize("environ", [{"": "x"}, {"A=B": "x"}, {"A\0": "x"}, {"A": "x\0"}, {"A": 1}])
def test_a_bad_environment_sets_nothing(start: Callable[..., Any], environ: dict[str, Any]) -> None:
    kernel = start(env={"STALE": "old"})
    reply = kernel.ask("gpu_ckpt_thaw_request", {"environ": {"STALE": "new", **environ}})
    assert reply["status"] == "error"
    assert kernel.run("import os; print(os.environ['STALE'])") == "old"


def test_a_subshell_is_not_the_main_thread(start: Callable[..., Any]) -> None:
    kernel = start()
    client = kernel.client
    if "kernel subshells" not in kernel.ask("kernel_info_request")["supported_features"]:
        pytest.skip("subshells need ipykernel >= 7")
    client.control_channel.send(client.session.msg("create_subshell_request"))
    subshell = client.get_control_msg(timeout=60)["content"]["subshell_id"]
    message = client.session.msg("gpu_ckpt_quiesce_request", {})
    message["header"]["subshell_id"] = subshell
    client.shell_channel.send(message)
    reply = client.get_shell_msg(timeout=60)["content"]
    assert reply["status"] == "error" and "subshell" in reply["evalue"]
    assert len(kernel.tcp_sockets()) == 1


def test_output_before_a_quiesce_is_out_before_its_reply(start: Callable[..., Any]) -> None:
    kernel = start()
    log = (
        "import logging; logging.basicConfig(stream=open('log', 'w', buffering=1 << 20)); f = logging.root.handlers[0]"
    )
    kernel.run(f"{log}; f.stream.write('unflushed')")
    kernel.run("import sys; sys.__stdout__.write('x'); None")
    seconds = kernel.report("quiesce")["seconds"]
    assert list(seconds) == ["flush", "gc", "trim", "files", "report"] and min(seconds.values()) > 0
    assert "unflushed" in Path(f"/proc/{kernel.pid}/cwd/log").read_text()


# -- what the report tells --------------------------------------------------------------------------------------------


def test_children_are_distinguished(start: Callable[..., Any]) -> None:
    kernel = start()
    kernel.run("from multiprocessing import resource_tracker; resource_tracker.ensure_running()")
    assert [child["benign"] for child in kernel.report("report")["children"]] == [True]
    kernel.run("import subprocess; p = subprocess.Popen(['sleep', '1000', '--', 'secret'], stdin=-1, stderr=-3)")
    deadline = time.monotonic() + 60  # until the child is past exec
    while not (found := [c for c in kernel.report("report")["children"] if c["cmd"] == "sleep"]):
        # sleep refuses its odd arguments at once on some systems: then a zombie of that name is there
        assert time.monotonic() < deadline
    assert "secret" not in json.dumps(found)


def test_foreign_sockets_are_reported(start: Callable[..., Any], tmp_path: Path) -> None:
    kernel = start()
    path = str(tmp_path / "s")
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(path)
        unix.listen()
        port = tcp.getsockname()[1]
        kernel.run(f"""if True:
            import socket
            a = socket.create_connection(("127.0.0.1", {port}))
            b = socket.socket(socket.AF_UNIX); b.connect({path!r})
            c = socket.socketpair()
            d = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); d.bind(("127.0.0.1", 0))
            e = socket.create_server(("::1", 0), family=socket.AF_INET6)""")
        sockets = kernel.report("quiesce")["sockets"]
        found = {entry["kind"]: entry for entry in sockets if not entry["local"].startswith("[::1]:")}
        assert len(sockets) == len(found) + 1  # the listener
        assert found["tcp"]["remote"] == f"127.0.0.1:{port}"
        assert found["unix"]["remote"] == path
        assert found["udp"]["local"].startswith("127.0.0.1:") and found["udp"]["remote"] == ""
        kinds = [entry["kind"] for entry in kernel.report("report")["sockets"]]
        assert kinds.count("unix") == 1  # not the pair, not the kernel's own channels


def test_open_files_are_reported(start: Callable[..., Any], tmp_path: Path) -> None:
    kernel = start()
    (tmp_path / "r").write_text("x")
    kernel.run(
        "a = open('a', 'a'); w = open('w', 'w'); w.write('12345'); w.flush(); r = open('r'); rw = open('r', 'r+')"
    )
    found = {Path(entry["path"]).name: entry for entry in kernel.report("quiesce")["open_files"]}
    assert {name: entry["mode"] for name, entry in found.items()} == {"a": "a", "w": "w", "r": "rw"}
    assert found["w"]["size"] == 5


def test_a_started_debugger_is_reported(start: Callable[..., Any]) -> None:
    kernel = start()
    client = kernel.client
    arguments = {"clientID": "test", "adapterID": "", "pathFormat": "path", "linesStartAt1": True}
    request = {"type": "request", "command": "initialize", "seq": 1, "arguments": arguments}
    client.control_channel.send(client.session.msg("debug_request", request))
    assert client.get_control_msg(timeout=60)["content"].get("success")
    assert kernel.report("report")["debugger"] is True


def test_a_failing_probe_is_a_line_and_no_more(start: Callable[..., Any]) -> None:
    kernel = start()
    kernel.run("import sys, types; sys.modules['torch'] = types.SimpleNamespace(cuda=types.SimpleNamespace())")
    report = kernel.report("quiesce")
    assert [line.split(":")[0] for line in report["probe_errors"]] == ["trim", "cuda", "torch_pools"]
    assert report["pid"] == kernel.pid and kernel.tcp_sockets() == []


@pytest.mark.slow  # imports torch
def test_a_loaded_torch_without_cuda(start: Callable[..., Any]) -> None:
    if subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, timeout=120, check=False).returncode:
        pytest.skip("torch is missing: make test installs it")
    kernel = start()
    kernel.run("import torch; torch.manual_seed(3); t = torch.rand(1000); s = torch.get_rng_state()")
    report = kernel.report("quiesce")
    # torch imports the bindings where they are installed.
    assert set(report["cuda"]["modules"]) - {"cuda.bindings"} == {"torch"} and report["probe_errors"] == []
    assert report["deleted_mappings"] == []
    kernel.report("thaw")
    assert kernel.run("print(torch.equal(s, torch.get_rng_state()), t.sum().item() > 0)") == "True True"
