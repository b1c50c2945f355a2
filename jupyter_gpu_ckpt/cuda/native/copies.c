#define _GNU_SOURCE
#include "copies.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>

#include "arena.h"
#include "door.h"

/* Bytes of one copy, and how many threads.  Measured on an H200 with 16 CPU cores, files of tmpfs, GB/s out and back: 4 MiB
 * by 12 threads 51 and 51, which is what the bus does; 2 MiB 50 and 51, 1 MiB by three buffers a thread 48 and 48; 8
 * threads 44 and 46, 16 threads 49 and 50.  By a stream for each buffer instead of one for all 49 and 49. */
#define CHUNK ((size_t)4 << 20)
#define HUGE_PAGE ((size_t)2 << 20)
#define MOST_WORKERS 12 /* of one device */
#define BUFFERS 2

/* Pinned memory, BUFFERS of a chunk's size for each worker, and the stream of all their copies: the next one is there when
 * one ends.  Outlives a transfer only where the driver keeps it. */
struct ring {
    char *memory;
    size_t bytes;
    CUcontext context;
    CUstream stream;
};
/* One for each context that copies, at the same time. */
#define MOST_CONTEXTS (4 * MOST_DEVICES)
static struct ring rings[MOST_CONTEXTS];
static atomic_bool under_way; /* copies may be, because the driver would not say when they end */

/* -- who copies what */

struct chunk {
    CUdeviceptr device;
    size_t offset; /* in the arena */
    size_t bytes;
};

/* What is copied in one context. */
struct work {
    CUcontext context;
    struct ring *ring;
    struct chunk *chunks;
    size_t count;
    bool outwards;
    pthread_t threads[MOST_WORKERS];
    size_t begun;
    atomic_size_t workers;
    atomic_size_t next;
};
static _Atomic CUresult failed; /* what went wrong first, in whichever context: then nobody begins another chunk */

struct buffer {
    void *memory;
    CUevent copied;
    const struct chunk *chunk; /* under way */
};

static void fail(CUresult result)
{
    CUresult none = CUDA_SUCCESS;
    if (result != CUDA_SUCCESS)
        atomic_compare_exchange_strong(&failed, &none, result);
}

/* One worker's part of the work. */
struct worker {
    struct work *work;
    size_t next, end; /* what it has taken of the chunks, and not begun */
    struct buffer buffers[BUFFERS];
};

/* By runs of the size of a file of the arena, so that few write to one at the same time; NULL when all are taken. */
static const struct chunk *take(struct worker *worker)
{
    struct work *work = worker->work;
    size_t run = ARENA_CHUNK / CHUNK;
    if (worker->next == worker->end) {
        worker->next = atomic_fetch_add(&work->next, run);
        worker->end = worker->next + run;
    }
    return worker->next < work->count ? &work->chunks[worker->next++] : NULL;
}

static CUresult begin(struct worker *worker, struct buffer *buffer)
{
    CUstream stream = worker->work->ring->stream;
    const struct chunk *chunk = buffer->chunk = take(worker);
    if (chunk == NULL)
        return CUDA_SUCCESS;
    CUresult result;
    if (worker->work->outwards)
        result = driver()->cuMemcpyDtoHAsync_v2(buffer->memory, chunk->device, chunk->bytes, stream);
    else if ((result = arena_get(chunk->offset, buffer->memory, chunk->bytes)) == CUDA_SUCCESS)
        result = driver()->cuMemcpyHtoDAsync_v2(chunk->device, buffer->memory, chunk->bytes, stream);
    if (result == CUDA_SUCCESS)
        result = driver()->cuEventRecord(buffer->copied, stream);
    return result == CUDA_SUCCESS && worker->work->outwards ? arena_expect(chunk->offset, chunk->bytes) : result;
}

static CUresult finish(const struct work *work, struct buffer *buffer)
{
    if (buffer->chunk == NULL)
        return CUDA_SUCCESS;
    CUresult result = driver()->cuEventSynchronize(buffer->copied);
    if (result == CUDA_SUCCESS && work->outwards)
        result = arena_put(buffer->chunk->offset, buffer->memory, buffer->chunk->bytes);
    if (result == CUDA_SUCCESS)
        buffer->chunk = NULL;
    return result;
}

static void *copy(void *argument)
{
    struct work *work = argument;
    const struct driver *cu = driver();
    struct worker worker = {.work = work};
    struct buffer *buffers = worker.buffers;
    pthread_setname_np(pthread_self(), "gpu-ckpt-copy");
    CUresult result = cu->cuCtxSetCurrent(work->context);
    char *buffered = work->ring->memory + atomic_fetch_add(&work->workers, 1) * CHUNK * BUFFERS;
    for (size_t at = 0; at < BUFFERS && result == CUDA_SUCCESS; at++) {
        buffers[at].memory = buffered + at * CHUNK;
        result = cu->cuEventCreate(&buffers[at].copied, CU_EVENT_DISABLE_TIMING);
        if (result == CUDA_SUCCESS)
            result = begin(&worker, &buffers[at]);
    }
    /* One buffer is copied by the CPU while the other is under way. */
    for (size_t at = 0; result == CUDA_SUCCESS && buffers[at].chunk != NULL; at = (at + 1) % BUFFERS) {
        result = finish(work, &buffers[at]);
        if (result == CUDA_SUCCESS)
            result = atomic_load(&failed);
        if (result == CUDA_SUCCESS)
            result = begin(&worker, &buffers[at]);
    }
    fail(result);
    for (size_t at = 0; at < BUFFERS; at++)
        if (buffers[at].copied != NULL)
            cu->cuEventDestroy_v2(buffers[at].copied);
    return NULL;
}

static size_t processors(void)
{
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0)
        return 1;
    return (size_t)CPU_COUNT(&allowed);
}

static CUresult close_ring(struct ring *ring)
{
    if (ring->memory == NULL)
        return CUDA_SUCCESS;
    CUresult result = driver()->cuCtxSetCurrent(ring->context);
    if (result == CUDA_SUCCESS && ring->stream != NULL) {
        result = driver()->cuStreamDestroy_v2(ring->stream);
        ring->stream = result == CUDA_SUCCESS ? NULL : ring->stream;
    }
    if (result == CUDA_SUCCESS)
        result = driver()->cuMemHostUnregister(ring->memory);
    if (result == CUDA_SUCCESS) {
        munmap(ring->memory, ring->bytes);
        ring->memory = NULL;
    }
    return result;
}

/* All there are, also those that an earlier transfer could not close; not while copies may be under way. */
static CUresult close_rings(void)
{
    if (atomic_load(&under_way))
        return CUDA_ERROR_NOT_READY;
    CUresult result = CUDA_SUCCESS;
    for (size_t at = 0; at < MOST_CONTEXTS; at++) {
        CUresult now = close_ring(&rings[at]);
        if (result == CUDA_SUCCESS)
            result = now;
    }
    return result;
}

static CUresult open_ring(struct ring *ring, CUcontext context, size_t bytes)
{
    ring->memory = huge(bytes);
    if (ring->memory == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    ring->bytes = bytes;
    ring->context = context;
    /* Registered, not allocated by the driver: of huge pages that takes a third of the time. */
    CUresult result = driver()->cuMemHostRegister_v2(ring->memory, ring->bytes, CU_MEMHOSTREGISTER_PORTABLE);
    if (result != CUDA_SUCCESS) {
        munmap(ring->memory, ring->bytes);
        ring->memory = NULL;
        return result;
    }
    return driver()->cuStreamCreate(&ring->stream, CU_STREAM_NON_BLOCKING);
}

static void start(struct work *work, size_t workers)
{
    CUresult result = driver()->cuCtxSetCurrent(work->context);
    if (result == CUDA_SUCCESS)
        result = open_ring(work->ring, work->context, workers * BUFFERS * CHUNK);
    while (result == CUDA_SUCCESS && work->begun < workers &&
           pthread_create(&work->threads[work->begun], NULL, copy, work) == 0)
        work->begun++;
    if (result == CUDA_SUCCESS && work->begun == 0)
        result = CUDA_ERROR_OUT_OF_MEMORY;
    fail(result);
}

/* Wait for all of it.  What may be under way after, because the driver would not say, keeps the ring. */
static void end(struct work *work)
{
    for (size_t thread = 0; thread < work->begun; thread++)
        pthread_join(work->threads[thread], NULL);
    if (work->begun == 0)
        return;
    CUresult result = driver()->cuCtxSetCurrent(work->context);
    if (result == CUDA_SUCCESS)
        result = driver()->cuStreamSynchronize(work->ring->stream);
    if (result != CUDA_SUCCESS)
        atomic_store(&under_way, true);
    fail(result);
}

static bool is_copied(const struct block *block) { return block->address != 0 && block->offset != NOT_COPIED; }

static size_t chunks_of(const struct block *block) { return (block->bytes + CHUNK - 1) / CHUNK; }

/* One work for each context that has copied blocks, and how many chunks it has; the works, or SIZE_MAX: too many. */
static size_t divide(struct work *works)
{
    size_t slots, count = 0;
    struct block *table = blocks_table(&slots);
    for (size_t at = 0; at < slots; at++) {
        if (!is_copied(&table[at]))
            continue;
        size_t which = 0;
        while (which < count && works[which].context != table[at].context)
            which++;
        if (which == MOST_CONTEXTS)
            return SIZE_MAX;
        if (which == count) {
            works[which] = (struct work){.context = table[at].context, .ring = &rings[which]};
            count++;
        }
        works[which].count += chunks_of(&table[at]);
    }
    return count;
}

static void fill_in(struct work *work)
{
    size_t slots, count = 0;
    struct block *table = blocks_table(&slots);
    for (size_t at = 0; at < slots; at++)
        if (is_copied(&table[at]) && table[at].context == work->context)
            for (size_t offset = 0; offset < table[at].bytes; offset += CHUNK) {
                size_t rest = table[at].bytes - offset;
                work->chunks[count++] = (struct chunk){table[at].address + offset, table[at].offset + offset,
                                                       rest < CHUNK ? rest : CHUNK};
            }
}

/* The contexts at the same time, for each device has a way to the host of its own. */
CUresult copies_make(bool outwards)
{
    static struct work works[MOST_CONTEXTS];
    size_t count = divide(works), most = 0;
    if (count == 0)
        return CUDA_SUCCESS;
    if (count == SIZE_MAX)
        return CUDA_ERROR_NOT_SUPPORTED;
    for (size_t at = 0; at < count; at++)
        most += works[at].count;
    CUresult result = close_rings();
    if (result == CUDA_SUCCESS)
        result = arena_open();
    if (result != CUDA_SUCCESS)
        return result;
    size_t bytes = most * sizeof(struct chunk);
    struct chunk *chunks = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (chunks == MAP_FAILED) {
        arena_close();
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    size_t workers = processors() / count;
    workers = workers > MOST_WORKERS ? MOST_WORKERS : workers == 0 ? 1 : workers;
    atomic_store(&failed, CUDA_SUCCESS);
    struct chunk *next = chunks;
    for (size_t at = 0; at < count; at++) {
        works[at].outwards = outwards;
        works[at].chunks = next;
        next += works[at].count;
        fill_in(&works[at]);
        start(&works[at], workers);
    }
    for (size_t at = 0; at < count; at++)
        end(&works[at]);
    fail(close_rings());
    arena_close();
    munmap(chunks, bytes);
    return atomic_load(&failed);
}

bool copies_under_way(void) { return atomic_load(&under_way); }

/* The contexts that have blocks; how many, or SIZE_MAX: too many. */
static size_t with_blocks(CUcontext *contexts)
{
    size_t slots, count = 0;
    struct block *table = blocks_table(&slots);
    for (size_t at = 0; at < slots; at++) {
        size_t which = 0;
        while (which < count && contexts[which] != table[at].context)
            which++;
        if (table[at].address == 0 || which < count)
            continue;
        if (count == MOST_CONTEXTS)
            return SIZE_MAX;
        contexts[count++] = table[at].context;
    }
    return count;
}

CUresult copies_wait(void)
{
    CUcontext contexts[MOST_CONTEXTS];
    size_t count = with_blocks(contexts);
    CUresult result = count == SIZE_MAX ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
    for (size_t at = 0; at < count && result == CUDA_SUCCESS; at++) {
        result = driver()->cuCtxSetCurrent(contexts[at]);
        if (result == CUDA_SUCCESS)
            result = driver()->cuCtxSynchronize();
    }
    if (result == CUDA_SUCCESS)
        atomic_store(&under_way, false);
    return result;
}

static struct {
    CUcontext contexts[MOST_CONTEXTS];
    size_t count;
} rehearsal;

/* By itself: it may still be at it when the table is another. */
static CUresult rehearse(void)
{
    CUresult result = close_rings();
    for (size_t at = 0; at < rehearsal.count && result == CUDA_SUCCESS; at++) {
        CUevent event = NULL;
        result = driver()->cuCtxSetCurrent(rehearsal.contexts[at]);
        if (result == CUDA_SUCCESS)
            result = open_ring(&rings[0], rehearsal.contexts[at], HUGE_PAGE);
        if (result == CUDA_SUCCESS)
            result = driver()->cuEventCreate(&event, CU_EVENT_DISABLE_TIMING);
        if (event != NULL)
            result = driver()->cuEventDestroy_v2(event);
        CUresult closed = close_ring(&rings[0]);
        result = result != CUDA_SUCCESS ? result : closed;
    }
    return result;
}

CUresult copies_rehearse(void)
{
    if (atomic_load(&under_way)) /* the steps wait for those first */
        return CUDA_SUCCESS;
    if (door_is_busy())
        return CUDA_ERROR_NOT_READY;
    rehearsal.count = with_blocks(rehearsal.contexts);
    if (rehearsal.count == SIZE_MAX)
        return CUDA_ERROR_NOT_SUPPORTED;
    return rehearsal.count != 0 ? door_open(rehearse) : CUDA_SUCCESS;
}
