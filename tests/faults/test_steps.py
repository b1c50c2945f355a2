"""Every step of every verb fails once, just before and just after its work: the guarantees hold each time.

The fault comes through the trace (`Trace.faults`): it makes the step fail without touching the code under test.
"""

from __future__ import annotations

import pytest
from family import alone_and_with_family

from jupyter_gpu_ckpt.errors import GpuCkptError
from jupyter_gpu_ckpt.lifecycle import plans
from jupyter_gpu_ckpt.lifecycle.plans import State

#: The verbs that bring a running kernel to where a request starts.
WAY = {State.RUNNING: "restore", State.SUSPENDED: "suspend", State.CHECKPOINTED: "checkpoint"}

CASES = [
    pytest.param(start, request, step, edge, id=f"{start.value}-{request.value}-{step.value}-{edge}")
    for (start, request), plan in plans.PLANS.items()
    # Off the GPU are only kernels with CUDA: `test_off_gpu`.
    if plan is not None and request is not plans.Move.WAKE and State.OFF_GPU not in (start, plan.to)
    for step in plan.steps
    for edge in ("started", "completed")
]

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Injected(Exception):
    """The fault."""


@pytest.mark.sweep(1 / 9)
@alone_and_with_family("shared")
@pytest.mark.parametrize(("start", "request_", "step", "edge"), CASES)
async def test_the_kernel_runs_or_an_image_is_kept_whatever_step_fails(shared, start, request_, step, edge):
    provisioner, lifecycle = shared.provisioner, shared.kernel.lifecycle
    if shared.kernel.state != "running":
        await provisioner.restore() if shared.kernel.state == "checkpointed" else await provisioner.resume()
    await getattr(provisioner, WAY[start])()
    assert shared.kernel.state == start.value
    pending = [True]

    def fault(event) -> None:
        if pending and (event.kind, event.step) == (edge, step.value):
            pending.clear()
            raise Injected

    verb = getattr(provisioner, request_.value)
    saves = request_ is plans.Move.SAVE
    provisioner.faults.append(fault)
    try:
        await (verb("point") if saves else verb())
        reached = True
    except GpuCkptError as error:
        reached = False
        assert error.code == "INTERNAL"
        assert "Injected" in error.message
        assert error.left
    finally:
        provisioner.faults.remove(fault)
    assert not pending, "the step was not run"

    plan = plans.PLANS[start, request_]
    assert lifecycle.state is (plan.to if reached else plan.back)
    for point in lifecycle.engine.store.images() if saves else ():
        assert reached, "it is there although the save failed"
        lifecycle.engine.store.check(point)
        lifecycle.engine.store.remove(point)
    images = [path for path in shared.images.iterdir() if path.is_dir()] if shared.images.exists() else []
    assert bool(lifecycle.capsule) != bool(images), "a process or an image, and never both"
    assert await provisioner.poll() is None
    shared.send()
    assert await shared.run("print(x)") == "41"
    await shared.kernel.settled("running")
    await shared.everything_sent_ran_once()
    if not reached and (start, request_) == (State.RUNNING, plans.Move.CHECKPOINT):
        await shared.leaves_and_wakes()
