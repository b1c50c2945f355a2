"""Documents of the REST interface, without a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_gpu_ckpt.lifecycle.plans import State
from jupyter_gpu_ckpt.server.models import why_not


@pytest.mark.parametrize(("state", "said"), [(State.DEAD, "is being restarted"), (State.RUNNING, "started plainly")])
def test_a_kernel_that_is_being_restarted_was_not_started_plainly(state: State, said: str) -> None:
    provisioner: Any = SimpleNamespace(unfit=None, state=state)
    assert said in why_not(provisioner)
