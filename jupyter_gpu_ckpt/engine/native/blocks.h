/* The device memory that this library serves: each block one physical allocation, mapped at an address that stays. */
#pragma once

#include "driver.h"

struct block {
    CUdeviceptr address; /* 0: a free slot */
    size_t bytes;        /* a multiple of the driver's granularity */
    CUmemGenericAllocationHandle handle;
    CUcontext context;
    CUdevice device;
    size_t offset; /* in the arena, while it is there */
};

/* A new block in the current context of this thread; 0 where there can be none, and the driver is to be asked. */
CUdeviceptr block_make(size_t bytes);

/* Whether there is a block at the address; its context, too. */
bool block_known(CUdeviceptr address, CUcontext *context);

/* Give a block back to the driver.  The caller has waited for the work of its context. */
CUresult block_drop(CUdeviceptr address);

/* Physical memory for a block, mapped at its address.  After failure there is none. */
CUresult block_map(struct block *block);

/* Take the physical memory away; the address stays reserved. */
CUresult block_unmap(struct block *block);

/* All blocks: slots of a table, some of them free.  Only while no other thread of the process runs. */
struct block *blocks_table(size_t *slots);
