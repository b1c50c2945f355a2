/* Device memory that stays on the device over a swap, because another process holds it.
 *
 * A kernel that is saved continues at once, and all its memory would cross the bus again.  So what was copied is exported
 * before it is unmapped: the device keeps it as long as somebody has the descriptors, while this process has neither
 * memory that the driver would move nor files that CRIU would see.  On the way back each memory is created anew, since an
 * imported one cannot be exported a second time, and its content is copied on the device.  Host memory has all of it:
 * what could not be held, imported or copied comes from there.
 *
 * Memory is named by the number with which `copies_next` has left it, less one.  All of it happens between two requests
 * of one client, while every other thread is stopped (`swap.h`). */
#pragma once

#include "driver.h"

/* Descriptors in one message (SCM_MAX_FD, unix(7): 253). */
#define MOST_HELD 250

/* Export what was copied, the largest memories and at most so many: for each a descriptor, which is the caller's.  Their
 * number, and the bytes of the memory.  ``handle``: returns a memory's handle of the driver, false if it has none. */
size_t held_memory_export(int *descriptors, size_t most, size_t *bytes,
                          bool (*handle)(size_t number, CUmemGenericAllocationHandle *found));

/* Take the descriptors of the last export, in their order and from the first on; others are closed. */
void held_memory_take(const int *descriptors, size_t count);

/* Create the memory that was taken, by ``map``, and copy its content on the device.  Then, until `held_memory_end`:
 * whether a memory has its content on the device, and whether all have. */
void held_memory_copy(CUresult (*map)(size_t number));
bool held_memory_is_back(size_t number);
bool held_memory_is_all_back(void);

/* Hold nothing any more. */
void held_memory_end(void);
