/* libcudart.so.13 on top of the double of the driver, which it loads as the real one loads the driver. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "double.h"

enum { cudaErrorInvalidValue = 1, cudaErrorInitializationError = 3, cudaErrorInsufficientDriver = 35, cudaMemcpyDefault = 4 };

static struct {
    void *library;
    CUresult (*cuCtxGetCurrent)(CUcontext *);
    CUresult (*cuCtxGetDevice)(CUdevice *);
    CUresult (*cuCtxSetCurrent)(CUcontext);
    CUresult (*cuCtxSynchronize)(void);
    CUresult (*cuMemAlloc_v2)(CUdeviceptr *, size_t);
    CUresult (*cuMemFree_v2)(CUdeviceptr);
    CUresult (*cuMemGetInfo_v2)(size_t *, size_t *);
    CUresult (*double_primary_context)(CUcontext *);
} cu;
static long mallocs;

static pid_t loader; /* a child that it forks cannot use CUDA */

static void load(void)
{
    loader = getpid();
    cu.library = dlopen("libcuda.so.1", RTLD_NOW);
    if (cu.library == NULL)
        return;
    /* Each by its base name, as the real one. */
    CUresult (*look_up)(const char *, void **, int, unsigned long long, int *);
    *(void **)&look_up = dlsym(cu.library, "cuGetProcAddress_v2");
#define LOOK_UP(name, base) look_up(base, (void **)&cu.name, 12000, 0, NULL)
    LOOK_UP(cuCtxGetCurrent, "cuCtxGetCurrent");
    LOOK_UP(cuCtxGetDevice, "cuCtxGetDevice");
    LOOK_UP(cuCtxSetCurrent, "cuCtxSetCurrent");
    LOOK_UP(cuCtxSynchronize, "cuCtxSynchronize");
    LOOK_UP(cuMemAlloc_v2, "cuMemAlloc");
    LOOK_UP(cuMemFree_v2, "cuMemFree");
    LOOK_UP(cuMemGetInfo_v2, "cuMemGetInfo");
    *(void **)&cu.double_primary_context = dlsym(cu.library, "double_primary_context");
#undef LOOK_UP
}

/* As the real one: the first call makes the device's primary context current. */
static int begin(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, load);
    if (cu.library == NULL)
        return cudaErrorInsufficientDriver;
    if (getpid() != loader)
        return cudaErrorInitializationError;
    CUcontext context;
    cu.cuCtxGetCurrent(&context);
    if (context != NULL)
        return 0;
    cu.double_primary_context(&context);
    return cu.cuCtxSetCurrent(context);
}

EXPORT int cudaMalloc(void **address, size_t bytes)
{
    __atomic_add_fetch(&mallocs, 1, __ATOMIC_RELAXED);
    int result = begin();
    if (result != 0)
        return result;
    if (address == NULL)
        return cudaErrorInvalidValue;
    CUdeviceptr made = 0;
    result = bytes != 0 ? cu.cuMemAlloc_v2(&made, bytes) : 0;
    *address = (void *)made;
    return result;
}

EXPORT int cudaFree(void *address)
{
    int result = begin();
    return result == 0 ? cu.cuMemFree_v2((CUdeviceptr)address) : result;
}

EXPORT int cudaGetDevice(int *device)
{
    *device = 0;
    if (begin() == cudaErrorInsufficientDriver)
        return cudaErrorInsufficientDriver;
    cu.cuCtxGetDevice(device); /* of no context: the first */
    return 0;
}

EXPORT int cudaDeviceSynchronize(void)
{
    int result = begin();
    return result == 0 ? cu.cuCtxSynchronize() : result;
}

EXPORT int cudaMemcpy(void *to, const void *from, size_t bytes, int kind)
{
    (void)kind;
    int result = cudaDeviceSynchronize();
    if (result == 0)
        memcpy(to, from, bytes);
    return result;
}

EXPORT int cudaMemGetInfo(size_t *free_bytes, size_t *bytes)
{
    int result = begin();
    return result == 0 ? cu.cuMemGetInfo_v2(free_bytes, bytes) : result;
}

EXPORT long double_mallocs(void) { return __atomic_load_n(&mallocs, __ATOMIC_RELAXED); }
