"""Restart system calls that waited when their thread was stopped, once it runs again.

A wait with a timeout that a stop interrupts is not repeated from its registers but from a note that Linux keeps for the
thread (``restart_block``).  CRIU cannot save that note and lets the wait return early with ``EINTR``
(``compel/arch/x86/src/lib/infect.c: get_task_regs``); ``epoll_wait(2)`` and System V semaphores return it at each
stop (signal(7)).  A program must see ``EINTR`` only where a handler of its own has run.  So each such thread is set to
make its system call again, in the way in which Linux itself restarts waits without a timeout.

A wait until a point in time ends at that point.  ``nanosleep(2)`` continues with the rest if its caller wanted the
rest.  Any other timeout begins anew: such a wait may take longer than its timeout, but never less.
"""

from __future__ import annotations

import errno

from jupyter_gpu_ckpt.process.ptrace import MACHINE, Tracee

# include/linux/errno.h: results of system calls inside Linux, which no program ever sees.
ERESTARTNOINTR = 513
ERESTART_RESTARTBLOCK = 516

_TIMER_ABSTIME = 1


#: x86_64: poll, rt_sigtimedwait, futex, semop, semtimedop, epoll_wait, epoll_pwait, epoll_pwait2.
_WAITS = frozenset((7, 128, 202, 65, 220, 232, 281, 441))
#: x86_64: nanosleep, clock_nanosleep; which arguments are the time to sleep, the address for the rest, and flags.
_SLEEPS: dict[int, tuple[int, int, int | None]] = {35: (0, 1, None), 230: (2, 3, 1)}


def begin_again(tracee: Tracee, *, signals: int) -> bool:
    """Let a stopped thread repeat its interrupted system call when it runs.  Return whether it was in such a call.

    ``signals``: the pending ones.  If one of them is not blocked, the interruption is the program's own.
    """
    if MACHINE.in_call is None or signals & ~tracee.mask:
        return False
    words = tracee.words()
    number = words[MACHINE.in_call]
    if _signed(words[MACHINE.result]) not in (-errno.EINTR, -ERESTART_RESTARTBLOCK):
        return False
    if number in _SLEEPS:
        request, rest, flags = _SLEEPS[number]
        absolute = flags is not None and words[MACHINE.arguments[flags]] & _TIMER_ABSTIME
        if (left := words[MACHINE.arguments[rest]]) and not absolute:  # Linux has written the rest there already
            words[MACHINE.arguments[request]] = left
    elif number not in _WAITS:
        return False
    words[MACHINE.result] = -ERESTARTNOINTR & (1 << 64) - 1
    tracee.set_words(words)
    return True


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
