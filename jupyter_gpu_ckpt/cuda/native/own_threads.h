/* The threads that this library starts.  They pass a closed launch gate, and run while all others are stopped
 * (`process/freezer.py`), which reads in this process's memory which they are: a name can be any thread's. */
#pragma once

#include <stdbool.h>

/* This thread, which begins, is one of them; and then has this name. */
void own_thread_begin(const char *name);

bool is_own_thread(void);
