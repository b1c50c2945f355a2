"""One server among others, of whom some write whatever they like: it decides for its own kernels all the same."""

from __future__ import annotations

import errno
import json
import os
import random
import time
from dataclasses import replace

import pytest
from sharing_server import FileGpus

from jupyter_gpu_ckpt.cuda import gpu_locks
from jupyter_gpu_ckpt.sharing import policy, records
from jupyter_gpu_ckpt.sharing.exchange import Exchange, Member
from jupyter_gpu_ckpt.sharing.participant import Residence

A, B, ELSEWHERE = (f"GPU-00000000-0000-0000-0000-00000000000{letter}" for letter in "abc")


class KernelDouble:
    """A kernel that does nothing by itself."""

    def observe(self, now: float) -> bool:
        return True

    def begin_suspend(self, reason) -> None:
        pass


@pytest.fixture
def exchange(tmp_path):
    (tmp_path / "memory").mkdir()
    return Exchange(FileGpus(tmp_path / "locks", tmp_path / "memory", {A: 100, B: 100}))


def _liar(chance: random.Random) -> dict:
    """A record that has all of a record's types, and any values."""
    now = time.monotonic()
    uuids = chance.sample([A, B, ELSEWHERE], chance.randint(0, 3))
    count = chance.randint(0, len(uuids))
    at = [None, 0.0, now, now - 3, now + 1e6, 1e11]
    turn = {"since": chance.choice(at[1:]), "seconds": chance.choice([0, 1e11]), "first": True, "factor": 0}
    residence = chance.choice(["away", "arriving", "present", "leaving"])
    on = [] if residence == "away" else chance.sample([A, B, ELSEWHERE], count)
    return {
        "version": 1,
        "gpus": uuids,
        "needs": [chance.choice([0, 1, 100, 1 << 50]) for _ in range(count)],
        "residence": residence,
        "on": on,
        "resident": [chance.choice([0, 1 << 50]) for _ in on],
        "was_on": chance.sample([A, B, ELSEWHERE], chance.randint(0, 3)),
        "turn": chance.choice([None, turn | {"factor_since": 0}]),
        "swaps": [{"gpus": uuids, "ended": chance.choice(at[1:]), "seconds": 1e11}] * chance.randint(0, 3),
        "used_before": {f"kernel-{chance.randrange(5):032x}": 1e11},
        **{name: chance.choice(at) for name in ("moving_since", "waiting_since", "served_at", "granted_at")},
        **{name: chance.choice(at[1:]) for name in ("idle_since", "factor_since")},
        **{name: chance.random() < 0.5 for name in ("mirrored", "can_leave", "can_pause", "protected")},
        **{name: chance.choice([0, 1e11]) for name in ("protect_used", "leave_seconds", "arrive_seconds", "used")},
        **{name: chance.choice([0, 1 << 20]) for name in ("turns", "factor")},
    }


@pytest.mark.parametrize("seed", range(8))
def test_no_record_of_another_keeps_a_server_from_deciding(exchange, seed):
    chance = random.Random(seed)
    member = Member(exchange, KernelDouble())
    exchange._members[member.participant.kernel] = member
    member.update(lambda p: replace(p, gpus=(A,), needs=(50,)).touched(time.monotonic(), {}))
    read = 0
    for _ in range(40):
        for number in range(5):
            path = exchange.directory / f"kernel-{number:032x}"
            path.write_text(json.dumps(_liar(chance)))
            os.utime(path, ns=(at := time.monotonic_ns(), at))
        read += len(records.read(exchange.directory)) - 1
        exchange._decide()
        assert exchange.decision(member) is not None
    assert read > 100, "they count as records"


def test_a_kernel_that_takes_no_turn_that_it_is_granted_is_passed_over(exchange, monkeypatch):
    """Else all would wait for a user who lies, or a server that has a fault."""
    member, liar = (Member(exchange, KernelDouble()) for _ in range(2))
    exchange._members[member.participant.kernel] = member
    began = time.monotonic()
    for each, needs in ((liar, 90), (member, 80)):
        each.update(lambda p, needs=needs: replace(p, gpus=(A,), needs=(needs,)).touched(began, {}))
        time.sleep(0.01)
    liar.update(lambda p: replace(p, user="77", waiting_since=began - 50))
    exchange._decide()
    assert isinstance(exchange.decision(liar), policy.GrantTurn)
    assert isinstance(exchange.decision(member), policy.WaitFor)
    with monkeypatch.context() as patch:
        patch.setattr("jupyter_gpu_ckpt.sharing.exchange.IDLE_S", 0.0)
        exchange._decide()
    exchange._decide()
    assert isinstance(exchange.decision(member), policy.GrantTurn)
    assert exchange.claim(member) is not None


@pytest.fixture
def waiting(exchange):
    """A member that is granted a turn."""
    member = Member(exchange, KernelDouble())
    exchange._members[member.participant.kernel] = member
    member.update(lambda p: replace(p, gpus=(A,), needs=(80,)).touched(time.monotonic(), {}))
    exchange._decide()
    return member


def test_a_claim_waits_for_no_server_that_is_stopped_with_its_lock(exchange, waiting):
    """Its second attempt does without: the server was waited for until its record was void."""
    with gpu_locks.locked(exchange.directory, [A], 1, kind="claim"):
        assert exchange.claim(waiting) is None
        assert exchange.claim(waiting) is not None
    assert waiting.participant.residence is Residence.ARRIVING


@pytest.fixture
def leaving(exchange):
    """A member that leaves the GPU, where it has 60 of 100."""
    member = Member(exchange, KernelDouble())
    exchange._members[member.participant.kernel] = member
    here = {"residence": Residence.PRESENT, "on": (A,), "resident": (60,), "was_on": (A,), "gpus": (A,), "needs": (60,)}
    member.update(lambda p: replace(p, **here))
    (exchange.directory.parent / "memory" / f"{os.getpid()}-leaver").write_text(f"{A} 60")
    member.update(lambda p: p.leaving(time.monotonic(), {}))
    return member


def test_memory_that_is_becoming_free_is_claimed_by_one_kernel_that_arrives_early(exchange, leaving, waiting):
    def claims(needed: int = 80, **facts) -> bool:
        before = waiting.participant
        waiting.update(lambda p: replace(p, needs=(needed,), **facts))
        exchange._decide()
        granted = exchange.claim(waiting) is not None
        waiting.update(lambda _: before)
        return granted

    assert not claims(arrives_early=True), "nobody knows whether it will leave"
    leaving.update(lambda p: replace(p, frees=True))
    assert not claims(arrives_early=False)
    assert claims(arrives_early=True)
    exchange._others[A] = 30
    assert not claims(arrives_early=True), "programs that do not share had so much before the move"
    assert claims(70, arrives_early=True)
    exchange._others[A] = 0
    other = Member(exchange, KernelDouble())
    exchange._members[other.participant.kernel] = other
    there = {"residence": Residence.ARRIVING, "on": (A,), "resident": (10,), "gpus": (A,), "needs": (10,)}
    other.update(lambda p: replace(p, **there))
    assert not claims(arrives_early=True), "each of two would find the same memory free"


@pytest.mark.parametrize("more", [0, 10])
def test_a_turn_of_a_kernel_that_stays_where_it_is_locks_nothing_but_for_more_memory(exchange, waiting, more):
    here = {"residence": Residence.PRESENT, "on": (A,), "resident": (80,), "was_on": (A,), "needs": (80 + more,)}
    waiting.update(lambda p: replace(p, **here))
    exchange._decide()
    with gpu_locks.locked(exchange.directory, [A], 1, kind="claim"):
        assert (exchange.claim(waiting) is not None) is (more == 0)
    assert more == 0 or exchange.claim(waiting) is not None
    assert waiting.participant.turn is not None


def test_a_claim_is_none_while_a_server_without_sharing_restores_a_kernel_to_the_gpu(exchange, waiting):
    with gpu_locks.locked(exchange.directory, [A], 1):
        before = waiting.participant
        assert exchange.claim(waiting) is None
        assert waiting.participant == before, "it keeps its place"
    assert exchange.claim(waiting) is not None


def test_a_claim_that_cannot_be_compared_with_others_is_none(exchange, waiting, monkeypatch):
    """Else its kernel would be about to come for good, and its memory be another's for the kernel itself."""
    before, read = waiting.participant, records.read

    def read_once(directory):
        if waiting.participant != before:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return read(directory)

    with monkeypatch.context() as patched:
        patched.setattr(records, "read", read_once)
        with pytest.raises(OSError, match="open files"):
            exchange.claim(waiting)
    assert waiting.participant == before
    assert exchange.claim(waiting) is not None


def test_a_kernel_whose_facts_fail_silences_no_other_one(exchange, waiting, monkeypatch):
    broken = Member(exchange, KernelDouble())
    broken.kernel.observe = lambda now: {}["fault"]
    exchange._members = {broken.participant.kernel: broken} | exchange._members
    monkeypatch.setattr("jupyter_gpu_ckpt.sharing.exchange.HEARTBEAT_S", 0.0)
    before = records.read(exchange.directory)
    exchange.join(waiting)
    deadline = time.monotonic() + 60
    while records.read(exchange.directory)[0].alive_at <= before[0].alive_at and time.monotonic() < deadline:
        time.sleep(0.01)
    [*map(exchange.detach, (waiting, broken))]
    assert waiting._written > before[0].alive_at


@pytest.mark.parametrize("earlier", [True, False])
def test_of_two_claims_without_a_lock_the_later_one_yields(exchange, waiting, monkeypatch, earlier):
    other, turn = Member(exchange, KernelDouble()), policy.Turn(0.0, 1.0, True)

    def claim_meanwhile(participant, grant, snapshot):
        at = time.monotonic() + (-0.01 if earlier else 60)
        other.update(lambda p: replace(p, gpus=(A,), needs=(80,)).granted((A,), turn, at))
        return True

    monkeypatch.setattr(exchange, "_has_memory", claim_meanwhile)
    monkeypatch.setattr(records, "_time", lambda value, now: value)  # else what is to come is now
    assert (exchange.claim(waiting) is None) is earlier
    assert (waiting.participant.residence is Residence.AWAY) is earlier


def test_memory_of_a_server_that_does_not_answer_is_known_and_never_more_than_others_have(exchange):
    """Its record is void: what it had counts as another program's, of whose kind it says something."""
    silent, member = (Member(exchange, KernelDouble()) for _ in range(2))
    exchange._members[member.participant.kernel] = member
    silent.update(lambda p: replace(p, gpus=(A,), needs=(70,), residence=Residence.PRESENT, on=(A,), resident=(70,)))
    ago = time.monotonic_ns() - int(30e9)
    os.utime(exchange.directory / silent.participant.kernel, ns=(ago, ago))
    member.update(lambda p: replace(p, gpus=(A,), needs=(80,)).touched(time.monotonic(), {}))
    for used, known in ((70, 70), (60, 60), (90, 70), (0, 0)):
        (exchange.directory.parent / "memory" / f"{os.getpid()}-1").write_text(f"{A} {used}")
        exchange._decide()
        assert exchange.silent_bytes(A) == known
        assert exchange.silent_bytes(B) == 0
    member.update(lambda p: p.cell_ended(time.monotonic()))
    exchange._decide()
    assert exchange.silent_bytes(A) == 0, "nobody waits for it"


def test_a_server_without_sharing_leaves_memory_to_kernels_that_are_about_to_come(exchange, waiting):
    assert records.claimed(exchange.directory, A) == 0
    assert exchange.claim(waiting) is not None
    assert records.claimed(exchange.directory, A) == 80
    waiting.update(lambda p: p.arrived(time.monotonic()))
    assert records.claimed(exchange.directory, A) == 0, "NVML counts it now"
