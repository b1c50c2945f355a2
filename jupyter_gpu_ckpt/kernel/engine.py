"""The engine that all kernels of a process share, with a store for each image directory."""

from __future__ import annotations

import dataclasses
import functools
import threading
from pathlib import Path

from ..criu.criu import Criu
from ..criu.install import dotted, find
from ..cuda.cuda import Cuda
from ..cuda.gpus import Gpus
from ..cuda.helper_client import Helper
from ..image.store import Store
from ..lifecycle.context import Engine
from ..sharing import records
from ..sharing.exchange import Exchange

_exchanges: dict[Path, Exchange] = {}
_engines: dict[Path, Engine] = {}
_engines_lock = threading.Lock()


def shared_engine(image_dir: Path) -> Engine:
    """Return the engine for ``image_dir``: CRIU and the CUDA helper are shared.  Raises `HostError`."""
    with _engines_lock:
        if image_dir not in _engines:
            store, known = Store(image_dir), next(iter(_engines.values()), None)
            if known is None:
                binary, helper = find(), Helper()
                gpus = Gpus(helper)
                gpus.claimed = functools.partial(records.claimed, gpus.lock_directory)
                known = Engine(Criu(binary.argv), dotted(binary.version), Cuda(helper), gpus, store)
            store.sweep()
            _engines[image_dir] = dataclasses.replace(known, store=store)
        return _engines[image_dir]


def shared_exchange(gpus: Gpus) -> Exchange:
    """Return this process's part in sharing GPUs with the servers that have the same directory of locks."""
    with _engines_lock:
        return _exchanges.setdefault(gpus.lock_directory, Exchange(gpus))


def use_engine(engine: Engine) -> None:
    """Have this process use ``engine`` for its image directory (`testing.fake_host`)."""
    with _engines_lock:
        _engines[engine.store.named] = engine


def with_own_store(engine: Engine, store: Store) -> Engine:
    """Return ``engine`` with a store that encrypts, and limits images, as a kernel's configuration has it."""
    store.vault.sweep()
    return dataclasses.replace(engine, store=store)
