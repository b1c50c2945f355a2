#pragma once

#include <stddef.h>

/* The host memory into which the driver moves the contexts of this process when it suspends it: one populated mapping of
 * some hundred MiB (PyTorch on a H100, driver 580.159.04: 620 MiB, 157,365 of 158,757 pages are zeros).  An image need not
 * have those. */

/* The driver, and nobody else, has mapped this; called in any thread, also one that must not allocate. */
void context_memory_note(void *memory, size_t bytes);
/* What was noted is from an earlier suspend, or other memory of the driver. */
void context_memory_forget(void);
/* Give pages of zeros back to Linux: they read as zeros.  Only while the driver has suspended this process: nobody then
 * writes to what it has mapped since the gate was closed for good. */
void context_memory_drop_zeros(void);
