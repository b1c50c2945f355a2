/* A child that this process forks after it has used CUDA cannot: refusing its calls is left to the runtime and the
 * driver, as without this library.  The library is inert in it: it serves nothing, knows no allocation, has no thread and
 * no socket. */
#pragma once

#include <stdbool.h>

bool is_inert(void);
