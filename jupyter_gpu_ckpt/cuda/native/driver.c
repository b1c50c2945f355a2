/* Find the driver and the runtime that the process has loaded; never load a library. */
#define _GNU_SOURCE
#include "driver.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

static pthread_mutex_t lookup = PTHREAD_MUTEX_INITIALIZER;

/* A thread of the parent that was looking them up does not exist here. */
void driver_in_child(void) { lookup = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER; }

static struct driver found_driver;
static bool found_all;
static _Atomic(const struct driver *) the_driver;

static void look_up_driver(void *library)
{
    found_all = true;
#define LOOK_UP(name, parameters)                                                                                      \
    *(void **)&found_driver.name = dlsym(library, #name);                                                              \
    found_all = found_all && found_driver.name != NULL;
    DRIVER_FUNCTIONS(LOOK_UP)
#undef LOOK_UP
}

const struct driver *any_driver(void)
{
    const struct driver *known = atomic_load_explicit(&the_driver, memory_order_acquire);
    if (known != NULL)
        return known;
    void *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (library == NULL)
        return NULL;
    pthread_mutex_lock(&lookup);
    if (atomic_load_explicit(&the_driver, memory_order_relaxed) == NULL) {
        look_up_driver(library);
        atomic_store_explicit(&the_driver, &found_driver, memory_order_release);
    }
    pthread_mutex_unlock(&lookup);
    return &found_driver;
}

const struct driver *driver(void)
{
    const struct driver *any = any_driver();
    return any != NULL && found_all ? any : NULL;
}

static struct runtime found_runtime;
static _Atomic(const struct runtime *) the_runtime;

/* RTLD_NEXT does not find it: PyTorch loads its runtime into a scope of its own. */
static int find_runtime(struct dl_phdr_info *info, size_t size, void *name)
{
    (void)size;
    const char *slash = info->dlpi_name != NULL ? strrchr(info->dlpi_name, '/') : NULL;
    if (slash == NULL || strncmp(slash + 1, "libcudart.so", strlen("libcudart.so")) != 0)
        return 0;
    *(const char **)name = info->dlpi_name;
    return 1;
}

const struct runtime *runtime(void)
{
    const struct runtime *known = atomic_load_explicit(&the_runtime, memory_order_acquire);
    if (known != NULL)
        return known;
    const char *name = NULL;
    dl_iterate_phdr(find_runtime, &name);
    void *library = name != NULL ? dlopen(name, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    if (library == NULL)
        return NULL;
    pthread_mutex_lock(&lookup);
    if (atomic_load_explicit(&the_runtime, memory_order_relaxed) == NULL) {
        *(void **)&found_runtime.cudaMalloc = dlsym(library, "cudaMalloc");
        *(void **)&found_runtime.cudaFree = dlsym(library, "cudaFree");
        *(void **)&found_runtime.cudaGetDevice = dlsym(library, "cudaGetDevice");
        *(void **)&found_runtime.cudaDeviceSynchronize = dlsym(library, "cudaDeviceSynchronize");
        if (found_runtime.cudaMalloc && found_runtime.cudaFree && found_runtime.cudaGetDevice &&
            found_runtime.cudaDeviceSynchronize)
            atomic_store_explicit(&the_runtime, &found_runtime, memory_order_release);
    }
    pthread_mutex_unlock(&lookup);
    return atomic_load_explicit(&the_runtime, memory_order_acquire);
}
