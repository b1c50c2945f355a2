/* Counting of calls, faults, and the end of a program that is wrong. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "double.h"

#define MOST 128

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct {
    char name[48];
    long calls;
} functions[MOST];
static size_t count;
static struct {
    char function[48];
    long nth, seen;
    bool lasting;
    CUresult result;
} fault;
static pthread_cond_t continues = PTHREAD_COND_INITIALIZER;
static struct {
    char function[48];
    long before; /* calls that do not wait */
    char file[256];
    bool begun, waits;
} stop;
static struct {
    char function[48];
    void (*call)(void);
} callback;

void misuse(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fputs("driver double: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    abort();
}

CUresult entered(const char *function)
{
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&mutex);
    size_t at = 0;
    while (at < count && strcmp(functions[at].name, function) != 0)
        at++;
    if (at == count) {
        if (count++ == MOST)
            abort();
        snprintf(functions[at].name, sizeof functions[at].name, "%s", function);
    }
    functions[at].calls++;
    if (fault.nth != 0 && (strcmp(fault.function, function) == 0 || strcmp(fault.function, "*") == 0)) {
        fault.seen++;
        if (fault.seen == fault.nth || (fault.lasting && fault.seen > fault.nth))
            result = fault.result;
    }
    if (strcmp(stop.function, function) == 0 && !stop.begun && stop.before-- == 0) {
        stop.begun = stop.waits = true; /* one call */
        while (stop.waits && stop.file[0] == '\0')
            pthread_cond_wait(&continues, &mutex);
        pthread_mutex_unlock(&mutex);
        while (stop.file[0] != '\0' && access(stop.file, F_OK) == 0)
            usleep(10000);
        pthread_mutex_lock(&mutex);
        stop.waits = false;
    }
    void (*call)(void) = strcmp(callback.function, function) == 0 ? callback.call : NULL;
    if (call != NULL)
        callback.call = NULL;
    pthread_mutex_unlock(&mutex);
    if (call != NULL)
        call();
    return result;
}

EXPORT void double_call_back(const char *function, void (*call)(void))
{
    pthread_mutex_lock(&mutex);
    snprintf(callback.function, sizeof callback.function, "%s", function);
    callback.call = call;
    pthread_mutex_unlock(&mutex);
}

EXPORT void double_stop_while(const char *function, long calls, const char *file)
{
    pthread_mutex_lock(&mutex);
    snprintf(stop.function, sizeof stop.function, "%s", function);
    snprintf(stop.file, sizeof stop.file, "%s", file);
    stop.before = calls;
    stop.begun = false;
    pthread_mutex_unlock(&mutex);
}

EXPORT void double_stop_after(const char *function, long calls) { double_stop_while(function, calls, ""); }

EXPORT void double_stop(const char *function) { double_stop_after(function, 0); }

EXPORT bool double_waits(void)
{
    pthread_mutex_lock(&mutex);
    bool waits = stop.waits;
    pthread_mutex_unlock(&mutex);
    return waits;
}

EXPORT void double_continue(void)
{
    pthread_mutex_lock(&mutex);
    stop.waits = false;
    pthread_cond_broadcast(&continues);
    pthread_mutex_unlock(&mutex);
}

EXPORT void double_fail(const char *function, long nth, bool lasting, CUresult result)
{
    pthread_mutex_lock(&mutex);
    snprintf(fault.function, sizeof fault.function, "%s", function);
    fault.nth = nth;
    fault.seen = 0;
    fault.lasting = lasting;
    fault.result = result;
    for (size_t at = 0; at < count; at++)
        functions[at].calls = 0;
    pthread_mutex_unlock(&mutex);
}

EXPORT long double_calls(const char *function)
{
    long calls = 0;
    pthread_mutex_lock(&mutex);
    for (size_t at = 0; at < count; at++)
        if (strcmp(functions[at].name, function) == 0)
            calls = functions[at].calls;
    pthread_mutex_unlock(&mutex);
    return calls;
}

EXPORT const char *double_called(size_t index) { return index < count ? functions[index].name : NULL; }
