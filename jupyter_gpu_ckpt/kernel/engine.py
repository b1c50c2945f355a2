"""The engine that all kernels of a process share, with a store for each image directory."""

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
    """Return the engine for ``image_dir``: CRIU and the CUDA helper are shared.  Raises `HostError`."""
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
    """Have this process use ``engine`` for its image directory: for tests, with GPUs of their own."""
    with _engines_lock:
        _engines[engine.store.named] = engine


def with_own_store(engine: Engine, vault: Vault, quota: Quota) -> Engine:
    """Return ``engine`` with a store that encrypts, and limits images, as a kernel's configuration has it."""
    store = Store(engine.store.named, engine.store.keys, vault, quota)
    vault.sweep()
    return dataclasses.replace(engine, store=store)
