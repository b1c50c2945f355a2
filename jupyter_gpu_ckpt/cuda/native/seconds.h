/* The time on a clock that only goes forward. */
#pragma once

#include <time.h>

/* Seconds of CLOCK_MONOTONIC, which Python's time.monotonic() has, too. */
static inline double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}
