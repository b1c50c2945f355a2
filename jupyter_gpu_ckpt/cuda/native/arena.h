/* The memory of the host that blocks leave for: chunks of ARENA_CHUNK bytes, each a file in a directory that the kernel's
 * owner has made (a file system in memory, or a link to a disk where that is too small); or, where it has made none,
 * anonymous memory of this process. */
#pragma once

#include "driver.h"

/* As `image/device_memory.py` has it, whose images have the same files. */
#define ARENA_CHUNK ((size_t)16 << 20)

/* Where the directory is, if there is one. */
void arena_place(const char *directory);

/* An empty arena of so many bytes, in place of another one.  After failure there is none. */
CUresult arena_make(size_t bytes);

/* Its bytes; 0: there is none. */
size_t arena_bytes(void);
bool arena_is_files(void);

/* Around the calls below: nothing of it is open else, which a checkpoint of this process would have to carry. */
CUresult arena_open(void);
void arena_close(void);

/* From any thread, for parts that do not overlap: memory into the arena at an offset, or from there.  `arena_expect` says
 * that a part will be put, and may take the memory for it. */
CUresult arena_expect(size_t offset, size_t bytes);
CUresult arena_put(size_t offset, const void *from, size_t bytes);
CUresult arena_get(size_t offset, void *to, size_t bytes);

/* Give it back, if there is one: half a second for a hundred GiB. */
void arena_drop(void);

/* Memory that begins with a huge page, and has only such if the system gives them: they are what makes the rate.  NULL
 * where there is none. */
char *huge(size_t bytes);
