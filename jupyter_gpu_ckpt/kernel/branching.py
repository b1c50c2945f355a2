"""The plan of a branch: what of a kernel's image would be otherwise in another kernel, before there is one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..criu import exclusive
from ..criu.exclusive import Exclusive
from ..errors import BranchDiffers, BranchUnsafe, ImageFormat
from ..image.store import Image, Store
from ..lifecycle.context import KERNEL_SOCKETS
from .orphans import Session


@dataclass(frozen=True)
class BranchPlan:
    """The consequences of a branch from an image.

    ``differs``: state that cannot exist twice; ``shared``: files that both kernels may write to, shared memory among
    them; ``unsafe``: why there must be no branch.  ``session``: of the image's kernel.  ``private``: directories of
    sockets that the branch has of its own: those of `multiprocessing` in which nobody else has anything.
    """

    session: Session
    image: str
    differs: list[Exclusive]
    shared: list[str]
    unsafe: list[str]
    private: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-serialisable data."""
        differs = [each.as_dict() for each in self.differs]
        return {"image": self.image, "differs": differs, "shared": self.shared, "unsafe": self.unsafe}

    def require(self, accept_differences: bool) -> None:
        """Raise `BranchUnsafe`, or `BranchDiffers` unless the differences are accepted."""
        left, plan = f"the image is kept as {self.image}", self.as_dict()
        if self.unsafe:
            message = f"Two kernels must not continue with this: {'; '.join(self.unsafe)}."
            raise BranchUnsafe(message, left=left, plan=plan)
        # A closed connection is what every wake has, and files can be read by both.
        if (differs := [each for each in self.differs if each.kind != "connection"]) and not accept_differences:
            changes = "; ".join(f"{each.what} ({each.becomes})" for each in differs)
            message = f"This cannot exist twice, and is otherwise in a branch: {changes}."
            if any(each.kind in ("port", "socket") for each in differs):
                message += " What connects to an old port or name reaches the other kernel."
            raise BranchDiffers(message, left=left, plan=plan)


def plan(store: Store, image: Image) -> BranchPlan:
    """Return the plan of a branch from ``image``.  Reads the disk.

    Raises `ImageFormat` for an image without a session, `ProtocolVersion`, and as `Store.readable`.
    """
    manifest = image.manifest
    if (session := Session.read(image.path)) is None:
        raise ImageFormat("The image has no session of its kernel.", image=image.id)
    own = [f"{manifest.runtime_dir}/{KERNEL_SOCKETS}", *([f"{session.sockets}-"] if session.sockets else [])]
    alone = (Path(each["path"]).parent for each in manifest.fingerprint.get("sockets", ()) if each.get("alone"))
    private = sorted({*session.private, *map(str, alone)})
    own += [f"{directory}/" for directory in private]
    with store.readable(image) as files:
        found = exclusive.find(files.criu_directory, own, manifest.notes)
    # Of the kernel's own port the agent knows (`agent.identity`); it is open in the image if a child has it, too.
    pipe = manifest.report.get("pipe_port")
    differs = [each for each in found if not each.port or each.port != pipe]
    used = manifest.fingerprint.get("files", {})
    unsafe = [f"a transaction of the database {path}" for path, file in used.items() if _is_written(file)]
    if not session.has_agent:
        unsafe.append("a kernel without an agent, whose messages would have the same names")
    shared = sorted(path for path, file in used.items() if file.get("writes") and not file.get("made"))
    return BranchPlan(session, image.id, differs, shared, sorted(unsafe), private)


def _is_written(file: dict[str, Any]) -> bool:
    return file.get("transaction") == "write"
