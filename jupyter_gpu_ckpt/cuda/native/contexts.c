/* The functions that create and destroy a context.  Where a shared GPU has no memory for one, its creation waits as an
 * allocation does.  The driver frees the memory of cuMemAlloc with its context; so is served memory, which belongs to
 * none, freed here. */
#define _GNU_SOURCE
#include "addresses.h"
#include "allocations.h"
#include "child.h"
#include "device_kernels.h"
#include "driver.h"
#include "launch_gate.h"
#include "managed.h"
#include "mappings.h"
#include "memory_wait.h"
#include "mirror.h"
#include "pools.h"

/* Whether there is anything that a context's end concerns. */
static bool has_state(void)
{
    size_t count, bytes;
    allocations_total(&count, &bytes);
    return (count != 0 || addresses_are_kept() || mappings_have_context() || device_kernels_are_loaded()) && !is_inert();
}

/* Memory that the program maps itself, and memory of pools, outlive a context. */
static void end(CUcontext context, bool destroyed)
{
    allocations_of_destroyed(context, destroyed);
    if (!destroyed)
        return;
    device_kernels_forget(context);
    mappings_forget_context(context);
    pools_forget_context(context);
}

static CUresult destroy(CUcontext context, CUresult (*original)(CUcontext))
{
    managed_forget();
    if (context == NULL || !has_state())
        return original(context);
    launch_gate_wait();
    mirror_forbid(true);
    allocations_doom(context);
    CUresult result = original(context);
    end(context, result == CUDA_SUCCESS);
    mirror_forbid(false);
    return result;
}

static bool is_active(const struct driver *cu, CUdevice device)
{
    unsigned int flags;
    int active = 0;
    return cu->cuDevicePrimaryCtxGetState != NULL &&
           cu->cuDevicePrimaryCtxGetState(device, &flags, &active) == CUDA_SUCCESS && active != 0;
}

/* A device's primary context is destroyed by its last release, or by a reset. */
static CUresult destroy_primary(CUdevice device, bool resets, CUresult (*original)(CUdevice),
                                CUresult (*release)(CUdevice))
{
    const struct driver *cu = any_driver();
    CUcontext context;
    managed_forget();
    if (has_state())
        launch_gate_wait();
    if (!has_state() || !is_active(cu, device) || cu->cuDevicePrimaryCtxRetain == NULL || release == NULL ||
        cu->cuDevicePrimaryCtxRetain(&context, device) != CUDA_SUCCESS)
        return original(device);
    release(device); /* only its handle was wanted */
    mirror_forbid(true);
    allocations_doom(context);
    CUresult result = original(device);
    end(context, result == CUDA_SUCCESS && (resets || !is_active(cu, device)));
    mirror_forbid(false);
    return result;
}

#define DESTROY(name)                                                                                                  \
    CUresult name(CUcontext context)                                                                                   \
    {                                                                                                                  \
        const struct driver *original = any_driver();                                                                  \
        if (original == NULL || original->name == NULL)                                                                \
            return CUDA_ERROR_NOT_INITIALIZED;                                                                         \
        return destroy(context, original->name);                                                                       \
    }
DESTROY(cuCtxDestroy)
DESTROY(cuCtxDestroy_v2)

#define DESTROY_PRIMARY(name, resets, release)                                                                         \
    CUresult name(CUdevice device)                                                                                     \
    {                                                                                                                  \
        const struct driver *original = any_driver();                                                                  \
        if (original == NULL || original->name == NULL)                                                                \
            return CUDA_ERROR_NOT_INITIALIZED;                                                                         \
        return destroy_primary(device, resets, original->name, original->release);                                     \
    }
DESTROY_PRIMARY(cuDevicePrimaryCtxRelease, false, cuDevicePrimaryCtxRelease)
DESTROY_PRIMARY(cuDevicePrimaryCtxRelease_v2, false, cuDevicePrimaryCtxRelease_v2)
DESTROY_PRIMARY(cuDevicePrimaryCtxReset, true, cuDevicePrimaryCtxRelease)
DESTROY_PRIMARY(cuDevicePrimaryCtxReset_v2, true, cuDevicePrimaryCtxRelease_v2)

#define CREATE(name, parameters, ...)                                                                                  \
    CUresult name parameters                                                                                           \
    {                                                                                                                  \
        DRIVER_WITH(name);                                                                                             \
        CUresult result;                                                                                               \
        size_t wanted = 0;                                                                                             \
        do                                                                                                             \
            result = original->name(__VA_ARGS__);                                                                      \
        while (result == CUDA_ERROR_OUT_OF_MEMORY && memory_wait_for_context(device, &wanted));                        \
        return result;                                                                                                 \
    }
CREATE(cuCtxCreate, (CUcontext *context, unsigned int flags, CUdevice device), context, flags, device)
CREATE(cuCtxCreate_v2, (CUcontext *context, unsigned int flags, CUdevice device), context, flags, device)
CREATE(cuCtxCreate_v3, (CUcontext *context, void *affinities, int count, unsigned int flags, CUdevice device), context,
       affinities, count, flags, device)
CREATE(cuCtxCreate_v4, (CUcontext *context, void *wanted_of_it, unsigned int flags, CUdevice device), context,
       wanted_of_it, flags, device)
CREATE(cuDevicePrimaryCtxRetain, (CUcontext *context, CUdevice device), context, device)
