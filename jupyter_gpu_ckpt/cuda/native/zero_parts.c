#include "zero_parts.h"

#include "device_kernels.h"

#define NAME "gpu_ckpt_zero_parts"
#define THREADS 256 /* of a block: each reads 16 bytes at a time, four times in SCAN_BYTES */
#define MOST_PARTS ((size_t)1 << 30)

/* One block for each part, which ends at the first bytes that are not zero.  The driver compiles it for its GPU. */
static const char ptx[] = ".version 6.0\n"
                          ".target sm_50\n"
                          ".address_size 64\n"
                          ".visible .entry " NAME "(.param .u64 parts, .param .u64 found, .param .u32 count)\n"
                          "{\n"
                          "    .reg .pred %past, %more, %other, %any, %silent;\n"
                          "    .reg .b32 %part, %count, %thread, %answer;\n"
                          "    .reg .b64 %parts, %found, %at, %end, %bytes, %offset, %all, %a<8>;\n"
                          "    mov.u32 %part, %ctaid.x;\n"
                          "    ld.param.u32 %count, [count];\n"
                          "    setp.ge.u32 %past, %part, %count;\n"
                          "    @%past bra DONE;\n"
                          "    ld.param.u64 %parts, [parts];\n"
                          "    ld.param.u64 %found, [found];\n"
                          "    mul.wide.u32 %offset, %part, 16;\n"
                          "    add.s64 %parts, %parts, %offset;\n"
                          "    ld.global.v2.u64 {%at, %bytes}, [%parts];\n"
                          "    add.s64 %end, %at, %bytes;\n"
                          "    mov.u32 %thread, %tid.x;\n"
                          "    mul.wide.u32 %offset, %thread, 16;\n"
                          "    add.s64 %at, %at, %offset;\n"
                          "    mov.u64 %all, 0;\n"
                          "NEXT:\n"
                          "    setp.ge.u64 %past, %at, %end;\n"
                          "    @%past bra END;\n"
                          "    ld.global.v2.u64 {%a0, %a1}, [%at];\n"
                          "    ld.global.v2.u64 {%a2, %a3}, [%at+4096];\n"
                          "    ld.global.v2.u64 {%a4, %a5}, [%at+8192];\n"
                          "    ld.global.v2.u64 {%a6, %a7}, [%at+12288];\n"
                          "    or.b64 %a0, %a0, %a1;\n"
                          "    or.b64 %a2, %a2, %a3;\n"
                          "    or.b64 %a4, %a4, %a5;\n"
                          "    or.b64 %a6, %a6, %a7;\n"
                          "    or.b64 %a0, %a0, %a2;\n"
                          "    or.b64 %a4, %a4, %a6;\n"
                          "    or.b64 %all, %a0, %a4;\n"
                          "    add.s64 %at, %at, 16384;\n"
                          "    setp.eq.u64 %more, %all, 0;\n"
                          "    @%more bra NEXT;\n"
                          "END:\n"
                          "    setp.ne.u64 %other, %all, 0;\n"
                          "    bar.red.or.pred %any, 0, %other;\n"
                          "    setp.ne.u32 %silent, %thread, 0;\n"
                          "    @%silent bra DONE;\n"
                          "    selp.u32 %answer, 1, 0, %any;\n"
                          "    mul.wide.u32 %offset, %part, 4;\n"
                          "    add.s64 %found, %found, %offset;\n"
                          "    st.global.u32 [%found], %answer;\n"
                          "DONE:\n"
                          "    ret;\n"
                          "}\n";

void zero_parts_load(CUcontext context) { device_kernel_load(context, NAME, ptx); }

bool zero_parts_scan(CUcontext context, CUstream stream, const struct scanned *parts, unsigned *found, size_t number)
{
    const struct driver *cu = driver();
    CUfunction kernel = device_kernel(context, NAME);
    CUdeviceptr parts_there, found_there;
    unsigned parts_count = (unsigned)number, blocks = number != 0 ? parts_count : 1;
    if (kernel == NULL || number > MOST_PARTS || cu->cuMemHostGetDevicePointer_v2 == NULL ||
        cu->cuLaunchKernel == NULL ||
        cu->cuMemHostGetDevicePointer_v2(&parts_there, (void *)parts, 0) != CUDA_SUCCESS ||
        cu->cuMemHostGetDevicePointer_v2(&found_there, found, 0) != CUDA_SUCCESS)
        return false;
    void *arguments[] = {&parts_there, &found_there, &parts_count};
    return cu->cuLaunchKernel(kernel, blocks, 1, 1, THREADS, 1, 1, 0, stream, arguments, NULL) == CUDA_SUCCESS;
}
