/* Memory pools of stream-ordered allocations, as far as the library serves them: beside each pool of the driver's, memory
 * that is cut into allocations, and blocks of it that the program has freed in the order of a stream.
 *
 * A block is given out again, or a part of it, on the stream that it was freed on, whose later work comes after its
 * earlier; elsewhere only when the work before the free is done.  Neighbours that may be used alike are joined.  Memory
 * over the pool's release threshold goes back to the driver, as soon as all of it is free, when none fits, and when the
 * program asks how much memory there is. */
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

/* Allocate memory that may be used in the order of a stream: of a block that was freed, or new; 0: the driver is to. */
CUdeviceptr pools_allocate(unsigned pool, size_t bytes, const struct pool_stream *where);

/* Free an allocation behind the stream's work; CUDA_ERROR_NOT_FOUND: no such one of a pool. */
CUresult pools_free(CUdeviceptr address, const struct pool_stream *where);

/* Free one in no stream's order: the work of its context is done, or (``later``) is waited for before it is used again. */
CUresult pools_free_unordered(CUdeviceptr address, bool later);

/* Give back unused memory of a pool (0: of all) until it has no more than ``keep`` bytes (SIZE_MAX: its release
 * threshold).  ``wait`` for the work before it was freed.  Return whether any was given back.
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
