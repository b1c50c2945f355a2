/* Copies between device memory and host memory by many threads, and what they need of the driver.
 * All of these are called while the table is locked (`table_lock_for_swap`). */
#pragma once

#include "allocations.h"

/* Copy all memory that has an offset in host memory there, or back.  ``keeps``: host memory is kept afterwards, or was
 * before; only pages that it does not have are copied (`page_digests.h`).  After failure some may be copied. */
CUresult copies_run_out(bool keeps);
CUresult copies_run_in(void);

/* Whether copies may still be running, because the driver did not say when they end. */
bool copies_pending(void);

/* Wait until nothing that was requested of the devices before is running. */
CUresult copies_wait(void);

/* Make the calls that copies make, without copying, in every context that has memory: with `rwlock_release`, so
 * that the copies themselves do not block at the driver's lock.  ``keeps``: as above. */
CUresult copies_dry_run(bool keeps);
