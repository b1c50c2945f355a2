"""Starting a kernel where its capsule does not live to see it."""

from __future__ import annotations

import pytest
from harness import notebook

from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.errors import CapsuleError, CapsuleGone


async def test_a_capsule_that_dies_at_the_start_is_no_reason_for_a_plain_kernel(
    tmp_path, runtime_base, criu_binary, monkeypatch, caplog
):
    """The host is fit: the start fails with the reason, and the next start has a capsule."""
    spawn, made = Capsule.spawn, []

    def killed(self, *arguments):
        made.append(self)
        self.close()
        spawn(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Capsule, "spawn", killed)
        with pytest.raises(CapsuleGone):
            async with notebook(tmp_path, runtime_base):
                pass
    assert len(made) == 1
    assert "started plainly" not in caplog.text
    async with notebook(tmp_path, runtime_base) as kernel:
        assert kernel.lifecycle is not None
        assert await kernel.run("print(6 * 7)") == "42"


async def test_a_host_without_namespaces_gets_a_plain_kernel(tmp_path, runtime_base, criu_binary, monkeypatch):
    def refused(*_, **__):
        raise CapsuleError("The namespaces of the capsule could not be made: Operation not permitted")

    monkeypatch.setattr(Capsule, "create", refused)
    async with notebook(tmp_path, runtime_base) as kernel:
        assert kernel.lifecycle is None
        assert await kernel.run("print(6 * 7)") == "42"
