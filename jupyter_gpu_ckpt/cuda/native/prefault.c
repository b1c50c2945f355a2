/* A faster mmap(MAP_POPULATE) of large memory: prefaulted by several threads, with huge pages.
 *
 * The driver suspends a context into memory that it maps by one such call (740 MiB with PyTorch on an H200, driver
 * 580), and waits for 190,000 small pages to be zeroed.  Apart from time nothing may differ. */
#define _GNU_SOURCE
#include <stddef.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "context_memory.h"
#include "driver.h"
#include "slices.h"

#define EXPORT __attribute__((visibility("default")))
#define LARGE ((size_t)64 << 20)

/* A system call, not the next definition of mmap: dlsym allocates, which may be the reason for this call. */
static void *map(void *address, size_t bytes, int protection, int flags, int file, off_t offset)
{
    return (void *)syscall(SYS_mmap, address, bytes, protection, flags, file, offset);
}

EXPORT void *mmap(void *address, size_t bytes, int protection, int flags, int file, off_t offset)
{
    if (address != NULL || bytes < LARGE || protection != (PROT_READ | PROT_WRITE) ||
        flags != (MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE))
        return map(address, bytes, protection, flags, file, offset);
    void *memory = map(NULL, bytes, protection, flags & ~MAP_POPULATE, file, offset);
    if (memory != MAP_FAILED) {
        madvise(memory, bytes, MADV_HUGEPAGE);
        populate(memory, bytes); /* errors are ignored: MAP_POPULATE promises nothing, either */
        if (is_code_of_driver(__builtin_return_address(0)))
            context_memory_note(memory, bytes);
    }
    return memory;
}

EXPORT void *mmap64(void *address, size_t bytes, int protection, int flags, int file, off_t offset)
    __attribute__((alias("mmap")));
