"""A published image: its directory, its manifest, and the marks beside it that record what happened to it since."""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass
from pathlib import Path

from ..files.atomic import flush
from . import layout
from . import lease as leases
from .lease import Lease
from .manifest import Manifest


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
        """The directory of CRIU's files."""
        return self.path / layout.CRIU

    @property
    def is_save_point(self) -> bool:
        """Return whether the image is kept when its kernel comes back from it (`save_point`)."""
        return self.manifest.save_point is not None

    @property
    def is_templates(self) -> bool:
        """Return whether the image was made for a template, not for one kernel."""
        return self.is_save_point and bool(self.manifest.branched_from.get("is_template"))

    def retire(self) -> None:
        """Record that the kernel does not sleep in the image: no server attaches it by itself.  It stays usable."""
        if self.is_save_point:
            layout.mark(self.path, layout.ASLEEP).unlink(missing_ok=True)
        else:
            layout.mark(self.path, layout.RETIRED).touch(0o600)

    def unretire(self) -> None:
        """Undo `retire`: the user wants the kernel back."""
        if self.is_save_point:
            layout.mark(self.path, layout.ASLEEP).touch(0o600)
        else:
            layout.mark(self.path, layout.RETIRED).unlink(missing_ok=True)

    @property
    def retired(self) -> bool:
        """Return whether the kernel does not sleep in the image: `retire` was called, or it is a save point."""
        if self.is_save_point:
            return not layout.mark(self.path, layout.ASLEEP).exists()
        return layout.mark(self.path, layout.RETIRED).exists()

    def accept_changed_files(self) -> None:
        """Record that the user accepts files that were changed since the checkpoint."""
        layout.mark(self.path, layout.ACCEPTS).touch(0o600)

    @property
    def accepts_changed_files(self) -> bool:
        """Return whether `accept_changed_files` was called."""
        return layout.mark(self.path, layout.ACCEPTS).exists()

    @property
    def archived(self) -> bool:
        """Return whether the image's content lies in the cold tier (`transfer.archive`)."""
        return layout.mark(self.path, layout.ARCHIVED).exists()

    def mark_archived(self, archived: bool) -> None:
        """Record where the content is.  Called from `transfer.archive`; on disk on return."""
        mark = layout.mark(self.path, layout.ARCHIVED)
        if archived:
            mark.touch(0o600)
        else:
            mark.unlink(missing_ok=True)
        flush(self.path.parent)

    def mark_sent(self) -> str:
        """Record that parts of the image may lie in the cold tier; return the token that marks them as this store's.

        The mark outlives the image until nothing lies there any more (`archive.sweep`).  Called from
        `transfer.archive`; on disk on return.  Raises `OSError`.
        """
        mark = layout.mark(self.path, layout.SENT)
        with contextlib.suppress(FileExistsError):  # of an earlier try
            mark.symlink_to(secrets.token_hex(8))  # a link is made with its content, or not at all
        flush(mark.parent)
        return str(mark.readlink())

    def unmark_sent(self) -> None:
        """Record that nothing in the cold tier is this store's to remove."""
        layout.mark(self.path, layout.SENT).unlink(missing_ok=True)

    def lease(self, timeout: float = 0.0) -> Lease:
        """Acquire the lease of the image, for one restorer at a time.

        Raises `ImageBusy` after ``timeout`` seconds when another process of this host has it, at once when another host
        has it or the kernel lives; `ImageNotFound` when the image was removed.
        """
        return leases.acquire(self.path, timeout=timeout)

    def claim(self, pid: int, keep_fd: leases.KeepFd) -> None:
        """Record that the image's kernel lives as process ``pid``, restored from another.  Raises `OSError`."""
        leases.publish_claim(self.path, pid, keep_fd)

    def withdraw_claim(self) -> None:
        """Remove the claim: the process that was saved has ended, and the image can be restored.  Raises `OSError`."""
        leases.withdraw_claim(self.path)
