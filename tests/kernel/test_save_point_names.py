"""Names of save points come from users and programs: what nobody can read or write is refused, and hurts nothing."""

from __future__ import annotations

import pytest

from jupyter_gpu_ckpt.errors import BadRequest
from jupyter_gpu_ckpt.lifecycle import lifecycle


async def test_a_name_that_cannot_be_read_is_refused_and_one_of_an_earlier_release_is_listed(kernel, monkeypatch):
    for name in ("\ud800", "\u202eevil"):
        with pytest.raises(BadRequest):
            await kernel.provisioner.save(name)
        magic = f"""
try: get_ipython().run_line_magic("gpu_checkpoint", "--save " + {name!a})
except Exception as error: print(error)"""
        assert "no slashes, control or format characters" in await kernel.run(magic)
    with monkeypatch.context() as earlier:
        earlier.setattr(lifecycle, "require_free_name", lambda *_: None)
        for name in ("\ud800", "\u202eevil", "plain"):
            await kernel.provisioner.save(name)
    printed = await kernel.run("%gpu_checkpoint --saves")
    assert [line.split()[0] for line in printed.splitlines()[1:]] == ["\\ud800", "\\u202eevil", "plain"]
