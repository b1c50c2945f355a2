/* Device memory out into the arena, and back. */
#pragma once

#include "blocks.h"

/* Blocks, their bytes, and those in the arena; at any time. */
struct amounts {
    size_t blocks, bytes, away;
};
struct amounts transfer_amounts(void);

/* The steps below run while the table is held (`blocks_hold`), and no other thread of the process, but for the driver's
 * own: who wrote to a block between the copy and the end of its memory would lose that. */

/* Copy every block into the arena.  After failure there is no arena, and every block is as it was. */
CUresult transfer_copy_out(void);

/* Take the physical memory of the blocks that were copied.  After failure they are where they were; or, where the driver
 * refuses that, too, in the arena, and what memory is left is taken by another attempt, or used by the return. */
CUresult transfer_free(void);

/* Forget a copy whose blocks are where they were. */
void transfer_forget(void);

/* Everything back from the arena.  After failure everything is in the arena still, and it can be tried again; the
 * device's memory is given back as far as the driver allows. */
CUresult transfer_bring_back(void);

/* Give back the arena from which everything is back: half a second for a hundred GiB, which nobody need wait for. */
void transfer_tidy(void);
