"""Coming back to a kernel whose server has gone: what must be known of it, where that is kept, and how it is found.

A `Session` lies beside a living kernel (in its runtime directory) and inside every image.  It holds the key that signs
the kernel's messages, so it is written 0600 and never listed.  A new server starts a kernel under the old id; the
provisioner finds the session, takes the old ports and key, and instead of launching anything attaches to the living
capsule, or leaves the kernel asleep on its image until a client wants it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..image.store import Image, Store
from .registry import kernels

SESSION = "session.json"


@dataclass(frozen=True)
class Session:
    """What a later server needs to serve this kernel as if it had never been away.

    ``front``: the connection info clients use; ``identity``: the kernel's own words of who it is (`Gate.identity`);
    ``path``: the working directory it was started in.
    """

    kernel_id: str
    kernel_name: str
    runtime_dir: str
    has_agent: bool
    path: str
    front: dict[str, Any]
    identity: dict[str, Any] | None = None

    def write(self, directory: Path) -> None:
        """Write it to ``directory``, whole or not at all, readable by the owner alone."""
        draft = directory / f".{SESSION}"
        draft.touch(0o600)
        draft.write_text(json.dumps(dataclasses.asdict(self)))
        draft.rename(directory / SESSION)

    @classmethod
    def read(cls, directory: Path) -> Session | None:
        """The session in ``directory``; None when there is none that can be read."""
        try:
            return cls(**json.loads((directory / SESSION).read_text()))
        except (OSError, ValueError, TypeError):
            return None


@dataclass(frozen=True)
class Orphan:
    """A kernel without an owner: alive in ``directory``, or asleep in ``image``."""

    session: Session
    directory: Path | None = None
    image: Image | None = None


def orphans(base: Path, store: Store) -> list[Orphan]:
    """Every kernel of this user on this host that has no owner, the living ones first.

    Of several images of one kernel the newest counts.  A kernel with an owner is not listed, whatever images it has.
    """
    found: dict[str, Orphan] = {}
    owned = set()
    for record in kernels(base):
        if record["owned"]:
            owned.add(record["kernel_id"])
        elif session := Session.read(Path(record["directory"])):
            found[session.kernel_id] = Orphan(session, directory=Path(record["directory"]))
    alive = set(found)
    for image in store.images():
        session = None if image.retired else Session.read(image.path)
        if session and session.kernel_id not in alive | owned:
            with contextlib.suppress(KeyError):
                del found[session.kernel_id]  # an older image; the list is oldest first
            found[session.kernel_id] = Orphan(session, image=image)
    return list(found.values())


def orphan(kernel_id: str, base: Path, store: Store) -> Orphan | None:
    """The orphan of that id."""
    return next((one for one in orphans(base, store) if one.session.kernel_id == kernel_id), None)
