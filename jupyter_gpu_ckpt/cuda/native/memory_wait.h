/* Allocations for which a GPU that is shared has no free memory: the process's owner has others leave it, or this
 * process wait for its turn with as much more, and the allocation is tried again before the program gets the error. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "driver.h"

/* Wait for free memory.  True: the owner has done something about it, and another attempt may succeed.  False at once
 * where GPUs are not shared, and after some seconds without an answer. */
bool memory_wait(size_t bytes);

/* The same for a context that a device has no memory for, of a process that may not be on that GPU yet.  ``bytes``: 0
 * before the first attempt; each asks for more. */
bool memory_wait_for_context(CUdevice device, size_t *bytes);
