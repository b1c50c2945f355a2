"""Kernels whose server has ended: how the next server finds them, and the session by which it serves them.

A `Session` is in the runtime directory of a living kernel and in every image.  It has the key that signs the kernel's
messages, so it is written 0600 and never listed.  A new server starts a kernel under the old id; the provisioner finds
the session, uses its ports and key, and launches nothing: it attaches the living capsule, or leaves the kernel asleep
in its image until a client needs it.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import GpuCkptError, HostError, ImageBusy, ProtocolVersion
from ..files.atomic import write_atomically
from ..image import completion, layout
from ..image.store import Image, Store
from .registry import kernels, owned_by_id

#: Of the session's file: to be raised when a reader has to know of a change.  Unknown fields are ignored.
VERSION = 1


@dataclass(frozen=True)
class Session:
    """The session of a kernel: the facts that a later server needs to serve it.

    ``front``: the connection info for clients; ``identity``: `Gate.identity`; ``notebook``: the file of its document;
    ``path``: the working directory it was started in; ``root``: the root directory of the server that started it;
    ``protected_until``: until when no policy may suspend or checkpoint it, seconds since the epoch; ``sockets``:
    `Home.sockets`, or empty; ``kernel_key``: of a branch that has not run yet, the key of the kernel that it comes from
    (`Home.kernel_key`); ``private``: `Home.private`; ``directory``: the name of its own runtime directory, if that is
    not the last one of ``runtime_dir``: a branch knows its own by the path of that other kernel's; ``fallback_name``:
    of a template's kernel, the kernelspec that the template was made of, to be used when the template is removed;
    ``parent``: `KernelState.parent`.
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
    sockets: str = ""
    kernel_key: str = ""
    directory: str = ""
    private: list[str] = field(default_factory=list)
    fallback_name: str = ""
    parent: str = ""

    def write(self, directory: Path) -> None:
        """Write the session to ``directory``, atomically, readable by the owner alone."""
        content = json.dumps({"version": VERSION, **dataclasses.asdict(self)})
        write_atomically(directory / layout.SESSION, content, durable=False)

    @classmethod
    def read(cls, directory: Path) -> Session | None:
        """Return the session in ``directory``; None if it is missing or damaged.

        Raises `ProtocolVersion` for a session of another version, whose kernel is for a release that knows it.
        """
        try:
            found = json.loads((directory / layout.SESSION).read_text())
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
    """A kernel without an owner, alive in ``directory`` or asleep in ``image``."""

    session: Session
    directory: Path | None = None
    image: Image | None = None


@dataclass(frozen=True)
class FoundOrphans:
    """All kernels without an owner, the living ones first; ``refused``: those of another release, by kernel id."""

    orphans: list[Orphan]
    refused: dict[str, ProtocolVersion]


def find_orphans(base: Path, store: Store) -> FoundOrphans:
    """Find the kernels of this user on this host that have no owner.

    Of several images of a kernel the newest counts.  A kernel with an owner is not listed, whatever images it has.
    Images that a server has left to be completed are waited for.
    """
    completion.await_abandoned(store.root)
    found: dict[str, Orphan | ProtocolVersion] = {}
    owned = set()
    for record in kernels(base):
        kernel_id, directory = record["kernel_id"], Path(record["directory"])
        if record["owned"]:
            owned.add(kernel_id)
        elif "refusal" in record:
            found[kernel_id] = ProtocolVersion(record["refusal"], left="the kernel is as it was")
        elif kernel := _read(directory, directory=directory):
            found[kernel_id] = kernel
    found |= {id: kernel for id, kernel in _asleep(store).items() if id not in found and id not in owned}
    return FoundOrphans(
        [kernel for kernel in found.values() if isinstance(kernel, Orphan)],
        {id: kernel for id, kernel in found.items() if isinstance(kernel, ProtocolVersion)},
    )


def find_orphan(kernel_id: str, base: Path, store: Store) -> Orphan | None:
    """Find the orphan ``kernel_id``.  Raises `ProtocolVersion` if another release has to attach it."""
    found = find_orphans(base, store)
    if kernel_id in found.refused:
        raise found.refused[kernel_id]
    return next((orphan for orphan in found.orphans if orphan.session.kernel_id == kernel_id), None)


def newest_images(store: Store) -> dict[str, Orphan]:
    """Find, by kernel id, the newest image of each kernel that is not retired, whether it has an owner or not."""
    return {id: kernel for id, kernel in _asleep(store).items() if isinstance(kernel, Orphan)}


def _asleep(store: Store) -> dict[str, Orphan | ProtocolVersion]:
    found: dict[str, Orphan | ProtocolVersion] = {}
    for image in store.images():
        if not image.retired and (kernel := _read(image.path, image=image)):
            found.pop(image.manifest.kernel_id, None)  # an older image; the list is oldest first
            found[image.manifest.kernel_id] = kernel
    return found


def _read(path: Path, *, directory: Path | None = None, image: Image | None = None) -> Orphan | ProtocolVersion | None:
    try:
        session = Session.read(path)
    except ProtocolVersion as error:
        return error
    return Orphan(session, directory=directory, image=image) if session else None


def only_copy(image: Image, insist: str) -> ImageBusy | None:
    """Return the refusal to delete an image that is the only copy of its kernel; None if it may be deleted.

    ``insist`` says how to delete it all the same.  Raises as `owned_kernel`.
    """
    # The manifest names the kernel's directory, so it is found wherever its server keeps the sockets.
    owned = owned_by_id(Path(image.manifest.runtime_dir), image.manifest.kernel_id)
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
    """Return what the user of a fresh kernel reads if the one to attach had ended; ``last`` is its last image."""
    kept = f" An earlier state of it is kept as image {last.image.id}." if last and last.image else ""
    return f"{_FRESH} that one ended while no server had it, or together with its server.{kept}"


def not_attached_notice(found: Orphan, error: HostError) -> str:
    """Return what the user of a kernel that was started plainly reads if there was one to attach."""
    if found.image is not None:
        left = f"Its image is kept as {found.image.id}, and the next server restores it if it can."
    else:
        left = "It continues to run, and the next server attaches it if it can."
    return f"{_FRESH} that one could not be brought back ({error.code}: {error.message}) {left} {error.hint}"


def not_saved_notice(error: GpuCkptError) -> str:
    """Return what the user of a restarted kernel reads if the save point before the restart could not be made."""
    why = f"{error.code}: {error.message}"
    return f"{_FRESH} no save point could be made before the restart ({why}) {error.hint}".strip()


def without_template_notice(error: GpuCkptError) -> str:
    """Return what the user of a kernel reads that could not be started from its template."""
    return f"This kernel was started without its template ({error.code}: {error.message}) {error.hint}"
