/* Device memory of a double: one sparse file; an address range is host memory that a part of the file is mapped to. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include "double.h"

#define GRAIN ((size_t)2 << 20)
#define PIECE ((size_t)64 << 10)
#define MOST_DEVICES 16

enum { HOST = 2 }; /* a location */

struct range {
    uintptr_t address;
    size_t bytes;
    struct memory *memory; /* of a mapping, */
    size_t offset;         /* in it, */
    unsigned char access[MOST_DEVICES];
    CUcontext context; /* of an allocation, or */
    CUmemoryPool pool;
    bool programs;     /* of a reservation: not the library's, which wants no alignment */
    bool synchronizes;
    CUstream freed_on; /* and free when its work is done */
};
struct memory {
    CUmemGenericAllocationHandle handle;
    CUdevice device;
    size_t bytes;
    off_t offset; /* in the file, never used again */
    int file;     /* another process's, or its own once it was exported; or -1: the one that all others are in */
    bool imported;
    CUmemAllocationProp properties;
    size_t mappings, references;
};
struct ranges {
    struct range *all;
    size_t count, capacity;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct ranges reservations, mappings, allocations, deferred, registered, holes;
static struct memory **memories;
static size_t memory_count, memory_capacity;
static CUmemGenericAllocationHandle last;
static size_t capacity = (size_t)1 << 40, used;
static int file = -1;
static off_t file_end;

/* Of a device that several processes have (`shared_device.py`): DOUBLE_SHARED names its file, DOUBLE_SLOT the process's
 * place in it.  Locked, for a process that is killed cannot unlock anything else. */
static struct {
    int file;
    size_t slot;
    struct {
        size_t bytes, used[16];
    } *state;
} shared = {.file = -1};

__attribute__((constructor)) static void open_shared(void)
{
    const char *name = getenv("DOUBLE_SHARED"), *slot = getenv("DOUBLE_SLOT");
    if (name == NULL || slot == NULL)
        return;
    shared.file = open(name, O_RDWR | O_CLOEXEC);
    shared.slot = strtoul(slot, NULL, 10);
    shared.state = mmap(NULL, sizeof *shared.state, PROT_READ | PROT_WRITE, MAP_SHARED, shared.file, 0);
    if (shared.file < 0 || shared.state == MAP_FAILED || shared.slot >= 16)
        misuse("no shared device %s", name);
}

/* Bytes that are free; the caller has the lock. */
static size_t available(void)
{
    size_t others = 0, own = capacity - used;
    if (shared.state == NULL)
        return own;
    for (size_t at = 0; at < 16; at++)
        others += shared.state->used[at];
    return own < shared.state->bytes - others ? own : shared.state->bytes - others;
}

static void lock_shared(int operation)
{
    if (shared.state != NULL && flock(shared.file, operation) != 0)
        misuse("the shared device cannot be locked");
}

static bool occupy(size_t bytes)
{
    lock_shared(LOCK_EX);
    bool free = bytes <= available();
    if (free && shared.state != NULL)
        shared.state->used[shared.slot] += bytes;
    lock_shared(LOCK_UN);
    used += free ? bytes : 0;
    return free;
}

static void release(size_t bytes)
{
    lock_shared(LOCK_EX);
    if (shared.state != NULL)
        shared.state->used[shared.slot] -= bytes;
    lock_shared(LOCK_UN);
    used -= bytes;
}

static void add(struct ranges *ranges, struct range range)
{
    if (ranges->count == ranges->capacity) {
        ranges->capacity = ranges->capacity ? 2 * ranges->capacity : 64;
        ranges->all = realloc(ranges->all, ranges->capacity * sizeof *ranges->all);
    }
    ranges->all[ranges->count++] = range;
}

static struct range *holding(struct ranges *ranges, uintptr_t address, size_t bytes)
{
    for (size_t at = 0; at < ranges->count; at++)
        if (address >= ranges->all[at].address &&
            address + bytes <= ranges->all[at].address + ranges->all[at].bytes)
            return &ranges->all[at];
    return NULL;
}

static struct range *touching(struct ranges *ranges, uintptr_t address, size_t bytes)
{
    for (size_t at = 0; at < ranges->count; at++)
        if (address < ranges->all[at].address + ranges->all[at].bytes && ranges->all[at].address < address + bytes)
            return &ranges->all[at];
    return NULL;
}

static struct range exactly(struct ranges *ranges, uintptr_t address, size_t bytes, const char *function)
{
    struct range *found = holding(ranges, address, 1);
    if (found == NULL || found->address != address || (bytes != 0 && found->bytes != bytes))
        misuse("%s(%#lx, %zu): there is no such range", function, (long)address, bytes);
    return *found;
}

static void drop(struct ranges *ranges, uintptr_t address)
{
    struct range *found = holding(ranges, address, 1);
    *found = ranges->all[--ranges->count];
}

static struct memory *memory_of(CUmemGenericAllocationHandle handle)
{
    for (size_t at = 0; at < memory_count; at++)
        if (memories[at]->handle == handle && memories[at]->references != 0)
            return memories[at];
    return NULL;
}

static int file_of(const struct memory *memory) { return memory->file >= 0 ? memory->file : file; }

static void keep(struct memory *memory)
{
    if (memory_count == memory_capacity)
        memories = realloc(memories, (memory_capacity += 1024) * sizeof *memories);
    memories[memory_count++] = memory;
}

static void forget_unused(struct memory *memory)
{
    if (memory->references != 0 || memory->mappings != 0)
        return;
    if (memory->file < 0) {
        fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, memory->offset, (off_t)memory->bytes);
        add(&holes, (struct range){.address = (uintptr_t)memory->offset, .bytes = memory->bytes});
    } else
        close(memory->file);
    if (!memory->imported)
        release(memory->bytes);
    size_t at = 0;
    while (memories[at] != memory)
        at++;
    memories[at] = memories[--memory_count];
    free(memory);
}

static void need_grain(const char *function, CUdeviceptr address, size_t bytes)
{
    if (bytes == 0 || bytes % GRAIN != 0 || address % GRAIN != 0)
        misuse("%s(%#llx, %zu): not a multiple of the granularity", function, address, bytes);
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *wanted, int which)
{
    ENTER();
    (void)wanted, (void)which;
    *bytes = GRAIN;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr hint,
                                    unsigned long long flags)
{
    ENTER();
    need_grain(__func__, 0, bytes);
    (void)hint;
    if (alignment > GRAIN || flags != 0)
        misuse("cuMemAddressReserve: more than the double can");
    char *found = mmap(NULL, bytes + GRAIN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    size_t before = (GRAIN - (uintptr_t)found % GRAIN) % GRAIN;
    if (before != 0)
        munmap(found, before);
    munmap(found + before + bytes, GRAIN - before);
    *address = (uintptr_t)found + before;
    pthread_mutex_lock(&mutex);
    add(&reservations, (struct range){.address = *address, .bytes = bytes, .programs = alignment != 0});
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes)
{
    ENTER();
    pthread_mutex_lock(&mutex);
    exactly(&reservations, address, bytes, __func__);
    if (touching(&mappings, address, bytes) != NULL)
        misuse("cuMemAddressFree(%#llx, %zu): memory is mapped there", address, bytes);
    drop(&reservations, address);
    munmap((void *)address, bytes);
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

/* What another process has left in it. */
static void dirty(off_t offset, size_t bytes)
{
    static char left[PIECE];
    memset(left, 0xA5, sizeof left);
    for (size_t at = 0; at < bytes; at += sizeof left)
        if (pwrite(file, left, sizeof left, offset + (off_t)at) != sizeof left)
            misuse("cuMemCreate: no memory");
}

/* Where so many bytes of memory go in the file: it grows only where no hole has the size, as a program's limit of the
 * sizes of files must not be one of its device memory.  -1: it cannot. */
static off_t place_in_file(size_t bytes)
{
    off_t offset = file_end, end = file_end + (off_t)bytes;
    for (size_t at = 0; at < holes.count && offset == file_end; at++)
        if (holes.all[at].bytes == bytes)
            offset = (off_t)holes.all[at].address, end = file_end;
    if (ftruncate(file, end) != 0) /* as where a program has closed the file */
        return -1;
    if (offset != file_end)
        drop(&holes, (uintptr_t)offset);
    file_end = end;
    return offset;
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *wanted,
                            unsigned long long flags)
{
    ENTER();
    bool valid = handle != NULL && wanted != NULL && bytes != 0 && bytes % GRAIN == 0 && flags == 0 &&
                 wanted->type == CU_MEM_ALLOCATION_TYPE_PINNED;
    if (!valid || (wanted->location.type != CU_MEM_LOCATION_TYPE_DEVICE && wanted->location.type != HOST))
        return CUDA_ERROR_INVALID_VALUE;
    if (wanted->location.id < 0 || wanted->location.id >= device_count())
        return CUDA_ERROR_INVALID_DEVICE;
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&mutex);
    if (file < 0)
        file = memfd_create("device", MFD_CLOEXEC);
    bool occupied = occupy(bytes);
    off_t offset = occupied ? place_in_file(bytes) : -1;
    if (occupied && offset < 0)
        release(bytes);
    else if (occupied) {
        if (getenv("DOUBLE_DIRTY") != NULL)
            dirty(offset, bytes);
        struct memory *memory = calloc(1, sizeof *memory);
        *memory = (struct memory){.handle = *handle = ++last, .device = wanted->location.id, .bytes = bytes,
                                  .offset = offset, .file = -1, .properties = *wanted, .references = 1};
        keep(memory);
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties,
                                                       CUmemGenericAllocationHandle handle)
{
    ENTER();
    pthread_mutex_lock(&mutex);
    struct memory *memory = memory_of(handle);
    if (memory != NULL)
        *properties = memory->properties;
    pthread_mutex_unlock(&mutex);
    return memory != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult known(CUmemGenericAllocationHandle handle)
{
    pthread_mutex_lock(&mutex);
    bool found = memory_of(handle) != NULL;
    pthread_mutex_unlock(&mutex);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* -- what a real one gives to other devices: here only handles and addresses are looked at */

EXPORT CUresult cuMulticastBindMem(CUmemGenericAllocationHandle multicast, size_t offset,
                                   CUmemGenericAllocationHandle handle, size_t of_memory, size_t bytes,
                                   unsigned long long flags)
{
    ENTER();
    return offset == 0 && of_memory == 0 && bytes == GRAIN && flags == 0 && multicast == 77 ? known(handle)
                                                                                           : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMulticastBindMem_v2(CUmemGenericAllocationHandle multicast, CUdevice device, size_t offset,
                                      CUmemGenericAllocationHandle handle, size_t of_memory, size_t bytes,
                                      unsigned long long flags)
{
    return device == 0 ? cuMulticastBindMem(multicast, offset, handle, of_memory, bytes, flags)
                       : CUDA_ERROR_INVALID_DEVICE;
}

static CUresult mapped(CUdeviceptr address)
{
    pthread_mutex_lock(&mutex);
    bool found = holding(&mappings, address, 1) != NULL;
    pthread_mutex_unlock(&mutex);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMulticastBindAddr(CUmemGenericAllocationHandle multicast, size_t offset, CUdeviceptr address,
                                    size_t bytes, unsigned long long flags)
{
    ENTER();
    return offset == 0 && bytes == GRAIN && flags == 0 && multicast == 77 ? mapped(address) : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMulticastBindAddr_v2(CUmemGenericAllocationHandle multicast, CUdevice device, size_t offset,
                                       CUdeviceptr address, size_t bytes, unsigned long long flags)
{
    return device == 0 ? cuMulticastBindAddr(multicast, offset, address, bytes, flags) : CUDA_ERROR_INVALID_DEVICE;
}

EXPORT CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr address, size_t bytes, int type,
                                              unsigned long long flags)
{
    ENTER();
    if (bytes == 0 || type != 1 || flags != 0 || mapped(address) != CUDA_SUCCESS)
        return CUDA_ERROR_INVALID_VALUE;
    *(int *)handle = open("/dev/null", O_RDONLY | O_CLOEXEC);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemMapArrayAsync(CUarrayMapInfo *list, unsigned int count, CUstream stream)
{
    ENTER();
    (void)stream;
    for (unsigned int at = 0; at < count; at++)
        if (known(list[at].memHandle) != CUDA_SUCCESS)
            return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemMapArrayAsync_ptsz(CUarrayMapInfo *list, unsigned int count, CUstream stream)
{
    return cuMemMapArrayAsync(list, count, stream == NULL ? (CUstream)2 : stream);
}

/* -- to other processes: a descriptor of a file of its own, by which the memory outlives our use of it */

static int protection_of(const struct range *mapping)
{
    int all = 0;
    for (CUdevice device = 0; device < device_count(); device++)
        all |= mapping->access[device];
    return (all & 1 ? PROT_READ : 0) | (all & 2 ? PROT_WRITE : 0);
}

static void move_to_own_file(struct memory *memory)
{
    int own = memfd_create("exported", MFD_CLOEXEC);
    char *from = mmap(NULL, memory->bytes, PROT_READ, MAP_SHARED, file, memory->offset);
    if (own < 0 || from == MAP_FAILED || ftruncate(own, (off_t)memory->bytes) != 0 ||
        pwrite(own, from, memory->bytes, 0) != (ssize_t)memory->bytes) { /* no descriptors, or no memory */
        if (own >= 0)
            close(own);
        if (from != MAP_FAILED)
            munmap(from, memory->bytes);
        return;
    }
    munmap(from, memory->bytes);
    for (size_t at = 0; at < mappings.count; at++) {
        struct range *each = &mappings.all[at];
        if (each->memory == memory && mmap((void *)each->address, each->bytes, protection_of(each),
                                           MAP_SHARED | MAP_FIXED, own, (off_t)each->offset) == MAP_FAILED)
            misuse("cuMemExportToShareableHandle: mmap says %s", strerror(errno));
    }
    fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, memory->offset, (off_t)memory->bytes);
    memory->file = own;
    memory->offset = 0;
}

EXPORT CUresult cuMemExportToShareableHandle(void *descriptor, CUmemGenericAllocationHandle handle, int type,
                                             unsigned long long flags)
{
    ENTER();
    pthread_mutex_lock(&mutex);
    struct memory *memory = memory_of(handle);
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags != 0 || memory == NULL ||
        memory->properties.requestedHandleTypes != type) {
        pthread_mutex_unlock(&mutex);
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (memory->file < 0)
        move_to_own_file(memory);
    *(int *)descriptor = memory->file >= 0 ? dup(memory->file) : -1;
    pthread_mutex_unlock(&mutex);
    return *(int *)descriptor >= 0 ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *descriptor, int type)
{
    ENTER();
    int theirs = dup((int)(intptr_t)descriptor);
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || theirs < 0)
        return CUDA_ERROR_INVALID_VALUE;
    struct memory *memory = calloc(1, sizeof *memory);
    pthread_mutex_lock(&mutex);
    *memory = (struct memory){.handle = *handle = ++last, .file = theirs, .imported = true, .references = 1};
    keep(memory);
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

/* Handles of the legacy kind are those of memory of cuMemAlloc alone, and nobody opens one here. */
EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address)
{
    ENTER();
    struct range *found = handle != NULL ? holding(&allocations, address, 1) : NULL;
    if (found == NULL || found->pool != NULL)
        return CUDA_ERROR_INVALID_VALUE;
    memset(handle, 1, sizeof *handle);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags)
{
    ENTER();
    (void)address, (void)handle, (void)flags;
    return CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr address)
{
    ENTER();
    (void)address;
    return CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    ENTER();
    pthread_mutex_lock(&mutex);
    struct memory *memory = memory_of(handle);
    if (memory != NULL) {
        memory->references--;
        forget_unused(memory);
    }
    pthread_mutex_unlock(&mutex);
    return memory != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult map_memory(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle)
{
    struct memory *memory = memory_of(handle);
    struct range *reserved = holding(&reservations, address, bytes);
    if (memory != NULL && memory->imported)
        memory->bytes = bytes;
    if (memory == NULL || bytes == 0 || (address | bytes | offset) % GRAIN != 0 || offset > memory->bytes ||
        bytes > memory->bytes - offset || reserved == NULL || touching(&mappings, address, bytes) != NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (!reserved->programs && bytes != memory->bytes)
        misuse("cuMemMap(%#llx, %zu): the memory has %zu bytes", address, bytes, memory->bytes);
    if (mmap((void *)address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, file_of(memory),
             memory->offset + (off_t)offset) == MAP_FAILED)
        misuse("cuMemMap: mmap says %s", strerror(errno));
    memory->mappings++;
    add(&mappings, (struct range){.address = address, .bytes = bytes, .memory = memory, .offset = offset});
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags)
{
    ENTER();
    pthread_mutex_lock(&mutex);
    CUresult result = flags == 0 ? map_memory(address, bytes, offset, handle) : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&mutex);
    return result;
}

/* Whether the range consists of whole mappings, without a gap. */
static bool is_mapped(CUdeviceptr address, size_t bytes)
{
    size_t done = 0;
    while (done < bytes) {
        struct range *found = holding(&mappings, address + done, 1);
        if (found == NULL || found->address != address + done || found->bytes > bytes - done)
            return false;
        done += found->bytes;
    }
    return bytes != 0;
}

static CUresult set_access(struct range *mapping, const CUmemAccessDesc *access, size_t count)
{
    CUdevice own = mapping->memory->device;
    for (size_t at = 0; at < count; at++) {
        if (access[at].location.type == HOST)
            continue;
        if (access[at].location.type != CU_MEM_LOCATION_TYPE_DEVICE || access[at].location.id < 0 ||
            access[at].location.id >= device_count() || !can_access(access[at].location.id, own))
            return CUDA_ERROR_INVALID_DEVICE;
        mapping->access[access[at].location.id] = (unsigned char)access[at].flags;
    }
    for (CUdevice device = 0; device < device_count(); device++) {
        if (can_access(device, own) && mapping->access[device] != CU_MEM_ACCESS_FLAGS_PROT_READWRITE &&
            !mapping->memory->imported && !holding(&reservations, mapping->address, 1)->programs)
            misuse("cuMemSetAccess(%#lx): device %d, which could use memory of cudaMalloc's, may not",
                   (long)mapping->address, device);
    }
    mprotect((void *)mapping->address, mapping->bytes, protection_of(mapping));
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
    ENTER();
    pthread_mutex_lock(&mutex);
    CUresult result = is_mapped(address, bytes) && access != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    for (size_t done = 0; done < bytes && result == CUDA_SUCCESS;) {
        struct range *mapping = holding(&mappings, address + done, 1);
        done += mapping->bytes;
        result = set_access(mapping, access, count);
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

EXPORT CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr address)
{
    ENTER();
    pthread_mutex_lock(&mutex);
    struct range *found = holding(&mappings, address, 1);
    bool valid = found != NULL && location->type == CU_MEM_LOCATION_TYPE_DEVICE && location->id < device_count();
    if (valid)
        *flags = found->access[location->id];
    pthread_mutex_unlock(&mutex);
    return valid ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t bytes)
{
    ENTER();
    lock_for_writing();
    pthread_mutex_lock(&mutex);
    CUresult result = is_mapped(address, bytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (result == CUDA_SUCCESS && mmap((void *)address, bytes, PROT_NONE, flags, -1, 0) == MAP_FAILED)
        misuse("cuMemUnmap: mmap says %s", strerror(errno));
    for (size_t done = 0; done < bytes && result == CUDA_SUCCESS;) {
        struct range mapping = *holding(&mappings, address + done, 1);
        done += mapping.bytes;
        drop(&mappings, mapping.address);
        mapping.memory->mappings--;
        forget_unused(mapping.memory);
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

static pid_t loader; /* a child that it forks cannot use CUDA */

__attribute__((constructor)) static void load(void) { loader = getpid(); }

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes)
{
    if (getpid() != loader)
        return CUDA_ERROR_NOT_INITIALIZED;
    ENTER();
    if (current_context() == NULL)
        return CUDA_ERROR_INVALID_CONTEXT;
    CUresult result = failed(current_context());
    if (result == CUDA_SUCCESS)
        result = permitted_during_capture();
    if (result != CUDA_SUCCESS)
        return result;
    if (address == NULL || bytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    result = CUDA_ERROR_OUT_OF_MEMORY;
    void *memory = NULL;
    pthread_mutex_lock(&mutex);
    bool occupied = occupy(bytes);
    if (occupied && posix_memalign(&memory, 512, bytes) != 0)
        release(bytes);
    else if (occupied) {
        *address = (uintptr_t)memory;
        add(&allocations, (struct range){
                              .address = *address, .bytes = bytes, .context = current_context()});
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

static void count_in(CUmemoryPool pool, size_t bytes);

static CUresult free_allocation(CUdeviceptr address)
{
    pthread_mutex_lock(&mutex);
    struct range *found = holding(&allocations, address, 1);
    if (found == NULL || found->address != address) {
        pthread_mutex_unlock(&mutex);
        return CUDA_ERROR_INVALID_VALUE;
    }
    release(found->bytes);
    if (found->pool != NULL)
        count_in(found->pool, -found->bytes);
    drop(&allocations, address);
    pthread_mutex_unlock(&mutex);
    free((void *)address);
    return CUDA_SUCCESS;
}

/* That of a stream, of a context, or all. */
static void free_deferred_of(CUstream stream, CUcontext context)
{
    pthread_mutex_lock(&mutex);
    for (size_t at = deferred.count; at-- > 0;)
        if ((stream == NULL || deferred.all[at].freed_on == stream) &&
            (context == NULL || deferred.all[at].context == context)) {
            release(deferred.all[at].bytes);
            free((void *)deferred.all[at].address);
            deferred.all[at] = deferred.all[--deferred.count];
        }
    pthread_mutex_unlock(&mutex);
}

void free_deferred(CUstream stream) { free_deferred_of(stream, NULL); }

void free_allocations_of(CUcontext context)
{
    free_deferred_of(NULL, context);
    for (;;) {
        CUdeviceptr address = 0;
        pthread_mutex_lock(&mutex);
        for (size_t at = 0; at < allocations.count; at++)
            if (allocations.all[at].context == context)
                address = allocations.all[at].address;
        pthread_mutex_unlock(&mutex);
        if (address == 0)
            return;
        free_allocation(address);
    }
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr address)
{
    if (getpid() != loader)
        return CUDA_ERROR_NOT_INITIALIZED;
    ENTER();
    if (address == 0)
        return CUDA_SUCCESS;
    wait_while_suspended();
    CUresult result = failed(current_context());
    if (result == CUDA_SUCCESS)
        result = permitted_during_capture();
    if (result != CUDA_SUCCESS)
        return result;
    finish_work(current_context());
    return free_allocation(address);
}

EXPORT CUresult cuMemAllocManaged(CUdeviceptr *address, size_t bytes, unsigned int flags)
{
    return flags == 1 || flags == 2 ? cuMemAlloc_v2(address, bytes) : CUDA_ERROR_INVALID_VALUE;
}

/* -- pools: of allocations that are given back to the device at once */

struct CUmemPoolHandle_st {
    CUmemPoolProps properties;
    unsigned long long attributes[9];
    unsigned char access[MOST_DEVICES];
    bool destroyed;
};
enum { RELEASE_THRESHOLD = 4, RESERVED, RESERVED_HIGH, USED, USED_HIGH };

static CUmemoryPool standard_pools[MOST_DEVICES], current_pools[MOST_DEVICES];

static CUmemoryPool make_pool(const CUmemPoolProps *wanted)
{
    CUmemoryPool pool = calloc(1, sizeof *pool);
    pool->properties = *wanted;
    pool->attributes[1] = pool->attributes[2] = pool->attributes[3] = 1;
    return pool;
}

static CUmemoryPool pool_of(CUmemoryPool *pools, CUdevice device)
{
    CUmemPoolProps wanted = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                             .location = {CU_MEM_LOCATION_TYPE_DEVICE, device}};
    pthread_mutex_lock(&mutex);
    if (standard_pools[device] == NULL)
        standard_pools[device] = current_pools[device] = make_pool(&wanted);
    CUmemoryPool pool = pools[device];
    pthread_mutex_unlock(&mutex);
    return pool;
}

EXPORT CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device)
{
    ENTER();
    if (device < 0 || device >= device_count())
        return CUDA_ERROR_INVALID_DEVICE;
    *pool = pool_of(standard_pools, device);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice device)
{
    ENTER();
    if (device < 0 || device >= device_count())
        return CUDA_ERROR_INVALID_DEVICE;
    *pool = pool_of(current_pools, device);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool)
{
    ENTER();
    if (device < 0 || device >= device_count() || pool->properties.location.id != device)
        return CUDA_ERROR_INVALID_VALUE;
    pool_of(current_pools, device);
    current_pools[device] = pool;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *wanted)
{
    ENTER();
    if (wanted->allocType != CU_MEM_ALLOCATION_TYPE_PINNED || wanted->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
        wanted->location.id < 0 || wanted->location.id >= device_count())
        return CUDA_ERROR_INVALID_VALUE;
    *pool = make_pool(wanted);
    return CUDA_SUCCESS;
}

/* It is never freed, so that its handle is no other's. */
EXPORT CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
    ENTER();
    for (size_t device = 0; device < MOST_DEVICES; device++)
        if (standard_pools[device] == pool)
            return CUDA_ERROR_INVALID_VALUE;
    for (size_t device = 0; device < MOST_DEVICES; device++)
        if (current_pools[device] == pool)
            current_pools[device] = standard_pools[device];
    pool->destroyed = true;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep)
{
    ENTER();
    (void)keep;
    return pool->destroyed ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

static size_t value_size(int attribute) { return attribute < RELEASE_THRESHOLD ? sizeof(int) : sizeof(long long); }

EXPORT CUresult cuMemPoolGetAttribute(CUmemoryPool pool, int attribute, void *value)
{
    ENTER();
    if (pool->destroyed || attribute < 1 || attribute > USED_HIGH)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&mutex);
    memcpy(value, &pool->attributes[attribute], value_size(attribute));
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolSetAttribute(CUmemoryPool pool, int attribute, void *value)
{
    ENTER();
    if (pool->destroyed || attribute < 1 || attribute > USED_HIGH || attribute == RESERVED || attribute == USED)
        return CUDA_ERROR_INVALID_VALUE;
    unsigned long long wanted = 0;
    memcpy(&wanted, value, value_size(attribute));
    if (attribute > RELEASE_THRESHOLD && wanted != 0)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&mutex);
    pool->attributes[attribute] = attribute > RELEASE_THRESHOLD ? pool->attributes[attribute - 1] : wanted;
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

static void count_in(CUmemoryPool pool, size_t bytes)
{
    for (int attribute = RESERVED; attribute <= USED; attribute += 2) {
        unsigned long long now = pool->attributes[attribute] += bytes, *high = &pool->attributes[attribute + 1];
        *high = now > *high ? now : *high;
    }
}

/* At once: whatever has used the memory before is done when it is freed here. */
EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr *address, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    ENTER();
    (void)stream;
    void *memory = NULL;
    if (current_context() == NULL)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (failed(current_context()) != CUDA_SUCCESS)
        return failed(current_context());
    if (address == NULL || bytes == 0 || pool == NULL || pool->destroyed)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&mutex);
    bool occupied = occupy(bytes);
    if (occupied && posix_memalign(&memory, 512, bytes) != 0)
        release(bytes);
    else if (occupied) {
        *address = (uintptr_t)memory;
        count_in(pool, bytes);
        add(&allocations, (struct range){.address = *address, .bytes = bytes, .pool = pool});
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

EXPORT CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *address, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    return cuMemAllocFromPoolAsync(address, bytes, pool, stream == NULL ? (CUstream)2 : stream);
}

EXPORT CUresult cuMemAllocAsync(CUdeviceptr *address, size_t bytes, CUstream stream)
{
    ENTER();
    if (current_context() == NULL)
        return CUDA_ERROR_INVALID_CONTEXT;
    return cuMemAllocFromPoolAsync(address, bytes, pool_of(current_pools, device_of(current_context())), stream);
}

EXPORT CUresult cuMemAllocAsync_ptsz(CUdeviceptr *address, size_t bytes, CUstream stream)
{
    return cuMemAllocAsync(address, bytes, stream == NULL ? (CUstream)2 : stream);
}

/* Waits, which the real one does not.  Memory of cuMemAlloc is gone at once, but its bytes are free as the real one's
 * are: when the program has waited for the stream, not because other memory is wanted (an H100, driver 580.159.04). */
EXPORT CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream)
{
    ENTER();
    int captured = 0;
    wait_while_suspended();
    cuStreamIsCapturing(stream, &captured);
    if (captured != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (failed(current_context()) != CUDA_SUCCESS)
        return failed(current_context());
    finish_work(current_context());
    pthread_mutex_lock(&mutex);
    struct range *found = holding(&allocations, address, 1);
    bool defers = found != NULL && found->address == address && found->pool == NULL;
    if (defers) {
        found->freed_on = stream;
        add(&deferred, *found);
        drop(&allocations, address);
    }
    pthread_mutex_unlock(&mutex);
    return defers ? CUDA_SUCCESS : free_allocation(address);
}

EXPORT CUresult cuMemFreeAsync_ptsz(CUdeviceptr address, CUstream stream)
{
    return cuMemFreeAsync(address, stream == NULL ? (CUstream)2 : stream);
}

EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr *address, size_t *pitch, size_t width, size_t height, unsigned int element)
{
    ENTER();
    if (address == NULL || pitch == NULL || width == 0 || height == 0 ||
        (element != 4 && element != 8 && element != 16))
        return CUDA_ERROR_INVALID_VALUE;
    size_t row = (width + 511) / 512 * 512;
    CUresult result = cuMemAlloc_v2(address, row * height);
    if (result == CUDA_SUCCESS)
        *pitch = row;
    return result;
}

/* What an address belongs to: what is mapped there has its own, rounded size, a handle, and no context. */
static bool described(CUdeviceptr address, struct range *found)
{
    pthread_mutex_lock(&mutex);
    struct range *range = holding(&allocations, address, 1);
    if (range == NULL)
        range = holding(&mappings, address, 1);
    if (range != NULL)
        *found = *range;
    pthread_mutex_unlock(&mutex);
    return range != NULL;
}

EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr address)
{
    ENTER();
    struct range range;
    if (current_context() == NULL)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!described(address, &range))
        return CUDA_ERROR_NOT_FOUND;
    if (base != NULL)
        *base = range.address;
    if (bytes != NULL)
        *bytes = range.bytes;
    return CUDA_SUCCESS;
}

enum { SYNC_MEMOPS = 6 };

/* Not of memory that is mapped, or a pool's. */
EXPORT CUresult cuPointerSetAttribute(const void *value, int attribute, CUdeviceptr address)
{
    ENTER();
    if (value == NULL || attribute != SYNC_MEMOPS)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&mutex);
    struct range *found = holding(&allocations, address, 1);
    bool can = found != NULL && found->pool == NULL, is_mapped = holding(&mappings, address, 1) != NULL;
    if (can)
        found->synchronizes = *(const unsigned *)value != 0;
    pthread_mutex_unlock(&mutex);
    return can ? CUDA_SUCCESS : found != NULL || is_mapped ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr address)
{
    enum { CONTEXT = 1, MEMORY_TYPE, DEVICE_POINTER, IS_MANAGED = 8, DEVICE_ORDINAL, RANGE_START = 11, RANGE_SIZE };
    enum { IS_LEGACY_CUDA_IPC_CAPABLE = 10, ALLOWED_HANDLE_TYPES = 14, MEMPOOL = 17 };
    ENTER();
    struct range range;
    if (data == NULL || !described(address, &range))
        return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CONTEXT:
        *(CUcontext *)data = range.context;
        return CUDA_SUCCESS;
    case MEMORY_TYPE:
        *(unsigned *)data = 2;
        return CUDA_SUCCESS;
    case DEVICE_POINTER:
        *(CUdeviceptr *)data = address;
        return CUDA_SUCCESS;
    case IS_MANAGED:
        *(unsigned *)data = 0;
        return CUDA_SUCCESS;
    case SYNC_MEMOPS:
        *(unsigned *)data = range.synchronizes;
        return CUDA_SUCCESS;
    case DEVICE_ORDINAL:
        *(int *)data = range.memory != NULL ? range.memory->device
                       : range.pool != NULL ? range.pool->properties.location.id
                                            : device_of(range.context);
        return CUDA_SUCCESS;
    case MEMPOOL:
        *(CUmemoryPool *)data = range.pool;
        return CUDA_SUCCESS;
    case RANGE_START:
        *(CUdeviceptr *)data = range.address;
        return CUDA_SUCCESS;
    case RANGE_SIZE:
        *(size_t *)data = range.bytes;
        return CUDA_SUCCESS;
    case IS_LEGACY_CUDA_IPC_CAPABLE: /* as the handles of memory that is mapped, other than cuMemAlloc's has */
        *(bool *)data = range.memory == NULL && range.pool == NULL;
        return CUDA_SUCCESS;
    case ALLOWED_HANDLE_TYPES:
        *(unsigned long long *)data =
            range.memory != NULL ? (unsigned)range.memory->properties.requestedHandleTypes : 0;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

EXPORT CUresult cuPointerGetAttributes(unsigned int count, int *attributes, void **data, CUdeviceptr address)
{
    ENTER();
    for (unsigned int at = 0; at < count; at++)
        if (cuPointerGetAttribute(data[at], attributes[at], address) != CUDA_SUCCESS)
            *(int *)data[at] = 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address)
{
    ENTER();
    pthread_mutex_lock(&mutex);
    struct range *range = holding(&mappings, (uintptr_t)address, 1);
    if (range != NULL) {
        range->memory->references++;
        *handle = range->memory->handle;
    }
    pthread_mutex_unlock(&mutex);
    return range != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *bytes)
{
    ENTER();
    if (is_suspended())
        return CUDA_ERROR_OPERATING_SYSTEM;
    pthread_mutex_lock(&mutex);
    lock_shared(LOCK_EX);
    *free_bytes = available();
    lock_shared(LOCK_UN);
    *bytes = shared.state != NULL ? shared.state->bytes : capacity;
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostRegister_v2(void *address, size_t bytes, unsigned int flags)
{
    ENTER();
    lock_for_writing();
    if (current_context() == NULL || flags != (CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP))
        misuse("cuMemHostRegister: without a context, not for all, or not for kernels");
    pthread_mutex_lock(&mutex);
    if (touching(&registered, (uintptr_t)address, bytes) != NULL)
        misuse("cuMemHostRegister(%p, %zu): registered already", address, bytes);
    add(&registered, (struct range){.address = (uintptr_t)address, .bytes = bytes});
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostUnregister(void *address)
{
    ENTER();
    pthread_mutex_lock(&mutex);
    struct range range = exactly(&registered, (uintptr_t)address, 0, __func__);
    size_t pages = (range.bytes + 4095) / 4096;
    unsigned char *resident = malloc(pages);
    if (mincore(address, range.bytes, resident) != 0)
        misuse("cuMemHostUnregister(%p): the memory was unmapped before", address);
    free(resident);
    drop(&registered, range.address);
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

/* As the real one's of today: the same address. */
EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *address, void *host, unsigned int flags)
{
    ENTER();
    if (flags != 0 || !host_range_is_registered(host, 1))
        return CUDA_ERROR_INVALID_VALUE;
    *address = (uintptr_t)host;
    return CUDA_SUCCESS;
}

bool device_range_is_usable(CUdeviceptr address, size_t bytes, int access)
{
    return range_is_usable_in(address, bytes, access, current_context());
}

bool range_is_usable_in(CUdeviceptr address, size_t bytes, int access, CUcontext context)
{
    CUdevice device = context != NULL ? device_of(context) : 0;
    pthread_mutex_lock(&mutex);
    struct range *found = holding(&mappings, address, bytes);
    bool usable = found != NULL ? (found->access[device] & access) == access
                                : holding(&allocations, address, bytes) != NULL;
    pthread_mutex_unlock(&mutex);
    return usable;
}

bool host_range_is_registered(const void *address, size_t bytes)
{
    pthread_mutex_lock(&mutex);
    bool found = holding(&registered, (uintptr_t)address, bytes) != NULL;
    pthread_mutex_unlock(&mutex);
    return found;
}

/* -- copies: not by ``memcpy``, which a sanitizer would take for the program's own and order with its accesses */

static bool never_written(CUdeviceptr address, size_t bytes)
{
    pthread_mutex_lock(&mutex);
    struct range *found = holding(&mappings, address, bytes);
    off_t at = found != NULL ? found->memory->offset + (off_t)(found->offset + address - found->address) : 0;
    off_t data = found != NULL ? lseek(file_of(found->memory), at, SEEK_DATA) : 0;
    bool hole = found != NULL && (data >= at + (off_t)bytes || (data < 0 && errno == ENXIO));
    pthread_mutex_unlock(&mutex);
    return hole;
}

static void move(volatile char *to, const volatile char *from, size_t bytes)
{
    size_t at = 0;
    if (((uintptr_t)to | (uintptr_t)from) % 8 == 0)
        for (; at + 8 <= bytes; at += 8)
            *(volatile uint64_t *)(to + at) = from != NULL ? *(const volatile uint64_t *)(from + at) : 0;
    for (; at < bytes; at++)
        to[at] = from != NULL ? from[at] : 0;
}

static bool zero(const volatile char *from, size_t bytes)
{
    for (size_t at = 0; at < bytes; at++)
        if (from[at] != 0)
            return false;
    return true;
}

void device_to_host(char *host, CUdeviceptr device, size_t bytes)
{
    for (size_t at = 0, now; at < bytes; at += now) {
        now = bytes - at < PIECE ? bytes - at : PIECE;
        move(host + at, never_written(device + at, now) ? NULL : (const char *)device + at, now);
    }
}

void host_to_device(CUdeviceptr device, const char *host, size_t bytes)
{
    for (size_t at = 0, now; at < bytes; at += now) {
        now = bytes - at < PIECE ? bytes - at : PIECE;
        if (!zero(host + at, now) || !never_written(device + at, now))
            move((char *)device + at, host + at, now);
    }
}

void set_device(CUdeviceptr device, int value, size_t bytes)
{
    for (size_t at = 0, now; at < bytes; at += now) {
        now = bytes - at < PIECE ? bytes - at : PIECE;
        if (value != 0 || !never_written(device + at, now))
            for (size_t byte = 0; byte < now; byte++)
                ((volatile char *)device)[at + byte] = (char)value;
    }
}

bool device_is_zero(CUdeviceptr device, size_t bytes)
{
    for (size_t at = 0, now; at < bytes; at += now) {
        now = bytes - at < PIECE ? bytes - at : PIECE;
        if (!never_written(device + at, now) && !zero((const char *)device + at, now))
            return false;
    }
    return true;
}

EXPORT void double_set_bytes(size_t bytes) { capacity = bytes; }

/* Without a context, as the real ones. */
EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    ENTER();
    *bytes = capacity;
    return device < 0 || device >= device_count() ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
    ENTER();
    memset(uuid, 0, sizeof *uuid);
    uuid->bytes[15] = (char)(10 + device); /* ...0a, ...0b */
    return device < 0 || device >= device_count() ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

EXPORT void double_outstanding(struct outstanding *all)
{
    pthread_mutex_lock(&mutex);
    *all = (struct outstanding){used, reservations.count, memory_count, mappings.count, allocations.count, 0, 0,
                                registered.count};
    pthread_mutex_unlock(&mutex);
    all->streams = streams_outstanding();
    all->events = events_outstanding();
}
