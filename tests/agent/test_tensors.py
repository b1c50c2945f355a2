"""Variables that reference device memory: CPU tensors treated as device tensors, and the CUDA array interface."""

from __future__ import annotations

import sys
import types
from collections import deque
from typing import Any

import pytest

from jupyter_gpu_ckpt.agent import tensors


class Array:
    """Stands for a CuPy, Numba or RMM array: anything with a ``__cuda_array_interface__``."""

    def __init__(self, address: int, count: int = 1024) -> None:
        self.address, self.count = address, count

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.count,), "typestr": "<f4", "data": (self.address, False), "version": 3}


def names(**namespace: Any) -> list[str]:
    return [tensor.name for tensor in tensors.tensors(namespace)]


def shell(**namespace: Any) -> Any:
    """The part of IPython's shell that `release` needs."""
    hook = types.SimpleNamespace(_=None, __=None, ___=None)
    return types.SimpleNamespace(user_ns={"Out": {}, **namespace}, displayhook=hook, last_execution_result=None)


def test_nothing_is_imported_and_nothing_found_in_ordinary_things() -> None:
    before = set(sys.modules)
    assert names(a=1, b="x" * 100, c=[1, {2: (3,)}], d=object(), e=sys, f=print, g=Array) == []
    assert set(sys.modules) - before == set()


def test_containers_and_objects_are_named_as_one_would_write_them() -> None:
    class Trainer:
        pass

    class Slotted:
        __slots__ = ("grid", "unset")

    trainer, slotted = Trainer(), Slotted()
    trainer.best, slotted.grid = {"loss": Array(5)}, Array(6)  # type: ignore[attr-defined]
    found = names(
        x=Array(1), batches=[0, Array(2)], by_name={"a": Array(3)}, queue=deque([Array(4)]), t=trainer, s=slotted
    )
    assert sorted(found) == ["batches[1]", "by_name['a']", "queue[0]", "s.grid", "t.best['loss']", "x"]


def test_a_memory_is_counted_once_under_its_shortest_name() -> None:
    one = Array(1)
    found = tensors.tensors({"everything": [one], "x": one, "same_place": Array(1)})
    assert [(tensor.name, tensor.bytes) for tensor in found] == [("x", 4096)]


def test_what_leads_to_the_kernel_itself_does_not_lead_to_every_variable() -> None:
    from IPython.core.autocall import ExitAutocall

    exit = ExitAutocall()
    exit._ip = types.SimpleNamespace(user_ns={"x": Array(1)})
    assert names(exit=exit) == []


def test_results_that_ipython_keeps_are_found_under_out() -> None:
    assert names(_=Array(1), _3=Array(1), Out={3: Array(1)}) == ["Out[3]"]


def test_cycles_depth_and_code_of_the_users_end_nowhere_bad() -> None:
    class Trap:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError("the user's code was run")

        def __iter__(self) -> Any:
            raise AssertionError("the user's code was run")

        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise AssertionError("the user's code was run")

        @property
        def __class__(self) -> Any:  # type: ignore[override]
            raise AssertionError("the user's code was run")

    class Broken:
        @property
        def __cuda_array_interface__(self) -> Any:
            raise RuntimeError("freed")

    cycle: list[Any] = [Array(1)]
    cycle.append(cycle)
    deep: Any = Array(2)
    for _ in range(100):
        deep = [deep]
    assert names(cycle=cycle, deep=deep, trap=Trap(), broken=Broken()) == ["cycle[0]"]


@pytest.mark.slow  # imports torch
def test_modules_optimizers_gradients_and_views_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="torch is missing: make test installs it")
    monkeypatch.setattr(tensors, "_HOST", ("meta",))  # CPU tensors stand for device tensors
    model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    whole = torch.zeros(1024)
    found = names(model=model, optimizer=optimizer, whole=whole, part=whole[3:5], nowhere=torch.empty(9, device="meta"))
    assert found[0] == "part"
    assert {"model[0].weight", "model[0].bias", "model[0].weight.grad", "optimizer.state[...]['exp_avg']"} <= set(found)
    assert "nowhere" not in found and "whole" not in found  # the same memory as `part`
    (largest, *_) = tensors.tensors({"whole": whole, "part": whole[3:5]})
    assert largest.bytes == 4096


def test_a_released_variable_says_what_it_was_whatever_is_done_with_it() -> None:
    world = shell(x=Array(1))
    assert tensors.release(world, ["x"]) == {"x": 4096}
    x = world.user_ns["x"]
    assert "was a test_tensors.Array <f4 [1024] on cuda (4.0 KiB)" in repr(x)
    for use in (
        lambda: x + 1,
        lambda: 1 @ x,
        lambda: x[0],
        lambda: x.shape,
        lambda: len(x),
        lambda: x(),
        lambda: bool(x),
    ):
        with pytest.raises(tensors.ReleasedError, match="`x` was released by %gpu_checkpoint"):
            use()
    assert not hasattr(x, "_repr_html_")


def test_torchs_functions_name_the_released_variable() -> None:
    torch = pytest.importorskip("torch", reason="torch is missing: make test installs it")
    world = shell(x=Array(1))
    tensors.release(world, ["x"])
    with pytest.raises(tensors.ReleasedError, match="`x`"):
        torch.add(torch.ones(1), world.user_ns["x"])


def test_release_reaches_ipythons_results_but_no_other_variable() -> None:
    one, two = Array(1), Array(2)
    world = shell(x=one, y=two, alias=two, _3=one, _=one, Out={3: one, 4: [one], 5: two})
    world.user_ns_hidden = {"_3": one, "_": one, "_5": two}
    world.displayhook._, world.last_execution_result = one, types.SimpleNamespace(result=one)
    assert tensors.release(world, ["x", "y", "gone"]) == {"x": 4096, "y": 0}  # `alias` still holds the second
    assert world.user_ns["alias"] is two and world.user_ns["Out"] == {5: two}
    assert world.user_ns_hidden == {"_5": two}
    assert "_3" not in world.user_ns and world.user_ns["_"] == "" and world.displayhook._ == ""
    assert world.last_execution_result.result is None


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 40, "5.0 TiB")])
def test_sizes_for_people(count: int, text: str) -> None:
    assert tensors.human(count) == text
