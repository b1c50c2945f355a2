"""Names of files in images are written down once."""

from __future__ import annotations

import ast
from pathlib import Path

import jupyter_gpu_ckpt
from jupyter_gpu_ckpt.image import layout

IMAGE = Path(jupyter_gpu_ckpt.__file__).parent / "image"
NAMES = {value for name, value in vars(layout).items() if name.isupper() and isinstance(value, str)}


def constants(path: Path) -> set[str]:
    """Every string in a module, and every constant part of an f-string."""
    tree = ast.parse(path.read_text())
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_no_module_of_images_repeats_a_name_of_the_layout():
    # What a fingerprint calls "criu" and "device" are a program's version and a file's device number; and every
    # directory may have a lock of its own.
    ours = NAMES - {layout.CRIU, layout.DEVICE, layout.LOCK}
    repeated = {path.name: found for path in IMAGE.glob("*.py") if (found := constants(path) & ours)}
    assert set(repeated) == {"layout.py"}


def test_the_layout_imports_nothing_of_the_package():
    tree = ast.parse(Path(layout.__file__).read_text())
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]


def test_names_in_manifests_are_made_of_the_directories():
    assert (layout.PAGES_FILES, layout.DEVICE_FILES) == ("criu/pages-*.img", "criu/device/*")
    assert layout.device_file("000000.img") == "criu/device/000000.img"
