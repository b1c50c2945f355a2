#define _GNU_SOURCE
#include "host_memory.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/magic.h>
#include <stdatomic.h>
#include <stdint.h>
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

static char path[PATH_MAX]; /* of the directory; empty: there can be no files */
static size_t size;
static char *memory; /* anonymous; NULL: files */
static int directory = -1;
static atomic_int direct; /* O_DIRECT, for files that are not in memory */
static char *zeros;       /* for each huge page whether it holds zeros only; NULL: that is not known */
static size_t last_extended; /* the extent that has its full length for zeros */

char *map_huge_pages(size_t bytes)
{
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char *reserved = mmap(NULL, bytes + HUGE_PAGE, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (reserved == MAP_FAILED)
        return NULL;
    size_t before = (HUGE_PAGE - (size_t)reserved % HUGE_PAGE) % HUGE_PAGE;
    if (before != 0)
        munmap(reserved, before);
    munmap(reserved + before + bytes, HUGE_PAGE - before);
    madvise(reserved + before, bytes, MADV_HUGEPAGE);
    return reserved + before;
}

void host_memory_set_directory(const char *wanted)
{
    int length = snprintf(path, sizeof path, "%s", wanted);
    if (length < 0 || (size_t)length >= sizeof path)
        path[0] = '\0';
}

size_t host_memory_bytes(void) { return size; }

bool host_memory_is_files(void) { return size != 0 && memory == NULL; }

/* -- files */

static CUresult result_of(int error)
{
    return error == ENOSPC || error == ENOMEM || error == EDQUOT ? CUDA_ERROR_OUT_OF_MEMORY
                                                                 : CUDA_ERROR_OPERATING_SYSTEM;
}

static int open_directory(void) { return path[0] == '\0' ? -1 : open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC); }

/* Remove the files of a directory and close it.  They are not truncated: an image may have the same file by another
 * name. */
static void remove_files(int opened)
{
    DIR *stream = fdopendir(opened);
    if (stream == NULL) {
        close(opened);
        return;
    }
    for (struct dirent *each; (each = readdir(stream)) != NULL;)
        if (each->d_name[0] != '.')
            unlinkat(dirfd(stream), each->d_name, 0);
    closedir(stream);
}

static int open_extent(size_t offset, int flags)
{
    char name[32];
    snprintf(name, sizeof name, "%06zu.img", offset / EXTENT_BYTES);
    int file = openat(directory, name, flags | O_NOFOLLOW | O_CLOEXEC | atomic_load(&direct), 0600);
    if (file < 0 && errno == EINVAL && atomic_exchange(&direct, 0) != 0) /* a file system without O_DIRECT */
        file = openat(directory, name, flags | O_NOFOLLOW | O_CLOEXEC, 0600);
    return file;
}

/* Read or write a range within one extent, according to the flags that open(2) gets. */
static CUresult move_in_extent(size_t offset, char *buffer, size_t bytes, int flags)
{
    int file = open_extent(offset, flags);
    CUresult result = file < 0 ? result_of(errno) : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS && (flags & O_CREAT) != 0 && fchmod(file, 0600) != 0) /* whatever the program's umask */
        result = result_of(errno);
    for (size_t done = 0; result == CUDA_SUCCESS && done < bytes;) {
        off_t at = (off_t)(offset % EXTENT_BYTES + done);
        ssize_t moved = flags == O_RDONLY ? pread(file, buffer + done, bytes - done, at)
                                          : pwrite(file, buffer + done, bytes - done, at);
        if (moved > 0)
            done += (size_t)moved;
        else if (moved == 0)
            result = CUDA_ERROR_OPERATING_SYSTEM; /* the file was truncated */
        else if (errno == EINVAL && (fcntl(file, F_GETFL) & O_DIRECT) != 0)
            fcntl(file, F_SETFL, 0);
        else if (errno != EINTR)
            result = result_of(errno);
    }
    if (file >= 0 && close(file) != 0 && result == CUDA_SUCCESS && flags != O_RDONLY)
        result = result_of(errno);
    return result;
}

static CUresult move(size_t offset, char *buffer, size_t bytes, int flags)
{
    CUresult result = CUDA_SUCCESS;
    for (size_t done = 0, count; done < bytes && result == CUDA_SUCCESS; done += count) {
        size_t rest = EXTENT_BYTES - (offset + done) % EXTENT_BYTES;
        count = bytes - done < rest ? bytes - done : rest;
        result = move_in_extent(offset + done, buffer + done, count, flags);
    }
    return result;
}

/* Give an extent its full length.  Code that writes to it at the same time does not write beyond that. */
static CUresult extend(size_t extent)
{
    size_t rest = size - extent * EXTENT_BYTES, length = rest < EXTENT_BYTES ? rest : EXTENT_BYTES;
    int file = open_extent(extent * EXTENT_BYTES, O_WRONLY | O_CREAT);
    if (file < 0)
        return result_of(errno);
    bool done = fchmod(file, 0600) == 0 && ftruncate(file, (off_t)length) == 0;
    CUresult result = done ? CUDA_SUCCESS : result_of(errno);
    close(file);
    return result;
}

/* -- files or anonymous memory */

CUresult host_memory_create(size_t bytes)
{
    host_memory_free();
    struct stat status;
    int opened = open_directory();
    if (opened >= 0)
        remove_files(opened);
    else if (path[0] != '\0' && lstat(path, &status) == 0) /* a link to a disk, for what memory is too small for */
        return CUDA_ERROR_OPERATING_SYSTEM;
    else if ((memory = map_huge_pages(bytes)) == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    size = bytes;
    zeros = mmap(NULL, bytes / HUGE_PAGE + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    zeros = zeros != MAP_FAILED ? zeros : NULL;
    last_extended = SIZE_MAX;
    return CUDA_SUCCESS;
}

CUresult host_memory_open(void)
{
    if (memory != NULL || directory >= 0)
        return CUDA_SUCCESS;
    directory = open_directory();
    if (directory < 0)
        return result_of(errno);
    struct statfs system;
    atomic_store(&direct, fstatfs(directory, &system) == 0 && system.f_type == TMPFS_MAGIC ? 0 : O_DIRECT);
    return CUDA_SUCCESS;
}

void host_memory_close(void)
{
    if (directory >= 0)
        close(directory);
    directory = -1;
}

/* While the copy into this range is running: twice as fast as the page faults of memcpy, and missing memory is an error
 * here, where a fault would end this process.  Files need no such thing. */
CUresult host_memory_prefault(size_t offset, size_t bytes)
{
    if (memory == NULL || madvise(memory + offset, bytes, MADV_POPULATE_WRITE) == 0 ||
        errno == EINVAL || errno == EINTR || errno == EAGAIN) /* EINVAL: before Linux 5.14 */
        return CUDA_SUCCESS;
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult host_memory_write(size_t offset, const void *from, size_t bytes)
{
    if (memory == NULL)
        return move(offset, (char *)from, bytes, O_WRONLY | O_CREAT);
    memcpy(memory + offset, from, bytes);
    return CUDA_SUCCESS;
}

CUresult host_memory_read(size_t offset, void *to, size_t bytes)
{
    if (memory == NULL)
        return move(offset, to, bytes, O_RDONLY);
    memcpy(to, memory + offset, bytes);
    return CUDA_SUCCESS;
}

CUresult host_memory_set_zero(size_t offset, size_t bytes)
{
    size_t first = offset / EXTENT_BYTES, last = (offset + bytes - 1) / EXTENT_BYTES;
    CUresult result = CUDA_SUCCESS;
    for (size_t extent = first; extent <= last && memory == NULL && result == CUDA_SUCCESS; extent++)
        if (extent != last_extended && (result = extend(extent)) == CUDA_SUCCESS)
            last_extended = extent;
    if (result == CUDA_SUCCESS && zeros != NULL && offset % HUGE_PAGE == 0 && bytes % HUGE_PAGE == 0)
        memset(zeros + offset / HUGE_PAGE, 1, bytes / HUGE_PAGE);
    return result;
}

bool host_memory_is_zero(size_t offset, size_t bytes)
{
    if (zeros == NULL || offset % HUGE_PAGE != 0 || bytes % HUGE_PAGE != 0)
        return false;
    return memchr(zeros + offset / HUGE_PAGE, 0, bytes / HUGE_PAGE) == NULL;
}

void host_memory_free(void)
{
    if (size == 0)
        return;
    if (zeros != NULL)
        munmap(zeros, size / HUGE_PAGE + 1);
    zeros = NULL;
    host_memory_close();
    int opened = memory == NULL ? open_directory() : -1;
    if (memory != NULL)
        munmap(memory, size);
    else if (opened >= 0)
        remove_files(opened);
    memory = NULL;
    size = 0;
}
