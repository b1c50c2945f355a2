/* State that other processes read in this one's memory (`cuda/fastpath.py`): a request may find no answer when they
 * have to know.  Found by its mark in the mappings of this library; mark and version have the same offsets in all
 * versions. */
#pragma once

#include <stdatomic.h>

/* Where the allocations are, and whether readers are dropped from the driver's lock (`rwlock_release.h`). */
enum { ON_DEVICE, IN_ANONYMOUS_MEMORY, IN_EXTENTS, READERS_DROPPED };

/* Bits of ``launch_gate``; 0: calls pass. */
enum {
    GATE_UNPREPARED = 1, /* the driver's functions are not known yet */
    GATE_CLOSED = 2,
    GATE_LEASED = 4, /* closed, and opens by itself */
    GATE_WATCHED = 8, /* the next call clears this bit, and passes (`mirror.h`) */
    GATE_CLOSING = 16, /* from here on, while it is closed: which closing this is */
};

struct published {
    char mark[16];
    int version;
    atomic_int state;
    atomic_int launch_gate; /* read by every gated call (`launch_gate.c`) */
    atomic_int touches;     /* calls that found the gate closed, since it was */
    atomic_llong wanted;    /* bytes of allocations that wait for free memory (`memory_wait.h`) */
    unsigned char wanted_on[16]; /* UUID of the GPU, if a context waits; else zeros */
    atomic_int mirrored; /* with GATE_WATCHED: host memory has a copy of all that can be kept there (`mirror.h`) */
};

extern struct published gpu_ckpt_published __attribute__((visibility("hidden")));
