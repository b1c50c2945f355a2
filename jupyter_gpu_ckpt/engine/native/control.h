/* The socket by which the kernel's owner asks for the transfers. */
#pragma once

#include <stdbool.h>

/* Listen, if this process was asked to and does not yet; whether it does.  Without it nothing is served: what nobody
 * can ask to leave had better be the driver's. */
bool control_open(void);
