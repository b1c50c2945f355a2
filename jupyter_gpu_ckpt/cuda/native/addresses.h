/* Addresses of served memory: what is given back is kept for the next allocations, which saves two calls of the driver
 * for each. */
#pragma once

#include <stdbool.h>

#include "driver.h"

/* These lock the table.  Reserve addresses for so many bytes, and ``reserved`` bytes in all; 0: the driver has none. */
CUdeviceptr addresses_reserve(size_t bytes, size_t *reserved);

/* Give them back; no memory is mapped there any more. */
CUresult addresses_give_back(CUdeviceptr address, size_t reserved);

/* Whether some are kept, at any time. */
bool addresses_are_kept(void);

/* Keep none any more, after a context was destroyed: nobody says whether they are valid in the next one. */
void addresses_drop(void);

/* Forget what is kept, in a child that was just forked. */
void addresses_in_child(void);
