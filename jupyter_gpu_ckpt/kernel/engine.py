"""The engine that all kernels of one process share, and the store that each of them has on it."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

from ..criu.criu import Criu
from ..criu.install import dotted, find
from ..cuda.client import Helper
from ..cuda.driver import Cuda
from ..cuda.gpus import Gpus
from ..image.encryption import Vault
from ..image.quota import Quota
from ..image.store import Store
from ..lifecycle.context import Engine

_engines: dict[Path, Engine] = {}
_engines_lock = threading.Lock()


def shared_engine(image_dir: Path) -> Engine:
    """The process's engine: one CRIU, one helper for the CUDA driver, a store per directory.  Raises `HostError`."""
    with _engines_lock:
        if image_dir not in _engines:
            known = next(iter(_engines.values()), None)
            if known is None:
                binary = find()
                helper = Helper()
                version = dotted(binary.version)
                known = Engine(Criu(binary.argv), version, Cuda(helper), Gpus(helper), Store(image_dir))
            store = Store(image_dir)
            store.sweep()
            _engines[image_dir] = Engine(known.criu, known.criu_version, known.cuda, known.gpus, store)
        return _engines[image_dir]


def use_engine(engine: Engine) -> None:
    """Have this process use ``engine``, with a store for each image directory: how tests bring GPUs of their own."""
    with _engines_lock:
        _engines[engine.store.named] = engine


def with_own_store(engine: Engine, vault: Vault, quota: Quota) -> Engine:
    """``engine`` with a store as one kernel's configuration wants it."""
    store = Store(engine.store.named, engine.store.keys, vault, quota)
    vault.sweep()
    return dataclasses.replace(engine, store=store)
