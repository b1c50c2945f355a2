/* A program that uses CUDA as PyTorch does, by the words that it reads, a line each; see `subject.py`.
 *
 * The functions that the library stands before are called by name: its own where it is preloaded.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "double.h"

#define MOST 20000
#define SPARSE ((size_t)1 << 20) /* steps between the bytes that are written of a sparse allocation */

int cudaMalloc(void **, size_t);
int cudaFree(void *);
int cudaMemGetInfo(size_t *, size_t *);
long double_mallocs(void);
/* PyTorch looks the driver's functions up; others link against it. */
__attribute__((weak)) CUresult cuMemAlloc_v2(CUdeviceptr *, size_t);
__attribute__((weak)) CUresult cuMemFree_v2(CUdeviceptr);

static void *driver_library;

static void *looked_up(const char *name)
{
    if (driver_library == NULL)
        driver_library = dlopen("libcuda.so.1", RTLD_NOW);
    void *found = driver_library != NULL ? dlsym(driver_library, name) : NULL;
    if (found == NULL) {
        fprintf(stderr, "subject: no %s\n", name);
        exit(3);
    }
    return found;
}
#define DRIVER(result, name, ...) ((result(*)(__VA_ARGS__))looked_up(#name))

static int driver_alloc(void **address, size_t bytes)
{
    CUdeviceptr made = 0;
    int result = cuMemAlloc_v2 != NULL ? cuMemAlloc_v2(&made, bytes)
                                       : DRIVER(CUresult, cuMemAlloc_v2, CUdeviceptr *, size_t)(&made, bytes);
    *address = (void *)made;
    return result;
}

static int driver_free(void *address)
{
    return cuMemFree_v2 != NULL ? cuMemFree_v2((CUdeviceptr)address)
                                : DRIVER(CUresult, cuMemFree_v2, CUdeviceptr)((CUdeviceptr)address);
}

/* -- memory that the program maps itself */

#define GRAIN ((size_t)2 << 20)

static size_t rounded(size_t bytes) { return (bytes + GRAIN - 1) / GRAIN * GRAIN; }

static int map_memory(void **address, size_t bytes, CUmemGenericAllocationHandle *handle, int exportable)
{
    CUmemAllocationProp wanted = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .requestedHandleTypes = exportable};
    CUmemAccessDesc access = {.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUdeviceptr reserved = 0;
    DRIVER(CUresult, cuCtxGetDevice, CUdevice *)(&wanted.location.id);
    wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location = wanted.location;
    bytes = rounded(bytes);
    int result = DRIVER(CUresult, cuMemAddressReserve, CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long)(
        &reserved, bytes, GRAIN, 0, 0);
    if (result == 0)
        result = DRIVER(CUresult, cuMemCreate, CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *,
                        unsigned long long)(handle, bytes, &wanted, 0);
    if (result == 0)
        result = DRIVER(CUresult, cuMemMap, CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle,
                        unsigned long long)(reserved, bytes, 0, *handle, 0);
    if (result == 0)
        result = DRIVER(CUresult, cuMemSetAccess, CUdeviceptr, size_t, const CUmemAccessDesc *, size_t)(reserved, bytes,
                                                                                                        &access, 1);
    *address = (void *)reserved;
    return result;
}

static int release_memory(CUmemGenericAllocationHandle handle)
{
    return DRIVER(CUresult, cuMemRelease, CUmemGenericAllocationHandle)(handle);
}

static int unmap_memory(void *address, size_t bytes)
{
    int result = DRIVER(CUresult, cuMemUnmap, CUdeviceptr, size_t)((CUdeviceptr)address, rounded(bytes));
    if (result == 0)
        result = DRIVER(CUresult, cuMemAddressFree, CUdeviceptr, size_t)((CUdeviceptr)address, rounded(bytes));
    return result;
}

/* -- memory with contents that tell where they belong */

static int alloc_in_order(void **address, size_t bytes)
{
    CUdeviceptr made = 0;
    int result = DRIVER(CUresult, cuMemAllocAsync, CUdeviceptr *, size_t, CUstream)(&made, bytes, NULL);
    *address = (void *)made;
    return result;
}

static int driver_free_in_order(void *address)
{
    return DRIVER(CUresult, cuMemFreeAsync, CUdeviceptr, CUstream)((CUdeviceptr)address, NULL);
}

/* How it is asked for: of the runtime, of the driver, mapped with a handle that can be exported, mapped with one that
 * cannot and is released at once, and in the order of the default stream. */
enum api { RUNTIME, BY_DRIVER, MAPPED, RELEASED, ORDERED, APIS };
static const char *const apis[APIS] = {"cuda", "cu", "map", "released", "async"};

struct held {
    unsigned char *memory;
    size_t bytes, step;
    bool zeros; /* instead of bytes that are none */
    unsigned seed;
    enum api api;
    CUmemGenericAllocationHandle handle;
};

static unsigned char byte_of(const struct held *held, size_t at)
{
    if (held->zeros)
        return 0;
    return (unsigned char)(((at * 0x9E3779B97F4A7C15ull + held->seed * 0xD1B54A32D192ED03ull) >> 56) | 1);
}

/* Device memory: a GPU's accesses, which who asks the library orders, and no sanitizer sees. */
#define BY_GPU __attribute__((no_sanitize("thread")))

BY_GPU static void fill(const struct held *held)
{
    for (size_t at = 0; at < held->bytes; at += held->step)
        held->memory[at] = byte_of(held, at);
    held->memory[held->bytes - 1] = byte_of(held, held->bytes - 1);
}

BY_GPU static bool intact(const struct held *held)
{
    for (size_t at = 0; at < held->bytes; at += held->step)
        if (held->memory[at] != byte_of(held, at))
            return false;
    return held->memory[held->bytes - 1] == byte_of(held, held->bytes - 1);
}

static int obtain(struct held *held, size_t bytes, enum api api, size_t step, bool zeros, unsigned seed)
{
    void *memory = NULL;
    CUmemGenericAllocationHandle handle = 0;
    int result = api == RUNTIME     ? cudaMalloc(&memory, bytes)
                 : api == BY_DRIVER ? driver_alloc(&memory, bytes)
                 : api == ORDERED   ? alloc_in_order(&memory, bytes)
                                    : map_memory(&memory, bytes, &handle, api == MAPPED);
    if (result == 0 && api == RELEASED)
        result = release_memory(handle);
    if (result != 0)
        return result;
    *held = (struct held){memory, bytes, step, zeros, seed, api, handle};
    fill(held);
    return 0;
}

static int give_back(struct held *held)
{
    int result = held->api == RUNTIME     ? cudaFree(held->memory)
                 : held->api == BY_DRIVER ? driver_free(held->memory)
                 : held->api == ORDERED   ? driver_free_in_order(held->memory)
                                          : unmap_memory(held->memory, held->bytes);
    if (result == 0 && held->api == MAPPED)
        result = release_memory(held->handle);
    if (result == 0)
        held->memory = NULL;
    return result;
}

static struct held allocations[MOST];
static size_t allocation_count;

/* -- threads that take and give back memory all the time */

#define MOST_THREADS 8
static pthread_t threads[MOST_THREADS];
static size_t thread_count;
static atomic_bool ending;
static atomic_long rounds, wrong;
static atomic_bool resting; /* looked at without an order: it must not be what orders the library's accesses */
static size_t at_rest;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

static void rest_if_asked(void)
{
    if (!atomic_load_explicit(&resting, memory_order_relaxed))
        return;
    pthread_mutex_lock(&mutex);
    at_rest++;
    pthread_cond_broadcast(&changed);
    while (resting)
        pthread_cond_wait(&changed, &mutex);
    at_rest--;
    pthread_mutex_unlock(&mutex);
}

static void *churn(void *argument)
{
    unsigned random = (unsigned)(uintptr_t)argument;
    struct held held[3] = {0};
    CUresult (*synchronize)(void) = DRIVER(CUresult, cuCtxSynchronize, void); /* passes the launch gate */
    cudaFree(NULL);
    for (unsigned turn = 0; !atomic_load_explicit(&ending, memory_order_relaxed); turn++) {
        struct held *each = &held[rand_r(&random) % 3];
        if (each->memory != NULL && (!intact(each) || give_back(each) != 0))
            atomic_fetch_add(&wrong, 1);
        each->memory = NULL;
        size_t bytes = ((size_t)1 << 20) + (size_t)rand_r(&random) % ((size_t)5 << 20);
        if (obtain(each, bytes, rand_r(&random) % APIS, SPARSE / 8, false, turn) != 0)
            atomic_fetch_add(&wrong, 1);
        if (turn % 4 == 0 && synchronize() != 0)
            atomic_fetch_add(&wrong, 1);
        for (size_t at = 0; at < 200; at++) {
            void *volatile memory = malloc(16 + (size_t)rand_r(&random) % 3000);
            free(memory);
        }
        atomic_fetch_add_explicit(&rounds, 1, memory_order_relaxed);
        rest_if_asked();
    }
    for (size_t at = 0; at < 3; at++)
        if (held[at].memory != NULL && (!intact(&held[at]) || give_back(&held[at]) != 0))
            atomic_fetch_add(&wrong, 1);
    return NULL;
}

/* -- what is asked for */

static void alloc(const char *words)
{
    char api[16], density[8];
    int chosen = 0;
    size_t count, bytes;
    if (sscanf(words, "%zu %zu %15s %7s", &count, &bytes, api, density) != 4) {
        puts("how many, bytes, cuda|cu|map|released|async, full|sparse|zeros");
        return;
    }
    while (chosen < APIS - 1 && strcmp(api, apis[chosen]) != 0)
        chosen++;
    cudaFree(NULL);
    size_t first = allocation_count;
    for (size_t at = 0; at < count; at++, allocation_count++) {
        int result = obtain(&allocations[allocation_count], bytes, (enum api)chosen,
                            strcmp(density, "sparse") == 0 ? SPARSE : 1, strcmp(density, "zeros") == 0,
                            (unsigned)allocation_count);
        if (result != 0) {
            printf("error %d\n", result);
            return;
        }
    }
    printf("%zu\n", first);
}

static void check(void)
{
    size_t count = 0;
    for (size_t at = 0; at < allocation_count; at++)
        if (allocations[at].memory != NULL) {
            if (!intact(&allocations[at])) {
                printf("allocation %zu of %zu bytes is another\n", at, allocations[at].bytes);
                return;
            }
            count++;
        }
    printf("%zu\n", count);
}

static void outstanding(void)
{
    struct outstanding all;
    DRIVER(void, double_outstanding, struct outstanding *)(&all);
    printf("{\"used\": %zu, \"reservations\": %zu, \"handles\": %zu, \"mappings\": %zu, \"allocations\": %zu, "
           "\"streams\": %zu, \"events\": %zu, \"registered\": %zu}\n",
           all.used, all.reservations, all.handles, all.mappings, all.allocations, all.streams, all.events,
           all.registered);
}

static void calls(void)
{
    const char *name;
    putchar('{');
    for (size_t at = 0; (name = DRIVER(const char *, double_called, size_t)(at)) != NULL; at++)
        printf("%s\"%s\": %ld", at ? ", " : "", name, DRIVER(long, double_calls, const char *)(name));
    puts("}");
}

static void in_child(void)
{
    int said[2];
    char answer[64] = "";
    if (pipe(said) != 0)
        exit(3);
    pid_t child = fork();
    if (child == 0) {
        void *memory = NULL;
        long before = double_mallocs();
        int result = cudaMalloc(&memory, (size_t)4 << 20);
        dprintf(said[1], "%d %s", result, double_mallocs() == before + 1 ? "original" : "served");
        _exit(0);
    }
    close(said[1]);
    if (read(said[0], answer, sizeof answer - 1) < 0)
        exit(3);
    close(said[0]);
    waitpid(child, NULL, 0);
    puts(answer);
}

/* Children that free what the parent has, and allocate: each must be refused, and soon. */
static void in_children(size_t count)
{
    size_t refused = 0, hung = 0;
    for (size_t at = 0; at < count; at++) {
        pid_t child = fork();
        if (child == 0) {
            void *memory = allocations[0].memory;
            bool good = cudaFree(memory) == 3 && driver_free(memory) == 3 && cudaMalloc(&memory, (size_t)4 << 20) == 3;
            _exit(good ? 0 : 1);
        }
        int status = 0;
        pid_t ended = 0;
        for (size_t turn = 0; turn < 20000 && (ended = waitpid(child, &status, WNOHANG)) == 0; turn++)
            usleep(500);
        if (ended == 0) {
            kill(child, SIGKILL);
            waitpid(child, NULL, 0);
            hung++;
            break;
        }
        refused += WIFEXITED(status) && WEXITSTATUS(status) == 0;
    }
    printf("%zu refused, %zu hung\n", refused, hung);
}

/* The sockets that a child inherits. */
static void child_sockets(void)
{
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        int sockets = 0;
        for (int fd = 3; fd < 256; fd++) {
            struct stat facts;
            sockets += fstat(fd, &facts) == 0 && S_ISSOCK(facts.st_mode);
        }
        _exit(sockets);
    }
    int status = 0;
    waitpid(child, &status, 0);
    printf("%d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -1);
}

/* Fill every 256th page of memory that is zero. */
static void fill_pages(char *memory, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += SPARSE)
        memset(memory + at, 1 + (int)(at / SPARSE % 255), 4096);
}

/* Map so many MiB as the driver, which asks for some bytes less, or as the program, and fill them. */
static void map(const char *who, size_t mib)
{
    size_t bytes = mib << 20;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE;
    char *memory = strcmp(who, "driver") == 0 ? DRIVER(void *, double_map, size_t)(bytes - 1000)
                                              : mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    fill_pages(memory, bytes);
    printf("%p\n", (void *)memory);
}

/* Map so many MiB of a file of ones there, filled as the others; or nothing that can be read. */
static void replace(void *memory, size_t mib, const char *by)
{
    size_t bytes = mib << 20;
    if (strcmp(by, "nothing") == 0) {
        void *mapped = mmap(memory, bytes, PROT_NONE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        printf("%p\n", mapped);
        return;
    }
    int file = memfd_create("ones", MFD_CLOEXEC);
    char *ones = malloc(bytes);
    memset(ones, 0xff, bytes);
    bool written = write(file, ones, bytes) == (ssize_t)bytes;
    free(ones);
    char *mapped = mmap(memory, bytes, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_PRIVATE, file, 0);
    close(file);
    memset(mapped, 0, bytes);
    fill_pages(mapped, bytes);
    printf("%p\n", written ? (void *)mapped : NULL);
}

/* The bytes of that memory which are not what they were. */
static size_t bytes_changed(const char *memory, size_t mib)
{
    size_t found = 0;
    for (size_t at = 0; at < mib << 20; at++)
        found += memory[at] != (at % SPARSE < 4096 ? (char)(1 + at / SPARSE % 255) : 0);
    return found;
}

/* Bytes of an allocation become others. */
BY_GPU static void poke(const struct held *held, size_t at, size_t count, int value)
{
    for (size_t end = at + count; at < end && at < held->bytes; at++)
        held->memory[at] = (unsigned char)value;
}

/* A number for all contents, in which each 8 bytes and where they are count. */
BY_GPU static uint64_t sum(void)
{
    uint64_t all = 0;
    for (size_t number = 0; number < allocation_count; number++)
        for (size_t at = 0; allocations[number].memory != NULL && at + 8 <= allocations[number].bytes; at += 8)
            all = (all ^ *(volatile uint64_t *)(allocations[number].memory + at)) * 0x100000001B3ull + number;
    return all;
}

static void perform(char *line)
{
    char *words = strchr(line, ' ');
    words = words != NULL ? (*words = '\0', words + 1) : line + strlen(line);
    size_t number = strtoul(words, NULL, 10), at, count;
    char name[64];
    long nth;
    int lasting, result;
    void *memory;
    if (strcmp(line, "map") == 0 && sscanf(words, "%63s %zu", name, &number) == 2)
        map(name, number);
    else if (strcmp(line, "changed") == 0 && sscanf(words, "%p %zu", &memory, &number) == 2)
        printf("%zu\n", bytes_changed(memory, number));
    else if (strcmp(line, "replace") == 0 && sscanf(words, "%p %zu %63s", &memory, &number, name) == 3)
        replace(memory, number, name);
    else if (strcmp(line, "unmap") == 0 && sscanf(words, "%p %zu", &memory, &number) == 2)
        printf("%d\n", munmap(memory, number << 20));
    else if (strcmp(line, "alloc") == 0)
        alloc(words);
    else if (strcmp(line, "free") == 0)
        printf("%d\n", give_back(&allocations[number]));
    else if (strcmp(line, "free-in-order") == 0) {
        printf("%d\n", driver_free_in_order(allocations[number].memory));
        allocations[number].memory = NULL;
    } else if (strcmp(line, "share") == 0) {
        CUipcMemHandle handle;
        printf("%d\n", DRIVER(CUresult, cuIpcGetMemHandle, CUipcMemHandle *, CUdeviceptr)(
                           &handle, (CUdeviceptr)allocations[number].memory));
    } else if (strcmp(line, "check") == 0)
        check();
    else if (strcmp(line, "poke") == 0 && sscanf(words, "%zu %zu %zu %d", &number, &at, &count, &result) == 4) {
        poke(&allocations[number], at, count, result);
        puts("ok");
    } else if (strcmp(line, "sum") == 0)
        printf("%llx\n", (unsigned long long)sum());
    else if (strcmp(line, "address") == 0)
        printf("%p\n", (void *)allocations[number].memory);
    else if (strcmp(line, "outstanding") == 0)
        outstanding();
    else if (strcmp(line, "mallocs") == 0)
        printf("%ld\n", double_mallocs());
    else if (strcmp(line, "calls") == 0)
        calls();
    else if (strcmp(line, "fail") == 0 && sscanf(words, "%63s %ld %d %d", name, &nth, &lasting, &result) == 4) {
        DRIVER(void, double_fail, const char *, long, bool, CUresult)(name, nth, lasting, result);
        puts("ok");
    } else if (strcmp(line, "total") == 0) {
        DRIVER(void, double_set_bytes, size_t)(number);
        puts("ok");
    } else if (strcmp(line, "delay") == 0) {
        DRIVER(void, double_set_delay, unsigned)((unsigned)number);
        puts("ok");
    } else if (strcmp(line, "launch") == 0) {
        /* The allocation will hold one byte everywhere: the GPU is slow, and nobody waits for it. */
        struct held *held = &allocations[number];
        held->step = held->bytes;
        result = DRIVER(CUresult, double_launch, CUdeviceptr, size_t, int, unsigned)(
            (CUdeviceptr)held->memory + held->bytes - 1, 1, byte_of(held, held->bytes - 1) ^ 2, 100000);
        held->memory[held->bytes - 1] = 0;
        printf("%d\n", result);
    } else if (strcmp(line, "last") == 0)
        printf("%d\n", allocations[number].memory[allocations[number].bytes - 1] ^
                           byte_of(&allocations[number], allocations[number].bytes - 1));
    else if (strcmp(line, "context") == 0) {
        CUcontext fresh;
        printf("%d\n", DRIVER(CUresult, cuCtxCreate_v2, CUcontext *, unsigned, CUdevice)(&fresh, 0, (CUdevice)number));
    } else if (strcmp(line, "at-once") == 0) {
        printf("%d\n", DRIVER(int, double_at_once, void)());
    } else if (strcmp(line, "pop") == 0) {
        CUcontext popped;
        printf("%d\n", DRIVER(CUresult, cuCtxPopCurrent_v2, CUcontext *)(&popped));
    } else if (strcmp(line, "reset") == 0)
        printf("%d\n", DRIVER(CUresult, cuDevicePrimaryCtxReset_v2, CUdevice)(0));
    else if (strcmp(line, "churn") == 0) {
        looked_up("cuCtxSynchronize"); /* which opens the driver's library, before there are threads that do */
        for (; thread_count < number; thread_count++)
            pthread_create(&threads[thread_count], NULL, churn, (void *)(uintptr_t)(thread_count + 1));
        puts("ok");
    } else if (strcmp(line, "rest") == 0) {
        pthread_mutex_lock(&mutex);
        resting = true;
        while (at_rest < thread_count)
            pthread_cond_wait(&changed, &mutex);
        pthread_mutex_unlock(&mutex);
        puts("ok");
    } else if (strcmp(line, "go") == 0) {
        pthread_mutex_lock(&mutex);
        resting = false;
        pthread_cond_broadcast(&changed);
        pthread_mutex_unlock(&mutex);
        puts("ok");
    } else if (strcmp(line, "rounds") == 0)
        printf("%ld\n", atomic_load(&rounds));
    else if (strcmp(line, "end") == 0) {
        atomic_store(&ending, true);
        while (thread_count != 0)
            pthread_join(threads[--thread_count], NULL);
        printf("%ld\n", atomic_load(&wrong));
    } else if (strcmp(line, "synchronize") == 0) {
        cudaFree(NULL);
        printf("%d\n", DRIVER(CUresult, cuCtxSynchronize, void)());
    } else if (strcmp(line, "fork") == 0)
        in_child();
    else if (strcmp(line, "forks") == 0)
        in_children(number);
    else if (strcmp(line, "child-sockets") == 0)
        child_sockets();
    else if (strcmp(line, "shell") == 0) {
        fflush(stdout);
        if (system(words) != 0)
            exit(3);
    } else if (strcmp(line, "trim") == 0) {
        CUmemoryPool pool = NULL;
        DRIVER(CUresult, cuDeviceGetDefaultMemPool, CUmemoryPool *, CUdevice)(&pool, 0);
        printf("%d\n", DRIVER(CUresult, cuMemPoolTrimTo, CUmemoryPool, size_t)(pool, 0));
    } else if (strcmp(line, "stop") == 0) {
        char function[48];
        long calls;
        if (sscanf(words, "%47s %ld", function, &calls) == 2)
            DRIVER(void, double_stop_after, const char *, long)(function, calls);
        puts("ok");
    } else if (strcmp(line, "waits") == 0)
        printf("%d\n", DRIVER(bool, double_waits, void)());
    else if (strcmp(line, "continue") == 0) {
        DRIVER(void, double_continue, void)();
        puts("ok");
    } else if (strcmp(line, "memory") == 0) {
        size_t free_bytes, all;
        result = cudaMemGetInfo(&free_bytes, &all);
        printf("%d %zu %zu\n", result, free_bytes, all);
    } else
        puts("what?");
}

EXPORT int subject(void);
EXPORT int subject(void)
{
    static char line[4096];
    setvbuf(stdout, NULL, _IOLBF, 0);
    while (fgets(line, sizeof line, stdin) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        perform(line);
    }
    return 0;
}

#ifdef DIRECT
int main(void) { return subject(); }
#endif
