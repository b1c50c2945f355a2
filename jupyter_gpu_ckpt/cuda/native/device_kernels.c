#define _GNU_SOURCE
#include "device_kernels.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

/* Where they are loaded; a context's id is never another's, its handle may be.  More than these do without. */
#define MOST 128
static struct {
    CUcontext context;
    unsigned long long id; /* 0: this driver gives none */
    const char *name;
    CUfunction kernel;
} loaded[MOST];
static atomic_size_t count;
static pthread_mutex_t changing = PTHREAD_MUTEX_INITIALIZER;

bool device_kernels_are_loaded(void) { return atomic_load(&count) != 0; }

void device_kernels_in_child(void)
{
    changing = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    memset(loaded, 0, sizeof loaded);
    count = 0;
}

static unsigned long long id_of(CUcontext context)
{
    unsigned long long id = 0;
    return driver()->cuCtxGetId != NULL && driver()->cuCtxGetId(context, &id) == CUDA_SUCCESS ? id : 0;
}

CUfunction device_kernel(CUcontext context, const char *name)
{
    CUfunction found = NULL;
    unsigned long long id = id_of(context);
    pthread_mutex_lock(&changing);
    for (size_t at = 0; at < MOST && found == NULL; at++)
        if (loaded[at].context == context && loaded[at].id == id && strcmp(loaded[at].name, name) == 0)
            found = loaded[at].kernel;
    pthread_mutex_unlock(&changing);
    return found;
}

static bool remember(CUcontext context, const char *name, CUfunction kernel)
{
    size_t at = 0;
    unsigned long long id = id_of(context);
    pthread_mutex_lock(&changing);
    while (at < MOST && loaded[at].context != NULL)
        at++;
    if (at < MOST) {
        loaded[at].context = context;
        loaded[at].id = id;
        loaded[at].name = name;
        loaded[at].kernel = kernel;
        count++;
    }
    pthread_mutex_unlock(&changing);
    return at < MOST;
}

void device_kernels_forget(CUcontext context)
{
    pthread_mutex_lock(&changing);
    for (size_t at = 0; at < MOST; at++)
        if (loaded[at].context != NULL && loaded[at].context == context) {
            loaded[at].context = NULL;
            count--;
        }
    pthread_mutex_unlock(&changing);
}

/* Forget those of another context that had this one's handle. */
static void forget_others(CUcontext context)
{
    unsigned long long id = id_of(context);
    pthread_mutex_lock(&changing);
    for (size_t at = 0; at < MOST; at++)
        if (loaded[at].context != NULL && loaded[at].context == context && loaded[at].id != id) {
            loaded[at].context = NULL;
            count--;
        }
    pthread_mutex_unlock(&changing);
}

void device_kernel_load(CUcontext context, const char *name, const char *text)
{
    const struct driver *cu = driver();
    CUmodule module;
    CUfunction kernel;
    if (cu->cuModuleLoadData == NULL || cu->cuModuleUnload == NULL || cu->cuModuleGetFunction == NULL ||
        device_kernel(context, name) != NULL)
        return;
    forget_others(context);
    if (cu->cuModuleLoadData(&module, text) != CUDA_SUCCESS)
        return;
    if (cu->cuModuleGetFunction(&kernel, module, name) != CUDA_SUCCESS || !remember(context, name, kernel))
        cu->cuModuleUnload(module);
}
