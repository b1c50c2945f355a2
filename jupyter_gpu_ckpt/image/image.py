"""A published image: its directory, its manifest, and the marks beside it that say what became of it since."""

from __future__ import annotations

import contextlib
import secrets
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from ..files.atomic import flush
from . import leases
from .leases import Lease
from .manifest import Manifest

CRIU_DIRECTORY = "criu"


@dataclass(frozen=True)
class Image:
    """A published image."""

    path: Path
    manifest: Manifest

    @property
    def id(self) -> str:
        """The image's name in its store."""
        return self.manifest.id

    @property
    def criu_directory(self) -> Path:
        """CRIU's files."""
        return self.path / CRIU_DIRECTORY

    def retire(self) -> None:
        """Its owner shut the kernel down: no server is to bring it back by itself.  The image stays usable."""
        self._mark("retired").touch(0o600)

    def unretire(self) -> None:
        """Its user wants the kernel back."""
        self._mark("retired").unlink(missing_ok=True)

    @property
    def retired(self) -> bool:
        """Whether `retire` was called."""
        return self._mark("retired").exists()

    def accept_changed_files(self) -> None:
        """Its user has said that the kernel may go on with files that were changed while it was away."""
        self._mark("accepts").touch(0o600)

    @property
    def accepts_changed_files(self) -> bool:
        """Whether `accept_changed_files` was called."""
        return self._mark("accepts").exists()

    @property
    def archived(self) -> bool:
        """Whether its content lies in the cold tier (`archive`)."""
        return self._mark("archived").exists()

    def mark_archived(self, archived: bool) -> None:
        """Called from `archive`; on disk when this returns."""
        if archived:
            self._mark("archived").touch(0o600)
        else:
            self._mark("archived").unlink(missing_ok=True)
        flush(self.path.parent)

    def mark_sent(self) -> str:
        """From now on something of it may lie in the cold tier: what tells it there from others' of the same name.

        The mark stays when the image goes, until nothing lies there any more (`archive.sweep`).  Called from `archive`;
        on disk when this returns.  Raises `OSError`.
        """
        mark = self._mark("sent")
        with contextlib.suppress(FileExistsError):  # of an earlier try
            mark.symlink_to(secrets.token_hex(8))  # a link is made with what it says, or not at all
        flush(mark.parent)
        return str(mark.readlink())

    def unmark_sent(self) -> None:
        """Nothing of it lies there that is this store's to remove."""
        self._mark("sent").unlink(missing_ok=True)

    def _mark(self, name: str) -> Path:
        return self.path.with_name(f".{self.path.name}.{name}")

    def lease(self) -> AbstractContextManager[Lease]:
        """Hold the image for one restorer (`leases.hold`).

        Raises `ImageBusy` at once when another holds it or its kernel lives, `ImageNotFound` when it was removed.
        """
        return leases.hold(self.path)

    def acquire(self, patience: float = 0.0) -> Lease:
        """The same for longer than a block, and up to so many seconds after another process of this host has it."""
        return leases.acquire(self.path, patience=patience)

    def ended(self) -> None:
        """The process that was saved has ended: from now on the image is its kernel.  Raises `OSError`."""
        leases.withdraw_claim(self.path)
