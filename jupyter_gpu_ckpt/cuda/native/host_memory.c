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

#define HUGE_PAGE DIGEST_PAGE

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

static char path[PATH_MAX]; /* of the directory; empty: there can be no files */
static size_t size;
static char *memory; /* anonymous; NULL: files */
static int directory = -1;
static atomic_int opened_file = -1; /* the last one; of several threads only while nobody forks */
static atomic_int direct; /* O_DIRECT, for files that are not in memory */
/* What is known of each huge page; NULL: nothing. */
static struct page {
    struct digest digest; /* of its content */
    bool zero;            /* it holds zeros only */
    bool written;
} *pages;
static bool is_used;         /* pages may have been written before they are to hold zeros */
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

bool host_memory_may_stay(void)
{
    struct stat status; /* a link leads to a disk, and may be another one after a restore */
    return host_memory_is_files() && lstat(path, &status) == 0 && S_ISDIR(status.st_mode);
}

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

#define NAME_BYTES 32
#define PUNCH (FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE)

static void name_of(size_t offset, char *name) { snprintf(name, NAME_BYTES, "%06zu.img", offset / EXTENT_BYTES); }

static int open_extent(size_t offset, int flags)
{
    char name[NAME_BYTES];
    name_of(offset, name);
    int file = openat(directory, name, flags | O_NOFOLLOW | O_CLOEXEC | atomic_load(&direct), 0600);
    if (file < 0 && errno == EINVAL && atomic_exchange(&direct, 0) != 0) /* a file system without O_DIRECT */
        file = openat(directory, name, flags | O_NOFOLLOW | O_CLOEXEC, 0600);
    atomic_store(&opened_file, file);
    return file;
}

static int close_extent(int file)
{
    atomic_store(&opened_file, -1);
    return close(file);
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
    if (file >= 0 && close_extent(file) != 0 && result == CUDA_SUCCESS && flags != O_RDONLY)
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

static size_t length_of(size_t extent)
{
    size_t rest = size - extent * EXTENT_BYTES;
    return rest < EXTENT_BYTES ? rest : EXTENT_BYTES;
}

/* Give an extent its full length, and make a hole of what it has in a range of host memory.  Code that writes to it at
 * the same time does not write beyond that. */
static CUresult extend(size_t extent, size_t offset, size_t bytes)
{
    size_t begin = extent * EXTENT_BYTES, end = begin + EXTENT_BYTES;
    size_t from = offset > begin ? offset : begin, to = offset + bytes < end ? offset + bytes : end;
    int file = open_extent(begin, O_WRONLY | O_CREAT);
    if (file < 0)
        return result_of(errno);
    bool done = fchmod(file, 0600) == 0 && ftruncate(file, (off_t)length_of(extent)) == 0;
    if (done && is_used && from < to)
        done = fallocate(file, PUNCH, (off_t)(from - begin), (off_t)(to - from)) == 0;
    CUresult result = done ? CUDA_SUCCESS : result_of(errno);
    close_extent(file);
    return result;
}

/* -- what is known of the pages */

static size_t page_count(size_t bytes) { return bytes / HUGE_PAGE + 1; }

static struct page *map_pages(size_t bytes)
{
    size_t needed = page_count(bytes) * sizeof *pages;
    void *made = mmap(NULL, needed, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return made != MAP_FAILED ? made : NULL;
}

static void unmap_pages(void)
{
    if (pages != NULL)
        munmap(pages, page_count(size) * sizeof *pages);
    pages = NULL;
}

size_t host_memory_taken(void)
{
    size_t taken = 0;
    for (size_t at = 0; pages != NULL && at < page_count(size); at++)
        taken += pages[at].written ? HUGE_PAGE : 0;
    return taken;
}

bool host_memory_has(size_t offset, const struct digest *digest)
{
    if (pages == NULL || (digest->words[0] == 0 && digest->words[1] == 0))
        return false;
    const struct digest *known = &pages[offset / HUGE_PAGE].digest;
    return known->words[0] == digest->words[0] && known->words[1] == digest->words[1];
}

bool host_memory_is_known(void)
{
    size_t count = pages != NULL ? (size + HUGE_PAGE - 1) / HUGE_PAGE : 0, at = 0;
    while (at < count && (pages[at].zero || pages[at].digest.words[0] != 0 || pages[at].digest.words[1] != 0))
        at++;
    return count != 0 && at == count;
}

void host_memory_note(size_t offset, const struct digest *digest)
{
    if (pages != NULL)
        pages[offset / HUGE_PAGE] =
            (struct page){.digest = digest != NULL ? *digest : (struct digest){{0, 0}}, .written = true};
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
    pages = map_pages(bytes);
    is_used = false;
    last_extended = SIZE_MAX;
    return CUDA_SUCCESS;
}

bool host_memory_is_intact(void)
{
    int opened = memory == NULL && pages != NULL && size != 0 ? open_directory() : -1;
    bool intact = opened >= 0;
    for (size_t extent = 0; intact && extent * EXTENT_BYTES < size; extent++) {
        char name[NAME_BYTES];
        struct stat found;
        name_of(extent * EXTENT_BYTES, name);
        intact = fstatat(opened, name, &found, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(found.st_mode) &&
                 found.st_nlink == 1 && (size_t)found.st_size == length_of(extent);
    }
    if (opened >= 0)
        close(opened);
    return intact;
}

CUresult host_memory_enlarge(size_t bytes)
{
    is_used = true;
    last_extended = SIZE_MAX;
    if (bytes <= size)
        return CUDA_SUCCESS;
    struct page *larger = map_pages(bytes);
    if (larger == NULL)
        return CUDA_ERROR_OPERATING_SYSTEM;
    memcpy(larger, pages, size / HUGE_PAGE * sizeof *pages);
    size_t last = (size - 1) / EXTENT_BYTES;
    unmap_pages();
    pages = larger;
    size = bytes;
    CUresult result = host_memory_open();
    if (result == CUDA_SUCCESS)
        result = extend(last, 0, 0);
    host_memory_close();
    return result;
}

CUresult host_memory_extend(void)
{
    struct stat found;
    char name[NAME_BYTES];
    CUresult result = host_memory_open();
    for (size_t extent = 0; result == CUDA_SUCCESS && extent * EXTENT_BYTES < size; extent++) {
        name_of(extent * EXTENT_BYTES, name);
        if (fstatat(directory, name, &found, AT_SYMLINK_NOFOLLOW) != 0)
            result = extend(extent, 0, 0);
    }
    host_memory_close();
    return result;
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
    int opened = directory;
    directory = -1; /* first: a child of another thread must not close what gets its number then */
    if (opened >= 0)
        close(opened);
}

void host_memory_in_child(void)
{
    int file = atomic_exchange(&opened_file, -1);
    if (file >= 0)
        close(file);
    host_memory_close();
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

CUresult host_memory_make_hole(size_t offset, size_t bytes)
{
    size_t first = offset / EXTENT_BYTES, last = (offset + bytes - 1) / EXTENT_BYTES;
    CUresult result = CUDA_SUCCESS;
    for (size_t extent = first; extent <= last && memory == NULL; extent++) {
        CUresult own = is_used || extent != last_extended ? extend(extent, offset, bytes) : CUDA_SUCCESS;
        if (own == CUDA_SUCCESS)
            last_extended = extent;
        result = result != CUDA_SUCCESS ? result : own;
    }
    return result;
}

bool host_memory_note_zero(size_t offset, size_t bytes)
{
    bool whole = offset % HUGE_PAGE == 0 && bytes % HUGE_PAGE == 0;
    for (size_t at = offset; pages != NULL && at < offset + bytes; at += HUGE_PAGE)
        pages[at / HUGE_PAGE] = (struct page){.zero = whole};
    return pages != NULL && whole;
}

CUresult host_memory_set_zero(size_t offset, size_t bytes)
{
    if (host_memory_is_zero(offset, bytes))
        return CUDA_SUCCESS;
    CUresult result = host_memory_make_hole(offset, bytes);
    if (result == CUDA_SUCCESS)
        host_memory_note_zero(offset, bytes);
    return result;
}

bool host_memory_is_zero(size_t offset, size_t bytes)
{
    if (pages == NULL || offset % HUGE_PAGE != 0 || bytes % HUGE_PAGE != 0)
        return false;
    for (size_t at = offset; at < offset + bytes; at += HUGE_PAGE)
        if (!pages[at / HUGE_PAGE].zero)
            return false;
    return true;
}

void host_memory_free(void)
{
    if (size == 0)
        return;
    unmap_pages();
    host_memory_close();
    int opened = memory == NULL ? open_directory() : -1;
    if (memory != NULL)
        munmap(memory, size);
    else if (opened >= 0)
        remove_files(opened);
    memory = NULL;
    size = 0;
}
