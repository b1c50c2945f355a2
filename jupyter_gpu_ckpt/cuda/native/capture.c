#define _GNU_SOURCE
#include "capture.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#include "launch_gate.h"
#include "pools.h"
#include "serving.h"

enum { RELAXED = 2 };                   /* a capture mode of a thread */
enum { NONE = 0, PER_THREAD_STREAM = 2 }; /* a stream's capture status; a stream */

/* The streams whose capture was seen to begin; one more than these is not remembered. */
#define MOST 256
static pthread_mutex_t changing = PTHREAD_MUTEX_INITIALIZER;
static CUstream captured[MOST];
static atomic_size_t captures;

void capture_in_child(void)
{
    changing = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    atomic_store(&captures, 0);
}

static void remember(CUstream stream)
{
    pthread_mutex_lock(&changing);
    if (captures < MOST)
        captured[captures++] = stream;
    pthread_mutex_unlock(&changing);
}

static void forget(CUstream stream)
{
    pthread_mutex_lock(&changing);
    for (size_t at = 0; at < captures; at++)
        if (captured[at] == stream) {
            captured[at] = captured[captures - 1];
            captures--;
            break;
        }
    pthread_mutex_unlock(&changing);
}

static bool is_captured(const struct driver *cu, CUstream stream)
{
    int status = NONE;
    return cu->cuStreamIsCapturing != NULL && cu->cuStreamIsCapturing(stream, &status) == CUDA_SUCCESS &&
           status != NONE;
}

bool capture_has_begun(void) { return atomic_load(&captures) != 0; }

/* A capture whose end was not seen must not delay for ever what waits for it.  Of a thread's own default stream only
 * that thread could ask. */
bool capture_is_active(void)
{
    CUstream streams[MOST];
    size_t count = atomic_load_explicit(&captures, memory_order_relaxed);
    if (count == 0)
        return false;
    pthread_mutex_lock(&changing);
    count = captures;
    memcpy(streams, captured, count * sizeof *streams);
    pthread_mutex_unlock(&changing);
    for (size_t at = 0; at < count; at++)
        if ((uintptr_t)streams[at] > PER_THREAD_STREAM && !is_captured(any_driver(), streams[at]))
            forget(streams[at]);
    return atomic_load(&captures) != 0;
}

bool capture_permits_allocations(void)
{
    if (!capture_is_active())
        return true;
    const struct driver *cu = any_driver();
    int mode = RELAXED;
    if (cu->cuThreadExchangeStreamCaptureMode == NULL || cu->cuThreadExchangeStreamCaptureMode(&mode) != CUDA_SUCCESS)
        return false;
    bool permits = mode == RELAXED;
    return cu->cuThreadExchangeStreamCaptureMode(&mode) == CUDA_SUCCESS && permits;
}

/* Found out by memory of the driver's own. */
CUresult capture_refuses_frees(void)
{
    const struct driver *cu = any_driver();
    CUdeviceptr own;
    CUresult result = cu->cuMemAlloc_v2(&own, 1);
    if (result == CUDA_SUCCESS)
        result = cu->cuMemFree_v2(own);
    return result == CUDA_ERROR_OUT_OF_MEMORY ? CUDA_SUCCESS : result;
}

static CUresult begun(CUresult result, CUstream stream, bool per_thread)
{
    if (result == CUDA_SUCCESS)
        remember(per_thread && stream == NULL ? (CUstream)PER_THREAD_STREAM : stream);
    return result;
}

bool capture_includes(CUstream stream) { return capture_is_active() && is_captured(any_driver(), stream); }

/* An error, too, can end the capture. */
static CUresult end(CUstream stream, CUgraph *graph, bool per_thread, CUresult (*original)(CUstream, CUgraph *))
{
    CUstream own = per_thread && stream == NULL ? (CUstream)PER_THREAD_STREAM : stream;
    launch_gate_wait();
    bool was_captured = is_captured(any_driver(), own);
    CUresult result = original(stream, graph);
    if (was_captured && !is_captured(any_driver(), own))
        forget(own);
    collect_freed(false);
    return result;
}

#define BEGIN(name, per_thread)                                                                                        \
    CUresult name(CUstream stream, int mode)                                                                           \
    {                                                                                                                  \
        DRIVER_WITH(name);                                                                                             \
        return begun(original->name(stream, mode), stream, per_thread);                                                \
    }
BEGIN(cuStreamBeginCapture_v2, false)
BEGIN(cuStreamBeginCapture_v2_ptsz, true)

#define BEGIN_OF_CUDA_10_0(name, per_thread)                                                                           \
    CUresult name(CUstream stream)                                                                                     \
    {                                                                                                                  \
        DRIVER_WITH(name);                                                                                             \
        return begun(original->name(stream), stream, per_thread);                                                      \
    }
BEGIN_OF_CUDA_10_0(cuStreamBeginCapture, false)
BEGIN_OF_CUDA_10_0(cuStreamBeginCapture_ptsz, true)

#define BEGIN_TO_GRAPH(name, per_thread)                                                                               \
    CUresult name(CUstream stream, CUgraph graph, const CUgraphNode *nodes, const void *edges, size_t count, int mode) \
    {                                                                                                                  \
        DRIVER_WITH(name);                                                                                             \
        return begun(original->name(stream, graph, nodes, edges, count, mode), stream, per_thread);                    \
    }
BEGIN_TO_GRAPH(cuStreamBeginCaptureToGraph, false)
BEGIN_TO_GRAPH(cuStreamBeginCaptureToGraph_ptsz, true)

#define END(name, per_thread)                                                                                          \
    CUresult name(CUstream stream, CUgraph *graph)                                                                     \
    {                                                                                                                  \
        DRIVER_WITH(name);                                                                                             \
        return end(stream, graph, per_thread, original->name);                                                         \
    }
END(cuStreamEndCapture, false)
END(cuStreamEndCapture_ptsz, true)

#define DESTROY(name)                                                                                                  \
    CUresult name(CUstream stream)                                                                                     \
    {                                                                                                                  \
        DRIVER_WITH(name);                                                                                             \
        forget(stream); /* and its capture, if there is one, ends */                                                   \
        pools_forget_stream(stream);                                                                                   \
        return original->name(stream);                                                                                 \
    }
DESTROY(cuStreamDestroy)
DESTROY(cuStreamDestroy_v2)
