/* One request a line, at most 47 bytes; the reply to each is one line of JSON:
 *
 *   status    report the amounts                       {"version", "allocations", "bytes", "swapped_out",
 *                                                      "kept", "mirrors", "managed", "shared", "touches", "known"}
 *   copy_out  copy all allocations to host memory      the same, and {"cuda": CUresult, "seconds", "parts"}
 *   free      free the device memory of the copied     likewise
 *   move_out  both at the same time: free each memory as soon as it is copied: likewise
 *   swap_in   bring everything back to the device      likewise; opens the launch gate
 *   swap_in MILLISECONDS   the same while others leave it: memory is created as it becomes free.  Fails when for so long
 *                          nothing more could be created: likewise
 *   swap_in_checked   swap_in, with proof that everything is what it was when it went out, by digests: likewise; fails
 *                     with CUDA_ERROR_ILLEGAL_STATE where it is not.  ``known``: there is a digest of everything
 *   close MILLISECONDS   close the launch gate (`launch_gate.h`): likewise; it opens by itself after so long, if nothing
 *                        is swapped out then; with 0 not.  Of a closed gate this changes only when it opens
 *   open      open the launch gate: likewise; refused (CUDA_ERROR_NOT_READY) while allocations are swapped out
 *   keep BYTES  keep what is swapped in also in host memory, up to so many bytes, so that the next copy_out only copies
 *               what has changed; with 0 nothing: likewise.  It is given up when host memory is short
 *   drop_zeros   give zeros of the driver's host memory back to Linux (`context_memory.h`): likewise
 *   mirror    begin to copy what is on the device to host memory that is kept, in the background (`mirror.h`):
 *             likewise.  It ends with the first call of the program that uses the GPU, and with requests above but
 *             status; let one end it before threads are stopped, which may be in the driver
 *   hold COUNT   after copy_out: export at most so many memories, so that the device keeps them when they are freed
 *                (`held_memory.h`): likewise, with {"exported": number, "held": bytes} and so many descriptors, which
 *                may come with swap_in, in their order
 *   export PROCESS NUMBER    (hexadecimal) share an allocation with another process (`ipc.h`): likewise, with a
 *                            descriptor of its memory
 *
 * Whether allocations are swapped out, the state of the launch gate, and how many calls have found it closed since it
 * was, is also in our memory, for other processes to read (`published.h`).
 *
 * ``version`` is CONTROL_VERSION: to be raised with every change that the other side has to know of.  `status` and the
 * ``version`` in its reply never change.  A client asks for that first, and requests nothing else of another version.
 *
 * ``parts``: how many of those seconds had passed at each moment of the copies (`copies.h`).
 *
 * ``cuda`` of an unknown request is CUDA_ERROR_INVALID_VALUE.  One connection is served at a time.  A connection that
 * ends between ``copy_out`` and ``free`` discards the copy; a request without the end of its line is ignored.  A client
 * has stopped every other thread of the process, except the driver's own, before it requests that allocations are moved
 * (`process/freezer.py`).
 */
#define _GNU_SOURCE
#include "control.h"

#include <ctype.h>
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "capture.h"
#include "child.h"
#include "context_memory.h"
#include "copies.h"
#include "held_memory.h"
#include "host_memory.h"
#include "instruments.h"
#include "ipc.h"
#include "launch_gate.h"
#include "managed.h"
#include "mappings.h"
#include "mirror.h"
#include "own_threads.h"
#include "published.h"
#include "rwlock_release.h"
#include "seconds.h"
#include "swap.h"
#include "table_lock.h"
#include "workers.h"

#ifndef CONTROL_VERSION /* of another release, in tests */
#define CONTROL_VERSION 9
#endif
#define SOCKET_VARIABLE "JUPYTER_GPU_CKPT_FAST_SOCKET"
/* The same, for the processes that the kernel starts: each appends its pid to the name. */
#define CHILDREN_VARIABLE "JUPYTER_GPU_CKPT_FAST_CHILDREN"
/* In the directory of the socket (`cuda/fastpath.py`). */
#define EXTENTS "host-memory/gpu-ckpt-extents"

static char path[sizeof((struct sockaddr_un *)0)->sun_path]; /* of the kernel's socket; empty: nothing is served */
static struct sockaddr_un name = {.sun_family = AF_UNIX};    /* of this process's own */
static pid_t kernel, owner; /* who was given that path, and who listens */
static bool with_children;
static _Atomic int listening; /* 0: not yet, 1: yes, -1: cannot */
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
static atomic_int listener = -1, peer = -1; /* descriptors, for a child to close */

/* Programs that the kernel starts preload this library, too, and make sockets of their own; unless only the kernel is
 * meant: then they inherit neither the socket nor the preloading. */
__attribute__((constructor)) static void begin(void)
{
    const char *wanted = getenv(SOCKET_VARIABLE), *inherited = getenv(CHILDREN_VARIABLE);
    with_children = inherited != NULL && inherited[0] != '\0' && strlen(inherited) < sizeof path;
    if (with_children)
        ipc_set_socket(strcpy(path, inherited));
    if (wanted != NULL && strlen(wanted) < sizeof path) {
        strcpy(path, wanted);
        kernel = getpid();
        char extents[sizeof path + sizeof "/" EXTENTS];
        const char *end = strrchr(path, '/');
        snprintf(extents, sizeof extents, "%.*s/" EXTENTS, end == NULL ? 0 : (int)(end - path), path);
        host_memory_set_directory(extents);
    }
    unsetenv(SOCKET_VARIABLE);
    const char *source = getenv(IPC_VARIABLE);
    if (source != NULL)
        ipc_set_socket(source);
    unsetenv(IPC_VARIABLE);
    Dl_info us;
    const char *preloaded = getenv("LD_PRELOAD");
    if (with_children || preloaded == NULL || dladdr(&listening, &us) == 0)
        return;
    if (path[0] != '\0')
        workers_preload(us.dli_fname, path);
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

/* For `cuda/fastpath.py`, which calls it before it lets a kernel preload the library. */
__attribute__((visibility("default"))) int gpu_ckpt_knows_rwlocks(void);
int gpu_ckpt_knows_rwlocks(void) { return rwlock_layout_is_known(); }

/* In one line of the processor's cache: each call that passes the gate reads it. */
_Alignas(64) struct published gpu_ckpt_published = {
    .mark = "gpu-ckpt state:", .version = CONTROL_VERSION, .launch_gate = HAS_LAUNCH_GATE ? GATE_UNPREPARED : 0};

static void publish(bool swapped_out)
{
    int where = host_memory_is_files() ? IN_EXTENTS : IN_ANONYMOUS_MEMORY;
    int state = swapped_out ? where : rwlock_is_released() ? READERS_DROPPED : ON_DEVICE;
    atomic_store(&gpu_ckpt_published.state, state);
}

static CUresult perform_at_gate(const char *verb, CUresult unknown)
{
    unsigned int milliseconds;
    int length = 0;
    if (sscanf(verb, "close %9u%n", &milliseconds, &length) == 1 && isdigit(verb[strlen("close ")]) &&
        verb[length] == '\0') {
        mirror_end();
        context_memory_forget();
        launch_gate_close(milliseconds / 1e3);
        return CUDA_SUCCESS;
    }
    unsigned long long bytes;
    if (sscanf(verb, "keep %20llu%n", &bytes, &length) == 1 && isdigit(verb[strlen("keep ")]) && verb[length] == '\0') {
        mirror_end();
        swap_keep(bytes);
        return CUDA_SUCCESS;
    }
    if (strcmp(verb, "mirror") == 0)
        return mirror_begin();
    if (strcmp(verb, "drop_zeros") == 0) {
        context_memory_drop_zeros();
        return CUDA_SUCCESS;
    }
    if (strcmp(verb, "open") != 0)
        return unknown;
    if (swap_amounts().swapped_out != 0)
        return CUDA_ERROR_NOT_READY;
    launch_gate_open();
    return CUDA_SUCCESS;
}

static double patience; /* of `swap_in MILLISECONDS` */

static CUresult swap_in_patiently(void) { return swap_in_as_freed(patience); }

static CUresult (*step_of(const char *verb))(void)
{
    unsigned int milliseconds;
    int length = 0;
    if (sscanf(verb, "swap_in %9u%n", &milliseconds, &length) == 1 && isdigit(verb[strlen("swap_in ")]) &&
        verb[length] == '\0') {
        patience = milliseconds / 1e3;
        return swap_in_patiently;
    }
    return strcmp(verb, "copy_out") == 0          ? swap_copy_out
           : strcmp(verb, "free") == 0            ? swap_free_device
           : strcmp(verb, "move_out") == 0        ? swap_move_out
           : strcmp(verb, "swap_in") == 0         ? swap_in
           : strcmp(verb, "swap_in_checked") == 0 ? swap_in_checked
                                                  : NULL;
}

static bool brings_in(CUresult (*step)(void))
{
    return step == swap_in || step == swap_in_patiently || step == swap_in_checked;
}

/* Descriptors that come with a request, or go with its reply. */
struct passed {
    int descriptors[MOST_HELD];
    size_t count, held; /* ``held``: bytes of the memory that was exported */
};

static void close_all(struct passed *passed)
{
    while (passed->count != 0)
        close(passed->descriptors[--passed->count]);
}

static CUresult hold(unsigned int most, struct passed *sent)
{
    if (!table_lock_for_swap())
        return CUDA_ERROR_NOT_READY;
    sent->count = swap_export(sent->descriptors, most < MOST_HELD ? most : MOST_HELD, &sent->held);
    table_unlock();
    return CUDA_SUCCESS;
}

static CUresult perform(const char *verb, struct passed *received, struct passed *sent)
{
    unsigned long long process, number;
    unsigned int most;
    if (sscanf(verb, "export %llx %llx", &process, &number) == 2) {
        CUresult result = ipc_export(process, number, sent->descriptors);
        sent->count = result == CUDA_SUCCESS;
        return result;
    }
    if (sscanf(verb, "hold %9u", &most) == 1)
        return hold(most, sent);
    CUresult (*step)(void) = step_of(verb);
    bool copies_out = step == swap_copy_out || step == swap_move_out;
    bool frees = step == swap_free_device || step == swap_move_out;
    if (step == NULL)
        return strcmp(verb, "status") == 0 ? CUDA_SUCCESS : perform_at_gate(verb, CUDA_ERROR_INVALID_VALUE);
    mirror_end();
    bool locked = table_lock_for_swap();
    bool ready = locked && (!copies_out || !capture_has_begun()); /* waiting for work would end a capture */
    CUresult result = !ready ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
    if (ready && step != swap_free_device)
        result = copies_dry_run((copies_out && swap_limit() != 0) || step == swap_in_checked);
    publish(swap_amounts().swapped_out != 0 || frees);
    if (result == CUDA_SUCCESS && brings_in(step)) {
        held_memory_take(received->descriptors, received->count);
        received->count = 0;
    }
    if (result == CUDA_SUCCESS)
        result = step();
    bool swapped_out = swap_amounts().swapped_out != 0;
    if (!swapped_out && (step != swap_copy_out || result != CUDA_SUCCESS))
        rwlock_restore();
    publish(swapped_out);
    if (locked)
        table_unlock();
    if (brings_in(step) && result == CUDA_SUCCESS)
        launch_gate_open();
    return result;
}

union descriptors_message {
    struct cmsghdr header;
    char space[CMSG_SPACE(MOST_HELD * sizeof(int))];
};

/* Without a stream, even dprintf's: a process that exits flushes it once more, and SIGPIPE would end it. */
static void send_reply(char *line, size_t length, struct passed *sent)
{
    union descriptors_message control = {
        .header = {.cmsg_len = CMSG_LEN(sent->count * sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS}};
    struct iovec part = {line, length};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (sent->count != 0) {
        memcpy(CMSG_DATA(&control.header), sent->descriptors, sent->count * sizeof(int));
        message.msg_control = &control;
        message.msg_controllen = CMSG_SPACE(sent->count * sizeof(int));
    }
    sendmsg(atomic_load(&peer), &message, MSG_NOSIGNAL);
    close_all(sent);
}

static void reply(const char *verb, struct passed *received)
{
    double began = now();
    struct passed sent = {.count = 0};
    CUresult result = perform(verb, received, &sent);
    struct amounts amounts = swap_amounts();
    char line[768], parts[256];
    copies_report(began, parts, sizeof parts);
    int length = snprintf(line, sizeof line,
                          "{\"version\": %d, \"cuda\": %d, \"allocations\": %zu, \"bytes\": %zu, \"swapped_out\": %zu, "
                          "\"kept\": %zu, \"mirrors\": %d, \"managed\": %zu, \"shared\": %zu, \"touches\": %d, "
                          "\"known\": %d, \"exported\": %zu, \"held\": %zu, \"seconds\": %.6f, \"parts\": {%s}}\n",
                          CONTROL_VERSION, result, amounts.allocations, amounts.bytes, amounts.swapped_out,
                          amounts.kept, mirror_runs(), managed_count(), allocations_shared() + mappings_exported(),
                          atomic_load(&gpu_ckpt_published.touches), host_memory_is_known(), sent.count, sent.held,
                          now() - began, parts);
    close_all(received);
    send_reply(line, (size_t)length, &sent);
    swap_free_host();
}

/* Milliseconds from one check of the memory that others need to the next, while some is kept. */
#define MEMORY_INTERVAL 250

static int next_duty(void)
{
    int remaining = launch_gate_remaining();
    if (mirror_runs())
        return 0;
    return swap_keeps() && (remaining < 0 || remaining > MEMORY_INTERVAL) ? MEMORY_INTERVAL : remaining;
}

/* Wait until a descriptor can be read; meanwhile open the launch gate when its time is over, copy in the background, and
 * give up memory that is kept when others need it. */
static void wait_readable(int descriptor)
{
    struct pollfd wanted = {.fd = descriptor, .events = POLLIN};
    int ready;
    while ((ready = poll(&wanted, 1, next_duty())) == 0 || (ready < 0 && errno == EINTR))
        if (ready == 0) {
            launch_gate_expire(swap_amounts().swapped_out != 0);
            if (mirror_runs())
                mirror_step();
            else
                swap_check_memory();
        }
}

/* Bytes received and not used yet.  Not a stream: closing it in a child would seek in it. */
struct input {
    char bytes[64];
    ssize_t at, count;
    struct passed received;
};

static ssize_t receive(struct input *input)
{
    union descriptors_message control;
    struct iovec part = {input->bytes, sizeof input->bytes};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t bytes;
    do
        bytes = recvmsg(atomic_load(&peer), &message, MSG_CMSG_CLOEXEC);
    while (bytes < 0 && errno == EINTR);
    struct cmsghdr *header = bytes > 0 ? CMSG_FIRSTHDR(&message) : NULL;
    if (header != NULL && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
        close_all(&input->received);
        input->received.count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        memcpy(input->received.descriptors, CMSG_DATA(header), input->received.count * sizeof(int));
    }
    return bytes;
}

static int next_byte(struct input *input)
{
    if (input->at == input->count) {
        input->at = 0;
        wait_readable(atomic_load(&peer));
        input->count = receive(input);
        if (input->count <= 0)
            return input->count = 0, EOF;
    }
    return (unsigned char)input->bytes[input->at++];
}

/* Read the next line; a line that is too long for a verb, or has a zero byte in it, becomes empty.  False at the
 * end. */
static bool read_verb(struct input *input, char *verb, size_t size)
{
    size_t length = 0;
    bool good = true;
    int next;
    while ((next = next_byte(input)) != EOF && next != '\n') {
        good = good && next != '\0' && length + 1 < size;
        if (good)
            verb[length++] = (char)next;
    }
    verb[good ? length : 0] = '\0';
    return next == '\n';
}

static bool is_permitted(int connection)
{
    struct ucred other;
    socklen_t size = sizeof other;
    return getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &other, &size) == 0 &&
           (other.uid == geteuid() || other.uid == 0);
}

static void serve(void)
{
    static struct input input;
    char verb[48];
    input.at = input.count = 0;
    while (read_verb(&input, verb, sizeof verb))
        reply(verb, &input.received);
    close_all(&input.received);
    if (swap_amounts().swapped_out == 0) {
        rwlock_restore(); /* first: it takes no time */
        publish(false);
    }
    swap_discard_copy();
}

/* Whether a descriptor still is of this library's socket: a program may close all that it has not opened itself, as
 * daemons do, and open files of its own under their numbers.  By its name, which is the same after a restore. */
static bool is_own_socket(int descriptor)
{
    struct sockaddr_un found = {.sun_family = AF_UNSPEC};
    socklen_t size = sizeof found;
    return descriptor >= 0 && getsockname(descriptor, (struct sockaddr *)&found, &size) == 0 &&
           found.sun_family == AF_UNIX && strncmp(found.sun_path, name.sun_path, sizeof found.sun_path) == 0;
}

static void *listen_while_open(void *argument)
{
    (void)argument;
    own_thread_begin("gpu-ckpt-fast");
    publish(false);
    for (;;) {
        wait_readable(atomic_load(&listener));
        if (!is_own_socket(atomic_load(&listener))) {
            atomic_store(&listening, -1);
            return NULL;
        }
        int connection = accept4(atomic_load(&listener), NULL, NULL, SOCK_CLOEXEC);
        if (connection < 0) {
            nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL); /* no descriptors: clients wait in the queue */
            continue;
        }
        atomic_store(&peer, connection);
        if (is_permitted(connection))
            serve();
        atomic_store(&peer, -1); /* before close: the number may then be another file's, which a child must not close */
        close(connection);
    }
    return NULL;
}

void control_in_child(void)
{
    int inherited[] = {atomic_exchange(&listener, -1), atomic_exchange(&peer, -1)};
    for (size_t at = 0; at < sizeof inherited / sizeof *inherited; at++)
        if (is_own_socket(inherited[at]))
            close(inherited[at]);
    opening = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}

pid_t control_suffix(void) { return owner == kernel ? 0 : owner; }

/* A process that has ended leaves the file of its socket, and its pid to another. */
static bool is_stale(void)
{
    struct stat found;
    if (lstat(name.sun_path, &found) != 0 || !S_ISSOCK(found.st_mode))
        return false;
    int probe = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    bool stale = probe >= 0 && connect(probe, (struct sockaddr *)&name, sizeof name) != 0 && errno == ECONNREFUSED;
    if (probe >= 0)
        close(probe);
    return stale;
}

static bool bind_name(int made)
{
    int length = snprintf(name.sun_path, sizeof name.sun_path, owner == kernel ? "%s" : "%s-%d", path, owner);
    if (length < 0 || (size_t)length >= sizeof name.sun_path)
        return false;
    if (bind(made, (struct sockaddr *)&name, sizeof name) == 0)
        return true;
    return errno == EADDRINUSE && is_stale() && unlink(name.sun_path) == 0 &&
           bind(made, (struct sockaddr *)&name, sizeof name) == 0;
}

static int start(void)
{
    owner = getpid();
    if (owner != kernel)
        host_memory_set_directory(""); /* the extents are the kernel's */
    int made = compute_sanitizer_is_loaded() ? -1 : socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (made < 0)
        return -1;
    atomic_store(&listener, made);
    sigset_t all, before;
    sigfillset(&all);
    /* A fault of this thread is reported like one of the program's. */
    for (const int *fault = (const int[]){SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, 0}; *fault != 0; fault++)
        sigdelset(&all, *fault);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    bool begun = rwlock_layout_is_known() && bind_name(made) && listen(made, 4) == 0 &&
                 pthread_create(&thread, NULL, listen_while_open, NULL) == 0;
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
    pid_t self = path[0] == '\0' || is_inert() ? 0 : getpid();
    if (self == 0) /* not requested, or a child that cannot use CUDA */
        return false;
    int state = atomic_load_explicit(&listening, memory_order_acquire);
    if (state == 0 && (self == kernel || with_children)) {
        pthread_mutex_lock(&opening);
        if ((state = atomic_load(&listening)) == 0)
            atomic_store_explicit(&listening, state = start(), memory_order_release);
        pthread_mutex_unlock(&opening);
    }
    return state == 1 && self == owner; /* not of a child that was made without fork's handlers */
}

__attribute__((destructor)) static void end(void)
{
    if (atomic_load(&listening) == 1 && owner != kernel && getpid() == owner)
        unlink(name.sun_path);
}
