"""A capsule that is made before it is needed: while an image is matched, or a kernel is saved that goes back.

Of a kernel that goes back, device memory of the save point is read into it meanwhile, and its processes are restored in
it, which stay stopped; their CUDA state moves to the GPU once the present state has left it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from ..capsule.capsule import Capsule, Ran
from ..criu.criu import Restored
from ..errors import GpuCkptError
from ..image.background_task import BackgroundTask, beside
from ..image.device_memory import DeviceRead
from ..image.image import Image
from ..image.lease import Lease

_log = logging.getLogger(__name__)


@dataclass
class ProcessesAhead:
    """The right to restore an image beside its kernel: its lease, and its verification, which was begun.

    ``files``: yields CRIU's files as CRIU reads them.  ``restore``: restores the processes from those in a capsule,
    where they stay stopped.  ``is_still_true``: whether all that they have open is as it was then.  ``resume``: moves
    their CUDA state to the GPU, while only the driver's threads run; None where that must not be.  ``suspend``: takes
    that back, before they are ended; never raises.
    """

    lease: Lease
    verification: BackgroundTask
    files: Callable[[], AbstractContextManager[Path]]
    restore: Callable[[Capsule, Path], Ran]
    is_still_true: Callable[[], bool]
    resume: Callable[[Capsule, Ran, DeviceRead | None], Restored] | None
    suspend: Callable[[Capsule], None]

    def end(self) -> None:
        """Verify no more, and end the lease."""
        self.verification.cancel(wait_for_end=True)
        self.lease.release()


class CapsuleAhead:
    """A capsule for the kernel of ``image`` that is being made on a thread of its own; `claim` or `discard` ends it.

    ``create``: makes it, beside the one that the kernel may be in.  ``begin_read``: begins to read device memory into
    it, to be moved to the GPU here or not.  ``prepare``: returns how processes are restored in it, None if they must
    not be there twice.  Raises `RuntimeError` where there are no more threads.
    """

    def __init__(
        self,
        image: Image,
        create: Callable[[], Capsule],
        begin_read: Callable[[Capsule, bool], DeviceRead | None] = lambda _, __: None,
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
        #: Of a capsule that was claimed: the end of the restore of its processes, if they are on the GPU.
        self.resumed: Restored | None = None
        self._suspend: Callable[[Capsule], None] | None = None
        self._resumes, self._may_resume = False, threading.Event()

        def make(check_cancelled: Callable[[], None]) -> None:
            try:
                self._processes = prepare()
                self.restores = self._processes is not None
                self._resumes = self._processes is not None and self._processes.resume is not None
            except (GpuCkptError, OSError, RuntimeError) as error:  # a wake reports what lasts
                _log.info("Processes are not restored before they are needed: %s", error)
            finally:
                self._prepared.set()
            check_cancelled()
            processes = self._processes
            with contextlib.ExitStack() as resources:
                with beside(create_capsule) as creation:
                    files = resources.enter_context(processes.files()) if processes is not None else None
                capsule = creation.result()
                with contextlib.suppress(GpuCkptError, OSError, RuntimeError):  # it is read when it is needed
                    self.reading = begin_read(capsule, self._resumes)
                check_cancelled()
                if processes is not None and files is not None:
                    self.restored = processes.restore(capsule, files)
            if processes is not None and processes.resume is not None and self.restored is not None:
                self._may_resume.wait()
                self._suspend = processes.suspend  # first: who discards this cancels it, and then looks
                check_cancelled()
                self.resumed = processes.resume(capsule, self.restored, self.reading)

        def create_capsule() -> Capsule:
            self._capsule = create()
            return self._capsule

        self._task = BackgroundTask("gpu-ckpt-capsule", make)

    def is_of(self, image: Image) -> bool:
        """Return whether it is made for the kernel of this image."""
        return image.id == self._image

    def hand_over(self) -> tuple[Lease, BackgroundTask] | None:
        """Return the lease and the verification of its image, which are the caller's now; None if there are none."""
        self._prepared.wait()
        if self._processes is None:
            return None
        processes, self._processes = self._processes, None
        self._is_still_true = processes.is_still_true
        return processes.lease, processes.verification

    def may_resume(self) -> None:
        """Note that the GPU is free: the present state has left it."""
        self._may_resume.set()

    def on_gpu(self) -> list[int]:
        """Return the host pids of its processes that are on the GPU, once what is under way has ended.

        None where that has failed: what it had there is free again.
        """
        self._prepared.wait()
        if not self._resumes:
            return []
        self._may_resume.set()
        try:
            self._task.wait()
        except (GpuCkptError, OSError) as error:
            _log.info("A save point's CUDA state is not on the GPU before it is needed: %s", error)
            self.discard()
        return [self._capsule.host_pid] if self.resumed is not None and self._capsule is not None else []

    def claim(self, image: Image, *, as_it_was: bool = True) -> Capsule | None:
        """Return the capsule; None if there is none for this image.

        ``as_it_was``: the image is restored with the files that it had, and nothing is put back before.  Never raises:
        whatever went wrong, another one can be made.
        """
        self._may_resume.set()
        try:
            self._task.wait()
            fits = self.restored is None or (as_it_was and self._is_still_true())
            if self._capsule is not None and self.is_of(image) and fits:
                self._capsule.require_alive()
                return self._capsule
        except (GpuCkptError, OSError) as error:
            _log.info("What was made ahead cannot be used: %s", error)
        self.discard()
        return None

    def cancel(self) -> None:
        """End what is under way, also CRIU.  From any thread; never raises."""
        self._task.cancel()
        self._may_resume.set()
        if (capsule := self._capsule) is not None:
            capsule.close()

    def discard(self) -> None:
        """End the capsule.  Never raises."""
        self._task.cancel()
        if self._suspend is not None and self._capsule is not None:  # what is on the GPU is not killed there
            self._task.cancel(wait_for_end=True)
            self._suspend(self._capsule)
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
        self.restored = self.resumed = None
