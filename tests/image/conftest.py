"""A store of its own for each test, and an image in it."""

from __future__ import annotations

import pytest
from images import publish

from jupyter_gpu_ckpt.image.keys import Keyring
from jupyter_gpu_ckpt.image.store import Image, Store


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(tmp_path / "images", Keyring(tmp_path / "keys"))


@pytest.fixture
def image(store) -> Image:
    return publish(store)
