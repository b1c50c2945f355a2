/* Find the driver that the process has loaded; never load a library. */
#define _GNU_SOURCE
#include "driver.h"

#include <dlfcn.h>
#include <link.h>
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

/* Of the driver's library in memory; 0 before it is known. */
static _Atomic uintptr_t code_begin, code_end;

static int note_code(struct dl_phdr_info *object, size_t size, void *function)
{
    (void)size;
    uintptr_t begin = UINTPTR_MAX, end = 0;
    for (size_t at = 0; at < object->dlpi_phnum; at++)
        if (object->dlpi_phdr[at].p_type == PT_LOAD) {
            uintptr_t low = object->dlpi_addr + object->dlpi_phdr[at].p_vaddr;
            uintptr_t high = low + object->dlpi_phdr[at].p_memsz;
            begin = low < begin ? low : begin;
            end = high > end ? high : end;
        }
    if ((uintptr_t)function < begin || (uintptr_t)function >= end)
        return 0;
    atomic_store(&code_begin, begin);
    atomic_store(&code_end, end);
    return 1;
}

bool is_code_of_driver(const void *address)
{
    return (uintptr_t)address >= atomic_load_explicit(&code_begin, memory_order_relaxed) &&
           (uintptr_t)address < atomic_load_explicit(&code_end, memory_order_relaxed);
}

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
    dl_iterate_phdr(note_code, (void *)fresh.cuMemRelease);
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
