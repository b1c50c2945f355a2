/* The device memory that this library serves: each block one physical allocation, mapped at an address that stays. */
#pragma once

#include <stdint.h>

#include "driver.h"

struct block {
    CUdeviceptr address; /* 0: a free slot */
    size_t bytes;        /* a multiple of the driver's granularity */
    CUcontext context;
    CUdevice device;
    enum { AWAY, MAPPED, USABLE } memory;
    bool held; /* by its handle: as long as it is mapped, and after where the driver did not take it back */
    CUmemGenericAllocationHandle handle;
    size_t offset; /* in the arena, of a block that was copied there; or NOT_COPIED */
};
#define NOT_COPIED SIZE_MAX

/* Of a process that sees more, the driver has it all. */
#define MOST_DEVICES 16

/* A new block in the current context of this thread; 0 where there can be none, and the driver is to be asked. */
CUdeviceptr block_make(size_t bytes);

/* Whether there is a block at the address; its context, too. */
bool block_known(CUdeviceptr address, CUcontext *context);

/* Give a block back to the driver.  The caller has waited for the work of its context.  After failure it is there
 * still, and it can be tried again. */
CUresult block_drop(CUdeviceptr address);

/* Physical memory for a block, mapped at its address.  After failure it has none; or, where the driver does not take it
 * back, some that is not usable, and another attempt goes on with that. */
CUresult block_map(struct block *block);

/* Take the physical memory away, if it has some; the address stays reserved.  It can be tried again. */
CUresult block_unmap(struct block *block);

/* How many blocks there are, and their bytes; at any time. */
void blocks_amount(size_t *count, size_t *bytes);

/* Hold the table, so that who allocates meanwhile waits (nobody should: see `transfer.h`); false if somebody else has it
 * for a second: a thread that was stopped in a few instructions of ours, by a signal and then for good. */
bool blocks_hold(void);
void blocks_release(void);

/* In a child, just forked: there are none. */
void blocks_in_child(void);

/* All blocks: slots of a table, some of them free.  Only while it is held. */
struct block *blocks_table(size_t *slots);
