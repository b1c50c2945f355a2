/* Calls of the driver's that programs make and this library does not: copies, which wait. */
#define _GNU_SOURCE
#include "double.h"

CUresult cuMemcpyHtoD_v2(CUdeviceptr, const void *, size_t);
CUresult cuMemcpyDtoH_v2(void *, CUdeviceptr, size_t);

EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr device, const void *host, size_t bytes)
{
    ENTER();
    if (failed(current_context()) != CUDA_SUCCESS)
        return failed(current_context());
    finish_work(current_context());
    host_to_device(device, host, bytes);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemcpyDtoH_v2(void *host, CUdeviceptr device, size_t bytes)
{
    ENTER();
    if (failed(current_context()) != CUDA_SUCCESS)
        return failed(current_context());
    finish_work(current_context());
    device_to_host(host, device, bytes);
    return CUDA_SUCCESS;
}
