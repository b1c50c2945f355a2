/* Copies between the blocks and the arena, by many threads; and what they need of the driver. */
#pragma once

#include "blocks.h"

/* While the table is held (`blocks_hold`), all of these. */

/* Every block that was given an offset, to its place in the arena or from there.  After failure some may be. */
CUresult copies_make(bool outwards);

/* Whether some may still be on their way, because the driver would not say when they end. */
bool copies_under_way(void);

/* Nothing that was asked of the devices before is under way any more. */
CUresult copies_wait(void);

/* Open the driver's door for copies (`door.h`), by calls as they make, in every context that has blocks, for nothing. */
CUresult copies_rehearse(void);
