#define _GNU_SOURCE
#include "pools.h"

#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#include "allocations.h"
#include "launch_gate.h"
#include "table_lock.h"

#define MOST_POOLS 64
/* Blocks that were freed on other streams, and that are looked at for one allocation. */
#define TRIES 4

struct pool {
    unsigned number; /* 0: none */
    CUmemoryPool handle;
    CUdevice device;
    unsigned long long threshold, reserved, reserved_high, used, used_high;
};

/* Memory that nobody has: the allocation is in the table, and freed. */
struct block {
    unsigned pool;
    CUdeviceptr address;
    size_t bytes;
    struct pool_stream freed_on;
    CUevent after; /* NULL: nothing has to be waited for */
};

/* While the tables are locked. */
static struct pool pools[MOST_POOLS];
static struct block *blocks;
static size_t block_count, block_slots;

void pools_in_child(void)
{
    memset(pools, 0, sizeof pools);
    blocks = NULL;
    block_count = block_slots = 0;
}

static struct pool *find(unsigned number)
{
    for (size_t at = 0; at < MOST_POOLS && number != 0; at++)
        if (pools[at].number == number)
            return &pools[at];
    return NULL;
}

unsigned pools_find(CUmemoryPool handle)
{
    unsigned number = 0;
    table_lock();
    for (size_t at = 0; at < MOST_POOLS && number == 0; at++)
        if (pools[at].number != 0 && pools[at].handle == handle)
            number = pools[at].number;
    table_unlock();
    return number;
}

unsigned pools_add(CUmemoryPool handle, CUdevice device, unsigned long long threshold)
{
    static unsigned last;
    unsigned number = 0;
    table_lock();
    for (size_t at = 0; at < MOST_POOLS && number == 0; at++)
        if (pools[at].number != 0 && pools[at].handle == handle)
            number = pools[at].number; /* another thread has added it */
    for (size_t at = 0; at < MOST_POOLS && number == 0; at++)
        if (pools[at].number == 0) {
            number = ++last;
            pools[at] = (struct pool){.number = number, .handle = handle, .device = device, .threshold = threshold};
        }
    table_unlock();
    return number;
}

bool pools_on(unsigned number, CUdevice device)
{
    table_lock();
    const struct pool *pool = find(number);
    bool is = pool != NULL && pool->device == device;
    table_unlock();
    return is;
}

CUmemoryPool pools_handle(unsigned number)
{
    table_lock();
    const struct pool *pool = find(number);
    CUmemoryPool handle = pool != NULL ? pool->handle : NULL;
    table_unlock();
    return handle;
}

/* -- blocks */

static bool add_block(const struct block *block)
{
    if (block_count == block_slots) {
        size_t slots = block_slots != 0 ? 2 * block_slots : 256;
        void *larger = mmap(NULL, slots * sizeof *blocks, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (larger == MAP_FAILED)
            return false;
        if (block_count != 0) {
            memcpy(larger, blocks, block_count * sizeof *blocks);
            munmap(blocks, block_slots * sizeof *blocks);
        }
        blocks = larger;
        block_slots = slots;
    }
    blocks[block_count++] = *block;
    return true;
}

/* The others stay in the order in which they were freed. */
static struct block take_block(size_t at)
{
    struct block block = blocks[at];
    memmove(&blocks[at], &blocks[at + 1], (block_count - at - 1) * sizeof *blocks);
    block_count--;
    return block;
}

static bool is_same(const struct pool_stream *one, const struct pool_stream *other)
{
    return one->ordered && other->ordered && one->context == other->context && one->stream == other->stream;
}

/* An eighth more than is wanted, at the most. */
static bool fits(const struct block *block, unsigned pool, size_t bytes)
{
    return block->pool == pool && block->bytes >= bytes && block->bytes - bytes <= bytes / 8 + ((size_t)2 << 20);
}

/* Take the last freed block that fits: of the stream, else of any, which is to be examined. */
static bool take_fitting(unsigned pool, size_t bytes, const struct pool_stream *where, size_t skip,
                         struct block *found)
{
    bool any = false;
    table_lock();
    for (size_t at = block_count; at-- > 0 && !any;)
        if (fits(&blocks[at], pool, bytes) && is_same(&blocks[at].freed_on, where)) {
            *found = take_block(at);
            any = true;
        }
    for (size_t at = block_count; at-- > 0 && !any;)
        if (fits(&blocks[at], pool, bytes) && skip-- == 0) {
            *found = take_block(at);
            any = true;
        }
    table_unlock();
    return any;
}

static void put_back(const struct block *block)
{
    table_lock();
    add_block(block); /* where one was taken there is space */
    table_unlock();
}

static bool is_unused(const struct block *block, bool wait)
{
    if (block->after == NULL)
        return true;
    return (wait ? driver()->cuEventSynchronize(block->after) : driver()->cuEventQuery(block->after)) == CUDA_SUCCESS;
}

/* The event has done its duty; a stream that the block is used on waits for nothing. */
static void forget_event(struct block *block)
{
    if (block->after != NULL)
        driver()->cuEventDestroy_v2(block->after);
    block->after = NULL;
}

static void count_used(unsigned number, size_t bytes, size_t fresh)
{
    table_lock();
    struct pool *pool = find(number);
    if (pool != NULL) {
        pool->used += bytes;
        pool->reserved += fresh;
        pool->used_high = pool->used > pool->used_high ? pool->used : pool->used_high;
        pool->reserved_high = pool->reserved > pool->reserved_high ? pool->reserved : pool->reserved_high;
    }
    table_unlock();
}

static CUdeviceptr reuse(unsigned pool, size_t bytes, const struct pool_stream *where)
{
    struct block block;
    for (size_t tried = 0; tried < TRIES && take_fitting(pool, bytes, where, tried, &block); tried++) {
        if (!is_same(&block.freed_on, where) && !is_unused(&block, false)) {
            put_back(&block);
            continue;
        }
        forget_event(&block);
        if (allocation_reuse(block.address, bytes, where->context)) {
            count_used(pool, bytes, 0);
            return block.address;
        }
    }
    return 0;
}

CUdeviceptr pools_allocate(unsigned pool, size_t bytes, const struct pool_stream *where)
{
    CUdeviceptr address = reuse(pool, bytes, where);
    if (address != 0)
        return address;
    pools_trim(pool, TO_THRESHOLD, false);
    struct allocation made;
    address = allocation_create(bytes, pool);
    if (address == 0 && pools_trim(0, 0, true)) /* there may have been too little memory */
        address = allocation_create(bytes, pool);
    if (address != 0 && allocation_at(address, &made))
        count_used(pool, bytes, made.bytes);
    return address;
}

void pools_freed(unsigned number, size_t requested, size_t bytes)
{
    table_lock();
    struct pool *pool = find(number);
    if (pool != NULL) {
        pool->used -= requested;
        pool->reserved -= bytes;
    }
    table_unlock();
}

CUresult pools_free(CUdeviceptr address, const struct pool_stream *where)
{
    const struct driver *cu = driver();
    struct allocation freed;
    CUevent event;
    if (!allocation_at(address, &freed) || freed.pool == 0)
        return CUDA_ERROR_NOT_FOUND;
    CUresult result = cu->cuEventCreate(&event, CU_EVENT_DISABLE_TIMING);
    if (result != CUDA_SUCCESS)
        return result;
    result = cu->cuEventRecord(event, where->stream);
    if (result == CUDA_SUCCESS && !allocation_retire(address, &freed))
        result = CUDA_ERROR_INVALID_VALUE; /* freed twice at the same time */
    if (result != CUDA_SUCCESS) {
        cu->cuEventDestroy_v2(event);
        return result;
    }
    struct block block = {freed.pool, address, freed.bytes, *where, event};
    table_lock();
    struct pool *pool = find(freed.pool);
    if (pool != NULL)
        pool->used -= freed.requested;
    bool kept = add_block(&block);
    table_unlock();
    if (!kept) {
        cu->cuEventSynchronize(event);
        cu->cuEventDestroy_v2(event);
        result = allocation_destroy(address);
        pools_freed(freed.pool, 0, freed.bytes);
    } else if (pool == NULL)
        pools_trim(0, TO_THRESHOLD, false);
    return result;
}

/* Take the first block that is over what its pool may keep. */
static bool take_surplus(unsigned number, size_t keep, struct block *found)
{
    bool any = false;
    table_lock();
    for (size_t at = 0; at < block_count && !any; at++) {
        const struct pool *pool = find(blocks[at].pool);
        unsigned long long limit = pool == NULL ? 0 : keep != TO_THRESHOLD ? keep : pool->threshold;
        bool is_surplus = pool == NULL || pool->reserved > limit;
        if ((number == 0 || blocks[at].pool == number) && is_surplus) {
            *found = take_block(at);
            any = true;
        }
    }
    table_unlock();
    return any;
}

bool pools_trim(unsigned number, size_t keep, bool wait)
{
    struct block block;
    bool any = false;
    table_lock();
    size_t left = block_count;
    table_unlock();
    if (left != 0)
        launch_gate_wait();
    for (; left-- > 0 && take_surplus(number, keep, &block);) {
        if (!is_unused(&block, wait) || allocation_destroy(block.address) != CUDA_SUCCESS) {
            put_back(&block); /* as the last, which is not looked at again */
            continue;
        }
        forget_event(&block);
        pools_freed(block.pool, 0, block.bytes);
        any = true;
    }
    return any;
}

void pools_remove(CUmemoryPool handle)
{
    table_lock();
    for (size_t at = 0; at < MOST_POOLS; at++)
        if (pools[at].number != 0 && pools[at].handle == handle)
            pools[at].number = 0;
    table_unlock();
    pools_trim(0, TO_THRESHOLD, false);
}

unsigned long long pools_attribute(unsigned number, int attribute)
{
    table_lock();
    const struct pool none = {0}, *pool = find(number);
    pool = pool != NULL ? pool : &none;
    unsigned long long value = attribute == POOL_RESERVED_CURRENT ? pool->reserved
                               : attribute == POOL_RESERVED_HIGH  ? pool->reserved_high
                               : attribute == POOL_USED_CURRENT   ? pool->used
                               : attribute == POOL_USED_HIGH      ? pool->used_high
                                                                  : 0;
    table_unlock();
    return value;
}

/* The high marks can only be set back; the driver has refused anything else. */
void pools_set_attribute(unsigned number, int attribute, unsigned long long value)
{
    table_lock();
    struct pool *pool = find(number);
    if (pool != NULL && attribute == POOL_RELEASE_THRESHOLD)
        pool->threshold = value;
    else if (pool != NULL && attribute == POOL_RESERVED_HIGH)
        pool->reserved_high = pool->reserved;
    else if (pool != NULL && attribute == POOL_USED_HIGH)
        pool->used_high = pool->used;
    table_unlock();
}

void pools_forget_stream(CUstream stream)
{
    table_lock();
    for (size_t at = 0; at < block_count; at++)
        if (blocks[at].freed_on.stream == stream)
            blocks[at].freed_on.ordered = false;
    table_unlock();
}

/* Its work is done, and its events have gone with it. */
void pools_forget_context(CUcontext context)
{
    table_lock();
    for (size_t at = 0; at < block_count; at++)
        if (blocks[at].freed_on.context == context) {
            blocks[at].freed_on.ordered = false;
            blocks[at].after = NULL;
        }
    table_unlock();
}
