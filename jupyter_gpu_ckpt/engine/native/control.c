/* One request a line, one line of JSON each as the answer:
 *
 *   status    what there is                            {"blocks", "bytes", "away"}
 *   leave     copy to the arena                        the same, and {"cuda": CUresult, "seconds"}
 *   free      give the physical memory back            likewise
 *   return    everything back on the device            likewise
 *
 * A connection that ends between ``leave`` and ``free`` forgets the copy.  Who connects has stopped every other thread
 * of the process, but for the driver's own, before it asks for more than the status (`engine/parking.py`).
 */
#define _GNU_SOURCE
#include "control.h"

#include <dlfcn.h>
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

#include "transfer.h"

#define SOCKET_VARIABLE "JUPYTER_GPU_CKPT_FAST_SOCKET"

static char path[sizeof((struct sockaddr_un *)0)->sun_path];
static pid_t owner;
static _Atomic int listening; /* 0: not yet, 1: yes, -1: cannot */
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;

/* What this process starts is not meant: neither the socket nor the preloading is handed on. */
__attribute__((constructor)) static void begin(void)
{
    const char *wanted = getenv(SOCKET_VARIABLE);
    if (wanted != NULL && strlen(wanted) < sizeof path) {
        strcpy(path, wanted);
        owner = getpid();
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

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void answer(int peer, const char *verb)
{
    CUresult result = CUDA_SUCCESS;
    double began = now();
    if (strcmp(verb, "leave") == 0)
        result = transfer_copy_out();
    else if (strcmp(verb, "free") == 0)
        result = transfer_free();
    else if (strcmp(verb, "return") == 0)
        result = transfer_bring_back();
    else if (strcmp(verb, "status") != 0)
        result = CUDA_ERROR_INVALID_VALUE;
    struct amounts amounts = transfer_amounts();
    dprintf(peer, "{\"cuda\": %d, \"blocks\": %zu, \"bytes\": %zu, \"away\": %zu, \"seconds\": %.6f}\n", result,
            amounts.blocks, amounts.bytes, amounts.away, now() - began);
    transfer_tidy();
}

static void serve(int connection)
{
    struct ucred peer;
    socklen_t size = sizeof peer;
    FILE *stream = NULL;
    if (getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && (peer.uid == geteuid() || peer.uid == 0))
        stream = fdopen(connection, "r");
    if (stream == NULL) {
        close(connection);
        return;
    }
    char line[64];
    while (fgets(line, sizeof line, stream) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        answer(connection, line);
    }
    transfer_forget();
    fclose(stream);
}

static void *listen_for_ever(void *argument)
{
    int listener = (int)(long)argument;
    pthread_setname_np(pthread_self(), "gpu-ckpt-fast");
    for (;;) {
        int connection = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (connection >= 0)
            serve(connection);
    }
    return NULL;
}

static int start(void)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    strcpy(name.sun_path, path);
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (listener < 0)
        return -1;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    bool begun = bind(listener, (struct sockaddr *)&name, sizeof name) == 0 && listen(listener, 4) == 0 &&
                 pthread_create(&thread, NULL, listen_for_ever, (void *)(long)listener) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!begun) {
        close(listener);
        return -1;
    }
    pthread_detach(thread);
    return 1;
}

bool control_open(void)
{
    if (path[0] == '\0' || getpid() != owner) /* not asked for; or a child, which cannot use CUDA anyway */
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
