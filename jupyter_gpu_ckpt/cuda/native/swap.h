/* Swap device memory out to host memory, and in again. */
#pragma once

#include "allocations.h"
#include "mappings.h"

/* Number of allocations, their bytes, the bytes that are swapped out, and those of host memory that is kept while
 * they are on the device; may be called at any time. */
struct amounts {
    size_t allocations, bytes, swapped_out, kept;
};
struct amounts swap_amounts(void);

/* Keep what was swapped in also in host memory, in files in memory, if that takes no more bytes than ``limit`` (0: never):
 * the next copy then only moves pages that differ.  Gives up at once what is more. */
void swap_keep(size_t limit);
size_t swap_limit(void);

/* Whether something is kept; and give it up if host memory is short (`memory_pressure.h`), or if there is no allocation
 * any more. */
bool swap_keeps(void);
void swap_check_memory(void);
void swap_give_up(void);

/* Give everything that would be copied its place in host memory that is kept, beside what that has already, and list it:
 * for `mirror.h`, while the program runs.  NULL: there is nothing, it must not be kept, or there is no host memory. */
struct copied *swap_places(size_t *count);
void swap_free_places(struct copied *list, size_t count);

/* The steps below run while the table is locked (`table_lock_for_swap`) and every thread of the process except the
 * driver's own is stopped: a write to an allocation after its copy and before its memory is freed would be lost. */

/* Copy every allocation to host memory.  After failure there is no copy, and every allocation is as it was. */
CUresult swap_copy_out(void);

/* Export memory that was copied and is still on the device, at most so many, for `held_memory_take`: `held_memory.h`.
 * The number of descriptors; 0 where there is no copy. */
size_t swap_export(int *descriptors, size_t most, size_t *bytes);

/* Free the device memory of the allocations that were copied.  After failure their content is on the device; or, where
 * the driver refuses that, too, in host memory, and what device memory is left is freed by another attempt or used by
 * `swap_in`. */
CUresult swap_free_device(void);

/* Both at the same time: free each memory as soon as its copy is complete, so that the bus is busy meanwhile, and others
 * have it early.  After failure as `swap_free_device`; where what was freed already cannot be had again, that alone is
 * in host memory, and the driver has the rest. */
CUresult swap_move_out(void);

/* Discard a copy whose allocations are still on the device, unless it is kept. */
void swap_discard_copy(void);

/* Bring everything back to the device.  After failure everything is still in host memory, and the call can be repeated;
 * device memory is freed as far as the driver allows. */
CUresult swap_in(void);

/* The same, while others leave the device: each memory is created when there is as much free, and copied while the next
 * one is waited for.  Fails as `swap_in` when for so many seconds nothing more could be created. */
CUresult swap_in_as_freed(double seconds);

/* `swap_in`, with proof that all has the content that it had when it was swapped out (`copies_run_in_checked`). */
CUresult swap_in_checked(void);

/* Free the host memory from which everything was swapped in, unless it is kept: half a second for a hundred GiB, done
 * after the reply. */
void swap_free_host(void);
