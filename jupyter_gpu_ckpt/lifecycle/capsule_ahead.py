"""The capsule that a kernel goes back in, made and filled with device memory while its present state is written."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from ..capsule.capsule import Capsule
from ..errors import GpuCkptError
from ..image.background_task import BackgroundTask
from ..image.image import Image


class CapsuleAhead:
    """A capsule for the kernel of ``image`` that is being made on a thread of its own; `claim` or `discard` ends it.

    ``create``: makes it beside the one that the kernel is in.  ``begin_read``: begins to read device memory into it.
    Raises `RuntimeError` where there are no more threads.
    """

    def __init__(
        self,
        image: Image,
        create: Callable[[], Capsule],
        begin_read: Callable[[Capsule], BackgroundTask | None] = lambda _: None,
    ) -> None:
        self._image = image.id
        self._capsule: Capsule | None = None
        #: Of device memory, of a capsule that was claimed; None: it was not begun.
        self.reading: BackgroundTask | None = None

        def make(_: object) -> None:
            self._capsule = create()
            with contextlib.suppress(GpuCkptError, OSError, RuntimeError):  # it is read when it is needed
                self.reading = begin_read(self._capsule)

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
        reading, self.reading = self.reading, None
        if reading is not None:
            reading.cancel(wait_for_end=True)
        if self._capsule is not None:
            self._capsule.close()
