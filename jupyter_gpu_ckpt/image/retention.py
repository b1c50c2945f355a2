"""The choice of images to delete when there are too many, too old or too large ones; `Store.remove` deletes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .image import Image
from .shared_chunks import Together


@dataclass(frozen=True)
class Limits:
    """Limits on images for each kernel, on their age in seconds, and on the bytes of all together.  None: no limit.

    A kernel's save points are counted apart from its other images.
    """

    keep_last: int | None = None
    max_age: float | None = None
    max_bytes: int | None = None


def choose(images: Iterable[Image], limits: Limits, now: float, protected: Callable[[Image], bool]) -> list[Image]:
    """Return the images to delete, oldest first; a ``protected`` one only counts.  ``now``: seconds since the epoch."""
    newest_first = sorted(images, key=lambda image: (image.manifest.created, image.id), reverse=True)
    kept: list[Image] = []
    going: list[Image] = []
    of_kernel: Counter[tuple[str, bool]] = Counter()
    for image in newest_first:
        counted = image.manifest.kernel_id, image.is_save_point
        of_kernel[counted] += 1
        surplus = limits.keep_last is not None and of_kernel[counted] > limits.keep_last
        old = limits.max_age is not None and now - image.manifest.created > limits.max_age
        (going if (surplus or old) and not protected(image) else kept).append(image)
    if limits.max_bytes is not None:
        together = Together(kept)
        for image in reversed(kept):
            if together.bytes > limits.max_bytes and not protected(image):
                going.append(image)
                together.remove(image)
    return sorted(going, key=lambda image: (image.manifest.created, image.id))
