/* Host memory that others need more than a copy of what is on the device. */
#pragma once

#include <stdbool.h>

/* Whether the machine, or the cgroup that limits this process, has less than an eighth of its memory left, or processes
 * have waited for memory a tenth of the last ten seconds.  Takes no memory of the C library. */
bool memory_is_short(void);
