"""A hub with settings other than the usual ones: servers that end with it, a culler for some, starts that fail."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
import waiting
from hub_user import HubUser
from real_hub import LOOK, PATIENCE, RealHub, processes, running_hub

MORE = """
import pwd
from pathlib import Path


def hang(spawner):
    if (Path(pwd.getpwnam(spawner.user.name).pw_dir) / "hang").exists():
        spawner.cmd, spawner.http_timeout = ["sleep", "1000"], 2


c.Spawner.pre_spawn_hook = hang
c.JupyterHub.cleanup_servers = True
culled = Path("culled")
c.JupyterHub.load_roles[0] = culler_role("gpu-ckpt-culler", users=culled.read_text().split() if culled.exists() else ())
"""


@pytest.fixture(scope="module")
def hub(hub_reason, criu_binary) -> Iterator[RealHub]:
    if hub_reason is not None:
        pytest.skip(hub_reason)
    with running_hub(criu_binary, MORE) as running:
        yield running


def at_work(user: HubUser) -> str:
    """A notebook with a variable; its kernel."""
    user.start()
    kernel_id: str = user.open("work.ipynb")["kernel"]["id"]
    user.run(kernel_id, "x = 41")
    return kernel_id


def progress_messages(user: HubUser) -> list[dict]:
    """Start the server; return the messages of the spawn page until its end."""
    reply = user.hub.ask("POST", f"users/{user.account.name}/server", token=user.token)
    assert reply.status_code in (201, 202), reply.text
    stream = user.hub.ask("GET", f"users/{user.account.name}/server/progress", token=user.token).text
    return [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]


def test_a_hub_that_takes_its_servers_along_has_them_drained(hub, ann, bob):
    kernels = [at_work(ann), at_work(bob)]
    hub.stop("hub")
    drained = re.findall(r"Server (\S+) is drained: 1 kernels asleep", hub.log("hub"))
    assert sorted(drained) == sorted([ann.account.name, bob.account.name])
    waiting.until(lambda: not processes(ann.account.uid) + processes(bob.account.uid), timeout=PATIENCE)
    hub.start_hub()
    for user, kernel_id in zip((ann, bob), kernels, strict=True):
        user.start()
        assert user.run(kernel_id, "print(x)") == "41"
        user.stop()


def test_a_start_that_fails_is_over_soon_and_loses_nothing(hub, ann):
    kernel_id = at_work(ann)
    ann.stop()
    before = len(hub.log("hub"))
    (ann.account.home / "hang").touch()
    page = progress_messages(ann)
    assert page[-1]["failed"], page
    waiting.until(lambda: not ann.there() and not processes(ann.account.uid), timeout=PATIENCE)
    log = hub.log("hub")[before:]
    assert "never showed up" in log
    assert "without being drained" not in log and "could not be drained" not in log
    assert len(ann.images()) == 1

    (ann.account.home / "hang").unlink()
    page = progress_messages(ann)
    assert any("of your kernels sleep" in event["message"] for event in page), page
    waiting.until(ann.ready, timeout=PATIENCE, longest=LOOK)
    assert ann.run(kernel_id, "print(x)") == "41"
    ann.stop()


def test_a_culler_for_some_users_reaches_theirs_alone(hub, ann, bob):
    hub.stop("hub")
    (hub.place / "hub" / "culled").write_text(f"somebody {ann.account.name}")
    hub.start_hub()
    at_work(bob)
    kernel_id = at_work(ann)
    ann.culled()
    assert f"Server {ann.path} may be culled" in hub.log("culler")
    assert bob.account.name not in hub.log("culler")
    assert bob.there()
    ann.start()
    assert ann.run(kernel_id, "print(x)") == "41"
    for user in (ann, bob):
        user.stop()
