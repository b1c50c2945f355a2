#define _GNU_SOURCE
#include "own_threads.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

/* More than copy to and from all devices at a time. */
#define MOST 320

/* Found by its mark in the mappings of this library, as `published.h`.  A thread that has ended stays until another one
 * needs its number's place: until the very end it must not be taken for one of the program's. */
struct own_threads {
    char mark[16];
    atomic_int tids[MOST]; /* 0: none */
};
__attribute__((visibility("hidden"))) struct own_threads gpu_ckpt_own_threads = {.mark = "gpu-ckpt thread"};

static _Thread_local bool is_own;

static bool has_ended(int tid) { return syscall(SYS_tgkill, getpid(), tid, 0) != 0; }

void own_thread_begin(const char *name)
{
    int own = (int)syscall(SYS_gettid);
    for (size_t at = 0; at < MOST && !is_own; at++) {
        int before = atomic_load(&gpu_ckpt_own_threads.tids[at]);
        if (before == 0 || has_ended(before))
            is_own = atomic_compare_exchange_strong(&gpu_ckpt_own_threads.tids[at], &before, own);
    }
    is_own = true;
    pthread_setname_np(pthread_self(), name);
}

bool is_own_thread(void) { return is_own; }
