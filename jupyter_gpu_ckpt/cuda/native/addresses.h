/* Addresses of served memory: what is given back is kept for the next allocations, which saves two calls of the driver
 * for each. */
#pragma once

#include "driver.h"

/* Both lock the table.  Reserve addresses for so many bytes, and ``reserved`` bytes in all; 0: the driver has none. */
CUdeviceptr addresses_reserve(size_t bytes, size_t *reserved);

/* Give them back; no memory is mapped there any more. */
CUresult addresses_give_back(CUdeviceptr address, size_t reserved);

/* Forget what is kept, in a child that was just forked. */
void addresses_in_child(void);
