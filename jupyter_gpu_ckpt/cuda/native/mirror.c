#define _GNU_SOURCE
#include "mirror.h"

#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "allocations.h"
#include "copies.h"
#include "host_memory.h"
#include "launch_gate.h"
#include "page_digests.h"
#include "published.h"
#include "seconds.h"
#include "swap.h"
#include "table_lock.h"
#include "zero_parts.h"

/* Pages of a step: at 25 GB/s from and to the device and 4 GB/s into files they take five milliseconds. */
#define PAGES 8
#define RELAXED 2 /* CU_STREAM_CAPTURE_MODE_RELAXED: our calls end no capture of the program */
#define MEMORY_INTERVAL 0.25

struct page {
    CUdeviceptr address;
    size_t offset;
};

/* Behind the pages in a ring, for the kernels. */
struct results {
    struct digest digests[PAGES];
    struct scanned parts[PAGES];
    CUdeviceptr pages[PAGES];
    unsigned zeros[PAGES];
};

static atomic_int running, forbidden;
static struct copied *list;
static size_t count, next, next_page; /* of the list, and of that memory */
static struct ring ring;
static double checked_at; /* seconds of CLOCK_MONOTONIC */

bool mirror_runs(void) { return atomic_load(&running) != 0; }

void mirror_in_child(void)
{
    running = forbidden = gpu_ckpt_published.mirrored = 0;
    ring.memory = NULL;
    list = NULL;
}

static void close_used_ring(void)
{
    if (ring.memory != NULL)
        ring_close(&ring);
}

static void stop(void)
{
    close_used_ring();
    swap_free_places(list, count);
    list = NULL;
    atomic_store(&running, 0);
    syscall(SYS_futex, &running, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

void mirror_end(void)
{
    atomic_store(&gpu_ckpt_published.mirrored, 0);
    launch_gate_watch(false);
    if (mirror_runs())
        stop();
}

void mirror_forbid(bool forbids)
{
    atomic_fetch_add(&forbidden, forbids ? 1 : -1);
    while (forbids && atomic_load(&running) != 0)
        syscall(SYS_futex, &running, FUTEX_WAIT_PRIVATE, 1, NULL, NULL, 0);
}

static void forbid_at_exit(void) { mirror_forbid(true); }

CUresult mirror_begin(void)
{
    static bool registered;
    int mode = RELAXED;
    if (mirror_runs())
        return CUDA_SUCCESS;
    if (driver() == NULL || driver()->cuThreadExchangeStreamCaptureMode == NULL)
        return CUDA_ERROR_NOT_SUPPORTED;
    mirror_end(); /* one that is complete */
    registered = registered || atexit(forbid_at_exit) == 0;
    atomic_store(&running, 1);
    if (registered && atomic_load(&forbidden) == 0 && launch_gate_watch(true))
        list = swap_places(&count);
    next = next_page = 0;
    checked_at = now();
    if (list == NULL || driver()->cuThreadExchangeStreamCaptureMode(&mode) != CUDA_SUCCESS) {
        mirror_end();
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}

/* -- one step */

static bool is_undisturbed(void) { return launch_gate_is_watched() && atomic_load(&forbidden) == 0; }

static bool has_place(const struct copied *each)
{
    return allocation_has_place(each->address, each->bytes, each->offset) ||
           mappings_have_place(each->address, each->bytes, each->offset);
}

/* The next pages in the ring's context, which are then being read until that is ended; their number. */
static size_t claim(struct page *pages)
{
    size_t claimed = 0;
    table_lock();
    while (claimed < PAGES && next < count && list[next].context == ring.context) {
        const struct copied *each = &list[next];
        if (each->offset % DIGEST_PAGE != 0 || next_page + DIGEST_PAGE > each->bytes || !has_place(each)) {
            next++;
            next_page = 0;
            continue;
        }
        pages[claimed++] = (struct page){each->address + next_page, each->offset + next_page};
        next_page += DIGEST_PAGE;
    }
    table_set_reading(claimed != 0);
    table_unlock();
    return claimed;
}

/* Have a ring in the context of what is next. */
static CUresult use_context(void)
{
    CUcontext context = list[next].context;
    CUresult result = CUDA_SUCCESS;
    if (ring.memory != NULL && ring.context != context)
        result = ring_close(&ring);
    if (result == CUDA_SUCCESS)
        result = driver()->cuCtxSetCurrent(context);
    if (result != CUDA_SUCCESS || ring.memory != NULL)
        return result;
    zero_parts_load(context);
    page_digests_load(context);
    return ring_open(&ring, context, PAGES * DIGEST_PAGE + DIGEST_PAGE);
}

static CUresult read_pages(const struct page *pages, size_t number)
{
    CUresult result = CUDA_SUCCESS;
    for (size_t at = 0; at < number && result == CUDA_SUCCESS; at++)
        result = driver()->cuMemcpyDtoHAsync_v2(ring.memory + at * DIGEST_PAGE, pages[at].address, DIGEST_PAGE,
                                                ring.stream);
    CUresult ended = driver()->cuStreamSynchronize(ring.stream);
    table_set_reading(false);
    return result != CUDA_SUCCESS ? result : ended;
}

/* Have the GPU compute digests of the pages in the ring, and find those of zeros. */
static bool compute(struct results *results, size_t number)
{
    CUdeviceptr there;
    if (driver()->cuMemHostGetDevicePointer_v2 == NULL ||
        driver()->cuMemHostGetDevicePointer_v2(&there, ring.memory, 0) != CUDA_SUCCESS)
        return false;
    memset(results, 0, sizeof *results);
    for (size_t at = 0; at < number; at++) {
        results->pages[at] = there + at * DIGEST_PAGE;
        results->parts[at] = (struct scanned){there + at * DIGEST_PAGE, DIGEST_PAGE};
        results->zeros[at] = OTHER_BYTES;
    }
    bool launched = page_digests_compute(ring.context, ring.stream, results->pages, results->digests, number);
    if (launched)
        zero_parts_scan(ring.context, ring.stream, results->parts, results->zeros, number);
    return driver()->cuStreamSynchronize(ring.stream) == CUDA_SUCCESS && launched;
}

static CUresult write_page(const struct page *page, size_t at, const struct results *results)
{
    if (results->zeros[at] == ONLY_ZEROS)
        return host_memory_set_zero(page->offset, DIGEST_PAGE);
    if (host_memory_has(page->offset, &results->digests[at]))
        return CUDA_SUCCESS;
    host_memory_note(page->offset, NULL); /* until it is written */
    CUresult result = host_memory_write(page->offset, ring.memory + at * DIGEST_PAGE, DIGEST_PAGE);
    if (result == CUDA_SUCCESS)
        host_memory_note(page->offset, &results->digests[at]);
    return result;
}

static bool write_pages(const struct page *pages, size_t number, const struct results *results)
{
    CUresult result = host_memory_open();
    for (size_t at = 0; at < number && result == CUDA_SUCCESS; at++)
        result = write_page(&pages[at], at, results);
    host_memory_close();
    return result == CUDA_SUCCESS;
}

/* Whether what is kept still is permitted; it is given up if not. */
static bool is_permitted(void)
{
    swap_free_host();
    if (now() >= checked_at + MEMORY_INTERVAL) {
        checked_at = now();
        swap_check_memory();
    }
    return swap_keeps();
}

static bool perform_step(void)
{
    struct page pages[PAGES];
    if (!is_undisturbed() || !is_permitted() || next == count || use_context() != CUDA_SUCCESS)
        return false;
    struct results *results = (struct results *)(ring.memory + PAGES * DIGEST_PAGE);
    size_t number = claim(pages);
    if (number == 0)
        return next < count;
    if (read_pages(pages, number) != CUDA_SUCCESS || !is_undisturbed() || !compute(results, number))
        return false;
    if (!write_pages(pages, number, results)) {
        swap_give_up();
        return false;
    }
    return true;
}

void mirror_step(void)
{
    if (!mirror_runs() || perform_step())
        return;
    if (next == count && is_undisturbed() && swap_keeps()) {
        atomic_store(&gpu_ckpt_published.mirrored, 1);
        copies_note_mirrored();
        stop();
    } else
        mirror_end();
}
