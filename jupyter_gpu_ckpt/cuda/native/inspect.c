/* The driver's functions that tell what an address is: of served memory they tell what they would tell of memory of
 * cuMemAlloc.  Attributes that are the same for both are the driver's to tell. */
#define _GNU_SOURCE
#include <stdatomic.h>

#include "allocations.h"
#include "child.h"
#include "driver.h"
#include "launch_gate.h"
#include "mappings.h"
#include "pools.h"
#include "published.h"

/* CUpointer_attribute */
enum { CONTEXT = 1, SYNC_MEMOPS = 6, IS_LEGACY_CUDA_IPC_CAPABLE = 10, RANGE_START_ADDR, RANGE_SIZE };
enum { ALLOWED_HANDLE_TYPES = 14, MEMPOOL_HANDLE = 17 };

/* Only a bit is another one than what the driver writes: its manual does not say how many bytes a truth value has. */
static bool is_a_bit(int attribute)
{
    return attribute == SYNC_MEMOPS || attribute == IS_LEGACY_CUDA_IPC_CAPABLE || attribute == ALLOWED_HANDLE_TYPES;
}

static bool differs(int attribute)
{
    return attribute == CONTEXT || attribute == RANGE_START_ADDR || attribute == RANGE_SIZE ||
           attribute == MEMPOOL_HANDLE || is_a_bit(attribute);
}

/* Memory of a pool belongs to no context and has no legacy handle, as the mapped memory that it is here, and other
 * memory belongs to no pool. */
static bool is_own(int attribute, const struct allocation *allocation)
{
    if (allocation->pool != 0)
        return attribute != CONTEXT && attribute != IS_LEGACY_CUDA_IPC_CAPABLE;
    return attribute != MEMPOOL_HANDLE;
}

static void tell(void *data, int attribute, const struct allocation *allocation)
{
    if (attribute == IS_LEGACY_CUDA_IPC_CAPABLE || (attribute == SYNC_MEMOPS && allocation->synchronizes))
        *(unsigned char *)data |= 1;
    else if (attribute == SYNC_MEMOPS)
        return;
    else if (attribute == ALLOWED_HANDLE_TYPES)
        *(unsigned char *)data &= (unsigned char)~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    else if (attribute == CONTEXT)
        *(CUcontext *)data = allocation->context;
    else if (attribute == RANGE_START_ADDR)
        *(CUdeviceptr *)data = allocation->address;
    else if (attribute == MEMPOOL_HANDLE)
        *(CUmemoryPool *)data = pools_handle(allocation->pool);
    else
        *(size_t *)data = allocation->requested;
}

/* Wait at the launch gate if it is closed and the address is of memory that may be swapped out: of that the driver would
 * say that there is none. */
static CUresult pass_with(CUdeviceptr address)
{
    struct allocation allocation;
    if ((atomic_load_explicit(&gpu_ckpt_published.launch_gate, memory_order_acquire) & GATE_CLOSED) == 0 ||
        is_inert() || (!allocation_containing(address, &allocation) && !mappings_contain(address)))
        return CUDA_SUCCESS;
    return launch_gate_pass();
}

CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr address)
{
    const struct driver *original = any_driver();
    struct allocation allocation;
    if (original == NULL || original->cuPointerGetAttribute == NULL)
        return CUDA_ERROR_NOT_INITIALIZED;
    CUresult result = pass_with(address);
    if (result != CUDA_SUCCESS)
        return result;
    if (data == NULL || !differs(attribute) || !allocation_containing(address, &allocation) ||
        !is_own(attribute, &allocation))
        return original->cuPointerGetAttribute(data, attribute, address);
    result = is_a_bit(attribute) ? original->cuPointerGetAttribute(data, attribute, address) : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS)
        tell(data, attribute, &allocation);
    return result;
}

CUresult cuPointerGetAttributes(unsigned int count, int *attributes, void **data, CUdeviceptr address)
{
    const struct driver *original = any_driver();
    struct allocation allocation;
    bool is_served = false, is_known = false;
    if (original == NULL || original->cuPointerGetAttributes == NULL)
        return CUDA_ERROR_NOT_INITIALIZED;
    CUresult result = pass_with(address);
    if (result == CUDA_SUCCESS)
        result = original->cuPointerGetAttributes(count, attributes, data, address);
    for (unsigned int at = 0; at < count && result == CUDA_SUCCESS; at++)
        if (differs(attributes[at])) {
            is_served = is_known ? is_served : allocation_containing(address, &allocation);
            is_known = true;
            if (is_served && is_own(attributes[at], &allocation))
                tell(data[at], attributes[at], &allocation);
        }
    return result;
}

/* Have synchronous memory operations of a context wait for their end. */
static CUresult synchronize_operations(CUcontext context)
{
    const struct driver *cu = driver();
    CUcontext popped;
    unsigned int flags;
    if (cu == NULL || cu->cuCtxGetFlags == NULL || cu->cuCtxSetFlags == NULL || context == NULL)
        return CUDA_ERROR_NOT_SUPPORTED;
    CUresult result = cu->cuCtxPushCurrent_v2(context);
    if (result != CUDA_SUCCESS)
        return result;
    result = cu->cuCtxGetFlags(&flags);
    if (result == CUDA_SUCCESS && (flags & CU_CTX_SYNC_MEMOPS) == 0)
        result = cu->cuCtxSetFlags(flags | CU_CTX_SYNC_MEMOPS);
    cu->cuCtxPopCurrent_v2(&popped);
    return result;
}

/* The driver lets the operations on one allocation synchronize, but not on mapped memory, which served memory is; so
 * all of its context do from then on.  That is never taken back: another allocation or the program may rely on it. */
CUresult cuPointerSetAttribute(const void *value, int attribute, CUdeviceptr address)
{
    DRIVER_WITH(cuPointerSetAttribute);
    struct allocation allocation;
    if (value == NULL || attribute != SYNC_MEMOPS || !allocation_containing(address, &allocation) ||
        allocation.pool != 0)
        return original->cuPointerSetAttribute(value, attribute, address);
    bool wanted = *(const unsigned int *)value != 0;
    CUresult result = launch_gate_pass();
    if (result == CUDA_SUCCESS && wanted)
        result = synchronize_operations(allocation.context);
    if (result == CUDA_SUCCESS)
        allocation_set_synchronizes(allocation.address, wanted);
    return result;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr address)
{
    const struct driver *original = any_driver();
    struct allocation allocation;
    CUcontext current;
    if (original == NULL || original->cuMemGetAddressRange_v2 == NULL)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!allocation_containing(address, &allocation) || original->cuCtxGetCurrent(&current) != CUDA_SUCCESS ||
        current == NULL)
        return original->cuMemGetAddressRange_v2(base, bytes, address);
    if (base != NULL)
        *base = allocation.address;
    if (bytes != NULL)
        *bytes = allocation.requested;
    return CUDA_SUCCESS;
}
