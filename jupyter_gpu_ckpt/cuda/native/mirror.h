/* A copy of device memory in host memory that is made in the background, while the program is idle and may continue at any
 * time: the next swap then only moves what has changed since.
 *
 * It runs on the thread that serves requests, in steps of a few milliseconds between them, and ends with the first call
 * of the program that uses the GPU (`launch_gate_watch`).  A step copies pages into pinned memory, has the GPU compute
 * their digests there, and writes them to host memory.  So a digest is of the very bytes that were copied, whatever
 * writes to the page meanwhile, and a page that was torn has another digest than any that the program leaves.
 *
 * A page is read while it is in the tables, and a thread that removes memory from them waits for that before it unmaps
 * it (`table_wait_for_reads`).  The copy engine reads, no kernel: the wait is not one for work of the program. */
#pragma once

#include "driver.h"

/* Begin, unless it runs already.  Refused (CUDA_ERROR_NOT_SUPPORTED) without a launch gate, and where nothing is to be
 * kept. */
CUresult mirror_begin(void);

bool mirror_runs(void);

/* The next step; after the last, or after any failure, it no longer runs.  After the last it is published until the
 * first call that uses the GPU that all is copied. */
void mirror_step(void);

/* End it, also one that is complete.  What it has copied is kept. */
void mirror_end(void);

/* From any other thread: have it end, and not begin, before a context is destroyed; and permit it again. */
void mirror_forbid(bool forbids);

/* After a fork, in the child. */
void mirror_in_child(void);
