#define _GNU_SOURCE
#include "transfer.h"

#include <fcntl.h>
#include <limits.h>
#include <linux/magic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "copies.h"

static char *arena;
static size_t arena_bytes;
static bool arena_is_file;
static char arena_file[PATH_MAX]; /* empty: there can be none */
static bool is_away; /* the arena has what counts, and some blocks or all have no physical memory */
static bool is_spent; /* everything is back from the arena */

/* -- the arena */

void transfer_place(const char *directory)
{
    int length = snprintf(arena_file, sizeof arena_file, "%s/gpu-ckpt-blocks", directory);
    if (length < 0 || (size_t)length >= sizeof arena_file)
        arena_file[0] = '\0';
}

/* Whether the arena's directory is the root of a file system of its own. */
static bool arena_is_mounted(void)
{
    char place[PATH_MAX + sizeof "/.."];
    struct stat inner, outer;
    const char *end = strrchr(arena_file, '/');
    if (end == NULL)
        return false;
    snprintf(place, sizeof place, "%.*s/..", (int)(end - arena_file), arena_file);
    if (stat(place, &outer) != 0)
        return false;
    place[end - arena_file] = '\0';
    return stat(place, &inner) == 0 && inner.st_dev != outer.st_dev;
}

/* NULL where that is no file system in memory, or one without room: then a write would be the end of this process. */
static char *map_file(size_t bytes)
{
    int file = arena_is_mounted() ? open(arena_file, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600) : -1;
    if (file < 0)
        return NULL;
    struct statfs place;
    char *memory = NULL;
    if (fstatfs(file, &place) == 0 && place.f_type == TMPFS_MAGIC && ftruncate(file, 0) == 0 &&
        bytes / (size_t)place.f_bsize < place.f_bavail && ftruncate(file, (off_t)bytes) == 0)
        memory = huge(bytes, 0, file);
    close(file);
    return memory;
}

void transfer_forget(void)
{
    if (arena != NULL && !is_away) {
        munmap(arena, arena_bytes);
        if (arena_is_file && truncate(arena_file, 0) != 0)
            unlink(arena_file);
        arena = NULL;
        arena_bytes = 0;
    }
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
    amounts.away = is_away ? arena_bytes : 0;
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
    if (result != CUDA_SUCCESS)
        return result;
    arena = map_file(bytes);
    arena_is_file = arena != NULL;
    if (arena == NULL)
        arena = huge(bytes, MAP_NORESERVE, -1);
    if (arena == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    arena_bytes = bytes;
    result = copies_make(true, arena);
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
    if (arena == NULL)
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
        result = copies_make(false, arena);
    if (result != CUDA_SUCCESS) {
        if (!copies_under_way() || copies_wait() == CUDA_SUCCESS)
            each_copied(block_unmap, true);
        return result;
    }
    is_away = false;
    is_spent = true;
    return CUDA_SUCCESS;
}
