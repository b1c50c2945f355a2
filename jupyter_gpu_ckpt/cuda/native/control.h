/* The socket by which the kernel's owner asks for the transfers. */
#pragma once

#include <stdbool.h>

/* Listen, if this process was asked to and does not yet; whether it does.  Without it nothing is served: what nobody
 * can ask to leave had better be the driver's. */
bool control_open(void);

/* In a child, just forked: close what was inherited of the socket. */
void control_in_child(void);
