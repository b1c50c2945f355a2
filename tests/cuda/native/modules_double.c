/* Modules of libcuda.so.1 without a GPU: the library's kernels, each performed by a function in C. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "double.h"
#include "page_digests.h"
#include "zero_parts.h"

enum { ZERO_PARTS, PAGE_DIGESTS, KERNELS };
static const char *const kernels[KERNELS] = {"gpu_ckpt_zero_parts", "gpu_ckpt_page_digests"};

struct CUmod_st {
    CUcontext context;
    int kernel;
};
struct CUfunc_st {
    CUmodule module;
};

/* Which kernel's text it is; KERNELS: none's. */
static int kernel_in(const char *text)
{
    int kernel = 0;
    char entry[128];
    for (; kernel < KERNELS; kernel++) {
        snprintf(entry, sizeof entry, ".visible .entry %s(", kernels[kernel]);
        if (strstr(text, entry) != NULL)
            break;
    }
    return kernel;
}

EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
    ENTER();
    if (current_context() == NULL)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (strncmp(image, ".version ", strlen(".version ")) != 0 || kernel_in(image) == KERNELS)
        misuse("cuModuleLoadData: not the text of one of the kernels");
    *module = calloc(1, sizeof **module);
    (*module)->context = current_context();
    (*module)->kernel = kernel_in(image);
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
    if (strcmp(name, kernels[module->kernel]) != 0)
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
        misuse("cuLaunchKernel: not as the kernels are written for");
    struct launch launch = {function, *(CUdeviceptr *)arguments[0], *(CUdeviceptr *)arguments[1], {0, 0}, blocks, 0};
    bool keyed = function->module->kernel == PAGE_DIGESTS;
    for (int word = 0; keyed && word < 2; word++)
        launch.key[word] = *(unsigned long long *)arguments[2 + word];
    launch.number = *(unsigned *)arguments[keyed ? 4 : 2];
    launch_on(stream, launch, __func__);
    return CUDA_SUCCESS;
}

static void need_registered(const void *memory, size_t bytes)
{
    if (!host_range_is_registered(memory, bytes))
        misuse("a kernel's arguments are not in registered memory");
}

/* Device memory, or host memory that the device can read. */
static bool can_read(CUdeviceptr address, size_t bytes, CUcontext context)
{
    return host_range_is_registered((void *)address, bytes) || range_is_usable_in(address, bytes, 1, context);
}

static void find_zeros(const struct launch *launch, unsigned block, CUcontext context)
{
    const struct scanned *part = &((const struct scanned *)launch->read)[block];
    unsigned *found = &((unsigned *)launch->found)[block];
    need_registered(part, sizeof *part);
    need_registered(found, sizeof *found);
    if (part->bytes % SCAN_BYTES != 0 || part->address % 16 != 0 ||
        !can_read(part->address, part->bytes, context))
        misuse("%s(%#llx, %zu): cannot be read", kernels[ZERO_PARTS], part->address, part->bytes);
    *found = device_is_zero(part->address, part->bytes) ? ONLY_ZEROS : OTHER_BYTES;
}

/* -- SipHash-2-4 of 128 bits */

static uint64_t rotated(uint64_t word, int left) { return word << left | word >> (64 - left); }

static void mix(uint64_t v[4], int rounds)
{
    while (rounds-- > 0) {
        v[0] += v[1], v[1] = rotated(v[1], 13) ^ v[0], v[0] = rotated(v[0], 32);
        v[2] += v[3], v[3] = rotated(v[3], 16) ^ v[2];
        v[0] += v[3], v[3] = rotated(v[3], 21) ^ v[0];
        v[2] += v[1], v[1] = rotated(v[1], 17) ^ v[2], v[2] = rotated(v[2], 32);
    }
}

/* Of ``count`` times 16 bytes, each ``step`` bytes behind the one before; together a multiple of 256 bytes. */
static struct digest digest_of(const void *content, size_t count, size_t step, const unsigned long long *key)
{
    uint64_t v[4] = {key[0] ^ 0x736f6d6570736575, key[1] ^ 0x646f72616e646f6d ^ 0xee, key[0] ^ 0x6c7967656e657261,
                     key[1] ^ 0x7465646279746573};
    for (size_t at = 0; at < 2 * count; at++) {
        uint64_t word;
        memcpy(&word, (const char *)content + at / 2 * step + at % 2 * sizeof word, sizeof word);
        v[3] ^= word;
        mix(v, 2);
        v[0] ^= word;
    }
    struct digest digest;
    mix(v, 2);
    v[2] ^= 0xee;
    mix(v, 4);
    digest.words[0] = v[0] ^ v[1] ^ v[2] ^ v[3];
    v[1] ^= 0xdd;
    mix(v, 4);
    digest.words[1] = v[0] ^ v[1] ^ v[2] ^ v[3];
    return digest;
}

static struct digest digest_of_page(const char *content, const unsigned long long *key)
{
    struct digest threads[256], groups[16];
    for (size_t at = 0; at < 256; at++)
        threads[at] = digest_of(content + 16 * at, DIGEST_PAGE / 4096, 4096, key);
    for (size_t at = 0; at < 16; at++)
        groups[at] = digest_of(&threads[16 * at], 16, 16, key);
    return digest_of(groups, 16, 16, key);
}

static void compute_digest(const struct launch *launch, unsigned block, CUcontext context)
{
    const CUdeviceptr *page = &((const CUdeviceptr *)launch->read)[block];
    struct digest *digest = &((struct digest *)launch->found)[block];
    need_registered(page, sizeof *page);
    need_registered(digest, sizeof *digest);
    if (*page % 16 != 0 || (uintptr_t)digest % 16 != 0 || !can_read(*page, DIGEST_PAGE, context))
        misuse("%s(%#llx): cannot be read", kernels[PAGE_DIGESTS], *page);
    char *content = malloc(DIGEST_PAGE);
    device_to_host(content, *page, DIGEST_PAGE);
    *digest = digest_of_page(content, launch->key);
    free(content);
}

/* What its blocks do. */
void run_kernel(const struct launch *launch, CUcontext context)
{
    for (unsigned block = 0; block < launch->blocks && block < launch->number; block++)
        if (launch->kernel->module->kernel == ZERO_PARTS)
            find_zeros(launch, block, context);
        else
            compute_digest(launch, block, context);
}
