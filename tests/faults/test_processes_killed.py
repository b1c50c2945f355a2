"""SIGKILL of the kernel, of its capsule's init and of CRIU at every step of a save and of going back, awake and asleep.

Afterwards the kernel runs or sleeps with its values, or there is a save point that has them, to which it goes back.
(The server: test_killed.py; a branch: test_branching_killed.py.)
"""

from __future__ import annotations

import pytest
from faulty import Subject
from killing import (
    CHECKPOINT,
    COUNTS,
    RESTORE,
    RESTORED,
    SAVE,
    VALUES,
    Killing,
    Point,
    Remains,
    failing,
    moments,
    new,
    present,
)

_BACK, _RESTORE = [*moments(CHECKPOINT), *moments(RESTORE)], moments(RESTORE)
_PRESENT = _BACK[: _BACK.index(("end_process", "completed"))]
#: Beside the present processes those of the save point are restored from then on.
_AHEAD = ("quiesce", "completed")
#: What CRIU has written is the kernel, whatever becomes of its process.
_DUMPED = moments(SAVE)[moments(SAVE).index(("dump", "completed")) :]
POINTS: list[tuple[str, Point]] = [
    *(("save", point) for point in present(moments(SAVE))),
    *(("back", point) for point in present(_PRESENT)),
    *(("back", point) for point in new(_BACK, _AHEAD, _AHEAD, "quiesce")),
    *(("back asleep", point) for point in new(_RESTORE, *RESTORED)),
]


def test_every_step_is_a_point():
    steps = {(verb, step, edge) for verb, (step, edge, *_) in POINTS if edge in ("started", "completed")}
    # Of a kernel that sleeps nothing is there as its image begins to be matched.
    assert len(steps) == 28 + 36 + 17


async def running_now(subject: Subject) -> None:
    """Have a kernel run that counts, in which ``x`` is ``now``, and whose only save point, ``then``, has another."""
    kernel = subject.kernel
    await kernel.provisioner.poll()
    if kernel.state != "running":  # the last case has failed
        await kernel.manager.restart_kernel(now=True)
        await kernel.client.wait_for_ready(timeout=60)
    for image in kernel.lifecycle.engine.store.images():
        kernel.lifecycle.engine.store.remove(image)
    if await subject.run("print('count' in globals())") == "False":
        await subject.run(COUNTS)
    await subject.run("x = 'then'")
    await subject.provisioner.save("then")
    await subject.run("x = 'now'")


@pytest.mark.sweep(1 / 24)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("verb", "point"), POINTS, ids=[" ".join((verb, *point)) for verb, point in POINTS])
async def test_a_process_killed_at_any_step(shared, verb, point):
    await running_now(shared)
    kernel, provisioner, (_, _, which, who) = shared.kernel, shared.provisioner, point
    if verb == "back asleep":
        await provisioner.checkpoint()
    remains, killing = Remains(shared), Killing.of(kernel)
    with killing.at(provisioner.sinks, point):
        error = await failing(provisioner.save("new") if verb == "save" else provisioner.back("then"))
    await killing.done(kernel)

    points = await remains.save_points()
    if kernel.state == "dead":
        assert who != "criu"
        dumped = which == "new" or (verb == "save" and point[:2] in _DUMPED)
        assert len(points) == 1 + dumped, "the present state is lost"
        await kernel.manager.restart_kernel(now=True)
        await kernel.client.wait_for_ready(timeout=60)
        assert await shared.run("print('x' in globals())") == "False"
    else:
        assert await shared.run(VALUES) == ("then" if verb != "save" and error is None else "now")
        await kernel.settled("running")
    assert error is not None or len(points) == 2, "it was not kept"
    for name in points:
        await provisioner.back(name)
        assert await shared.run(VALUES) == ("then" if name == "then" else "now"), name
    await remains.save_points()
