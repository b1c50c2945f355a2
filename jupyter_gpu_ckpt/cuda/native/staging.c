#include "staging.h"

#include <pthread.h>

#include "allocations.h"

/* Bytes of one piece, and their number: more than that is not staged. */
#ifndef STAGED_PIECE /* less, in tests */
#define STAGED_PIECE ((size_t)1 << 30)
#endif
#define MAX_PIECES 256
/* Of large memory this part may be staged. */
#ifndef STAGED_SHARE /* more, in tests */
#define STAGED_SHARE 3
#endif
#define ATTEMPTS 2

/* Of all contexts, whose parts are staged at the same time. */
static pthread_mutex_t using = PTHREAD_MUTEX_INITIALIZER;
static struct allocation pieces[MAX_PIECES];
static size_t count;

void staging_begin(struct staging *staging, size_t bytes, size_t expected)
{
    size_t free, total, most = bytes / STAGED_SHARE;
    *staging = (struct staging){.left = 0};
    if (driver()->cuMemcpyDtoDAsync_v2 == NULL || driver()->cuMemGetInfo_v2 == NULL ||
        driver()->cuMemGetInfo_v2(&free, &total) != CUDA_SUCCESS)
        return;
    most = most < free - free / 4 ? most : free - free / 4;
    staging->left = expected <= most ? most : 0;
}

/* False: it stays, and can be freed again.  In no context: mapped memory is of none, and its own may be destroyed. */
static bool free_piece(struct allocation *piece)
{
    return allocation_unmap(piece) == CUDA_SUCCESS &&
           driver()->cuMemAddressFree(piece->address, piece->bytes) == CUDA_SUCCESS;
}

static CUdeviceptr make_piece(void)
{
    if (count == MAX_PIECES)
        return 0;
    struct allocation *piece = &pieces[count];
    *piece = (struct allocation){.bytes = STAGED_PIECE};
    if (driver()->cuCtxGetDevice(&piece->device) != CUDA_SUCCESS ||
        driver()->cuMemAddressReserve(&piece->address, STAGED_PIECE, 0, 0, 0) != CUDA_SUCCESS)
        return 0;
    count++;
    if (allocation_map(piece) == CUDA_SUCCESS)
        return piece->address;
    if (free_piece(piece))
        count--;
    return 0;
}

CUdeviceptr staging_take(struct staging *staging, size_t bytes)
{
    if (bytes > staging->rest) {
        if (staging->left < STAGED_PIECE || bytes > STAGED_PIECE)
            return 0;
        pthread_mutex_lock(&using);
        staging->next = make_piece();
        pthread_mutex_unlock(&using);
        if (staging->next == 0)
            return 0;
        staging->rest = STAGED_PIECE;
        staging->left -= STAGED_PIECE;
    }
    CUdeviceptr taken = staging->next;
    staging->next += bytes;
    staging->rest -= bytes;
    return taken;
}

static bool is_in(const struct allocation *piece, CUdeviceptr part) { return part - piece->address < piece->bytes; }

bool staging_is_one_piece(CUdeviceptr one, CUdeviceptr other)
{
    bool found = false;
    pthread_mutex_lock(&using);
    for (size_t at = 0; at < count && !found; at++)
        found = is_in(&pieces[at], one) && is_in(&pieces[at], other);
    pthread_mutex_unlock(&using);
    return found;
}

void staging_free_piece(CUdeviceptr part)
{
    pthread_mutex_lock(&using);
    for (size_t at = 0; at < count; at++)
        if (is_in(&pieces[at], part)) {
            if (free_piece(&pieces[at]))
                pieces[at] = pieces[--count];
            break;
        }
    pthread_mutex_unlock(&using);
}

/* Nobody takes or frees a piece meanwhile. */
void staging_free(void)
{
    for (int attempt = 0; attempt < ATTEMPTS && count != 0; attempt++) {
        size_t left = 0;
        for (size_t at = 0; at < count; at++)
            if (!free_piece(&pieces[at]))
                pieces[left++] = pieces[at];
        count = left;
    }
}
