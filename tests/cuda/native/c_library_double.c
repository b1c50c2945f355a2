/* Another C library: of the VERSION that is given, or with OTHER_LOCKS. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#pragma GCC visibility push(default)

#ifdef VERSION
const char *gnu_get_libc_version(void);
const char *gnu_get_libc_version(void) { return VERSION; }
#endif

#ifdef OTHER_LOCKS
/* -1: a writer has it; else the number of readers. */
static atomic_int *word(pthread_rwlock_t *lock) { return (atomic_int *)lock; }

static void enter(pthread_rwlock_t *lock, int add, int least, int most)
{
    for (;; sched_yield()) {
        int found = atomic_load(word(lock));
        if (found >= least && found <= most && atomic_compare_exchange_weak(word(lock), &found, found + add))
            return;
    }
}

int pthread_rwlock_rdlock(pthread_rwlock_t *lock) { return enter(lock, 1, 0, 1 << 20), 0; }

int pthread_rwlock_wrlock(pthread_rwlock_t *lock) { return enter(lock, -1, 0, 0), 0; }

int pthread_rwlock_unlock(pthread_rwlock_t *lock)
{
    atomic_fetch_add(word(lock), atomic_load(word(lock)) < 0 ? 1 : -1);
    return 0;
}
#endif
