/* A child that this process forks.  It cannot use CUDA: what it asks for is the runtime's and the driver's to refuse, as
 * without this library.  So there the library is inert: it serves nothing, knows no block, has no thread and no socket.
 */
#pragma once

#include <stdbool.h>

bool is_inert(void);
