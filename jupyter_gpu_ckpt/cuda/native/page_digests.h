/* Digests of pages of device memory, computed by a kernel on the GPU: pages that are as they were need not be copied.
 *
 * The digest is SipHash-2-4 of 128 bits, keyed by random bytes of this process: of what each thread of a block reads
 * (every 256th 16 bytes of the page), then of 16 of these digests, and of 16 of those.  So two pages have the same one
 * by an accident of 2^-128, and nobody can make them.
 *
 * Wherever the kernel cannot be loaded or launched there are no digests, and all is copied. */
#pragma once

#include <stdint.h>

#include "driver.h"

#define DIGEST_PAGE ((size_t)2 << 20)

struct digest {
    uint64_t words[2]; /* both 0: it is not known */
};

/* Load the kernel in the current context, unless it is loaded there. */
void page_digests_load(CUcontext context);

/* Launch the kernel on a stream of the current context.  ``pages``, addresses that are multiples of 16, and ``digests``,
 * which is one, too, are in host memory that is registered with the driver, and stay there until the stream's work is
 * done.  False: it was not launched. */
bool page_digests_compute(CUcontext context, CUstream stream, const CUdeviceptr *pages, struct digest *digests,
                          size_t number);
