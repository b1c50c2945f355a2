"""The arbiter alone, against a small server that answers as a drained, a busy or a silent one would."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta, timezone

import pytest
from harness import until
from small_server import BUSY, DRAINED, Double

from jupyter_gpu_ckpt.errors import ServerRefused, ServerSilent
from jupyter_gpu_ckpt.hub.client import ServerClient
from jupyter_gpu_ckpt.hub.cull_arbiter import Arbiter, _owner
from jupyter_gpu_ckpt.hub.spawner import notes

HOUR = 3600.0


@pytest.fixture
async def double():
    double = Double()
    yield double
    double.server.stop()


async def ask(arbiter: Arbiter, inactive: float) -> bool:
    return await arbiter(
        inactive=timedelta(seconds=inactive), inactive_limit=HOUR, server={"url": "/user/ann/", "name": ""}
    )


def long_ago(arbiter: Arbiter) -> None:
    """Make all that the arbiter has done something of two hours ago."""
    requests = arbiter._requests["/user/ann/"]
    for name in ("began", "ended", "drain_began"):
        setattr(requests, name, getattr(requests, name) - 2 * HOUR)


async def test_a_server_in_use_gets_no_request(double):
    assert not await ask(Arbiter(double.url, "t"), HOUR - 1)
    assert double.asked == []


async def test_an_idle_one_is_culled_once_it_is_drained(double):
    arbiter = Arbiter(double.url, "t")
    assert await ask(arbiter, HOUR)
    assert double.posts() == 1
    assert arbiter.refusals == {}


async def test_a_server_gets_a_token_for_itself_and_never_the_cullers_own(double):
    """A server's user reads what is sent to the server: the culler's token would open those of all users."""
    double.result = None
    arbiter = Arbiter(double.url, "of-the-culler", wait=0.01)
    assert not await ask(arbiter, HOUR)
    assert not await ask(arbiter, 0)
    double.result, arbiter.wait = DRAINED, 30.0
    assert await ask(arbiter, 0)
    assert double.sent == {"server": {"token of-a-server-of-ann"}, "hub": {"token of-the-culler"}}
    ((user, scopes, seconds),) = [(made["user"], made["scopes"], made["expires_in"]) for made in double.made]
    assert (user, scopes) == ("ann", ["access:servers!server=ann/"])
    assert 0 < seconds <= 24 * HOUR


async def test_requests_at_the_same_time_share_a_token(double):
    arbiter = Arbiter(double.url, "t")
    server = {"url": "/user/ann/", "name": ""}
    await asyncio.gather(*(arbiter._client(server) for _ in range(3)))
    assert len(double.made) == 1


async def test_a_culler_that_may_make_no_tokens_says_which_scope_it_lacks(double):
    double.hub_status = 403
    arbiter = Arbiter(double.url, "t")
    assert not await ask(arbiter, HOUR)
    assert "scope tokens" in arbiter.refusals["/user/ann/"]
    assert double.sent["server"] == set()


@pytest.mark.parametrize(
    ("path", "name", "found"),
    [
        ("/user/ann/", "", ("/", "ann", "")),
        ("/user/ann/gpu%20one/", "gpu one", ("/", "ann", "gpu one")),
        ("/team/user/ann%40home.org/", "", ("/team/", "ann@home.org", "")),
    ],
)
def test_whose_server_it_is(path, name, found):
    assert _owner(path, name) == found


async def test_a_kernel_that_stays_keeps_the_server_and_says_why(double):
    double.result = BUSY
    arbiter = Arbiter(double.url, "t")
    assert not await ask(arbiter, HOUR)
    assert arbiter.refusals == {"/user/ann/": "kernel k: KERNEL_BUSY (Wait.)"}


async def test_a_slow_one_is_kept_for_now_and_the_next_round_joins(double):
    double.result = None
    arbiter = Arbiter(double.url, "t", wait=0.01)
    assert not await ask(arbiter, HOUR)
    assert "being checkpointed" in arbiter.refusals["/user/ann/"]
    await until(lambda: double.posts() == 1)  # a question that got no answer may still be on its way
    assert not await ask(arbiter, 0), "the proxy took our question for activity, which must not matter"
    assert double.posts() == 1, "it was joined"
    assert "GET api/status" in double.asked
    double.result = DRAINED
    arbiter.wait = 30.0
    assert await ask(arbiter, 0)


async def test_what_was_found_between_two_rounds_counts_in_the_next(double):
    """Proving may take longer than a round, every time."""
    double.result = None
    arbiter = Arbiter(double.url, "t", wait=0.01)
    assert not await ask(arbiter, HOUR)
    double.result = DRAINED
    await until(lambda: all(task.done() for task in arbiter._drains.values()))
    assert await ask(arbiter, 0)
    assert double.posts() == 1


async def test_what_was_found_before_somebody_used_it_does_not_count(double):
    double.result = None
    arbiter = Arbiter(double.url, "t", wait=0.01)
    assert not await ask(arbiter, HOUR)
    double.result = DRAINED
    await until(lambda: all(task.done() for task in arbiter._drains.values()))
    long_ago(arbiter)
    double.result = BUSY
    arbiter.wait = 30.0
    assert not await ask(arbiter, HOUR)
    assert double.posts() == 2


async def test_use_during_a_drain_makes_it_out_of_date(double):
    """A kernel may have been woken while another one was being checkpointed."""
    double.result = None
    arbiter = Arbiter(double.url, "t", wait=0.01)
    assert not await ask(arbiter, HOUR)
    double.result, double.last_activity = DRAINED, datetime.now(timezone.utc)
    await until(lambda: all(task.done() for task in arbiter._drains.values()))
    assert not await ask(arbiter, 0)
    long_ago(arbiter)
    double.last_activity -= timedelta(hours=2)
    double.result, arbiter.wait = BUSY, 30.0
    assert not await ask(arbiter, 2 * HOUR)
    assert double.posts() == 2


async def test_our_own_question_does_not_make_a_server_look_used(double):
    double.result = BUSY
    arbiter = Arbiter(double.url, "t")
    assert not await ask(arbiter, HOUR)
    double.result = DRAINED
    assert await ask(arbiter, 0), "the server itself says that nobody used it for two hours"


async def test_use_at_the_time_of_our_question_is_use_all_the_same(double):
    double.result = BUSY
    arbiter = Arbiter(double.url, "t")
    assert not await ask(arbiter, HOUR)
    double.result, double.last_activity = DRAINED, datetime.now(timezone.utc)
    assert not await ask(arbiter, 0)
    assert double.posts() == 1


@pytest.mark.parametrize(("status", "hint"), [(403, "access:servers"), (404, "jupyter_gpu_ckpt"), (424, "not running")])
async def test_a_server_that_refuses_is_kept_and_the_reason_names_the_fix(double, status, hint):
    double.status = status
    arbiter = Arbiter(double.url, "t")
    assert not await ask(arbiter, HOUR)
    assert "SERVER_REFUSED" in arbiter.refusals["/user/ann/"]
    assert hint in arbiter.refusals["/user/ann/"]


async def test_a_request_to_a_proxy_that_is_away_for_a_moment_is_repeated(double):
    double.status = 503
    client = ServerClient(double.url + "/user/ann/", "t")
    task = asyncio.create_task(client.drain())
    await until(lambda: len(double.asked) >= 2)
    double.status = 200
    assert (await task).drained


async def test_a_deadline_is_kept(double):
    double.status = 503
    with pytest.raises(ServerSilent):
        await ServerClient(double.url + "/user/ann/", "t", slack=0.3).drain()


async def test_a_refusal_has_a_code(double):
    double.status = 404
    with pytest.raises(ServerRefused):
        await ServerClient(double.url + "/user/ann/", "t").estimate()


@pytest.mark.parametrize(
    "result",
    [[], {}, {"drained": True}, {"drained": True, "kernels": [{"kernel_id": "k"}]}, {"drained": 1, "kernels": 3}],
)
async def test_an_answer_of_another_form_is_a_refusal(double, result):
    double.result = result
    arbiter = Arbiter(double.url, "t")
    assert not await ask(arbiter, HOUR)
    assert "SERVER_REFUSED" in arbiter.refusals["/user/ann/"]


@pytest.mark.parametrize(
    "answer",
    [
        "[]",
        "3",
        "{}",
        '{"status": "running"}',
        '{"status": "done", "result": null}',
        '{"status": "done", "result": null, "error": "broken"}',
        '{"status": "done", "result": null, "error": {"code": "A\\nServer /user/bob/ may be culled", "hint": 3}}',
    ],
)
async def test_a_job_of_another_form_is_a_refusal(double, answer):
    double.instead["gpu-ckpt/drain"] = answer
    arbiter = Arbiter(double.url, "t")
    assert not await ask(arbiter, HOUR)
    assert "SERVER_REFUSED" in arbiter.refusals["/user/ann/"]
    assert arbiter.refusals["/user/ann/"].isprintable()


@pytest.mark.parametrize("answer", ["[]", "{}", '{"last_activity": "yesterday"}', '{"last_activity": 3}'])
async def test_a_last_activity_of_another_form_is_a_refusal(double, answer):
    double.result = BUSY
    arbiter = Arbiter(double.url, "t")
    assert not await ask(arbiter, HOUR)
    double.result, double.instead["api/status"] = DRAINED, answer
    assert not await ask(arbiter, 0)
    assert "SERVER_REFUSED" in arbiter.refusals["/user/ann/"]


async def test_an_answer_that_is_nested_without_an_end_is_none(double):
    double.instead["gpu-ckpt/drain"] = "[" * 100_000
    with pytest.raises(ServerSilent):
        await ServerClient(double.url + "/user/ann/", "t", slack=0.3).drain(0.0)


async def test_what_a_server_says_forges_no_line_of_a_log(double):
    forged = {**BUSY["kernels"][0], "kernel_id": "k\nServer /user/bob/ may be culled", "hint": "\x1b[2J" * 1000}
    double.result = {"drained": False, "kernels": [forged]}
    arbiter = Arbiter(double.url, "t")
    assert not await ask(arbiter, HOUR)
    assert arbiter.refusals["/user/ann/"].isprintable()
    assert len(arbiter.refusals["/user/ann/"]) < 500


async def test_a_server_with_countless_kernels_fills_neither_a_log_nor_the_hub(double):
    double.result = {"drained": False, "kernels": BUSY["kernels"] * 500}
    outcome = await ServerClient(double.url + "/user/ann/", "t").drain()
    assert str(outcome).endswith("; and 480 more")
    assert len(notes(outcome)) == 21 and "480 more" in notes(outcome)[-1]
    double.result["kernels"] *= 3
    with pytest.raises(ServerRefused):
        await ServerClient(double.url + "/user/ann/", "t").drain()


async def test_no_server_can_delay_its_end_for_ever(double):
    double.seconds = float("inf")
    assert (await ServerClient(double.url + "/user/ann/", "t").estimate()) <= 24 * HOUR
    double.seconds = float("nan")
    assert (await ServerClient(double.url + "/user/ann/", "t").estimate()) <= 24 * HOUR
