/* The functions that allocate and free.  Calls that this library does not serve, and every error, are left to the
 * driver. */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdint.h>

#include "allocations.h"
#include "capture.h"
#include "child.h"
#include "control.h"
#include "launch_gate.h"
#include "managed.h"
#include "memory_wait.h"
#include "pools.h"
#include "serving.h"

/* Smaller allocations, rounded up to the driver's granularity, would waste more than they gain: the driver swaps
 * them. */
#define SMALLEST ((size_t)2 << 20)

bool may_serve(size_t bytes) { return bytes >= SMALLEST && !is_inert() && control_open(); }

CUdeviceptr serve(size_t bytes)
{
    if (!may_serve(bytes) || driver() == NULL || !capture_permits_allocations())
        return 0;
    collect_freed(false);
    return allocation_create(bytes, 0);
}

static CUresult wait_for_work(CUcontext context)
{
    const struct driver *cu = driver();
    CUcontext popped;
    if (context == NULL) /* it was destroyed, and its work is done */
        return CUDA_SUCCESS;
    CUresult result = cu->cuCtxPushCurrent_v2(context);
    if (result != CUDA_SUCCESS)
        return result;
    result = cu->cuCtxSynchronize();
    cu->cuCtxPopCurrent_v2(&popped);
    return result;
}

CUresult free_served(CUdeviceptr address, CUcontext context)
{
    struct allocation freed = {.pool = 0};
    launch_gate_wait();
    allocation_at(address, &freed);
    bool later = capture_is_active();
    CUresult result = later ? capture_refuses_frees() : wait_for_work(context);
    if (result == CUDA_SUCCESS && freed.pool != 0)
        result = pools_free_unordered(address, later);
    else if (result == CUDA_SUCCESS)
        result = later ? allocation_postpone(address, NULL, NULL) : allocation_destroy(address);
    collect_freed(false);
    return result;
}

/* -- memory that the program has freed and that is given back later */

static bool is_unused(const struct allocation *allocation)
{
    if (allocation->after == NULL)
        return wait_for_work(allocation->context) == CUDA_SUCCESS;
    return driver()->cuEventQuery(allocation->after) == CUDA_SUCCESS;
}

static bool becomes_unused(const struct allocation *allocation)
{
    if (allocation->after != NULL && driver()->cuEventSynchronize(allocation->after) != CUDA_SUCCESS)
        return false;
    return is_unused(allocation);
}

/* Not while a stream is captured: even the query of an event could end that. */
bool collect_freed(bool wait)
{
    if (driver() == NULL || capture_is_active())
        return false;
    bool any = allocations_collect(wait ? becomes_unused : is_unused) != 0;
    return (wait && pools_trim(0, 0, true)) || any;
}

/* -- the driver's functions */

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes)
{
    const struct driver *original = any_driver();
    if (original == NULL || original->cuMemAlloc_v2 == NULL)
        return CUDA_ERROR_NOT_INITIALIZED;
    CUresult result = launch_gate_pass();
    bool waited = false;
    if (result != CUDA_SUCCESS)
        return result;
    do {
        CUdeviceptr served = address != NULL ? serve(bytes) : 0;
        if (served != 0) {
            *address = served;
            return CUDA_SUCCESS;
        }
        result = original->cuMemAlloc_v2(address, bytes);
    } while (result == CUDA_ERROR_OUT_OF_MEMORY &&
             (collect_freed(true) || (!waited && (waited = memory_wait(bytes)))));
    return result;
}

/* The driver's alignment of rows, learned from one row of its own; 0 if it is not known. */
static size_t pitch_alignment(const struct driver *original)
{
    static _Atomic size_t known[MAX_DEVICES];
    CUdevice device;
    CUdeviceptr row;
    size_t alignment = 0;
    if (original->cuCtxGetDevice(&device) != CUDA_SUCCESS || device < 0 || device >= MAX_DEVICES)
        return 0;
    alignment = atomic_load_explicit(&known[device], memory_order_relaxed);
    if (alignment == 0 && !capture_is_active() &&
        original->cuMemAllocPitch_v2(&row, &alignment, 1, 1, 4) == CUDA_SUCCESS) {
        original->cuMemFree_v2(row);
        atomic_store_explicit(&known[device], alignment, memory_order_relaxed);
    }
    return alignment;
}

CUresult cuMemAllocPitch_v2(CUdeviceptr *address, size_t *pitch, size_t width, size_t height, unsigned int element)
{
    const struct driver *original = any_driver();
    if (original == NULL || original->cuMemAllocPitch_v2 == NULL)
        return CUDA_ERROR_NOT_INITIALIZED;
    CUresult result = launch_gate_pass();
    if (result != CUDA_SUCCESS)
        return result;
    bool valid = address != NULL && pitch != NULL && width != 0 && height != 0 && width <= SIZE_MAX / 2 / height &&
                 (element == 4 || element == 8 || element == 16);
    size_t alignment = valid && may_serve(width * height) && driver() != NULL ? pitch_alignment(original) : 0;
    size_t row = alignment != 0 ? (width + alignment - 1) / alignment * alignment : 0;
    bool waited = false;
    do {
        CUdeviceptr served = row != 0 && row <= SIZE_MAX / 2 / height ? serve(row * height) : 0;
        if (served != 0) {
            *address = served;
            *pitch = row;
            return CUDA_SUCCESS;
        }
        result = original->cuMemAllocPitch_v2(address, pitch, width, height, element);
    } while (result == CUDA_ERROR_OUT_OF_MEMORY && valid && !waited && (waited = memory_wait(width * height)));
    return result;
}

CUresult cuMemFree_v2(CUdeviceptr address)
{
    const struct driver *original = any_driver();
    CUcontext context;
    if (original == NULL || original->cuMemFree_v2 == NULL)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (address == 0 || !allocation_lookup(address, &context)) {
        bool managed = managed_remove(address);
        CUresult result = original->cuMemFree_v2(address);
        if (managed && result != CUDA_SUCCESS)
            managed_add(address);
        return result;
    }
    return free_served(address, context);
}
