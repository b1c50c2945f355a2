"""The state machine alone: no I/O, every edge."""

from __future__ import annotations

import itertools
import random

import pytest

from jupyter_gpu_ckpt.errors import StateError
from jupyter_gpu_ckpt.lifecycle import plans
from jupyter_gpu_ckpt.lifecycle.plans import MachineState, Move, State, Step, advance

RUNNING = advance(MachineState(), plans.ProcessEvent.LAUNCHED)[0]


def run(
    kernel: MachineState, event: plans.Event, fail_at: Step | None = None, undo_fails: tuple[Step, ...] = ()
) -> MachineState:
    """Drive one verb to its end as the lifecycle does; ``fail_at`` fails, and so do ``undo_fails`` while unwinding."""
    kernel, steps = advance(kernel, event)
    while steps or kernel.unwinding:
        if kernel.unwinding:
            failed = tuple(step for step in steps if step in undo_fails)
            kernel, steps = advance(kernel, plans.Unwound(failed))
        elif steps[0] is fail_at:
            kernel, steps = advance(kernel, plans.StepFailed(steps[0], "TEST"))
        else:
            kernel, steps = advance(kernel, plans.StepDone(steps[0]))
    return kernel


def at(state: State) -> MachineState:
    """A kernel that came to ``state`` on the straight way."""
    return {
        State.RUNNING: RUNNING,
        State.SUSPENDED: run(RUNNING, Move.SUSPEND),
        State.OFF_GPU: run(RUNNING, Move.YIELD),
        State.CHECKPOINTED: run(RUNNING, Move.CHECKPOINT),
    }[state]


@pytest.mark.parametrize(
    ("start", "verb", "goal"),
    [
        (State.RUNNING, Move.SUSPEND, State.SUSPENDED),
        (State.RUNNING, Move.YIELD, State.OFF_GPU),
        (State.RUNNING, Move.CHECKPOINT, State.CHECKPOINTED),
        (State.RUNNING, Move.SAVE, State.RUNNING),
        (State.SUSPENDED, Move.SAVE, State.SUSPENDED),
        (State.SUSPENDED, Move.CHECKPOINT, State.CHECKPOINTED),
        (State.SUSPENDED, Move.RESUME, State.RUNNING),
        (State.SUSPENDED, Move.WAKE, State.RUNNING),
        (State.OFF_GPU, Move.SUSPEND, State.SUSPENDED),
        (State.OFF_GPU, Move.CHECKPOINT, State.CHECKPOINTED),
        (State.OFF_GPU, Move.RESUME, State.RUNNING),
        (State.OFF_GPU, Move.WAKE, State.RUNNING),
        (State.CHECKPOINTED, Move.RESTORE, State.RUNNING),
        (State.CHECKPOINTED, Move.WAKE, State.RUNNING),
    ],
)
def test_every_verb_reaches_its_state(start, verb, goal):
    assert run(at(start), verb).state is goal


@pytest.mark.parametrize(("start", "verb"), [key for key, plan in plans.PLANS.items() if plan is None])
def test_a_verb_whose_goal_is_reached_does_nothing(start, verb):
    kernel, steps = advance(at(start), verb)
    assert (kernel.state, steps) == (start, ())


@pytest.mark.parametrize(
    ("start", "verb", "step"),
    [(start, verb, step) for (start, verb), plan in plans.PLANS.items() if plan for step in plan.steps],
)
def test_whatever_step_fails_the_kernel_ends_in_a_named_state_with_process_or_image(start, verb, step):
    before = at(start)
    after = run(before, verb, fail_at=step)
    plan = plans.PLANS[(start, verb)]
    committed = plan.commit is not None and plan.steps.index(step) > plan.steps.index(plan.commit)
    assert after.state is (plan.to if committed else plan.back)
    assert after.plan is None
    assert after.process or after.image
    if not committed:
        assert (after.process, after.image) == (before.process, before.image)


def test_undo_runs_backwards_over_what_was_done():
    kernel, steps = advance(RUNNING, Move.CHECKPOINT)
    while steps[0] is not Step.PUBLISH:
        kernel, steps = advance(kernel, plans.StepDone(steps[0]))
    kernel, undo = advance(kernel, plans.StepFailed(Step.PUBLISH, "NO_SPACE"))
    assert undo == (Step.CONTINUE, Step.CONNECT, Step.CUDA_RESUME, Step.THAW, Step.RELEASE)


def test_an_undo_without_free_gpu_memory_leaves_the_kernel_suspended():
    after = run(RUNNING, Move.CHECKPOINT, fail_at=Step.DUMP, undo_fails=(Step.CUDA_RESUME,))
    assert (after.state, after.process) == (State.SUSPENDED, True)
    assert run(after, Move.WAKE).state is State.RUNNING


def test_a_kernel_that_has_yielded_its_gpu_and_gets_none_back_in_an_undo_runs_on_without():
    kernel, steps = advance(RUNNING, Move.YIELD)
    kernel, _ = advance(kernel, plans.StepDone(steps[0]))
    kernel, undo = advance(kernel, plans.StepFailed(Step.CUDA_SUSPEND, "TEST", done=True))
    assert undo == (Step.CUDA_RESUME,), "no step asks anything of a kernel in the middle of a cell"
    assert advance(kernel, plans.Unwound((Step.CUDA_RESUME,)))[0].state is State.OFF_GPU


@pytest.mark.parametrize("verb", Move)
@pytest.mark.parametrize("state", [State.STARTING, State.DEAD])
def test_illegal_requests_raise_with_the_whole_history(state, verb):
    kernel = MachineState() if state is State.STARTING else advance(RUNNING, plans.ProcessEvent.EXITED)[0]
    with pytest.raises(StateError) as caught:
        advance(kernel, verb)
    assert str(verb) in caught.value.details["history"][-1]
    assert caught.value.details["state"] == state.value


def test_steps_out_of_order_are_illegal():
    kernel, _ = advance(RUNNING, Move.CHECKPOINT)
    with pytest.raises(StateError):
        advance(kernel, plans.StepDone(Step.DUMP))
    with pytest.raises(StateError):
        advance(kernel, plans.Unwound())
    with pytest.raises(StateError):
        advance(kernel, Move.SUSPEND)


def test_a_checkpointed_kernel_has_no_process_that_could_exit():
    with pytest.raises(StateError):
        advance(at(State.CHECKPOINTED), plans.ProcessEvent.EXITED)


@pytest.mark.parametrize("state", [State.RUNNING, State.SUSPENDED, State.OFF_GPU, State.CHECKPOINTED])
def test_an_owner_may_end_a_kernel_in_every_resting_state_and_start_it_again(state):
    dead, _ = advance(at(state), plans.ProcessEvent.TERMINATED)
    assert dead.state is State.DEAD
    assert advance(dead, plans.ProcessEvent.LAUNCHED)[0].state is State.RUNNING


def test_every_step_that_a_plan_can_undo_has_an_undo_that_is_no_step_of_its_own_undo():
    for done, undo in plans.UNDO.items():
        assert done is not undo
    used = set(itertools.chain(*(plan.steps for plan in plans.PLANS.values() if plan), plans.UNDO.values()))
    assert used == set(Step), "a step nobody runs"


@pytest.mark.parametrize("seed", range(50))
def test_random_walks_end_with_a_running_kernel_or_an_image(seed):
    """Any verb in any resting state, any step failing: never without process and image, never stuck."""
    chance = random.Random(seed)
    kernel = RUNNING
    for _ in range(60):
        verb = chance.choice([*Move])
        if (kernel.state, verb) not in plans.PLANS:
            with pytest.raises(StateError):
                advance(kernel, verb)
            continue
        fail_at = chance.choice([None, *Step])
        undo_fails = tuple(step for step in Step if chance.random() < 0.2)
        kernel = run(kernel, verb, fail_at, undo_fails)
        assert kernel.plan is None
        assert kernel.state in (State.RUNNING, State.SUSPENDED, State.OFF_GPU, State.CHECKPOINTED)
        assert kernel.process or kernel.image
