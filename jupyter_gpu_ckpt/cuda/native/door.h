/* The lock at which the CUDA driver makes callers wait, while threads that wait there are stopped. */
#pragma once

#include "driver.h"

/* Whether read-write locks of this C library are such as this file knows: by its version, and by a lock of our own.  It
 * takes a thread and some milliseconds.  Where they are not, nothing else of this file may be called. */
bool door_is_known(void);

/* See to it that calls like those of the rehearsal come back, while every other thread of the process, but for the
 * driver's own, is stopped.
 *
 * A thread that waits for the driver's lock as a reader owns it as soon as the driver is unlocked, also if it is stopped
 * and knows nothing of it; then nobody gets it as a writer, which our calls must.  Such are relieved of it, until
 * `door_close`; meanwhile they must stay stopped, or the driver be locked again.
 *
 * Returns what the rehearsal does, or CUDA_ERROR_NOT_READY when it does not come back within seconds; then nothing is
 * as it should be, and whoever is stopped has to go on before anything else is tried. */
CUresult door_open(CUresult (*rehearsal)(void));

/* Whether a rehearsal is held up that was given up. */
bool door_is_busy(void);

/* Whether anybody is relieved. */
bool door_is_open(void);

/* Give everybody what they were relieved of: before they go on.  Waits for nobody. */
void door_close(void);
