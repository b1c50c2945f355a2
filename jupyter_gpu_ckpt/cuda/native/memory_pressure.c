#define _GNU_SOURCE
#include "memory_pressure.h"

#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Where the files of proc(5) and of the cgroup (version 2) are; tests have others. */
#ifndef MEMORY_FILES
#define MEMORY_FILES ""
#endif
#define CGROUP MEMORY_FILES "/sys/fs/cgroup/memory."
/* The part of all memory that stays free, and percent of the time that processes wait. */
#define RESERVED_PART 8
#define MOST_PRESSURE 10
#define UNKNOWN UINT64_MAX

static uint64_t number_at(const char *text) { return *text >= '0' && *text <= '9' ? strtoull(text, NULL, 10) : UNKNOWN; }

/* The number behind a word of a file, or (word "") at its begin; UNKNOWN: there is none. */
static uint64_t number_of(const char *path, const char *word)
{
    char text[8192];
    int file = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t count = file >= 0 ? read(file, text, sizeof text - 1) : -1;
    if (file >= 0)
        close(file);
    text[count > 0 ? count : 0] = '\0';
    const char *found = strstr(text, word);
    if (found == NULL)
        return UNKNOWN;
    found += strlen(word);
    return number_at(found + strspn(found, " "));
}

static bool is_short(uint64_t available, uint64_t all) { return available != UNKNOWN && all != UNKNOWN && available < all / RESERVED_PART; }

bool memory_is_short(void)
{
    const char *memory = MEMORY_FILES "/proc/meminfo";
    if (is_short(number_of(memory, "MemAvailable:"), number_of(memory, "MemTotal:")))
        return true;
    uint64_t limit = number_of(CGROUP "max", ""), used = number_of(CGROUP "current", "");
    uint64_t idle = number_of(CGROUP "stat", "\ninactive_file");
    if (limit != UNKNOWN && used != UNKNOWN) {
        uint64_t charged = idle == UNKNOWN || idle > used ? used : used - idle;
        if (is_short(charged < limit ? limit - charged : 0, limit))
            return true;
    }
    for (const char *const *file = (const char *const[]){MEMORY_FILES "/proc/pressure/memory", CGROUP "pressure", NULL};
         *file != NULL; file++) {
        uint64_t percent = number_of(*file, "some avg10=");
        if (percent != UNKNOWN && percent >= MOST_PRESSURE)
            return true;
    }
    return false;
}
