/* Streams whose work is being captured into a graph.  What waits for work would end a capture, and so would functions
 * that the driver calls unsafe (cuMemAlloc, cuMemFree), unless the thread's capture mode permits them. */
#pragma once

#include "driver.h"

/* Whether a stream is being captured.  Asks the driver only if a capture has begun. */
bool capture_is_active(void);

/* The same without asking the driver, and so without waiting for anybody: a capture whose end was not seen counts. */
bool capture_has_begun(void);

/* Whether this thread may allocate: no stream is captured, or its mode is relaxed.  Else the driver is to allocate, and
 * to refuse as it does. */
bool capture_permits_allocations(void);

/* The error that the driver has for this thread if it frees memory while a stream is captured. */
CUresult capture_refuses_frees(void);

/* Whether this very stream is being captured. */
bool capture_includes(CUstream stream);

/* Forget all captures, in a child that was just forked. */
void capture_in_child(void);
