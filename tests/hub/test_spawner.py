"""The mixin alone: on spawners of a real user of a hub's database, against a small server."""

from __future__ import annotations

import asyncio
import contextlib
import math
import ssl
from pathlib import Path

import pytest
from harness import until
from small_server import BUSY, DRAINED, Double
from traitlets import Integer

from jupyter_gpu_ckpt.hub import spawner as module
from jupyter_gpu_ckpt.hub.spawner import CheckpointMixin
from jupyter_gpu_ckpt.kernel.provisioner import GpuCkptProvisioner

jupyterhub = pytest.importorskip("jupyterhub", reason="JupyterHub is not installed (the extra `hub-test` has it)")

from jupyterhub import orm, roles  # noqa: E402
from jupyterhub.objects import Hub, Server  # noqa: E402
from jupyterhub.spawner import Spawner  # noqa: E402
from jupyterhub.user import User  # noqa: E402


class Quiet(Spawner):
    """Its server runs from `start` to `stop`, and has a spawner's seconds for its end."""

    interrupt_timeout = Integer(10)
    running = False
    trouble = ""

    async def start(self) -> tuple[str, int]:
        self.running = True
        if self.trouble == "raises":
            raise RuntimeError("there is no such command")
        if self.trouble == "takes too long":
            await asyncio.Event().wait()
        return "127.0.0.1", 1

    async def stop(self, now: bool = False) -> None:
        self.left = self.interrupt_timeout
        self.running = False

    async def poll(self) -> int | None:
        return None if self.running else 0


class Mine(CheckpointMixin, Quiet):
    """A spawner as an administrator would write it."""


@pytest.fixture
def ann() -> User:
    """A user in a hub's database."""
    database = orm.new_session_factory("sqlite:///:memory:")()
    for role in roles.get_default_roles():
        roles.create_role(database, role)
    user = orm.User(name="ann")
    database.add_all([user, orm.OAuthClient(identifier="jupyterhub")])
    database.commit()
    roles.assign_default_roles(database, user)
    return User(user, {"spawner_class": Mine})


@pytest.fixture
async def double():
    made = Double()
    yield made
    made.server.stop()


def spawner(ann: User, double: Double, **traits) -> Mine:
    """The user's spawner, with a server that runs at the small one's address."""
    made = ann.spawners[""]
    for name, value in traits.items():
        setattr(made, name, value)
    address = orm.Server(
        cookie_name="c", proto=double.url.split(":")[0], ip="127.0.0.1", port=double.port, base_url="/user/ann/"
    )
    ann.db.add(address)
    made.server = Server(orm_server=address)
    made.running = True
    return made


def tokens(ann: User) -> list[orm.APIToken]:
    return list(ann.db.query(orm.APIToken))


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch):
    monkeypatch.setattr(module, "_RETRY", 0.01)


# -- patience


async def test_a_server_is_drained_and_the_token_for_it_is_gone(ann, double):
    made = spawner(ann, double)
    await made.stop()
    assert double.posts() == 1
    assert made.left == module._EMPTY
    assert made.stop_notes == ["1 of your kernels sleep (1 B); the next cell you run wakes each of them."]
    assert tokens(ann) == []


async def test_without_patience_there_is_one_try(ann, double):
    double.result = BUSY
    made = spawner(ann, double, checkpoint_timeout=0.0, stop_grace=77.0)
    await made.stop()
    assert double.posts() == 1
    assert made.left == 77, "its own stop is to checkpoint then"
    assert "KERNEL_BUSY" in made.stop_notes[0]


async def test_patience_waits_for_a_cell_to_end(ann, double):
    double.result = BUSY
    made = spawner(ann, double, checkpoint_timeout=math.inf)
    stopping = asyncio.create_task(made.stop())
    await until(lambda: double.posts() >= 3)
    double.result = DRAINED
    await stopping
    assert made.left == module._EMPTY
    assert tokens(ann) == []


async def test_a_limit_ends_even_endless_patience(ann, double):
    double.result = BUSY
    made = spawner(ann, double, checkpoint_timeout=math.inf, stop_limit=0.3)
    await made.stop()
    assert not made.running
    assert tokens(ann) == []


async def test_a_limit_applies_to_the_seconds_that_a_server_needs(ann, double):
    double.result, double.seconds = BUSY, 1e6
    made = spawner(ann, double, checkpoint_timeout=0.0, stop_limit=300.0)
    await made.stop()
    assert made.left == 300


async def test_more_bytes_mean_more_grace(ann, double):
    double.result, double.seconds = BUSY, 500.0
    made = spawner(ann, double, checkpoint_timeout=0.0)
    await made.stop()
    assert made.left == 500
    assert made.interrupt_timeout == 10, "for one stop, and not for the next"


async def test_what_is_configured_is_never_lowered(ann, double):
    made = spawner(ann, double, interrupt_timeout=900)
    await made.stop()
    assert made.left == 900


@pytest.mark.parametrize(("checkpoint_before_stop", "now"), [(True, True), (False, False)])
async def test_a_stop_at_once_and_one_without_a_drain_request_nothing(ann, double, checkpoint_before_stop, now):
    made = spawner(ann, double, checkpoint_before_stop=checkpoint_before_stop)
    await made.stop(now=now)
    assert (double.asked, made.left) == ([], 10)


# -- a start that fails


async def fail(made: Mine, trouble: str) -> None:
    """A start as the hub makes it, up to where it finds that it has failed."""
    made.trouble = trouble
    with contextlib.suppress(RuntimeError, asyncio.TimeoutError):
        await asyncio.wait_for(made.start(), 0.05)
        assert trouble == "is silent"
    made._waiting_for_response = trouble == "is silent"


TROUBLE = ["raises", "takes too long", "is silent"]


@pytest.mark.parametrize("trouble", TROUBLE)
async def test_a_server_that_does_not_come_up_is_stopped_without_a_word(ann, double, trouble):
    """The server has no awake kernels; asking it would take a minute, and its end two more."""
    made = spawner(ann, double)
    await fail(made, trouble)
    await made.stop()
    assert (double.asked, made.left) == ([], 10)
    assert tokens(ann) == []


@pytest.mark.parametrize("trouble", TROUBLE)
async def test_what_a_user_is_to_read_is_kept_for_the_next_start(ann, double, trouble):
    made = spawner(ann, double)
    await made.stop()
    (note,) = made.stop_notes
    await fail(made, trouble)
    made.clear_state()  # as the hub's `stop` does, whether it has had to stop something or not
    assert made.get_state()["gpu_ckpt_notes"] == [note]

    again = Mine(user=ann, orm_spawner=made.orm_spawner)
    again.load_state(made.get_state())
    again.clear_state()
    await again.start()
    page = again.progress()
    assert (await anext(page))["message"] == note
    await page.aclose()
    again.clear_state()
    assert "gpu_ckpt_notes" not in again.get_state(), "shown once"


async def test_a_page_that_is_open_before_the_start_shows_it_too(ann, double):
    """A hook before the start (one that asks a scheduler) may take its time."""
    made = spawner(ann, double)
    await made.stop()
    page = made.progress()
    assert (await anext(page))["message"] == made.stop_notes[0]
    await page.aclose()


# -- the environment that the server gets


def test_the_server_gets_the_cold_tier_and_the_image_directory(ann, monkeypatch):
    made = ann.spawners[""]
    made.hub = Hub()
    made.archive_url, made.image_dir = "s3://bucket/{username}", "/srv/images/{username}"
    env = made.get_env()
    assert env["JUPYTER_GPU_CKPT_ARCHIVE"] == "s3://bucket/ann"
    for name in ("JUPYTER_GPU_CKPT_ARCHIVE", "JUPYTER_GPU_CKPT_IMAGES"):
        monkeypatch.setenv(name, env[name])
    kernels = GpuCkptProvisioner()
    assert (kernels.archive_url, Path(kernels.image_dir)) == ("s3://bucket/ann", Path("/srv/images/ann"))


def test_the_server_gets_no_setting_that_is_not_set(ann):
    made = ann.spawners[""]
    made.hub = Hub()
    assert not {"JUPYTER_GPU_CKPT_ARCHIVE", "JUPYTER_GPU_CKPT_IMAGES"} & set(made.get_env())


# -- TLS between hub and servers (JupyterHub.internal_ssl)


@pytest.fixture
def authorities(tmp_path) -> dict[str, dict[str, str]]:
    """Certificates as a hub makes them: one authority for the servers, one for the hub, each trusted by the other."""
    from certipy import Certipy

    maker = Certipy(store_dir=str(tmp_path / "certificates"))
    graph = maker.trust_from_graph({"hub-ca": ["servers-ca"], "servers-ca": ["hub-ca"]})
    made = {}
    for name in ("hub", "servers"):
        record = maker.create_signed_pair(name, f"{name}-ca", alt_names=["IP:127.0.0.1"])
        made[name] = {"key": record["files"]["key"], "cert": record["files"]["cert"], "ca": graph[f"{name}-ca"]}
    return made


@pytest.fixture
async def closed(authorities):
    """A small server that talks to who has a certificate of the hub's."""
    of_server = authorities["servers"]
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=of_server["ca"])
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(of_server["cert"], of_server["key"])
    made = Double(context)
    yield made
    made.server.stop()


async def test_the_hubs_certificates_open_a_server_that_requires_them(ann, closed, authorities):
    ann.settings.update({f"internal_ssl_{part}": path for part, path in authorities["hub"].items()})
    made = spawner(ann, closed)
    await made.stop()
    assert closed.posts() == 1
    assert made.left == module._EMPTY


async def test_without_certificates_no_request_is_made(ann, closed, authorities, monkeypatch):
    monkeypatch.setattr(module.ServerClient, "__init__", _impatient)
    made = spawner(ann, closed, checkpoint_timeout=0.0)
    await made.stop()
    assert closed.asked == []
    assert "SERVER_SILENT" in made.stop_notes[0]


_as_it_is = module.ServerClient.__init__


def _impatient(self, *args, **kwargs) -> None:
    _as_it_is(self, *args, slack=0.3, **kwargs)
