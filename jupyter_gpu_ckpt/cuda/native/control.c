/* One request a line, at most 15 bytes, one line of JSON each as the answer:
 *
 *   status    what there is                            {"version", "blocks", "bytes", "away"}
 *   leave     copy to the arena                        the same, and {"cuda": CUresult, "seconds"}
 *   free      give the physical memory back            likewise
 *   return    everything back on the device            likewise
 *
 * Whether blocks are away, and whether threads are relieved of the driver's lock (`door.h`), is also in `shown`, for
 * others to read in our memory: who has to know whether the process may run may not be able to ask.
 *
 * ``version`` is that of all this, CONTROL_VERSION: to be raised with every change that the other side has to know of.
 * `status` and its answer's ``version`` stay.  Who connects asks for that first, and for nothing else of another version.
 *
 * ``cuda`` of what is none of these is CUDA_ERROR_INVALID_VALUE.  One connection is served at a time.  One that ends
 * between ``leave`` and ``free`` forgets the copy; a request without an end is not done.  Who connects has stopped every
 * other thread of the process, but for the driver's own, before it asks for more than the status (`process/freezer.py`).
 */
#define _GNU_SOURCE
#include "control.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "arena.h"
#include "child.h"
#include "copies.h"
#include "door.h"
#include "transfer.h"

#define CONTROL_VERSION 1
#define SOCKET_VARIABLE "JUPYTER_GPU_CKPT_FAST_SOCKET"
/* In the directory of the socket (`cuda/fastpath.py`). */
#define ARENA "arena/gpu-ckpt-blocks"

static char path[sizeof((struct sockaddr_un *)0)->sun_path];
static pid_t owner;
static _Atomic int listening; /* 0: not yet, 1: yes, -1: cannot */
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
static atomic_int listener = -1, peer = -1; /* descriptors, for a child to close */

/* What this process starts is not meant: neither the socket nor the preloading is handed on. */
__attribute__((constructor)) static void begin(void)
{
    const char *wanted = getenv(SOCKET_VARIABLE);
    if (wanted != NULL && strlen(wanted) < sizeof path) {
        strcpy(path, wanted);
        owner = getpid();
        char arena[sizeof path + sizeof "/" ARENA];
        const char *end = strrchr(path, '/');
        snprintf(arena, sizeof arena, "%.*s/" ARENA, end == NULL ? 0 : (int)(end - path), path);
        arena_place(arena);
    }
    unsetenv(SOCKET_VARIABLE);
    Dl_info us;
    const char *preloaded = getenv("LD_PRELOAD");
    if (preloaded == NULL || dladdr(&listening, &us) == 0)
        return;
    char *rest = malloc(strlen(preloaded) + 1), *copied = strdup(preloaded), *saved = NULL;
    if (rest != NULL && copied != NULL) {
        rest[0] = '\0';
        for (char *each = strtok_r(copied, " :", &saved); each != NULL; each = strtok_r(NULL, " :", &saved))
            if (strcmp(each, us.dli_fname) != 0) {
                if (rest[0] != '\0')
                    strcat(rest, ":");
                strcat(rest, each);
            }
        if (rest[0] != '\0')
            setenv("LD_PRELOAD", rest, 1);
        else
            unsetenv("LD_PRELOAD");
    }
    free(rest);
    free(copied);
}

/* For `cuda/fastpath.py`, which asks before a kernel has the library. */
__attribute__((visibility("default"))) int gpu_ckpt_knows_rwlocks(void);
int gpu_ckpt_knows_rwlocks(void) { return door_is_known(); }

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

/* Found by its mark, in what is mapped of this library; mark and version stay where they are in all versions. */
enum { ON_DEVICE, AWAY_IN_MEMORY, AWAY_IN_FILES, RELIEVED };
static struct {
    char mark[16];
    int version;
    atomic_int state;
} shown __attribute__((used)) = {"gpu-ckpt state:", CONTROL_VERSION, ON_DEVICE};

static void tell(bool away)
{
    int there = arena_is_files() ? AWAY_IN_FILES : AWAY_IN_MEMORY;
    atomic_store(&shown.state, away ? there : door_is_open() ? RELIEVED : ON_DEVICE);
}

static CUresult perform(const char *verb)
{
    CUresult (*step)(void) = strcmp(verb, "leave") == 0    ? transfer_copy_out
                             : strcmp(verb, "free") == 0   ? transfer_free
                             : strcmp(verb, "return") == 0 ? transfer_bring_back
                                                           : NULL;
    if (step == NULL)
        return strcmp(verb, "status") == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    bool held = blocks_hold();
    CUresult result = !held ? CUDA_ERROR_NOT_READY : step != transfer_free ? copies_rehearse() : CUDA_SUCCESS;
    tell(transfer_amounts().away != 0 || step == transfer_free);
    if (result == CUDA_SUCCESS)
        result = step();
    bool away = transfer_amounts().away != 0;
    if (!away && (step != transfer_copy_out || result != CUDA_SUCCESS))
        door_close();
    tell(away);
    if (held)
        blocks_release();
    return result;
}

static void answer(const char *verb)
{
    double began = now();
    CUresult result = perform(verb);
    struct amounts amounts = transfer_amounts();
    char line[160];
    int length = snprintf(line, sizeof line,
                          "{\"version\": %d, \"cuda\": %d, \"blocks\": %zu, \"bytes\": %zu, \"away\": %zu, "
                          "\"seconds\": %.6f}\n",
                          CONTROL_VERSION, result, amounts.blocks, amounts.bytes, amounts.away, now() - began);
    /* Not by a stream, not even dprintf's: a process that ends flushes it once more, and SIGPIPE is what it dies of. */
    send(atomic_load(&peer), line, (size_t)length, MSG_NOSIGNAL);
    transfer_tidy();
}

/* What was read from the connection and not used: no stream, whose end in a child would seek in it. */
struct input {
    char bytes[64];
    ssize_t at, count;
};

static int next_byte(struct input *input)
{
    if (input->at == input->count) {
        input->at = 0;
        do
            input->count = recv(atomic_load(&peer), input->bytes, sizeof input->bytes, 0);
        while (input->count < 0 && errno == EINTR);
        if (input->count <= 0)
            return input->count = 0, EOF;
    }
    return (unsigned char)input->bytes[input->at++];
}

/* The next line; one that is too long for a verb, or has a zero byte in it, is the empty one.  False at the end. */
static bool read_verb(struct input *input, char *verb, size_t room)
{
    size_t length = 0;
    bool good = true;
    int next;
    while ((next = next_byte(input)) != EOF && next != '\n') {
        good = good && next != '\0' && length + 1 < room;
        if (good)
            verb[length++] = (char)next;
    }
    verb[good ? length : 0] = '\0';
    return next == '\n';
}

static bool is_ours(int connection)
{
    struct ucred other;
    socklen_t size = sizeof other;
    return getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &other, &size) == 0 &&
           (other.uid == geteuid() || other.uid == 0);
}

static void serve(void)
{
    struct input input = {.at = 0};
    char verb[16];
    while (read_verb(&input, verb, sizeof verb))
        answer(verb);
    if (transfer_amounts().away == 0) {
        door_close(); /* first: it takes no time */
        tell(false);
    }
    transfer_forget();
}

static void *listen_for_ever(void *argument)
{
    (void)argument;
    pthread_setname_np(pthread_self(), "gpu-ckpt-fast");
    tell(false);
    for (;;) {
        int connection = accept4(atomic_load(&listener), NULL, NULL, SOCK_CLOEXEC);
        if (connection < 0) {
            nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL); /* no descriptors: who waits stays in the queue */
            continue;
        }
        atomic_store(&peer, connection);
        if (is_ours(connection))
            serve();
        atomic_store(&peer, -1); /* first: its number may soon be another file's, which is not a child's to close */
        close(connection);
    }
    return NULL;
}

void control_in_child(void)
{
    int inherited[] = {atomic_exchange(&listener, -1), atomic_exchange(&peer, -1)};
    for (size_t at = 0; at < sizeof inherited / sizeof *inherited; at++)
        if (inherited[at] >= 0)
            close(inherited[at]);
    opening = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}

static int start(void)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    strcpy(name.sun_path, path);
    int made = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (made < 0)
        return -1;
    atomic_store(&listener, made);
    sigset_t all, before;
    sigfillset(&all);
    /* A fault of ours is told like one of the program's. */
    for (const int *fault = (const int[]){SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, 0}; *fault != 0; fault++)
        sigdelset(&all, *fault);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    bool begun = door_is_known() && bind(made, (struct sockaddr *)&name, sizeof name) == 0 && listen(made, 4) == 0 &&
                 pthread_create(&thread, NULL, listen_for_ever, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!begun) {
        atomic_store(&listener, -1);
        close(made);
        return -1;
    }
    pthread_detach(thread);
    return 1;
}

bool control_open(void)
{
    if (path[0] == '\0' || is_inert() || getpid() != owner) /* not asked for; or a child, however it was made */
        return false;
    int state = atomic_load_explicit(&listening, memory_order_acquire);
    if (state == 0) {
        pthread_mutex_lock(&opening);
        if ((state = atomic_load(&listening)) == 0)
            atomic_store_explicit(&listening, state = start(), memory_order_release);
        pthread_mutex_unlock(&opening);
    }
    return state == 1;
}
