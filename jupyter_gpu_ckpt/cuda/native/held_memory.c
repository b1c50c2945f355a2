#include "held_memory.h"

#include <stdint.h>
#include <unistd.h>

#include "copies.h"

static struct held {
    size_t number;
    struct copied memory;
    int descriptor; /* -1: it was not taken */
    bool is_back;
} all[MOST_HELD];
static size_t count;

static size_t memories_of(size_t least)
{
    size_t found = 0;
    struct copied each;
    for (size_t at = 0; copies_next(&at, &each);)
        found += each.bytes >= least;
    return found;
}

/* A power of two: so many bytes have at least ``most`` memories, or all. */
static size_t least_bytes(size_t most)
{
    size_t least = 1;
    while (memories_of(2 * least) >= most)
        least *= 2;
    return least;
}

size_t held_memory_export(int *descriptors, size_t most, size_t *bytes,
                          bool (*handle)(size_t number, CUmemGenericAllocationHandle *found))
{
    struct copied each;
    CUmemGenericAllocationHandle found;
    *bytes = 0;
    held_memory_end();
    if (any_driver()->cuMemExportToShareableHandle == NULL || driver()->cuMemImportFromShareableHandle == NULL ||
        driver()->cuMemcpyDtoDAsync_v2 == NULL || most == 0)
        return 0;
    size_t least = least_bytes(most);
    for (size_t at = 0; count < most && count < MOST_HELD && copies_next(&at, &each);) {
        if (each.bytes < least || driver()->cuCtxSetCurrent(each.context) != CUDA_SUCCESS || !handle(at - 1, &found))
            continue;
        if (any_driver()->cuMemExportToShareableHandle(&descriptors[count], found,
                                                       CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) != CUDA_SUCCESS)
            break; /* the process may have no descriptor left */
        all[count++] = (struct held){.number = at - 1, .memory = each, .descriptor = -1};
        *bytes += each.bytes;
    }
    return count;
}

void held_memory_take(const int *descriptors, size_t taken)
{
    for (size_t at = 0; at < taken; at++)
        if (at < count && all[at].descriptor < 0)
            all[at].descriptor = descriptors[at];
        else
            close(descriptors[at]);
}

/* Map the memory behind a handle at an address of its own, and copy it from there. */
static CUresult copy_from(CUmemGenericAllocationHandle handle, const struct copied *memory, CUstream stream)
{
    const struct driver *cu = driver();
    CUdeviceptr address;
    CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE},
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUresult result = cu->cuCtxGetDevice(&access.location.id);
    if (result == CUDA_SUCCESS)
        result = cu->cuMemAddressReserve(&address, memory->bytes, 0, 0, 0);
    if (result != CUDA_SUCCESS)
        return result;
    CUresult mapped = result = cu->cuMemMap(address, memory->bytes, 0, handle, 0);
    if (result == CUDA_SUCCESS)
        result = cu->cuMemSetAccess(address, memory->bytes, &access, 1);
    if (result == CUDA_SUCCESS)
        result = cu->cuMemcpyDtoDAsync_v2(memory->address, address, memory->bytes, stream);
    if (result == CUDA_SUCCESS && (result = cu->cuStreamSynchronize(stream)) != CUDA_SUCCESS &&
        (copies_wait() != CUDA_SUCCESS || cu->cuCtxSetCurrent(memory->context) != CUDA_SUCCESS))
        return result; /* it may still be read */
    if (mapped != CUDA_SUCCESS || cu->cuMemUnmap(address, memory->bytes) == CUDA_SUCCESS)
        cu->cuMemAddressFree(address, memory->bytes);
    return result;
}

static bool copy_back(struct held *held, CUresult (*map)(size_t number))
{
    const struct driver *cu = driver();
    CUmemGenericAllocationHandle handle;
    CUstream stream = NULL;
    CUresult result = cu->cuCtxSetCurrent(held->memory.context);
    if (result == CUDA_SUCCESS)
        result = cu->cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)held->descriptor,
                                                    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    close(held->descriptor);
    held->descriptor = -1;
    if (result != CUDA_SUCCESS)
        return false;
    result = map(held->number);
    if (result == CUDA_SUCCESS)
        result = cu->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
    if (result == CUDA_SUCCESS)
        result = copy_from(handle, &held->memory, stream);
    if (stream != NULL)
        cu->cuStreamDestroy_v2(stream);
    cu->cuMemRelease(handle);
    return result == CUDA_SUCCESS;
}

void held_memory_copy(CUresult (*map)(size_t number))
{
    for (size_t at = 0; at < count; at++)
        if (all[at].descriptor >= 0)
            all[at].is_back = copy_back(&all[at], map);
}

bool held_memory_is_back(size_t number)
{
    for (size_t at = 0; at < count; at++)
        if (all[at].number == number)
            return all[at].is_back;
    return false;
}

bool held_memory_is_all_back(void)
{
    struct copied each;
    for (size_t at = 0; copies_next(&at, &each);)
        if (!held_memory_is_back(at - 1))
            return false;
    return true;
}

void held_memory_end(void)
{
    for (size_t at = 0; at < count; at++)
        if (all[at].descriptor >= 0)
            close(all[at].descriptor);
    count = 0;
}
