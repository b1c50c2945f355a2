/* Device memory for what a large memory holds beside zeros, while that is swapped out.
 *
 * JAX takes three quarters of a GPU as one memory, and the driver releases a memory only as a whole.  That takes time,
 * and the driver then clears what was released: 105 GiB of an H200 in 0.07 and 0.3 s, in which it is slower at everything
 * else.  So the parts that have to be copied to host memory are copied to other memory of the device first, thirty times
 * as fast, and the large one is released while they cross the bus. */
#pragma once

#include "driver.h"

/* Memory that is smaller is released after its copy. */
#ifndef STAGED_LEAST /* less, in tests */
#define STAGED_LEAST ((size_t)8 << 30)
#endif

/* What may be staged in one context. */
struct staging {
    size_t left;
    CUdeviceptr next; /* of the last allocation the unused rest */
    size_t rest;
};

/* Begin for so many bytes of large memory, in the current context: a quarter of them is staged at most, and a quarter of
 * what is free on the device is left to others. */
void staging_begin(struct staging *staging, size_t bytes);

/* Take memory for one part, in the context that it was begun in; 0: there is none. */
CUdeviceptr staging_take(struct staging *staging, size_t bytes);

/* Free all that was taken.  What the driver does not free, it is offered the next time. */
void staging_free(void);
