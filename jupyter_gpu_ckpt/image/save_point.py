"""Save points: images that are kept when their kernel comes back from them, by name, any number of times.

A save point belongs to a kernel id.  It is an image like others (seal, quota, retention, encryption, transfer) but for
this: a server does not attach its kernel by itself, no newer image outdates it, and a restore consumes nothing of it.
"""

from __future__ import annotations

import contextlib
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from blake3 import blake3

from ..errors import BadRequest, KeyUnusable, SavePointExists, SavePointNotFound
from ..files.atomic import flush, write_atomically
from ..files.disk import mapped_errors
from ..node.facts import file_facts, same_file
from . import kept_files, layout, lease, links, verify
from .image import Image
from .manifest import FileEntry, Manifest
from .shared_chunks import bytes_alone
from .store import Store

#: Characters of a name at most.
LONGEST = 80
#: The notebook's document, as a manifest names it.
_NOTEBOOK = f"{layout.CRIU}/{layout.KEPT}/{layout.NOTEBOOK}"
_NAME = re.compile(r"[^\s.\x00-\x1f\x7f-\x9f/\\]([^\x00-\x1f\x7f-\x9f/\\]*[^\s\x00-\x1f\x7f-\x9f/\\])?")

#: Categories of characters that are not seen, reorder the text around them, or are in no URL: format characters (marks
#: of direction among them), lone surrogates, separators of lines and paragraphs.
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


@dataclass(frozen=True)
class SavePoint:
    """The facts that make an image a save point, as its manifest has them.

    ``automatic``: it was made without a request, and may be thinned out.  ``cell``: the number of the last cell that
    was run, 0 if it is not known.  ``variables``: name, type, bytes and digest of each, as the agent found them;
    ``left_out``: how many there were beside these, 1 where nobody has looked.  ``parent``: the id of the save point
    that the kernel was saved in, had gone back to or was branched from last; empty without one.  It may be gone.
    """

    name: str
    automatic: bool = False
    cell: int = 0
    variables: list[dict[str, Any]] = field(default_factory=list)
    left_out: int = 0
    parent: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the facts as JSON objects."""
        return asdict(self)


def of_image(image: Image) -> SavePoint | None:
    """Return the save point that an image is; None for others.  Facts of other shapes are replaced by none."""
    if (facts := image.manifest.save_point) is None:
        return None
    return from_summary(facts, str(facts.get("name", "")), automatic=facts.get("automatic") is True)


def from_summary(facts: Mapping[str, Any], name: str = "", *, automatic: bool = False) -> SavePoint:
    """Return the save point of an agent's summary.  Facts of other shapes are replaced by none."""
    cell, variables, left_out, parent = (facts.get(each) for each in ("cell", "variables", "left_out", "parent"))
    return SavePoint(
        name=name,
        automatic=automatic,
        cell=cell if isinstance(cell, int) else 0,
        variables=[each for each in variables if isinstance(each, dict)] if isinstance(variables, list) else [],
        left_out=left_out if isinstance(left_out, int) else 0,
        parent=parent if isinstance(parent, str) else "",
    )


def compare(before: SavePoint, after: SavePoint) -> dict[str, Any]:
    """Return which variables differ: ``added``, ``gone``, ``changed`` and ``unknown`` ones, and how many are ``same``.

    Each is an object with name, and type and bytes ``before`` and ``after``.  ``complete``: false where one side has
    more variables than are noted.
    """
    sides = [{str(each.get("name")): each for each in point.variables} for point in (before, after)]
    found: dict[str, list[dict[str, Any]]] = {"added": [], "gone": [], "changed": [], "unknown": [], "same": []}
    for name in sorted({*sides[0], *sides[1]}):
        was, now = (side.get(name) for side in sides)
        found[_judged(was, now, before, after)].append({"name": name, "before": _shown(was), "after": _shown(now)})
    complete = not (before.left_out or after.left_out)
    return {**found, "same": len(found["same"]), "complete": complete}


def _judged(was: dict[str, Any] | None, now: dict[str, Any] | None, before: SavePoint, after: SavePoint) -> str:
    """Return whether a variable is added, gone, changed, unknown or the same."""
    if was is None:
        return "unknown" if before.left_out else "added"
    if now is None:
        return "unknown" if after.left_out else "gone"
    if was.get("type") != now.get("type"):
        return "changed"
    if "digest" in was and "digest" in now:
        weak = was.get("weak") or now.get("weak")
        return "changed" if was["digest"] != now["digest"] else "unknown" if weak else "same"
    # The size of a list or dictionary is that of its memory, which may change while its elements do not.
    return "changed" if was.get("bytes") != now.get("bytes") and was.get("type") not in _GROWING else "unknown"


_GROWING = frozenset({"list", "dict", "set", "bytearray", "deque", "OrderedDict", "defaultdict"})


def _shown(variable: dict[str, Any] | None) -> dict[str, Any] | None:
    return {name: variable[name] for name in ("type", "bytes") if name in variable} if variable is not None else None


#: Facts of a variable that are for `compare` alone.
_PRIVATE = frozenset({"digest", "weak"})


def of_sleep(
    store: Store,
    image: Image,
    point: SavePoint,
    notebook: bytes | None,
    most: int,
    replaced: Collection[str] | None = None,
) -> Image:
    """Make a save point of an image that its kernel sleeps in, and return that; nothing of the image is copied.

    ``notebook``: its document, to be kept in it.  ``most``, ``replaced``: as for `kept_files.keep`, of files that
    nobody has changed since.  An encrypted image gets neither.  Without ``replaced`` the kernel has ended, else it
    sleeps in it on, also where this process is killed.  Raises `ImageArchived`, `ImageForged`, `ImageDamaged`,
    `ImageStale`, `ImageBusy`, `KeyUnusable`, `StoreUnwritable`, `NoSpace`, `MissingFile`; the image is as it was then.
    """
    with lease.acquire(image.path, remove=True, timeout=lease.MOMENT), mapped_errors(store.root):
        manifest = store.require_files(image)
        files: dict[str, Any] = {}
        with store.changing(image):
            if manifest.encryption is None:
                manifest, files = _with_kept_files(image, manifest, notebook, most, store.free(), replaced or ())
            kept = Image(image.path, replace(manifest, save_point={**point.as_dict(), "files": files}))
            if replaced is None:
                kept.retire()
            else:
                kept.unretire()  # before it is a save point: the next server must know
            flush(store.root)
            verify.replace_manifest(image.path, kept.manifest.to_json(), store.keys)
        layout.mark(image.path, layout.RETIRED).unlink(missing_ok=True)
        kept.withdraw_claim()
        links.keep(kept.manifest)
        if replaced is None:
            links.remove_tracked(kept.manifest)  # as the end of an awake kernel does
    with contextlib.suppress(KeyUnusable):  # then the manifest of before, if it is put back, may go unnoticed
        store.generations.record_restored(manifest.kernel_id, manifest.generation)
    return kept


def _with_kept_files(
    image: Image, manifest: Manifest, notebook: bytes | None, most: int, free: int, replaced: Collection[str]
) -> tuple[Manifest, dict[str, Any]]:
    """Add the notebook and the files in use to an image; return its manifest, and the files as JSON objects."""
    noted, directory = manifest.fingerprint.get("files", {}), image.criu_directory / layout.KEPT
    unchanged = {path: was for path, was in noted.items() if _is_unchanged(path, was)}
    found = kept_files.hashed(kept_files.keep(unchanged, replaced, directory, most, free), directory)
    entries = dict(manifest.files)
    for facts in found.values():
        if facts["copy"]:
            copy = directory / facts["copy"]
            flush(copy)
            entries[f"{layout.CRIU}/{layout.KEPT}/{copy.name}"] = FileEntry(copy.stat().st_size, facts["blake3"])
    if notebook is not None:
        directory.mkdir(mode=0o700, exist_ok=True)
        write_atomically(directory / layout.NOTEBOOK, notebook, durable=True)
        entries[_NOTEBOOK] = FileEntry(len(notebook), blake3(notebook).hexdigest())
    for each in (directory, directory.parent) if directory.exists() else ():
        flush(each)
    return replace(manifest, files=entries), found


def _is_unchanged(path: str, was: Mapping[str, Any]) -> bool:
    """Return whether a file is as it was when its kernel fell asleep; nobody else writes to its shared memory."""
    now = file_facts(path)
    if now is None or kept_files.is_memory(path):
        return now is not None and now["inode"] == was.get("inode")
    return same_file(was, now)


def described(image: Image) -> dict[str, Any]:
    """Return a save point as JSON objects, with what it costs.

    ``bytes``, ``device_bytes`` among them, and ``bytes_alone``, which it shares with no other.
    """
    manifest, point = image.manifest, of_image(image)
    assert point is not None
    return {
        **point.as_dict(),
        "variables": [{k: v for k, v in each.items() if k not in _PRIVATE} for each in point.variables],
        "image": image.id,
        "created": manifest.created,
        "bytes": manifest.bytes,
        "bytes_alone": bytes_alone(image),
        "device_bytes": sum(manifest.device_bytes.values()),
        "asleep": not image.retired,
        "has_notebook": has_notebook(image),
    }


def has_notebook(image: Image) -> bool:
    """Return whether the notebook's document was saved, also where its content is in the cold tier."""
    return _NOTEBOOK in image.manifest.files


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
    if len(name) > LONGEST or not _NAME.fullmatch(name) or any(unicodedata.category(c) in _UNSEEN for c in name):
        message = (
            f"A save point's name has 1 to {LONGEST} characters, no slashes, control or format characters, no blanks "
            "at its ends, and no dot at its beginning."
        )
        raise BadRequest(message, name=name[:LONGEST])
    if (known := of_kernel(images, kernel_id).get(name)) is not None:
        raise SavePointExists(f"The kernel has a save point {name!r} already.", image=known.id)


def surplus(images: Iterable[Image], kernel_id: str, keep: int) -> list[Image]:
    """Return the automatic save points of a kernel beyond ``keep``, oldest first; the one it sleeps in stays.  Pure."""
    points = [image for image in of_kernel(images, kernel_id).values() if image.retired]
    automatic = [image for image in points if (point := of_image(image)) is not None and point.automatic]
    oldest_first = sorted(automatic, key=lambda image: (image.manifest.created, image.id))
    kept = thinned([image.manifest.created for image in oldest_first], keep)
    return [image for index, image in enumerate(oldest_first) if index not in kept]


def thinned(times: Sequence[float], keep: int) -> set[int]:
    """Return the indices of ``times`` (seconds, ascending) to keep: at most ``keep``, dense lately and sparse before.

    Three or more have the newest, the one before it (what a last cell has changed), and the oldest.  Of those in
    between goes the one without which the ages of its neighbours are least apart, as a ratio: so ages are kept that
    grow by about the same factor, in days as in seconds.  Fewer than three are the newest.  Pure.
    """
    if keep < _LEAST_SPREAD:
        return set(range(max(0, len(times) - keep), len(times)))
    kept = list(range(len(times)))
    while len(kept) > keep:
        ages = [times[-1] - times[index] + _SAME_MOMENT for index in kept]
        inner = range(1, len(kept) - 2)
        del kept[min(inner, key=lambda at: ages[at - 1] / ages[at + 1])]
    return set(kept)


#: Kept save points that have anything between their ends.
_LEAST_SPREAD = 3
#: Seconds by which moments have to differ to count as apart.
_SAME_MOMENT = 1.0
