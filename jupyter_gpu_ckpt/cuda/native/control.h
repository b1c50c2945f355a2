/* The sockets by which the kernel's owner requests swaps: the kernel's, and one of each process that it has started. */
#pragma once

#include <stdbool.h>
#include <sys/types.h>

/* Listen if this process was asked to and does not yet; return whether it listens.  Nothing is served otherwise: memory
 * that nobody can swap out is better left to the driver. */
bool control_open(void);

/* What the name of this process's socket ends with, after the kernel's and a hyphen; 0: it is the kernel's. */
pid_t control_suffix(void);

/* Close inherited descriptors of the socket, in a child that was just forked. */
void control_in_child(void);
