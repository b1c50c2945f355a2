#include "child.h"

#include <pthread.h>
#include <stdatomic.h>

#include "addresses.h"
#include "allocations.h"
#include "capture.h"
#include "control.h"
#include "device_kernels.h"
#include "driver.h"
#include "host_memory.h"
#include "ipc.h"
#include "launch_gate.h"
#include "mappings.h"
#include "mirror.h"
#include "pools.h"
#include "table_lock.h"

static atomic_bool inert;

bool is_inert(void) { return atomic_load_explicit(&inert, memory_order_relaxed); }

/* Runs on the only thread of the child.  Never waits for a lock, here or before the fork: the thread that had it does
 * not exist here, and in the parent it may need a lock of another library (an allocator's heap) before it unlocks. */
static void in_child(void)
{
    atomic_store(&inert, library_of_driver() != NULL);
    launch_gate_in_child();
    control_in_child();
    allocations_in_child();
    addresses_in_child();
    mappings_in_child();
    pools_in_child();
    mirror_in_child();
    table_in_child(); /* another thread of the parent may have been changing the tables */
    capture_in_child();
    driver_in_child();
    ipc_in_child();
    device_kernels_in_child();
    host_memory_in_child();
}

__attribute__((constructor)) static void begin(void) { pthread_atfork(NULL, NULL, in_child); }
