#include "staging.h"

#include <pthread.h>

/* Bytes of one allocation, and their number: more than that is not staged. */
#ifndef STAGED_PIECE /* less, in tests */
#define STAGED_PIECE ((size_t)1 << 30)
#endif
#define MAX_PIECES 256
/* The part of large memory that may be staged. */
#ifndef STAGED_SHARE /* more, in tests */
#define STAGED_SHARE 4
#endif
#define ATTEMPTS 2

/* Of all contexts, whose parts are staged at the same time. */
static pthread_mutex_t taking = PTHREAD_MUTEX_INITIALIZER;
static struct {
    CUcontext context;
    CUdeviceptr address;
} pieces[MAX_PIECES];
static size_t count;

void staging_begin(struct staging *staging, size_t bytes)
{
    size_t free, total;
    *staging = (struct staging){.left = 0};
    if (bytes == 0 || driver()->cuMemAlloc_v2 == NULL || driver()->cuMemFree_v2 == NULL ||
        driver()->cuMemGetInfo_v2 == NULL || driver()->cuMemGetInfo_v2(&free, &total) != CUDA_SUCCESS)
        return;
    free -= free / 4;
    staging->left = bytes / STAGED_SHARE < free ? bytes / STAGED_SHARE : free;
}

static bool allocate(struct staging *staging)
{
    CUcontext context;
    CUdeviceptr address;
    bool allocated = false;
    pthread_mutex_lock(&taking);
    if (count < MAX_PIECES && driver()->cuCtxGetCurrent(&context) == CUDA_SUCCESS &&
        driver()->cuMemAlloc_v2(&address, STAGED_PIECE) == CUDA_SUCCESS) {
        pieces[count].context = context;
        pieces[count++].address = address;
        staging->next = address;
        staging->rest = STAGED_PIECE;
        allocated = true;
    }
    pthread_mutex_unlock(&taking);
    return allocated;
}

CUdeviceptr staging_take(struct staging *staging, size_t bytes)
{
    if (bytes > staging->rest) {
        if (staging->left < STAGED_PIECE || bytes > STAGED_PIECE || !allocate(staging))
            return 0;
        staging->left -= STAGED_PIECE;
    }
    CUdeviceptr taken = staging->next;
    staging->next += bytes;
    staging->rest -= bytes;
    return taken;
}

void staging_free(void)
{
    for (int attempt = 0; attempt < ATTEMPTS && count != 0; attempt++) {
        size_t left = 0;
        for (size_t at = 0; at < count; at++)
            if (driver()->cuCtxSetCurrent(pieces[at].context) != CUDA_SUCCESS ||
                driver()->cuMemFree_v2(pieces[at].address) != CUDA_SUCCESS)
                pieces[left++] = pieces[at];
        count = left;
    }
}
