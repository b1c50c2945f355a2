/* Allocations for which a GPU that is shared has no free memory: the process's owner has others leave it, or this
 * process wait for its turn with as much more, and the allocation is tried again before the program gets the error. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

/* Wait for free memory.  True: the owner has done something about it, and another attempt may succeed.  False at once
 * where GPUs are not shared, and after some seconds without an answer. */
bool memory_wait(size_t bytes);
