#include "transfer.h"

#include "arena.h"
#include "copies.h"

static bool is_away; /* the arena has what counts, and some blocks or all have no physical memory */
static bool is_spent; /* everything is back from the arena */

void transfer_forget(void)
{
    if (!is_away)
        arena_drop();
    is_spent = false;
}

void transfer_tidy(void)
{
    if (is_spent)
        transfer_forget();
}

struct amounts transfer_amounts(void)
{
    struct amounts amounts = {0};
    blocks_amount(&amounts.blocks, &amounts.bytes);
    amounts.away = is_away ? arena_bytes() : 0;
    return amounts;
}

/* -- the verbs */

CUresult transfer_copy_out(void)
{
    if (driver() == NULL || is_away)
        return CUDA_SUCCESS;
    transfer_forget();
    size_t slots, bytes = 0;
    struct block *table = blocks_table(&slots);
    for (size_t at = 0; at < slots; at++)
        if (table[at].address != 0) {
            table[at].offset = bytes;
            bytes += table[at].bytes;
        }
    if (bytes == 0)
        return CUDA_SUCCESS;
    CUresult result = copies_wait();
    if (result == CUDA_SUCCESS)
        result = arena_make(bytes);
    if (result == CUDA_SUCCESS)
        result = copies_make(true);
    if (result != CUDA_SUCCESS)
        transfer_forget();
    return result;
}

/* The same step for every block that was copied, as far as it can be done; the first error. */
static CUresult each_copied(CUresult (*step)(struct block *), bool to_the_end)
{
    size_t slots;
    struct block *table = blocks_table(&slots);
    CUresult result = CUDA_SUCCESS;
    for (size_t at = 0; at < slots && (to_the_end || result == CUDA_SUCCESS); at++)
        if (table[at].address != 0 && table[at].offset != NOT_COPIED) {
            CUresult now = driver()->cuCtxSetCurrent(table[at].context);
            if (now == CUDA_SUCCESS)
                now = step(&table[at]);
            if (result == CUDA_SUCCESS)
                result = now;
        }
    return result;
}

CUresult transfer_free(void)
{
    if (arena_bytes() == 0)
        return CUDA_SUCCESS;
    is_away = true;
    CUresult result = copies_under_way() ? copies_wait() : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS)
        result = each_copied(block_unmap, false);
    if (result != CUDA_SUCCESS)
        transfer_bring_back();
    return result;
}

CUresult transfer_bring_back(void)
{
    if (!is_away)
        return CUDA_SUCCESS;
    CUresult result = copies_under_way() ? copies_wait() : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS)
        result = each_copied(block_map, false);
    if (result == CUDA_SUCCESS)
        result = copies_make(false);
    if (result != CUDA_SUCCESS) {
        if (!copies_under_way() || copies_wait() == CUDA_SUCCESS)
            each_copied(block_unmap, true);
        return result;
    }
    is_away = false;
    is_spent = true;
    return CUDA_SUCCESS;
}
