"""A hub with settings other than the usual ones: servers that end with it, a culler for some, starts that fail."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
import waiting
from desk import Desk
from town import PATIENCE, Town, processes, town

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
def hub(hub_reason, criu_binary) -> Iterator[Town]:
    if hub_reason is not None:
        pytest.skip(hub_reason)
    with town(criu_binary, MORE) as running:
        yield running


def at_work(desk: Desk) -> str:
    """A notebook with a variable; its kernel."""
    desk.start()
    kernel_id: str = desk.open("work.ipynb")["kernel"]["id"]
    desk.run(kernel_id, "x = 41")
    return kernel_id


def told(desk: Desk) -> list[dict]:
    """Start the server; what the spawn page says until that has come to its end."""
    reply = desk.town.ask("POST", f"users/{desk.person.name}/server", token=desk.token)
    assert reply.status_code in (201, 202), reply.text
    stream = desk.town.ask("GET", f"users/{desk.person.name}/server/progress", token=desk.token).text
    return [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]


def test_a_hub_that_takes_its_servers_along_has_them_drained(hub, ann, bob):
    kernels = [at_work(ann), at_work(bob)]
    hub.stop("hub")
    drained = re.findall(r"Server (\S+) is drained: 1 kernels asleep", hub.log("hub"))
    assert sorted(drained) == sorted([ann.person.name, bob.person.name])
    waiting.until(lambda: not processes(ann.person.uid) + processes(bob.person.uid), timeout=PATIENCE)
    hub.start_hub()
    for desk, kernel_id in zip((ann, bob), kernels, strict=True):
        desk.start()
        assert desk.run(kernel_id, "print(x)") == "41"
        desk.stop()


def test_a_start_that_fails_is_over_soon_and_loses_nothing(hub, ann):
    kernel_id = at_work(ann)
    ann.stop()
    before = len(hub.log("hub"))
    (ann.person.home / "hang").touch()
    page = told(ann)
    assert page[-1]["failed"], page
    waiting.until(lambda: not ann.there() and not processes(ann.person.uid), timeout=PATIENCE)
    log = hub.log("hub")[before:]
    assert "never showed up" in log
    assert "without being drained" not in log and "could not be drained" not in log
    assert len(ann.images()) == 1

    (ann.person.home / "hang").unlink()
    page = told(ann)
    assert any("of your kernels sleep" in event["message"] for event in page), page
    waiting.until(ann.ready, timeout=PATIENCE)
    assert ann.run(kernel_id, "print(x)") == "41"
    ann.stop()


def test_a_culler_for_some_users_reaches_theirs_alone(hub, ann, bob):
    hub.stop("hub")
    (hub.place / "hub" / "culled").write_text(f"somebody {ann.person.name}")
    hub.start_hub()
    at_work(bob)
    kernel_id = at_work(ann)
    ann.culled()
    assert f"Server {ann.path} may be culled" in hub.log("culler")
    assert bob.person.name not in hub.log("culler")
    assert bob.there()
    ann.start()
    assert ann.run(kernel_id, "print(x)") == "41"
    for desk in (ann, bob):
        desk.stop()
