"""A server is drained: every kernel is asleep in a verified image, or the reason is reported."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from live import until

from jupyter_gpu_ckpt.image.store import Store
from jupyter_gpu_ckpt.lifecycle.plans import State
from jupyter_gpu_ckpt.server import drain as drain_module


def drain(live) -> dict:
    reply = live.ask("POST", "gpu-ckpt/drain")
    assert reply.status_code == 202, reply.text
    return live.ended(reply.json()["id"])


@pytest.fixture
def two(live):
    """Two kernels with something to lose, on a server without others."""
    ids = [live.start_kernel() for _ in range(2)]
    for number, id in enumerate(ids):
        live.run(id, f"x = {number}")
    yield ids
    for id in ids:
        live.ask("DELETE", f"api/kernels/{id}")


def test_every_kernel_sleeps_in_a_proved_image_and_comes_back(live, two):
    need = live.get("gpu-ckpt/drain")
    assert need["kernels"] == 2
    assert need["bytes"] > 50 << 20
    job = drain(live)
    assert (job["status"], job["verb"], job["kernel_id"]) == ("done", "drain", "")
    drained = {kernel["kernel_id"]: kernel for kernel in job["result"]["kernels"]}
    assert job["result"]["drained"] and set(drained) == set(two)
    store = Store(live.home / "images")
    for id in two:
        image = store.get(drained[id]["image"])
        assert (image.manifest.kernel_id, image.manifest.bytes) == (id, drained[id]["bytes"])
    need = live.get("gpu-ckpt/drain")
    assert (need["kernels"], need["bytes"]) == (0, 0)
    assert 10 < need["seconds"] < 20, "the images are still to be proved"
    assert [live.run(id, "print(x)") for id in two] == ["0", "1"]


def test_neither_a_drain_nor_its_status_request_is_activity(live, two):
    until(lambda: all(kernel["execution_state"] == "idle" for kernel in live.get("api/kernels")))
    kernels = live.get("api/kernels")  # jupyter_server counts this one
    before = live.get("api/status")["last_activity"]
    assert drain(live)["result"]["drained"]
    live.get("gpu-ckpt/drain")
    assert live.get("api/status")["last_activity"] == before
    moments = [kernel["last_activity"] for kernel in kernels]
    assert [kernel["last_activity"] for kernel in live.get("api/kernels")] == moments


def test_a_busy_kernel_stays_with_a_reason_and_the_other_is_checkpointed(live, two):
    busy, idle = two
    with live.busy(busy):
        result = drain(live)["result"]
    drained = {kernel["kernel_id"]: kernel for kernel in result["kernels"]}
    assert not result["drained"]
    assert (drained[busy]["code"], drained[busy]["image"]) == ("KERNEL_BUSY", None)
    assert drained[busy]["hint"]
    assert drained[idle]["image"] and drained[idle]["code"] is None
    assert [live.run(id, "print(x)") for id in two] == ["0", "1"]


def test_a_damaged_image_does_not_count_as_drained(live, two):
    images = {one["kernel_id"]: one["image"] for one in drain(live)["result"]["kernels"]}
    victim = live.home / "images" / images[two[0]] / "criu"
    (pages,) = sorted(victim.glob("pages-*.img"))[:1]
    kept = pages.read_bytes()
    pages.chmod(0o600)
    pages.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    drained = {one["kernel_id"]: one["code"] for one in drain(live)["result"]["kernels"]}
    assert drained == {two[0]: "IMAGE_DAMAGED", two[1]: None}
    pages.write_bytes(kept)
    assert drain(live)["result"]["drained"]


def fake(state: State, **image: object) -> SimpleNamespace:
    lifecycle = SimpleNamespace(state=state, image=SimpleNamespace(id="i", **image), capsule=None)

    async def checkpoint() -> SimpleNamespace:
        return lifecycle.image

    return SimpleNamespace(state=state, lifecycle=lifecycle, checkpoint=checkpoint)


async def test_a_dead_kernel_keeps_no_server_and_neither_does_one_in_the_cold_tier():
    kernels = {
        "dead": fake(State.DEAD),
        "cold": fake(State.CHECKPOINTED, archived=True, manifest=SimpleNamespace(bytes=7)),
    }
    (result,) = (await drain_module.drain(list(kernels), kernels, SimpleNamespace(), logging.getLogger()))["kernels"]
    assert (result["kernel_id"], result["image"], result["code"]) == ("cold", "i", None)
