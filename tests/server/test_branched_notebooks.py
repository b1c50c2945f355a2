"""Branches in a real server: by REST and by the magic, each with a copy of the notebook and a session."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from live import server, until

from jupyter_gpu_ckpt.kernel.host import BranchPoint
from jupyter_gpu_ckpt.server.branches import Branches

CELL = {"cell_type": "code", "source": "x = 41", "metadata": {}, "outputs": [], "execution_count": None, "id": "a"}
NOTEBOOK = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [CELL]}


@pytest.fixture(scope="module")
def live(tmp_path_factory, criu_binary):
    home = tmp_path_factory.mktemp("server")
    runtime = tmp_path_factory.mktemp("g")
    with server(home, runtime) as running:
        yield running


@pytest.fixture
def kernel_id(live):
    """A kernel with a notebook."""
    (live.home / "work" / "a folder").mkdir(exist_ok=True)
    (live.home / "work" / "a folder" / "model.ipynb").write_text(json.dumps(NOTEBOOK))
    body = {"path": "a folder/model.ipynb", "name": "model.ipynb", "type": "notebook", "kernel": {"name": "python3"}}
    reply = live.ask("POST", "api/sessions", json=body)
    assert reply.status_code == 201, reply.text
    yield reply.json()["kernel"]["id"]
    for session in live.get("api/sessions"):
        live.ask("DELETE", f"api/sessions/{session['id']}")
    assert live.get("api/kernels") == []


def sessions(live) -> dict[str, str]:
    return {each["kernel"]["id"]: each["path"] for each in live.get("api/sessions")}


def test_a_branch_by_rest_has_a_copy_of_the_notebook_and_a_session_for_it(live, kernel_id):
    live.run(kernel_id, "x = 41; import os; model = object()")
    job = live.do(kernel_id, "branch", {"reseed": True})
    assert job["status"] == "done", job
    branch, path = job["result"]["kernel_id"], job["result"]["notebook"]
    assert path == "a folder/model-Copy1.ipynb"
    assert sessions(live) == {kernel_id: "a folder/model.ipynb", branch: path}
    assert live.get(f"api/contents/{path}")["content"]["cells"][0]["source"] == "x = 41"
    model = next(each for each in live.get("api/kernels") if each["id"] == branch)
    assert (model["execution_state"], model["gpu_ckpt"]["state"]) == ("idle", "running")
    place = "print(os.getcwd(), os.environ['JPY_SESSION_NAME'])"
    assert live.run(branch, f"x += 1; {place}") == f"{live.home}/work/a folder {live.home}/work/{path}"
    assert live.run(kernel_id, "print(x)") == "41"
    assert live.run(branch, "print(x)") == "42"
    restarted = live.ask("POST", f"api/kernels/{branch}/restart")
    assert restarted.status_code == 200
    assert live.run(branch, "print('x' in globals())") == "False"


def test_a_branch_is_refused_by_rest_until_its_differences_are_accepted(live, kernel_id):
    code = "import socket; listener = socket.create_server(('127.0.0.1', 0)); print(listener.getsockname()[1])"
    port = live.run(kernel_id, code)
    job = live.do(kernel_id, "branch")
    assert job["status"] == "failed"
    assert job["error"]["code"] == "BRANCH_DIFFERS"
    assert port in job["error"]["message"]
    assert sessions(live) == {kernel_id: "a folder/model.ipynb"}
    assert not (live.home / "work" / "a folder" / "model-Copy2.ipynb").exists()
    point = live.get("gpu-ckpt/images")[-1]["id"]
    assert point in job["error"]["left"]
    assert live.ask("GET", f"gpu-ckpt/kernels/{kernel_id}/branch").status_code == 409  # it is awake
    assert live.do(kernel_id, "checkpoint")["status"] == "done"
    plan = live.get(f"gpu-ckpt/kernels/{kernel_id}/branch")
    assert [each["kind"] for each in plan["differs"]] == ["port"]
    job = live.do(kernel_id, "branch", {"accept_differences": True})
    assert job["status"] == "done", job
    assert live.run(kernel_id, "print(listener.getsockname()[1])") == port
    assert port not in live.run(job["result"]["kernel_id"], "print(listener.getsockname()[1])").splitlines()


def test_a_cell_requests_a_branch_and_the_next_one_names_it(live, kernel_id):
    assert "another kernel starts" in live.run(kernel_id, "x = 1\n%gpu_checkpoint --branch")
    branch = until(lambda: next(iter(sessions(live).keys() - {kernel_id}), None))
    live.run_until(kernel_id, "print(x)", branch)
    assert live.run(branch, "print(x)").endswith("1")
    with pytest.raises(AssertionError, match="SAVE_POINT_NOT_FOUND"):
        live.run(kernel_id, "%gpu_checkpoint --branch nowhere")
    assert "SAVE_POINT_NOT_FOUND" not in live.run(kernel_id, "pass"), "it has been said"


def test_changed_files_are_accepted_for_a_branch_by_its_magic_and_by_rest(live, kernel_id):
    live.run(kernel_id, "x = 1; log = open('log', 'w+'); n = log.write('then'); log.flush()\n%gpu_checkpoint --save p")
    live.run(kernel_id, "n = log.write(' and now'); log.flush()")
    live.run(kernel_id, "%gpu_checkpoint --branch p")
    live.run_until(kernel_id, "pass", "begin the branch with `--accept-changed-files`")
    live.run(kernel_id, "%gpu_checkpoint --branch p --accept-changed-files")
    branch = until(lambda: next(iter(sessions(live).keys() - {kernel_id}), None))
    assert live.run(branch, "print(open('log').read())") == "then and now"
    job = live.do(kernel_id, "branch", {"save_point": "p", "accept_changed_files": True})
    assert job["status"] == "done", job
    assert live.run(job["result"]["kernel_id"], "print(open('log').read())") == "then and now"


async def test_a_branch_without_a_session_is_none_and_leaves_no_copy_and_no_kernel():
    """The database of the server's sessions is full."""
    provisioner = SimpleNamespace(kernelspec_for_branch=lambda: "python3")
    kernels, documents = {"source": SimpleNamespace(provisioner=provisioner)}, {"model.ipynb"}

    class Kernels(dict):
        get_kernel = dict.__getitem__

        async def start_kernel(self, **options):
            self["branch"] = SimpleNamespace()
            return "branch"

        async def shutdown_kernel(self, kernel_id, now):
            del self[kernel_id]

    class Sessions:
        def list_sessions(self):
            return [{"kernel": {"id": "source"}, "type": "notebook", "path": "model.ipynb"}]

        def get_kernel_env(self, path, name):
            return {}

        async def create_session(self, **options):
            raise OSError("database or disk is full")

    class Contents:
        def copy(self, path):
            documents.add("copy.ipynb")
            return {"path": "copy.ipynb"}

        def delete(self, path):
            documents.remove(path)

    store = SimpleNamespace(get=lambda id: id)
    manager = Kernels(kernels)
    app = SimpleNamespace(kernel_manager=manager, session_manager=Sessions(), contents_manager=Contents())
    with pytest.MonkeyPatch.context() as patched, pytest.raises(OSError, match="full"):
        patched.setattr("jupyter_gpu_ckpt.image.save_point.notebook", lambda store, image: None)
        await Branches(app, store).start("source", BranchPoint("image"))
    assert (manager.keys(), documents) == ({"source"}, {"model.ipynb"})
