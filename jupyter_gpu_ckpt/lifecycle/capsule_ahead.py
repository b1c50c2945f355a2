"""A capsule that is made before it is needed: while an image is matched, or a kernel is saved that goes back.

Of a kernel that goes back, device memory of the save point is read into it meanwhile, and its processes are restored in
it, which stay stopped.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ..capsule.capsule import Capsule, Ran
from ..errors import GpuCkptError
from ..image.background_task import BackgroundTask
from ..image.device_memory import DeviceRead
from ..image.image import Image
from ..image.lease import Lease

_log = logging.getLogger(__name__)


@dataclass
class ProcessesAhead:
    """The right to restore an image beside its kernel: its lease, and its verification, which was begun.

    ``restore``: restores its processes in a capsule, where they stay stopped.  ``is_still_true``: whether all that they
    have open is as it was then.
    """

    lease: Lease
    verification: BackgroundTask
    restore: Callable[[Capsule], Ran]
    is_still_true: Callable[[], bool]

    def end(self) -> None:
        """Verify no more, and end the lease."""
        self.verification.cancel(wait_for_end=True)
        self.lease.release()


class CapsuleAhead:
    """A capsule for the kernel of ``image`` that is being made on a thread of its own; `claim` or `discard` ends it.

    ``create``: makes it, beside the one that the kernel may be in.  ``begin_read``: begins to read device memory into
    it.  ``prepare``: returns how processes are restored in it, None if they must not be there twice.  Raises
    `RuntimeError` where there are no more threads.
    """

    def __init__(
        self,
        image: Image,
        create: Callable[[], Capsule],
        begin_read: Callable[[Capsule], DeviceRead | None] = lambda _: None,
        prepare: Callable[[], ProcessesAhead | None] = lambda: None,
    ) -> None:
        self._image = image.id
        self._capsule: Capsule | None = None
        #: Of device memory, of a capsule that was claimed; None: it was not begun.
        self.reading: DeviceRead | None = None
        #: Of a capsule that was claimed: the end of CRIU's restore of the processes in it, which are stopped.
        self.restored: Ran | None = None
        #: Whether processes are restored in it, or have been.
        self.restores = False
        self._processes: ProcessesAhead | None = None
        self._is_still_true: Callable[[], bool] = lambda: False
        self._prepared = threading.Event()

        def make(check_cancelled: Callable[[], None]) -> None:
            try:
                self._processes = prepare()
                self.restores = self._processes is not None
            except (GpuCkptError, OSError, RuntimeError) as error:  # a wake reports what lasts
                _log.info("Processes are not restored before they are needed: %s", error)
            finally:
                self._prepared.set()
            check_cancelled()
            processes, self._capsule = self._processes, create()
            with contextlib.suppress(GpuCkptError, OSError, RuntimeError):  # it is read when it is needed
                self.reading = begin_read(self._capsule)
            check_cancelled()
            if processes is not None:
                self.restored = processes.restore(self._capsule)

        self._task = BackgroundTask("gpu-ckpt-capsule", make)

    def hand_over(self, image: Image) -> tuple[Lease, BackgroundTask] | None:
        """Return the lease and the verification of this image, which are the caller's now; None if there are none."""
        self._prepared.wait()
        if image.id != self._image or self._processes is None:
            return None
        processes, self._processes = self._processes, None
        self._is_still_true = processes.is_still_true
        return processes.lease, processes.verification

    def claim(self, image: Image, *, as_it_was: bool = True) -> Capsule | None:
        """Return the capsule; None if there is none for this image.

        ``as_it_was``: the image is restored with the files that it had, and nothing is put back before.  Never raises:
        whatever went wrong, another one can be made.
        """
        try:
            self._task.wait()
            fits = self.restored is None or (as_it_was and self._is_still_true())
            if self._capsule is not None and image.id == self._image and fits:
                self._capsule.require_alive()
                return self._capsule
        except (GpuCkptError, OSError) as error:
            _log.info("What was made ahead cannot be used: %s", error)
        self.discard()
        return None

    def cancel(self) -> None:
        """End what is under way, also CRIU.  From any thread; never raises."""
        self._task.cancel()
        if (capsule := self._capsule) is not None:
            capsule.close()

    def discard(self) -> None:
        """End the capsule.  Never raises."""
        self.cancel()
        self._task.cancel(wait_for_end=True)
        if self._capsule is not None:
            self._capsule.close()
        reading, self.reading = self.reading, None
        if reading is not None:
            reading.discard()
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.end()
        self.restored = None
