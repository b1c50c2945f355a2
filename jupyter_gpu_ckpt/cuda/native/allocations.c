#define _GNU_SOURCE
#include "allocations.h"

#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#include "addresses.h"
#include "capture.h"
#include "child.h"
#include "table_lock.h"

#define FIRST_SLOTS 4096
#define LEGACY_STREAM ((CUstream)1)

/* Open addressing, keyed by address; and all addresses in ascending order, for those that lie within an allocation. */
struct table {
    struct allocation *entries;
    CUdeviceptr *order; /* at most half of the slots are used */
    size_t slots, used;
};
/* All memory, and the allocations that are parts of a pool's. */
static struct table memory, parts;
static atomic_size_t used, used_bytes, used_shared, postponed;

void allocations_in_child(void)
{
    memory = parts = (struct table){0};
    used = used_bytes = used_shared = postponed = 0;
}

/* The product's upper half: its lower bits do not depend on the address's upper ones. */
static size_t first_slot(const struct table *table, CUdeviceptr address)
{
    return (size_t)((address >> 21) * 0x9E3779B97F4A7C15ull >> 32) & (table->slots - 1);
}

static struct allocation *find_in(const struct table *table, CUdeviceptr address)
{
    struct allocation *entries = table->entries;
    if (entries == NULL)
        return NULL;
    for (size_t at = first_slot(table, address); entries[at].address != 0; at = (at + 1) & (table->slots - 1))
        if (entries[at].address == address)
            return &entries[at];
    return NULL;
}

/* The allocation of the program that begins at the address. */
static struct allocation *find(CUdeviceptr address)
{
    struct allocation *found = find_in(&memory, address);
    return found != NULL && found->pool == 0 ? found : find_in(&parts, address);
}

static void put(struct table *table, const struct allocation *allocation)
{
    size_t at = first_slot(table, allocation->address);
    while (table->entries[at].address != 0)
        at = (at + 1) & (table->slots - 1);
    table->entries[at] = *allocation;
}

static size_t bytes_of(size_t slots) { return slots * sizeof(struct allocation) + slots / 2 * sizeof(CUdeviceptr); }

static bool grow(struct table *table)
{
    struct table old = *table, larger = {.slots = old.slots ? old.slots * 2 : FIRST_SLOTS, .used = old.used};
    larger.entries = mmap(NULL, bytes_of(larger.slots), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (larger.entries == MAP_FAILED)
        return false;
    larger.order = (CUdeviceptr *)(larger.entries + larger.slots);
    for (size_t at = 0; at < old.used; at++) {
        larger.order[at] = old.order[at];
        put(&larger, find_in(&old, old.order[at]));
    }
    if (old.entries != NULL)
        munmap(old.entries, bytes_of(old.slots));
    *table = larger;
    return true;
}

/* The number of addresses that are not above one. */
static size_t rank(const struct table *table, CUdeviceptr address)
{
    size_t first = 0, end = table->used;
    while (first < end) {
        size_t middle = first + (end - first) / 2;
        if (table->order[middle] <= address)
            first = middle + 1;
        else
            end = middle;
    }
    return first;
}

static bool insert_locked(struct table *table, const struct allocation *allocation)
{
    bool fits = (table->used + 1) * 2 <= table->slots || grow(table);
    if (fits) {
        size_t at = rank(table, allocation->address);
        memmove(&table->order[at + 1], &table->order[at], (table->used - at) * sizeof *table->order);
        table->order[at] = allocation->address;
        put(table, allocation);
        table->used++;
    }
    return fits;
}

static bool insert(const struct allocation *allocation)
{
    table_lock();
    bool fits = insert_locked(&memory, allocation);
    if (fits) {
        used++;
        used_bytes += allocation->bytes;
        used_shared += allocation->shared != 0;
    }
    table_unlock();
    return fits;
}

/* Those that follow the slot only because it was in use move up. */
static void take_out(struct table *table, struct allocation *allocation)
{
    struct allocation *entries = table->entries;
    size_t hole = (size_t)(allocation - entries), last = table->slots - 1, after = rank(table, allocation->address);
    memmove(&table->order[after - 1], &table->order[after], (table->used - after) * sizeof *table->order);
    for (size_t at = (hole + 1) & last; entries[at].address != 0; at = (at + 1) & last) {
        size_t distance = (at - first_slot(table, entries[at].address)) & last;
        if (distance >= ((at - hole) & last)) {
            entries[hole] = entries[at];
            hole = at;
        }
    }
    entries[hole].address = 0;
    table->used--;
}

/* While the table is locked. */
static void remove_locked(struct allocation *allocation, struct allocation *removed)
{
    *removed = *allocation;
    used--;
    used_shared -= allocation->shared != 0;
    used_bytes -= allocation->bytes;
    take_out(&memory, allocation);
}

static bool remove_slot(CUdeviceptr address, struct allocation *removed)
{
    table_lock();
    struct allocation *allocation = find_in(&memory, address);
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

bool allocation_cut(CUdeviceptr address, CUdeviceptr at, size_t bytes, size_t requested, CUcontext context)
{
    table_lock();
    struct allocation *whole = find_in(&memory, address);
    bool is_cut = whole != NULL && whole->pool != 0;
    if (is_cut) {
        struct allocation part = {.address = at, .bytes = bytes, .requested = requested, .within = address,
                                  .context = context, .device = whole->device, .pool = whole->pool};
        is_cut = insert_locked(&parts, &part);
    }
    if (is_cut) {
        whole->parts++;
        whole->context = context; /* its last one may have been destroyed */
    }
    table_unlock();
    return is_cut;
}

bool allocation_join(CUdeviceptr address, struct allocation *part)
{
    table_lock();
    struct allocation *found = find_in(&parts, address);
    if (found != NULL) {
        *part = *found;
        take_out(&parts, found);
        find_in(&memory, part->within)->parts--;
    }
    table_unlock();
    return found != NULL;
}

size_t allocation_created(CUdeviceptr address)
{
    const struct allocation *found = find_in(&memory, address);
    return found != NULL ? found->bytes : 0;
}

size_t allocation_unused(CUdeviceptr address)
{
    const struct allocation *found = find_in(&memory, address);
    return found != NULL && found->parts == 0 ? found->bytes : 0;
}

bool allocation_has_place(CUdeviceptr address, size_t bytes, size_t offset)
{
    const struct allocation *allocation = find_in(&memory, address);
    return allocation != NULL && allocation->bytes == bytes && allocation->offset == offset &&
           allocation->state == ACCESSIBLE && !allocation->freed && !allocation->doomed &&
           (allocation->pool == 0 || allocation->parts != 0);
}

/* Find the allocation of the program in which the address is; pools' memory is none. */
static bool find_around(const struct table *table, CUdeviceptr address, struct allocation *found)
{
    size_t count = rank(table, address);
    const struct allocation *each = count != 0 ? find_in(table, table->order[count - 1]) : NULL;
    bool is_one = each != NULL && !each->freed && (each->pool == 0 || each->within != 0) &&
                  address - each->address < each->requested;
    if (is_one)
        *found = *each;
    return is_one;
}

bool allocation_containing(CUdeviceptr address, struct allocation *found)
{
    if (is_inert() || used == 0)
        return false;
    table_lock();
    bool contains = find_around(&memory, address, found) || find_around(&parts, address, found);
    table_unlock();
    return contains;
}

unsigned long long allocation_share(CUdeviceptr address)
{
    static unsigned long long last; /* while the table is locked */
    table_lock();
    struct allocation *allocation = find(address);
    unsigned long long number = 0;
    if (allocation != NULL && allocation->within != 0)
        allocation = find_in(&memory, allocation->within);
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
    for (size_t at = 0; at < memory.slots && number != 0 && !is_shared; at++) {
        const struct allocation *each = &memory.entries[at];
        if (each->address != 0 && !each->freed && each->shared == number) {
            *found = *each;
            is_shared = true;
        }
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
    *found = memory.slots;
    return memory.entries;
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

size_t allocation_grain(CUdevice device)
{
    static _Atomic size_t known[MAX_DEVICES];
    if (device < 0 || device >= MAX_DEVICES)
        return 0;
    size_t bytes = atomic_load_explicit(&known[device], memory_order_relaxed);
    if (bytes == 0) {
        CUmemAllocationProp wanted = properties(device);
        if (driver()->cuMemGetAllocationGranularity(&bytes, &wanted, CU_MEM_ALLOC_GRANULARITY_MINIMUM) != CUDA_SUCCESS)
            return 0;
        atomic_store_explicit(&known[device], bytes, memory_order_relaxed);
    }
    return bytes;
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
    int devices;
    if (cu == NULL || cu->cuCtxGetCurrent(&allocation.context) != CUDA_SUCCESS || allocation.context == NULL ||
        cu->cuCtxGetDevice(&allocation.device) != CUDA_SUCCESS || has_failed())
        return 0;
    if (cu->cuDeviceGetCount(&devices) != CUDA_SUCCESS || devices > MAX_DEVICES || allocation.device < 0 ||
        allocation.device >= devices || !all_are_peers(devices))
        return 0;
    size_t grain = allocation_grain(allocation.device);
    if (grain == 0 || bytes > SIZE_MAX - grain)
        return 0;
    allocation.requested = bytes;
    allocation.bytes = (bytes + grain - 1) / grain * grain;
    allocation.address = addresses_reserve(allocation.bytes, &allocation.reserved);
    if (allocation.address == 0)
        return 0;
    if (allocation_map(&allocation) == CUDA_SUCCESS) {
        if (insert(&allocation))
            return allocation.address;
        allocation_unmap(&allocation);
    }
    if (allocation.state == UNMAPPED)
        addresses_give_back(allocation.address, allocation.reserved);
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
    CUresult freed = addresses_give_back(allocation->address, allocation->reserved);
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
    for (size_t at = 0; at < memory.slots && !found; at++) {
        struct allocation *each = &memory.entries[at];
        if (each->address != 0 && each->freed && each->examined != round) {
            remove_locked(each, removed);
            removed->examined = round;
            found = true;
        }
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
    for (size_t at = 0; at < memory.slots; at++)
        if (memory.entries[at].address != 0 && memory.entries[at].context == context)
            memory.entries[at].doomed = true;
    table_unlock();
}

/* Remove a doomed allocation of the context; or, if it is to be kept, let it no longer be doomed, and remove none. */
static bool next_doomed(CUcontext context, bool keep, struct allocation *removed)
{
    bool found = false;
    removed->address = 0;
    table_lock();
    for (size_t at = 0; at < memory.slots && !found; at++) {
        struct allocation *each = &memory.entries[at];
        if (each->address != 0 && each->doomed && each->context == context) {
            if (keep || each->pool != 0) { /* a pool is the device's, not the context's */
                each->doomed = false;
                each->context = keep ? context : NULL;
            } else
                remove_locked(each, removed);
            found = true;
        }
    }
    table_unlock();
    return found;
}

/* Their work is done, and the events have gone with the context. */
static void forget_events(CUcontext context)
{
    table_lock();
    for (size_t at = 0; at < memory.slots; at++) {
        struct allocation *each = &memory.entries[at];
        if (each->address != 0 && each->after != NULL && each->recorded_in == context)
            each->after = NULL;
    }
    for (size_t at = 0; at < parts.slots; at++)
        if (parts.entries[at].address != 0 && parts.entries[at].context == context)
            parts.entries[at].context = NULL;
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
    if (destroyed)
        addresses_drop();
}
