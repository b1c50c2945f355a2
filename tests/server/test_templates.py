"""Templates in a real server: kernelspecs whose kernels start from an image, several at once, each a new notebook's."""

from __future__ import annotations

import _ctypes
import _json
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from jupyter_client.kernelspec import KernelSpecManager
from live import Server, server

from jupyter_gpu_ckpt.errors import BadRequest
from jupyter_gpu_ckpt.image.store import Store
from jupyter_gpu_ckpt.kernel import templates

#: The working directory, the notebook, an environment variable and the number of the cell.
PLACE = """
import json, os, sys
print(json.dumps([os.getcwd(), os.environ.get("JPY_SESSION_NAME"), os.environ.get("WHERE"), len(In) - 1,
                  get_ipython().kernel.session.session, str(os.getcwd() in sys.path or "" in sys.path)]))
"""


@pytest.fixture(scope="module")
def live(tmp_path_factory, criu_binary):
    home = tmp_path_factory.mktemp("server")
    for name in ("here", "one", "two", "three", "four", "five"):
        (home / "work" / name).mkdir(parents=True)
    with server(home, tmp_path_factory.mktemp("g")) as running:
        yield running


def command(live: Server, *arguments: str) -> tuple[int, dict]:
    """`jupyter gpu-ckpt template` with the server's configuration: exit status and document."""
    environment = {**os.environ, "IPYTHONDIR": str(live.home / "ipython")}
    environment |= {f"JUPYTER_{name.upper()}_DIR": str(live.home / name) for name in ("config", "data", "runtime")}
    called = [sys.executable, "-m", "jupyter_gpu_ckpt", "template", *arguments, "--json"]
    done = subprocess.run(called, env=environment, capture_output=True, text=True, timeout=120)
    return done.returncode, json.loads(done.stdout)


def notebook(live: Server, folder: str, kernel_name: str) -> str:
    """The id of the kernel of a new notebook."""
    body = {"path": f"{folder}/new.ipynb", "name": "new.ipynb", "type": "notebook", "kernel": {"name": kernel_name}}
    reply = live.ask("POST", "api/sessions", json=body)
    assert reply.status_code == 201, reply.text
    return reply.json()["kernel"]["id"]


def test_kernels_start_from_a_template_three_at_once_and_without_it_when_it_is_gone(live):
    source = notebook(live, "here", "python3")
    live.run(source, "import os; os.environ['WHERE'] = 'made here'; model = list(range(1000)); secret = os.urandom")
    live.run(
        source, "import random, tempfile; file = tempfile.NamedTemporaryFile(); n = file.write(b'x'); file.flush()"
    )
    assert live.do(source, "checkpoint")["status"] == "done"
    image = live.get("gpu-ckpt/images")[0]["id"]
    status, refused = command(live, "create", "PYTHON3", "--from", image)
    assert (status, refused["error"]["message"]) == (64, "There is a kernelspec 'python3' already.")
    status, made = command(live, "create", "Model-ready", "--from", image)
    assert status == 0, made
    assert live.ask("DELETE", f"api/kernels/{source}").status_code == 204
    specs = live.get("api/kernelspecs")["kernelspecs"]
    assert "model-ready" in specs["model-ready"]["spec"]["display_name"]
    assert command(live, "list")[1]["templates"] == [{**made["created"], "usable": True}]
    assert command(live, "create", "model-ready", "--from", image)[0] == 66  # the image went with its kernel

    folders = ["one", "two", "three"]
    with ThreadPoolExecutor(3) as pool:
        started = [*pool.map(lambda folder: notebook(live, folder, "model-ready"), folders)]
    sessions = set()
    for folder, kernel_id in zip(folders, started, strict=True):
        assert live.run(kernel_id, "print(sum(model))") == "499500"
        cwd, name, where, cell, session, found = json.loads(live.run(kernel_id, PLACE))
        assert cwd == str(live.home / "work" / folder)
        assert name == f"{cwd}/new.ipynb"
        assert (where, cell, found) == ("made here", 2, "True")
        sessions.add(session)
    assert len(sessions) == 3
    drawn = {live.run(kernel_id, "print(random.random(), os.path.getsize(file.name))") for kernel_id in started}
    assert len(drawn) == 3, "no two draw the same numbers"
    assert all(each.endswith(" 1") for each in drawn)
    live.run(started[2], "file.close()")
    live.run(started[0], "model.clear()")
    assert live.run(started[1], "print(len(model))") == "1000"
    assert live.do(started[1], "checkpoint")["status"] == "done"
    assert live.run(started[1], "print(len(model))") == "1000"
    assert live.ask("POST", f"api/kernels/{started[0]}/restart").status_code == 200
    assert live.run(started[0], "print(len(model))") == "1000"  # a fresh one, and so from the template

    status, removed = command(live, "remove", "nothing")
    assert (status, removed["error"]["code"]) == (66, "TEMPLATE_NOT_FOUND")
    spec = Path(live.home / "data" / "kernels" / "model-ready" / "kernel.json").read_text()
    assert command(live, "remove", "model-ready")[0] == 0
    assert [each["kernel_id"] for each in live.get("gpu-ckpt/images")] == [started[0]]  # as it was before its restart
    assert "model-ready" not in live.get("api/kernelspecs")["kernelspecs"]
    (live.home / "data" / "kernels" / "model-ready").mkdir(parents=True)
    (live.home / "data" / "kernels" / "model-ready" / "kernel.json").write_text(spec)
    without = notebook(live, "here", "model-ready")
    printed = live.run(without, "print('model' in globals())")
    assert "IMAGE_NOT_FOUND" in printed
    assert printed.endswith("False")
    assert command(live, "remove", "model-ready")[0] == 0


def test_no_template_is_made_of_an_image_from_which_its_kernels_could_not_start(live):
    source = notebook(live, "four", "python3")
    library = live.home / "work" / "four" / "_lib.so"
    shutil.copy(_ctypes.__file__, library)
    live.run(source, "import ctypes, socket, os, sqlite3; listener = socket.create_server(('127.0.0.1', 0))")
    live.run(source, "%gpu_checkpoint --save port")
    live.run(source, "%gpu_checkpoint --saves")  # it is published then
    status, refused = command(live, "create", "ready", "--from", "port")
    assert (status, refused["error"]["code"]) == (64, "BAD_REQUEST")
    assert "in each kernel of a template: " in refused["error"]["message"]
    assert "make the template all the same: `--accept-differences`" in refused["error"]["hint"]
    assert refused["error"]["details"]["plan"]["differs"]

    live.run(source, "listener.close(); data = sqlite3.connect('d'); _ = data.execute('create table t (n)')")
    live.run(source, "_ = data.execute('insert into t values (1)')\n%gpu_checkpoint --save writing")
    live.run(source, "%gpu_checkpoint --saves")  # it is published then
    status, refused = command(live, "create", "ready", "--from", "writing", "--accept-differences")
    assert (status, refused["error"]["code"]) == (64, "BAD_REQUEST")
    assert "a transaction of the database" in refused["error"]["message"]
    assert refused["error"]["hint"].endswith("make the template of that.")

    live.run(source, f"data.commit(); data.close(); loaded = ctypes.CDLL({str(library)!r}); log = open('log', 'w')")
    live.run(source, "%gpu_checkpoint --save loaded")
    live.run(source, "%gpu_checkpoint --saves")  # it is published then
    library.unlink()
    shutil.copy(_json.__file__, library)
    status, refused = command(live, "create", "ready", "--from", "loaded")
    assert (status, refused["error"]["code"]) == (64, "BAD_REQUEST")
    assert refused["error"]["message"].startswith(f"No kernels could start from this image, as {library} is not as it")
    shutil.copy(_ctypes.__file__, library)
    (live.home / "work" / "four" / "log").unlink()  # of which there is a copy
    status, made = command(live, "create", "ready", "--from", "loaded")
    assert status == 0, made
    started = notebook(live, "five", "ready")
    live.run(started, "assert log.name == 'log'")
    assert command(live, "remove", "ready")[0] == 0
    assert live.ask("DELETE", f"api/kernels/{source}").ok  # an ordinary user's, with a deleted library, cannot sleep


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "../kernels", "ä", "a b"])
def test_a_template_has_a_name_that_is_no_other_path(tmp_path, monkeypatch, name):
    """jupyter_client installs a kernelspec by the name `..` in the place of the directory of all data."""
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path))
    (other := tmp_path / "kernels" / "other" / "kernel.json").parent.mkdir(parents=True)
    other.write_text(json.dumps({"argv": ["true"], "display_name": "Other", "language": "none"}))
    with pytest.raises(BadRequest, match=f"cannot have the name {re.escape(repr(name))}"):
        templates.create(Store(tmp_path / "images"), None, name)
    assert other.exists()


def test_a_template_s_kernel_does_without_its_template_once_that_is_removed(tmp_path, runtime_base, criu_binary):
    (tmp_path / "work" / "here").mkdir(parents=True)
    with server(tmp_path, runtime_base) as live:
        source = live.start_kernel()
        live.run(source, "x = 41")
        assert live.do(source, "checkpoint")["status"] == "done"
        status, made = command(live, "create", "first", "--from", live.get("gpu-ckpt/images")[0]["id"])
        assert status == 0, made
        kernel_id = notebook(live, "here", "first")
        assert live.do(kernel_id, "save", {"name": "begun"})["status"] == "done"
        status, second = command(live, "create", "second", "--from", "begun")
        assert status == 0, second
        assert second["created"]["display_name"] == "second (template of Python 3 (ipykernel))"
        assert command(live, "remove", "first")[0] == 0
        awake = live.do(kernel_id, "branch")
        assert awake["status"] == "done", awake
        assert live.run(awake["result"]["kernel_id"], "print(x)") == "41"
        assert command(live, "create", "third", "--from", "begun")[0] == 0
        of_second = notebook(live, "here", "second")
        assert live.run(of_second, "print(x)") == "41"
        assert command(live, "remove", "second")[0] == 0
        asleep = [kernel_id, of_second, awake["result"]["kernel_id"]]
    with server(tmp_path, runtime_base) as live:
        assert {each["id"]: each["name"] for each in live.get("api/kernels")}.keys() == {*asleep, source}
        for each in asleep:
            assert live.run(each, "print(x)") == "41"
            branch = live.do(each, "branch")
            assert branch["status"] == "done", branch
            assert live.run(branch["result"]["kernel_id"], "print(x)") == "41"
        assert live.ask("POST", f"api/kernels/{kernel_id}/restart").status_code == 200
        assert live.run(kernel_id, "print('x' in globals())") == "False"
        assert command(live, "create", "fourth", "--from", "begun")[0] == 0


def test_a_kernel_whose_kernelspec_is_gone_is_refused_by_name_and_stays_asleep(tmp_path, runtime_base, criu_binary):
    spec = json.loads((Path(KernelSpecManager().get_kernel_spec("python3").resource_dir) / "kernel.json").read_text())
    kernels = tmp_path / "data" / "kernels"
    (kernels / "ours").mkdir(parents=True)
    (kernels / "ours" / "kernel.json").write_text(json.dumps(spec))
    (tmp_path / "work" / "here").mkdir(parents=True)
    with server(tmp_path, runtime_base) as live:
        kernel_id = notebook(live, "here", "ours")
        live.run(kernel_id, "x = 41")
    shutil.move(kernels / "ours", tmp_path / "ours")
    with server(tmp_path, runtime_base) as live:
        image = live.get("gpu-ckpt/images")[0]["id"]
        refused = live.ask("POST", f"gpu-ckpt/images/{image}/attach")
        assert (refused.status_code, (error := refused.json()["error"])["code"]) == (409, "WRONG_STATE")
        assert "'ours'" in error["hint"]
        shutil.move(tmp_path / "ours", kernels / "ours")
        assert live.ask("POST", f"gpu-ckpt/images/{image}/attach").status_code == 200
        assert live.run(kernel_id, "print(x)") == "41"


def test_templates_branches_and_notebooks_of_encrypted_images_have_the_key(tmp_path, runtime_base, criu_binary):
    (tmp_path / "work" / "here").mkdir(parents=True)
    (tmp_path / "key").write_text("17" * 32)
    (tmp_path / "key").chmod(0o600)
    document = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": []}
    (tmp_path / "work" / "here" / "new.ipynb").write_text(json.dumps(document))
    config = f"c.GpuCkptProvisioner.encryption_key = 'file:{tmp_path / 'key'}'"
    with server(tmp_path, runtime_base, config=config) as live:
        source = notebook(live, "here", "python3")
        live.run(source, "x = 41")
        assert live.do(source, "save", {"name": "ready"})["status"] == "done"
        assert live.get(f"gpu-ckpt/kernels/{source}/saves/ready")["notebook"] == document
        branch = live.do(source, "branch", {"save_point": "ready"})
        assert branch["status"] == "done", branch
        assert branch["result"]["notebook"] == "here/new-Copy1.ipynb"
        back = live.do(source, "back", {"name": "ready", "notebook": True})
        assert (back["status"], back["result"]["notebook_error"]) == ("done", None)
        status, made = command(live, "create", "encrypted", "--from", "ready")
        assert status == 0, made
        assert all(image.manifest.encryption for image in Store(tmp_path / "images").images())
        assert live.run(notebook(live, "here", "encrypted"), "print(x)") == "41"
