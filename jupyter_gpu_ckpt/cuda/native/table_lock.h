/* The lock of the tables of memory (`allocations.h`, `mappings.h`).  It is held for a few instructions and never across
 * a call of the driver, but by the thread that swaps: the process that stops a thread can find out by its program
 * counter that the thread does not hold it. */
#pragma once

#include <stdbool.h>

void table_lock(void);
void table_unlock(void);

/* Say, while the tables are locked, that memory in them is being read while the program runs (`mirror.h`); and, at any
 * time, that it no longer is.  A thread that has removed memory from the tables waits for that before it unmaps it. */
void table_set_reading(bool reads);
void table_wait_for_reads(void);

/* After a fork, in the child. */
void table_in_child(void);

/* Lock the tables for a swap: threads that need them meanwhile wait (none should, see `swap.h`).  False if another
 * thread has the lock for a second: one that a signal has stopped for good within a few instructions of ours. */
bool table_lock_for_swap(void);
