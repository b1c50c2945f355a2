"""Save points: images that are kept when their kernel comes back from them, by name, any number of times.

A save point belongs to a kernel id.  It is an image like others (seal, quota, retention, encryption, transfer) but for
this: a server does not attach its kernel by itself, no newer image outdates it, and a restore consumes nothing of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import BadRequest, SavePointExists, SavePointNotFound
from . import layout
from .image import Image
from .shared_chunks import bytes_alone
from .store import Store

#: Characters of a name at most.
LONGEST = 80
_NAME = re.compile(r"[^\s.\x00-\x1f\x7f-\x9f/\\]([^\x00-\x1f\x7f-\x9f/\\]*[^\s\x00-\x1f\x7f-\x9f/\\])?")


@dataclass(frozen=True)
class SavePoint:
    """The facts that make an image a save point, as its manifest has them.

    ``automatic``: it was made without a request, and may be thinned out.  ``cell``: the number of the last cell that
    was run, 0 if it is not known.  ``variables``: name, type and bytes of each, as the agent found them.
    """

    name: str
    automatic: bool = False
    cell: int = 0
    variables: list[dict[str, Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the facts as JSON objects."""
        return asdict(self)


def of_image(image: Image) -> SavePoint | None:
    """Return the save point that an image is; None for others.  Facts of other shapes are replaced by none."""
    if (facts := image.manifest.save_point) is None:
        return None
    cell, variables = facts.get("cell"), facts.get("variables")
    return SavePoint(
        name=str(facts.get("name", "")),
        automatic=facts.get("automatic") is True,
        cell=cell if isinstance(cell, int) else 0,
        variables=[each for each in variables if isinstance(each, dict)] if isinstance(variables, list) else [],
    )


def described(image: Image) -> dict[str, Any]:
    """Return a save point as JSON objects, with what it costs.

    ``bytes``, ``device_bytes`` among them, and ``bytes_alone``, which it shares with no other.
    """
    manifest, point = image.manifest, of_image(image)
    assert point is not None
    return {
        **point.as_dict(),
        "image": image.id,
        "created": manifest.created,
        "bytes": manifest.bytes,
        "bytes_alone": bytes_alone(image),
        "device_bytes": sum(manifest.device_bytes.values()),
        "asleep": not image.retired,
    }


def notebook(store: Store, image: Image) -> bytes | None:
    """Return the notebook's document as it was; None if it was not saved.  Raises as `Store.readable`, `OSError`."""
    with store.readable(image) as files:
        path = files.criu_directory / layout.KEPT / layout.NOTEBOOK
        return path.read_bytes() if path.exists() else None


def of_kernel(images: Iterable[Image], kernel_id: str) -> dict[str, Image]:
    """Return the save points of a kernel by name, the oldest first: ids have the second only."""
    own = sorted(
        (image for image in images if image.manifest.kernel_id == kernel_id), key=lambda image: image.manifest.created
    )
    return {point.name: image for image in own if (point := of_image(image)) is not None}


def find(images: Iterable[Image], kernel_id: str, name: str) -> Image:
    """Return the save point of a kernel with this name.  Raises `SavePointNotFound`."""
    points = of_kernel(images, kernel_id)
    if name not in points:
        there = ", ".join(sorted(points)) or "none"
        raise SavePointNotFound(f"The kernel has no save point {name!r}; it has: {there}.", names=sorted(points))
    return points[name]


def require_free_name(images: Iterable[Image], kernel_id: str, name: str) -> None:
    """Raise `BadRequest` for what is no name of a save point, `SavePointExists` for one that the kernel has."""
    if len(name) > LONGEST or not _NAME.fullmatch(name):
        message = (
            f"A save point's name has 1 to {LONGEST} characters, no slashes or control characters, no blanks at its "
            "ends, and no dot at its beginning."
        )
        raise BadRequest(message, name=name[:LONGEST])
    if (known := of_kernel(images, kernel_id).get(name)) is not None:
        raise SavePointExists(f"The kernel has a save point {name!r} already.", image=known.id)


def surplus(images: Iterable[Image], kernel_id: str, keep: int) -> list[Image]:
    """Return the automatic save points of a kernel beyond the newest ``keep``; one that it sleeps in stays.  Pure."""
    points = [image for image in of_kernel(images, kernel_id).values() if image.retired]
    automatic = [image for image in points if (point := of_image(image)) is not None and point.automatic]
    newest_first = sorted(automatic, key=lambda image: (image.manifest.created, image.id), reverse=True)
    return newest_first[keep:]
