/* Modules of libcuda.so.1 without a GPU: one kernel, which is performed by a function in C of the same name. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "double.h"
#include "zero_parts.h"

#define KERNEL "gpu_ckpt_zero_parts"

struct CUmod_st {
    CUcontext context;
};
struct CUfunc_st {
    CUmodule module;
};

EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
    ENTER();
    if (current_context() == NULL)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (strncmp(image, ".version ", strlen(".version ")) != 0 || strstr(image, ".visible .entry " KERNEL "(") == NULL)
        misuse("cuModuleLoadData: not the text of that kernel");
    *module = calloc(1, sizeof **module);
    (*module)->context = current_context();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleUnload(CUmodule module)
{
    ENTER();
    need_context(module->context, __func__);
    free(module);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    ENTER();
    if (strcmp(name, KERNEL) != 0)
        return CUDA_ERROR_NOT_FOUND;
    *function = calloc(1, sizeof **function);
    (*function)->module = module;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned int blocks, unsigned int y, unsigned int z,
                               unsigned int threads, unsigned int threads_y, unsigned int threads_z,
                               unsigned int shared, CUstream stream, void **arguments, void **extra)
{
    ENTER();
    need_context(function->module->context, __func__);
    if (function->module->context != current_context())
        misuse("cuLaunchKernel: of another context");
    if (blocks == 0 || y != 1 || z != 1 || threads != 256 || threads_y != 1 || threads_z != 1 || shared != 0 ||
        extra != NULL)
        misuse("cuLaunchKernel: not as that kernel is written for");
    struct launch launch = {function, *(CUdeviceptr *)arguments[0], *(CUdeviceptr *)arguments[1], blocks,
                            *(unsigned *)arguments[2]};
    launch_on(stream, launch, __func__);
    return CUDA_SUCCESS;
}

/* What its blocks do. */
void run_kernel(const struct launch *launch, CUcontext context)
{
    const struct scanned *parts = (const struct scanned *)launch->parts;
    unsigned *found = (unsigned *)launch->found;
    for (unsigned block = 0; block < launch->blocks && block < launch->number; block++) {
        if (!host_range_is_registered(&parts[block], sizeof *parts) ||
            !host_range_is_registered(&found[block], sizeof *found))
            misuse("%s: its arguments are not in registered memory", KERNEL);
        struct scanned part = parts[block];
        if (part.bytes % SCAN_BYTES != 0 || part.address % 16 != 0 ||
            !range_is_usable_in(part.address, part.bytes, 1, context))
            misuse("%s(%#llx, %zu): cannot be read", KERNEL, part.address, part.bytes);
        found[block] = device_is_zero(part.address, part.bytes) ? ONLY_ZEROS : OTHER_BYTES;
    }
}
