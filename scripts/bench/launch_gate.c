/* What the launch gate adds to a call of the driver; built and run by `launch_gate.py`.
 *
 * With -DDRIVER: a libcuda.so.1 of two functions that do nothing, one of which passes the gate.  Else the program that
 * calls the two in turns and prints the nanoseconds of each, by its fastest turn. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <time.h>

#ifdef DRIVER

int cuCtxSynchronize(void) { return 0; }
int cuBenchmark(void) { return 0; }

#else

#define CALLS 20000000
#define TURNS 25

static double nanoseconds(int (*volatile function)(void))
{
    struct timespec began, ended;
    clock_gettime(CLOCK_MONOTONIC, &began);
    for (long at = 0; at < CALLS; at++)
        function();
    clock_gettime(CLOCK_MONOTONIC, &ended);
    return ((double)(ended.tv_sec - began.tv_sec) * 1e9 + (double)(ended.tv_nsec - began.tv_nsec)) / CALLS;
}

int main(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    int (*gated)(void), (*direct)(void);
    double fastest[2] = {1e9, 1e9};
    if (driver == NULL || (*(void **)&gated = dlsym(driver, "cuCtxSynchronize")) == NULL ||
        (*(void **)&direct = dlsym(driver, "cuBenchmark")) == NULL)
        return fprintf(stderr, "%s\n", dlerror()), 1;
    Dl_info of_gated, of_direct;
    if (dladdr((void *)gated, &of_gated) == 0 || dladdr((void *)direct, &of_direct) == 0)
        return 1;
    for (int turn = 0; turn < TURNS; turn++)
        for (int kind = 0; kind < 2; kind++) {
            double seen = nanoseconds(kind == 0 ? direct : gated);
            fastest[kind] = seen < fastest[kind] ? seen : fastest[kind];
        }
    printf("%d %.3f %.3f\n", of_gated.dli_fbase != of_direct.dli_fbase, fastest[0], fastest[1]);
    return 0;
}

#endif
