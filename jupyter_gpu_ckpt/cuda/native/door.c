#define _GNU_SOURCE
#include "door.h"

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

#define TURN_NS 100000
#define TURNS_OF_A_LOOK 50 /* 5 ms: who is in the same place twice is held up */
#define PATIENCE 3         /* seconds */
#define PROBE_TURNS 20000  /* at least two seconds */

/* How a pthread_rwlock_t begins, in glibc since 2.25 (nptl/pthread_rwlock_common.c describes it).  It is private to glibc,
 * and no newer release has been looked at than the last of these. */
static const int first_known[] = {2, 25}, last_known[] = {2, 42};
struct lock {
    atomic_uint readers; /* their number times READER, and these bits: */
    atomic_uint writers;
    atomic_uint write_phase; /* where readers wait for its end, and the one writer that is next for its begin */
    atomic_uint next_writer; /* where all other writers wait */
};
enum { WRITE_PHASE = 1, WRITER_IS_NEXT = 2, READER = 8 };
enum { SOMEBODY_WAITS = 2 }; /* of `write_phase` */
/* futex(2); the command, without the flags for private ones and the clock */
enum { FUTEX_COMMAND = 0x7f, WAIT = 0, WAKE = 1, WAIT_BITSET = 9, PRIVATE = 128 };

static struct lock *door; /* whose readers were relieved of it */
static unsigned relieved;

enum { IDLE, AWAITED, GIVEN_UP };
enum { MINIMUM_PAGE = 4096 };
static struct {
    CUresult (*rehearsal)(void);
    CUresult result;
    atomic_int tid;
    atomic_int state;
} knock;

static void *rehearse(void *unused)
{
    (void)unused;
    pthread_setname_np(pthread_self(), "gpu-ckpt-copy");
    atomic_store(&knock.tid, (int)syscall(SYS_gettid));
    knock.result = knock.rehearsal();
    atomic_store(&knock.state, IDLE);
    return NULL;
}

/* The futex for which a thread of this process waits (proc_pid_syscall(5)), or NULL. */
static void *waits_for(int tid)
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

static unsigned who_wait_for(const void *futex)
{
    unsigned count = 0;
    DIR *tasks = opendir("/proc/self/task");
    for (struct dirent *task; tasks != NULL && (task = readdir(tasks)) != NULL;)
        count += task->d_name[0] != '.' && waits_for(atoi(task->d_name)) == futex;
    if (tasks != NULL)
        closedir(tasks);
    return count;
}

/* Relieve the readers of the lock at whose futex the rehearsal waits; not where that is no such lock, or has others for
 * readers than who wait there and are stopped. */
static void relieve(char *futex)
{
    struct lock *lock = (struct lock *)(futex - offsetof(struct lock, write_phase));
    if ((uintptr_t)lock % sizeof(void *) != 0 || (door != NULL && door != lock) ||
        (uintptr_t)futex % MINIMUM_PAGE < offsetof(struct lock, write_phase)) /* what is before it may not be there */
        return;
    unsigned word = atomic_load(&lock->readers), readers = word / READER;
    bool is_next = (word & (WRITE_PHASE | WRITER_IS_NEXT)) == WRITER_IS_NEXT;
    if (!is_next || readers == 0 || readers + relieved + 1 != who_wait_for(futex) || atomic_load(&lock->readers) != word)
        return;
    door = lock;
    relieved += readers;
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
           compare(version, first_known) >= 0 && compare(version, last_known) <= 0;
}

/* A lock of our own, and a thread that has to wait for it. */
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
    pthread_setname_np(pthread_self(), "gpu-ckpt-copy");
    atomic_store(&probe->tid, (int)syscall(SYS_gettid));
    if (probe->enter(&probe->lock.whole) == 0)
        pthread_rwlock_unlock(&probe->lock.whole);
    return NULL;
}

static bool has(struct probe *probe, unsigned readers, unsigned write_phase)
{
    return atomic_load(&probe->lock.words.readers) == readers && atomic_load(&probe->lock.words.write_phase) == write_phase;
}

/* Whether somebody who waits to `enter` the lock, which is held, leaves these words behind, and waits where we look. */
static bool waits_as_known(struct probe *probe, int (*enter)(pthread_rwlock_t *), unsigned readers, unsigned write_phase)
{
    pthread_t thread;
    probe->enter = enter;
    atomic_store(&probe->tid, 0);
    bool known = false, begun = pthread_create(&thread, NULL, wait_at, probe) == 0;
    for (unsigned turn = 0; begun && !known && turn < PROBE_TURNS; turn++) {
        nanosleep(&(struct timespec){.tv_nsec = TURN_NS}, NULL);
        int tid = atomic_load(&probe->tid);
        known = tid != 0 && has(probe, readers, write_phase) && waits_for(tid) == &probe->lock.words.write_phase;
    }
    pthread_rwlock_unlock(&probe->lock.whole);
    if (begun)
        pthread_join(thread, NULL);
    return known;
}

/* What `relieve` and `door_close` read and write, on a lock that nobody else has. */
static bool layout_is_known(void)
{
    struct probe probe = {.lock.whole = PTHREAD_RWLOCK_INITIALIZER};
    pthread_rwlock_t *lock = &probe.lock.whole;
    bool known = has(&probe, 0, 0);
    pthread_rwlock_rdlock(lock);
    known = known && has(&probe, READER, 0);
    if (known)
        known = waits_as_known(&probe, pthread_rwlock_wrlock, READER | WRITER_IS_NEXT, SOMEBODY_WAITS);
    else
        pthread_rwlock_unlock(lock);
    if (!known || !has(&probe, WRITE_PHASE, WRITE_PHASE)) /* it stays the writers' until somebody reads */
        return false;
    pthread_rwlock_wrlock(lock);
    known = has(&probe, WRITE_PHASE | WRITER_IS_NEXT, WRITE_PHASE);
    if (known)
        known = waits_as_known(&probe, pthread_rwlock_rdlock, READER | WRITE_PHASE | WRITER_IS_NEXT,
                               WRITE_PHASE | SOMEBODY_WAITS);
    else
        pthread_rwlock_unlock(lock);
    if (!known || !has(&probe, 0, 0))
        return false;
    atomic_fetch_add(&probe.lock.words.readers, READER); /* as one who is given a share back */
    known = pthread_rwlock_trywrlock(lock) != 0;
    pthread_rwlock_unlock(lock);
    return known && has(&probe, 0, 0);
}

bool door_is_known(void) { return version_is_known() && layout_is_known(); }

static time_t seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec;
}

/* Whether it is over by then. */
static bool await(void)
{
    void *before = NULL;
    time_t deadline = seconds() + PATIENCE;
    for (unsigned turn = 1; seconds() <= deadline; turn++) {
        if (atomic_load(&knock.state) == IDLE)
            return true;
        if (turn % TURNS_OF_A_LOOK == 0) {
            int tid = atomic_load(&knock.tid);
            void *now = tid != 0 ? waits_for(tid) : NULL;
            if (now != NULL && now == before)
                relieve(now);
            before = now;
        }
        nanosleep(&(struct timespec){.tv_nsec = TURN_NS}, NULL);
    }
    int state = AWAITED;
    return !atomic_compare_exchange_strong(&knock.state, &state, GIVEN_UP);
}

CUresult door_open(CUresult (*rehearsal)(void))
{
    int state = IDLE;
    if (!atomic_compare_exchange_strong(&knock.state, &state, AWAITED)) /* the last one is held up still */
        return CUDA_ERROR_NOT_READY;
    knock.rehearsal = rehearsal;
    atomic_store(&knock.tid, 0);
    pthread_t thread;
    if (pthread_create(&thread, NULL, rehearse, NULL) != 0) {
        atomic_store(&knock.state, IDLE);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_detach(thread);
    return await() ? knock.result : CUDA_ERROR_NOT_READY;
}

bool door_is_busy(void) { return atomic_load(&knock.state) != IDLE; }

bool door_is_open(void) { return relieved != 0; }

/* They wait in pthread_rwlock_rdlock, and all that they lack is to be counted: at once, or the lock would change hands in
 * between, and those who are not counted with it.  Who begins a read phase tells those who wait for it, as there. */
void door_close(void)
{
    if (relieved == 0)
        return;
    unsigned word = atomic_load(&door->readers), more = relieved * READER;
    bool begins;
    do
        begins = (word & (WRITE_PHASE | WRITER_IS_NEXT)) == WRITE_PHASE;
    while (!atomic_compare_exchange_weak(&door->readers, &word, (begins ? word ^ WRITE_PHASE : word) + more));
    if (begins && (atomic_exchange(&door->write_phase, 0) & SOMEBODY_WAITS) != 0) {
        syscall(SYS_futex, &door->write_phase, WAKE | PRIVATE, INT_MAX, NULL, NULL, 0);
        syscall(SYS_futex, &door->write_phase, WAKE, INT_MAX, NULL, NULL, 0);
    }
    relieved = 0;
    door = NULL;
}
