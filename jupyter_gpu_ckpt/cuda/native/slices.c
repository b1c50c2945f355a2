#define _GNU_SOURCE
#include "slices.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

#define SLICE ((size_t)8 << 20)
#define MAX_THREADS 8

struct slice {
    char *memory;
    size_t bytes;
    void (*work)(char *memory, size_t bytes);
    pthread_t thread;
};

static void *run(void *argument)
{
    const struct slice *slice = argument;
    slice->work(slice->memory, slice->bytes);
    return NULL;
}

void in_slices(char *memory, size_t bytes, void (*work)(char *memory, size_t bytes))
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
        slices[begun] = (struct slice){.memory = memory + done, .bytes = each, .work = work};
        if (pthread_create(&slices[begun].thread, NULL, run, &slices[begun]) != 0)
            break;
        begun++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    work(memory + done, bytes - done);
    for (size_t at = 0; at < begun; at++)
        pthread_join(slices[at].thread, NULL);
}

static void populate_slice(char *memory, size_t bytes) { madvise(memory, bytes, MADV_POPULATE_WRITE); }

void populate(char *memory, size_t bytes) { in_slices(memory, bytes, populate_slice); }
