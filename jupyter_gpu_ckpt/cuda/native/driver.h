/* The used part of the CUDA driver, declared here so that building needs no CUDA toolkit.
 *
 * Types, constants and signatures are those of the CUDA Driver API (cuda.h, the same since CUDA 11.3 on 64-bit Linux).
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

typedef int CUresult;
typedef int CUdevice;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphNode_st *CUgraphNode;
typedef struct CUmemPoolHandle_st *CUmemoryPool;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef struct {
    char bytes[64];
} CUipcMemHandle;
typedef struct {
    char bytes[16];
} CUuuid;

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_OPERATING_SYSTEM = 304,
    CUDA_ERROR_ILLEGAL_STATE = 401,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_NOT_SUPPORTED = 801,
};

typedef struct {
    int type; /* 1: a device */
    int id;
} CUmemLocation;

typedef struct {
    int type; /* 1: pinned, the only one there is */
    int requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct {
        unsigned char compressionType;
        unsigned char gpuDirectRDMACapable;
        unsigned short usage;
        unsigned char reserved[4];
    } allocFlags;
} CUmemAllocationProp;

typedef struct {
    CUmemLocation location;
    int flags; /* 3: read and write */
} CUmemAccessDesc;

typedef struct {
    int allocType;
    int handleTypes; /* 0: no other process can have it */
    CUmemLocation location;
    void *win32SecurityAttributes;
    size_t maxSize; /* 0: as the driver likes */
    unsigned short usage;
    unsigned char reserved[54];
} CUmemPoolProps;

/* A part of a sparse array, and the memory that is to be behind it. */
typedef struct {
    int resourceType;
    void *resource;
    int subresourceType;
    union {
        unsigned int level[8];
        unsigned long long miptail[3];
    } subresource;
    int memOperationType;
    int memHandleType; /* 0: memHandle */
    CUmemGenericAllocationHandle memHandle;
    unsigned long long offset;
    unsigned int deviceBitMask, flags, reserved[2];
} CUarrayMapInfo;
_Static_assert(sizeof(CUarrayMapInfo) == 96, "as in cuda.h");

enum {
    CU_MEM_ALLOCATION_TYPE_PINNED = 1,
    CU_MEM_LOCATION_TYPE_DEVICE = 1,
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3,
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1,
    CU_MEM_CREATE_USAGE_TILE_POOL = 1,
    CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0,
    CU_MEMHOSTREGISTER_PORTABLE = 1,
    CU_MEMHOSTREGISTER_DEVICEMAP = 2,
    CU_STREAM_NON_BLOCKING = 1,
    CU_CTX_SYNC_MEMOPS = 0x80,
    CU_EVENT_DISABLE_TIMING = 2,
    CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102,
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103,
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110,
};

/* Functions that serving needs: name in libcuda.so.1, and parameters. */
#define DRIVER_FUNCTIONS(F)                                                                                            \
    F(cuCtxGetCurrent, (CUcontext *))                                                                                  \
    F(cuCtxSetCurrent, (CUcontext))                                                                                    \
    F(cuCtxPushCurrent_v2, (CUcontext))                                                                                \
    F(cuCtxPopCurrent_v2, (CUcontext *))                                                                               \
    F(cuCtxGetDevice, (CUdevice *))                                                                                    \
    F(cuCtxSynchronize, (void))                                                                                        \
    F(cuDeviceGetCount, (int *))                                                                                       \
    F(cuDeviceGetAttribute, (int *, int, CUdevice))                                                                    \
    F(cuDeviceCanAccessPeer, (int *, CUdevice, CUdevice))                                                              \
    F(cuMemGetAllocationGranularity, (size_t *, const CUmemAllocationProp *, int))                                     \
    F(cuMemAddressReserve, (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long))                           \
    F(cuMemAddressFree, (CUdeviceptr, size_t))                                                                         \
    F(cuMemHostRegister_v2, (void *, size_t, unsigned int))                                                            \
    F(cuMemHostUnregister, (void *))                                                                                   \
    F(cuMemcpyDtoHAsync_v2, (void *, CUdeviceptr, size_t, CUstream))                                                   \
    F(cuMemcpyHtoDAsync_v2, (CUdeviceptr, const void *, size_t, CUstream))                                             \
    F(cuStreamCreate, (CUstream *, unsigned int))                                                                      \
    F(cuStreamSynchronize, (CUstream))                                                                                 \
    F(cuEventCreate, (CUevent *, unsigned int))                                                                        \
    F(cuEventDestroy_v2, (CUevent))                                                                                    \
    F(cuEventRecord, (CUevent, CUstream))                                                                              \
    F(cuEventSynchronize, (CUevent))

/* Functions that an older driver may lack. */
#define OPTIONAL_FUNCTIONS(F)                                                                                          \
    F(cuCtxGetFlags, (unsigned int *))                                                                                 \
    F(cuCtxGetId, (CUcontext, unsigned long long *))                                                                   \
    F(cuCtxSetFlags, (unsigned int))                                                                                   \
    F(cuDevicePrimaryCtxGetState, (CUdevice, unsigned int *, int *))                                                   \
    F(cuDeviceGetDefaultMemPool, (CUmemoryPool *, CUdevice))                                                           \
    F(cuDeviceGetMemPool, (CUmemoryPool *, CUdevice))                                                                  \
    F(cuDeviceGetUuid, (CUuuid *, CUdevice))                                                                           \
    F(cuDeviceTotalMem_v2, (size_t *, CUdevice))                                                                       \
    F(cuStreamGetCtx, (CUstream, CUcontext *))                                                                         \
    F(cuEventQuery, (CUevent))                                                                                         \
    F(cuLaunchKernel,                                                                                                  \
      (CUfunction, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int,   \
       CUstream, void **, void **))                                                                                    \
    F(cuMemHostGetDevicePointer_v2, (CUdeviceptr *, void *, unsigned int))                                             \
    F(cuMemImportFromShareableHandle, (CUmemGenericAllocationHandle *, void *, int))                                   \
    F(cuMemcpyDtoDAsync_v2, (CUdeviceptr, CUdeviceptr, size_t, CUstream))                                              \
    F(cuMemsetD8Async, (CUdeviceptr, unsigned char, size_t, CUstream))                                                 \
    F(cuModuleGetFunction, (CUfunction *, CUmodule, const char *))                                                     \
    F(cuModuleLoadData, (CUmodule *, const void *))                                                                    \
    F(cuModuleUnload, (CUmodule))                                                                                      \
    F(cuStreamIsCapturing, (CUstream, int *))                                                                          \
    F(cuStreamQuery, (CUstream))                                                                                       \
    F(cuThreadExchangeStreamCaptureMode, (int *))

/* Functions that this library defines itself and that programs call instead of the driver's; the CUDA version since
 * which cuGetProcAddress returns this one for its name without endings. */
#define STAND_INS(F)                                                                                                   \
    F(cuCtxCreate, 2000, (CUcontext *, unsigned int, CUdevice))                                                        \
    F(cuCtxCreate_v2, 3020, (CUcontext *, unsigned int, CUdevice))                                                     \
    F(cuCtxCreate_v3, 11040, (CUcontext *, void *, int, unsigned int, CUdevice))                                       \
    F(cuCtxCreate_v4, 12050, (CUcontext *, void *, unsigned int, CUdevice))                                            \
    F(cuCtxDestroy, 2000, (CUcontext))                                                                                 \
    F(cuCtxDestroy_v2, 4000, (CUcontext))                                                                              \
    F(cuDevicePrimaryCtxRelease, 7000, (CUdevice))                                                                     \
    F(cuDevicePrimaryCtxRelease_v2, 11000, (CUdevice))                                                                 \
    F(cuDevicePrimaryCtxRetain, 7000, (CUcontext *, CUdevice))                                                         \
    F(cuDevicePrimaryCtxReset, 7000, (CUdevice))                                                                       \
    F(cuDevicePrimaryCtxReset_v2, 11000, (CUdevice))                                                                   \
    F(cuGetProcAddress, 11030, (const char *, void **, int, unsigned long long))                                       \
    F(cuGetProcAddress_v2, 12000, (const char *, void **, int, unsigned long long, int *))                             \
    F(cuIpcCloseMemHandle, 4010, (CUdeviceptr))                                                                        \
    F(cuIpcGetMemHandle, 4010, (CUipcMemHandle *, CUdeviceptr))                                                        \
    F(cuIpcOpenMemHandle, 4010, (CUdeviceptr *, CUipcMemHandle, unsigned int))                                         \
    F(cuIpcOpenMemHandle_v2, 11000, (CUdeviceptr *, CUipcMemHandle, unsigned int))                                     \
    F(cuMemAlloc_v2, 3020, (CUdeviceptr *, size_t))                                                                    \
    F(cuMemAllocAsync, 11020, (CUdeviceptr *, size_t, CUstream))                                                       \
    F(cuMemAllocAsync_ptsz, 11020, (CUdeviceptr *, size_t, CUstream))                                                  \
    F(cuMemAllocFromPoolAsync, 11020, (CUdeviceptr *, size_t, CUmemoryPool, CUstream))                                 \
    F(cuMemAllocFromPoolAsync_ptsz, 11020, (CUdeviceptr *, size_t, CUmemoryPool, CUstream))                            \
    F(cuMemAllocManaged, 6000, (CUdeviceptr *, size_t, unsigned int))                                                  \
    F(cuMemAllocPitch_v2, 3020, (CUdeviceptr *, size_t *, size_t, size_t, unsigned int))                               \
    F(cuMemCreate, 10020,                                                                                              \
      (CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long))                       \
    F(cuMemExportToShareableHandle, 10020, (void *, CUmemGenericAllocationHandle, int, unsigned long long))            \
    F(cuMemFree_v2, 3020, (CUdeviceptr))                                                                               \
    F(cuMemFreeAsync, 11020, (CUdeviceptr, CUstream))                                                                  \
    F(cuMemFreeAsync_ptsz, 11020, (CUdeviceptr, CUstream))                                                             \
    F(cuMemGetAddressRange_v2, 3020, (CUdeviceptr *, size_t *, CUdeviceptr))                                           \
    F(cuMemGetAllocationPropertiesFromHandle, 10020, (CUmemAllocationProp *, CUmemGenericAllocationHandle))            \
    F(cuMemGetHandleForAddressRange, 11070, (void *, CUdeviceptr, size_t, int, unsigned long long))                    \
    F(cuMemGetInfo_v2, 3020, (size_t *, size_t *))                                                                     \
    F(cuMemMap, 10020, (CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long))                \
    F(cuMemMapArrayAsync, 11010, (CUarrayMapInfo *, unsigned int, CUstream))                                           \
    F(cuMemMapArrayAsync_ptsz, 11010, (CUarrayMapInfo *, unsigned int, CUstream))                                      \
    F(cuMemPoolCreate, 11020, (CUmemoryPool *, const CUmemPoolProps *))                                                \
    F(cuMemPoolDestroy, 11020, (CUmemoryPool))                                                                         \
    F(cuMemPoolGetAttribute, 11020, (CUmemoryPool, int, void *))                                                       \
    F(cuMemPoolSetAttribute, 11020, (CUmemoryPool, int, void *))                                                       \
    F(cuMemPoolTrimTo, 11020, (CUmemoryPool, size_t))                                                                  \
    F(cuMemRelease, 10020, (CUmemGenericAllocationHandle))                                                             \
    F(cuMemRetainAllocationHandle, 11000, (CUmemGenericAllocationHandle *, void *))                                    \
    F(cuMemSetAccess, 10020, (CUdeviceptr, size_t, const CUmemAccessDesc *, size_t))                                   \
    F(cuMemUnmap, 10020, (CUdeviceptr, size_t))                                                                        \
    F(cuMulticastBindAddr, 12010,                                                                                      \
      (CUmemGenericAllocationHandle, size_t, CUdeviceptr, size_t, unsigned long long))                                 \
    F(cuMulticastBindAddr_v2, 13010,                                                                                   \
      (CUmemGenericAllocationHandle, CUdevice, size_t, CUdeviceptr, size_t, unsigned long long))                       \
    F(cuMulticastBindMem, 12010,                                                                                       \
      (CUmemGenericAllocationHandle, size_t, CUmemGenericAllocationHandle, size_t, size_t, unsigned long long))        \
    F(cuMulticastBindMem_v2, 13010,                                                                                    \
      (CUmemGenericAllocationHandle, CUdevice, size_t, CUmemGenericAllocationHandle, size_t, size_t,                   \
       unsigned long long))                                                                                            \
    F(cuPointerGetAttribute, 4000, (void *, int, CUdeviceptr))                                                         \
    F(cuPointerGetAttributes, 7000, (unsigned int, int *, void **, CUdeviceptr))                                       \
    F(cuPointerSetAttribute, 6000, (const void *, int, CUdeviceptr))                                                   \
    F(cuStreamBeginCapture, 10000, (CUstream))                                                                         \
    F(cuStreamBeginCapture_ptsz, 10000, (CUstream))                                                                    \
    F(cuStreamBeginCapture_v2, 10010, (CUstream, int))                                                                 \
    F(cuStreamBeginCapture_v2_ptsz, 10010, (CUstream, int))                                                            \
    F(cuStreamBeginCaptureToGraph, 12030, (CUstream, CUgraph, const CUgraphNode *, const void *, size_t, int))         \
    F(cuStreamBeginCaptureToGraph_ptsz, 12030, (CUstream, CUgraph, const CUgraphNode *, const void *, size_t, int))    \
    F(cuStreamDestroy, 2000, (CUstream))                                                                               \
    F(cuStreamDestroy_v2, 4000, (CUstream))                                                                            \
    F(cuStreamEndCapture, 10000, (CUstream, CUgraph *))                                                                \
    F(cuStreamEndCapture_ptsz, 10000, (CUstream, CUgraph *))

#define MEMBER(name, parameters) CUresult(*name) parameters;
#define STAND_IN_MEMBER(name, since, parameters) MEMBER(name, parameters)
struct driver {
    DRIVER_FUNCTIONS(MEMBER)
    OPTIONAL_FUNCTIONS(MEMBER)
    STAND_INS(STAND_IN_MEMBER)
};
#undef MEMBER
#undef STAND_IN_MEMBER

#define EXPORT __attribute__((visibility("default")))
#define DECLARE(name, since, parameters) EXPORT CUresult name parameters;
STAND_INS(DECLARE)
#undef DECLARE

/* Reset the lock, in a child that was just forked. */
void driver_in_child(void);

/* The driver that this process has loaded; NULL while it has none, or if a function that serving needs is missing. */
const struct driver *driver(void);

/* The same; missing functions are NULL. */
const struct driver *any_driver(void);

/* The library of `any_driver`, which has been found. */
void *library_of_driver(void);
/* Whether an address is in that library, as far as it has been used; in any thread, without a lock. */
bool is_code_of_driver(const void *address);

/* The driver as ``original``, in a function that stands in for one of its own that it may lack. */
#define DRIVER_WITH(name)                                                                                              \
    const struct driver *original = any_driver();                                                                      \
    if (original == NULL || original->name == NULL)                                                                    \
        return CUDA_ERROR_NOT_INITIALIZED
