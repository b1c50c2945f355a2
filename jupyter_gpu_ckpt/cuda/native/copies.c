#define _GNU_SOURCE
#include "copies.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "held_memory.h"
#include "host_memory.h"
#include "mappings.h"
#include "own_threads.h"
#include "page_digests.h"
#include "rwlock_release.h"
#include "seconds.h"
#include "slices.h"
#include "staging.h"
#include "zero_parts.h"

/* Bytes of one copy, and number of threads.  What limits the way out is how fast processors write what has crossed the
 * bus into files of tmpfs, for which a larger ring is slower: it leaves their cache.  Measured on H200s with 16 CPU
 * cores, seconds of 16 GiB out, on one machine: 2 MiB by 14 threads 0.343, by 12 0.345, by 16 0.350; 4 MiB by 12 0.341 to
 * 0.373; 1 MiB by 12 0.41; on another one: 4 MiB by 12 0.40, by 16 0.35 to 0.43; 8 MiB, or three buffers, 0.47 to 0.54.
 * Threads beyond 12 are for the other machine.  Two streams, or events that block instead of spin, are no faster. */
#define PART_BYTES ((size_t)2 << 20)
_Static_assert(PART_BYTES == DIGEST_PAGE, "what is known of a part is known of its page");
#define HUGE_PAGE ((size_t)2 << 20)
#define MAX_WORKERS 14 /* of one device */
/* Bytes of zeros that the device writes at a time: a call for each part takes longer than the work. */
#ifndef ZEROS_BYTES /* fewer, in tests */
#define ZEROS_BYTES ((size_t)1 << 30)
#endif
#define BUFFERS 2

/* Parts that are examined before the first one is copied, 256 MiB.  Each slice is twice as long as the one before, as
 * far as its lists have room in a scratch ring. */
#ifndef FIRST_SLICE /* fewer, in tests */
#define FIRST_SLICE ((size_t)128)
#endif
#define LONGEST_SLICE ((size_t)32768)
#define SAMPLES ((size_t)256) /* parts that are looked at before, to find out what a large memory holds */
#define SCRATCH_BYTES HUGE_PAGE
_Static_assert(LONGEST_SLICE * (sizeof(struct scanned) + sizeof(unsigned)) <= SCRATCH_BYTES, "for zeros");
_Static_assert(LONGEST_SLICE * (sizeof(struct digest) + sizeof(CUdeviceptr)) <= SCRATCH_BYTES, "for digests");

/* Pinned memory, BUFFERS of a part's size for each worker, which pins them itself, and the stream of all their copies,
 * which always has the next one queued when one ends.  Outlives a transfer only if the driver refuses to release it.
 * One for each context: all copy at the same time; and one for the examination meanwhile. */
#define MAX_CONTEXTS (4 * MAX_DEVICES)
static struct ring rings[MAX_CONTEXTS], scratch_rings[MAX_CONTEXTS];
static atomic_bool mirrored; /* since the last transfer */
static atomic_bool pending; /* copies may be running, because the driver did not say when they end */

/* -- distributing the work */

struct part {
    CUdeviceptr device;
    size_t offset; /* in host memory */
    size_t bytes;
    bool zero;  /* it holds only zeros, on the device or in host memory */
    bool hole;  /* on the way out: its file does not have these zeros yet */
    size_t zeros; /* on the way in, of the first of such parts that follow each other: the bytes of all; else 0 */
    bool known; /* it is there already: in host memory; or, on the way in, on the device */
    bool stages; /* on the way out, of a large memory: it may be copied to other device memory first (`staging.h`) */
    CUdeviceptr staged; /* to which it was copied so; or 0 */
    atomic_bool copied; /* on the way out: to host memory */
    atomic_bool ready;  /* on the way out: it is examined, and all above stays; on the way in: it has device memory */
    atomic_bool passed; /* on the way out: the memory that it is a part of does not need its device memory any more */
};

/* Moments of a transfer, in the order in which they are reported. */
enum { PREPARED, FIRST_EXAMINED, OPENED, EXAMINED, COPIED, CHECKED, CLOSED, MOMENTS };
static const char *const moment_names[MOMENTS] = {"prepared", "first_examined", "opened", "examined",
                                                  "copied",   "checked",        "closed"};

/* The copies of one context. */
struct work {
    CUcontext context;
    struct ring *ring, *scratch;
    struct part *parts;
    size_t count;
    bool outwards;
    bool keeps; /* host memory is written for more than once */
    bool checks; /* what was copied back is compared with what is known of it */
    bool mirrored; /* host memory may have everything: no memory is pinned before something is found that it lacks */
    bool scans; /* there is a scratch ring */
    bool has_zeros; /* on the way in */
    bool frees; /* each memory that has passed */
    size_t large; /* bytes of memory whose parts may be staged */
    struct staging staging;
    atomic_bool examined, has_copies; /* all parts are; one was found that has to be copied */
    pthread_t thread, threads[MAX_WORKERS];
    size_t most, begun; /* threads that copy */
    double moments[MOMENTS];
    atomic_size_t workers;
    atomic_size_t next;
    size_t stepped; /* parts whose memory a step was made on */
};
static _Atomic CUresult failed; /* the first error of any context: then no worker begins another part */

/* Of a swap out that has failed: the parts, of which some may be nowhere but where they are staged. */
static struct {
    struct part *parts;
    size_t bytes, count;
} left;

struct buffer {
    void *memory;
    CUevent copied;
    struct part *part; /* being copied; or NULL */
};

/* Threads wait here for parts, and for the first error. */
static pthread_mutex_t waiting = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

/* Wake them: it is set what they wait for. */
static void announce(void)
{
    pthread_mutex_lock(&waiting);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&waiting);
}

static void fail(CUresult result)
{
    CUresult none = CUDA_SUCCESS;
    if (result != CUDA_SUCCESS && atomic_compare_exchange_strong(&failed, &none, result))
        announce();
}

/* Wait until another thread has set this of a part; false after the first error of any. */
static bool wait_for(const atomic_bool *set)
{
    if (atomic_load(set))
        return true;
    pthread_mutex_lock(&waiting);
    while (!atomic_load(set) && atomic_load(&failed) == CUDA_SUCCESS)
        pthread_cond_wait(&changed, &waiting);
    pthread_mutex_unlock(&waiting);
    return atomic_load(set);
}

static void pass(struct part *part)
{
    atomic_store(&part->copied, true);
    atomic_store(&part->passed, true);
    announce();
}

/* One thread of a work. */
struct worker {
    struct work *work;
    size_t next, end; /* parts that it has claimed and not begun */
    struct buffer buffers[BUFFERS];
};

/* Parts that a thread claims at a time: an extent's size, so that few write to one file. */
#define RUN (EXTENT_BYTES / PART_BYTES)

/* Claim a part; NULL when none is left. */
static struct part *claim(struct worker *worker)
{
    struct work *work = worker->work;
    if (worker->next == worker->end) {
        worker->next = atomic_fetch_add(&work->next, RUN);
        worker->end = worker->next + RUN;
    }
    return worker->next < work->count ? &work->parts[worker->next++] : NULL;
}

/* Beside the copies, if the driver has given it a stream of its own. */
static CUstream stream_of_zeros(const struct ring *ring) { return ring->zeros != NULL ? ring->zeros : ring->stream; }

/* Whether a part needs no copy: host memory has it already, zeros in any case; or the device writes its zeros itself,
 * and with those of the first of several parts all of them.  It never trusts fresh memory to hold any. */
static bool is_done(const struct work *work, struct part *part)
{
    if (!part->zero || work->outwards)
        return part->zero || part->known;
    return part->zeros == 0 ||
           (driver()->cuMemsetD8Async != NULL &&
            driver()->cuMemsetD8Async(part->device, 0, part->zeros, stream_of_zeros(work->ring)) == CUDA_SUCCESS);
}

/* Copy zeros that the device does not write. */
static CUresult copy_zeros(const struct part *part, void *buffer, CUstream stream)
{
    CUresult result = CUDA_SUCCESS;
    memset(buffer, 0, PART_BYTES);
    for (size_t done = 0; done < part->zeros && result == CUDA_SUCCESS; done += PART_BYTES) {
        size_t rest = part->zeros - done, bytes = rest < PART_BYTES ? rest : PART_BYTES;
        result = driver()->cuMemcpyHtoDAsync_v2(part->device + done, buffer, bytes, stream);
    }
    return result;
}

static CUresult begin(struct worker *worker, struct buffer *buffer)
{
    CUstream stream = worker->work->ring->stream;
    struct part *part;
    do {
        part = claim(worker);
        if (part != NULL && !wait_for(&part->ready))
            return atomic_load(&failed);
    } while (part != NULL && is_done(worker->work, part));
    buffer->part = part;
    if (part == NULL)
        return CUDA_SUCCESS;
    CUresult result;
    if (worker->work->outwards)
        result = driver()->cuMemcpyDtoHAsync_v2(buffer->memory, part->device, part->bytes, stream);
    else if (part->zero)
        result = copy_zeros(part, buffer->memory, stream);
    else if ((result = host_memory_read(part->offset, buffer->memory, part->bytes)) == CUDA_SUCCESS)
        result = driver()->cuMemcpyHtoDAsync_v2(part->device, buffer->memory, part->bytes, stream);
    if (result == CUDA_SUCCESS)
        result = driver()->cuEventRecord(buffer->copied, stream);
    return result == CUDA_SUCCESS && worker->work->outwards ? host_memory_prefault(part->offset, part->bytes) : result;
}

static CUresult finish(const struct work *work, struct buffer *buffer)
{
    if (buffer->part == NULL)
        return CUDA_SUCCESS;
    CUresult result = driver()->cuEventSynchronize(buffer->copied);
    if (result == CUDA_SUCCESS && work->outwards)
        result = host_memory_write(buffer->part->offset, buffer->memory, buffer->part->bytes);
    if (result == CUDA_SUCCESS) {
        if (work->outwards)
            pass(buffer->part);
        buffer->part = NULL;
    }
    return result;
}

/* Map a ring's memory, none of which is pinned yet. */
static CUresult map_ring(struct ring *ring, CUcontext context, size_t bytes, size_t piece)
{
    ring->memory = map_huge_pages(bytes);
    ring->bytes = bytes;
    ring->piece = piece;
    ring->context = context;
    return ring->memory != NULL ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM; /* out of memory is the device */
}

/* Pin one piece.  Registered, not allocated by the driver: with huge pages that takes a third of the time. */
static CUresult pin(struct ring *ring, size_t number)
{
    char *memory = ring->memory + number * ring->piece;
    populate(memory, ring->piece);
    CUresult result = driver()->cuMemHostRegister_v2(memory, ring->piece,
                                                     CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
    if (result == CUDA_SUCCESS)
        atomic_fetch_or(&ring->pinned, 1u << number);
    return result;
}

static void *copy(void *argument)
{
    struct work *work = argument;
    const struct driver *cu = driver();
    struct worker worker = {.work = work};
    struct buffer *buffers = worker.buffers;
    own_thread_begin("gpu-ckpt-copy");
    CUresult result = cu->cuCtxSetCurrent(work->context);
    size_t number = atomic_fetch_add(&work->workers, 1);
    char *buffered = work->ring->memory + number * work->ring->piece;
    if (result == CUDA_SUCCESS)
        result = pin(work->ring, number);
    for (size_t at = 0; at < BUFFERS && result == CUDA_SUCCESS; at++) {
        buffers[at].memory = buffered + at * PART_BYTES;
        result = cu->cuEventCreate(&buffers[at].copied, CU_EVENT_DISABLE_TIMING);
        if (result == CUDA_SUCCESS)
            result = begin(&worker, &buffers[at]);
    }
    /* The CPU copies one buffer while the device copies the other. */
    for (size_t at = 0; result == CUDA_SUCCESS && buffers[at].part != NULL; at = (at + 1) % BUFFERS) {
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

CUresult ring_close(struct ring *ring)
{
    if (ring->memory == NULL)
        return CUDA_SUCCESS;
    CUresult result = driver()->cuCtxSetCurrent(ring->context);
    if (result == CUDA_SUCCESS && ring->stream != NULL) {
        result = driver()->cuStreamDestroy_v2(ring->stream);
        ring->stream = result == CUDA_SUCCESS ? NULL : ring->stream;
    }
    if (result == CUDA_SUCCESS && ring->zeros != NULL) {
        result = driver()->cuStreamDestroy_v2(ring->zeros);
        ring->zeros = result == CUDA_SUCCESS ? NULL : ring->zeros;
    }
    for (unsigned number = 0, left; result == CUDA_SUCCESS && (left = atomic_load(&ring->pinned)) != 0; number++)
        if (left & 1u << number) {
            result = driver()->cuMemHostUnregister(ring->memory + number * ring->piece);
            if (result == CUDA_SUCCESS)
                atomic_fetch_and(&ring->pinned, ~(1u << number));
        }
    if (result == CUDA_SUCCESS) {
        munmap(ring->memory, ring->bytes);
        ring->memory = NULL;
    }
    return result;
}

/* Close the rings of one context; not while copies may be running. */
static CUresult close_rings_of(struct work *work)
{
    if (atomic_load(&pending))
        return CUDA_ERROR_NOT_READY;
    CUresult scratch = ring_close(work->scratch), result = ring_close(work->ring);
    return result != CUDA_SUCCESS ? result : scratch;
}

/* Close all that an earlier transfer could not close. */
static CUresult close_rings(void)
{
    CUresult result = CUDA_SUCCESS;
    for (size_t at = 0; at < MAX_CONTEXTS; at++) {
        CUresult closed = close_rings_of(&(struct work){.ring = &rings[at], .scratch = &scratch_rings[at]});
        result = result != CUDA_SUCCESS ? result : closed;
    }
    return result;
}

CUresult ring_open(struct ring *ring, CUcontext context, size_t bytes)
{
    CUresult result = map_ring(ring, context, bytes, bytes);
    if (result != CUDA_SUCCESS)
        return result;
    result = pin(ring, 0);
    if (result != CUDA_SUCCESS) {
        munmap(ring->memory, ring->bytes);
        ring->memory = NULL;
        return result;
    }
    return driver()->cuStreamCreate(&ring->stream, CU_STREAM_NON_BLOCKING);
}

/* -- examining parts before they are copied */

/* Pages of host memory are noted by one thread at a time. */
static pthread_mutex_t noting = PTHREAD_MUTEX_INITIALIZER;

static CUresult wait_for_kernel(const struct work *work)
{
    CUresult result = driver()->cuStreamSynchronize(work->scratch->stream);
    if (result != CUDA_SUCCESS)
        atomic_store(&pending, true);
    return result;
}

static struct scanned scanned_of(const struct part *part)
{
    return (struct scanned){part->device, part->bytes / SCAN_BYTES * SCAN_BYTES};
}

/* Have the device look through what is listed in the scratch ring; what it finds is behind the list.  NULL: it does
 * not. */
static const unsigned *scan(const struct work *work, size_t count, CUresult *result)
{
    struct scanned *list = (struct scanned *)work->scratch->memory;
    unsigned *found = (unsigned *)(list + count);
    *result = CUDA_SUCCESS;
    for (size_t at = 0; at < count; at++)
        found[at] = OTHER_BYTES;
    if (!zero_parts_scan(work->context, work->scratch->stream, list, found, count))
        return NULL;
    *result = wait_for_kernel(work);
    return found;
}

/* Have the device find the parts that hold only zeros.  That their files have them takes longer, and is left for the end
 * (`make_holes`) where host memory has a note of it: then a way back does not read them. */
static CUresult find_zeros(const struct work *work, struct part *parts, size_t count)
{
    struct scanned *list = (struct scanned *)work->scratch->memory;
    CUresult result;
    if (!work->scans)
        return CUDA_SUCCESS;
    for (size_t at = 0; at < count; at++)
        list[at] = scanned_of(&parts[at]);
    const unsigned *found = scan(work, count, &result);
    if (found == NULL)
        return result;
    pthread_mutex_lock(&noting);
    for (size_t at = 0; at < count && result == CUDA_SUCCESS; at++) {
        struct part *part = &parts[at];
        part->zero = found[at] == ONLY_ZEROS && part->bytes % SCAN_BYTES == 0;
        if (!part->zero || host_memory_is_zero(part->offset, part->bytes))
            continue;
        part->hole = host_memory_note_zero(part->offset, part->bytes);
        if (!part->hole)
            result = host_memory_make_hole(part->offset, part->bytes);
    }
    pthread_mutex_unlock(&noting);
    return result;
}

/* Those that follow each other at once: each extent is opened once.  All, also after an error; the first one. */
static CUresult make_holes(const struct work *work)
{
    CUresult result = CUDA_SUCCESS;
    for (size_t at = 0, next; at < work->count; at = next) {
        const struct part *first = &work->parts[at], *part = first;
        size_t bytes = 0;
        for (; part < work->parts + work->count && part->hole && part->offset == first->offset + bytes; part++)
            bytes += part->bytes;
        next = bytes != 0 ? (size_t)(part - work->parts) : at + 1;
        if (bytes == 0)
            continue;
        pthread_mutex_lock(&noting);
        CUresult own = host_memory_make_hole(first->offset, bytes);
        pthread_mutex_unlock(&noting);
        result = result != CUDA_SUCCESS ? result : own;
    }
    return result;
}

static bool is_page(const struct part *part)
{
    return !part->zero && part->offset % DIGEST_PAGE == 0 && part->bytes == DIGEST_PAGE;
}

/* Have the device compute the digests of pages that hold other bytes than zeros: they are in the scratch ring, one
 * after the other.  Nothing writes to this memory any more before it is copied.  Without the kernel no page has one. */
static CUresult compute_digests(const struct work *work, const struct part *parts, size_t count,
                                struct digest **digests)
{
    struct digest *list = (struct digest *)work->scratch->memory;
    size_t number = 0;
    *digests = NULL;
    for (size_t at = 0; at < count; at++)
        number += is_page(&parts[at]);
    CUdeviceptr *pages = (CUdeviceptr *)(list + number);
    if (number == 0 || !work->scans)
        return CUDA_SUCCESS;
    memset(list, 0, number * sizeof *list);
    number = 0;
    for (size_t at = 0; at < count; at++)
        if (is_page(&parts[at]))
            pages[number++] = parts[at].device;
    if (!page_digests_compute(work->context, work->scratch->stream, pages, list, number))
        return CUDA_SUCCESS;
    *digests = list;
    return wait_for_kernel(work);
}

/* Find the pages whose content host memory has already, and note which it will have. */
static CUresult find_known(const struct work *work, struct part *parts, size_t count)
{
    struct digest *digests;
    CUresult result = compute_digests(work, parts, count, &digests);
    pthread_mutex_lock(&noting);
    for (size_t at = 0, number = 0; at < count && result == CUDA_SUCCESS; at++) {
        struct part *part = &parts[at];
        if (part->zero)
            continue;
        const struct digest *digest = digests != NULL && is_page(part) ? &digests[number++] : NULL;
        part->known = digest != NULL && host_memory_has(part->offset, digest);
        if (!part->known)
            host_memory_note(part->offset, digest);
    }
    pthread_mutex_unlock(&noting);
    return result;
}

/* Begin to stage, where a sample of large memory promises that all that it holds can be. */
static CUresult begin_staging(struct work *work)
{
    struct scanned *list = (struct scanned *)work->scratch->memory;
    size_t every = work->large / PART_BYTES / SAMPLES + 1, count = 0, seen = 0, others = 0;
    CUresult result;
    for (size_t at = 0; at < work->count; at++)
        if (work->parts[at].stages && seen++ % every == 0)
            list[count++] = scanned_of(&work->parts[at]);
    const unsigned *found = count != 0 ? scan(work, count, &result) : NULL;
    if (found == NULL)
        return CUDA_SUCCESS;
    for (size_t at = 0; at < count; at++)
        others += found[at] != ONLY_ZEROS;
    if (result == CUDA_SUCCESS)
        staging_begin(&work->staging, work->large, work->large / count * others);
    return result;
}

/* Take other memory of the device for what is to be copied of large memory, as long as there is some. */
static void take_staging(struct work *work, struct part *parts, size_t count)
{
    for (struct part *part = parts; part < parts + count && work->staging.left + work->staging.rest != 0; part++)
        if (part->stages && !part->zero && !part->known) {
            part->staged = staging_take(&work->staging, part->bytes);
            if (part->staged == 0)
                work->staging = (struct staging){.left = 0};
        }
}

/* Copy parts there, as many by one call as lie side by side at both ends, and have them copied from there to host
 * memory. */
static CUresult stage(struct work *work, struct part *parts, size_t count)
{
    struct part *end = parts + count, *next;
    bool any = false, copies = true;
    take_staging(work, parts, count);
    for (struct part *part = parts; part < end && copies; part = next) {
        size_t bytes = part->bytes;
        for (next = part + 1; part->staged != 0 && next < end && next->staged == part->staged + bytes &&
                              next->device == part->device + bytes; next++)
            bytes += next->bytes;
        if (part->staged == 0)
            continue;
        any = true;
        copies = driver()->cuMemcpyDtoDAsync_v2(part->staged, part->device, bytes, work->scratch->stream) == CUDA_SUCCESS;
    }
    CUresult result = any ? wait_for_kernel(work) : CUDA_SUCCESS;
    if (!copies)
        work->staging = (struct staging){.left = 0};
    for (struct part *part = parts; part < end; part++)
        if (part->staged != 0 && copies && result == CUDA_SUCCESS)
            part->device = part->staged;
        else
            part->staged = 0;
    return result;
}

static bool is_only_staged(const struct part *part) { return part->staged != 0 && !part->copied; }

/* Whether that is nowhere but where it is staged: host memory may have no file for it. */
static bool only_staged_has(size_t offset, size_t bytes)
{
    for (size_t at = 0; at < left.count; at++)
        if (left.parts[at].offset == offset && left.parts[at].bytes == bytes && is_only_staged(&left.parts[at]))
            return true;
    return false;
}

/* Copy what is nowhere else to the memory that it is a part of. */
static CUresult copy_staged_back(const struct work *work)
{
    CUresult result = CUDA_SUCCESS;
    struct copied each;
    if (left.count == 0)
        return CUDA_SUCCESS;
    for (size_t at = 0; copies_next(&at, &each);)
        for (size_t of = 0; each.context == work->context && of < left.count && result == CUDA_SUCCESS; of++) {
            const struct part *part = &left.parts[of];
            if (is_only_staged(part) && part->offset >= each.offset && part->offset - each.offset < each.bytes)
                result = driver()->cuMemcpyDtoDAsync_v2(each.address + (part->offset - each.offset), part->staged,
                                                        part->bytes, work->ring->stream);
        }
    CUresult ended = driver()->cuStreamSynchronize(work->ring->stream);
    return result != CUDA_SUCCESS ? result : ended;
}

void copies_end_staging(void)
{
    if (left.parts != NULL)
        munmap(left.parts, left.bytes);
    left.parts = NULL;
    left.count = 0;
    if (!copies_pending() || copies_wait() == CUDA_SUCCESS)
        staging_free();
}

/* The number of parts of the slice that begins with one: each slice is twice as long as the one before. */
static size_t slice(const struct work *work, size_t first, size_t before)
{
    size_t count = first == 0 ? FIRST_SLICE : 2 * before < LONGEST_SLICE ? 2 * before : LONGEST_SLICE;
    return count < work->count - first ? count : work->count - first;
}

/* Examine all parts of a work, slice by slice, while others already copy those of earlier slices.  Without a scratch ring
 * all are copied. */
static void *examine(void *argument)
{
    struct work *work = argument;
    own_thread_begin("gpu-ckpt-copy");
    CUresult result = driver()->cuCtxSetCurrent(work->context);
    if (result == CUDA_SUCCESS && work->scans) {
        zero_parts_load(work->context);
        if (work->keeps)
            page_digests_load(work->context);
        if (work->large != 0)
            result = begin_staging(work);
    }
    for (size_t first = 0, count = 0; first < work->count && result == CUDA_SUCCESS; first += count) {
        count = slice(work, first, count);
        struct part *parts = work->parts + first;
        result = find_zeros(work, parts, count);
        if (result == CUDA_SUCCESS && work->keeps)
            result = find_known(work, parts, count);
        if (result == CUDA_SUCCESS)
            result = stage(work, parts, count);
        for (size_t at = 0; at < count && result == CUDA_SUCCESS; at++) {
            if (!parts[at].zero && !parts[at].known)
                atomic_store(&work->has_copies, true);
            if (parts[at].zero || parts[at].known || parts[at].staged != 0)
                atomic_store(&parts[at].passed, true);
            atomic_store(&parts[at].ready, true);
        }
        announce();
        work->moments[EXAMINED] = now();
        if (first == 0)
            work->moments[FIRST_EXAMINED] = work->moments[EXAMINED];
        if (atomic_load(&failed) != CUDA_SUCCESS)
            break;
    }
    fail(result);
    atomic_store(&work->examined, true);
    announce();
    fail(make_holes(work)); /* after a failure, too: what was freed may be nowhere else for a while */
    return NULL;
}

/* Whether parts on the device are what is known of them in host memory.  Zeros came from no file. */
static CUresult compare(const struct work *work, const struct part *parts, size_t count)
{
    struct digest *digests;
    CUresult result = compute_digests(work, parts, count, &digests);
    for (size_t at = 0, number = 0; at < count && result == CUDA_SUCCESS; at++)
        if (!parts[at].zero && (digests == NULL || !is_page(&parts[at]) ||
                                !host_memory_has(parts[at].offset, &digests[number++])))
            return CUDA_ERROR_ILLEGAL_STATE;
    return result;
}

/* Compare all parts of a work after they were copied back. */
static CUresult check(struct work *work)
{
    CUresult result = ring_open(work->scratch, work->context, SCRATCH_BYTES);
    if (result != CUDA_SUCCESS)
        return result;
    work->scans = true;
    page_digests_load(work->context);
    for (size_t first = 0, count = 0; first < work->count && result == CUDA_SUCCESS; first += count) {
        count = slice(work, first, count);
        result = compare(work, work->parts + first, count);
    }
    work->moments[CHECKED] = now();
    return result;
}

/* -- one context */

/* Before this context's threads pin memory, for which the driver and Linux would have it wait. */
static void open_scratch(struct work *work)
{
    work->scans = driver()->cuCtxSetCurrent(work->context) == CUDA_SUCCESS &&
                  ring_open(work->scratch, work->context, SCRATCH_BYTES) == CUDA_SUCCESS;
}

/* Wait until a part is found that has to be copied; false where all are examined, and there is none. */
static bool wait_for_copies(struct work *work)
{
    pthread_mutex_lock(&waiting);
    while (!atomic_load(&work->has_copies) && !atomic_load(&work->examined))
        pthread_cond_wait(&changed, &waiting);
    pthread_mutex_unlock(&waiting);
    return atomic_load(&work->has_copies) || atomic_load(&failed) != CUDA_SUCCESS;
}

/* Threads begin last, each of which pins its part of the ring: beside them a stream is there 0.007 to 0.012 s after the
 * begin, before them after 0.003 s (H200s). */
static CUresult open_and_copy(struct work *work)
{
    CUresult result = driver()->cuCtxSetCurrent(work->context);
    if (result == CUDA_SUCCESS)
        result = map_ring(work->ring, work->context, work->most * BUFFERS * PART_BYTES, BUFFERS * PART_BYTES);
    if (result == CUDA_SUCCESS)
        result = driver()->cuStreamCreate(&work->ring->stream, CU_STREAM_NON_BLOCKING);
    if (result != CUDA_SUCCESS)
        return result;
    if (work->has_zeros && driver()->cuStreamCreate(&work->ring->zeros, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS)
        work->ring->zeros = NULL;
    work->moments[OPENED] = now();
    while (work->begun < work->most && pthread_create(&work->threads[work->begun], NULL, copy, work) == 0)
        work->begun++;
    return work->begun != 0 ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

/* Wait for the threads and for the stream.  If the driver does not say that the copies have ended, the ring is kept. */
static CUresult end(struct work *work)
{
    for (size_t thread = 0; thread < work->begun; thread++)
        pthread_join(work->threads[thread], NULL);
    work->moments[COPIED] = now();
    if (work->ring->stream == NULL)
        return CUDA_SUCCESS;
    CUresult result = driver()->cuCtxSetCurrent(work->context);
    if (result == CUDA_SUCCESS)
        result = driver()->cuStreamSynchronize(work->ring->stream);
    if (result == CUDA_SUCCESS && work->ring->zeros != NULL)
        result = driver()->cuStreamSynchronize(work->ring->zeros);
    if (result == CUDA_SUCCESS && !work->outwards && atomic_load(&failed) == CUDA_SUCCESS)
        result = copy_staged_back(work); /* all memory is there */
    if (result != CUDA_SUCCESS)
        atomic_store(&pending, true);
    return result;
}

/* All of one work, but for steps. */
static void *perform(void *argument)
{
    struct work *work = argument;
    pthread_t examining;
    own_thread_begin("gpu-ckpt-copy");
    if (work->outwards)
        open_scratch(work);
    bool beside = work->outwards && pthread_create(&examining, NULL, examine, work) == 0;
    if (work->outwards && !beside)
        examine(work);
    if (!work->mirrored || wait_for_copies(work))
        fail(open_and_copy(work));
    fail(end(work));
    if (beside)
        pthread_join(examining, NULL);
    if (work->checks && atomic_load(&failed) == CUDA_SUCCESS)
        fail(check(work));
    fail(close_rings_of(work));
    work->moments[CLOSED] = now();
    return NULL;
}

bool copies_next(size_t *at, struct copied *next)
{
    size_t slots;
    struct allocation *table = allocations_table(&slots);
    for (; *at < slots; (*at)++) {
        const struct allocation *each = &table[*at];
        if (each->address != 0 && each->offset != NOT_COPIED) {
            *next = (struct copied){each->context, each->address, each->bytes, each->offset};
            (*at)++;
            return true;
        }
    }
    size_t mapped = *at - slots;
    bool found = mappings_copied(&mapped, next);
    *at = slots + mapped;
    return found;
}

static size_t parts_of(const struct copied *each) { return (each->bytes + PART_BYTES - 1) / PART_BYTES; }

/* Make one work for each context that has memory to copy, and count its parts; the number of works, or SIZE_MAX: too
 * many. */
static size_t divide(struct work *works)
{
    size_t count = 0;
    struct copied each;
    for (size_t at = 0; copies_next(&at, &each);) {
        size_t which = 0;
        while (which < count && works[which].context != each.context)
            which++;
        if (which == MAX_CONTEXTS)
            return SIZE_MAX;
        if (which == count) {
            works[which] =
                (struct work){.context = each.context, .ring = &rings[which], .scratch = &scratch_rings[which]};
            count++;
        }
        works[which].count += parts_of(&each);
    }
    return count;
}

/* Have the first of parts of zeros that follow each other stand for all; in a memory whose parts begin at ``first``. */
static void join_zeros(struct work *work, size_t first, size_t count)
{
    struct part *head = NULL;
    for (struct part *part = work->parts + first; part < work->parts + count; part++) {
        if (!part->zero || (head != NULL && head->zeros >= ZEROS_BYTES))
            head = NULL;
        if (part->zero) {
            head = head != NULL ? head : part;
            head->zeros += part->bytes;
            work->has_zeros = true;
        }
    }
}

static void list_parts(struct work *work)
{
    size_t count = 0;
    struct copied each;
    for (size_t at = 0; copies_next(&at, &each);)
        if (each.context == work->context) {
            size_t first = count;
            bool stages = work->frees && each.bytes >= STAGED_LEAST;
            work->large += stages ? each.bytes : 0;
            for (size_t offset = 0; offset < each.bytes; offset += PART_BYTES) {
                size_t rest = each.bytes - offset, bytes = rest < PART_BYTES ? rest : PART_BYTES;
                bool zero = !work->outwards && host_memory_is_zero(each.offset + offset, bytes);
                bool known = !work->outwards &&
                             (held_memory_is_back(at - 1) || only_staged_has(each.offset + offset, bytes));
                work->parts[count++] = (struct part){.device = each.address + offset,
                                                     .offset = each.offset + offset,
                                                     .bytes = bytes,
                                                     .stages = stages,
                                                     .zero = zero && !known,
                                                     .known = known};
            }
            join_zeros(work, first, count);
        }
}

/* Free the memory in which parts were staged, as they are copied. */
static void free_staged(const struct work *works, size_t count)
{
    for (size_t at = 0; at < count; at++) {
        CUdeviceptr last = 0;
        for (struct part *part = works[at].parts; part < works[at].parts + works[at].count; part++) {
            if (part->staged == 0)
                continue;
            if (last != 0 && !staging_is_one_piece(last, part->staged))
                staging_free_piece(last);
            last = part->staged;
            if (!wait_for(&part->copied))
                return;
        }
        if (last != 0)
            staging_free_piece(last);
    }
}

/* Make the step on each memory, until an error of whichever thread. */
static CUresult make_steps(struct work *works, bool outwards, CUresult (*step)(size_t number))
{
    struct copied each;
    CUresult result = atomic_load(&failed);
    for (size_t at = 0; result == CUDA_SUCCESS && copies_next(&at, &each);) {
        struct work *work = works;
        while (work->context != each.context)
            work++;
        struct part *parts = work->parts + work->stepped;
        size_t count = parts_of(&each);
        work->stepped += count;
        for (size_t part = 0; outwards && part < count; part++)
            if (!wait_for(&parts[part].passed))
                return atomic_load(&failed);
        result = driver()->cuCtxSetCurrent(each.context);
        if (result == CUDA_SUCCESS)
            result = step(at - 1);
        for (size_t part = 0; !outwards && result == CUDA_SUCCESS && part < count; part++)
            atomic_store(&parts[part].ready, true);
        announce();
    }
    return result;
}

static double moments[MOMENTS]; /* of the last transfer */

/* The latest of all contexts. */
static void note_moments(const struct work *work)
{
    for (size_t at = 0; at < MOMENTS; at++)
        moments[at] = work->moments[at] > moments[at] ? work->moments[at] : moments[at];
}

/* Threads for so many parts: no more than have a run of them, so that a ring for few is small. */
static size_t number_of_workers(size_t parts, size_t share)
{
    size_t runs = (parts + RUN - 1) / RUN;
    share = share > MAX_WORKERS ? MAX_WORKERS : share == 0 ? 1 : share;
    return runs < share ? runs : share;
}

/* All contexts at the same time: each device has a bus of its own to the host.  ``step``: or NULL. */
static CUresult run_all(bool outwards, bool keeps, bool checks, CUresult (*step)(size_t number))
{
    static struct work works[MAX_CONTEXTS];
    moments[PREPARED] = now();
    size_t count = divide(works), total = 0, begun = 0;
    if (count == 0)
        return CUDA_SUCCESS;
    if (count == SIZE_MAX)
        return CUDA_ERROR_NOT_SUPPORTED;
    for (size_t at = 0; at < count; at++)
        total += works[at].count;
    CUresult result = close_rings();
    if (result == CUDA_SUCCESS)
        result = host_memory_open();
    if (result != CUDA_SUCCESS)
        return result;
    size_t bytes = total * sizeof(struct part);
    struct part *parts = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (parts == MAP_FAILED) {
        host_memory_close();
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    size_t share = processors() / count;
    bool little = atomic_exchange(&mirrored, false) && outwards;
    atomic_store(&failed, CUDA_SUCCESS);
    struct part *next = parts;
    for (size_t at = 0; at < count; at++) {
        works[at].outwards = outwards;
        works[at].keeps = keeps;
        works[at].checks = checks;
        works[at].frees = outwards && step != NULL;
        works[at].mirrored = little;
        works[at].most = number_of_workers(works[at].count, share);
        works[at].parts = next;
        next += works[at].count;
        list_parts(&works[at]);
        if (begun == at && pthread_create(&works[at].thread, NULL, perform, &works[at]) == 0)
            begun++;
    }
    fail(begun == count ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM);
    if (step != NULL)
        fail(make_steps(works, outwards, step));
    if (step != NULL && outwards && atomic_load(&failed) == CUDA_SUCCESS)
        free_staged(works, count);
    for (size_t at = 0; at < begun; at++) {
        pthread_join(works[at].thread, NULL);
        note_moments(&works[at]);
    }
    host_memory_close();
    result = atomic_load(&failed);
    bool any_staged = false;
    for (size_t at = 0; at < total && outwards && step != NULL && result != CUDA_SUCCESS && !any_staged; at++)
        any_staged = is_only_staged(&parts[at]);
    if (any_staged) {
        left.parts = parts;
        left.bytes = bytes;
        left.count = total;
    } else
        munmap(parts, bytes);
    return result;
}

CUresult copies_run_out(bool keeps, CUresult (*step)(size_t number)) { return run_all(true, keeps, false, step); }
CUresult copies_run_in(CUresult (*step)(size_t number)) { return run_all(false, false, false, step); }
CUresult copies_run_in_checked(CUresult (*step)(size_t number)) { return run_all(false, false, true, step); }

void copies_report(double began, char *text, size_t size)
{
    size_t length = 0;
    text[0] = '\0';
    for (size_t at = 0; at < MOMENTS && length < size; at++)
        if (moments[at] > began)
            length += (size_t)snprintf(text + length, size - length, "%s\"%s\": %.6f", length != 0 ? ", " : "",
                                       moment_names[at], moments[at] - began);
}

void copies_note_mirrored(void) { atomic_store(&mirrored, true); }

bool copies_pending(void) { return atomic_load(&pending); }

static size_t add_context(CUcontext *contexts, size_t count, CUcontext context)
{
    for (size_t at = 0; at < count; at++)
        if (contexts[at] == context)
            return count;
    if (count < MAX_CONTEXTS)
        contexts[count] = context;
    return count + 1;
}

/* List the contexts that have memory; their number, or SIZE_MAX: too many. */
static size_t with_memory(CUcontext *contexts)
{
    size_t slots, count = 0;
    struct allocation *table = allocations_table(&slots);
    for (size_t at = 0; at < slots && count <= MAX_CONTEXTS; at++)
        if (table[at].address != 0 && table[at].context != NULL)
            count = add_context(contexts, count, table[at].context);
    for (CUdevice device = 0; device < MAX_DEVICES && count <= MAX_CONTEXTS; device++)
        if (mappings_context(device) != NULL)
            count = add_context(contexts, count, mappings_context(device));
    return count <= MAX_CONTEXTS ? count : SIZE_MAX;
}

CUresult copies_wait(void)
{
    CUcontext contexts[MAX_CONTEXTS];
    size_t count = with_memory(contexts);
    CUresult result = count == SIZE_MAX ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
    for (size_t at = 0; at < count && result == CUDA_SUCCESS; at++) {
        result = driver()->cuCtxSetCurrent(contexts[at]);
        if (result == CUDA_SUCCESS)
            result = driver()->cuCtxSynchronize();
    }
    if (result == CUDA_SUCCESS)
        atomic_store(&pending, false);
    return result;
}

static struct {
    CUcontext contexts[MAX_CONTEXTS];
    size_t count;
    bool keeps;
} dry_run;

static CUresult scan_nothing(const struct ring *ring)
{
    void *memory = ring->memory;
    zero_parts_load(ring->context);
    bool scans = zero_parts_scan(ring->context, ring->stream, memory, memory, 0);
    if (dry_run.keeps) {
        page_digests_load(ring->context);
        scans = page_digests_compute(ring->context, ring->stream, memory, memory, 0) || scans;
    }
    return scans ? driver()->cuStreamSynchronize(ring->stream) : CUDA_SUCCESS;
}

/* Uses a list of its own: it may still be running when the table has changed. */
static CUresult run_dry(void)
{
    CUresult result = close_rings();
    for (size_t at = 0; at < dry_run.count && result == CUDA_SUCCESS; at++) {
        CUevent event = NULL;
        result = driver()->cuCtxSetCurrent(dry_run.contexts[at]);
        if (result == CUDA_SUCCESS)
            result = ring_open(&rings[0], dry_run.contexts[at], HUGE_PAGE);
        if (result == CUDA_SUCCESS)
            result = scan_nothing(&rings[0]);
        if (result == CUDA_SUCCESS)
            result = driver()->cuEventCreate(&event, CU_EVENT_DISABLE_TIMING);
        if (event != NULL)
            result = driver()->cuEventDestroy_v2(event);
        CUresult closed = ring_close(&rings[0]);
        result = result != CUDA_SUCCESS ? result : closed;
    }
    return result;
}

CUresult copies_dry_run(bool keeps)
{
    dry_run.keeps = keeps;
    if (atomic_load(&pending)) /* the steps wait for those first */
        return CUDA_SUCCESS;
    if (rwlock_probe_is_busy())
        return CUDA_ERROR_NOT_READY;
    dry_run.count = with_memory(dry_run.contexts);
    if (dry_run.count == SIZE_MAX)
        return CUDA_ERROR_NOT_SUPPORTED;
    return dry_run.count != 0 ? rwlock_release(run_dry) : CUDA_SUCCESS;
}
