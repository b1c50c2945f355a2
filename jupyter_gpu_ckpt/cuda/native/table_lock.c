#define _GNU_SOURCE
#include "table_lock.h"

#include <sched.h>
#include <stdatomic.h>
#include <time.h>

static atomic_flag busy = ATOMIC_FLAG_INIT;

void table_lock(void)
{
    while (atomic_flag_test_and_set_explicit(&busy, memory_order_acquire))
        sched_yield();
}

void table_unlock(void) { atomic_flag_clear_explicit(&busy, memory_order_release); }

bool table_lock_for_swap(void)
{
    struct timespec begun, now;
    clock_gettime(CLOCK_MONOTONIC, &begun);
    while (atomic_flag_test_and_set_explicit(&busy, memory_order_acquire)) {
        sched_yield();
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (now.tv_sec - begun.tv_sec > 1)
            return false;
    }
    return true;
}
