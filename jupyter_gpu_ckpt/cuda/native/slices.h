/* Work on large memory by several threads of this process, each on a slice of it. */
#pragma once

#include <stddef.h>

/* Call ``work`` for slices of whole pages that are all of the memory, at the same time where there are processors and
 * threads for that; return when all are done.  No handler of the program runs on these threads. */
void in_slices(char *memory, size_t bytes, void (*work)(char *memory, size_t bytes));

/* Have memory of this process populated like that, for writes, as far as the system does it. */
void populate(char *memory, size_t bytes);
