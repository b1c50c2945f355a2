"""Kernels that fail to start behind the gate become ordinary ones, the reason is reported, and nothing hangs."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest
from live import Server, server, until

#: A kernel that wants TCP, as some do: it ends where its connection file says otherwise.
PICKY = """
import json, os, sys
if json.load(open(sys.argv[1]))["transport"] != "tcp":
    sys.exit("Invalid argument")
os.execv(sys.executable, [sys.executable, "-m", "ipykernel_launcher", "-f", sys.argv[1]])
"""
BROKEN = "import sys; sys.exit(3)"
#: Somebody kills it before it answers, once.
KILLED = """
import os, signal, sys
if not os.path.exists(sys.argv[0] + ".was"):
    open(sys.argv[0] + ".was", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
os.execv(sys.executable, [sys.executable, "-m", "ipykernel_launcher", "-f", sys.argv[1]])
"""
SLOW = "import time; time.sleep(600)"


@pytest.fixture(scope="module")
def served(tmp_path_factory, module_runtime_base, criu_binary):
    home = tmp_path_factory.mktemp("unfit")
    for name, program in (("picky", PICKY), ("broken", BROKEN), ("slow", SLOW), ("killed", KILLED)):
        place = home / "data" / "kernels" / name
        place.mkdir(parents=True)
        (place / "program.py").write_text(program)
        argv = [sys.executable, str(place / "program.py"), "{connection_file}"]
        (place / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": name, "language": "python"}))
    config = "c.GpuCkptProvisioner.start_timeout = 20\nc.KernelRestarter.time_to_dead = 0.5"  # seconds; by default 3
    with server(home, module_runtime_base, config=config) as running:
        yield running


def start(served: Server, name: str) -> str:
    reply = served.ask("POST", "api/kernels", json={"name": name})
    assert reply.status_code == 201, reply.text
    return reply.json()["id"]


def of_kernel(served: Server, kernel_id: str) -> list[str]:
    return [line for line in served.log.splitlines() if kernel_id in line]


def run_plain(served: Server, kernel_id: str, code: str) -> str:
    """Run a cell as `Server.run` does, in a kernel that no gate stands for.

    Its ports were chosen before it started, and another process may take one until then.  jupyter_client starts it
    again, on others, which a client that has connected does not learn.
    A client that had connected before may have a request answered before it has subscribed anew to the outputs.
    """

    def answers() -> bool:
        with served.client(kernel_id) as client:
            try:
                client.wait_for_ready(timeout=15)
            except RuntimeError:
                return False
        return True

    until(answers, 120)
    return served.run(kernel_id, code)


def test_a_kernel_that_ends_at_once_is_started_plainly_and_says_why(served):
    kernel_id = start(served, "picky")
    assert run_plain(served, kernel_id, "print(6 * 7)") == "42"
    document = served.get(f"gpu-ckpt/kernels/{kernel_id}")
    assert (document["state"], document["checkpointable"]) == ("running", False)
    assert "ended with exit status 1 before it had answered" in document["reason"]
    refused = served.ask("POST", f"gpu-ckpt/kernels/{kernel_id}/checkpoint")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "WRONG_STATE")
    assert "ended with exit status 1" in refused.json()["message"]
    assert sum("KERNEL_UNFIT" in line for line in of_kernel(served, kernel_id)) == 1
    assert not any("restart" in line.lower() for line in of_kernel(served, kernel_id)), "jupyter_client saw it end"
    assert "to=dead" not in "\n".join(of_kernel(served, kernel_id))


def test_others_of_its_kernelspec_are_started_plainly_at_once(served):
    run_plain(served, start(served, "picky"), "pass")
    said = served.log.count("Invalid argument")
    second = start(served, "picky")
    assert run_plain(served, second, "print(1)") == "1"
    assert served.ask("POST", f"api/kernels/{second}/restart").ok
    assert run_plain(served, second, "print(2)") == "2"
    assert served.log.count("Invalid argument") == said, "it was tried again"
    assert sum("as others of its kind" in line for line in of_kernel(served, second)) == 2
    assert "exit status 1" in served.get(f"gpu-ckpt/kernels/{second}")["reason"]
    assert served.ask("DELETE", f"api/kernels/{second}").status_code == 204


def test_other_kernelspecs_are_not_meant(served):
    run_plain(served, start(served, "picky"), "pass")
    kernel_id = start(served, "python3")
    assert served.run(kernel_id, "print(1)") == "1"
    assert served.get(f"gpu-ckpt/kernels/{kernel_id}")["checkpointable"]


def test_one_that_was_killed_says_nothing_about_others_of_its_kernelspec(served):
    first = start(served, "killed")
    assert run_plain(served, first, "print(1)") == "1"
    assert "signal 9 before it had answered" in served.get(f"gpu-ckpt/kernels/{first}")["reason"]
    second = start(served, "killed")
    assert served.run(second, "print(2)") == "2"
    assert served.get(f"gpu-ckpt/kernels/{second}")["checkpointable"]


def test_a_kernel_that_ends_wherever_it_is_started_is_not_called_unfit_for_good(served):
    kernel_id = start(served, "broken")
    # Plain ones are tried, too, and jupyter_client gives up after its five restarts as ever.
    until(lambda: served.ask("GET", f"api/kernels/{kernel_id}").status_code == 404, 120)
    assert sum("without a capsule" in line for line in of_kernel(served, kernel_id)) == 6
    assert not any("KERNEL_UNFIT" in line for line in of_kernel(served, kernel_id))
    assert not any("as others of its kind" in line for line in of_kernel(served, kernel_id))


def test_a_kernel_that_is_ended_while_it_starts_is_not_followed_by_a_plain_one(served):
    kernel_id = start(served, "slow")
    until(lambda: programs("slow"))
    assert served.ask("DELETE", f"api/kernels/{kernel_id}").status_code == 204
    until(lambda: not programs("slow"))
    assert not any("KERNEL_UNFIT" in line for line in of_kernel(served, kernel_id))
    assert not programs("slow")


def programs(name: str) -> list[str]:
    """Processes that run the program of a kernelspec here."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes()
        except OSError:
            continue
        if f"/kernels/{name}/program.py".encode() in words:
            found.append(place.name)
    return found


def test_a_server_with_such_kernels_stops_without_delay(tmp_path, module_runtime_base, served):
    home = tmp_path / "home"
    (home / "data").mkdir(parents=True)
    (home / "data" / "kernels").symlink_to(served.home / "data" / "kernels")
    with server(home, module_runtime_base, config="c.GpuCkptProvisioner.start_timeout = 600") as another:
        picky, broken = start(another, "picky"), start(another, "broken")
        another.run(picky, "pass")
        until(lambda: of_kernel(another, broken))
        another.process.send_signal(signal.SIGTERM)
        another.process.wait(60)
