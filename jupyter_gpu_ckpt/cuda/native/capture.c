#define _GNU_SOURCE
#include "capture.h"

#include <stdatomic.h>

#include "serving.h"

enum { RELAXED = 2 };                   /* a capture mode of a thread */
enum { NONE = 0, PER_THREAD_STREAM = 2 }; /* a stream's capture status; a stream */

static atomic_size_t captures;

bool capture_is_active(void) { return atomic_load_explicit(&captures, memory_order_relaxed) != 0; }

void capture_in_child(void) { atomic_store(&captures, 0); }

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

static CUresult begun(CUresult result)
{
    if (result == CUDA_SUCCESS)
        atomic_fetch_add(&captures, 1);
    return result;
}

static bool is_captured(const struct driver *cu, CUstream stream)
{
    int status = NONE;
    return cu->cuStreamIsCapturing != NULL && cu->cuStreamIsCapturing(stream, &status) == CUDA_SUCCESS &&
           status != NONE;
}

bool capture_includes(CUstream stream) { return capture_is_active() && is_captured(any_driver(), stream); }

/* An error, too, can end the capture. */
static CUresult end(CUstream stream, CUgraph *graph, bool per_thread, CUresult (*original)(CUstream, CUgraph *))
{
    const struct driver *cu = any_driver();
    CUstream own = per_thread && stream == NULL ? (CUstream)PER_THREAD_STREAM : stream;
    bool was_captured = is_captured(cu, own);
    CUresult result = original(stream, graph);
    size_t count = atomic_load(&captures);
    if ((was_captured || cu->cuStreamIsCapturing == NULL) && !is_captured(cu, own))
        while (count != 0 && !atomic_compare_exchange_weak(&captures, &count, count - 1))
            ;
    collect_freed(false);
    return result;
}

#define DRIVER_WITH(name)                                                                                              \
    const struct driver *original = any_driver();                                                                      \
    if (original == NULL || original->name == NULL)                                                                    \
        return CUDA_ERROR_NOT_INITIALIZED

#define BEGIN(name)                                                                                                    \
    CUresult name(CUstream stream, int mode)                                                                           \
    {                                                                                                                  \
        DRIVER_WITH(name);                                                                                             \
        return begun(original->name(stream, mode));                                                                    \
    }
BEGIN(cuStreamBeginCapture_v2)
BEGIN(cuStreamBeginCapture_v2_ptsz)

#define BEGIN_OF_CUDA_10_0(name)                                                                                       \
    CUresult name(CUstream stream)                                                                                     \
    {                                                                                                                  \
        DRIVER_WITH(name);                                                                                             \
        return begun(original->name(stream));                                                                          \
    }
BEGIN_OF_CUDA_10_0(cuStreamBeginCapture)
BEGIN_OF_CUDA_10_0(cuStreamBeginCapture_ptsz)

#define BEGIN_TO_GRAPH(name)                                                                                           \
    CUresult name(CUstream stream, CUgraph graph, const CUgraphNode *nodes, const void *edges, size_t count, int mode) \
    {                                                                                                                  \
        DRIVER_WITH(name);                                                                                             \
        return begun(original->name(stream, graph, nodes, edges, count, mode));                                        \
    }
BEGIN_TO_GRAPH(cuStreamBeginCaptureToGraph)
BEGIN_TO_GRAPH(cuStreamBeginCaptureToGraph_ptsz)

#define END(name, per_thread)                                                                                          \
    CUresult name(CUstream stream, CUgraph *graph)                                                                     \
    {                                                                                                                  \
        DRIVER_WITH(name);                                                                                             \
        return end(stream, graph, per_thread, original->name);                                                         \
    }
END(cuStreamEndCapture, false)
END(cuStreamEndCapture_ptsz, true)
