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
    CUdeviceptr next; /* of the last piece of memory the unused rest */
    size_t rest;
};

/* Begin for so many bytes of large memory, of which about so many have to be staged, in the current context.  Nothing is
 * where that is more than a third of them, or than three quarters of what is free on the device, which others may need:
 * a memory that is staged in part has to wait for its copies, too. */
void staging_begin(struct staging *staging, size_t bytes, size_t expected);

/* Take memory for one part, in the context that it was begun in: from a piece of memory as long as that has some.  0:
 * there is none. */
CUdeviceptr staging_take(struct staging *staging, size_t bytes);

/* Whether two parts were taken from one piece. */
bool staging_is_one_piece(CUdeviceptr one, CUdeviceptr other);

/* Free the piece that a part was taken from; and all.  What the driver does not free, it is offered the next time. */
void staging_free_piece(CUdeviceptr part);
void staging_free(void);
