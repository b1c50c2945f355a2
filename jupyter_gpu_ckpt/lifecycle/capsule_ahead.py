"""The capsule that a kernel goes back in, made while its present state is written."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from ..capsule.capsule import Capsule
from ..errors import GpuCkptError
from ..image.background_task import BackgroundTask
from ..image.image import Image


class CapsuleAhead:
    """A capsule for the kernel of ``image`` that is being made on a thread of its own; `claim` or `discard` ends it.

    ``create``: makes it beside the one that the kernel is in.  Raises `RuntimeError` where there are no more threads.
    """

    def __init__(self, image: Image, create: Callable[[], Capsule]) -> None:
        self._image = image.id
        self._capsule: Capsule | None = None

        def make(_: object) -> None:
            self._capsule = create()

        self._task = BackgroundTask("gpu-ckpt-capsule", make)

    def claim(self, image: Image) -> Capsule | None:
        """Return the capsule, as the only one of its directory; None if there is none for this image.

        Never raises: whatever went wrong, another one can be made.
        """
        with contextlib.suppress(GpuCkptError, OSError):
            self._task.wait()
            if self._capsule is not None and image.id == self._image:
                self._capsule.replace_other()
                return self._capsule
        self.discard()
        return None

    def discard(self) -> None:
        """End the capsule.  Never raises."""
        self._task.cancel(wait_for_end=True)
        if self._capsule is not None:
            self._capsule.close()
