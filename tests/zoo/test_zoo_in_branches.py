"""Kinds of process state in a branch: each is there as it was, or its difference was named before."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import branch_of
from keeper import Zoo, outside, packs
from keeping import sample
from kinds import all_kinds

from jupyter_gpu_ckpt.kernel import branching

KINDS = all_kinds()
SHARED, _ = packs([kind for kind in KINDS.values() if not kind.lacking()], "root")
QUICK = [key for pack in SHARED for key in pack if key in sample(KINDS)]
#: What a branch shows otherwise, as docs/branches.md says of all branches.
DOCUMENTED = {
    "files.deleted_other_name": "the number of a file's names, one of which belongs to the image",
    "children.sigchld_of_stops": "a SIGCHLD without an ended child, as after a wake",
    "notebooks.history": "the number of the session in IPython's history",
    "notebooks.connection": "the kernel's connection",
}
CASES = [
    pytest.param(QUICK, id="sample"),
    *(pytest.param(pack, id=f"pack{number}", marks=pytest.mark.torture) for number, pack in enumerate(SHARED)),
]


async def in_a_branch(directory: Path, keys: list[str]) -> tuple[dict[str, str], list[str]]:
    """Make kinds in a kernel and show them in a branch of it: those that show otherwise, and what was named before."""
    async with Zoo.opened(directory) as zoo:
        before, failed = await zoo.made(keys)
        assert before, failed
        image = await zoo.kernel.provisioner.checkpoint()
        plan = branching.plan(zoo.kernel.lifecycle.engine.store, image)
        named = [each.what for each in plan.differs] + plan.unsafe
        if plan.unsafe:
            return dict.fromkeys(before, "refused"), named
        how = {"accept_differences": True, "accept_changed_files": True}
        async with branch_of(image.id, zoo.kernel, directory / "branch", **how) as kernel:
            branch = Zoo(kernel)
            changed = {each.key: each.text for each in await branch.differences(before, "in the branch")}
            await branch.undone(list(before))
            return changed, named


@pytest.mark.timeout(900)
@pytest.mark.parametrize("keys", CASES)
async def test_a_kind_is_as_it_was_in_a_branch_or_its_difference_was_named(tmp_path, criu_binary, keys):
    with outside(tmp_path):
        changed, _ = await in_a_branch(tmp_path / "all", keys)
        unnamed = {}
        for number, key in enumerate(changed):
            alone, named = await in_a_branch(tmp_path / f"alone{number}", [key])
            if alone and not named and key not in DOCUMENTED:
                unnamed |= alone
    assert unnamed == {}
