/* Stream-ordered allocation, as programs call it (PyTorch's cudaMallocAsync backend, CuPy's MemoryAsyncPool, RMM).
 *
 * Pools are the driver's, and so are their handles.  Large allocations from a pool that no other process can have are
 * served, with blocks that follow the order of streams (`pools.h`); all else is the driver's: small ones, those in the
 * middle of a stream's capture, those of a stream of another context than the current one, and exported or imported
 * pools. */
#define _GNU_SOURCE
#include <stdint.h>

#include "allocations.h"
#include "capture.h"
#include "child.h"
#include "launch_gate.h"
#include "managed.h"
#include "memory_wait.h"
#include "pools.h"
#include "serving.h"

enum { LEGACY_STREAM = 1, PER_THREAD_STREAM };

/* Find out about a stream in the current context; false if it is another's. */
static bool locate(CUstream stream, bool per_thread, struct pool_stream *found)
{
    const struct driver *cu = driver();
    CUcontext owner;
    if (cu->cuCtxGetCurrent(&found->context) != CUDA_SUCCESS || found->context == NULL)
        return false;
    if (stream == NULL)
        stream = (CUstream)(uintptr_t)(per_thread ? PER_THREAD_STREAM : LEGACY_STREAM);
    found->stream = stream;
    found->ordered = stream != (CUstream)PER_THREAD_STREAM; /* which is another one in each thread */
    if ((uintptr_t)stream <= PER_THREAD_STREAM)
        return true;
    return cu->cuStreamGetCtx != NULL && cu->cuStreamGetCtx(stream, &owner) == CUDA_SUCCESS && owner == found->context;
}

/* The number of a pool of the device, 0 if it is not served; the device's default pool gets it here. */
static unsigned number_of(CUmemoryPool pool, CUdevice device)
{
    const struct driver *cu = driver();
    CUmemoryPool standard;
    unsigned long long threshold;
    unsigned number = pools_find(pool);
    if (number != 0)
        return pools_on(number, device) ? number : 0;
    if (cu->cuDeviceGetDefaultMemPool == NULL || cu->cuMemPoolGetAttribute == NULL ||
        cu->cuDeviceGetDefaultMemPool(&standard, device) != CUDA_SUCCESS || standard != pool ||
        cu->cuMemPoolGetAttribute(pool, POOL_RELEASE_THRESHOLD, &threshold) != CUDA_SUCCESS)
        return 0;
    return pools_add(pool, device, threshold);
}

/* ``pool``: NULL for the current one of the device. */
static CUdeviceptr serve_in_order(size_t bytes, CUmemoryPool pool, CUstream stream, bool per_thread)
{
    struct pool_stream where;
    CUdevice device;
    if (!may_serve(bytes) || driver() == NULL || driver()->cuEventQuery == NULL || capture_is_active() ||
        !locate(stream, per_thread, &where) || driver()->cuCtxGetDevice(&device) != CUDA_SUCCESS)
        return 0;
    if (pool == NULL && (driver()->cuDeviceGetMemPool == NULL ||
                         driver()->cuDeviceGetMemPool(&pool, device) != CUDA_SUCCESS))
        return 0;
    unsigned number = number_of(pool, device);
    collect_freed(false);
    return number != 0 ? pools_allocate(number, bytes, &where) : 0;
}

#define ALLOCATE(name, per_thread)                                                                                     \
    CUresult name(CUdeviceptr *address, size_t bytes, CUstream stream)                                                 \
    {                                                                                                                  \
        DRIVER_WITH(name);                                                                                             \
        CUresult result = launch_gate_pass();                                                                          \
        if (result != CUDA_SUCCESS)                                                                                    \
            return result;                                                                                             \
        bool waited = false;                                                                                           \
        do {                                                                                                           \
            CUdeviceptr served = address != NULL ? serve_in_order(bytes, NULL, stream, per_thread) : 0;                \
            if (served != 0) {                                                                                         \
                *address = served;                                                                                     \
                return CUDA_SUCCESS;                                                                                   \
            }                                                                                                          \
            do                                                                                                         \
                result = original->name(address, bytes, stream);                                                       \
            while (result == CUDA_ERROR_OUT_OF_MEMORY && collect_freed(true));                                         \
        } while (result == CUDA_ERROR_OUT_OF_MEMORY && !waited && (waited = memory_wait(bytes)));                      \
        return result;                                                                                                 \
    }
ALLOCATE(cuMemAllocAsync, false)
ALLOCATE(cuMemAllocAsync_ptsz, true)

#define ALLOCATE_FROM_POOL(name, per_thread)                                                                           \
    CUresult name(CUdeviceptr *address, size_t bytes, CUmemoryPool pool, CUstream stream)                              \
    {                                                                                                                  \
        DRIVER_WITH(name);                                                                                             \
        CUresult result = launch_gate_pass();                                                                          \
        if (result != CUDA_SUCCESS)                                                                                    \
            return result;                                                                                             \
        bool waited = false;                                                                                           \
        do {                                                                                                           \
            CUdeviceptr served = 0;                                                                                    \
            if (address != NULL && pool != NULL)                                                                       \
                served = serve_in_order(bytes, pool, stream, per_thread);                                              \
            if (served != 0) {                                                                                         \
                *address = served;                                                                                     \
                return CUDA_SUCCESS;                                                                                   \
            }                                                                                                          \
            do                                                                                                         \
                result = original->name(address, bytes, pool, stream);                                                 \
            while (result == CUDA_ERROR_OUT_OF_MEMORY && collect_freed(true));                                         \
        } while (result == CUDA_ERROR_OUT_OF_MEMORY && !waited && (waited = memory_wait(bytes)));                      \
        return result;                                                                                                 \
    }
ALLOCATE_FROM_POOL(cuMemAllocFromPoolAsync, false)
ALLOCATE_FROM_POOL(cuMemAllocFromPoolAsync_ptsz, true)

/* -- freeing, of any memory */

/* Free memory of cuMemAlloc once the work before this on the stream is done; nobody waits for that here.  Other streams
 * that use it are the program's concern, as with the driver. */
static CUresult free_behind(CUdeviceptr address, const struct pool_stream *where)
{
    const struct driver *cu = driver();
    CUevent event;
    CUresult result = cu->cuEventCreate(&event, CU_EVENT_DISABLE_TIMING);
    if (result != CUDA_SUCCESS)
        return result;
    result = cu->cuEventRecord(event, where->stream);
    if (result == CUDA_SUCCESS)
        result = allocation_postpone(address, event, where->context);
    if (result != CUDA_SUCCESS)
        cu->cuEventDestroy_v2(event);
    return result;
}

static CUresult free_at(CUdeviceptr address, const struct pool_stream *where)
{
    CUresult result = pools_free(address, where);
    return result == CUDA_ERROR_NOT_FOUND ? free_behind(address, where) : result;
}

/* In the stream's own context, where an event can be recorded on it. */
static CUresult free_in_its_context(CUdeviceptr address, struct pool_stream *where)
{
    const struct driver *cu = driver();
    CUcontext owner, popped;
    if (cu->cuStreamGetCtx == NULL || cu->cuStreamGetCtx(where->stream, &owner) != CUDA_SUCCESS || owner == NULL)
        return free_at(address, where);
    CUresult result = cu->cuCtxPushCurrent_v2(owner);
    if (result != CUDA_SUCCESS)
        return result;
    where->context = owner;
    result = free_at(address, where);
    cu->cuCtxPopCurrent_v2(&popped);
    return result;
}

static CUresult free_async(CUdeviceptr address, CUstream stream, bool per_thread,
                           CUresult (*original)(CUdeviceptr, CUstream))
{
    struct pool_stream where = {.stream = stream};
    CUcontext context;
    managed_remove(address);
    if (address == 0 || !allocation_lookup(address, &context))
        return original(address, stream);
    launch_gate_wait();
    if (capture_includes(per_thread && stream == NULL ? (CUstream)PER_THREAD_STREAM : stream))
        return original(address, stream);
    collect_freed(false);
    return locate(stream, per_thread, &where) ? free_at(address, &where) : free_in_its_context(address, &where);
}

CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream)
{
    DRIVER_WITH(cuMemFreeAsync);
    return free_async(address, stream, false, original->cuMemFreeAsync);
}

CUresult cuMemFreeAsync_ptsz(CUdeviceptr address, CUstream stream)
{
    DRIVER_WITH(cuMemFreeAsync_ptsz);
    return free_async(address, stream, true, original->cuMemFreeAsync_ptsz);
}

/* -- pools: the driver's, and what of them is here */

CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *wanted)
{
    DRIVER_WITH(cuMemPoolCreate);
    CUresult result = original->cuMemPoolCreate(pool, wanted);
    if (result == CUDA_SUCCESS && !is_inert() && wanted->allocType == CU_MEM_ALLOCATION_TYPE_PINNED &&
        wanted->handleTypes == 0 && wanted->location.type == CU_MEM_LOCATION_TYPE_DEVICE && wanted->maxSize == 0 &&
        wanted->usage == 0)
        pools_add(*pool, wanted->location.id, 0);
    return result;
}

CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
    DRIVER_WITH(cuMemPoolDestroy);
    unsigned number = is_inert() ? 0 : pools_find(pool);
    CUresult result = original->cuMemPoolDestroy(pool);
    if (result == CUDA_SUCCESS && number != 0)
        pools_remove(pool);
    return result;
}

CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep)
{
    DRIVER_WITH(cuMemPoolTrimTo);
    CUresult result = original->cuMemPoolTrimTo(pool, keep);
    unsigned number = result == CUDA_SUCCESS && !is_inert() ? pools_find(pool) : 0;
    if (number != 0 && !capture_is_active())
        pools_trim(number, keep, false);
    return result;
}

CUresult cuMemPoolSetAttribute(CUmemoryPool pool, int attribute, void *value)
{
    DRIVER_WITH(cuMemPoolSetAttribute);
    CUresult result = original->cuMemPoolSetAttribute(pool, attribute, value);
    bool is_ours = result == CUDA_SUCCESS && attribute >= POOL_RELEASE_THRESHOLD && !is_inert();
    unsigned number = is_ours ? pools_find(pool) : 0;
    if (number != 0)
        pools_set_attribute(number, attribute, *(unsigned long long *)value);
    return result;
}

/* The amounts are the driver's and the library's together; the high marks of both may be of different moments. */
CUresult cuMemPoolGetAttribute(CUmemoryPool pool, int attribute, void *value)
{
    DRIVER_WITH(cuMemPoolGetAttribute);
    CUresult result = original->cuMemPoolGetAttribute(pool, attribute, value);
    bool is_amount = attribute >= POOL_RESERVED_CURRENT && attribute <= POOL_USED_HIGH;
    unsigned number = result == CUDA_SUCCESS && is_amount && !is_inert() ? pools_find(pool) : 0;
    if (number == 0)
        return result;
    if (!capture_is_active())
        pools_trim(number, TO_THRESHOLD, false);
    *(unsigned long long *)value += pools_attribute(number, attribute);
    return result;
}

/* The driver has given back by now what is over the thresholds of its pools.  In a process that it has suspended it
 * returns an error that the program has not earned. */
CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *bytes)
{
    DRIVER_WITH(cuMemGetInfo_v2);
    CUresult result = launch_gate_pass();
    if (result != CUDA_SUCCESS)
        return result;
    if (!is_inert() && driver() != NULL && !capture_is_active())
        pools_trim(0, TO_THRESHOLD, false);
    return original->cuMemGetInfo_v2(free_bytes, bytes);
}
