#define _GNU_SOURCE
#include "swap.h"

#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "copies.h"
#include "held_memory.h"
#include "host_memory.h"
#include "mappings.h"
#include "memory_pressure.h"
#include "published.h"
#include "seconds.h"
#include "table_lock.h"

/* What is in host memory: a copy of what is on the device, since nothing runs; the only valid content, and some
 * allocations or all have no device memory; a copy of what was on the device once. */
static enum { NOTHING, COPIED, SWAPPED_OUT, KEPT } content;
static size_t limit; /* bytes that are kept at the most */
static size_t partly; /* bytes that are swapped out, if the driver has the rest; else 0 */
static double patience; /* seconds that one memory is waited for (`swap_in_as_freed`) */

static bool is_kept(void)
{
    return content == KEPT && limit != 0 && host_memory_may_stay() && host_memory_taken() <= limit;
}

static void free_host(void)
{
    atomic_store(&gpu_ckpt_published.mirrored, 0);
    host_memory_free();
    content = NOTHING;
}

void swap_free_host(void)
{
    if (content == KEPT && !is_kept())
        free_host();
}

void swap_discard_copy(void)
{
    if (content == COPIED)
        content = KEPT;
    swap_free_host();
}

void swap_keep(size_t wanted)
{
    limit = wanted;
    swap_free_host();
}

size_t swap_limit(void) { return limit; }

bool swap_keeps(void) { return content == KEPT; }

void swap_give_up(void)
{
    if (content == KEPT)
        free_host();
}

void swap_check_memory(void)
{
    if (content == KEPT && (swap_amounts().allocations == 0 || memory_is_short()))
        free_host();
}

struct amounts swap_amounts(void)
{
    struct amounts amounts = {0};
    size_t count, bytes;
    allocations_total(&amounts.allocations, &amounts.bytes);
    mappings_total(&count, &bytes);
    amounts.allocations += count;
    amounts.bytes += bytes;
    amounts.swapped_out = content != SWAPPED_OUT ? 0 : partly != 0 ? partly : host_memory_bytes();
    amounts.kept = is_kept() ? host_memory_taken() : 0;
    return amounts;
}

/* -- offsets in host memory */

/* The next memory of both tables that is copied; false at the end. */
static bool next_placed(size_t *at, struct placed *next)
{
    size_t slots;
    struct allocation *table = allocations_table(&slots);
    for (; *at < slots; (*at)++) {
        struct allocation *each = &table[*at];
        if (each->address != 0 && !each->shared && each->context != NULL) {
            *next = (struct placed){each->bytes, &each->offset};
            (*at)++;
            return true;
        }
    }
    size_t mapped = *at - slots;
    bool found = mappings_next_placed(&mapped, next);
    *at = slots + mapped;
    return found;
}

/* Decide what is copied, and return its bytes. */
static size_t plan(void)
{
    size_t slots, all = 0;
    struct allocation *table = allocations_table(&slots);
    for (size_t at = 0; at < slots; at++)
        if (table[at].address != 0 && (table[at].shared || table[at].context == NULL))
            table[at].offset = NOT_COPIED;
    mappings_plan();
    struct placed each;
    for (size_t at = 0; next_placed(&at, &each);)
        all += each.bytes;
    return all;
}

static bool fills_extents(size_t bytes) { return bytes % EXTENT_BYTES == 0; }

/* Memory that fills extents comes first, so that it has them for itself: images share the extents that are equal. */
static void place_anew(void)
{
    size_t end = 0;
    struct placed each;
    for (int filling = 1; filling >= 0; filling--)
        for (size_t at = 0; next_placed(&at, &each);)
            if (fills_extents(each.bytes) == (filling != 0)) {
                *each.offset = end;
                end += each.bytes;
            }
}

/* Pages of host memory, for each whether it has a memory's content. */
struct layout {
    char *occupied;
    size_t pages, first_free, end; /* ``end``: of those that have */
};

static bool claim(struct layout *layout, size_t offset, size_t count)
{
    size_t page = offset / DIGEST_PAGE;
    if (offset % DIGEST_PAGE != 0 || page > layout->pages || count > layout->pages - page ||
        memchr(layout->occupied + page, 1, count) != NULL)
        return false;
    memset(layout->occupied + page, 1, count);
    layout->end = page + count > layout->end ? page + count : layout->end;
    return true;
}

static size_t round_up(size_t page, size_t step) { return (page + step - 1) / step * step; }

/* The first hole of so many pages; behind all that there is one.  Of memory that fills extents: of whole ones. */
static size_t hole(struct layout *layout, size_t count)
{
    size_t step = fills_extents(count * DIGEST_PAGE) ? EXTENT_BYTES / DIGEST_PAGE : 1;
    while (layout->first_free < layout->end && layout->occupied[layout->first_free])
        layout->first_free++;
    for (size_t page = round_up(layout->first_free, step); page + count <= layout->end;) {
        const char *next = memchr(layout->occupied + page, 1, count);
        if (next == NULL)
            return page;
        page = round_up((size_t)(next - layout->occupied) + 1, step);
    }
    return round_up(layout->end, step);
}

static size_t pages_of(size_t bytes) { return (bytes + DIGEST_PAGE - 1) / DIGEST_PAGE; }

/* Memory that had a place the last time keeps it, other memory gets the holes and what is behind all; false: that would
 * waste too much.  An offset of the last time is only a guess at where the content is: its digest decides. */
static bool place_again(struct layout *layout, size_t all)
{
    size_t kept = pages_of(host_memory_bytes());
    struct placed each;
    layout->end = kept;
    for (size_t at = 0; next_placed(&at, &each);)
        if (*each.offset != NOT_COPIED && (*each.offset + each.bytes > host_memory_bytes() ||
                                           !claim(layout, *each.offset, pages_of(each.bytes))))
            *each.offset = NOT_COPIED;
    for (int filling = 1; filling >= 0; filling--) /* first, so that others get what is left between them */
        for (size_t at = 0; next_placed(&at, &each);)
            if (*each.offset == NOT_COPIED && fills_extents(each.bytes) == (filling != 0)) {
                *each.offset = hole(layout, pages_of(each.bytes)) * DIGEST_PAGE;
                if (!claim(layout, *each.offset, pages_of(each.bytes)))
                    return false;
            }
    return layout->end * DIGEST_PAGE <= all + all / 4 + 4 * EXTENT_BYTES;
}

/* Of host memory that is kept: hold zeros where no memory has its place any more. */
static CUresult clear_holes(const struct layout *layout)
{
    CUresult result = host_memory_open();
    size_t end = layout->end;
    for (size_t page = 0; page < end && result == CUDA_SUCCESS; page++)
        if (!layout->occupied[page])
            result = host_memory_set_zero(page * DIGEST_PAGE, DIGEST_PAGE);
    host_memory_close();
    return result;
}

/* Give everything that is copied its place in the host memory that is kept; false: it needs another one. */
static bool place_kept(struct layout *layout, size_t all)
{
    layout->pages = 2 * (pages_of(host_memory_bytes()) + pages_of(all) + 1); /* parts of pages, too */
    void *mapped = mmap(NULL, layout->pages, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    layout->occupied = mapped != MAP_FAILED ? mapped : NULL;
    return layout->occupied != NULL && place_again(layout, all);
}

static CUresult prepare_kept(const struct layout *layout)
{
    CUresult result = host_memory_enlarge(layout->end * DIGEST_PAGE);
    return result == CUDA_SUCCESS ? clear_holes(layout) : result;
}

static void free_layout(struct layout *layout)
{
    if (layout->occupied != NULL)
        munmap(layout->occupied, layout->pages);
}

static bool has_files_to_use(void)
{
    return limit != 0 && (content == KEPT || content == COPIED) && host_memory_is_intact();
}

static CUresult arrange(size_t all)
{
    struct layout layout = {.occupied = NULL};
    bool again = has_files_to_use() && place_kept(&layout, all) && prepare_kept(&layout) == CUDA_SUCCESS;
    free_layout(&layout);
    if (again) {
        content = NOTHING; /* that is complete */
        return CUDA_SUCCESS;
    }
    free_host();
    place_anew();
    return host_memory_create(all);
}

/* List what has a place, which is read while the program runs; NULL: there is no memory. */
static struct copied *list_places(size_t *count)
{
    struct copied each, *list;
    *count = 0;
    for (size_t at = 0; copies_next(&at, &each);)
        ++*count;
    list = mmap(NULL, (*count + 1) * sizeof *list, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (size_t at = 0, number = 0; list != MAP_FAILED && number < *count; number++)
        copies_next(&at, &list[number]);
    return list != MAP_FAILED ? list : NULL;
}

struct copied *swap_places(size_t *count)
{
    if (driver() == NULL || content == SWAPPED_OUT || content == COPIED || limit == 0)
        return NULL;
    struct layout layout = {.occupied = NULL};
    struct copied *list = NULL;
    bool usable = has_files_to_use();
    if (!table_lock_for_swap())
        return NULL;
    size_t all = plan();
    usable = usable && place_kept(&layout, all);
    if (!usable)
        place_anew();
    if (all != 0)
        list = list_places(count);
    table_unlock();
    if (list != NULL && !usable)
        free_host();
    CUresult result = list == NULL ? CUDA_SUCCESS : usable ? prepare_kept(&layout) : host_memory_create(all);
    free_layout(&layout);
    if (list != NULL && (result != CUDA_SUCCESS || !host_memory_may_stay() || host_memory_extend() != CUDA_SUCCESS)) {
        free_host();
        swap_free_places(list, *count);
        return NULL;
    }
    content = list != NULL ? KEPT : content;
    return list;
}

void swap_free_places(struct copied *list, size_t count)
{
    if (list != NULL)
        munmap(list, (count + 1) * sizeof *list);
}

/* Plan what is copied, and give it its place in host memory. */
static CUresult prepare(size_t *all)
{
    partly = 0;
    *all = plan();
    CUresult result = *all != 0 ? copies_wait() : CUDA_SUCCESS;
    return result == CUDA_SUCCESS && *all != 0 ? arrange(*all) : result;
}

CUresult swap_copy_out(void)
{
    size_t all;
    if (driver() == NULL || content == SWAPPED_OUT)
        return CUDA_SUCCESS;
    CUresult result = prepare(&all);
    if (result == CUDA_SUCCESS && all != 0)
        result = copies_run_out(limit != 0, NULL);
    if (result != CUDA_SUCCESS || all == 0)
        free_host();
    else
        content = COPIED;
    return result;
}

static CUresult unmap_one(size_t number)
{
    size_t slots;
    struct allocation *table = allocations_table(&slots);
    return number < slots ? allocation_unmap(&table[number]) : mappings_unmap_one(number - slots);
}

static CUresult map_one(size_t number)
{
    size_t slots;
    struct allocation *table = allocations_table(&slots);
    return number < slots ? allocation_map(&table[number]) : mappings_map_one(number - slots);
}

static bool exportable(size_t number, CUmemGenericAllocationHandle *handle)
{
    size_t slots;
    struct allocation *table = allocations_table(&slots);
    if (number >= slots)
        return mappings_exportable(number - slots, handle);
    *handle = table[number].handle;
    return table[number].has_handle;
}

size_t swap_export(int *descriptors, size_t most, size_t *bytes)
{
    *bytes = 0;
    return content == COPIED ? held_memory_export(descriptors, most, bytes, exportable) : 0;
}

/* Leave what is still on the device to the driver; return the bytes of the rest. */
static size_t exclude_present(void)
{
    size_t slots, bytes = 0;
    struct copied each;
    struct allocation *table = allocations_table(&slots);
    for (size_t at = 0; at < slots; at++)
        if (table[at].address != 0 && table[at].state != UNMAPPED)
            table[at].offset = NOT_COPIED;
    mappings_exclude_present();
    for (size_t at = 0; copies_next(&at, &each);)
        bytes += each.bytes;
    return bytes;
}

CUresult swap_move_out(void)
{
    size_t all;
    if (driver() == NULL || content == SWAPPED_OUT)
        return CUDA_SUCCESS;
    CUresult result = prepare(&all);
    if (result == CUDA_SUCCESS && all != 0)
        result = copies_run_out(limit != 0, unmap_one);
    if (result == CUDA_SUCCESS && all != 0) {
        copies_end_staging();
        content = SWAPPED_OUT;
        return CUDA_SUCCESS;
    }
    partly = exclude_present();
    content = partly != 0 ? SWAPPED_OUT : content;
    if (partly != 0)
        swap_in();
    else {
        mappings_swapped_in(); /* nothing is away */
        copies_end_staging();
        free_host();
    }
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
    if (content != COPIED && content != SWAPPED_OUT)
        return CUDA_SUCCESS;
    content = SWAPPED_OUT;
    CUresult result = copies_pending() ? copies_wait() : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS)
        result = each_copied(allocation_unmap, false);
    if (result == CUDA_SUCCESS)
        result = mappings_unmap(false);
    if (result != CUDA_SUCCESS)
        swap_in();
    return result;
}

#define LOOK 5000000 /* nanoseconds between two attempts */

static CUresult map_when_free(size_t number)
{
    double end = now() + patience;
    CUresult result;
    while ((result = map_one(number)) == CUDA_ERROR_OUT_OF_MEMORY && now() < end)
        nanosleep(&(struct timespec){.tv_nsec = LOOK}, NULL);
    return result;
}

static CUresult bring_in(CUresult (*copy)(CUresult (*step)(size_t number)))
{
    if (content != SWAPPED_OUT)
        return CUDA_SUCCESS;
    CUresult result = copies_pending() ? copies_wait() : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS) {
        held_memory_copy(map_one);
        result = held_memory_is_all_back() ? CUDA_SUCCESS : copy(map_when_free);
    }
    held_memory_end();
    if (result != CUDA_SUCCESS) {
        if (!copies_pending() || copies_wait() == CUDA_SUCCESS) {
            each_copied(allocation_unmap, true);
            mappings_unmap(true);
        }
        return result;
    }
    mappings_swapped_in();
    copies_end_staging();
    content = KEPT;
    if (partly != 0)
        free_host(); /* not all that was noted is there (`host_memory_note`) */
    return CUDA_SUCCESS;
}

CUresult swap_in_as_freed(double seconds)
{
    patience = seconds;
    return bring_in(copies_run_in);
}

CUresult swap_in(void) { return swap_in_as_freed(0.0); }

CUresult swap_in_checked(void)
{
    patience = 0.0;
    return bring_in(copies_run_in_checked);
}
