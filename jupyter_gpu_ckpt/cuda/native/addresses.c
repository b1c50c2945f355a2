#include "addresses.h"

#include <stdatomic.h>
#include <string.h>

#include "table_lock.h"

/* As many as a program is likely to free at a time (PyTorch's `empty_cache`).  A loop that allocates, on an H200: 1.043
 * of the time without the library if none is kept, 1.006 with 64; 256 that are only used for the same size: 1.025, as
 * memory is then mapped all over the address space. */
#define MOST 64

static struct {
    CUdeviceptr address;
    size_t bytes;
} kept[MOST]; /* while the table is locked */
static atomic_size_t count;

void addresses_in_child(void) { count = 0; }

bool addresses_are_kept(void) { return count != 0; }

/* The oldest come first. */
static void remove_at(size_t at)
{
    count--;
    memmove(&kept[at], &kept[at + 1], (count - at) * sizeof kept[0]);
}

/* The smallest that is large enough, and at most a quarter larger. */
static CUdeviceptr take(size_t bytes, size_t *reserved)
{
    size_t best = MOST;
    CUdeviceptr address = 0;
    table_lock();
    for (size_t at = 0; at < count; at++)
        if (kept[at].bytes >= bytes && kept[at].bytes - bytes <= bytes / 4 &&
            (best == MOST || kept[at].bytes < kept[best].bytes))
            best = at;
    if (best != MOST) {
        address = kept[best].address;
        *reserved = kept[best].bytes;
        remove_at(best);
    }
    table_unlock();
    return address;
}

CUdeviceptr addresses_reserve(size_t bytes, size_t *reserved)
{
    CUdeviceptr address = take(bytes, reserved);
    if (address != 0)
        return address;
    *reserved = bytes;
    return driver()->cuMemAddressReserve(&address, bytes, 0, 0, 0) == CUDA_SUCCESS ? address : 0;
}

CUresult addresses_give_back(CUdeviceptr address, size_t reserved)
{
    CUdeviceptr oldest = 0;
    size_t bytes = 0;
    table_lock();
    if (count == MOST) {
        oldest = kept[0].address;
        bytes = kept[0].bytes;
        remove_at(0);
    }
    kept[count].address = address;
    kept[count].bytes = reserved;
    count++;
    table_unlock();
    return oldest != 0 ? driver()->cuMemAddressFree(oldest, bytes) : CUDA_SUCCESS;
}

void addresses_drop(void)
{
    CUdeviceptr address;
    do {
        size_t bytes = 0;
        table_lock();
        address = count != 0 ? kept[--count].address : 0;
        if (address != 0)
            bytes = kept[count].bytes;
        table_unlock();
        if (address != 0)
            driver()->cuMemAddressFree(address, bytes);
    } while (address != 0);
}
