#define _GNU_SOURCE
#include "arena.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/magic.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#define HUGE_PAGE ((size_t)2 << 20)

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

static char place[PATH_MAX]; /* empty: there can be no files */
static size_t size;
static char *memory; /* anonymous; NULL: files */
static int directory = -1;
static atomic_int past_cache; /* O_DIRECT, for files that are not in memory */

char *huge(size_t bytes)
{
    char *reserved = mmap(NULL, bytes + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED)
        return NULL;
    size_t before = (HUGE_PAGE - (size_t)reserved % HUGE_PAGE) % HUGE_PAGE;
    if (before != 0)
        munmap(reserved, before);
    munmap(reserved + before + bytes, HUGE_PAGE - before);
    madvise(reserved + before, bytes, MADV_HUGEPAGE);
    return reserved + before;
}

void arena_place(const char *where)
{
    int length = snprintf(place, sizeof place, "%s", where);
    if (length < 0 || (size_t)length >= sizeof place)
        place[0] = '\0';
}

size_t arena_bytes(void) { return size; }

bool arena_is_files(void) { return size != 0 && memory == NULL; }

/* -- files */

static CUresult told(int error)
{
    return error == ENOSPC || error == ENOMEM || error == EDQUOT ? CUDA_ERROR_OUT_OF_MEMORY
                                                                 : CUDA_ERROR_OPERATING_SYSTEM;
}

static int open_directory(void) { return place[0] == '\0' ? -1 : open(place, O_RDONLY | O_DIRECTORY | O_CLOEXEC); }

/* Removed and not cut short: a file may be an image's, too, by another name. */
static void empty(int own)
{
    DIR *stream = fdopendir(own);
    if (stream == NULL) {
        close(own);
        return;
    }
    for (struct dirent *each; (each = readdir(stream)) != NULL;)
        if (each->d_name[0] != '.')
            unlinkat(dirfd(stream), each->d_name, 0);
    closedir(stream);
}

static int open_chunk(size_t offset, int how)
{
    char name[32];
    snprintf(name, sizeof name, "%06zu.img", offset / ARENA_CHUNK);
    int file = openat(directory, name, how | O_NOFOLLOW | O_CLOEXEC | atomic_load(&past_cache), 0600);
    if (file < 0 && errno == EINVAL && atomic_exchange(&past_cache, 0) != 0) /* a file system that cannot */
        file = openat(directory, name, how | O_NOFOLLOW | O_CLOEXEC, 0600);
    return file;
}

/* A part of one chunk; `how`: to read or to write. */
static CUresult move(size_t offset, char *buffer, size_t bytes, int how)
{
    int file = open_chunk(offset, how);
    CUresult result = file < 0 ? told(errno) : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS && (how & O_CREAT) != 0 && fchmod(file, 0600) != 0) /* whatever the program's umask */
        result = told(errno);
    for (size_t done = 0; result == CUDA_SUCCESS && done < bytes;) {
        off_t at = (off_t)(offset % ARENA_CHUNK + done);
        ssize_t moved = how == O_RDONLY ? pread(file, buffer + done, bytes - done, at)
                                        : pwrite(file, buffer + done, bytes - done, at);
        if (moved > 0)
            done += (size_t)moved;
        else if (moved == 0)
            result = CUDA_ERROR_OPERATING_SYSTEM; /* it is shorter than it was */
        else if (errno == EINVAL && (fcntl(file, F_GETFL) & O_DIRECT) != 0)
            fcntl(file, F_SETFL, 0);
        else if (errno != EINTR)
            result = told(errno);
    }
    if (file >= 0 && close(file) != 0 && result == CUDA_SUCCESS && how != O_RDONLY)
        result = told(errno);
    return result;
}

static CUresult move_all(size_t offset, char *buffer, size_t bytes, int how)
{
    CUresult result = CUDA_SUCCESS;
    for (size_t done = 0, part; done < bytes && result == CUDA_SUCCESS; done += part) {
        size_t rest = ARENA_CHUNK - (offset + done) % ARENA_CHUNK;
        part = bytes - done < rest ? bytes - done : rest;
        result = move(offset + done, buffer + done, part, how);
    }
    return result;
}

/* -- either */

CUresult arena_make(size_t bytes)
{
    arena_drop();
    struct stat there;
    int files = open_directory();
    if (files >= 0)
        empty(files);
    else if (place[0] != '\0' && lstat(place, &there) == 0) /* what memory is too small for goes nowhere else */
        return CUDA_ERROR_OPERATING_SYSTEM;
    else if ((memory = huge(bytes)) == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    size = bytes;
    return CUDA_SUCCESS;
}

CUresult arena_open(void)
{
    if (memory != NULL || directory >= 0)
        return CUDA_SUCCESS;
    directory = open_directory();
    if (directory < 0)
        return told(errno);
    struct statfs kind;
    atomic_store(&past_cache, fstatfs(directory, &kind) == 0 && kind.f_type == TMPFS_MAGIC ? 0 : O_DIRECT);
    return CUDA_SUCCESS;
}

void arena_close(void)
{
    if (directory >= 0)
        close(directory);
    directory = -1;
}

/* While the copy for them is under way: twice as fast as leaving it to the faults of memcpy, and what cannot be had is an
 * error here, where a fault would be this process's end.  Files need nothing of the kind. */
CUresult arena_expect(size_t offset, size_t bytes)
{
    if (memory == NULL || madvise(memory + offset, bytes, MADV_POPULATE_WRITE) == 0 ||
        errno == EINVAL || errno == EINTR || errno == EAGAIN) /* EINVAL: before Linux 5.14 */
        return CUDA_SUCCESS;
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult arena_put(size_t offset, const void *from, size_t bytes)
{
    if (memory == NULL)
        return move_all(offset, (char *)from, bytes, O_WRONLY | O_CREAT);
    memcpy(memory + offset, from, bytes);
    return CUDA_SUCCESS;
}

CUresult arena_get(size_t offset, void *to, size_t bytes)
{
    if (memory == NULL)
        return move_all(offset, to, bytes, O_RDONLY);
    memcpy(to, memory + offset, bytes);
    return CUDA_SUCCESS;
}

void arena_drop(void)
{
    if (size == 0)
        return;
    arena_close();
    int files = memory == NULL ? open_directory() : -1;
    if (memory != NULL)
        munmap(memory, size);
    else if (files >= 0)
        empty(files);
    memory = NULL;
    size = 0;
}
