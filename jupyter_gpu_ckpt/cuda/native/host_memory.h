/* Host memory that allocations are swapped out to: extents of EXTENT_BYTES, each a file in a directory that the
 * kernel's owner has made (on a file system in memory, or a link to a disk where that is too small).  Without such a
 * directory: anonymous memory of this process. */
#pragma once

#include "driver.h"
#include "page_digests.h"

/* The same as `image/device_memory.py` has: images contain these files. */
#define EXTENT_BYTES ((size_t)16 << 20)

/* Set the path at which the directory is, if there is one. */
void host_memory_set_directory(const char *path);

/* Replace the host memory by an empty one of so many bytes.  After failure there is none. */
CUresult host_memory_create(size_t bytes);

/* Its size; 0: there is none.  And the bytes of its pages that were noted to be written, and so take memory. */
size_t host_memory_bytes(void);
size_t host_memory_taken(void);
bool host_memory_is_files(void);

/* Whether it may stay while it is not needed: files that are not on a disk. */
bool host_memory_may_stay(void);

/* Whether the files are there that were written, whole, and under no other name: an image may have one by a link, and
 * must keep its content.  Only then can they be written to again. */
bool host_memory_is_intact(void);

/* Enlarge host memory that is intact to so many bytes, and keep its content.  After failure it may have to be freed. */
CUresult host_memory_enlarge(size_t bytes);

/* Create the files that are not written yet, with holes: then host memory is intact whatever is written of it. */
CUresult host_memory_extend(void);

/* Call before and after the functions below that use files.  No file is open otherwise: a checkpoint of this process
 * would have to carry it. */
CUresult host_memory_open(void);
void host_memory_close(void);

/* Close the files that are open, in a child that was just forked. */
void host_memory_in_child(void);

/* From any thread, for ranges that do not overlap.  `host_memory_prefault` announces a write, and may allocate
 * pages. */
CUresult host_memory_prefault(size_t offset, size_t bytes);
CUresult host_memory_write(size_t offset, const void *from, size_t bytes);
CUresult host_memory_read(size_t offset, void *to, size_t bytes);

/* Have a range hold zeros, instead of a write: it takes no memory.  By one thread; others may write elsewhere at the same
 * time.  Also in two steps: a note, which says whether `host_memory_is_zero` now knows it, and then the range itself,
 * which must not be read before; as much of it as can be, after the first error.  Then host memory has to be freed, once
 * nothing is only there. */
CUresult host_memory_set_zero(size_t offset, size_t bytes);
bool host_memory_note_zero(size_t offset, size_t bytes);
CUresult host_memory_make_hole(size_t offset, size_t bytes);

/* Whether that was noted of the whole range: if not, it can be read, as any other. */
bool host_memory_is_zero(size_t offset, size_t bytes);

/* Pages of DIGEST_PAGE, by one thread: whether a page has the content with this digest; and note which content a page
 * will have after a write (NULL: that is not known).  After a failure of that write the host memory has to be freed. */
bool host_memory_has(size_t offset, const struct digest *digest);
void host_memory_note(size_t offset, const struct digest *digest);

/* Whether it is known of every page which content it has. */
bool host_memory_is_known(void);

/* Free it, if there is one; takes half a second for a hundred GiB. */
void host_memory_free(void);

/* Map memory aligned to huge pages, made of those alone if the system provides them: the copy's rate depends on it.
 * NULL on failure. */
char *map_huge_pages(size_t bytes);
