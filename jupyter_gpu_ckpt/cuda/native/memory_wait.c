#define _GNU_SOURCE
#include "memory_wait.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "capture.h"
#include "child.h"
#include "control.h"
#include "launch_gate.h"
#include "published.h"

#define SHARES_VARIABLE "JUPYTER_GPU_CKPT_SHARES_GPUS"
/* Milliseconds between two looks, and in which the owner begins to answer: it reads the wish ten times a second, but may
 * have to wait for a processor itself, or have ended. */
#define LOOK 10
#define PATIENCE 15000

static bool shares;

/* Of this process alone, not of the programs that it starts. */
__attribute__((constructor)) static void begin(void)
{
    shares = getenv(SHARES_VARIABLE) != NULL;
    unsetenv(SHARES_VARIABLE);
}

/* The owner answers by closing the launch gate: for as long as others leave or this process does, or for a moment if no
 * memory can be had. */
bool memory_wait(size_t bytes)
{
    if (!shares || !HAS_LAUNCH_GATE || is_inert() || capture_is_active() || !control_open())
        return false;
    int error = errno;
    unsigned before = launch_gate_closings();
    atomic_fetch_add(&gpu_ckpt_published.wanted, (long long)bytes);
    bool answered = false;
    for (int waited = 0; waited < PATIENCE && !(answered = launch_gate_closings() != before); waited += LOOK)
        nanosleep(&(struct timespec){.tv_nsec = LOOK * 1000000}, NULL);
    answered = answered && launch_gate_pass() == CUDA_SUCCESS;
    atomic_fetch_sub(&gpu_ckpt_published.wanted, (long long)bytes);
    errno = error;
    return answered;
}
