/* Serving an allocation and freeing it, whichever function the program has called for that. */
#pragma once

#include "driver.h"

/* Whether an allocation of this size is served at all, before the driver is asked anything. */
bool may_serve(size_t bytes);

/* Create an allocation; 0: the driver is to allocate. */
CUdeviceptr serve(size_t bytes);

/* Free a served allocation as the driver would: after all work of its context; and while a stream is captured, which
 * must not be waited for, when that has ended.  Passes the launch gate. */
CUresult free_served(CUdeviceptr address, CUcontext context);

/* Give back memory that was freed while it could not be (`capture.c`, cuMemFreeAsync).  ``wait``: for the work that it
 * was freed behind.  Return whether any was given back.  The caller has passed the launch gate: some calls that this
 * makes end a process that the driver has suspended. */
bool collect_freed(bool wait);
