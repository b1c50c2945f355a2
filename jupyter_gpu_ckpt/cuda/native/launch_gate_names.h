/* The driver's functions that pass the launch gate: they use the GPU, wait for it, or allocate.
 *
 * The names that libcuda.so.1 has of them in CUDA 13.0 (cuda.h), all variants; in the order of the names without endings,
 * by which they are found.  A newer variant of a function passes the gate, too, where a program looks it up.  The
 * functions that allocate and that this library has its own of pass it there (`intercept.c`, `managed.c`,
 * `stream_ordered.c`, `virtual_memory.c`).
 */
#pragma once

/* clang-format off */
#define LAUNCH_GATE_NAMES(F)                                                                                           \
    F(cuCtxRecordEvent)                                                                                                \
    F(cuCtxSynchronize) F(cuCtxSynchronize_v2)                                                                         \
    F(cuCtxWaitEvent)                                                                                                  \
    F(cuEventElapsedTime) F(cuEventElapsedTime_v2)                                                                     \
    F(cuEventQuery)                                                                                                    \
    F(cuEventRecord) F(cuEventRecord_ptsz)                                                                             \
    F(cuEventRecordWithFlags) F(cuEventRecordWithFlags_ptsz)                                                           \
    F(cuEventSynchronize)                                                                                              \
    F(cuGraphInstantiate) F(cuGraphInstantiate_v2)                                                                     \
    F(cuGraphInstantiateWithFlags)                                                                                     \
    F(cuGraphInstantiateWithParams) F(cuGraphInstantiateWithParams_ptsz)                                               \
    F(cuGraphLaunch) F(cuGraphLaunch_ptsz)                                                                             \
    F(cuGraphUpload) F(cuGraphUpload_ptsz)                                                                             \
    F(cuGraphicsMapResources) F(cuGraphicsMapResources_ptsz)                                                           \
    F(cuGraphicsUnmapResources) F(cuGraphicsUnmapResources_ptsz)                                                       \
    F(cuGreenCtxRecordEvent)                                                                                           \
    F(cuGreenCtxWaitEvent)                                                                                             \
    F(cuLaunch)                                                                                                        \
    F(cuLaunchCooperativeKernel) F(cuLaunchCooperativeKernel_ptsz)                                                     \
    F(cuLaunchCooperativeKernelMultiDevice)                                                                            \
    F(cuLaunchGrid)                                                                                                    \
    F(cuLaunchGridAsync)                                                                                               \
    F(cuLaunchHostFunc) F(cuLaunchHostFunc_ptsz)                                                                       \
    F(cuLaunchKernel) F(cuLaunchKernel_ptsz)                                                                           \
    F(cuLaunchKernelEx) F(cuLaunchKernelEx_ptsz)                                                                       \
    F(cuMemAllocHost) F(cuMemAllocHost_v2)                                                                             \
    F(cuMemBatchDecompressAsync) F(cuMemBatchDecompressAsync_ptsz)                                                     \
    F(cuMemDiscardAndPrefetchBatchAsync) F(cuMemDiscardAndPrefetchBatchAsync_ptsz)                                     \
    F(cuMemDiscardBatchAsync) F(cuMemDiscardBatchAsync_ptsz)                                                           \
    F(cuMemHostAlloc)                                                                                                  \
    F(cuMemPrefetchAsync) F(cuMemPrefetchAsync_ptsz) F(cuMemPrefetchAsync_v2) F(cuMemPrefetchAsync_v2_ptsz)            \
    F(cuMemPrefetchBatchAsync) F(cuMemPrefetchBatchAsync_ptsz)                                                         \
    F(cuMemcpy) F(cuMemcpy_ptds)                                                                                       \
    F(cuMemcpy2D) F(cuMemcpy2D_v2) F(cuMemcpy2D_v2_ptds)                                                               \
    F(cuMemcpy2DAsync) F(cuMemcpy2DAsync_v2) F(cuMemcpy2DAsync_v2_ptsz)                                                \
    F(cuMemcpy2DUnaligned) F(cuMemcpy2DUnaligned_v2) F(cuMemcpy2DUnaligned_v2_ptds)                                    \
    F(cuMemcpy3D) F(cuMemcpy3D_v2) F(cuMemcpy3D_v2_ptds)                                                               \
    F(cuMemcpy3DAsync) F(cuMemcpy3DAsync_v2) F(cuMemcpy3DAsync_v2_ptsz)                                                \
    F(cuMemcpy3DBatchAsync) F(cuMemcpy3DBatchAsync_ptsz) F(cuMemcpy3DBatchAsync_v2) F(cuMemcpy3DBatchAsync_v2_ptsz)    \
    F(cuMemcpy3DPeer) F(cuMemcpy3DPeer_ptds)                                                                           \
    F(cuMemcpy3DPeerAsync) F(cuMemcpy3DPeerAsync_ptsz)                                                                 \
    F(cuMemcpyAsync) F(cuMemcpyAsync_ptsz)                                                                             \
    F(cuMemcpyAtoA) F(cuMemcpyAtoA_v2) F(cuMemcpyAtoA_v2_ptds)                                                         \
    F(cuMemcpyAtoD) F(cuMemcpyAtoD_v2) F(cuMemcpyAtoD_v2_ptds)                                                         \
    F(cuMemcpyAtoH) F(cuMemcpyAtoH_v2) F(cuMemcpyAtoH_v2_ptds)                                                         \
    F(cuMemcpyAtoHAsync) F(cuMemcpyAtoHAsync_v2) F(cuMemcpyAtoHAsync_v2_ptsz)                                          \
    F(cuMemcpyBatchAsync) F(cuMemcpyBatchAsync_ptsz) F(cuMemcpyBatchAsync_v2) F(cuMemcpyBatchAsync_v2_ptsz)            \
    F(cuMemcpyDtoA) F(cuMemcpyDtoA_v2) F(cuMemcpyDtoA_v2_ptds)                                                         \
    F(cuMemcpyDtoD) F(cuMemcpyDtoD_v2) F(cuMemcpyDtoD_v2_ptds)                                                         \
    F(cuMemcpyDtoDAsync) F(cuMemcpyDtoDAsync_v2) F(cuMemcpyDtoDAsync_v2_ptsz)                                          \
    F(cuMemcpyDtoH) F(cuMemcpyDtoH_v2) F(cuMemcpyDtoH_v2_ptds)                                                         \
    F(cuMemcpyDtoHAsync) F(cuMemcpyDtoHAsync_v2) F(cuMemcpyDtoHAsync_v2_ptsz)                                          \
    F(cuMemcpyHtoA) F(cuMemcpyHtoA_v2) F(cuMemcpyHtoA_v2_ptds)                                                         \
    F(cuMemcpyHtoAAsync) F(cuMemcpyHtoAAsync_v2) F(cuMemcpyHtoAAsync_v2_ptsz)                                          \
    F(cuMemcpyHtoD) F(cuMemcpyHtoD_v2) F(cuMemcpyHtoD_v2_ptds)                                                         \
    F(cuMemcpyHtoDAsync) F(cuMemcpyHtoDAsync_v2) F(cuMemcpyHtoDAsync_v2_ptsz)                                          \
    F(cuMemcpyPeer) F(cuMemcpyPeer_ptds)                                                                               \
    F(cuMemcpyPeerAsync) F(cuMemcpyPeerAsync_ptsz)                                                                     \
    F(cuMemsetD16) F(cuMemsetD16_v2) F(cuMemsetD16_v2_ptds)                                                            \
    F(cuMemsetD16Async) F(cuMemsetD16Async_ptsz)                                                                       \
    F(cuMemsetD2D16) F(cuMemsetD2D16_v2) F(cuMemsetD2D16_v2_ptds)                                                      \
    F(cuMemsetD2D16Async) F(cuMemsetD2D16Async_ptsz)                                                                   \
    F(cuMemsetD2D32) F(cuMemsetD2D32_v2) F(cuMemsetD2D32_v2_ptds)                                                      \
    F(cuMemsetD2D32Async) F(cuMemsetD2D32Async_ptsz)                                                                   \
    F(cuMemsetD2D8) F(cuMemsetD2D8_v2) F(cuMemsetD2D8_v2_ptds)                                                         \
    F(cuMemsetD2D8Async) F(cuMemsetD2D8Async_ptsz)                                                                     \
    F(cuMemsetD32) F(cuMemsetD32_v2) F(cuMemsetD32_v2_ptds)                                                            \
    F(cuMemsetD32Async) F(cuMemsetD32Async_ptsz)                                                                       \
    F(cuMemsetD8) F(cuMemsetD8_v2) F(cuMemsetD8_v2_ptds)                                                               \
    F(cuMemsetD8Async) F(cuMemsetD8Async_ptsz)                                                                         \
    F(cuSignalExternalSemaphoresAsync) F(cuSignalExternalSemaphoresAsync_ptsz)                                         \
    F(cuStreamAddCallback) F(cuStreamAddCallback_ptsz)                                                                 \
    F(cuStreamAttachMemAsync) F(cuStreamAttachMemAsync_ptsz)                                                           \
    F(cuStreamBatchMemOp) F(cuStreamBatchMemOp_ptsz) F(cuStreamBatchMemOp_v2) F(cuStreamBatchMemOp_v2_ptsz)            \
    F(cuStreamQuery) F(cuStreamQuery_ptsz)                                                                             \
    F(cuStreamSynchronize) F(cuStreamSynchronize_ptsz)                                                                 \
    F(cuStreamWaitEvent) F(cuStreamWaitEvent_ptsz)                                                                     \
    F(cuStreamWaitValue32) F(cuStreamWaitValue32_ptsz) F(cuStreamWaitValue32_v2) F(cuStreamWaitValue32_v2_ptsz)        \
    F(cuStreamWaitValue64) F(cuStreamWaitValue64_ptsz) F(cuStreamWaitValue64_v2) F(cuStreamWaitValue64_v2_ptsz)        \
    F(cuStreamWriteValue32) F(cuStreamWriteValue32_ptsz) F(cuStreamWriteValue32_v2) F(cuStreamWriteValue32_v2_ptsz)    \
    F(cuStreamWriteValue64) F(cuStreamWriteValue64_ptsz) F(cuStreamWriteValue64_v2) F(cuStreamWriteValue64_v2_ptsz)    \
    F(cuWaitExternalSemaphoresAsync) F(cuWaitExternalSemaphoresAsync_ptsz)
