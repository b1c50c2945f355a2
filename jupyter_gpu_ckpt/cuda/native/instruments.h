/* Tools that watch a program's use of the GPU. */
#pragma once

#include <stdbool.h>

/* Whether compute-sanitizer is in this process.  It checks each access against the allocations that it has seen made by
 * cuMemAlloc, so that a program that it checks must get its memory from there. */
bool compute_sanitizer_is_loaded(void);
