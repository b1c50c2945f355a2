/* The functions of CUDA's virtual memory management, as programs call them: memory that they create, map at addresses
 * that they have reserved, and release (PyTorch's expandable segments, JAX).
 *
 * Handles of such memory are ours (`mappings.h`) and are translated here; the driver does everything else, and every
 * other handle is its own: imported memory, the host's, multicast objects.  Addresses are the driver's, and so is all
 * that it says of them. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "allocations.h"
#include "child.h"
#include "launch_gate.h"
#include "mappings.h"
#include "memory_wait.h"
#include "serving.h"

/* Whether memory can be created again as it is created now. */
static bool is_reproducible(size_t bytes, const CUmemAllocationProp *wanted)
{
    return wanted != NULL && may_serve(bytes) && driver() != NULL && wanted->type == CU_MEM_ALLOCATION_TYPE_PINNED &&
           wanted->location.type == CU_MEM_LOCATION_TYPE_DEVICE && wanted->location.id >= 0 &&
           wanted->location.id < MAX_DEVICES && wanted->win32HandleMetaData == NULL &&
           (wanted->allocFlags.usage & CU_MEM_CREATE_USAGE_TILE_POOL) == 0;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *wanted,
                     unsigned long long flags)
{
    DRIVER_WITH(cuMemCreate);
    CUresult result = launch_gate_pass();
    bool waited = wanted == NULL || wanted->location.type != CU_MEM_LOCATION_TYPE_DEVICE; /* the host's memory */
    if (result != CUDA_SUCCESS)
        return result;
    do
        result = original->cuMemCreate(handle, bytes, wanted, flags);
    while (result == CUDA_ERROR_OUT_OF_MEMORY &&
           (collect_freed(true) || (!waited && (waited = memory_wait(bytes)))));
    if (result == CUDA_SUCCESS && is_reproducible(bytes, wanted)) {
        mappings_note_context();
        CUmemGenericAllocationHandle ours = mappings_add(*handle, bytes, wanted, flags);
        *handle = ours != 0 ? ours : *handle;
    }
    return result;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    DRIVER_WITH(cuMemRelease);
    struct mapping_call call = {.handle = handle};
    bool ends;
    if (!mappings_issued(handle))
        return original->cuMemRelease(handle);
    if (!mappings_begin_release(&call, &ends))
        return CUDA_ERROR_INVALID_VALUE;
    if (!ends)
        return CUDA_SUCCESS;
    CUresult result = original->cuMemRelease(call.original);
    mappings_released(&call, result == CUDA_SUCCESS);
    return result;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address)
{
    DRIVER_WITH(cuMemRetainAllocationHandle);
    struct mapping_call call = {.address = (CUdeviceptr)address};
    struct allocation allocation;
    bool released;
    if (allocation_containing((CUdeviceptr)address, &allocation))
        return CUDA_ERROR_INVALID_VALUE; /* memory of cuMemAlloc has no handle */
    if (handle == NULL || is_inert() || mappings_begin_retain(&call, &released) == 0)
        return original->cuMemRetainAllocationHandle(handle, address);
    CUresult result = CUDA_SUCCESS;
    if (released) {
        result = original->cuMemRetainAllocationHandle(&call.original, address);
        mappings_retained(&call, result);
    }
    if (result == CUDA_SUCCESS)
        *handle = call.handle;
    return result;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties, CUmemGenericAllocationHandle handle)
{
    DRIVER_WITH(cuMemGetAllocationPropertiesFromHandle);
    struct mapping_call call = {.handle = handle};
    if (!mappings_issued(handle))
        return original->cuMemGetAllocationPropertiesFromHandle(properties, handle);
    if (!mappings_begin(&call))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = original->cuMemGetAllocationPropertiesFromHandle(properties, call.original);
    mappings_end(&call);
    return result;
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags)
{
    DRIVER_WITH(cuMemMap);
    struct mapping_call call = {.handle = handle, .address = address, .bytes = bytes};
    if (!mappings_issued(handle))
        return original->cuMemMap(address, bytes, offset, handle, flags);
    mappings_note_context();
    if (!mappings_begin(&call))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = original->cuMemMap(address, bytes, offset, call.original, flags);
    if (result == CUDA_SUCCESS)
        mappings_mapped(&call, offset);
    else
        mappings_end(&call);
    return result;
}

/* Whether a range is to be changed that the driver would not let the program change: memory of cuMemAlloc. */
static bool is_served(CUdeviceptr address)
{
    CUcontext context;
    return allocation_lookup(address, &context);
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes)
{
    DRIVER_WITH(cuMemUnmap);
    struct mapping_call call = {.address = address, .bytes = bytes};
    if (is_served(address))
        return CUDA_ERROR_INVALID_VALUE;
    if (is_inert())
        return original->cuMemUnmap(address, bytes);
    mappings_begin(&call);
    CUresult result = original->cuMemUnmap(address, bytes);
    if (result == CUDA_SUCCESS)
        mappings_unmapped(&call);
    else
        mappings_end(&call);
    return result;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
    DRIVER_WITH(cuMemSetAccess);
    struct mapping_call call = {.address = address, .bytes = bytes};
    if (is_served(address))
        return CUDA_ERROR_INVALID_VALUE;
    if (is_inert())
        return original->cuMemSetAccess(address, bytes, access, count);
    if (driver() != NULL)
        mappings_note_context();
    mappings_begin(&call);
    CUresult result = original->cuMemSetAccess(address, bytes, access, count);
    if (result == CUDA_SUCCESS)
        mappings_access_set(&call, access, count);
    else
        mappings_end(&call);
    return result;
}

/* -- memory that others may have from now on: it is not swapped any more */

/* Begin a call that gives memory away; false: the driver is to refuse a handle that the program does not have. */
static bool begin_keeping(struct mapping_call *call)
{
    if (!mappings_begin(call))
        return false;
    mappings_keep(call, true);
    return true;
}

static CUresult end_keeping(struct mapping_call *call, CUresult result)
{
    if (result != CUDA_SUCCESS)
        mappings_keep(call, false);
    mappings_end(call);
    return result;
}

CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle, int type,
                                      unsigned long long flags)
{
    DRIVER_WITH(cuMemExportToShareableHandle);
    struct mapping_call call = {.handle = handle};
    if (!mappings_issued(handle))
        return original->cuMemExportToShareableHandle(shareable, handle, type, flags);
    if (!begin_keeping(&call))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = original->cuMemExportToShareableHandle(shareable, call.original, type, flags);
    if (result == CUDA_SUCCESS)
        mappings_note_exported(&call);
    return end_keeping(&call, result);
}

/* Also memory of cuMemAlloc that the library serves can be given away by its address. */
static void share_served(CUdeviceptr address)
{
    struct allocation allocation;
    if (allocation_containing(address, &allocation))
        allocation_share(allocation.address);
}

CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr address, size_t bytes, int type,
                                       unsigned long long flags)
{
    DRIVER_WITH(cuMemGetHandleForAddressRange);
    struct mapping_call call = {.address = address, .bytes = bytes};
    share_served(address);
    if (is_inert())
        return original->cuMemGetHandleForAddressRange(handle, address, bytes, type, flags);
    begin_keeping(&call);
    return end_keeping(&call, original->cuMemGetHandleForAddressRange(handle, address, bytes, type, flags));
}

#define BIND_ADDRESS(name, parameters, ...)                                                                            \
    CUresult name parameters                                                                                           \
    {                                                                                                                  \
        DRIVER_WITH(name);                                                                                             \
        struct mapping_call call = {.address = address, .bytes = bytes};                                               \
        share_served(address);                                                                                         \
        if (is_inert())                                                                                                \
            return original->name(__VA_ARGS__);                                                                        \
        begin_keeping(&call);                                                                                          \
        return end_keeping(&call, original->name(__VA_ARGS__));                                                        \
    }
BIND_ADDRESS(cuMulticastBindAddr,
             (CUmemGenericAllocationHandle multicast, size_t offset, CUdeviceptr address, size_t bytes,
              unsigned long long flags),
             multicast, offset, address, bytes, flags)
BIND_ADDRESS(cuMulticastBindAddr_v2,
             (CUmemGenericAllocationHandle multicast, CUdevice device, size_t offset, CUdeviceptr address, size_t bytes,
              unsigned long long flags),
             multicast, device, offset, address, bytes, flags)

#define BIND_MEMORY(name, parameters, before, after)                                                                   \
    CUresult name parameters                                                                                           \
    {                                                                                                                  \
        DRIVER_WITH(name);                                                                                             \
        struct mapping_call call = {.handle = handle};                                                                 \
        if (!mappings_issued(handle))                                                                                  \
            return original->name(UNPACK before, handle, UNPACK after);                                                \
        if (!begin_keeping(&call))                                                                                     \
            return CUDA_ERROR_INVALID_VALUE;                                                                           \
        return end_keeping(&call, original->name(UNPACK before, call.original, UNPACK after));                         \
    }
#define UNPACK(...) __VA_ARGS__
BIND_MEMORY(cuMulticastBindMem,
            (CUmemGenericAllocationHandle multicast, size_t offset, CUmemGenericAllocationHandle handle,
             size_t of_memory, size_t bytes, unsigned long long flags),
            (multicast, offset), (of_memory, bytes, flags))
BIND_MEMORY(cuMulticastBindMem_v2,
            (CUmemGenericAllocationHandle multicast, CUdevice device, size_t offset,
             CUmemGenericAllocationHandle handle, size_t of_memory, size_t bytes, unsigned long long flags),
            (multicast, device, offset), (of_memory, bytes, flags))

/* Of sparse arrays, whose memory the driver alone can map. */
static CUresult map_arrays(CUarrayMapInfo *list, unsigned int count, CUstream stream,
                           CUresult (*original)(CUarrayMapInfo *, unsigned int, CUstream))
{
    CUresult result = launch_gate_pass();
    bool issued = false;
    for (unsigned int at = 0; at < count && list != NULL; at++)
        issued = issued || mappings_issued(list[at].memHandle);
    if (result != CUDA_SUCCESS || !issued)
        return result != CUDA_SUCCESS ? result : original(list, count, stream);
    CUarrayMapInfo *translated = malloc(count * sizeof *list);
    if (translated == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memcpy(translated, list, count * sizeof *list);
    for (unsigned int at = 0; at < count && result == CUDA_SUCCESS; at++) {
        struct mapping_call call = {.handle = list[at].memHandle};
        if (!mappings_issued(call.handle))
            continue;
        if (begin_keeping(&call)) {
            translated[at].memHandle = call.original;
            mappings_end(&call);
        } else
            result = CUDA_ERROR_INVALID_VALUE;
    }
    if (result == CUDA_SUCCESS)
        result = original(translated, count, stream);
    free(translated);
    return result;
}

CUresult cuMemMapArrayAsync(CUarrayMapInfo *list, unsigned int count, CUstream stream)
{
    DRIVER_WITH(cuMemMapArrayAsync);
    return map_arrays(list, count, stream, original->cuMemMapArrayAsync);
}

CUresult cuMemMapArrayAsync_ptsz(CUarrayMapInfo *list, unsigned int count, CUstream stream)
{
    DRIVER_WITH(cuMemMapArrayAsync_ptsz);
    return map_arrays(list, count, stream, original->cuMemMapArrayAsync_ptsz);
}
