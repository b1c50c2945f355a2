/* Device memory out into the arena, anonymous memory of this process, and back. */
#pragma once

#include "blocks.h"

/* Bytes of all blocks, and of those in the arena. */
struct amounts {
    size_t blocks, bytes, away;
};
struct amounts transfer_amounts(void);

/* The steps below run while no other thread of the process does, but for the driver's own. */

/* Copy every block into the arena.  After failure there is no arena, and every block is as it was. */
CUresult transfer_copy_out(void);

/* Take the physical memory of the blocks that were copied.  After failure they are where they were, or in the arena. */
CUresult transfer_free(void);

/* Forget a copy whose blocks are where they were. */
void transfer_forget(void);

/* Everything back from the arena.  After failure everything is in the arena still, and it can be tried again. */
CUresult transfer_bring_back(void);

/* Give back the arena from which everything is back: half a second for a hundred GiB, which nobody need wait for. */
void transfer_tidy(void);
