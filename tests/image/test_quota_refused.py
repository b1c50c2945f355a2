"""A real kernel whose checkpoint would exceed a quota: it keeps running, and nothing is on disk."""

from __future__ import annotations

import pytest
from harness import notebook

from jupyter_gpu_ckpt.errors import QuotaExceeded
from jupyter_gpu_ckpt.lifecycle import suspend


async def test_a_kernel_over_the_quota_runs_on(tmp_path, runtime_base, criu_binary):
    async with notebook(tmp_path, runtime_base, image_quota=1 << 20) as kernel:
        await kernel.run("x = 41")
        with pytest.raises(QuotaExceeded) as caught:
            await kernel.provisioner.checkpoint()
        assert caught.value.left == "the kernel runs on"
        assert caught.value.details["allowed"] == 1 << 20 < caught.value.details["needed"]
        assert [step for step, _ in kernel.steps.seconds().items()] == []
        assert [path.name for path in (tmp_path / "images").iterdir()] == []
        findings = suspend.findings(kernel.lifecycle.kernel)
        assert [finding.code for finding in findings if finding.blocks] == ["QUOTA_EXCEEDED"]
        assert await kernel.run("print(x + 1)") == "42"


async def test_the_second_sleeper_is_refused_and_the_first_is_left_alone(tmp_path, runtime_base, criu_binary):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    everything = {"sleeping_quota": 1, "image_dir": str(tmp_path / "images")}
    async with notebook(tmp_path / "one", runtime_base, **everything) as first:
        await first.run("x = 41")
        image = await first.provisioner.checkpoint()
        async with notebook(tmp_path / "two", runtime_base, **everything) as second:
            with pytest.raises(QuotaExceeded, match="no more than 1"):
                await second.provisioner.checkpoint()
            assert await second.run("print(1)") == "1"
            assert [path.name for path in (tmp_path / "images").iterdir() if path.is_dir()] == [image.id]
            assert await first.run("print(x + 1)") == "42"
            await first.settled("running")
            await second.provisioner.checkpoint()  # there is space again
            assert await second.run("print(2)") == "2"


async def test_what_grew_between_preflight_and_dump_is_refused_before_criu_runs(
    tmp_path, runtime_base, criu_binary, monkeypatch
):
    """The limit is asked twice: once for the user to know at once, once under a lock."""
    async with notebook(tmp_path, runtime_base, image_quota=1 << 20) as kernel:
        await kernel.run("x = 41")
        store = kernel.lifecycle.engine.store
        monkeypatch.setattr(store, "over_quota", lambda kernel_id, needed: None)
        monkeypatch.setattr(kernel.lifecycle.engine.criu, "dump", lambda *_, **__: pytest.fail("CRIU ran"))
        with pytest.raises(QuotaExceeded):
            await kernel.provisioner.checkpoint()
        assert [path.name for path in (tmp_path / "images").iterdir() if path.is_dir()] == []
        assert await kernel.run("print(x + 1)") == "42"
