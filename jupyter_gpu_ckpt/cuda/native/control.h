/* The socket by which the kernel's owner requests swaps. */
#pragma once

#include <stdbool.h>

/* Listen if this process was asked to and does not yet; return whether it listens.  Nothing is served otherwise: memory
 * that nobody can swap out is better left to the driver. */
bool control_open(void);

/* Close inherited descriptors of the socket, in a child that was just forked. */
void control_in_child(void);
