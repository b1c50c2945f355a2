"""Coming back to a kernel whose server has gone: what must be known of it, where that is kept, and how it is found.

A `Session` lies beside a living kernel (in its runtime directory) and inside every image.  It holds the key that signs
the kernel's messages, so it is written 0600 and never listed.  A new server starts a kernel under the old id; the
provisioner finds the session, takes the old ports and key, and instead of launching anything attaches to the living
capsule, or leaves the kernel asleep on its image until a client wants it.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import HostError, ImageBusy, ProtocolVersion
from ..image.store import Image, Store
from .registry import kernels, owned_kernel

SESSION = "session.json"
#: Of the file: to be raised when a reader has to know of a change.  What is only added may be ignored, and is.
VERSION = 1


@dataclass(frozen=True)
class Session:
    """What a later server needs to serve this kernel as if it had never been away.

    ``front``: the connection info clients use; ``identity``: the kernel's own words of who it is (`Gate.identity`);
    ``notebook``: its document's file, if it has one; ``path``: the working directory it was started in; ``root``:
    the root directory of the server it was started by, if that has one; ``protected_until``: until when no policy
    may take it away, seconds since the epoch.
    """

    kernel_id: str
    kernel_name: str
    runtime_dir: str
    has_agent: bool
    path: str
    front: dict[str, Any]
    identity: dict[str, Any] | None = None
    root: str = ""
    protected_until: float | None = None
    notebook: str = ""

    def write(self, directory: Path) -> None:
        """Write it to ``directory``, whole or not at all, readable by the owner alone."""
        draft = directory / f".{SESSION}.{threading.get_native_id()}"  # agent requests and the worker may write at once
        draft.touch(0o600)
        draft.write_text(json.dumps({"version": VERSION, **dataclasses.asdict(self)}))
        draft.rename(directory / SESSION)

    @classmethod
    def read(cls, directory: Path) -> Session | None:
        """The session in ``directory``; None where there is none, or a damaged one.

        Raises `ProtocolVersion` for one of another version: its kernel is for a release that knows it.
        """
        try:
            found = json.loads((directory / SESSION).read_text())
        except (OSError, ValueError):
            return None
        if not isinstance(found, dict):
            return None
        if (version := found.get("version")) != VERSION:
            message = f"The kernel's session is of version {version}; this release knows version {VERSION}."
            raise ProtocolVersion(message, left="the kernel, or its image, is as it was", version=version)
        known = {field.name for field in dataclasses.fields(cls)}
        try:
            return cls(**{name: value for name, value in found.items() if name in known})
        except TypeError:
            return None


@dataclass(frozen=True)
class Orphan:
    """A kernel without an owner: alive in ``directory``, or asleep in ``image``."""

    session: Session
    directory: Path | None = None
    image: Image | None = None


@dataclass(frozen=True)
class FoundOrphans:
    """What there is without an owner: ``orphans``, the living ones first, and ``refused``, by kernel id.

    The latter are of another release (`ProtocolVersion`): no business of this one's, and left as they are.
    """

    orphans: list[Orphan]
    refused: dict[str, ProtocolVersion]


def find_all(base: Path, store: Store) -> FoundOrphans:
    """Every kernel of this user on this host that has no owner.

    Of several images of one kernel the newest counts.  A kernel with an owner is not listed, whatever images it has.
    """
    living: dict[str, Orphan | ProtocolVersion] = {}
    owned = set()
    for record in kernels(base):
        directory = Path(record["directory"])
        if record["owned"]:
            owned.add(record["kernel_id"])
        elif one := _read(directory, directory=directory):
            living[record["kernel_id"]] = one
    asleep = {id: one for id, one in _asleep(store).items() if id not in living and id not in owned}
    found = {**living, **asleep}
    return FoundOrphans(
        [one for one in found.values() if isinstance(one, Orphan)],
        {id: one for id, one in found.items() if isinstance(one, ProtocolVersion)},
    )


def find_orphans(base: Path, store: Store) -> list[Orphan]:
    """The kernels without an owner that this release can adopt, the living ones first."""
    return find_all(base, store).orphans


def find_orphan(kernel_id: str, base: Path, store: Store) -> Orphan | None:
    """The orphan of that id.  Raises `ProtocolVersion` where that kernel is for another release to adopt."""
    found = find_all(base, store)
    if kernel_id in found.refused:
        raise found.refused[kernel_id]
    return next((one for one in found.orphans if one.session.kernel_id == kernel_id), None)


def newest_image_of(kernel_id: str, store: Store) -> Orphan | None:
    """The newest image of that id that a server is to bring back, whatever else there is of the kernel."""
    return newest_images(store).get(kernel_id)


def newest_images(store: Store) -> dict[str, Orphan]:
    """By kernel id the newest image of each kernel that a server is to bring back, whether one has it or not."""
    return {id: one for id, one in _asleep(store).items() if isinstance(one, Orphan)}


def _asleep(store: Store) -> dict[str, Orphan | ProtocolVersion]:
    found: dict[str, Orphan | ProtocolVersion] = {}
    for image in store.images():
        if not image.retired and (one := _read(image.path, image=image)):
            found.pop(image.manifest.kernel_id, None)  # an older image; the list is oldest first
            found[image.manifest.kernel_id] = one
    return found


def _read(place: Path, *, directory: Path | None = None, image: Image | None = None) -> Orphan | ProtocolVersion | None:
    try:
        session = Session.read(place)
    except ProtocolVersion as error:
        return error
    return Orphan(session, directory=directory, image=image) if session else None


def only_copy(image: Image, insist: str) -> ImageBusy | None:
    """The refusal to delete an image that is all there is of its kernel; None where nobody needs it any more.

    ``insist`` says how to delete it all the same.  Raises `CapsuleError` when others hold the kernels' base too long.
    """
    # The manifest names the kernel's directory, so it is found wherever its server keeps the sockets.
    owned = owned_kernel(Path(image.manifest.runtime_dir))
    if owned is not None and owned["image"] == image.id:
        why, hint = "which sleeps", "Run a cell in its notebook to wake it"
    elif owned is None and not image.retired and (found := _read(image.path, image=image)) is not None:
        server = "The next server" if isinstance(found, Orphan) else "A server of the release that wrote it"
        why, hint = "whose server has stopped", f"{server} brings it back"
    else:
        return None
    return ImageBusy(
        f"Image {image.id} is the only copy of kernel {image.manifest.kernel_id}, {why}.",
        hint=f"{hint}, or {insist} to lose it.",
        left=f"the image is kept as {image.id}",
    )


_FRESH = "This is a fresh kernel, without the variables of the one before:"


def ended_notice(last: Orphan | None) -> str:
    """What the user of a fresh kernel reads when the one to adopt had ended; ``last`` is what it left on disk."""
    kept = f" An earlier state of it is kept as image {last.image.id}." if last and last.image else ""
    return f"{_FRESH} that one ended while no server had it, or together with its server.{kept}"


def not_attached_notice(found: Orphan, error: HostError) -> str:
    """What the user of a kernel that was started plainly reads when there was one to adopt."""
    if found.image is not None:
        there = f"Its image is kept as {found.image.id}, and the next server brings it back if it can."
    else:
        there = "It runs on, and the next server adopts it if it can."
    return f"{_FRESH} that one could not be brought back ({error.code}: {error.message}) {there} {error.hint}"
