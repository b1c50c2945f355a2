"""The idle policy's decisions alone: looks in, actions out, by a clock that the test turns."""

from __future__ import annotations

import pytest

from jupyter_gpu_ckpt.lifecycle.plans import State
from jupyter_gpu_ckpt.server.idle.policy import Action, IdleSettings, KernelSnapshot, Policy, Rule, Verb

RULE = Rule(suspend_after=300, checkpoint_after=1800)
BUSY = {"code": "CHILD_PROCESSES", "message": "It has children.", "hint": "End them.", "left": "", "details": {}}
BROKEN = {"code": "CRIU_FAILED", "message": "CRIU failed.", "hint": "", "left": "", "details": {}}


class Server:
    """A policy, a clock, and kernels that carry out every verb, with device memory or without."""

    def __init__(self, **settings) -> None:
        self.policy = Policy(IdleSettings(**{"rule": RULE, "parallel": 100, "without_device_memory": True, **settings}))
        self.now = 10_000.0
        self.kernels: dict[str, dict] = {}

    def kernel(self, name: str = "k", **facts) -> dict[str, str]:
        defaults = {"kernel_name": "python3", "state": State.RUNNING, "last_activity": self.now, "process": 1}
        self.kernels[name] = {**defaults, **facts}
        return self.verbs()

    def change(self, name: str = "k", **facts) -> None:
        self.kernels[name].update(facts)

    def decide(self, after: float = 0.0) -> list[Action]:
        self.now += after
        return self.policy.decide([KernelSnapshot(name, **facts) for name, facts in self.kernels.items()], self.now)

    def verbs(self, after: float = 0.0) -> dict[str, str]:
        return {action.kernel_id: str(action.verb) for action in self.decide(after)}

    def obey(self, after: float = 0.0) -> dict[str, str]:
        """Decide, and do all of it at once."""
        actions = self.decide(after)
        for action in actions:
            self.change(action.kernel_id, state=action.verb.leads_to, on_gpu=False)
            self.policy.succeeded(action)
        return {action.kernel_id: str(action.verb) for action in actions}

    def fail(self, error: dict, *, refused: bool, after: float = 0.0) -> bool | None:
        """Decide, and let the one action fail; whether that was news, None if there was no action."""
        actions = self.decide(after)
        if not actions:
            return None
        (action,) = actions
        return self.policy.failed(action, error, refused=refused, now=self.now)


class TestTimes:
    def test_from_the_gpu_to_memory_to_disk(self):
        server = Server()
        server.kernel(on_gpu=True)
        assert server.obey(299) == {}
        assert server.obey(1) == {"k": "suspend"}
        assert server.obey(1499) == {}
        assert server.obey(1) == {"k": "checkpoint"}
        assert server.obey(1e6) == {}

    def test_without_device_memory_there_is_nothing_to_suspend(self):
        server = Server()
        server.kernel()
        assert server.verbs(1799) == {}
        assert server.verbs(1) == {"k": "checkpoint"}

    def test_without_device_memory_a_kernel_is_left_alone_by_default(self):
        server = Server(without_device_memory=IdleSettings().without_device_memory)
        server.kernel()
        server.kernel("suspended by hand", state=State.SUSPENDED)
        assert server.verbs(1e6) == {"suspended by hand": "checkpoint"}
        assert server.policy.outlook("k", server.now)["next"] is None
        server.change(on_gpu=True)
        assert server.verbs() == {"k": "checkpoint"}

    def test_what_works_is_not_touched_even_where_memory_is_short(self):
        server = Server(memory_limit=1)
        server.kernel(state=State.SUSPENDED, resident=1 << 30, computing=True)
        assert server.verbs(1e6) == {}
        server.change(computing=False)
        assert server.verbs(1) == {"k": "checkpoint"}

    def test_long_overdue_goes_all_the_way_at_once(self):
        server = Server()
        server.kernel(on_gpu=True, working=True)
        server.change(working=False)
        assert server.verbs(5000) == {"k": "checkpoint"}

    @pytest.mark.parametrize(
        ("rule", "after_300", "after_1800"),
        [
            (Rule(0, 1800), {}, {"k": "checkpoint"}),
            (Rule(300, 0), {"k": "suspend"}, {"k": "suspend"}),
            (Rule(0, 0), {}, {}),
            (Rule(300, 300), {"k": "checkpoint"}, {"k": "checkpoint"}),
            (Rule(600, 300), {"k": "checkpoint"}, {"k": "checkpoint"}),
        ],
    )
    def test_zero_is_never_and_no_suspend_just_before_a_checkpoint(self, rule, after_300, after_1800):
        for seconds, expected in ((300, after_300), (1800, after_1800)):
            server = Server(rule=rule)
            server.kernel(on_gpu=True)
            assert server.verbs(seconds) == expected

    def test_a_kernelspec_of_its_own(self):
        server = Server(rules={"quick": Rule(10, 20)})
        server.kernel("a", kernel_name="quick", on_gpu=True)
        server.kernel("b", on_gpu=True)
        assert server.verbs(10) == {"a": "suspend"}

    @pytest.mark.parametrize("state", [s for s in State if s not in (State.RUNNING, State.SUSPENDED, State.OFF_GPU)])
    def test_a_kernel_in_any_other_state_is_nobodys_business(self, state):
        server = Server()
        server.kernel(state=state, on_gpu=True)
        assert server.verbs(1e6) == {}


class TestIdleness:
    def test_work_is_not_idleness_however_long(self):
        server = Server()
        server.kernel(on_gpu=True, working=True)
        assert server.verbs(1e6) == {}

    def test_a_client_that_has_something_run_starts_the_clock_anew(self):
        server = Server()
        server.kernel(on_gpu=True)
        server.decide(200)
        server.change(last_activity=server.now)
        assert server.verbs(299) == {}
        assert server.verbs(1) == {"k": "suspend"}

    def test_a_thread_that_computes_is_activity(self):
        server = Server()
        server.kernel(on_gpu=True, computing=True)
        server.decide(1000)
        server.change(computing=False)
        assert server.verbs(299) == {}
        assert server.verbs(1) == {"k": "suspend"}

    def test_a_kernel_seen_for_the_first_time_is_not_idle_yet(self):
        """An attached kernel had no message for an hour; only now can its clients send one."""
        server = Server()
        server.kernel(on_gpu=True, last_activity=0.0)
        assert server.verbs(299) == {}

    @pytest.mark.parametrize("between", [State.SUSPENDED, State.CHECKPOINTED, State.RESTORING, State.DEAD])
    def test_whoever_wanted_it_back_keeps_it_also_without_running_anything(self, between):
        server = Server()
        server.kernel(on_gpu=True)
        server.change(state=between)
        server.decide(290)
        server.change(state=State.RUNNING)
        server.decide(100)
        assert server.verbs(299) == {}
        assert server.verbs(1) == {"k": "suspend"}

    def test_awake_again_before_the_next_sample(self):
        server = Server()
        server.kernel(on_gpu=True)
        (action,) = server.decide(300)
        server.policy.succeeded(action)
        assert server.verbs(5) == {}, "running in the next look: somebody has resumed it"

    def test_another_process_is_a_kernel_that_was_restarted(self):
        server = Server()
        server.kernel(on_gpu=True)
        server.change(process=2)
        assert server.verbs(300) == {}
        assert server.verbs(300) == {"k": "suspend"}

    def test_back_from_a_verb_that_failed_is_still_idle(self):
        server = Server()
        server.kernel(on_gpu=True)
        server.change(state=State.SUSPENDING, process=None)
        server.decide(299)
        server.change(state=State.RUNNING, process=1)
        assert server.verbs(1) == {"k": "suspend"}

    def test_protected(self):
        server = Server()
        server.kernel(on_gpu=True, protected=7200.0)
        assert server.verbs(3600) == {}
        server.change(protected=0.0)
        assert server.verbs(1) == {"k": "checkpoint"}


class TestMemory:
    def test_above_the_limit_the_longest_idle_go_first_and_no_more_than_needed(self):
        server = Server(memory_limit=100)
        for name, resident in (("a", 60), ("b", 30)):
            assert server.kernel(name, state=State.SUSPENDED, resident=resident) == {}
            server.now += 1
        assert server.kernel("c", state=State.OFF_GPU, resident=20) == {"a": "checkpoint"}
        assert server.verbs() == {}, "what is leaving counts no more"

    def test_protected_ones_stay_and_others_go_in_their_place(self):
        server = Server(memory_limit=100)
        server.kernel("a", state=State.SUSPENDED, resident=90, protected=5.0)
        assert server.kernel("b", state=State.SUSPENDED, resident=20) == {"b": "checkpoint"}

    def test_running_kernels_do_not_count(self):
        server = Server(memory_limit=100)
        server.kernel("a", resident=1000)
        server.kernel("b", state=State.SUSPENDED, resident=100)
        assert server.verbs() == {}

    def test_no_limit(self):
        server = Server(memory_limit=0)
        server.kernel(state=State.SUSPENDED, resident=1 << 50)
        assert server.verbs() == {}


class TestTurns:
    def test_never_more_than_the_limit_at_once(self):
        server = Server(parallel=2)
        for n in range(5):
            server.kernel(str(n))
        first = server.decide(1800)
        assert len(first) == 2
        assert server.decide() == []
        server.policy.succeeded(first[0])
        server.change(first[0].kernel_id, state=State.CHECKPOINTED)
        assert len(server.decide()) == 1

    def test_gpus_before_memory_of_their_own_and_then_the_longest_idle(self):
        server = Server(parallel=1)
        server.kernel("old")
        server.now += 10
        server.kernel("young")
        server.now += 10
        server.kernel("gpu", on_gpu=True)
        order = []
        server.now += 1800
        while done := server.obey():
            order += done.items()
        assert order == [("gpu", "checkpoint"), ("old", "checkpoint"), ("young", "checkpoint")]

    def test_host_memory_is_made_before_more_of_it_is_taken(self):
        server = Server(parallel=1, memory_limit=10)
        server.kernel("gpu", on_gpu=True)
        server.now += 300
        server.kernels["full"] = {
            "kernel_name": "python3", "state": State.SUSPENDED, "last_activity": server.now, "resident": 20,
        }  # fmt: skip
        assert server.verbs() == {"full": "checkpoint"}

    def test_dropped_is_as_if_never_decided(self):
        server = Server()
        server.kernel()
        (action,) = server.decide(1800)
        server.policy.dropped(action)
        assert server.verbs() == {"k": "checkpoint"}

    def test_a_kernel_that_is_gone_is_forgotten(self):
        server = Server()
        server.kernel()
        (action,) = server.decide(1800)
        server.kernels.clear()
        server.decide()
        assert server.policy.failed(action, BROKEN, refused=False, now=server.now) is True
        server.decide()
        assert server.policy.outlook("k", server.now) is None
        assert server.policy.failed(action, BROKEN, refused=False, now=server.now) is False


class TestTrouble:
    def test_errors_wait_twice_as_long_each_time_and_are_news_once(self):
        server = Server(retry_after=100, longest_retry=500)
        server.kernel()
        assert server.fail(BROKEN, refused=False, after=1800) is True
        waits = []
        for _ in range(4):
            waited = 0
            while (news := server.fail(BROKEN, refused=False, after=50)) is None:
                waited += 50
            assert news is False
            waits.append(waited + 50)
        assert waits == [100, 200, 400, 500]

    def test_a_refusal_is_tried_again_at_a_steady_pace(self):
        server = Server(retry_after=100)
        server.kernel()
        assert server.fail(BUSY, refused=True, after=1800) is True
        for _ in range(3):
            assert server.verbs(99) == {}
            assert server.fail(BUSY, refused=True, after=1) is False

    def test_a_kernel_whose_checkpoint_is_refused_is_suspended_instead(self):
        server = Server(rule=Rule(suspend_after=3000, checkpoint_after=1800), retry_after=100)
        server.kernel(on_gpu=True)
        assert server.fail(BUSY, refused=True, after=1800) is True
        plan = server.policy.outlook("k", server.now)
        assert (plan["next"], plan["next_in_s"]) == ("suspend", 0)
        assert server.obey(1) == {"k": "suspend"}
        assert server.verbs(1) == {"k": "checkpoint"}

    def test_a_suspend_that_is_refused_too_is_tried_again_later(self):
        server = Server(rule=Rule(suspend_after=3000, checkpoint_after=1800), retry_after=100)
        server.kernel(on_gpu=True)
        server.fail(BUSY, refused=True, after=1800)
        assert server.fail(BUSY, refused=True, after=1) is False
        assert server.verbs(99) == {}
        assert server.verbs(1) == {"k": "checkpoint"}

    @pytest.mark.parametrize(
        ("error", "refused", "suspend_after", "on_gpu"),
        [(BROKEN, False, 3000, True), (BUSY, True, 0, True), (BUSY, True, 3000, False)],
        ids=["an error", "never to be suspended", "nothing on the GPU"],
    )
    def test_no_suspend_instead(self, error, refused, suspend_after, on_gpu):
        server = Server(rule=Rule(suspend_after=suspend_after, checkpoint_after=1800), retry_after=100)
        server.kernel(on_gpu=on_gpu)
        server.fail(error, refused=refused, after=1800)
        assert server.verbs(99) == {}
        assert server.verbs(101) == {"k": "checkpoint"}

    def test_another_error_is_news(self):
        server = Server(retry_after=100)
        server.kernel()
        assert server.fail(BUSY, refused=True, after=1800)
        assert server.fail(BROKEN, refused=False, after=100)

    def test_it_is_forgotten_once_the_kernel_is_used(self):
        server = Server(retry_after=1e6)
        server.kernel()
        server.fail(BUSY, refused=True, after=1800)
        server.now += 1
        server.change(last_activity=server.now)
        assert server.verbs(1799) == {}
        assert server.policy.outlook("k", server.now)["last_failure"] is None
        assert server.verbs(1) == {"k": "checkpoint"}

    def test_and_once_somebody_else_succeeded(self):
        server = Server(retry_after=1e6)
        server.kernel()
        server.fail(BUSY, refused=True, after=1800)
        server.change(state=State.CHECKPOINTED)
        server.decide()
        assert server.policy.outlook("k", server.now)["last_failure"] is None

    def test_and_once_it_succeeded(self):
        server = Server(retry_after=10)
        server.kernel()
        server.fail(BUSY, refused=True, after=1800)
        assert server.obey(10) == {"k": "checkpoint"}
        assert server.policy.outlook("k", server.now)["last_failure"] is None


class TestOutlook:
    def look(self, server: Server) -> dict:
        return server.policy.outlook("k", server.now)

    def test_of_an_idle_kernel(self):
        server = Server()
        server.kernel(on_gpu=True)
        server.decide(100)
        assert self.look(server) == {
            "idle_s": 100.0,
            "under_way": None,
            "next": "suspend",
            "next_in_s": 200.0,
            "imminent": False,
            "protected_s": 0.0,
            "last_failure": None,
        }

    def test_of_one_that_works(self):
        server = Server()
        server.kernel(working=True)
        server.decide(1000)
        answer = self.look(server)
        assert (answer["idle_s"], answer["next"], answer["next_in_s"]) == (0.0, "checkpoint", 1800.0)

    def test_of_one_that_leaves(self):
        server = Server()
        server.kernel()
        (action,) = server.decide(1800)
        assert action == Action("k", Verb.CHECKPOINT, "idle", 1800.0)
        assert self.look(server)["under_way"] == "checkpoint"

    def test_of_one_that_is_protected(self):
        server = Server()
        server.kernel(protected=7200.0)
        server.decide(1790)
        assert self.look(server)["next_in_s"] == self.look(server)["protected_s"] == 7200.0

    def test_of_one_that_refused(self):
        server = Server(retry_after=100)
        server.kernel()
        server.fail(BUSY, refused=True, after=1800)
        server.decide(30)
        answer = self.look(server)
        assert answer["next_in_s"] == 70.0
        assert answer["last_failure"] == {**BUSY, "refused": True, "times": 1, "retry_in_s": 70.0}

    def test_of_one_that_never_leaves(self):
        server = Server(rule=Rule(0, 0))
        server.kernel(on_gpu=True)
        answer = self.look(server)
        assert (answer["next"], answer["next_in_s"]) == (None, None)

    def test_its_end_is_imminent_within_the_notice_and_not_while_it_works_is_protected_or_leaves(self):
        server = Server(notice=60)
        server.kernel(on_gpu=True)
        imminent = []
        for after, facts in ((240, {}), (1, {}), (1, {"computing": True}), (250, {"computing": False}), (40, {})):
            server.change(**facts)
            server.decide(after)
            imminent.append(self.look(server)["imminent"])
        assert imminent == [False, True, False, True, True]
        server.change(protected=7200.0)
        server.decide()
        assert not self.look(server)["imminent"]
        server.change(protected=0.0)
        assert server.decide(10)
        assert (self.look(server)["under_way"], self.look(server)["imminent"]) == ("suspend", False)

    def test_one_that_is_kept_has_its_whole_time_again(self):
        server = Server()
        server.kernel(on_gpu=True)
        server.decide(299)
        server.policy.keep("k", server.now)
        assert (self.look(server)["idle_s"], self.look(server)["next_in_s"]) == (0.0, 300.0)
        assert server.obey(299) == {}
        assert server.obey(1) == {"k": "suspend"}
        server.policy.keep("nobody", server.now)
        assert server.policy.outlook("nobody", server.now) is None

    def test_of_an_unknown_one(self):
        assert Policy().outlook("k", 0.0) is None
