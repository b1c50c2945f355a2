#define _GNU_SOURCE
#include "blocks.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "child.h"

#define FIRST_SLOTS 4096

/* Open addressing, keyed by address.  Under a lock that is held for a few instructions and never across a call of the
 * driver: whoever stops a thread may find out by its program counter that it does not hold it. */
static atomic_flag busy = ATOMIC_FLAG_INIT;
static struct block *table;
static size_t slots;
static atomic_size_t taken, taken_bytes;

static void lock(void)
{
    while (atomic_flag_test_and_set_explicit(&busy, memory_order_acquire))
        sched_yield();
}

static void unlock(void) { atomic_flag_clear_explicit(&busy, memory_order_release); }

bool blocks_hold(void)
{
    struct timespec begun, now;
    clock_gettime(CLOCK_MONOTONIC, &begun);
    while (atomic_flag_test_and_set_explicit(&busy, memory_order_acquire)) {
        sched_yield();
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (now.tv_sec - begun.tv_sec > 1)
            return false;
    }
    return true;
}

void blocks_release(void) { unlock(); }

/* Some other thread may have been changing the table. */
void blocks_in_child(void)
{
    table = NULL;
    slots = taken = taken_bytes = 0;
    unlock();
}

/* The product's upper half: its lower bits know nothing of the address's upper ones. */
static size_t home(CUdeviceptr address)
{
    return (size_t)((address >> 21) * 0x9E3779B97F4A7C15ull >> 32) & (slots - 1);
}

static struct block *find(CUdeviceptr address)
{
    if (table == NULL)
        return NULL;
    for (size_t at = home(address); table[at].address != 0; at = (at + 1) & (slots - 1))
        if (table[at].address == address)
            return &table[at];
    return NULL;
}

static void put(const struct block *block)
{
    size_t at = home(block->address);
    while (table[at].address != 0)
        at = (at + 1) & (slots - 1);
    table[at] = *block;
}

static bool grow(void)
{
    size_t had = slots, wanted = slots ? slots * 2 : FIRST_SLOTS;
    struct block *old = table;
    void *fresh = mmap(NULL, wanted * sizeof *table, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (fresh == MAP_FAILED)
        return false;
    table = fresh;
    slots = wanted;
    for (size_t at = 0; at < had; at++)
        if (old[at].address != 0)
            put(&old[at]);
    if (old != NULL)
        munmap(old, had * sizeof *old);
    return true;
}

static bool insert(const struct block *block)
{
    lock();
    bool room = (taken + 1) * 2 <= slots || grow();
    if (room) {
        put(block);
        taken++;
        taken_bytes += block->bytes;
    }
    unlock();
    return room;
}

static bool take(CUdeviceptr address, struct block *taken_out)
{
    lock();
    struct block *block = find(address);
    if (block != NULL) {
        *taken_out = *block;
        taken--;
        taken_bytes -= block->bytes;
        /* Those after it may stand where they do because of it. */
        size_t hole = (size_t)(block - table);
        for (size_t at = (hole + 1) & (slots - 1); table[at].address != 0; at = (at + 1) & (slots - 1)) {
            size_t distance = (at - home(table[at].address)) & (slots - 1);
            if (distance >= ((at - hole) & (slots - 1))) {
                table[hole] = table[at];
                hole = at;
            }
        }
        table[hole].address = 0;
    }
    unlock();
    return block != NULL;
}

bool block_known(CUdeviceptr address, CUcontext *context)
{
    if (is_inert())
        return false;
    lock();
    struct block *block = find(address);
    if (block != NULL)
        *context = block->context;
    unlock();
    return block != NULL;
}

void blocks_amount(size_t *count, size_t *bytes)
{
    *count = taken;
    *bytes = taken_bytes;
}

struct block *blocks_table(size_t *found)
{
    *found = slots;
    return table;
}

static CUmemAllocationProp properties(CUdevice device)
{
    CUmemAllocationProp wanted = {.type = CU_MEM_ALLOCATION_TYPE_PINNED};
    wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    wanted.location.id = device;
    int rdma = 0;
    if (driver()->cuDeviceGetAttribute(&rdma, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, device) ==
        CUDA_SUCCESS)
        wanted.allocFlags.gpuDirectRDMACapable = rdma != 0; /* as all memory of cudaMalloc is */
    return wanted;
}

static bool granularity(CUdevice device, size_t *bytes)
{
    static _Atomic size_t known[MOST_DEVICES];
    *bytes = atomic_load_explicit(&known[device], memory_order_relaxed);
    if (*bytes == 0) {
        CUmemAllocationProp wanted = properties(device);
        if (driver()->cuMemGetAllocationGranularity(bytes, &wanted, CU_MEM_ALLOC_GRANULARITY_MINIMUM) != CUDA_SUCCESS)
            return false;
        atomic_store_explicit(&known[device], *bytes, memory_order_relaxed);
    }
    return *bytes != 0;
}

/* Whether each of the devices may use the others' memory.  Where not, a copy from one to another goes through the host:
 * of cudaMalloc's memory by itself, of memory like ours only if the program asks for it (cudaMemcpyPeer). */
static bool all_are_peers(int count)
{
    static _Atomic int known; /* for how many it was asked; below zero: they are none */
    int before = atomic_load_explicit(&known, memory_order_relaxed), can = 1;
    if (before == count || before == -count)
        return before > 0;
    for (CUdevice from = 0; from < count && can; from++)
        for (CUdevice to = 0; to < count && can; to++)
            if (from != to && driver()->cuDeviceCanAccessPeer(&can, from, to) != CUDA_SUCCESS)
                return false;
    atomic_store_explicit(&known, can ? count : -count, memory_order_relaxed);
    return can;
}

/* Every device may use every block: whether the program has asked for that (cudaDeviceEnablePeerAccess), or will, is not
 * to be found out. */
static CUresult let_use(const struct block *block)
{
    CUmemAccessDesc access[MOST_DEVICES];
    int count = 1;
    CUresult result = driver()->cuDeviceGetCount(&count);
    if (result != CUDA_SUCCESS)
        return result;
    for (CUdevice device = 0; device < count && device < MOST_DEVICES; device++)
        access[device] = (CUmemAccessDesc){.location = {CU_MEM_LOCATION_TYPE_DEVICE, device},
                                           .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    return driver()->cuMemSetAccess(block->address, block->bytes, access, (size_t)count);
}

static CUresult let_go(struct block *block)
{
    CUresult result = block->held ? driver()->cuMemRelease(block->handle) : CUDA_SUCCESS;
    block->held = block->held && result != CUDA_SUCCESS;
    return result;
}

CUresult block_map(struct block *block)
{
    const struct driver *cu = driver();
    CUmemAllocationProp wanted = properties(block->device);
    CUresult result = CUDA_SUCCESS;
    if (block->memory == AWAY) {
        if (!block->held) /* the driver may not have taken back what it had */
            result = cu->cuMemCreate(&block->handle, block->bytes, &wanted, 0);
        if (result != CUDA_SUCCESS)
            return result;
        block->held = true;
        result = cu->cuMemMap(block->address, block->bytes, 0, block->handle, 0);
        if (result == CUDA_SUCCESS)
            block->memory = MAPPED;
    }
    if (block->memory == MAPPED) {
        result = let_use(block);
        if (result == CUDA_SUCCESS)
            block->memory = USABLE;
    }
    if (result != CUDA_SUCCESS)
        block_unmap(block);
    return result;
}

CUresult block_unmap(struct block *block)
{
    CUresult result = block->memory != AWAY ? driver()->cuMemUnmap(block->address, block->bytes) : CUDA_SUCCESS;
    if (result != CUDA_SUCCESS)
        return result;
    block->memory = AWAY;
    return let_go(block);
}

CUdeviceptr block_make(size_t bytes)
{
    const struct driver *cu = driver();
    struct block block = {.offset = NOT_COPIED};
    size_t grain;
    int devices;
    if (cu == NULL || cu->cuCtxGetCurrent(&block.context) != CUDA_SUCCESS || block.context == NULL ||
        cu->cuCtxGetDevice(&block.device) != CUDA_SUCCESS)
        return 0;
    if (cu->cuDeviceGetCount(&devices) != CUDA_SUCCESS || devices > MOST_DEVICES || block.device < 0 ||
        block.device >= devices || !all_are_peers(devices) || !granularity(block.device, &grain))
        return 0;
    if (bytes > SIZE_MAX - grain)
        return 0;
    block.bytes = (bytes + grain - 1) / grain * grain;
    if (cu->cuMemAddressReserve(&block.address, block.bytes, 0, 0, 0) != CUDA_SUCCESS)
        return 0;
    if (block_map(&block) == CUDA_SUCCESS) {
        if (insert(&block))
            return block.address;
        block_unmap(&block);
    }
    if (block.memory == AWAY)
        cu->cuMemAddressFree(block.address, block.bytes);
    return 0;
}

CUresult block_drop(CUdeviceptr address)
{
    struct block block;
    if (!take(address, &block))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = block_unmap(&block);
    if (block.memory != AWAY) {
        insert(&block);
        return result;
    }
    CUresult freed = driver()->cuMemAddressFree(block.address, block.bytes);
    return result != CUDA_SUCCESS ? result : freed;
}
