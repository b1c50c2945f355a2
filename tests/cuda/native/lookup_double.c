/* cuGetProcAddress.  The address of cuMemAlloc is another one than dlsym's: a driver may do so. */
#define _GNU_SOURCE
#include <string.h>

#include "double.h"

enum { PER_THREAD = 2 };

CUresult cuCtxSetCurrent(CUcontext);
CUresult cuInit(unsigned int);
CUresult cuDevicePrimaryCtxRetain(CUcontext *, CUdevice);
CUresult cuCtxGetCurrent(CUcontext *);
CUresult cuCtxGetDevice(CUdevice *);
CUresult cuCtxSynchronize(void);
CUresult cuStreamQuery(CUstream);

static CUresult allocate(CUdeviceptr *address, size_t bytes) { return cuMemAlloc_v2(address, bytes); }

static const struct {
    const char *name;
    int since;
    bool per_thread;
    void *function;
} functions[] = {
    {"cuInit", 2000, false, cuInit},
    {"cuCtxGetCurrent", 4000, false, cuCtxGetCurrent},
    {"cuCtxGetDevice", 2000, false, cuCtxGetDevice},
    {"cuCtxSetCurrent", 4000, false, cuCtxSetCurrent},
    {"cuCtxSynchronize", 2000, false, cuCtxSynchronize},
    {"cuCtxDestroy", 4000, false, cuCtxDestroy_v2},
    {"cuDevicePrimaryCtxRetain", 7000, false, cuDevicePrimaryCtxRetain},
    {"cuDevicePrimaryCtxRelease", 11000, false, cuDevicePrimaryCtxRelease_v2},
    {"cuDevicePrimaryCtxReset", 11000, false, cuDevicePrimaryCtxReset_v2},
    {"cuMemAlloc", 3020, false, allocate},
    {"cuMemAllocManaged", 6000, false, cuMemAllocManaged},
    {"cuMemAllocPitch", 3020, false, cuMemAllocPitch_v2},
    {"cuMemFree", 3020, false, cuMemFree_v2},
    {"cuMemGetInfo", 3020, false, cuMemGetInfo_v2},
    {"cuMemAllocAsync", 11020, false, cuMemAllocAsync},
    {"cuMemAllocAsync", 11020, true, cuMemAllocAsync_ptsz},
    {"cuMemAllocFromPoolAsync", 11020, false, cuMemAllocFromPoolAsync},
    {"cuMemAllocFromPoolAsync", 11020, true, cuMemAllocFromPoolAsync_ptsz},
    {"cuMemPoolCreate", 11020, false, cuMemPoolCreate},
    {"cuMemPoolDestroy", 11020, false, cuMemPoolDestroy},
    {"cuMemPoolGetAttribute", 11020, false, cuMemPoolGetAttribute},
    {"cuMemPoolSetAttribute", 11020, false, cuMemPoolSetAttribute},
    {"cuMemPoolTrimTo", 11020, false, cuMemPoolTrimTo},
    {"cuMemFreeAsync", 11020, false, cuMemFreeAsync},
    {"cuMemFreeAsync", 11020, true, cuMemFreeAsync_ptsz},
    {"cuMemGetAddressRange", 3020, false, cuMemGetAddressRange_v2},
    {"cuPointerGetAttribute", 4000, false, cuPointerGetAttribute},
    {"cuPointerGetAttributes", 7000, false, cuPointerGetAttributes},
    {"cuPointerSetAttribute", 6000, false, cuPointerSetAttribute},
    {"cuMemCreate", 10020, false, cuMemCreate},
    {"cuMemRelease", 10020, false, cuMemRelease},
    {"cuMemMap", 10020, false, cuMemMap},
    {"cuMemUnmap", 10020, false, cuMemUnmap},
    {"cuMemSetAccess", 10020, false, cuMemSetAccess},
    {"cuMemExportToShareableHandle", 10020, false, cuMemExportToShareableHandle},
    {"cuMemGetAllocationPropertiesFromHandle", 10020, false, cuMemGetAllocationPropertiesFromHandle},
    {"cuMemGetHandleForAddressRange", 11070, false, cuMemGetHandleForAddressRange},
    {"cuMemMapArrayAsync", 11010, false, cuMemMapArrayAsync},
    {"cuMemMapArrayAsync", 11010, true, cuMemMapArrayAsync_ptsz},
    {"cuMulticastBindAddr", 12010, false, cuMulticastBindAddr},
    {"cuMulticastBindAddr", 13010, false, cuMulticastBindAddr_v2},
    {"cuMulticastBindMem", 12010, false, cuMulticastBindMem},
    {"cuMulticastBindMem", 13010, false, cuMulticastBindMem_v2},
    {"cuMemRetainAllocationHandle", 11000, false, cuMemRetainAllocationHandle},
    {"cuStreamQuery", 2000, false, cuStreamQuery},
    {"cuStreamBeginCapture", 10010, false, cuStreamBeginCapture_v2},
    {"cuStreamBeginCapture", 10010, true, cuStreamBeginCapture_v2_ptsz},
    {"cuStreamEndCapture", 10000, false, cuStreamEndCapture},
    {"cuStreamEndCapture", 10000, true, cuStreamEndCapture_ptsz},
    {"cuGetProcAddress", 11030, false, cuGetProcAddress},
    {"cuGetProcAddress", 12000, false, cuGetProcAddress_v2},
};

/* 0: found, 1: not found, 2: the version is too small. */
static int find(const char *name, void **function, int version, unsigned long long flags)
{
    int status = 1;
    *function = NULL;
    for (size_t at = 0; at < sizeof functions / sizeof *functions; at++) {
        if (strcmp(functions[at].name, name) != 0 || (functions[at].per_thread && flags != PER_THREAD))
            continue;
        if (functions[at].since <= version)
            *function = functions[at].function;
        status = *function != NULL ? 0 : 2;
    }
    return status;
}

EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, int *status)
{
    ENTER();
    if (function == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    /* NULL as a name ends the process, as with the real one. */
    int found = find(name, function, version, flags);
    if (status != NULL)
        *status = found;
    return found == 0 || status != NULL ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuGetProcAddress(const char *name, void **function, int version, unsigned long long flags)
{
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
