/* Device memory of a double: one sparse file; an address range is host memory that a part of the file is mapped to. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "double.h"

#define GRAIN ((size_t)2 << 20)
#define PIECE ((size_t)64 << 10)

struct range {
    uintptr_t address;
    size_t bytes;
    struct memory *memory; /* of a mapping */
    CUcontext context;     /* of an allocation */
    bool usable;
};
struct memory {
    CUmemGenericAllocationHandle handle;
    CUdevice device;
    size_t bytes;
    off_t offset; /* in the file, never used again */
    int file;     /* another process's; or -1: our own */
    bool exportable;
    size_t mappings;
    bool released;
};
struct ranges {
    struct range *all;
    size_t count, room;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct ranges reservations, mappings, allocations, registered;
static struct memory **memories;
static size_t memory_count, memory_room;
static CUmemGenericAllocationHandle last;
static size_t capacity = (size_t)1 << 40, used;
static int file = -1;
static off_t file_end;

static void add(struct ranges *ranges, struct range range)
{
    if (ranges->count == ranges->room) {
        ranges->room = ranges->room ? 2 * ranges->room : 64;
        ranges->all = realloc(ranges->all, ranges->room * sizeof *ranges->all);
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

static struct memory *memory_of(CUmemGenericAllocationHandle handle, const char *function)
{
    for (size_t at = 0; at < memory_count; at++)
        if (memories[at]->handle == handle && !memories[at]->released)
            return memories[at];
    misuse("%s: there is no handle %llu, or it was released", function, handle);
}

static void keep(struct memory *memory)
{
    if (memory_count == memory_room)
        memories = realloc(memories, (memory_room += 1024) * sizeof *memories);
    memories[memory_count++] = memory;
}

static void forget_unused(struct memory *memory)
{
    if (!memory->released || memory->mappings != 0)
        return;
    if (memory->file < 0) {
        fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, memory->offset, (off_t)memory->bytes);
        used -= memory->bytes;
    } else
        close(memory->file);
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
    if (alignment != 0 || hint != 0 || flags != 0)
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
    add(&reservations, (struct range){.address = *address, .bytes = bytes});
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

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *wanted,
                            unsigned long long flags)
{
    ENTER();
    need_grain(__func__, 0, bytes);
    if (wanted->type != CU_MEM_ALLOCATION_TYPE_PINNED || wanted->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
        wanted->location.id < 0 || wanted->location.id >= device_count() || flags != 0)
        misuse("cuMemCreate: not memory of a device");
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&mutex);
    if (file < 0)
        file = memfd_create("device", MFD_CLOEXEC);
    if (bytes <= capacity - used && ftruncate(file, file_end + (off_t)bytes) == 0) {
        struct memory *memory = calloc(1, sizeof *memory);
        *memory = (struct memory){
            .handle = *handle = ++last, .device = wanted->location.id, .bytes = bytes, .offset = file_end,
            .file = -1, .exportable = wanted->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR};
        file_end += (off_t)bytes;
        used += bytes;
        keep(memory);
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

/* -- to other processes: a descriptor of the file, at the memory's offset */

EXPORT CUresult cuMemExportToShareableHandle(void *descriptor, CUmemGenericAllocationHandle handle, int type,
                                             unsigned long long flags)
{
    ENTER();
    pthread_mutex_lock(&mutex);
    struct memory *memory = memory_of(handle, __func__);
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags != 0 || !memory->exportable)
        misuse("cuMemExportToShareableHandle: it was not created for that");
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    *(int *)descriptor = open(path, O_RDWR | O_CLOEXEC);
    lseek(*(int *)descriptor, memory->offset, SEEK_SET);
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *descriptor, int type)
{
    ENTER();
    int theirs = dup((int)(intptr_t)descriptor);
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || theirs < 0)
        return CUDA_ERROR_INVALID_VALUE;
    struct memory *memory = calloc(1, sizeof *memory);
    pthread_mutex_lock(&mutex);
    *memory = (struct memory){.handle = *handle = ++last, .offset = lseek(theirs, 0, SEEK_CUR), .file = theirs};
    keep(memory);
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

/* Handles of the legacy kind are those of memory of cuMemAlloc alone, and nobody opens one here. */
EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address)
{
    ENTER();
    if (handle == NULL || holding(&allocations, address, 1) == NULL)
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
    struct memory *memory = memory_of(handle, __func__);
    memory->released = true;
    forget_unused(memory);
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags)
{
    ENTER();
    need_grain(__func__, address, bytes);
    pthread_mutex_lock(&mutex);
    struct memory *memory = memory_of(handle, __func__);
    if (memory->file >= 0)
        memory->bytes = bytes;
    if (offset != 0 || flags != 0 || bytes != memory->bytes)
        misuse("cuMemMap(%#llx, %zu): the memory has %zu bytes", address, bytes, memory->bytes);
    if (holding(&reservations, address, bytes) == NULL || touching(&mappings, address, bytes) != NULL)
        misuse("cuMemMap(%#llx, %zu): not reserved, or mapped already", address, bytes);
    if (mmap((void *)address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->file >= 0 ? memory->file : file,
             memory->offset) == MAP_FAILED)
        misuse("cuMemMap: mmap says %s", strerror(errno));
    memory->mappings++;
    add(&mappings, (struct range){.address = address, .bytes = bytes, .memory = memory});
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
    ENTER();
    pthread_mutex_lock(&mutex);
    CUdevice own = exactly(&mappings, address, bytes, __func__).memory->device;
    unsigned given = 0;
    for (size_t at = 0; at < count; at++) {
        if (access[at].location.type != CU_MEM_LOCATION_TYPE_DEVICE || !can_access(access[at].location.id, own) ||
            access[at].flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
            misuse("cuMemSetAccess(%#llx, %zu): not access of a device that can", address, bytes);
        given |= 1u << access[at].location.id;
    }
    for (CUdevice device = 0; device < device_count(); device++)
        if (can_access(device, own) && !(given & 1u << device))
            misuse("cuMemSetAccess(%#llx, %zu): device %d, which could use memory of cudaMalloc's, may not", address,
                   bytes, device);
    holding(&mappings, address, bytes)->usable = true;
    mprotect((void *)address, bytes, PROT_READ | PROT_WRITE);
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t bytes)
{
    ENTER();
    lock_for_writing();
    pthread_mutex_lock(&mutex);
    struct range mapping = exactly(&mappings, address, bytes, __func__);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (mmap((void *)address, bytes, PROT_NONE, flags, -1, 0) == MAP_FAILED)
        misuse("cuMemUnmap: mmap says %s", strerror(errno));
    drop(&mappings, address);
    mapping.memory->mappings--;
    forget_unused(mapping.memory);
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
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
    CUresult result = permitted_during_capture();
    if (result != CUDA_SUCCESS)
        return result;
    if (address == NULL || bytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    result = CUDA_ERROR_OUT_OF_MEMORY;
    void *memory = NULL;
    pthread_mutex_lock(&mutex);
    if (bytes <= capacity - used && posix_memalign(&memory, 512, bytes) == 0) {
        *address = (uintptr_t)memory;
        used += bytes;
        add(&allocations, (struct range){
                              .address = *address, .bytes = bytes, .context = current_context(), .usable = true});
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

static CUresult free_allocation(CUdeviceptr address)
{
    pthread_mutex_lock(&mutex);
    struct range *found = holding(&allocations, address, 1);
    if (found == NULL || found->address != address) {
        pthread_mutex_unlock(&mutex);
        return CUDA_ERROR_INVALID_VALUE;
    }
    used -= found->bytes;
    drop(&allocations, address);
    pthread_mutex_unlock(&mutex);
    free((void *)address);
    return CUDA_SUCCESS;
}

void free_allocations_of(CUcontext context)
{
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
    CUresult result = permitted_during_capture();
    if (result != CUDA_SUCCESS)
        return result;
    finish_work(current_context());
    return free_allocation(address);
}

EXPORT CUresult cuMemAllocManaged(CUdeviceptr *address, size_t bytes, unsigned int flags)
{
    return flags == 1 || flags == 2 ? cuMemAlloc_v2(address, bytes) : CUDA_ERROR_INVALID_VALUE;
}

/* Waits, which the real one does not. */
EXPORT CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream)
{
    ENTER();
    int captured = 0;
    cuStreamIsCapturing(stream, &captured);
    if (captured != 0)
        return CUDA_ERROR_INVALID_VALUE;
    finish_work(current_context());
    return free_allocation(address);
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

EXPORT CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr address)
{
    enum { CONTEXT = 1, MEMORY_TYPE, DEVICE_POINTER, IS_MANAGED = 8, DEVICE_ORDINAL, RANGE_START = 11, RANGE_SIZE };
    enum { IS_LEGACY_CUDA_IPC_CAPABLE = 10, ALLOWED_HANDLE_TYPES = 14 };
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
    case DEVICE_ORDINAL:
        *(int *)data = range.memory != NULL ? range.memory->device : device_of(range.context);
        return CUDA_SUCCESS;
    case RANGE_START:
        *(CUdeviceptr *)data = range.address;
        return CUDA_SUCCESS;
    case RANGE_SIZE:
        *(size_t *)data = range.bytes;
        return CUDA_SUCCESS;
    case IS_LEGACY_CUDA_IPC_CAPABLE: /* as the handles of memory that is mapped, other than cuMemAlloc's has */
        *(bool *)data = range.memory == NULL;
        return CUDA_SUCCESS;
    case ALLOWED_HANDLE_TYPES:
        *(unsigned long long *)data =
            range.memory != NULL && range.memory->exportable ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : 0;
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
    struct range range;
    if (!described((CUdeviceptr)address, &range) || range.memory == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *handle = range.memory->handle;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *bytes)
{
    ENTER();
    pthread_mutex_lock(&mutex);
    *free_bytes = capacity - used;
    *bytes = capacity;
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostRegister_v2(void *address, size_t bytes, unsigned int flags)
{
    ENTER();
    lock_for_writing();
    if (current_context() == NULL || flags != CU_MEMHOSTREGISTER_PORTABLE)
        misuse("cuMemHostRegister: without a context, or not for all");
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

bool device_range_is_usable(CUdeviceptr address, size_t bytes)
{
    pthread_mutex_lock(&mutex);
    struct range *found = holding(&mappings, address, bytes);
    if (found == NULL)
        found = holding(&allocations, address, bytes);
    bool usable = found != NULL && found->usable;
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
    off_t at = found != NULL ? found->memory->offset + (off_t)(address - found->address) : 0;
    off_t data = found != NULL ? lseek(file, at, SEEK_DATA) : 0;
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

EXPORT void double_set_bytes(size_t bytes) { capacity = bytes; }

EXPORT void double_outstanding(struct outstanding *all)
{
    pthread_mutex_lock(&mutex);
    *all = (struct outstanding){used, reservations.count, memory_count, mappings.count, allocations.count, 0, 0,
                                registered.count};
    pthread_mutex_unlock(&mutex);
    all->streams = streams_outstanding();
    all->events = events_outstanding();
}
