#define _GNU_SOURCE
#include "allocations.h"

#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#include "capture.h"
#include "child.h"
#include "table_lock.h"

#define FIRST_SLOTS 4096
#define LEGACY_STREAM ((CUstream)1)

/* Open addressing, keyed by address. */
static struct allocation *table;
static size_t slots;
static atomic_size_t used, used_bytes, used_shared, postponed;

void allocations_in_child(void)
{
    table = NULL;
    slots = used = used_bytes = used_shared = postponed = 0;
}

/* The product's upper half: its lower bits do not depend on the address's upper ones. */
static size_t first_slot(CUdeviceptr address)
{
    return (size_t)((address >> 21) * 0x9E3779B97F4A7C15ull >> 32) & (slots - 1);
}

static struct allocation *find(CUdeviceptr address)
{
    if (table == NULL)
        return NULL;
    for (size_t at = first_slot(address); table[at].address != 0; at = (at + 1) & (slots - 1))
        if (table[at].address == address)
            return &table[at];
    return NULL;
}

static void put(const struct allocation *allocation)
{
    size_t at = first_slot(allocation->address);
    while (table[at].address != 0)
        at = (at + 1) & (slots - 1);
    table[at] = *allocation;
}

static bool grow(void)
{
    size_t old_slots = slots, new_slots = slots ? slots * 2 : FIRST_SLOTS;
    struct allocation *old = table;
    void *mapped = mmap(NULL, new_slots * sizeof *table, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED)
        return false;
    table = mapped;
    slots = new_slots;
    for (size_t at = 0; at < old_slots; at++)
        if (old[at].address != 0)
            put(&old[at]);
    if (old != NULL)
        munmap(old, old_slots * sizeof *old);
    return true;
}

static bool insert(const struct allocation *allocation)
{
    table_lock();
    bool fits = (used + 1) * 2 <= slots || grow();
    if (fits) {
        put(allocation);
        used++;
        used_bytes += allocation->bytes;
        used_shared += allocation->shared != 0;
    }
    table_unlock();
    return fits;
}

/* While the table is locked.  Those that follow the slot only because it was in use move up. */
static void remove_locked(struct allocation *allocation, struct allocation *removed)
{
    *removed = *allocation;
    used--;
    used_shared -= allocation->shared != 0;
    used_bytes -= allocation->bytes;
    size_t hole = (size_t)(allocation - table);
    for (size_t at = (hole + 1) & (slots - 1); table[at].address != 0; at = (at + 1) & (slots - 1)) {
        size_t distance = (at - first_slot(table[at].address)) & (slots - 1);
        if (distance >= ((at - hole) & (slots - 1))) {
            table[hole] = table[at];
            hole = at;
        }
    }
    table[hole].address = 0;
}

static bool remove_slot(CUdeviceptr address, struct allocation *removed)
{
    table_lock();
    struct allocation *allocation = find(address);
    if (allocation != NULL)
        remove_locked(allocation, removed);
    table_unlock();
    return allocation != NULL;
}

bool allocation_lookup(CUdeviceptr address, CUcontext *context)
{
    if (is_inert())
        return false;
    table_lock();
    struct allocation *allocation = find(address);
    bool found = allocation != NULL && !allocation->freed;
    if (found)
        *context = allocation->context;
    table_unlock();
    return found;
}

bool allocation_at(CUdeviceptr address, struct allocation *found)
{
    table_lock();
    struct allocation *allocation = find(address);
    bool exists = allocation != NULL && !allocation->freed;
    if (exists)
        *found = *allocation;
    table_unlock();
    return exists;
}

void allocation_set_synchronizes(CUdeviceptr address, bool synchronizes)
{
    table_lock();
    struct allocation *allocation = find(address);
    if (allocation != NULL && !allocation->freed)
        allocation->synchronizes = synchronizes;
    table_unlock();
}

bool allocation_retire(CUdeviceptr address, struct allocation *retired)
{
    table_lock();
    struct allocation *allocation = find(address);
    bool exists = allocation != NULL && !allocation->freed;
    if (exists) {
        *retired = *allocation;
        allocation->freed = allocation->retired = true;
    }
    table_unlock();
    return exists;
}

bool allocation_reuse(CUdeviceptr address, size_t requested, CUcontext context)
{
    table_lock();
    struct allocation *allocation = find(address);
    bool exists = allocation != NULL && allocation->retired;
    if (exists) {
        allocation->freed = allocation->retired = false;
        allocation->requested = requested;
        allocation->context = context; /* its last one may have been destroyed */
    }
    table_unlock();
    return exists;
}

bool allocation_has_place(CUdeviceptr address, size_t bytes, size_t offset)
{
    const struct allocation *allocation = find(address);
    return allocation != NULL && allocation->bytes == bytes && allocation->offset == offset &&
           allocation->state == ACCESSIBLE && !allocation->freed && !allocation->doomed;
}

bool allocation_containing(CUdeviceptr address, struct allocation *found)
{
    if (is_inert() || used == 0)
        return false;
    bool contains = false;
    table_lock();
    for (size_t at = 0; at < slots && !contains; at++)
        if (table[at].address != 0 && !table[at].freed && address - table[at].address < table[at].requested) {
            *found = table[at];
            contains = true;
        }
    table_unlock();
    return contains;
}

unsigned long long allocation_share(CUdeviceptr address)
{
    static unsigned long long last; /* while the table is locked */
    table_lock();
    struct allocation *allocation = find(address);
    unsigned long long number = 0;
    if (allocation != NULL && !allocation->freed) {
        used_shared += allocation->shared == 0;
        number = allocation->shared = allocation->shared != 0 ? allocation->shared : ++last;
    }
    table_unlock();
    return number;
}

bool allocation_shared(unsigned long long number, struct allocation *found)
{
    bool is_shared = false;
    table_lock();
    for (size_t at = 0; at < slots && number != 0 && !is_shared; at++)
        if (table[at].address != 0 && !table[at].freed && table[at].shared == number) {
            *found = table[at];
            is_shared = true;
        }
    table_unlock();
    return is_shared;
}

CUresult allocation_postpone(CUdeviceptr address, CUevent after, CUcontext recorded_in)
{
    table_lock();
    struct allocation *allocation = find(address);
    bool found = allocation != NULL && !allocation->freed;
    if (found) {
        allocation->freed = true;
        allocation->after = after;
        allocation->recorded_in = recorded_in;
        postponed++;
    }
    table_unlock();
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

void allocations_total(size_t *count, size_t *bytes)
{
    *count = used;
    *bytes = used_bytes;
}

size_t allocations_shared(void) { return used_shared; }

struct allocation *allocations_table(size_t *found)
{
    *found = slots;
    return table;
}

static CUmemAllocationProp properties(CUdevice device)
{
    CUmemAllocationProp wanted = {.type = CU_MEM_ALLOCATION_TYPE_PINNED};
    wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    wanted.location.id = device;
    int rdma = 0, descriptors = 0;
    if (driver()->cuDeviceGetAttribute(&descriptors, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
                                       device) == CUDA_SUCCESS &&
        descriptors != 0)
        wanted.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR; /* for CUDA IPC */
    if (driver()->cuDeviceGetAttribute(&rdma, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, device) ==
        CUDA_SUCCESS)
        wanted.allocFlags.gpuDirectRDMACapable = rdma != 0; /* like all memory of cudaMalloc */
    return wanted;
}

static bool granularity(CUdevice device, size_t *bytes)
{
    static _Atomic size_t known[MAX_DEVICES];
    *bytes = atomic_load_explicit(&known[device], memory_order_relaxed);
    if (*bytes == 0) {
        CUmemAllocationProp wanted = properties(device);
        if (driver()->cuMemGetAllocationGranularity(bytes, &wanted, CU_MEM_ALLOC_GRANULARITY_MINIMUM) != CUDA_SUCCESS)
            return false;
        atomic_store_explicit(&known[device], *bytes, memory_order_relaxed);
    }
    return *bytes != 0;
}

/* Whether each of the devices can access the others' memory.  If not, a copy from one to another goes through the host:
 * automatically for cudaMalloc's memory, for memory like ours only if the program asks for it (cudaMemcpyPeer). */
static bool all_are_peers(int count)
{
    static _Atomic int known; /* the number of devices that was asked about; negative: they are no peers */
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

/* Let every device access the allocation: whether the program has asked for that (cudaDeviceEnablePeerAccess), or will,
 * cannot be found out. */
static CUresult allow_access(const struct allocation *allocation)
{
    CUmemAccessDesc access[MAX_DEVICES];
    int count = 1;
    CUresult result = driver()->cuDeviceGetCount(&count);
    if (result != CUDA_SUCCESS)
        return result;
    for (CUdevice device = 0; device < count && device < MAX_DEVICES; device++)
        access[device] = (CUmemAccessDesc){.location = {CU_MEM_LOCATION_TYPE_DEVICE, device},
                                           .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    return driver()->cuMemSetAccess(allocation->address, allocation->bytes, access, (size_t)count);
}

static CUresult release_handle(struct allocation *allocation)
{
    CUresult result = allocation->has_handle ? driver()->cuMemRelease(allocation->handle) : CUDA_SUCCESS;
    allocation->has_handle = allocation->has_handle && result != CUDA_SUCCESS;
    return result;
}

CUresult allocation_map(struct allocation *allocation)
{
    const struct driver *cu = driver();
    CUmemAllocationProp wanted = properties(allocation->device);
    CUresult result = CUDA_SUCCESS;
    if (allocation->state == UNMAPPED) {
        if (!allocation->has_handle) /* the driver may have refused to release the last one */
            result = cu->cuMemCreate(&allocation->handle, allocation->bytes, &wanted, 0);
        if (result != CUDA_SUCCESS)
            return result;
        allocation->has_handle = true;
        result = cu->cuMemMap(allocation->address, allocation->bytes, 0, allocation->handle, 0);
        if (result == CUDA_SUCCESS)
            allocation->state = MAPPED;
    }
    if (allocation->state == MAPPED) {
        result = allow_access(allocation);
        if (result == CUDA_SUCCESS)
            allocation->state = ACCESSIBLE;
    }
    if (result != CUDA_SUCCESS)
        allocation_unmap(allocation);
    return result;
}

CUresult allocation_unmap(struct allocation *allocation)
{
    if (allocation->state != UNMAPPED) {
        CUresult result = driver()->cuMemUnmap(allocation->address, allocation->bytes);
        if (result != CUDA_SUCCESS)
            return result;
    }
    allocation->state = UNMAPPED;
    return release_handle(allocation);
}

/* Whether the current context has failed (an illegal access): cuMemAlloc then gives that error, the functions of
 * virtual memory do not.  A query is the cheapest call that does; not while a stream is captured, which it would end. */
static bool has_failed(void)
{
    const struct driver *cu = driver();
    if (cu->cuStreamQuery == NULL || capture_is_active())
        return false;
    CUresult result = cu->cuStreamQuery(LEGACY_STREAM);
    return result != CUDA_SUCCESS && result != CUDA_ERROR_NOT_READY;
}

CUdeviceptr allocation_create(size_t bytes, unsigned pool)
{
    const struct driver *cu = driver();
    struct allocation allocation = {.offset = NOT_COPIED, .pool = pool};
    size_t grain;
    int devices;
    if (cu == NULL || cu->cuCtxGetCurrent(&allocation.context) != CUDA_SUCCESS || allocation.context == NULL ||
        cu->cuCtxGetDevice(&allocation.device) != CUDA_SUCCESS || has_failed())
        return 0;
    if (cu->cuDeviceGetCount(&devices) != CUDA_SUCCESS || devices > MAX_DEVICES || allocation.device < 0 ||
        allocation.device >= devices || !all_are_peers(devices) || !granularity(allocation.device, &grain))
        return 0;
    if (bytes > SIZE_MAX - grain)
        return 0;
    allocation.requested = bytes;
    allocation.bytes = (bytes + grain - 1) / grain * grain;
    if (cu->cuMemAddressReserve(&allocation.address, allocation.bytes, 0, 0, 0) != CUDA_SUCCESS)
        return 0;
    if (allocation_map(&allocation) == CUDA_SUCCESS) {
        if (insert(&allocation))
            return allocation.address;
        allocation_unmap(&allocation);
    }
    if (allocation.state == UNMAPPED)
        cu->cuMemAddressFree(allocation.address, allocation.bytes);
    return 0;
}

/* Of an allocation that is no longer in the table; after failure it is in it again. */
static CUresult give_back(struct allocation *allocation)
{
    table_wait_for_reads();
    CUresult result = allocation_unmap(allocation);
    if (allocation->state != UNMAPPED) {
        insert(allocation);
        return result;
    }
    CUresult freed = driver()->cuMemAddressFree(allocation->address, allocation->bytes);
    return result != CUDA_SUCCESS ? result : freed;
}

CUresult allocation_destroy(CUdeviceptr address)
{
    struct allocation allocation;
    return remove_slot(address, &allocation) ? give_back(&allocation) : CUDA_ERROR_INVALID_VALUE;
}

/* Remove a postponed allocation that was not examined in this round yet. */
static bool remove_postponed(unsigned round, struct allocation *removed)
{
    bool found = false;
    table_lock();
    for (size_t at = 0; at < slots && !found; at++)
        if (table[at].address != 0 && table[at].freed && !table[at].retired && table[at].examined != round) {
            remove_locked(&table[at], removed);
            removed->examined = round;
            found = true;
        }
    table_unlock();
    return found;
}

size_t allocations_collect(bool (*is_unused)(const struct allocation *))
{
    static atomic_uint rounds;
    struct allocation allocation;
    size_t count = 0;
    if (atomic_load_explicit(&postponed, memory_order_relaxed) == 0)
        return 0;
    unsigned round = atomic_fetch_add(&rounds, 1) + 1;
    while (remove_postponed(round, &allocation)) {
        if (!is_unused(&allocation)) {
            insert(&allocation);
            continue;
        }
        if (allocation.after != NULL)
            driver()->cuEventDestroy_v2(allocation.after);
        allocation.after = NULL;
        give_back(&allocation);
        if (allocation.state == UNMAPPED) {
            postponed--;
            count++;
        }
    }
    return count;
}

void allocations_doom(CUcontext context)
{
    table_lock();
    for (size_t at = 0; at < slots; at++)
        if (table[at].address != 0 && table[at].context == context)
            table[at].doomed = true;
    table_unlock();
}

/* Remove a doomed allocation of the context; or, if it is to be kept, let it no longer be doomed, and remove none. */
static bool next_doomed(CUcontext context, bool keep, struct allocation *removed)
{
    bool found = false;
    removed->address = 0;
    table_lock();
    for (size_t at = 0; at < slots && !found; at++)
        if (table[at].address != 0 && table[at].doomed && table[at].context == context) {
            if (keep || table[at].pool != 0) { /* a pool is the device's, not the context's */
                table[at].doomed = false;
                table[at].context = keep ? context : NULL;
            } else
                remove_locked(&table[at], removed);
            found = true;
        }
    table_unlock();
    return found;
}

/* Their work is done, and the events have gone with the context. */
static void forget_events(CUcontext context)
{
    table_lock();
    for (size_t at = 0; at < slots; at++)
        if (table[at].address != 0 && table[at].after != NULL && table[at].recorded_in == context)
            table[at].after = NULL;
    table_unlock();
}

void allocations_of_destroyed(CUcontext context, bool destroyed)
{
    struct allocation allocation;
    if (destroyed)
        forget_events(context);
    while (next_doomed(context, !destroyed, &allocation)) {
        if (allocation.address == 0)
            continue;
        postponed -= allocation.freed;
        allocation.doomed = allocation.freed = false;
        if (allocation.after != NULL) /* of another context's stream */
            driver()->cuEventDestroy_v2(allocation.after);
        allocation.after = NULL;
        give_back(&allocation);
    }
}
