/* What the doubles of CUDA's libraries share, and what a test may ask of them beside CUDA's own functions. */
#pragma once

#include "driver.h"

enum {
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
};

/* The program is wrong where a real GPU would be silent, or would break later. */
_Noreturn void misuse(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Begins each function: counts the call, and fails it if a test wants that. */
CUresult entered(const char *function);
#define ENTER()                                                                                                        \
    do {                                                                                                               \
        CUresult injected = entered(__func__);                                                                         \
        if (injected != CUDA_SUCCESS)                                                                                  \
            return injected;                                                                                           \
    } while (0)

/* Memory: whether the range is within one mapping that the current context's device may use (1: read, 3: and write), or
 * one allocation. */
bool device_range_is_usable(CUdeviceptr address, size_t bytes, int access);
bool host_range_is_registered(const void *address, size_t bytes);
/* Copies; a device's memory that was never written stays without pages. */
void device_to_host(char *host, CUdeviceptr device, size_t bytes);
void host_to_device(CUdeviceptr device, const char *host, size_t bytes);

void set_device(CUdeviceptr device, int value, size_t bytes);
bool device_is_zero(CUdeviceptr device, size_t bytes);

/* Work of a kernel (`modules_double.c`): of those that the library loads. */
struct launch {
    CUfunction kernel;
    CUdeviceptr read, found;
    unsigned long long key[2];
    unsigned blocks, number;
};
void run_kernel(const struct launch *launch, CUcontext context);
void launch_on(CUstream stream, struct launch launch, const char *function);
void need_context(CUcontext context, const char *function);
bool range_is_usable_in(CUdeviceptr address, size_t bytes, int access, CUcontext context);

/* What is unsafe while a stream is captured: whether this thread may do it; if not, the captures are ended. */
CUresult permitted_during_capture(void);

CUcontext current_context(void);
CUdevice device_of(CUcontext context);
CUresult failed(CUcontext context); /* the error of a kernel of it, which most calls then return */
void free_allocations_of(CUcontext context);
CUresult cuStreamIsCapturing(CUstream, int *);
int device_count(void); /* DOUBLE_DEVICES of the environment */
int can_access(CUdevice from, CUdevice to); /* but for different ones if DOUBLE_STRANGERS is set */
/* All that was asked of the device in a context is done. */
void finish_work(CUcontext context);
size_t streams_outstanding(void);
size_t events_outstanding(void);
/* As a writer: calls that change what memory there is do; they wait, too, while the process is suspended. */
void lock_for_writing(void);
void wait_while_suspended(void);
bool is_suspended(void);
/* Memory that cuMemFreeAsync was called for on the stream (NULL: on any), and whose work is done by now, is free. */
void free_deferred(CUstream stream);

/* For tests. */
struct outstanding {
    size_t used, reservations, handles, mappings, allocations, streams, events, registered;
};
void double_outstanding(struct outstanding *);
void double_set_bytes(size_t bytes);             /* of the device */
void double_set_delay(unsigned microseconds);    /* of each copy on a stream */
bool double_is_held(void);                       /* by a ``double_hold`` */
/* Calls ``nth`` (1: the next) and, if ``lasting``, all later ones of the function fail; 0: none; "*": any function. */
void double_fail(const char *function, long nth, bool lasting, CUresult result);
/* The next call of the function calls another one in its thread first, as a profiler has the driver do. */
void double_call_back(const char *function, void (*call)(void));
/* The next call of the function waits (``double_waits``: it does now) until ``double_continue``. */
void double_stop(const char *function);
void double_stop_after(const char *function, long calls); /* the one after so many */
/* The same; it continues when there is no file of that name any more. */
void double_stop_while(const char *function, long calls, const char *file);
bool double_waits(void);
void double_continue(void);
long double_calls(const char *function);         /* since the last double_fail */
const char *double_called(size_t index);         /* names, until NULL */
CUresult double_primary_context(CUcontext *);
void double_break(CUresult result); /* a kernel of the current context has failed */
/* Calls that wait while the driver is locked, by the file of the given name (beside it, "-is-locked" says that). */
void double_lock_file(const char *file);
/* The process is suspended while there is a file of the given name (beside it, "-is-suspended" says that): calls that
 * do not wait end it. */
void double_suspend_file(const char *file);
void *double_map(size_t bytes);
void double_read(void);
void double_write(void);
void double_hold(unsigned microseconds); /* what writers need */
void double_end_capture(CUstream stream);
int double_at_once(void); /* the most devices that copied at the same time */
/* Work of the GPU: after ``microseconds`` each byte of the range becomes ``value``. */
CUresult double_launch_on(CUstream stream, CUdeviceptr address, size_t bytes, int value, unsigned microseconds);
CUresult double_launch(CUdeviceptr address, size_t bytes, int value, unsigned microseconds);
