/* Parts of device memory that hold nothing but zeros, found by a kernel on the GPU: they need not be copied.
 *
 * Wherever the kernel cannot be loaded or launched, no part is found, and all are copied. */
#pragma once

#include "driver.h"

/* As the kernel reads them: at any address that is a multiple of 16. */
struct scanned {
    CUdeviceptr address;
    size_t bytes; /* a multiple of SCAN_BYTES */
};
#define SCAN_BYTES ((size_t)16 << 10)

/* What the kernel writes for each; where it does not come so far, the number stays. */
enum { ONLY_ZEROS, OTHER_BYTES };

/* Load the kernel in the current context, unless it is loaded there. */
void zero_parts_load(CUcontext context);

/* Launch the kernel on a stream of the current context.  ``parts`` and ``found`` are in host memory that is registered
 * with the driver, and stay there until the stream's work is done.  False: it was not launched. */
bool zero_parts_scan(CUcontext context, CUstream stream, const struct scanned *parts, unsigned *found, size_t number);
