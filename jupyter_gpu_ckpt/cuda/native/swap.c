#include "swap.h"

#include "copies.h"
#include "host_memory.h"
#include "mappings.h"

static bool is_swapped_out; /* the valid content is in host memory, and some allocations or all have no device memory */
static bool is_spent;       /* everything was swapped in, and host memory can be freed */

void swap_discard_copy(void)
{
    if (!is_swapped_out)
        host_memory_free();
    is_spent = false;
}

void swap_free_host(void)
{
    if (is_spent)
        swap_discard_copy();
}

struct amounts swap_amounts(void)
{
    struct amounts amounts = {0};
    size_t count, bytes;
    allocations_total(&amounts.allocations, &amounts.bytes);
    mappings_total(&count, &bytes);
    amounts.allocations += count;
    amounts.bytes += bytes;
    amounts.swapped_out = is_swapped_out ? host_memory_bytes() : 0;
    return amounts;
}

CUresult swap_copy_out(void)
{
    if (driver() == NULL || is_swapped_out)
        return CUDA_SUCCESS;
    swap_discard_copy();
    size_t slots, bytes = 0;
    struct allocation *table = allocations_table(&slots);
    for (size_t at = 0; at < slots; at++)
        if (table[at].address != 0) {
            bool stays = table[at].shared || table[at].context == NULL;
            table[at].offset = stays ? NOT_COPIED : bytes;
            bytes += stays ? 0 : table[at].bytes;
        }
    bytes = mappings_plan(bytes);
    if (bytes == 0)
        return CUDA_SUCCESS;
    CUresult result = copies_wait();
    if (result == CUDA_SUCCESS)
        result = host_memory_create(bytes);
    if (result == CUDA_SUCCESS)
        result = copies_run(true);
    if (result != CUDA_SUCCESS)
        swap_discard_copy();
    return result;
}

/* Perform a step on every allocation that was copied, until an error or to the end; return the first error. */
static CUresult each_copied(CUresult (*step)(struct allocation *), bool past_errors)
{
    size_t slots;
    struct allocation *table = allocations_table(&slots);
    CUresult result = CUDA_SUCCESS;
    for (size_t at = 0; at < slots && (past_errors || result == CUDA_SUCCESS); at++)
        if (table[at].address != 0 && table[at].offset != NOT_COPIED) {
            CUresult own = driver()->cuCtxSetCurrent(table[at].context);
            if (own == CUDA_SUCCESS)
                own = step(&table[at]);
            if (result == CUDA_SUCCESS)
                result = own;
        }
    return result;
}

CUresult swap_free_device(void)
{
    if (host_memory_bytes() == 0)
        return CUDA_SUCCESS;
    is_swapped_out = true;
    CUresult result = copies_pending() ? copies_wait() : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS)
        result = each_copied(allocation_unmap, false);
    if (result == CUDA_SUCCESS)
        result = mappings_unmap(false);
    if (result != CUDA_SUCCESS)
        swap_in();
    return result;
}

CUresult swap_in(void)
{
    if (!is_swapped_out)
        return CUDA_SUCCESS;
    CUresult result = copies_pending() ? copies_wait() : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS)
        result = each_copied(allocation_map, false);
    if (result == CUDA_SUCCESS)
        result = mappings_map();
    if (result == CUDA_SUCCESS)
        result = copies_run(false);
    if (result != CUDA_SUCCESS) {
        if (!copies_pending() || copies_wait() == CUDA_SUCCESS) {
            each_copied(allocation_unmap, true);
            mappings_unmap(true);
        }
        return result;
    }
    mappings_swapped_in();
    is_swapped_out = false;
    is_spent = true;
    return CUDA_SUCCESS;
}
