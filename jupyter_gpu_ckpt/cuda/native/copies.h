/* Copies between device memory and host memory by many threads, and what they need of the driver.
 * All of these are called while the table is locked (`table_lock_for_swap`). */
#pragma once

#include <stdatomic.h>

#include "allocations.h"
#include "mappings.h"

/* The next memory of both tables that has a place in host memory, after ``at``, which begins as 0; false at the end. */
bool copies_next(size_t *at, struct copied *next);

/* Pinned memory, which the device can read, too, and a stream for copies from and to it, in the current context.  A ring
 * that cannot be closed stays as it is. */
struct ring {
    char *memory;
    size_t bytes;
    size_t piece;       /* bytes that are pinned together */
    atomic_uint pinned; /* a bit for each piece that is */
    CUcontext context;
    CUstream stream, zeros; /* ``zeros``: or NULL; for what the device writes itself */
};
CUresult ring_open(struct ring *ring, CUcontext context, size_t bytes);
CUresult ring_close(struct ring *ring);

/* Copy all memory that has an offset in host memory there, or back, beside a step on each memory, by the number with
 * which `copies_next` has left it (less one), in its context and in that order: after its copy is in host memory (NULL:
 * no step); or before it is copied back, as it has no device memory yet.  ``keeps``: host memory is kept afterwards, or
 * was before; only pages that it does not have are copied (`page_digests.h`).  After failure some may be copied, and of
 * what was noted in host memory some may not be there.
 *
 * On the way out large memory does not wait for its copy where that can be made from other memory of the device
 * (`staging.h`).  After failure that may be the only one, until the memory was copied back, which takes it from there. */
CUresult copies_run_out(bool keeps, CUresult (*step)(size_t number));
CUresult copies_run_in(CUresult (*step)(size_t number));

/* Copy back, and prove on the devices that what arrived is what went out: others may have replaced the files meanwhile.
 * CUDA_ERROR_ILLEGAL_STATE where it is not, or where that cannot be proved. */
CUresult copies_run_in_checked(CUresult (*step)(size_t number));

/* Free what is still staged: after a copy out, or after the copy back if that has failed; or where it has made no step. */
void copies_end_staging(void);

/* Write the moments of the last transfer that are after one of CLOCK_MONOTONIC, in seconds from that on, as members of
 * an object of JSON, of several contexts those of the last: ``prepared`` (the transfer begins), ``first_examined``
 * (parts may be copied), ``opened`` (threads for that may begin), ``examined``, ``copied``, ``checked`` (if it was),
 * ``closed``. */
void copies_report(double began, char *text, size_t size);

/* Note that host memory has a copy of everything: the next transfer may have nothing to copy. */
void copies_note_mirrored(void);

/* Whether copies may still be running, because the driver did not say when they end. */
bool copies_pending(void);

/* Wait until nothing that was requested of the devices before is running. */
CUresult copies_wait(void);

/* Make the calls that copies make, without copying, in every context that has memory: with `rwlock_release`, so
 * that the copies themselves do not block at the driver's lock.  ``keeps``: as above. */
CUresult copies_dry_run(bool keeps);
