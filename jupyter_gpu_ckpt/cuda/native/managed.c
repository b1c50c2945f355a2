#include "managed.h"

#include <stdatomic.h>

#include "launch_gate.h"

/* More are not counted.  Without a lock: a child may be forked at any moment. */
#define MOST 1024
static _Atomic CUdeviceptr known[MOST];
static atomic_size_t count;

void managed_add(CUdeviceptr address)
{
    for (size_t at = 0; at < MOST; at++) {
        CUdeviceptr none = 0;
        if (atomic_compare_exchange_strong(&known[at], &none, address)) {
            atomic_fetch_add(&count, 1);
            return;
        }
    }
}

bool managed_remove(CUdeviceptr address)
{
    for (size_t at = 0; at < MOST && address != 0 && atomic_load(&count) != 0; at++) {
        CUdeviceptr wanted = address;
        if (atomic_compare_exchange_strong(&known[at], &wanted, 0)) {
            atomic_fetch_sub(&count, 1);
            return true;
        }
    }
    return false;
}

void managed_forget(void)
{
    for (size_t at = 0; at < MOST && atomic_load(&count) != 0; at++)
        if (atomic_exchange(&known[at], 0) != 0)
            atomic_fetch_sub(&count, 1);
}

size_t managed_count(void) { return atomic_load(&count); }

CUresult cuMemAllocManaged(CUdeviceptr *address, size_t bytes, unsigned int flags)
{
    const struct driver *original = any_driver();
    if (original == NULL || original->cuMemAllocManaged == NULL)
        return CUDA_ERROR_NOT_INITIALIZED;
    CUresult result = launch_gate_pass();
    if (result == CUDA_SUCCESS)
        result = original->cuMemAllocManaged(address, bytes, flags);
    if (result == CUDA_SUCCESS)
        managed_add(*address);
    return result;
}
