/* The read-write lock at which the CUDA driver makes callers wait, while threads that wait there are stopped. */
#pragma once

#include "driver.h"

/* Whether this file knows the layout of this C library's read-write locks: by its version, and by trying a lock of our
 * own, which takes a thread and some milliseconds.  If not, nothing else of this file may be called. */
bool rwlock_layout_is_known(void);

/* Make calls like those of `dry_run` return although every other thread of the process, except the driver's own, is
 * stopped.
 *
 * A thread that waits for the driver's lock as a reader owns it as soon as the driver is unlocked, even if it is
 * stopped and has not noticed.  Then nobody can lock it for writing, as our calls must.  Such readers are dropped from
 * the lock's count until `rwlock_restore`; meanwhile they must stay stopped, or the driver be locked again.
 *
 * Returns the result of `dry_run`, or CUDA_ERROR_NOT_READY if it does not return within seconds: then the stopped
 * threads have to run again before anything else is tried. */
CUresult rwlock_release(CUresult (*dry_run)(void));

/* Whether a dry run that was given up is still blocked. */
bool rwlock_probe_is_busy(void);

/* Whether readers are dropped. */
bool rwlock_is_released(void);

/* Count the dropped readers again: before they run on.  Never blocks. */
void rwlock_restore(void);
