/* Copies between device memory and host memory by many threads, and what they need of the driver.
 * All of these are called while the table is locked (`table_lock_for_swap`). */
#pragma once

#include "allocations.h"

/* Copy all memory that has an offset in host memory there (`outwards`) or back.  After failure some may be
 * copied. */
CUresult copies_run(bool outwards);

/* Whether copies may still be running, because the driver did not say when they end. */
bool copies_pending(void);

/* Wait until nothing that was requested of the devices before is running. */
CUresult copies_wait(void);

/* Make the calls that copies make, without copying, in every context that has memory: with `rwlock_release`, so
 * that the copies themselves do not block at the driver's lock. */
CUresult copies_dry_run(void);
