/* The CUDA runtime's functions, where its lookup of the driver's functions cannot be served (`lookup.h`). */
#define _GNU_SOURCE
#include "lookup.h"

#if !HAS_DLSYM

#include <dlfcn.h>
#include <link.h>
#include <stdatomic.h>
#include <string.h>

#include "allocations.h"
#include "serving.h"

enum { cudaErrorInitializationError = 3 };

/* The CUDA runtime that this process has loaded (libcudart), by its own functions. */
struct runtime {
    int (*cudaMalloc)(void **, size_t);
    int (*cudaFree)(void *);
    int (*cudaGetDevice)(int *);
};

/* RTLD_NEXT does not find it: PyTorch loads its runtime into a scope of its own. */
static int find_runtime(struct dl_phdr_info *info, size_t size, void *name)
{
    (void)size;
    const char *slash = info->dlpi_name != NULL ? strrchr(info->dlpi_name, '/') : NULL;
    if (slash == NULL || strncmp(slash + 1, "libcudart.so", strlen("libcudart.so")) != 0)
        return 0;
    *(const char **)name = info->dlpi_name;
    return 1;
}

static const struct runtime *runtime(void)
{
    static struct runtime found;
    static atomic_bool complete;
    if (atomic_load_explicit(&complete, memory_order_acquire))
        return &found;
    const char *name = NULL;
    dl_iterate_phdr(find_runtime, &name);
    void *library = name != NULL ? dlopen(name, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    if (library == NULL)
        return NULL;
    /* Each thread that comes here stores the same. */
    *(void **)&found.cudaMalloc = dlsym(library, "cudaMalloc");
    *(void **)&found.cudaFree = dlsym(library, "cudaFree");
    *(void **)&found.cudaGetDevice = dlsym(library, "cudaGetDevice");
    if (found.cudaMalloc == NULL || found.cudaFree == NULL || found.cudaGetDevice == NULL)
        return NULL;
    atomic_store_explicit(&complete, true, memory_order_release);
    return &found;
}

EXPORT int cudaMalloc(void **address, size_t bytes);
EXPORT int cudaMalloc(void **address, size_t bytes)
{
    const struct runtime *cudart = runtime();
    CUdevice chosen, current;
    if (cudart == NULL)
        return cudaErrorInitializationError;
    if (address != NULL && may_serve(bytes) && driver() != NULL && cudart->cudaGetDevice(&chosen) == 0 &&
        driver()->cuCtxGetDevice(&current) == CUDA_SUCCESS && chosen == current) {
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
    CUcontext context;
    if (address != NULL && allocation_lookup((CUdeviceptr)address, &context))
        return free_served((CUdeviceptr)address, context);
    return cudart != NULL ? cudart->cudaFree(address) : cudaErrorInitializationError;
}

#else

typedef int translation_unit_is_not_empty;

#endif
