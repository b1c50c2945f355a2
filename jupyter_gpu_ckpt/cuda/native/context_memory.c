/* The driver's host memory of a suspended context, without its zeros. */
#define _GNU_SOURCE
#include "context_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#include "slices.h"

#define PAGE ((size_t)4096)
/* Shorter runs of zeros stay: each is a call, and may split a huge page. */
#define SHORTEST ((size_t)64 << 10)

static struct {
    _Atomic(char *) memory;
    _Atomic size_t bytes;
} noted[8];

void context_memory_note(void *memory, size_t bytes)
{
    for (size_t at = 0; at < sizeof noted / sizeof *noted; at++) {
        char *none = NULL;
        if (atomic_compare_exchange_strong(&noted[at].memory, &none, memory)) {
            atomic_store(&noted[at].bytes, bytes);
            return;
        }
    }
}

void context_memory_forget(void)
{
    for (size_t at = 0; at < sizeof noted / sizeof *noted; at++) {
        atomic_store(&noted[at].bytes, 0);
        atomic_store(&noted[at].memory, NULL);
    }
}

/* In proc_pid_maps(5), of memory that can be read and written, that nobody shares and that is of no file. */
static const char PLAIN[] = "rw-p 00000000 00:00 0";

/* Whether exactly this is one mapping of such memory, by /proc/self/maps: the driver may have unmapped it, and the
 * program have mapped something else there.  Without memory of the C library, whose locks frozen threads may have. */
static bool is_still_mapped(uintptr_t low, uintptr_t high)
{
    int file = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return false;
    char input[4096];
    uintptr_t bounds[2] = {0, 0};
    int part = 0;     /* of a line: 0 and 1 the bounds, 2 what follows where they are the wanted ones, 3 else */
    size_t equal = 0; /* characters of that */
    bool found = false;
    ssize_t count;
    while (!found && ((count = read(file, input, sizeof input)) > 0 || (count < 0 && errno == EINTR)))
        for (ssize_t at = 0; at < count && !found; at++) {
            char each = input[at];
            if (each == '\n') {
                part = 0;
                bounds[0] = bounds[1] = equal = 0;
            } else if (part < 2 && (each == '-' || each == ' ')) {
                if (++part == 2 && (bounds[0] != low || bounds[1] != high))
                    part = 3;
            } else if (part < 2)
                bounds[part] = bounds[part] << 4 | (uintptr_t)(each <= '9' ? each - '0' : each - 'a' + 10);
            else if (part == 2) {
                part = each == PLAIN[equal] ? 2 : 3;
                found = part == 2 && PLAIN[++equal] == '\0';
            }
        }
    close(file);
    return found;
}

static bool is_zero(const char *page)
{
    const uint64_t *words = (const uint64_t *)page;
    for (size_t at = 0; at < PAGE / sizeof *words; at += 8) {
        uint64_t any = 0;
        for (size_t each = 0; each < 8; each++)
            any |= words[at + each];
        if (any != 0)
            return false;
    }
    return true;
}

static void drop_zeros(char *memory, size_t bytes)
{
    size_t begin = 0; /* of a run of zeros */
    for (size_t at = 0; at <= bytes; at += PAGE)
        if (at == bytes || !is_zero(memory + at)) {
            if (at - begin >= SHORTEST)
                madvise(memory + begin, at - begin, MADV_DONTNEED);
            begin = at + PAGE;
        }
}

void context_memory_drop_zeros(void)
{
    for (size_t at = 0; at < sizeof noted / sizeof *noted; at++) {
        char *memory = atomic_load(&noted[at].memory);
        size_t bytes = (atomic_load(&noted[at].bytes) + PAGE - 1) / PAGE * PAGE; /* Linux maps whole pages */
        if (bytes != 0 && is_still_mapped((uintptr_t)memory, (uintptr_t)memory + bytes))
            in_slices(memory, bytes, drop_zeros);
    }
    context_memory_forget();
}
