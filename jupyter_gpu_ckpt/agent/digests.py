"""Digests of variables, by which two save points show which of them differ.

A digest is of content and type; its key never leaves the kernel's memory, so nobody can guess a value by its digest.
No code of the user is run: their classes are read like the containers of Python, by their own dictionaries.  What
cannot be read so (an object of an extension module, a generator) has no digest, nor has what would take too long.

Of a tensor of PyTorch the content is not read: it may be on a GPU, and another thread may free it meanwhile.  PyTorch
counts what is written to a tensor in place.  Another count, or another address, is a change; an equal one proves
nothing, for writes by ``.data`` and by other libraries are not counted: such a digest is *weak*.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any

#: Of the kernel and its save points, which bring it back.
_KEY = os.urandom(16)
#: Bytes that are read at a time, and the elements of a container, before the time is measured again.
_STEP = 256 << 10
_ELEMENTS = 256
#: The longest container that is copied to be read: another thread may change it meanwhile.
_LONGEST = 1_000_000
_DEPTH = 20
#: Bytes of an object that has nothing but its dictionary (and weak references), in any release of Python.
_PLAIN = 32
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_ORDERED, _UNORDERED = (list, tuple, deque), (set, frozenset)
_DICTIONARIES = (dict, OrderedDict, defaultdict)


class Undigested(Exception):
    """Raised for a value that has no digest."""


class Digests:
    """Digests of several variables, in at most so many seconds of this thread's time together."""

    def __init__(self, seconds: float) -> None:
        self._until = time.thread_time() + seconds

    def of(self, value: Any) -> dict[str, Any]:
        """Return ``digest``, in hex, and ``weak``, whether an equal one proves nothing; neither where there is none."""
        with contextlib.suppress(Exception):  # also of a library in an unexpected state
            reading = _Reading(self._until)
            return {"digest": reading.digest(value).hex(), **({"weak": True} if reading.is_weak else {})}
        return {}


class _Reading:
    """The reading of one variable."""

    def __init__(self, until: float) -> None:
        self.is_weak = False
        self._until = until
        #: Ids of the containers that the present value is in, from the outermost one.
        self._around: list[int] = []

    def digest(self, value: Any) -> bytes:
        """Return the digest of a value.  Raises `Undigested`."""
        hasher = hashlib.blake2b(key=_KEY, digest_size=8)
        self._feed(hasher, value)
        return hasher.digest()

    def _feed(self, hasher: Any, value: Any) -> None:
        kind = type(value)
        hasher.update(f"{kind.__module__}.{kind.__qualname__}:".encode())
        if value is None or kind in (bool, int, float, complex, range, slice, type(...)):
            hasher.update(repr(value).encode() if kind is not int else _of_integer(value))
        elif kind is str:
            self._feed_bytes(hasher, value.encode("utf-8", "surrogatepass"))
        elif kind in (bytes, bytearray):
            self._feed_bytes(hasher, bytes(value))
        elif kind in (*_ORDERED, *_UNORDERED, *_DICTIONARIES) or _is_plain(kind):
            self._feed_container(hasher, value)
        else:
            self._feed_array(hasher, value)

    def _feed_bytes(self, hasher: Any, content: Any) -> None:
        hasher.update(b"%d:" % len(content))
        for at in range(0, len(content), _STEP):
            self._check_time()
            hasher.update(content[at : at + _STEP])

    def _check_time(self) -> None:
        if time.thread_time() > self._until:
            raise Undigested

    def _feed_container(self, hasher: Any, value: Any) -> None:
        if id(value) in self._around:
            hasher.update(b"around %d" % self._around.index(id(value)))
            return
        if len(self._around) >= _DEPTH:
            raise Undigested
        self._around.append(id(value))
        kind = type(value)
        if kind in _ORDERED:
            elements = _copied(value)
            hasher.update(b"%d:" % len(elements))
            for element in self._timed(elements):
                self._feed(hasher, element)
        elif kind in _UNORDERED:
            self._feed_unordered(hasher, map(self.digest, self._timed(_copied(value))))
        else:
            items = _copied(value if kind in _DICTIONARIES else object.__getattribute__(value, "__dict__"))
            pairs = (self.digest(key) + self.digest(item) for key, item in self._timed(items))
            self._feed_unordered(hasher, pairs)
        self._around.pop()

    def _feed_unordered(self, hasher: Any, digests: Iterable[bytes]) -> None:
        hasher.update(b"".join(sorted(digests)))

    def _timed(self, elements: Iterable[Any]) -> Iterable[Any]:
        for number, element in enumerate(elements):
            if number % _ELEMENTS == 0:
                self._check_time()
            yield element

    def _feed_array(self, hasher: Any, value: Any) -> None:
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        if numpy is not None and type(value) is numpy.ndarray:
            self._feed_ndarray(hasher, value, numpy)
        elif numpy is not None and issubclass(type(value), numpy.generic) and not value.dtype.hasobject:
            hasher.update(value.tobytes())
        elif torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter):
            self.is_weak = True
            facts = value.device, value.dtype, tuple(value.shape), value.stride(), value.data_ptr(), value._version
            hasher.update(repr(facts).encode())
        else:
            raise Undigested

    def _feed_ndarray(self, hasher: Any, value: Any, numpy: Any) -> None:
        """Feed an array whose memory is its own: that of a mapped file may not be there any more."""
        owner = value
        while type(owner) is numpy.ndarray and owner.base is not None:
            owner = owner.base
        if type(owner) is not numpy.ndarray or not owner.flags.owndata:
            raise Undigested
        hasher.update(f"{value.dtype.descr} {value.shape}".encode())
        if value.dtype.hasobject:
            if value.size > _LONGEST:
                raise Undigested
            for element in self._timed(value.flat):
                self._feed(hasher, element)
        elif value.flags.c_contiguous:
            self._feed_bytes(hasher, memoryview(value.reshape(-1).view("u1")))
        elif value.flags.f_contiguous:
            self._feed_bytes(hasher, memoryview(value.T.reshape(-1).view("u1")))
        else:
            raise Undigested


def _of_integer(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _copied(value: Any) -> Any:
    """Return the elements of a container, or the items of a dictionary, as another thread cannot change them."""
    if len(value) > _LONGEST:
        raise Undigested
    return list(value.items()) if type(value) in _DICTIONARIES else list(value)


def _is_plain(kind: type) -> bool:
    """Return whether objects of a class have nothing but their dictionary: the class and its bases are Python's."""
    if kind.__basicsize__ > _PLAIN or not any("__dict__" in vars(each) for each in kind.__mro__):
        return False
    for each in kind.__mro__[:-1]:
        module = sys.modules.get(each.__module__)
        file = getattr(module, "__file__", None) or ("" if module is None else ".py")
        written = each.__module__ == "__main__" or str(file).endswith(".py")
        if not (written and each.__flags__ & _HEAP_TYPE) or vars(each).get("__slots__"):
            return False
    return kind.__mro__[-1] is object
