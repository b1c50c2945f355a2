/* Memory pools of stream-ordered allocations, as far as the library serves them: beside each pool of the driver's, blocks
 * that the program has freed in the order of a stream.
 *
 * A block is given out again on the stream that it was freed on, whose later work comes after its earlier; elsewhere
 * only when the work before the free is done.  Blocks over the pool's release threshold go back to the driver when a
 * block of another size is needed, and when the program asks how much memory there is. */
#pragma once

#include "driver.h"

/* The number of a pool that is served, 0 if it is not.  No other pool has ever had it. */
unsigned pools_find(CUmemoryPool handle);

/* Serve a pool of a device from now on; return its number, 0 if there are too many. */
unsigned pools_add(CUmemoryPool handle, CUdevice device, unsigned long long threshold);

/* Whether it is a pool of the device. */
bool pools_on(unsigned pool, CUdevice device);

/* Forget a pool that was destroyed: its blocks are given back, and what is allocated from it is as soon as it is freed. */
void pools_remove(CUmemoryPool handle);

CUmemoryPool pools_handle(unsigned pool);

/* A stream as seen in a context; ``ordered``: it is one and the same for all who call it so. */
struct pool_stream {
    CUcontext context;
    CUstream stream;
    bool ordered;
};

/* Allocate a block that may be used in the order of a stream: one that was freed, or a new one; 0: the driver is to. */
CUdeviceptr pools_allocate(unsigned pool, size_t bytes, const struct pool_stream *where);

/* Free the block behind the stream's work; CUDA_ERROR_NOT_FOUND: no such block. */
CUresult pools_free(CUdeviceptr address, const struct pool_stream *where);

/* Count a block that is freed at once, with its memory. */
void pools_freed(unsigned pool, size_t requested, size_t bytes);

/* Give back unused blocks of a pool (0: of all) until it has no more than ``keep`` bytes, or its release threshold if
 * that is more (SIZE_MAX: that).  ``wait`` for the work before them.  Return whether any was given back.
 * Passes the launch gate if there are blocks. */
#define TO_THRESHOLD SIZE_MAX
bool pools_trim(unsigned pool, size_t keep, bool wait);

/* What a pool has: attributes by their numbers in CUDA. */
enum {
    POOL_RELEASE_THRESHOLD = 4,
    POOL_RESERVED_CURRENT,
    POOL_RESERVED_HIGH,
    POOL_USED_CURRENT,
    POOL_USED_HIGH,
};
unsigned long long pools_attribute(unsigned pool, int attribute);
void pools_set_attribute(unsigned pool, int attribute, unsigned long long value);

/* A stream or a context was destroyed: its number may be another's later. */
void pools_forget_stream(CUstream stream);
void pools_forget_context(CUcontext context);

void pools_in_child(void);
