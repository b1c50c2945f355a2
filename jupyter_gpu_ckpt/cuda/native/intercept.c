/* The functions that programs call.  This library precedes the CUDA runtime and the driver in the order of lookup
 * (LD_PRELOAD): calls that it does not serve, and every error, are left to them. */
#define _GNU_SOURCE
#include "allocations.h"
#include "child.h"
#include "control.h"

#define EXPORT __attribute__((visibility("default")))

/* Smaller allocations, rounded up to the driver's granularity, would waste more than they gain: the driver swaps
 * them. */
#define SMALLEST ((size_t)2 << 20)

enum { cudaErrorInitializationError = 3 };

static CUdeviceptr serve(size_t bytes) { return bytes >= SMALLEST && control_open() ? allocation_create(bytes) : 0; }

/* As cudaFree does: work that uses the allocation may be running. */
static CUresult wait_for_work(CUcontext context)
{
    const struct driver *cu = driver();
    CUcontext popped;
    CUresult result = cu->cuCtxPushCurrent_v2(context);
    if (result != CUDA_SUCCESS)
        return result;
    result = cu->cuCtxSynchronize();
    cu->cuCtxPopCurrent_v2(&popped);
    return result;
}

EXPORT int cudaMalloc(void **address, size_t bytes);
EXPORT int cudaMalloc(void **address, size_t bytes)
{
    const struct runtime *cudart = runtime();
    if (cudart == NULL)
        return cudaErrorInitializationError;
    CUdevice chosen, current;
    if (address != NULL && bytes >= SMALLEST && !is_inert() && driver() != NULL &&
        cudart->cudaGetDevice(&chosen) == 0 && driver()->cuCtxGetDevice(&current) == CUDA_SUCCESS &&
        chosen == current) {
        CUdeviceptr served = serve(bytes);
        if (served != 0) {
            *address = (void *)served;
            return 0;
        }
    }
    return cudart->cudaMalloc(address, bytes);
}

EXPORT int cudaFree(void *address);
EXPORT int cudaFree(void *address)
{
    const struct runtime *cudart = runtime();
    CUcontext context, current;
    if (address == NULL || !allocation_lookup((CUdeviceptr)address, &context))
        return cudart != NULL ? cudart->cudaFree(address) : cudaErrorInitializationError;
    /* By the runtime where that has the same effect: it then also remembers an error, as its own cudaFree does. */
    int result = cudart != NULL && driver()->cuCtxGetCurrent(&current) == CUDA_SUCCESS && current == context
                     ? cudart->cudaDeviceSynchronize()
                     : wait_for_work(context);
    return result == 0 ? allocation_destroy((CUdeviceptr)address) : result;
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes);
EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes)
{
    const struct driver *original = any_driver();
    if (original == NULL || original->cuMemAlloc_v2 == NULL)
        return CUDA_ERROR_NOT_INITIALIZED;
    CUdeviceptr served = address != NULL ? serve(bytes) : 0;
    if (served == 0)
        return original->cuMemAlloc_v2(address, bytes);
    *address = served;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr address);
EXPORT CUresult cuMemFree_v2(CUdeviceptr address)
{
    const struct driver *original = any_driver();
    CUcontext context;
    if (original == NULL || original->cuMemFree_v2 == NULL)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (address == 0 || !allocation_lookup(address, &context))
        return original->cuMemFree_v2(address);
    CUresult result = wait_for_work(context);
    return result == CUDA_SUCCESS ? allocation_destroy(address) : result;
}
