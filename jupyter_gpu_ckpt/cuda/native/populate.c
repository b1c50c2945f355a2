/* Large memory that is populated at once: by several threads, and of huge pages.
 *
 * The driver suspends a context into memory that it asks for by one such mmap (740 MiB with PyTorch on an H200, driver
 * 580), and waits for 190,000 small pages to be zeroed.  Nobody is to tell the difference but by the clock. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define LARGE ((size_t)64 << 20)
#define SLICE ((size_t)32 << 20)
#define MOST_THREADS 8

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

struct slice {
    char *memory;
    size_t bytes;
    pthread_t thread;
};

static void *populate(void *argument)
{
    const struct slice *slice = argument;
    madvise(slice->memory, slice->bytes, MADV_POPULATE_WRITE);
    return NULL;
}

/* As far as it goes: MAP_POPULATE promises nothing, either. */
static void populate_all(char *memory, size_t bytes)
{
    cpu_set_t allowed;
    size_t count = sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? (size_t)CPU_COUNT(&allowed) : 1, begun = 0;
    count = count > MOST_THREADS ? MOST_THREADS : count;
    size_t each = (bytes / count + SLICE) / SLICE * SLICE, done = 0;
    struct slice slices[MOST_THREADS];
    sigset_t all, before;
    sigfillset(&all); /* the program's handlers are not for these threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; done + each < bytes && begun + 1 < count; done += each) {
        slices[begun] = (struct slice){.memory = memory + done, .bytes = each};
        if (pthread_create(&slices[begun].thread, NULL, populate, &slices[begun]) != 0)
            break;
        begun++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    populate(&(struct slice){.memory = memory + done, .bytes = bytes - done});
    for (size_t at = 0; at < begun; at++)
        pthread_join(slices[at].thread, NULL);
}

/* Not by the next definition of the name: to look that up takes memory, which may be why we were called. */
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
        populate_all(memory, bytes);
    }
    return memory;
}

EXPORT void *mmap64(void *address, size_t bytes, int protection, int flags, int file, off_t offset)
    __attribute__((alias("mmap")));
