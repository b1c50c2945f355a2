"""Find the variables with device memory, and release some of them.

The search changes nothing: it imports no GPU library that is not loaded, reads no property of a user's own class and
copies no value.  Memory that only a C extension, a closure, a generator or a module reaches is not found; it is the
difference to the libraries' own figures.
"""

from __future__ import annotations

import contextlib
import math
import re
import sys
import time
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

# Bounds of a search: more than a notebook has variables, less than a second.
_DEPTH, _ELEMENTS, _OBJECTS = 8, 10_000, 200_000

#: Device types of torch without device memory.
_HOST = ("cpu", "meta")

#: Names that IPython gives to results: they keep a tensor alive, but are not the user's variables.
_RESULTS = re.compile(r"_+|_\d+|_i+\d*|_dh|_oh|_ih|_exit_code")

#: Packages whose objects refer to the kernel itself, and so to every variable.
_MACHINERY = frozenset({"IPython", "ipykernel", "traitlets"})

_ATOMS = (
    *(str, bytes, bytearray, int, float, complex, bool, type(None), type, range, slice),
    *(types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.GeneratorType),
    *(types.CodeType, types.FrameType),
)


class Tensor(NamedTuple):
    """One array on a device.  ``name``: an expression for it; tensors with the same ``memory`` share that."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    device: str
    bytes: int
    memory: tuple[str, int]

    @property
    def variable(self) -> str:
        """The variable that ``name`` begins with."""
        return re.split(r"[.\[]", self.name, maxsplit=1)[0]


def tensors(namespace: Mapping[str, Any]) -> list[Tensor]:
    """Return every device tensor reachable from ``namespace``, the largest first.

    Tensors that share memory are one entry, with the shortest of their names.
    """
    found: dict[tuple[str, int], Tensor] = {}
    for variable, value in user_variables(namespace):
        for tensor in reachable(variable, value):
            known = found.get(tensor.memory)
            if known is None or len(tensor.name) < len(known.name):
                found[tensor.memory] = tensor
    return sorted(found.values(), key=lambda tensor: (-tensor.bytes, tensor.name))


def user_variables(namespace: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield names and values, without IPython's own but for its cache of results, which comes last."""
    for name, value in list(namespace.items()):
        if not _RESULTS.fullmatch(name) and name not in ("In", "Out"):
            yield name, value
    if "Out" in namespace:
        yield "Out", namespace["Out"]


def by_variable(namespace: Mapping[str, Any]) -> dict[str, dict[tuple[str, int], Tensor]]:
    """Return the device memory that each variable reaches; variables that reach none are left out."""
    found = {
        variable: {tensor.memory: tensor for tensor in reachable(variable, value)}
        for variable, value in user_variables(namespace)
    }
    return {variable: memories for variable, memories in found.items() if memories}


def reachable(name: str, value: Any) -> Iterator[Tensor]:
    """Yield the device tensors that ``value`` reaches, each once, named as seen from ``name``."""
    seen: set[int] = set()
    waiting = deque([(name, value, 0)])
    while waiting and len(seen) < _OBJECTS:
        name, value, depth = waiting.popleft()
        kind = type(value)
        if issubclass(kind, _ATOMS) or id(value) in seen or str(kind.__module__).partition(".")[0] in _MACHINERY:
            continue
        seen.add(id(value))
        with contextlib.suppress(Exception):  # a library in an unexpected state: its array is not in the table
            if (tensor := _tensor(name, value)) is not None:
                yield tensor
        if depth < _DEPTH:
            for index, (part, child) in enumerate(_children(value)):
                if index >= _ELEMENTS:
                    break
                waiting.append((name + part, child, depth + 1))


# -- arrays -----------------------------------------------------------------------------------------------------------


def _tensor(name: str, value: Any) -> Tensor | None:
    kind = type(value)
    if _is(value, "torch", "Tensor"):
        if value.device.type in _HOST:
            return None
        storage = value.untyped_storage()
        memory = str(value.device), int(storage.data_ptr())
        shape, dtype = tuple(map(int, value.shape)), str(value.dtype).rpartition(".")[2]
        return Tensor(name, _kind(kind), dtype, shape, str(value.device), int(storage.nbytes()), memory)
    if _is(value, "jax", "Array"):
        devices = sorted(str(device) for device in value.devices() if device.platform != "cpu")
        if not devices or value.is_deleted():
            return None
        shape, dtype = tuple(map(int, value.shape)), str(value.dtype)
        return Tensor(name, "jax.Array", dtype, shape, ", ".join(devices), int(value.nbytes), ("jax", id(value)))
    if hasattr(kind, "__cuda_array_interface__"):
        # "CUDA Array Interface" (Numba's documentation), version 2 and later: CuPy, Numba, RMM, cuDF columns.
        facts = value.__cuda_array_interface__
        shape, dtype = tuple(map(int, facts["shape"])), str(facts["typestr"])
        count = math.prod(shape, start=int(dtype[2:]))
        device = f"cuda:{value.device.id}" if _is(value, "cupy", "ndarray") else "cuda"
        memory = device, int(facts["data"][0])
        return Tensor(name, _kind(kind), str(getattr(value, "dtype", dtype)), shape, device, count, memory)
    return None


def _kind(kind: type) -> str:
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__}"


def _is(value: Any, module: str, name: str) -> bool:
    """Return whether ``value`` is of a class of a library, without importing that."""
    loaded = getattr(sys.modules.get(module), name, None)
    try:
        # Not isinstance: that asks the value's own __class__, which proxies compute.
        return isinstance(loaded, type) and issubclass(type(value), loaded)
    except TypeError:
        return False


# -- references -------------------------------------------------------------------------------------------------------


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    # Through the base classes' own methods, on a copy: a subclass's iteration is the user's code.
    kind = type(value)
    if issubclass(kind, dict):
        for key, child in list(dict.items(value)):
            yield f"[{_key(key)}]", child
            if not issubclass(type(key), _ATOMS):
                yield f"[{_key(key)}]", key
    elif issubclass(kind, (list, tuple, deque)):
        base: Any = next(base for base in (list, tuple, deque) if issubclass(kind, base))
        for index, child in enumerate(list(base.__iter__(value))):
            yield f"[{index}]", child
    elif issubclass(kind, (set, frozenset)):
        base = set if issubclass(kind, set) else frozenset
        for child in list(base.__iter__(value)):
            yield "[...]", child
    if _is(value, "torch", "Tensor"):
        # Reading it of a non-leaf makes torch warn.
        if value.is_leaf and value.grad is not None:
            yield ".grad", value.grad
        return
    attributes = _attributes(value)
    for part in ("_parameters", "_buffers", "_modules"):  # a torch.nn.Module resolves these by their plain names
        if isinstance(attributes.get(part), dict):
            for key, child in list(attributes.pop(part).items()):
                yield (f".{key}" if str(key).isidentifier() else f"[{key}]"), child
    for key, child in attributes.items():
        yield f".{key}", child


def _attributes(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    try:
        inner = object.__getattribute__(value, "__dict__")
        found.update(inner if isinstance(inner, dict) else {})
    except Exception:  # no __dict__, or one that is computed
        found.clear()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else tuple(slots):
            member = kind.__dict__.get(slot)
            if isinstance(member, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # not set
                    found.setdefault(slot, member.__get__(value, type(value)))
    return found


def _key(key: Any) -> str:
    return repr(key)[:40] if type(key) in (str, int, bool, float) else "..."


# -- release ----------------------------------------------------------------------------------------------------------


class ReleasedError(RuntimeError):
    """Raised on use of a variable that was released with a checkpoint."""


class Released:
    """Placeholder for a released variable; every use of it raises `ReleasedError`."""

    def __init__(self, name: str, what: str) -> None:
        self.__dict__.update(_name=name, _what=what, _at=time.strftime("%H:%M:%S"))

    def __repr__(self) -> str:
        return f"<{self._name}: released at {self._at}, was {self._what}; create it again>"

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # protocols that probe for methods must find none, not an error
            raise AttributeError(attribute)
        raise ReleasedError(self._why())

    def _why(self) -> str:
        return (
            f"`{self._name}` was released by %gpu_checkpoint at {self._at} instead of being saved. "
            f"It was {self._what}. Create it again."
        )

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        """Called from torch's functions when one of these is an argument."""
        for argument in [*arguments, *(options or {}).values()]:
            if isinstance(argument, cls):
                raise ReleasedError(argument._why())
        raise ReleasedError("A variable that was released by %gpu_checkpoint was used. Create it again.")


def _raising(self: Any, *_: Any, **__: Any) -> Any:
    raise ReleasedError(self._why())


for _operator in (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow", "lshift", "rshift"),
    *("and", "or", "xor"),
):
    for _form in ("", "r", "i"):
        setattr(Released, f"__{_form}{_operator}__", _raising)
for _operator in (
    *("neg", "pos", "abs", "invert", "bool", "int", "float", "index", "len", "iter", "getitem", "setitem", "delitem"),
    *("contains", "call", "enter", "lt", "le", "gt", "ge", "array", "setattr", "delattr"),
):
    setattr(Released, f"__{_operator}__", _raising)


def release(shell: Any, names: list[str]) -> dict[str, int]:
    """Replace each variable by a `Released`, and drop IPython's own references to its memory.

    Returns bytes by variable.  Memory that another variable reaches, too, stays and is not counted.
    """
    namespace = shell.user_ns
    found = by_variable(namespace)
    kept = {memory for variable, memories in found.items() if variable not in (*names, "Out") for memory in memories}
    doomed: set[tuple[str, int]] = set()
    freed = {}
    for name in names:
        if name not in found:
            continue  # deleted since, or released before
        memories = found[name]
        freed[name] = sum(tensor.bytes for memory, tensor in memories.items() if memory not in {*kept, *doomed})
        doomed.update(memory for memory in memories if memory not in kept)
        namespace[name] = Released(name, describe(namespace[name], memories))
    _forget_results(shell, doomed)
    return freed


def describe(value: Any, memories: Mapping[tuple[str, int], Tensor]) -> str:
    """Describe a variable for the user, who may have to create it again."""
    together = human(sum(tensor.bytes for tensor in memories.values()))
    only = next(iter(memories.values()))
    if len(memories) == 1 and "." not in only.name and "[" not in only.name:
        return f"a {only.kind} {only.dtype} {list(only.shape)} on {only.device} ({together})"
    return f"a {_kind(type(value))} with {len(memories)} device tensors ({together})"


def _forget_results(shell: Any, doomed: set[tuple[str, int]]) -> None:
    """Drop results: IPython keeps them as ``Out[n]``, ``_n`` and ``_``, the latter two also among its hidden names."""

    def refers(value: Any) -> bool:
        return any(tensor.memory in doomed for tensor in reachable("", value))

    hook = shell.displayhook
    for name in ("_", "__", "___"):
        if refers(getattr(hook, name, None)):
            setattr(hook, name, "")
        if refers(shell.user_ns.get(name)):
            shell.user_ns[name] = ""
    hidden = getattr(shell, "user_ns_hidden", {})  # variables pushed with interactive=False, as results are
    for space in (shell.user_ns, hidden, shell.user_ns.get("Out", {})):
        for key, value in list(space.items()):
            if (isinstance(key, int) or _RESULTS.fullmatch(key)) and key not in ("_oh", "_ih", "_dh") and refers(value):
                del space[key]
    last = getattr(shell, "last_execution_result", None)
    if last is not None and refers(last.result):
        last.result = None


def human(count: float) -> str:
    """Format bytes as `jupyter_gpu_ckpt.units.size` does, which not every kernel can import."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1023.95:  # else it would be written as 1024.0
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
