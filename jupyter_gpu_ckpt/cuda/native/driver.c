/* Find the driver that the process has loaded; never load a library. */
#define _GNU_SOURCE
#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>

#include "launch_gate.h"
#include "lookup.h"

static pthread_mutex_t publishing = PTHREAD_MUTEX_INITIALIZER;

/* A thread of the parent that was publishing it does not exist here. */
void driver_in_child(void) { publishing = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER; }

static struct driver found_driver;
static bool found_all;
static void *found_library;
static _Atomic(const struct driver *) the_driver;

static bool look_up_driver(void *library, struct driver *found)
{
    bool all = true;
#define LOOK_UP(name, parameters) *(void **)&found->name = original_dlsym(library, #name);
#define LOOK_UP_STAND_IN(name, since, parameters) LOOK_UP(name, parameters)
#define CHECK(name, parameters) all = all && found->name != NULL;
    DRIVER_FUNCTIONS(LOOK_UP)
    OPTIONAL_FUNCTIONS(LOOK_UP)
    STAND_INS(LOOK_UP_STAND_IN)
    DRIVER_FUNCTIONS(CHECK)
#undef LOOK_UP
#undef LOOK_UP_STAND_IN
#undef CHECK
    return all && found->cuMemAlloc_v2 != NULL && found->cuMemFree_v2 != NULL && found->cuStreamDestroy_v2 != NULL &&
           found->cuMemCreate != NULL && found->cuMemRelease != NULL && found->cuMemMap != NULL &&
           found->cuMemUnmap != NULL && found->cuMemSetAccess != NULL;
}

const struct driver *any_driver(void)
{
    const struct driver *known = atomic_load_explicit(&the_driver, memory_order_acquire);
    if (known != NULL)
        return known;
    void *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (library == NULL)
        return NULL;
    /* Not while the mutex is locked: dlsym waits for the loader's lock, whose owner may be waiting for us. */
    struct driver fresh;
    bool all = look_up_driver(library, &fresh);
    launch_gate_prepare(library);
    pthread_mutex_lock(&publishing);
    if (atomic_load_explicit(&the_driver, memory_order_relaxed) == NULL) {
        found_driver = fresh;
        found_all = all;
        found_library = library;
        atomic_store_explicit(&the_driver, &found_driver, memory_order_release);
    }
    pthread_mutex_unlock(&publishing);
    return &found_driver;
}

void *library_of_driver(void) { return found_library; }

const struct driver *driver(void)
{
    const struct driver *any = any_driver();
    return any != NULL && found_all ? any : NULL;
}
