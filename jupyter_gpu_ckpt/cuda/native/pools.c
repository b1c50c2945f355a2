#define _GNU_SOURCE
#include "pools.h"

#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#include "allocations.h"
#include "launch_gate.h"
#include "table_lock.h"

#define MOST_POOLS 64
/* Blocks that were freed on other streams, and that are looked at for one allocation. */
#define TRIES 4
/* The most memory that is created at a time beyond what is asked for, and that a small allocation can keep from being
 * given back; others keep up to so many times what they are. */
#define LARGEST_LEAD ((size_t)128 << 20)
#define MOST_KEPT 4

struct pool {
    unsigned number; /* 0: none */
    CUmemoryPool handle;
    CUdevice device;
    unsigned long long threshold, reserved, reserved_high, used, used_high;
};

/* Memory that the program does not have: a range of what was created at an address. */
struct block {
    unsigned pool;
    CUdeviceptr memory, address;
    size_t created, bytes; /* of all that memory, and of the block */
    struct pool_stream freed_on;
    CUevent after;        /* NULL: nothing has to be waited for, but: */
    CUcontext first_done; /* not NULL: all work of this context */
    size_t turn;          /* the higher, the later it was freed */
};

/* While the tables are locked.  Each allocation of a pool, and each block that a thread examines, is one that is outside
 * and may come back. */
static struct pool pools[MOST_POOLS];
static struct block *blocks;
static size_t block_count, block_slots, outside;

/* Of two events of a stream the one with the later turn was recorded later. */
static pthread_mutex_t recording = PTHREAD_MUTEX_INITIALIZER;
static size_t turns;

void pools_in_child(void)
{
    memset(pools, 0, sizeof pools);
    blocks = NULL;
    block_count = block_slots = outside = 0;
    recording = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
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

/* Have slots for all that are outside, and one more. */
static bool reserve_slot(void)
{
    if (block_count + outside < block_slots)
        return true;
    size_t slots = block_slots != 0 ? 2 * block_slots : 256;
    void *larger = mmap(NULL, slots * sizeof *blocks, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (larger == MAP_FAILED)
        return false;
    if (block_slots != 0) {
        memcpy(larger, blocks, block_count * sizeof *blocks);
        munmap(blocks, block_slots * sizeof *blocks);
    }
    blocks = larger;
    block_slots = slots;
    return true;
}

/* The others stay in their order. */
static struct block take_block(size_t at)
{
    struct block block = blocks[at];
    memmove(&blocks[at], &blocks[at + 1], (block_count - at - 1) * sizeof *blocks);
    block_count--;
    outside++;
    return block;
}

static bool is_same(const struct pool_stream *one, const struct pool_stream *other)
{
    return one->ordered && other->ordered && one->context == other->context && one->stream == other->stream;
}

static bool is_free_for_all(const struct block *block) { return block->after == NULL && block->first_done == NULL; }

/* Whether both can be used under the conditions of the one that was freed later, or that has any. */
static bool are_alike(const struct block *one, const struct block *other)
{
    if (one->first_done != NULL || other->first_done != NULL)
        return false;
    return one->after == NULL || other->after == NULL || is_same(&one->freed_on, &other->freed_on);
}

static bool are_neighbours(const struct block *one, const struct block *other)
{
    return one->memory == other->memory &&
           (one->address + one->bytes == other->address || other->address + other->bytes == one->address);
}

/* Join a block that is outside with its neighbours in the table; return how many events are to be destroyed. */
static size_t join(struct block *block, CUevent events[2])
{
    size_t count = 0;
    for (size_t at = block_count; at-- > 0;) {
        if (!are_neighbours(block, &blocks[at]) || !are_alike(block, &blocks[at]))
            continue;
        struct block other = take_block(at);
        outside--;
        if (block->after == NULL || (other.after != NULL && other.turn > block->turn)) {
            struct block own = *block;
            *block = other;
            other = own;
        }
        if (other.after != NULL)
            events[count++] = other.after;
        block->address = other.address < block->address ? other.address : block->address;
        block->bytes += other.bytes;
    }
    return count;
}

static void add_block(struct block block)
{
    CUevent events[2];
    table_lock();
    size_t count = join(&block, events);
    blocks[block_count++] = block;
    outside--;
    table_unlock();
    while (count-- > 0)
        driver()->cuEventDestroy_v2(events[count]);
}

static bool may_use(const struct block *block, const struct pool_stream *where)
{
    return is_free_for_all(block) || (block->after != NULL && is_same(&block->freed_on, where));
}

/* Take the smallest block that is large enough and may be used on the stream; else the first freed one that is to be
 * examined, of those that were freed after the turn. */
static bool take_fitting(unsigned pool, size_t bytes, const struct pool_stream *where, size_t turn,
                         struct block *found)
{
    size_t best = SIZE_MAX, other = SIZE_MAX;
    table_lock();
    for (size_t at = 0; at < block_count; at++) {
        const struct block *each = &blocks[at];
        if (each->pool != pool || each->bytes < bytes ||
            (each->created > LARGEST_LEAD && each->created / MOST_KEPT > bytes))
            continue;
        if (may_use(each, where))
            best = best == SIZE_MAX || each->bytes < blocks[best].bytes ? at : best;
        else if (each->turn > turn)
            other = other == SIZE_MAX || each->turn < blocks[other].turn ? at : other;
    }
    bool any = best != SIZE_MAX || other != SIZE_MAX;
    if (any)
        *found = take_block(best != SIZE_MAX ? best : other);
    table_unlock();
    return any;
}

/* Examine a block that is outside: whether it can be used on any stream, as it is from then on. */
static bool becomes_free(struct block *block, bool wait)
{
    const struct driver *cu = driver();
    if (block->first_done != NULL) {
        CUcontext popped;
        if (cu->cuCtxPushCurrent_v2(block->first_done) != CUDA_SUCCESS)
            return false;
        CUresult result = cu->cuCtxSynchronize();
        cu->cuCtxPopCurrent_v2(&popped);
        if (result != CUDA_SUCCESS)
            return false;
        block->first_done = NULL;
    }
    if (block->after == NULL)
        return true;
    if ((wait ? cu->cuEventSynchronize(block->after) : cu->cuEventQuery(block->after)) != CUDA_SUCCESS)
        return false;
    cu->cuEventDestroy_v2(block->after);
    block->after = NULL;
    return true;
}

/* Give the first part of a block that is outside to the program, and the rest of it back to the table. */
static CUdeviceptr cut(struct block block, size_t bytes, size_t requested, const struct pool_stream *where)
{
    CUdeviceptr address = block.address;
    table_lock();
    bool has_slot = reserve_slot();
    outside += has_slot;
    table_unlock();
    bool is_cut = has_slot && allocation_cut(block.memory, address, bytes, requested, where->context);
    if (is_cut && block.bytes > bytes) {
        block.address += bytes;
        block.bytes -= bytes;
        add_block(block);
        return address;
    }
    table_lock();
    outside -= has_slot; /* one is as many as before: the block, or the allocation that it is now */
    table_unlock();
    if (!is_cut)
        add_block(block);
    else if (block.after != NULL)
        driver()->cuEventDestroy_v2(block.after);
    return is_cut ? address : 0;
}

static CUdeviceptr reuse(unsigned pool, size_t bytes, size_t requested, const struct pool_stream *where)
{
    struct block block = {.turn = 0};
    for (size_t tries = 0; tries < TRIES && take_fitting(pool, bytes, where, block.turn, &block); tries++) {
        if (may_use(&block, where) || becomes_free(&block, false))
            return cut(block, bytes, requested, where);
        add_block(block);
    }
    return 0;
}

/* Whether a block is of a pool (0: of any), over what the pool may keep, and in memory that is all free. */
static bool is_surplus(const struct block *block, unsigned number, size_t keep)
{
    if (number != 0 && block->pool != number)
        return false;
    const struct pool *pool = find(block->pool);
    unsigned long long limit = pool == NULL ? 0 : keep != TO_THRESHOLD ? keep : pool->threshold;
    return (pool == NULL || pool->reserved > limit) && allocation_unused(block->memory) != 0;
}

static size_t count_surplus(unsigned number, size_t keep)
{
    size_t count = 0;
    table_lock();
    for (size_t at = 0; at < block_count; at++)
        count += is_surplus(&blocks[at], number, keep);
    table_unlock();
    return count;
}

/* ``whole``: one that is all of its memory, and free for all. */
static bool take_surplus(unsigned number, size_t keep, bool whole, struct block *found)
{
    bool any = false;
    table_lock();
    for (size_t at = 0; at < block_count && !any; at++) {
        const struct block *each = &blocks[at];
        bool is_whole = is_free_for_all(each) && each->bytes == allocation_unused(each->memory);
        if ((is_whole || !whole) && is_surplus(each, number, keep)) {
            *found = take_block(at);
            any = true;
        }
    }
    table_unlock();
    return any;
}

/* Take the first block of a pool. */
static bool take_first(unsigned number, struct block *found)
{
    bool any = false;
    table_lock();
    for (size_t at = 0; at < block_count && !any; at++)
        if (blocks[at].pool == number) {
            *found = take_block(at);
            any = true;
        }
    table_unlock();
    return any;
}

static size_t count_blocks(unsigned number)
{
    size_t count = 0;
    table_lock();
    for (size_t at = 0; at < block_count; at++)
        count += blocks[at].pool == number;
    table_unlock();
    return count;
}

/* Join what was freed on several streams, where the work before that is done; return whether there is any. */
static bool join_unused(unsigned pool)
{
    struct block block;
    size_t busy = 0, before = count_blocks(pool);
    for (size_t left = before; left-- > 0 && busy < TRIES && take_first(pool, &block);) {
        busy += !becomes_free(&block, false);
        add_block(block); /* as the last */
    }
    return count_blocks(pool) < before;
}

static void count_reserved(unsigned number, size_t more, size_t less)
{
    table_lock();
    struct pool *pool = find(number);
    if (pool != NULL) {
        pool->reserved += more - less;
        pool->reserved_high = pool->reserved > pool->reserved_high ? pool->reserved : pool->reserved_high;
    }
    table_unlock();
}

static void count_used(unsigned number, size_t bytes)
{
    table_lock();
    struct pool *pool = find(number);
    if (pool != NULL) {
        pool->used += bytes;
        pool->used_high = pool->used > pool->used_high ? pool->used : pool->used_high;
    }
    table_unlock();
}

/* Bytes as they are cut (0: none can be); and as they are created: more, for what is allocated next, where the pool may
 * keep that. */
static size_t rounded(unsigned number, size_t requested, size_t *created)
{
    struct pool copy = {0};
    table_lock();
    if (find(number) != NULL)
        copy = *find(number);
    table_unlock();
    size_t grain = copy.number != 0 ? allocation_grain(copy.device) : 0;
    if (grain == 0 || requested > SIZE_MAX - grain)
        return 0;
    size_t bytes = (requested + grain - 1) / grain * grain, lead = copy.reserved / 2 / grain * grain;
    lead = lead < LARGEST_LEAD ? lead : LARGEST_LEAD;
    *created = lead > bytes && copy.reserved + lead <= copy.threshold ? lead : bytes;
    return bytes;
}

static CUdeviceptr create(unsigned pool, size_t created, size_t bytes, size_t requested,
                          const struct pool_stream *where)
{
    CUdeviceptr memory = allocation_create(created, pool);
    if (memory == 0)
        return 0;
    count_reserved(pool, created, 0);
    table_lock();
    bool has_slot = reserve_slot();
    outside += has_slot;
    table_unlock();
    if (has_slot)
        return cut((struct block){.pool = pool, .memory = memory, .address = memory, .created = created, .bytes = created},
                   bytes, requested, where);
    allocation_destroy(memory);
    count_reserved(pool, 0, created);
    return 0;
}

CUdeviceptr pools_allocate(unsigned pool, size_t requested, const struct pool_stream *where)
{
    size_t created, bytes = rounded(pool, requested, &created);
    if (bytes == 0)
        return 0;
    CUdeviceptr address = reuse(pool, bytes, requested, where);
    if (address == 0 && join_unused(pool))
        address = reuse(pool, bytes, requested, where);
    if (address == 0) {
        pools_trim(pool, TO_THRESHOLD, false);
        address = create(pool, created, bytes, requested, where);
    }
    if (address == 0 && created > bytes)
        address = create(pool, bytes, bytes, requested, where);
    if (address == 0 && pools_trim(0, 0, true)) /* there may have been too little memory */
        address = create(pool, bytes, bytes, requested, where);
    if (address != 0)
        count_used(pool, requested);
    return address;
}

/* Take an allocation from the program; return whether its pool still exists. */
static bool retire(const struct allocation *freed, struct block block)
{
    block.pool = freed->pool;
    block.memory = freed->within;
    block.address = freed->address;
    block.bytes = freed->bytes;
    table_lock();
    block.created = allocation_created(freed->within);
    struct pool *pool = find(freed->pool);
    if (pool != NULL)
        pool->used -= freed->requested;
    table_unlock();
    add_block(block);
    return pool != NULL;
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
    size_t turn;
    pthread_mutex_lock(&recording);
    result = cu->cuEventRecord(event, where->stream);
    turn = ++turns;
    pthread_mutex_unlock(&recording);
    if (result == CUDA_SUCCESS && !allocation_join(address, &freed))
        result = CUDA_ERROR_INVALID_VALUE; /* freed twice at the same time */
    if (result != CUDA_SUCCESS) {
        cu->cuEventDestroy_v2(event);
        return result;
    }
    if (!retire(&freed, (struct block){.freed_on = *where, .after = event, .turn = turn}))
        pools_trim(0, TO_THRESHOLD, false);
    return CUDA_SUCCESS;
}

CUresult pools_free_unordered(CUdeviceptr address, bool later)
{
    struct allocation freed;
    if (!allocation_join(address, &freed))
        return CUDA_ERROR_INVALID_VALUE;
    bool exists = retire(&freed, (struct block){.first_done = later ? freed.context : NULL});
    if (!later)
        pools_trim(exists ? freed.pool : 0, TO_THRESHOLD, false);
    return CUDA_SUCCESS;
}

bool pools_trim(unsigned number, size_t keep, bool wait)
{
    struct block block;
    bool any = false;
    size_t left = count_surplus(number, keep);
    if (left != 0)
        launch_gate_wait();
    for (size_t pieces = left; pieces-- > 0 && take_surplus(number, keep, false, &block);) {
        becomes_free(&block, wait);
        add_block(block); /* as the last, with its neighbours: in the end memory that is unused is one block */
    }
    for (; left-- > 0 && take_surplus(number, keep, true, &block);) {
        if (allocation_destroy(block.memory) != CUDA_SUCCESS) {
            add_block(block);
            continue;
        }
        table_lock();
        outside--;
        table_unlock();
        count_reserved(block.pool, 0, block.bytes);
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
    for (size_t at = 0; at < block_count; at++)
        if (blocks[at].first_done == context)
            blocks[at].first_done = NULL;
    table_unlock();
}
