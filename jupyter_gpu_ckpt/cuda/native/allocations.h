/* The device memory that this library serves: each allocation has physical memory of its own, mapped at an address that
 * stays the same as long as the allocation lives; or it is a part of the memory of a pool, which is cut (`pools.h`). */
#pragma once

#include <stdint.h>

#include "driver.h"

struct allocation {
    CUdeviceptr address; /* 0: a free slot */
    size_t bytes;        /* a multiple of the driver's granularity */
    size_t reserved;     /* bytes of addresses, as many or more; 0: of a part */
    CUdeviceptr within;  /* the address of the memory that this is a part of; 0: it has memory of its own */
    size_t parts;        /* of a pool's memory: allocations of the program in it */
    size_t requested;    /* of the program */
    CUcontext context; /* NULL: of a pool, and its context was destroyed */
    CUdevice device;
    enum { UNMAPPED, MAPPED, ACCESSIBLE } state;
    bool has_handle; /* while it is mapped, and afterwards if the driver refused to release the handle */
    CUmemGenericAllocationHandle handle;
    size_t offset; /* in host memory, of a copied allocation; or NOT_COPIED */
    bool freed;    /* by the program; given back later (`allocation_postpone`) */
    unsigned pool; /* number of the pool that it was allocated from; 0: by cuMemAlloc */
    bool synchronizes; /* the program has set CU_POINTER_ATTRIBUTE_SYNC_MEMOPS */
    CUevent after;
    CUcontext recorded_in; /* the context of that event, which ends with it */
    /* Its number if another process may have it mapped, else 0: then it is not swapped (`ipc.c`). */
    unsigned long long shared;
    bool doomed;       /* its context is being destroyed */
    unsigned examined; /* for the last time by this call of `allocations_collect` */
};
#define NOT_COPIED SIZE_MAX

/* A process with more devices is not served: the driver allocates all its memory. */
#define MAX_DEVICES 16

/* Create an allocation in this thread's current context; or memory of a pool, which is no allocation, nor is one found at
 * its address before there is a part.  0 if the library cannot, and the driver is to allocate. */
CUdeviceptr allocation_create(size_t bytes, unsigned pool);

/* What the bytes of a device's allocations are multiples of; 0: none can be created. */
size_t allocation_grain(CUdevice device);

/* Copy the facts of the allocation that begins at the address; false if there is none. */
bool allocation_at(CUdeviceptr address, struct allocation *found);

/* Give a part of a pool's memory to the program, in a context, as an allocation of so many bytes (multiples of the
 * granularity) and requested ones; and take it from the program, and copy its facts. */
bool allocation_cut(CUdeviceptr memory, CUdeviceptr address, size_t bytes, size_t requested, CUcontext context);
bool allocation_join(CUdeviceptr address, struct allocation *part);

/* The bytes of a pool's memory, and the same if it has no parts, else 0; while the table is locked. */
size_t allocation_created(CUdeviceptr memory);
size_t allocation_unused(CUdeviceptr memory);

/* Note whether the memory operations of the allocation that begins at the address synchronize. */
void allocation_set_synchronizes(CUdeviceptr address, bool synchronizes);

/* Find out whether an allocation begins at the address, and in which context. */
bool allocation_lookup(CUdeviceptr address, CUcontext *context);

/* Whether that is an allocation of the program that can be read, and has this place in host memory; while the table is
 * locked. */
bool allocation_has_place(CUdeviceptr address, size_t bytes, size_t offset);

/* Copy the facts of the allocation that the address lies in; false if there is none. */
bool allocation_containing(CUdeviceptr address, struct allocation *found);

/* Give memory and address back to the driver.  The caller has waited for the work of its context.  After failure the
 * allocation still exists, and the call can be repeated. */
CUresult allocation_destroy(CUdeviceptr address);

/* Never swap the allocation from now on: the driver moves it.  Return a number that no other has had, 0 if there is no
 * such allocation; and find it by that. */
unsigned long long allocation_share(CUdeviceptr address);
bool allocation_shared(unsigned long long number, struct allocation *found);

/* Number of allocations that are shared; may be called at any time. */
size_t allocations_shared(void);

/* Take an allocation from the program without giving its memory back yet: it may be used until ``after`` has happened,
 * or (NULL) until no stream is captured and the work of its context is done.  ``recorded_in``: the event's context. */
CUresult allocation_postpone(CUdeviceptr address, CUevent after, CUcontext recorded_in);

/* Give back those postponed allocations that are unused, without the lock while that is asked; their number. */
size_t allocations_collect(bool (*is_unused)(const struct allocation *));

/* Before a context is destroyed, and afterwards: give its allocations back, or, if it was not destroyed, keep them. */
void allocations_doom(CUcontext context);
void allocations_of_destroyed(CUcontext context, bool destroyed);

/* Create physical memory for an allocation and map it at its address.  After failure the allocation has none; or, where
 * the driver refuses to take it back, memory that is not accessible, which the next attempt uses. */
CUresult allocation_map(struct allocation *allocation);

/* Free the physical memory, if there is any; the address stays reserved.  Can be repeated after failure. */
CUresult allocation_unmap(struct allocation *allocation);

/* Number of allocations and their bytes; may be called at any time. */
void allocations_total(size_t *count, size_t *bytes);

/* Forget all allocations, in a child that was just forked. */
void allocations_in_child(void);

/* The table, whose slots may be free; only while it is locked. */
struct allocation *allocations_table(size_t *slots);
