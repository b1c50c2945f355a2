"""The rules of sharing, one by one, on small snapshots.  Bytes are gigabytes of a GPU of 100."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jupyter_gpu_ckpt.sharing.participant import Participant, Residence, Turn
from jupyter_gpu_ckpt.sharing.policy import (
    SILENT_S,
    Allotment,
    Decisions,
    NeverFits,
    NodeSnapshot,
    Rules,
    SharedGpu,
    SuspendFor,
    SuspendReason,
    decide,
    others,
    used,
)

NOW = 1000.0
RULES = Rules()
GPU = ("A",)


def kernel(name: str, needs: int = 80, gpus: tuple[str, ...] = GPU, **facts) -> Participant:
    return Participant(name, facts.pop("user", name), gpus, (needs,), NOW, arrive_seconds=1.0, **facts)


def idle(name: str, since: float, needs: int = 30, **facts) -> Participant:
    """A kernel that is on GPU A, with nothing to do."""
    there = kernel(name, needs, **facts)
    return replace(
        there, residence=Residence.PRESENT, on=GPU, was_on=GPU, resident=(needs,), idle_since=since, leave_seconds=1.0
    )


def computing(name: str, since: float, needs: int = 80, *, first: bool = False, **facts) -> Participant:
    """A kernel with a turn on GPU A."""
    seconds = RULES.first_turn if first else RULES.turn
    return replace(idle(name, 0.0, needs, **facts), turn=Turn(since, seconds, first), turns=1, granted_at=since)


def waiting(name: str, since: float = NOW - 1, needs: int = 80, *, turns: int = 0, **facts) -> Participant:
    return replace(kernel(name, needs, **facts), waiting_since=since, turns=turns)


def decided(*participants: Participant, gpus: tuple[SharedGpu, ...] = (SharedGpu("A", 100),), **facts) -> Decisions:
    return decide(NodeSnapshot(NOW, gpus, participants, **facts))


def suspended(decisions: Decisions) -> list[str]:
    return [each.kernel for each in decisions.suspends]


def test_memory_is_taken_from_the_longest_idle_only_as_far_as_it_is_needed():
    there = [idle("a", 10.0), idle("b", 30.0), idle("c", 20.0)]
    assert suspended(decided(*there)) == []
    assert suspended(decided(*there, waiting("w", needs=10))) == []
    assert suspended(decided(*there, waiting("w", needs=40))) == ["a"]
    assert suspended(decided(*there, waiting("w", needs=60))) == ["a", "c"]


def test_one_with_a_mirror_leaves_before_one_that_is_idle_for_longer():
    assert suspended(decided(idle("a", 10.0), idle("b", 30.0, mirrored=True), waiting("w", needs=60))) == ["b"]


def test_kernels_that_fit_compute_at_the_same_time():
    decisions = decided(computing("a", 0.0, 40), waiting("w", needs=60))
    assert [each.kernel for each in decisions.grants] == ["w"] and not decisions.suspends


@pytest.mark.parametrize(
    ("ran", "first", "turns", "leaves"),
    [
        (29.0, True, 0, False),
        (31.0, True, 0, True),
        (9.0, False, 0, False),
        (11.0, False, 0, True),
        (59.0, False, 1, False),
        (61.0, False, 1, True),
    ],
)
def test_turns_end_for_new_cells_and_for_long_ones(ran, first, turns, leaves):
    decisions = decided(computing("a", NOW - ran, first=first), waiting("w", turns=turns))
    assert decisions.suspends == ((SuspendFor("a", SuspendReason.TURN),) if leaves else ())
    assert [each.kernel for each in decisions.waits] == ["w"]


def test_a_new_cell_of_a_kernel_that_is_there_ends_no_turn_for_another():
    """No memory is needed for it, and the other starts no sooner."""
    there = replace(idle("new", 0.0, 20), leave_seconds=3.0, waiting_since=NOW)
    decisions = decided(computing("a", NOW - 59, 60), there, waiting("w", needs=40, turns=1))
    assert [each.kernel for each in decisions.grants] == ["new"] and not decisions.suspends


def test_a_turn_continues_while_nobody_waits():
    assert decided(computing("a", 0.0)) == Decisions(factors={"A": 1})


def test_a_kernel_that_cannot_pause_or_is_protected_keeps_its_turn_and_nobody_knows_for_how_long():
    for facts in ({"can_pause": False}, {"protected": True}):
        decisions = decided(computing("a", 0.0, **facts), waiting("w"))
        assert not decisions.suspends and decisions.waits[0].seconds is None


def test_protection_ends_with_the_budget_of_its_user():
    there = idle("a", 0.0, 50, protected=True, protect_used=3000.0, user="u"), idle("b", 0.0, 1, user="u")
    assert suspended(decided(*there, waiting("w"))) == []
    assert suspended(decided(*there, waiting("w"), allotments={"u": Allotment(protect_budget=2999.0)})) == ["a"]


@pytest.mark.parametrize("frees", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_only_a_kernel_that_can_arrive_early_is_granted_memory_that_is_becoming_free(frees, early):
    leaving = replace(idle("a", 0.0, 80), residence=Residence.LEAVING, moving_since=NOW, frees=frees)
    again = replace(leaving, waiting_since=NOW - 0.5, arrives_early=True)
    for there in (leaving, again):  # a kernel that still leaves does not return yet
        decisions = decided(there, waiting("w", arrives_early=early))
        assert [each.kernel for each in decisions.grants] == (["w"] if frees and early else [])


def test_what_becomes_free_is_granted_to_one_kernel():
    leaving = replace(idle("a", 0.0, 80), residence=Residence.LEAVING, moving_since=NOW, frees=True)
    both = [waiting(name, since, needs=60, arrives_early=True) for name, since in (("v", NOW - 2), ("w", NOW - 1))]
    decisions = decided(leaving, *both)
    assert ([each.kernel for each in decisions.grants], [each.kernel for each in decisions.waits]) == (["v"], ["w"])


def test_a_weight_makes_turns_longer():
    decisions = decided(waiting("w", user="u"), allotments={"u": Allotment(weight=2.0)})
    assert decisions.grants[0].turn.seconds == 2 * RULES.first_turn


@pytest.mark.parametrize("factor", [0, 1 << 20])
def test_a_record_lengthens_and_shortens_turns_within_the_limits_only(factor):
    """The factor is that of the last turn granted, which may be that of a liar."""
    liar = idle("liar", 0.0, 1, factor=factor, factor_since=NOW - 1, granted_at=NOW)
    decisions = decided(liar, waiting("w", turns=1))
    assert decisions.grants[0].turn.seconds == RULES.turn
    assert decisions.factors == {"A": 1}


def test_users_come_before_their_kernels():
    """One user's two kernels, of which one waits for longest, and another's who was served less recently."""
    queue = [
        waiting("a", 10.0, turns=1, user="u", served_at=800.0),
        waiting("b", 20.0, turns=1, user="u", served_at=900.0),
        waiting("c", 950.0, turns=1, user="v", served_at=850.0),
    ]
    decisions = decided(*queue, computing("x", NOW))
    assert [each.kernel for each in decisions.waits] == ["c", "a", "b"]
    assert [each.place for each in decisions.waits] == [1, 2, 3]


@pytest.mark.parametrize(
    ("ran", "holder_is_new", "waited", "first"),
    [
        (10.0, True, 69.0, "new"),
        (10.0, True, 71.0, "long"),
        (4.0, False, 83.0, "new"),
        (4.0, False, 85.0, "long"),
        (30.0, False, 89.0, "new"),
        (30.0, False, 91.0, "long"),
    ],
)
def test_a_new_cell_passes_users_who_are_still_served_after_a_turn_of_each_other_user(
    ran, holder_is_new, waited, first
):
    """Two other users, two turns: the long one has waited, the holder runs until it is cut, a first turn follows."""
    long = waiting("long", NOW - waited, turns=1, served_at=NOW - waited)
    new = waiting("new", served_at=NOW - 10)
    assert decided(long, new, computing("x", NOW - ran, first=holder_is_new)).waits[0].kernel == first


@pytest.mark.parametrize(
    ("factor", "ended", "first"),
    [(2, 200.0, "new"), (1, 200.0, "long"), (2, 230.0, "long"), (1 << 20, 200.0, "long")],
)
def test_where_turns_were_longer_since_a_user_waits_new_cells_pass_as_if_they_still_were(factor, ended, first):
    """Three other users: the long one has waited for 220 s, of 180 s, or of 360 s by the last turn of another one."""
    long = waiting("long", NOW - 220, turns=1, served_at=NOW - 220)
    other = idle("other", 0.0, 1, factor=factor, served_at=NOW - ended, granted_at=NOW - 300)
    new = waiting("new", served_at=NOW - 10)
    decisions = decided(long, other, new, computing("x", NOW - 30))
    assert decisions.factors == {"A": 1}
    assert decisions.waits[0].kernel == first


@pytest.mark.parametrize(("idler", "first"), [(NOW - 100, "long"), (NOW - 10, "new")])
def test_a_user_who_may_come_before_another_is_counted_although_no_cell_of_theirs_waits(idler, first):
    """Three other users: three turns are allowed.  The idle one comes before who was served later, for a first turn."""
    long = waiting("long", NOW - 100, turns=1, served_at=NOW - 95)
    others = waiting("new", served_at=NOW - 20), idle("idler", idler, served_at=idler)
    assert decided(long, *others, computing("x", NOW - 1, first=True)).waits[0].kernel == first


def test_of_one_user_a_new_cell_passes_until_its_kernel_has_had_a_turn_since_another_waits():
    long = waiting("long", 700.0, turns=1, used_before={"new": 100.0}, user="u", served_at=700.0)
    for had, first in ((129.0, "new"), (131.0, "long")):
        new = waiting("new", used=had, served_at=900.0, user="u")
        assert decided(long, new, computing("x", NOW, user="x")).waits[0].kernel == first


def test_a_kernel_that_waits_for_another_gpu_is_not_counted():
    two = (SharedGpu("A", 100), SharedGpu("B", 100, others=100))
    decisions = decided(computing("x", NOW), waiting("a"), waiting("b", gpus=("B",)), gpus=two)
    assert [(each.kernel, each.place) for each in decisions.waits] == [("a", 1), ("b", 1)]
    assert decisions.waits[1].seconds is None


def test_a_wait_has_an_estimate():
    """The rest of the first turn, its kernel's way off, the own way there; then that of the one before."""
    decisions = decided(computing("x", NOW - 20, first=True), waiting("a", 990.0), waiting("b", 995.0))
    assert [each.seconds for each in decisions.waits] == pytest.approx([10 + 1 + 1, 10 + 1 + 1 + 30 + 1], abs=0.2)


def test_one_that_waits_comes_back_on_a_free_gpu_and_prefers_its_own():
    two = (SharedGpu("A", 100), SharedGpu("B", 100))
    was = replace(waiting("w", gpus=("A", "B"), turns=1), was_on=GPU)
    assert decided(was, gpus=two).grants[0].gpus == ("A",)
    assert decided(was, computing("x", NOW), gpus=two).grants[0].gpus == ("B",)


def test_a_free_gpu_is_better_than_one_where_another_computes():
    two = (SharedGpu("A", 100), SharedGpu("B", 100))
    assert decided(computing("x", 0.0, 20), waiting("w", needs=20, gpus=("A", "B")), gpus=two).grants[0].gpus == ("B",)


def test_what_fits_no_empty_gpu_is_refused():
    assert decided(waiting("w", needs=101)).refusals == (NeverFits("w", 101, 100),)
    assert decided(replace(waiting("w"), needs=(50, 50))).refusals == (NeverFits("w", 50, 100),)
    assert decided(waiting("w", needs=100), idle("a", 0.0)).refusals == ()


def test_a_kernel_that_comes_for_two_gpus_is_not_delayed_by_those_behind_it():
    """Its second GPU is not given away for longer than until its first one is free."""
    two = (SharedGpu("A", 100), SharedGpu("B", 100))
    both = replace(waiting("both", 900.0, gpus=("A", "B"), turns=1), needs=(80, 80))
    for left, granted in ((40.0, True), (8.0, False)):
        holder = computing("x", NOW - RULES.turn + left)
        decisions = decided(holder, both, waiting("behind", 950.0, gpus=("B",), turns=1), gpus=two)
        assert [each.kernel for each in decisions.grants] == (["behind"] if granted else [])
        for grant in decisions.grants:
            assert grant.turn.seconds <= left + 1


def test_a_silent_holder_has_no_turn_and_its_memory_is_what_nvml_shows():
    holder = replace(computing("x", NOW), alive_at=NOW - SILENT_S - 0.1)
    waiter = waiting("w")
    assert others("A", 100, 20, [holder], NOW) == 80
    assert decided(holder, waiter).grants[0].kernel == "w"  # the process has ended
    still = decided(holder, waiter, gpus=(SharedGpu("A", 100, others=80),))
    assert not still.suspends and still.waits[0].seconds is None
    assert others("A", 100, 20, [replace(holder, alive_at=NOW)], NOW) == 0


def test_a_kernel_on_a_gpu_that_is_gone_waits():
    gone = replace(idle("a", 0.0), waiting_since=NOW - 1)
    assert decided(gone, gpus=(SharedGpu("B", 100),)).refusals == (NeverFits("a", 30, 0),)
    moved = replace(gone, gpus=("A", "B"))
    assert decided(moved, gpus=(SharedGpu("B", 100),)).waits[0].seconds is None


def test_a_kernel_that_leaves_cannot_come_before_it_has_left():
    """Also not to a GPU that is free."""
    two = (SharedGpu("A", 100), SharedGpu("B", 100))
    leaves = replace(waiting("w", gpus=("A", "B"), turns=1), residence=Residence.LEAVING, on=GPU, resident=(80,))
    leaves = replace(leaves, moving_since=NOW - 1, leave_seconds=3.0)
    decisions = decided(leaves, gpus=two)
    assert not decisions.grants and decisions.waits[0].seconds == pytest.approx(2.0 + 1.0)


def test_a_kernel_that_grows_gets_the_memory_of_idle_ones():
    grown = computing("a", NOW, 40).grew((80,))
    assert suspended(decided(grown, idle("b", 0.0, 30))) == ["b"]


def test_the_records_of_one_cell_from_the_first_call_to_its_end():
    """Touch, grant, arrival, the end of a turn, the way off, the next turn, the end."""
    one = kernel("a").touched(100.0, {})
    assert one.touched(101.0, {}) is one
    (grant,) = decide(NodeSnapshot(100.0, (SharedGpu("A", 100),), (replace(one, alive_at=100.0),))).grants
    assert grant.move and grant.turn.first
    one = one.granted(grant.gpus, grant.turn, 100.0)
    assert (one.residence, one.resident, one.waiting_since) == (Residence.ARRIVING, (80,), None)
    one = one.arrived(101.0)
    assert one.turn is not None and one.turn.since == 101.0 and one.swaps[0].seconds == 1.0
    one = one.leaving(151.0, used([one], 151.0))
    assert (one.turn, one.waiting_since, one.served_at, one.used) == (None, 151.0, 151.0, 50.0)
    one = one.left(152.0)
    assert (one.residence, one.on, one.was_on) == (Residence.AWAY, (), GPU)
    one = one.granted(grant.gpus, replace(grant.turn, first=False), 160.0).arrived(161.0).cell_ended(171.0)
    assert (one.residence, one.turn, one.waiting_since, one.used) == (Residence.PRESENT, None, None, 60.0)
    assert one.idle_since == 171.0


def test_a_move_that_fails_leaves_a_kernel_that_waits_or_one_that_stays():
    turn = Turn(100.0, 30.0, True)
    failed = kernel("a").touched(100.0, {}).granted(GPU, turn, 100.0).move_failed(102.0, {})
    assert (failed.residence, failed.waiting_since, failed.turn, failed.on) == (Residence.AWAY, 102.0, None, ())
    stays = computing("b", 0.0).leaving(NOW - 10, {}).move_failed(NOW - 5, {})
    assert (stays.residence, stays.can_pause) == (Residence.PRESENT, False)
    assert [each.kernel for each in decided(stays).grants] == ["b"]
