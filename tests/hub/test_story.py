"""A user is culled, another works, the first returns: same notebook, same kernel, same variables."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import waiting
from harness import DAEMON, END_DAEMON
from hub_user import HubUser
from real_hub import LOOK, processes


@pytest.fixture(autouse=True)
def without_kernels(ann, bob):
    """End the kernels that a test leaves, and delete their images: the next test's servers attach none.

    A server that ann has come back to runs on, and is the next test's: each start takes a processor 5 s.
    """
    yield
    for user in (ann, bob):
        if user.there():
            for session in user.get("api/sessions"):
                assert user.ask("DELETE", f"api/sessions/{session['id']}").status_code == 204
        for image in user.images():
            shutil.rmtree(user.account.images / image, ignore_errors=True)  # its server may be at it


def work(user: HubUser, notebook: str = "morning.ipynb") -> dict:
    """A notebook with a variable; its session."""
    session = user.open(notebook)
    user.run(session["kernel"]["id"], "x = 41; import os; pid = os.getpid()")
    return session


def proved(user: HubUser) -> list[str]:
    """Ids of the user's images, each proved by the user's own command."""
    images = user.images()
    for image in images:
        done = user.hub.run_as(user.account, [sys.executable, "-m", "jupyter_gpu_ckpt", "verify", image])
        assert done.returncode == 0, done.stdout + done.stderr
    return images


def at_work(user: HubUser) -> list[int]:
    """Kernels of the user that have a process."""
    return [pid for pid in processes(user.account.uid) if b"ipykernel" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_named_server_drains_and_comes_back(hub, bob):
    named = HubUser(hub, bob.account, "second")
    named.start()
    kernel_id = work(named, "named.ipynb")["kernel"]["id"]
    named.culled()
    assert not at_work(named)
    named.start()
    assert named.run(kernel_id, "print(x)") == "41"
    named.stop()


def test_a_kernel_that_cannot_be_checkpointed_keeps_its_server_and_the_culler_logs_why(hub, bob):
    bob.start()
    kernel_id = work(bob, "children.ipynb")["kernel"]["id"]
    bob.run(kernel_id, DAEMON)
    with hub.culler():
        waiting.until(lambda: "CHILD_PROCESSES" in hub.log("culler"), timeout=60)
        assert bob.there()
        assert bob.run(kernel_id, f"{END_DAEMON}print(x)") == "41"
        bob.gone()
    bob.start()
    assert bob.run(kernel_id, "print(x)") == "41"
    bob.stop()


def test_culled_and_back_with_another_user_in_between(hub, ann, bob):
    ann.come()
    session = work(ann)
    kernel_id = session["kernel"]["id"]
    assert at_work(ann)
    ann.culled()
    assert "may be culled: 1 kernels asleep" in hub.log("culler")
    waiting.until(lambda: not at_work(ann))
    assert len(proved(ann)) == 1

    bob.start()
    other = work(bob)
    assert bob.run(other["kernel"]["id"], "print(x)") == "41"

    ann.start()
    (after,) = ann.get("api/sessions")
    assert (after["id"], after["path"], after["kernel"]["id"]) == (session["id"], "morning.ipynb", kernel_id)
    assert after["kernel"]["gpu_ckpt"]["state"] == "checkpointed", "coming back wakes nothing"
    assert ann.run(kernel_id, "print(x + 1, os.getpid() == pid)") == "42 True"
    waiting.until(lambda: not ann.images(), "the image goes once the kernel has answered")
    bob.stop()


def test_a_restored_kernel_has_the_new_servers_token(ann):
    ann.come()
    kernel_id = work(ann, "token.ipynb")["kernel"]["id"]
    ask = "import hashlib, os; print(hashlib.sha256(os.environ['JUPYTERHUB_API_TOKEN'].encode()).hexdigest())"
    before = ann.run(kernel_id, ask)
    ann.culled()
    ann.start()
    after = ann.run(kernel_id, ask)
    assert after != before
    # And it is one that the hub knows, of this user.
    whose = "import urllib.request, json; request = urllib.request.Request(os.environ['JUPYTERHUB_API_URL'] + '/user', "
    whose += "headers={'Authorization': 'token ' + os.environ['JUPYTERHUB_API_TOKEN']}); "
    whose += "print(json.load(urllib.request.urlopen(request))['name'])"
    assert ann.run(kernel_id, whose) == ann.account.name


def test_a_stop_by_the_user_drains_and_the_spawn_page_says_so(hub, ann):
    ann.come()
    kernel_id = work(ann, "stop.ipynb")["kernel"]["id"]
    ann.stop()
    assert re.search(rf"Server {ann.account.name}\S* is drained: 1 kernels asleep", hub.log("hub"))
    reply = hub.ask("POST", f"users/{ann.account.name}/server", token=ann.token)
    assert reply.status_code in (201, 202)
    stream = hub.ask("GET", f"users/{ann.account.name}/server/progress", token=ann.token).text
    messages = [json.loads(line[6:])["message"] for line in stream.splitlines() if line.startswith("data: ")]
    assert any("of your kernels sleep" in message for message in messages), messages
    waiting.until(ann.ready, timeout=60, longest=LOOK)
    assert ann.run(kernel_id, "print(x)") == "41"


def test_a_stop_by_an_administrator_drains(hub, ann):
    ann.come()
    kernel_id = work(ann, "admin.ipynb")["kernel"]["id"]
    ann.stop(token=hub.admin_token)
    assert not at_work(ann)
    ann.start()
    assert ann.run(kernel_id, "print(x)") == "41"


def test_an_age_limit_goes_past_the_arbiter_and_loses_nothing_all_the_same(ann):
    ann.come()
    kernel_id = work(ann, "aged.ipynb")["kernel"]["id"]
    ann.culled("--max-age=1", "--timeout=3600")
    assert not at_work(ann)
    ann.start()
    assert ann.run(kernel_id, "print(x)") == "41"


def test_a_signal_to_the_server_checkpoints_on_its_own(ann):
    ann.come()
    kernel_id = work(ann, "signal.ipynb")["kernel"]["id"]
    (server,) = [
        pid
        for pid in processes(ann.account.uid)
        if b"jupyterhub.singleuser" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    done = ann.hub.run_as(ann.account, ["kill", "-TERM", str(server)])
    assert done.returncode == 0, done.stderr
    waiting.until(lambda: not Path(f"/proc/{server}").exists() and not at_work(ann), timeout=60)
    ann.gone()
    ann.start()
    assert ann.run(kernel_id, "print(x)") == "41"


def again_and_again(user: HubUser, times: int) -> None:
    user.come()
    kernel_id = user.open("torture.ipynb")["kernel"]["id"]
    user.run(kernel_id, "n = 0")
    for number in range(1, times + 1):
        assert user.run(kernel_id, "n += 1; print(n)") == str(number)
        user.culled()
        user.start()
    assert user.run(kernel_id, "print(n)") == str(times)


def test_three_culls_in_a_row(ann):
    again_and_again(ann, 3)


def test_hub_and_proxy_restart_in_the_middle(hub, ann, bob):
    ann.come()
    kernel_id = work(ann, "restarts.ipynb")["kernel"]["id"]
    bob.start()
    other = work(bob, "restarts.ipynb")["kernel"]["id"]
    bob.stop()
    hub.stop("hub")
    assert ann.run(kernel_id, "print(x)") == "41", "the proxy leads there without the hub"
    hub.start_hub()
    waiting.until(ann.ready, timeout=60, longest=LOOK)
    hub.stop("proxy")
    with hub.culler():
        hub.start_proxy()
        ann.gone()
    waiting.until(hub.answers, timeout=60)
    assert len(proved(ann)) >= 1
    hub.stop("hub")
    hub.start_hub()
    for user, id in ((ann, kernel_id), (bob, other)):
        user.start()
        assert user.run(id, "print(x)") == "41"
        user.stop()


@pytest.mark.torture
def test_a_hundred_culls_in_a_row(ann):
    again_and_again(ann, 100)
