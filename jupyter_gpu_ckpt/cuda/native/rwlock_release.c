#define _GNU_SOURCE
#include "rwlock_release.h"

#include <dirent.h>
#include <gnu/libc-version.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "own_threads.h"

#define TURN_NS 100000
#define TURNS_PER_CHECK 50 /* 5 ms: a thread that waits for the same futex at two checks is blocked */
#define PROBE_SECONDS 3
#define LAYOUT_TURNS 20000 /* at least two seconds */

/* The first words of a pthread_rwlock_t in glibc since 2.25 (nptl/pthread_rwlock_common.c describes them).  They are
 * private to glibc; releases after the newest one here have not been checked. */
static const int oldest_known[] = {2, 25}, newest_known[] = {2, 42};
struct lock {
    atomic_uint readers; /* their number times READER, and the bits below */
    atomic_uint writers;
    atomic_uint write_phase; /* the futex of readers, until it ends, and of the next writer, until it begins */
    atomic_uint next_writer; /* the futex of all other writers */
};
enum { WRITE_PHASE = 1, WRITER_IS_NEXT = 2, READER = 8 };
enum { HAS_WAITERS = 2 }; /* of `write_phase` */
/* futex(2): commands, without the flags for private futexes and the clock */
enum { FUTEX_COMMAND = 0x7f, WAIT = 0, WAKE = 1, WAIT_BITSET = 9, PRIVATE = 128 };

static struct lock *released_lock; /* whose readers were dropped */
static unsigned dropped;

/* The thread that makes the dry run. */
enum { IDLE, AWAITED, GIVEN_UP };
enum { MINIMUM_PAGE = 4096 };
static struct {
    CUresult (*dry_run)(void);
    CUresult result;
    atomic_int tid;
    atomic_int state;
} probe_call;

static void *run_probe_call(void *unused)
{
    (void)unused;
    own_thread_begin("gpu-ckpt-copy");
    atomic_store(&probe_call.tid, (int)syscall(SYS_gettid));
    probe_call.result = probe_call.dry_run();
    atomic_store(&probe_call.state, IDLE);
    return NULL;
}

/* The futex that a thread of this process waits for (proc_pid_syscall(5)), or NULL. */
static void *awaited_futex(int tid)
{
    char path[64], line[128];
    snprintf(path, sizeof path, "/proc/self/task/%d/syscall", tid);
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return NULL;
    bool read = fgets(line, sizeof line, file) != NULL;
    fclose(file);
    long number;
    unsigned long address, command;
    if (!read || sscanf(line, "%ld %lx %lx", &number, &address, &command) != 3 || number != SYS_futex)
        return NULL;
    command &= FUTEX_COMMAND;
    return command == WAIT || command == WAIT_BITSET ? (void *)address : NULL;
}

static unsigned count_waiters(const void *futex)
{
    unsigned count = 0;
    DIR *tasks = opendir("/proc/self/task");
    for (struct dirent *task; tasks != NULL && (task = readdir(tasks)) != NULL;)
        count += task->d_name[0] != '.' && awaited_futex(atoi(task->d_name)) == futex;
    if (tasks != NULL)
        closedir(tasks);
    return count;
}

/* Drop the readers of the lock at whose futex the dry run waits.  Does nothing if that is no such lock, or if it has
 * other readers than the stopped threads that wait there. */
static void drop_readers(char *futex)
{
    struct lock *lock = (struct lock *)(futex - offsetof(struct lock, write_phase));
    if ((uintptr_t)lock % sizeof(void *) != 0 || (released_lock != NULL && released_lock != lock) ||
        (uintptr_t)futex % MINIMUM_PAGE < offsetof(struct lock, write_phase)) /* the word before it may not be mapped */
        return;
    unsigned word = atomic_load(&lock->readers), readers = word / READER;
    bool is_next = (word & (WRITE_PHASE | WRITER_IS_NEXT)) == WRITER_IS_NEXT;
    if (!is_next || readers == 0 || readers + dropped + 1 != count_waiters(futex) ||
        atomic_load(&lock->readers) != word)
        return;
    released_lock = lock;
    dropped += readers;
    for (; readers != 0; readers--)
        pthread_rwlock_unlock((pthread_rwlock_t *)lock);
}

static int compare(const int *version, const int *other)
{
    return version[0] != other[0] ? version[0] - other[0] : version[1] - other[1];
}

static bool version_is_known(void)
{
    int version[2];
    return sscanf(gnu_get_libc_version(), "%d.%d", &version[0], &version[1]) == 2 &&
           compare(version, oldest_known) >= 0 && compare(version, newest_known) <= 0;
}

/* A lock of our own, and a thread that waits for it. */
struct probe {
    union {
        pthread_rwlock_t whole;
        struct lock words;
    } lock;
    int (*enter)(pthread_rwlock_t *);
    atomic_int tid;
};

static void *wait_at(void *argument)
{
    struct probe *probe = argument;
    own_thread_begin("gpu-ckpt-copy");
    atomic_store(&probe->tid, (int)syscall(SYS_gettid));
    if (probe->enter(&probe->lock.whole) == 0)
        pthread_rwlock_unlock(&probe->lock.whole);
    return NULL;
}

static bool has(struct probe *probe, unsigned readers, unsigned write_phase)
{
    return atomic_load(&probe->lock.words.readers) == readers &&
           atomic_load(&probe->lock.words.write_phase) == write_phase;
}

/* Whether a thread that waits to `enter` the lock, which is locked, sets these words and waits at the expected
 * futex. */
static bool waits_as_expected(struct probe *probe, int (*enter)(pthread_rwlock_t *), unsigned readers,
                              unsigned write_phase)
{
    pthread_t thread;
    probe->enter = enter;
    atomic_store(&probe->tid, 0);
    bool known = false, begun = pthread_create(&thread, NULL, wait_at, probe) == 0;
    for (unsigned turn = 0; begun && !known && turn < LAYOUT_TURNS; turn++) {
        nanosleep(&(struct timespec){.tv_nsec = TURN_NS}, NULL);
        int tid = atomic_load(&probe->tid);
        known = tid != 0 && has(probe, readers, write_phase) && awaited_futex(tid) == &probe->lock.words.write_phase;
    }
    pthread_rwlock_unlock(&probe->lock.whole);
    if (begun)
        pthread_join(thread, NULL);
    return known;
}

/* Try what `drop_readers` and `rwlock_restore` read and write on a lock of our own. */
static bool layout_is_known(void)
{
    struct probe probe = {.lock.whole = PTHREAD_RWLOCK_INITIALIZER};
    pthread_rwlock_t *lock = &probe.lock.whole;
    bool known = has(&probe, 0, 0);
    pthread_rwlock_rdlock(lock);
    known = known && has(&probe, READER, 0);
    if (known)
        known = waits_as_expected(&probe, pthread_rwlock_wrlock, READER | WRITER_IS_NEXT, HAS_WAITERS);
    else
        pthread_rwlock_unlock(lock);
    if (!known || !has(&probe, WRITE_PHASE, WRITE_PHASE)) /* it stays in the write phase until the next reader */
        return false;
    pthread_rwlock_wrlock(lock);
    known = has(&probe, WRITE_PHASE | WRITER_IS_NEXT, WRITE_PHASE);
    if (known)
        known = waits_as_expected(&probe, pthread_rwlock_rdlock, READER | WRITE_PHASE | WRITER_IS_NEXT,
                               WRITE_PHASE | HAS_WAITERS);
    else
        pthread_rwlock_unlock(lock);
    if (!known || !has(&probe, 0, 0))
        return false;
    atomic_fetch_add(&probe.lock.words.readers, READER); /* as `rwlock_restore` counts a reader again */
    known = pthread_rwlock_trywrlock(lock) != 0;
    pthread_rwlock_unlock(lock);
    return known && has(&probe, 0, 0);
}

bool rwlock_layout_is_known(void) { return version_is_known() && layout_is_known(); }

static time_t seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec;
}

/* Wait for the end of the dry run, and drop readers that block it.  False if it was given up. */
static bool wait_for_probe_call(void)
{
    void *before = NULL;
    time_t deadline = seconds() + PROBE_SECONDS;
    for (unsigned turn = 1; seconds() <= deadline; turn++) {
        if (atomic_load(&probe_call.state) == IDLE)
            return true;
        if (turn % TURNS_PER_CHECK == 0) {
            int tid = atomic_load(&probe_call.tid);
            void *now = tid != 0 ? awaited_futex(tid) : NULL;
            if (now != NULL && now == before)
                drop_readers(now);
            before = now;
        }
        nanosleep(&(struct timespec){.tv_nsec = TURN_NS}, NULL);
    }
    int state = AWAITED;
    return !atomic_compare_exchange_strong(&probe_call.state, &state, GIVEN_UP);
}

CUresult rwlock_release(CUresult (*dry_run)(void))
{
    int state = IDLE;
    if (!atomic_compare_exchange_strong(&probe_call.state, &state, AWAITED)) /* the last one is still blocked */
        return CUDA_ERROR_NOT_READY;
    probe_call.dry_run = dry_run;
    atomic_store(&probe_call.tid, 0);
    pthread_t thread;
    if (pthread_create(&thread, NULL, run_probe_call, NULL) != 0) {
        atomic_store(&probe_call.state, IDLE);
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    pthread_detach(thread);
    return wait_for_probe_call() ? probe_call.result : CUDA_ERROR_NOT_READY;
}

bool rwlock_probe_is_busy(void) { return atomic_load(&probe_call.state) != IDLE; }

bool rwlock_is_released(void) { return dropped != 0; }

/* The dropped readers wait in pthread_rwlock_rdlock, and lack nothing but being counted.  All are counted at once: else
 * the lock could change hands in between, with some of them not counted.  If that begins a read phase, wake those who
 * wait for it, as glibc does. */
void rwlock_restore(void)
{
    if (dropped == 0)
        return;
    unsigned word = atomic_load(&released_lock->readers), more = dropped * READER;
    bool begins;
    do
        begins = (word & (WRITE_PHASE | WRITER_IS_NEXT)) == WRITE_PHASE;
    while (!atomic_compare_exchange_weak(&released_lock->readers, &word, (begins ? word ^ WRITE_PHASE : word) + more));
    if (begins && (atomic_exchange(&released_lock->write_phase, 0) & HAS_WAITERS) != 0) {
        syscall(SYS_futex, &released_lock->write_phase, WAKE | PRIVATE, INT_MAX, NULL, NULL, 0);
        syscall(SYS_futex, &released_lock->write_phase, WAKE, INT_MAX, NULL, NULL, 0);
    }
    dropped = 0;
    released_lock = NULL;
}
