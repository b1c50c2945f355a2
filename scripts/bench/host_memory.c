/* Host memory filled and read by several threads, piece by piece: in how many files of tmpfs, by write(2) or by a mapping.
 *
 *   cc -O2 -pthread -o host_memory scripts/bench/host_memory.c && ./host_memory GIB THREADS DIRECTORY
 *
 * DIRECTORY: of a tmpfs with huge pages (mount -t tmpfs -o huge=always).  What cuda/native/host_memory.c does is "16 files". */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define PIECE ((size_t)2 << 20)
#define MOST 64
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

static size_t pieces;
static int threads, files, file[MOST];
static char *mapped, *ring[MOST];
static atomic_size_t next;
static enum { WRITE, READ, FILL, TAKE } way;

static void check(int good, const char *what)
{
    if (!good) {
        perror(what);
        exit(1);
    }
}

static void *work(void *buffer)
{
    for (size_t at; (at = atomic_fetch_add(&next, 1)) < pieces;) {
        int own = file[at % (size_t)files];
        off_t offset = (off_t)(at / (size_t)files * PIECE);
        char *place = mapped + at * PIECE;
        switch (way) {
        case WRITE: check(pwrite(own, buffer, PIECE, offset) == (ssize_t)PIECE, "pwrite"); break;
        case READ: check(pread(own, buffer, PIECE, offset) == (ssize_t)PIECE, "pread"); break;
        case FILL:
            check(madvise(place, PIECE, MADV_POPULATE_WRITE) == 0, "madvise");
            memcpy(place, buffer, PIECE);
            break;
        case TAKE: memcpy(buffer, place, PIECE); break;
        }
    }
    return NULL;
}

/* GB/s */
static double rate(int what)
{
    pthread_t all[MOST];
    struct timespec began, ended;
    way = what;
    atomic_store(&next, 0);
    clock_gettime(CLOCK_MONOTONIC, &began);
    for (int at = 0; at < threads; at++)
        check(pthread_create(&all[at], NULL, work, ring[at]) == 0, "pthread_create");
    for (int at = 0; at < threads; at++)
        pthread_join(all[at], NULL);
    clock_gettime(CLOCK_MONOTONIC, &ended);
    double seconds = (double)(ended.tv_sec - began.tv_sec) + (double)(ended.tv_nsec - began.tv_nsec) / 1e9;
    return (double)(pieces * PIECE) / seconds / 1e9;
}

static void open_files(const char *directory, int count)
{
    for (files = 0; files < count; files++) {
        char name[4096];
        snprintf(name, sizeof name, "%s/extent-%d", directory, files);
        file[files] = open(name, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        check(file[files] >= 0 && unlink(name) == 0, name);
    }
}

static void close_files(void)
{
    for (int at = 0; at < files; at++)
        close(file[at]);
}

int main(int count, char **words)
{
    check(count == 4 && (threads = atoi(words[2])) > 0 && threads <= MOST, "usage: host_memory GIB THREADS DIRECTORY");
    size_t bytes = (size_t)atoi(words[1]) << 30;
    pieces = bytes / PIECE;
    for (int at = 0; at < threads; at++)
        memset(ring[at] = aligned_alloc(PIECE, PIECE), at + 1, PIECE);
    for (int round = 0; round < 3; round++) {
        for (int many = 1; many <= 16; many *= 4) {
            open_files(words[3], many);
            printf("%2d files, written and read: %5.1f", files, rate(WRITE));
            printf(" and %5.1f GB/s\n", rate(READ));
            close_files();
        }
        for (int shared = 0; shared < 2; shared++) {
            open_files(words[3], 1);
            check(ftruncate(file[0], (off_t)bytes) == 0, "ftruncate");
            int flags = shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
            mapped = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, shared ? file[0] : -1, 0);
            check(mapped != MAP_FAILED && madvise(mapped, bytes, MADV_HUGEPAGE) == 0, "mmap");
            printf("%s, populated and copied: %5.1f", shared ? "1 file mapped " : "anonymous memory", rate(FILL));
            printf(" and %5.1f GB/s\n", rate(TAKE));
            munmap(mapped, bytes);
            close_files();
        }
    }
    return 0;
}
