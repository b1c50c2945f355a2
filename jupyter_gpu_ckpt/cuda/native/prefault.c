/* A faster mmap(MAP_POPULATE) of large memory: prefaulted by several threads, with huge pages.
 *
 * The driver suspends a context into memory that it maps by one such call (740 MiB with PyTorch on an H200, driver
 * 580), and waits for 190,000 small pages to be zeroed.  Apart from time nothing may differ. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "context_memory.h"
#include "driver.h"

#define EXPORT __attribute__((visibility("default")))
#define LARGE ((size_t)64 << 20)
#define SLICE ((size_t)32 << 20)
#define MAX_THREADS 8

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

struct slice {
    char *memory;
    size_t bytes;
    pthread_t thread;
};

static void *prefault(void *argument)
{
    const struct slice *slice = argument;
    madvise(slice->memory, slice->bytes, MADV_POPULATE_WRITE);
    return NULL;
}

/* Errors are ignored: MAP_POPULATE promises nothing, either. */
static void prefault_all(char *memory, size_t bytes)
{
    cpu_set_t allowed;
    size_t count = sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? (size_t)CPU_COUNT(&allowed) : 1, begun = 0;
    count = count > MAX_THREADS ? MAX_THREADS : count;
    size_t each = (bytes / count + SLICE) / SLICE * SLICE, done = 0;
    struct slice slices[MAX_THREADS];
    sigset_t all, before;
    sigfillset(&all); /* the program's handlers must not run on these threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; done + each < bytes && begun + 1 < count; done += each) {
        slices[begun] = (struct slice){.memory = memory + done, .bytes = each};
        if (pthread_create(&slices[begun].thread, NULL, prefault, &slices[begun]) != 0)
            break;
        begun++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    prefault(&(struct slice){.memory = memory + done, .bytes = bytes - done});
    for (size_t at = 0; at < begun; at++)
        pthread_join(slices[at].thread, NULL);
}

/* A system call, not the next definition of mmap: dlsym allocates, which may be the reason for this call. */
static void *map(void *address, size_t bytes, int protection, int flags, int file, off_t offset)
{
    return (void *)syscall(SYS_mmap, address, bytes, protection, flags, file, offset);
}

EXPORT void *mmap(void *address, size_t bytes, int protection, int flags, int file, off_t offset)
{
    if (address != NULL || bytes < LARGE || protection != (PROT_READ | PROT_WRITE) ||
        flags != (MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE))
        return map(address, bytes, protection, flags, file, offset);
    void *memory = map(NULL, bytes, protection, flags & ~MAP_POPULATE, file, offset);
    if (memory != MAP_FAILED) {
        madvise(memory, bytes, MADV_HUGEPAGE);
        prefault_all(memory, bytes);
        if (is_code_of_driver(__builtin_return_address(0)))
            context_memory_note(memory, bytes);
    }
    return memory;
}

EXPORT void *mmap64(void *address, size_t bytes, int protection, int flags, int file, off_t offset)
    __attribute__((alias("mmap")));
