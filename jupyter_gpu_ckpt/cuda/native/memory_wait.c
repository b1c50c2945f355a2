#define _GNU_SOURCE
#include "memory_wait.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
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
/* Of a GPU's memory: what a context is first thought to need (640 MiB of 80 GiB), and at the most. */
#define SMALLEST_CONTEXT 128
#define LARGEST_CONTEXT 32

static bool shares;
static pthread_mutex_t contexts = PTHREAD_MUTEX_INITIALIZER;

/* Of this process alone, not of the programs that it starts. */
__attribute__((constructor)) static void begin(void)
{
    shares = getenv(SHARES_VARIABLE) != NULL;
    unsetenv(SHARES_VARIABLE);
}

static bool may_wait(void)
{
    return shares && HAS_LAUNCH_GATE && !is_inert() && !capture_is_active() && control_open();
}

/* The owner answers by closing the launch gate: for as long as others leave or this process does, or for a moment if no
 * memory can be had. */
static bool wait_for_owner(size_t bytes)
{
    int error = errno;
    unsigned before = launch_gate_closings();
    bool answered = false;
    atomic_fetch_add(&gpu_ckpt_published.wanted, (long long)bytes);
    for (int waited = 0; waited < PATIENCE && !(answered = launch_gate_closings() != before); waited += LOOK)
        nanosleep(&(struct timespec){.tv_nsec = LOOK * 1000000}, NULL);
    answered = answered && launch_gate_pass() == CUDA_SUCCESS;
    atomic_fetch_sub(&gpu_ckpt_published.wanted, (long long)bytes);
    errno = error;
    return answered;
}

bool memory_wait(size_t bytes) { return may_wait() && wait_for_owner(bytes); }

/* Nobody knows how much a context needs, on this GPU with this program's modules, until there is one. */
bool memory_wait_for_context(CUdevice device, size_t *bytes)
{
    const struct driver *cu = any_driver();
    size_t total;
    CUuuid uuid;
    if (!may_wait() || cu->cuDeviceGetUuid == NULL || cu->cuDeviceTotalMem_v2 == NULL ||
        cu->cuDeviceGetUuid(&uuid, device) != CUDA_SUCCESS || cu->cuDeviceTotalMem_v2(&total, device) != CUDA_SUCCESS)
        return false;
    *bytes = *bytes == 0 ? total / SMALLEST_CONTEXT : 2 * *bytes;
    if (*bytes > total / LARGEST_CONTEXT)
        return false;
    pthread_mutex_lock(&contexts); /* two at the same time would be of one GPU for the owner */
    memcpy(gpu_ckpt_published.wanted_on, uuid.bytes, sizeof uuid.bytes);
    bool answered = wait_for_owner(*bytes);
    memset(gpu_ckpt_published.wanted_on, 0, sizeof gpu_ckpt_published.wanted_on);
    pthread_mutex_unlock(&contexts);
    return answered;
}
