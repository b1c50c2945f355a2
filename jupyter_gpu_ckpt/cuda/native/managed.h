/* Managed memory of this process, which the driver does not suspend: counted, so that a refusal has its reason. */
#pragma once

#include "driver.h"

void managed_add(CUdeviceptr address);

/* Forget memory that is being freed.  Return whether it was counted. */
bool managed_remove(CUdeviceptr address);

/* Forget all: a context was destroyed, with memory that is not known. */
void managed_forget(void);

/* The number of allocations, at least. */
size_t managed_count(void);
