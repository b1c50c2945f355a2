#define _GNU_SOURCE
#include "table_lock.h"

#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static atomic_flag busy = ATOMIC_FLAG_INIT;
static atomic_int reading;

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

void table_set_reading(bool reads)
{
    atomic_store(&reading, reads);
    if (!reads)
        syscall(SYS_futex, &reading, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

void table_wait_for_reads(void)
{
    while (atomic_load(&reading) != 0)
        syscall(SYS_futex, &reading, FUTEX_WAIT_PRIVATE, 1, NULL, NULL, 0);
}

void table_in_child(void)
{
    table_unlock();
    atomic_store(&reading, 0);
}
