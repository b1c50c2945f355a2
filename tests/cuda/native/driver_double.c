/* libcuda.so.1 without a GPU: devices, contexts and streams.  A stream is a thread that works on a queue. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "double.h"

#define DEPTH 16

struct CUctx_st {
    int device;
    unsigned long long id; /* another one each time that it is made */
    unsigned int flags;
    CUresult failed; /* of a kernel: the result of most calls from then on */
    CUstream first; /* of its streams, the one that ``double_launch`` uses among them */
    CUstream launches;
    struct CUctx_st *other;
};
struct operation {
    enum { OUT, IN, FILL, SET, LAUNCH } kind;
    CUdeviceptr device;
    char *host;
    size_t bytes;
    int value;
    unsigned delay;
    struct launch launch;
    struct operation *after;
};
struct CUstream_st {
    CUcontext context;
    pthread_t thread;
    struct operation *first, **last;
    size_t asked, done; /* operations */
    bool ends;
    CUstream other;
    enum { NOT_CAPTURED, CAPTURED, INVALIDATED } capture;
    int capture_mode;
    pthread_t captured_by;
};

struct CUevent_st {
    CUcontext context;
    CUstream stream; /* of the last record */
    size_t asked;    /* of it by then */
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static CUcontext contexts, primary;
static unsigned long long last_id;
static size_t stream_count, event_count;
static unsigned delay;

static _Thread_local CUcontext stack[DEPTH];
static _Thread_local size_t depth;

CUcontext current_context(void) { return depth ? stack[depth - 1] : NULL; }
CUdevice device_of(CUcontext context) { return context->device; }
CUresult failed(CUcontext context) { return context != NULL ? context->failed : CUDA_SUCCESS; }

EXPORT void double_break(CUresult result) { current_context()->failed = result; }

static CUcontext needed(const char *function)
{
    if (current_context() == NULL)
        misuse("%s: no context is current", function);
    return current_context();
}

int device_count(void)
{
    const char *wanted = getenv("DOUBLE_DEVICES");
    return wanted != NULL ? atoi(wanted) : 1;
}

int can_access(CUdevice from, CUdevice to) { return from == to || getenv("DOUBLE_STRANGERS") == NULL; }

/* -- the lock at which callers wait while the driver is locked, some as readers */

static pthread_rwlock_t driver_lock = PTHREAD_RWLOCK_INITIALIZER;
static pthread_mutex_t writers_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t suspended_mutex = PTHREAD_MUTEX_INITIALIZER; /* locked while the process is */

void wait_while_suspended(void)
{
    pthread_mutex_lock(&suspended_mutex);
    pthread_mutex_unlock(&suspended_mutex);
}

void lock_for_writing(void)
{
    wait_while_suspended();
    pthread_rwlock_wrlock(&driver_lock);
    pthread_mutex_lock(&writers_mutex);
    pthread_mutex_unlock(&writers_mutex);
    pthread_rwlock_unlock(&driver_lock);
}

EXPORT void double_write(void) { lock_for_writing(); }

EXPORT void double_read(void)
{
    pthread_rwlock_rdlock(&driver_lock);
    pthread_rwlock_unlock(&driver_lock);
}

static atomic_bool held;

EXPORT void double_hold(unsigned microseconds)
{
    pthread_mutex_lock(&writers_mutex);
    atomic_store(&held, true);
    usleep(microseconds);
    atomic_store(&held, false);
    pthread_mutex_unlock(&writers_mutex);
    usleep(1000); /* for threads that wait */
}

EXPORT bool double_is_held(void) { return atomic_load(&held); }

static void lock(void) { pthread_rwlock_wrlock(&driver_lock); }
static void unlock(void) { pthread_rwlock_unlock(&driver_lock); }

/* The driver's own memory, which is away while it has suspended the process.  Some calls read it without the lock. */
static volatile int *own_memory;
static atomic_bool suspended;

static void take_memory(void)
{
    pthread_mutex_lock(&suspended_mutex);
    atomic_store(&suspended, true);
    mprotect((void *)own_memory, sizeof *own_memory, PROT_NONE);
}

static void return_memory(void)
{
    mprotect((void *)own_memory, sizeof *own_memory, PROT_READ);
    atomic_store(&suspended, false);
    pthread_mutex_unlock(&suspended_mutex);
}

bool is_suspended(void) { return atomic_load(&suspended); }

/* As a GPU does it (docs/measurements.md): calls that wait for work, or ask for it, end a suspended process. */
static void read_own_memory(void)
{
    if (own_memory != NULL)
        (void)*own_memory;
}

/* A thread of the driver: what it does while there is a file, and says so by another. */
struct duty {
    char wanted[4000], said[4096];
    void (*begin)(void), (*end)(void);
};

static void *keep(void *argument)
{
    struct duty *duty = argument;
    pthread_setname_np(pthread_self(), "cuda0000000d00e");
    for (bool done = false;; usleep(500)) {
        bool wants = access(duty->wanted, F_OK) == 0;
        if (wants && !done) {
            duty->begin();
            close(open(duty->said, O_WRONLY | O_CREAT, 0600));
        } else if (!wants && done) {
            duty->end();
            unlink(duty->said);
        }
        done = wants;
    }
    return NULL;
}

static void keep_at(const char *file, const char *said, void (*begin)(void), void (*end)(void))
{
    pthread_t thread;
    struct duty *duty = malloc(sizeof *duty);
    snprintf(duty->wanted, sizeof duty->wanted, "%s", file);
    snprintf(duty->said, sizeof duty->said, "%s-is-%s", duty->wanted, said);
    duty->begin = begin;
    duty->end = end;
    if (pthread_create(&thread, NULL, keep, duty) != 0)
        misuse("the driver has no thread");
}

EXPORT void double_lock_file(const char *file) { keep_at(file, "locked", lock, unlock); }

EXPORT void double_suspend_file(const char *file)
{
    void *memory = mmap(NULL, sizeof *own_memory, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        misuse("the driver has no memory of its own");
    own_memory = memory;
    keep_at(file, "suspended", take_memory, return_memory);
}

/* As memory of a suspended context is mapped; the caller fills it. */
EXPORT void *double_map(size_t bytes)
{
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE;
    void *volatile memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    return memory; /* volatile: not by a tail call, whose caller is another */
}

/* -- devices and contexts */

EXPORT CUresult cuInit(unsigned int flags)
{
    ENTER();
    return flags == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuDeviceGetCount(int *count)
{
    ENTER();
    *count = device_count();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    ENTER();
    if (device < 0 || device >= device_count())
        return CUDA_ERROR_INVALID_DEVICE;
    *value = attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED ||
             attribute == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED ||
             attribute == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceCanAccessPeer(int *can, CUdevice from, CUdevice to)
{
    ENTER();
    if (from == to || from < 0 || to < 0 || from >= device_count() || to >= device_count())
        return CUDA_ERROR_INVALID_DEVICE;
    *can = can_access(from, to);
    return CUDA_SUCCESS;
}

static bool exists(CUcontext context)
{
    pthread_mutex_lock(&mutex);
    CUcontext at = contexts;
    while (at != NULL && at != context)
        at = at->other;
    pthread_mutex_unlock(&mutex);
    return at != NULL;
}

static CUcontext made(int device)
{
    CUcontext context = calloc(1, sizeof *context);
    context->device = device;
    pthread_mutex_lock(&mutex);
    context->id = ++last_id;
    context->other = contexts;
    contexts = context;
    pthread_mutex_unlock(&mutex);
    return context;
}

/* Without its memory, and no longer current; the streams are left. */
static void unmake(CUcontext context)
{
    free_allocations_of(context);
    pthread_mutex_lock(&mutex);
    CUcontext *at = &contexts;
    while (*at != NULL && *at != context)
        at = &(*at)->other;
    if (*at != NULL)
        *at = context->other;
    pthread_mutex_unlock(&mutex);
    if (current_context() == context)
        depth--;
}

EXPORT CUresult cuCtxDestroy_v2(CUcontext context)
{
    ENTER();
    if (context == NULL || !exists(context) || context == primary)
        return CUDA_ERROR_INVALID_CONTEXT;
    unmake(context);
    return CUDA_SUCCESS;
}

/* -- the first device's primary context: its handle stays, whether it is there or not */

static pthread_mutex_t primary_mutex = PTHREAD_MUTEX_INITIALIZER;
static size_t retained;

static CUcontext retain_primary(size_t more)
{
    pthread_mutex_lock(&primary_mutex);
    if (retained == 0) {
        if (primary == NULL)
            primary = made(0);
        else if (!exists(primary)) {
            primary->other = contexts;
            primary->id = ++last_id;
            contexts = primary;
        }
        more = 1;
    }
    retained += more;
    pthread_mutex_unlock(&primary_mutex);
    return primary;
}

/* For the runtime, which retains it once. */
EXPORT CUresult double_primary_context(CUcontext *context)
{
    *context = retain_primary(0);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    ENTER();
    if (device != 0)
        return CUDA_ERROR_INVALID_DEVICE;
    *context = retain_primary(1);
    return CUDA_SUCCESS;
}

static CUresult release_primary(CUdevice device, bool all)
{
    if (device != 0)
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&primary_mutex);
    CUresult result = retained == 0 && !all ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
    bool ends = retained != 0 && (all || retained == 1);
    retained -= ends ? retained : retained != 0;
    if (ends)
        unmake(primary);
    pthread_mutex_unlock(&primary_mutex);
    return result;
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    ENTER();
    return release_primary(device, false);
}

EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice device)
{
    ENTER();
    return release_primary(device, true);
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active)
{
    ENTER();
    if (device != 0)
        return CUDA_ERROR_INVALID_DEVICE;
    *flags = 0;
    *active = retained != 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *context)
{
    ENTER();
    *context = current_context();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context)
{
    ENTER();
    if (context == NULL || !exists(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (depth == DEPTH)
        misuse("cuCtxPushCurrent: contexts are pushed and never popped");
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
    ENTER();
    if (depth == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    *context = stack[--depth];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext context)
{
    ENTER();
    if (context != NULL && !exists(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (depth != 0)
        depth--;
    if (context != NULL)
        stack[depth++] = context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device)
{
    ENTER();
    (void)flags;
    if (device < 0 || device >= device_count())
        return CUDA_ERROR_INVALID_DEVICE;
    *context = made(device);
    return cuCtxPushCurrent_v2(*context);
}

EXPORT CUresult cuCtxGetFlags(unsigned int *flags)
{
    ENTER();
    *flags = needed(__func__)->flags;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetFlags(unsigned int flags)
{
    ENTER();
    needed(__func__)->flags = flags;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device)
{
    ENTER();
    if (current_context() == NULL)
        return CUDA_ERROR_INVALID_CONTEXT;
    *device = current_context()->device;
    return CUDA_SUCCESS;
}

/* -- streams */

static atomic_uint copying; /* a bit for each device that does */
static atomic_int at_once;

EXPORT int double_at_once(void) { return atomic_load(&at_once); }

static void perform(const struct operation *operation, CUcontext context)
{
    bool copies = operation->kind == OUT || operation->kind == IN;
    if (copies) {
        unsigned bit = 1u << context->device, now = atomic_fetch_or(&copying, bit) | bit;
        int count = __builtin_popcount(now), most = atomic_load(&at_once);
        while (count > most && !atomic_compare_exchange_weak(&at_once, &most, count))
            ;
    }
    if (operation->delay != 0)
        usleep(operation->delay);
    if (copies)
        atomic_fetch_and(&copying, ~(1u << context->device));
    if (operation->kind == OUT)
        device_to_host(operation->host, operation->device, operation->bytes);
    else if (operation->kind == IN)
        host_to_device(operation->device, operation->host, operation->bytes);
    else if (operation->kind == SET)
        set_device(operation->device, operation->value, operation->bytes);
    else if (operation->kind == LAUNCH)
        run_kernel(&operation->launch, context);
    else
        for (size_t at = 0; at < operation->bytes; at++)
            ((volatile char *)operation->device)[at] = (char)operation->value;
}

static void *run(void *argument)
{
    CUstream stream = argument;
    pthread_setname_np(pthread_self(), "cuda-EvtHandlr");
    pthread_mutex_lock(&mutex);
    for (;;) {
        while (stream->first == NULL && !stream->ends)
            pthread_cond_wait(&changed, &mutex);
        struct operation *operation = stream->first;
        if (operation == NULL)
            break;
        if ((stream->first = operation->after) == NULL)
            stream->last = &stream->first;
        pthread_mutex_unlock(&mutex);
        perform(operation, stream->context);
        free(operation);
        pthread_mutex_lock(&mutex);
        stream->done++;
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&mutex);
    return NULL;
}

/* NULL if there is no thread for it. */
static CUstream stream_of(CUcontext context)
{
    CUstream stream = calloc(1, sizeof *stream);
    if (stream == NULL)
        return NULL;
    stream->context = context;
    stream->last = &stream->first;
    pthread_mutex_lock(&mutex);
    if (pthread_create(&stream->thread, NULL, run, stream) != 0) {
        pthread_mutex_unlock(&mutex);
        free(stream);
        return NULL;
    }
    stream->other = context->first;
    context->first = stream;
    pthread_mutex_unlock(&mutex);
    return stream;
}

static CUstream *place(CUcontext context, CUstream stream, const char *function)
{
    CUstream *at = &context->first;
    while (*at != NULL && *at != stream)
        at = &(*at)->other;
    if (*at == NULL)
        misuse("%s: no stream of the current context", function);
    return at;
}

/* The default streams, the legacy one and a thread's own (here the same for all), are the one that launches use. */
static CUstream actual(CUstream stream)
{
    CUcontext context = current_context();
    if (stream > (CUstream)2 || context == NULL)
        return stream;
    if (context->launches == NULL)
        context->launches = stream_of(context);
    return context->launches;
}

static void ask(CUstream stream, struct operation wanted, const char *function)
{
    CUcontext context = needed(function);
    struct operation *operation = malloc(sizeof *operation);
    *operation = wanted;
    pthread_mutex_lock(&mutex);
    place(context, stream, function);
    *stream->last = operation;
    stream->last = &operation->after;
    stream->asked++;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
}

void launch_on(CUstream stream, struct launch launch, const char *function)
{
    ask(stream, (struct operation){.kind = LAUNCH, .launch = launch}, function);
}

void need_context(CUcontext context, const char *function)
{
    if (!exists(context))
        misuse("%s: of a context that was destroyed", function);
}

EXPORT CUresult cuCtxGetId(CUcontext context, unsigned long long *id)
{
    ENTER();
    if (!exists(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    *id = context->id;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemsetD8Async(CUdeviceptr device, unsigned char value, size_t bytes, CUstream stream)
{
    ENTER();
    if (!device_range_is_usable(device, bytes, CU_MEM_ACCESS_FLAGS_PROT_READWRITE))
        misuse("cuMemsetD8Async(%#llx, %zu): not the device's", device, bytes);
    ask(actual(stream), (struct operation){.kind = SET, .device = device, .bytes = bytes, .value = value}, __func__);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamCreate(CUstream *stream, unsigned int flags)
{
    ENTER();
    CUcontext context = needed(__func__);
    if (flags != CU_STREAM_NON_BLOCKING)
        misuse("cuStreamCreate: it would wait for the program's own work");
    *stream = stream_of(context);
    if (*stream == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    __atomic_add_fetch(&stream_count, 1, __ATOMIC_RELAXED);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamDestroy_v2(CUstream stream)
{
    ENTER();
    pthread_mutex_lock(&mutex);
    *place(needed(__func__), stream, __func__) = stream->other;
    stream->ends = true;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
    pthread_join(stream->thread, NULL); /* events of it still exist, so it is not freed */
    free_deferred(stream);
    __atomic_sub_fetch(&stream_count, 1, __ATOMIC_RELAXED);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamSynchronize(CUstream stream)
{
    ENTER();
    read_own_memory();
    pthread_mutex_lock(&mutex);
    place(needed(__func__), stream, __func__);
    while (stream->done != stream->asked)
        pthread_cond_wait(&changed, &mutex);
    pthread_mutex_unlock(&mutex);
    free_deferred(stream);
    return failed(current_context());
}

/* As the real one, it does not wait at the lock. */
EXPORT CUresult cuStreamQuery(CUstream stream)
{
    ENTER();
    read_own_memory();
    CUcontext context = needed(__func__);
    if (context->failed != CUDA_SUCCESS)
        return context->failed;
    if (stream <= (CUstream)2 && context->launches == NULL)
        return CUDA_SUCCESS; /* nothing was ever launched */
    stream = actual(stream);
    pthread_mutex_lock(&mutex);
    place(context, stream, __func__);
    CUresult result = stream->done == stream->asked ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
    pthread_mutex_unlock(&mutex);
    return result;
}

EXPORT CUresult cuStreamGetCtx(CUstream stream, CUcontext *context)
{
    ENTER();
    stream = actual(stream);
    if (stream == NULL)
        return CUDA_ERROR_INVALID_CONTEXT;
    *context = stream->context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventCreate(CUevent *event, unsigned int flags)
{
    ENTER();
    wait_while_suspended();
    if (flags != CU_EVENT_DISABLE_TIMING)
        misuse("cuEventCreate: nobody wants to know the time");
    *event = calloc(1, sizeof **event);
    (*event)->context = needed(__func__);
    __atomic_add_fetch(&event_count, 1, __ATOMIC_RELAXED);
    return CUDA_SUCCESS;
}

/* The real driver frees it with its context. */
static void need_its_context(CUevent event, const char *function)
{
    if (!exists(event->context))
        misuse("%s: an event of a context that was destroyed", function);
}

EXPORT CUresult cuEventDestroy_v2(CUevent event)
{
    ENTER();
    need_its_context(event, __func__);
    free(event);
    __atomic_sub_fetch(&event_count, 1, __ATOMIC_RELAXED);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventRecord(CUevent event, CUstream stream)
{
    ENTER();
    stream = actual(stream);
    pthread_mutex_lock(&mutex);
    place(needed(__func__), stream, __func__);
    if (event->context != stream->context)
        misuse("cuEventRecord: an event of another context");
    event->stream = stream;
    event->asked = stream->asked;
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventSynchronize(CUevent event)
{
    ENTER();
    read_own_memory();
    need_its_context(event, __func__);
    pthread_mutex_lock(&mutex);
    if (event->stream == NULL)
        misuse("cuEventSynchronize: never recorded");
    if (!event->stream->ends)
        place(event->context, event->stream, __func__);
    while (event->stream->done < event->asked)
        pthread_cond_wait(&changed, &mutex);
    CUstream stream = event->stream;
    pthread_mutex_unlock(&mutex);
    free_deferred(stream);
    return failed(event->context);
}

EXPORT CUresult cuEventQuery(CUevent event)
{
    ENTER();
    read_own_memory();
    need_its_context(event, __func__);
    CUresult result = permitted_during_capture();
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&mutex);
    if (event->stream == NULL)
        misuse("cuEventQuery: never recorded");
    result = event->stream->done < event->asked ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
    pthread_mutex_unlock(&mutex);
    return result;
}

void finish_work(CUcontext context)
{
    pthread_mutex_lock(&mutex);
    for (CUstream at = context != NULL ? context->first : NULL; at != NULL;)
        if (at->done != at->asked) {
            pthread_cond_wait(&changed, &mutex);
            at = context->first; /* the list may be another one */
        } else
            at = at->other;
    pthread_mutex_unlock(&mutex);
}

/* -- captures: of no work, but with all that ends them */

enum { GLOBAL, THREAD_LOCAL, RELAXED };
static _Thread_local int capture_mode = GLOBAL;

/* End the captures of the context's streams; whether there were any. */
static bool invalidate(CUcontext context)
{
    bool any = false;
    pthread_mutex_lock(&mutex);
    for (CUstream at = context->first; at != NULL; at = at->other)
        if (at->capture != NOT_CAPTURED) {
            at->capture = INVALIDATED;
            any = true;
        }
    pthread_mutex_unlock(&mutex);
    return any;
}

CUresult permitted_during_capture(void)
{
    bool permitted = true;
    pthread_mutex_lock(&mutex);
    for (CUcontext context = contexts; context != NULL; context = context->other)
        for (CUstream at = context->first; at != NULL; at = at->other) {
            bool own = at->capture != NOT_CAPTURED && pthread_equal(at->captured_by, pthread_self());
            bool prohibits = own ? at->capture_mode != RELAXED : capture_mode == GLOBAL && at->capture_mode == GLOBAL;
            if (at->capture != NOT_CAPTURED && capture_mode != RELAXED && prohibits) {
                at->capture = INVALIDATED;
                permitted = false;
            }
        }
    pthread_mutex_unlock(&mutex);
    return permitted ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(int *mode)
{
    ENTER();
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamBeginCapture_v2(CUstream stream, int mode)
{
    ENTER();
    if (stream <= (CUstream)1)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    stream = actual(stream);
    if (stream->capture != NOT_CAPTURED)
        return CUDA_ERROR_ILLEGAL_STATE;
    pthread_mutex_lock(&mutex);
    stream->capture = CAPTURED;
    stream->capture_mode = mode;
    stream->captured_by = pthread_self();
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamBeginCapture_v2_ptsz(CUstream stream, int mode)
{
    return cuStreamBeginCapture_v2(stream == NULL ? (CUstream)2 : stream, mode);
}

EXPORT CUresult cuStreamIsCapturing(CUstream stream, int *status)
{
    ENTER();
    stream = actual(stream);
    *status = stream == NULL || stream->capture == NOT_CAPTURED ? 0 : stream->capture == CAPTURED ? 1 : 2;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph)
{
    ENTER();
    stream = actual(stream);
    if (stream == NULL || stream->capture == NOT_CAPTURED)
        return CUDA_ERROR_ILLEGAL_STATE;
    CUresult result = stream->capture == CAPTURED ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    *graph = result == CUDA_SUCCESS ? (CUgraph)&contexts : NULL;
    stream->capture = NOT_CAPTURED;
    return result;
}

/* By a way that no library sees. */
EXPORT void double_end_capture(CUstream stream) { actual(stream)->capture = NOT_CAPTURED; }

EXPORT CUresult cuStreamEndCapture_ptsz(CUstream stream, CUgraph *graph)
{
    return cuStreamEndCapture(stream == NULL ? (CUstream)2 : stream, graph);
}

EXPORT CUresult cuCtxSynchronize(void)
{
    ENTER();
    read_own_memory();
    CUcontext context = needed(__func__);
    if (context->failed != CUDA_SUCCESS)
        return context->failed;
    if (invalidate(context))
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    finish_work(context);
    free_deferred(NULL);
    return CUDA_SUCCESS;
}

size_t streams_outstanding(void) { return __atomic_load_n(&stream_count, __ATOMIC_RELAXED); }
size_t events_outstanding(void) { return __atomic_load_n(&event_count, __ATOMIC_RELAXED); }

EXPORT CUresult cuMemcpyDtoHAsync_v2(void *host, CUdeviceptr device, size_t bytes, CUstream stream)
{
    ENTER();
    if (!host_range_is_registered(host, bytes) || !device_range_is_usable(device, bytes, 1))
        misuse("%s(%p, %#llx, %zu): outside of what is there", __func__, host, device, bytes);
    struct operation wanted = {.kind = OUT, .device = device, .host = host, .bytes = bytes, .delay = delay};
    ask(stream, wanted, __func__);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr device, const void *host, size_t bytes, CUstream stream)
{
    ENTER();
    if (!host_range_is_registered(host, bytes) || !device_range_is_usable(device, bytes, 3))
        misuse("%s(%#llx, %p, %zu): outside of what is there", __func__, device, host, bytes);
    struct operation wanted = {.kind = IN, .device = device, .host = (char *)host, .bytes = bytes, .delay = delay};
    ask(stream, wanted, __func__);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    ENTER();
    if (!device_range_is_usable(to, bytes, 3) || !device_range_is_usable(from, bytes, 1))
        misuse("%s(%#llx, %#llx, %zu): outside of what is there", __func__, to, from, bytes);
    struct operation wanted = {.kind = OUT, .device = from, .host = (char *)to, .bytes = bytes, .delay = delay};
    ask(stream, wanted, __func__);
    return CUDA_SUCCESS;
}

EXPORT void double_set_delay(unsigned microseconds) { delay = microseconds; }

EXPORT CUresult double_launch_on(CUstream stream, CUdeviceptr address, size_t bytes, int value, unsigned microseconds)
{
    if (!device_range_is_usable(address, bytes, 3))
        misuse("an illegal address: %#llx, %zu bytes", address, bytes);
    struct operation wanted = {.kind = FILL, .device = address, .bytes = bytes, .value = value, .delay = microseconds};
    ask(actual(stream), wanted, __func__);
    return CUDA_SUCCESS;
}

EXPORT CUresult double_launch(CUdeviceptr address, size_t bytes, int value, unsigned microseconds)
{
    needed(__func__);
    return double_launch_on(NULL, address, bytes, value, microseconds);
}
