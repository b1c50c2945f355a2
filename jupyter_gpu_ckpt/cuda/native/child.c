#include "child.h"

#include <pthread.h>
#include <stdatomic.h>

#include "arena.h"
#include "blocks.h"
#include "control.h"
#include "driver.h"

static atomic_bool inert;

bool is_inert(void) { return atomic_load_explicit(&inert, memory_order_relaxed); }

/* The one thread that there is.  Nothing is waited for, here or before the fork: whoever had a lock is not here to give
 * it back, and in the parent it may need, to do so, what another library holds meanwhile (an allocator its heap). */
static void in_child(void)
{
    atomic_store(&inert, true);
    control_in_child();
    blocks_in_child();
    driver_in_child();
    arena_close();
}

__attribute__((constructor)) static void begin(void) { pthread_atfork(NULL, NULL, in_child); }
