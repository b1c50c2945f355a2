#define _GNU_SOURCE
#include "page_digests.h"

#include <pthread.h>
#include <sys/random.h>

#include "device_kernels.h"

#define NAME "gpu_ckpt_page_digests"
#define THREADS 256 /* of a block: each reads 16 bytes at a time, 512 times in a page */
#define MOST_PAGES ((size_t)1 << 30)

/* SipHash (Aumasson and Bernstein, 2012), with its state in %v0 to %v3. */
#define ROTATE(of, left, right)                                                                                        \
    "    shl.b64 %t0, " of ", " left ";\n"                                                                             \
    "    shr.b64 %t1, " of ", " right ";\n"                                                                            \
    "    or.b64 " of ", %t0, %t1;\n"
#define ADD(to, from) "    add.u64 " to ", " to ", " from ";\n"
#define XOR(to, from) "    xor.b64 " to ", " to ", " from ";\n"
#define ROUND                                                                                                          \
    ADD("%v0", "%v1") ROTATE("%v1", "13", "51") XOR("%v1", "%v0") ROTATE("%v0", "32", "32")                            \
    ADD("%v2", "%v3") ROTATE("%v3", "16", "48") XOR("%v3", "%v2")                                                      \
    ADD("%v0", "%v3") ROTATE("%v3", "21", "43") XOR("%v3", "%v0")                                                      \
    ADD("%v2", "%v1") ROTATE("%v1", "17", "47") XOR("%v1", "%v2") ROTATE("%v2", "32", "32")
#define BEGIN                                                                                                          \
    "    xor.b64 %v0, %key0, 0x736f6d6570736575;\n"                                                                    \
    "    xor.b64 %v1, %key1, 0x646f72616e646f83;\n" /* with the 0xee of 128 bits */                                    \
    "    xor.b64 %v2, %key0, 0x6c7967656e657261;\n"                                                                    \
    "    xor.b64 %v3, %key1, 0x7465646279746573;\n"
#define ABSORB(word) XOR("%v3", word) ROUND ROUND XOR("%v0", word)
/* Of a length that is a multiple of 256: then the last word, of its lowest byte, is 0. */
#define END                                                                                                            \
    ROUND ROUND XOR("%v2", "0xee") ROUND ROUND ROUND ROUND                                                             \
    "    xor.b64 %d0, %v0, %v1;\n" XOR("%d0", "%v2") XOR("%d0", "%v3")                                                 \
    XOR("%v1", "0xdd") ROUND ROUND ROUND ROUND                                                                         \
    "    xor.b64 %d1, %v0, %v1;\n" XOR("%d1", "%v2") XOR("%d1", "%v3")
/* The digest of 16 digests of shared memory, at %a. */
#define GATHER(label)                                                                                                  \
    BEGIN                                                                                                              \
    "    add.s64 %end, %a, 256;\n" label ":\n"                                                                         \
    "    ld.shared.v2.u64 {%m0, %m1}, [%a];\n" ABSORB("%m0") ABSORB("%m1")                                             \
    "    add.s64 %a, %a, 16;\n"                                                                                        \
    "    setp.lt.u64 %more, %a, %end;\n"                                                                               \
    "    @%more bra " label ";\n" END

/* One block for each page.  The driver compiles it for its GPU. */
static const char ptx[] = ".version 6.0\n"
                          ".target sm_50\n"
                          ".address_size 64\n"
                          ".visible .entry " NAME "(.param .u64 pages, .param .u64 digests, .param .u64 key0,\n"
                          "    .param .u64 key1, .param .u32 count)\n"
                          "{\n"
                          "    .reg .pred %past, %more;\n"
                          "    .reg .b32 %page, %count, %thread;\n"
                          "    .reg .b64 %pages, %digests, %key0, %key1, %a, %end, %offset, %lower, %upper;\n"
                          "    .reg .b64 %v0, %v1, %v2, %v3, %t0, %t1, %d0, %d1, %m<8>;\n"
                          "    .shared .align 16 .b8 lower[4096];\n"
                          "    .shared .align 16 .b8 upper[256];\n"
                          "    mov.u32 %page, %ctaid.x;\n"
                          "    ld.param.u32 %count, [count];\n"
                          "    setp.ge.u32 %past, %page, %count;\n"
                          "    @%past bra DONE;\n"
                          "    ld.param.u64 %pages, [pages];\n"
                          "    ld.param.u64 %digests, [digests];\n"
                          "    ld.param.u64 %key0, [key0];\n"
                          "    ld.param.u64 %key1, [key1];\n"
                          "    mov.u64 %lower, lower;\n"
                          "    mov.u64 %upper, upper;\n"
                          "    mov.u32 %thread, %tid.x;\n"
                          "    mul.wide.u32 %offset, %page, 8;\n"
                          "    add.s64 %pages, %pages, %offset;\n"
                          "    ld.global.u64 %a, [%pages];\n"
                          "    add.s64 %end, %a, 2097152;\n"
                          "    mul.wide.u32 %offset, %thread, 16;\n"
                          "    add.s64 %a, %a, %offset;\n" BEGIN
                          "NEXT:\n"
                          "    ld.global.v2.u64 {%m0, %m1}, [%a];\n"
                          "    ld.global.v2.u64 {%m2, %m3}, [%a+4096];\n"
                          "    ld.global.v2.u64 {%m4, %m5}, [%a+8192];\n"
                          "    ld.global.v2.u64 {%m6, %m7}, [%a+12288];\n" ABSORB("%m0") ABSORB("%m1") ABSORB("%m2")
                              ABSORB("%m3") ABSORB("%m4") ABSORB("%m5") ABSORB("%m6") ABSORB("%m7")
                          "    add.s64 %a, %a, 16384;\n"
                          "    setp.lt.u64 %more, %a, %end;\n"
                          "    @%more bra NEXT;\n" END
                          "    add.s64 %lower, %lower, %offset;\n"
                          "    st.shared.v2.u64 [%lower], {%d0, %d1};\n"
                          "    bar.sync 0;\n"
                          "    setp.ge.u32 %past, %thread, 16;\n"
                          "    @%past bra WAIT;\n"
                          "    mul.wide.u32 %a, %thread, 240;\n" /* with the 16 of each thread above */
                          "    add.s64 %a, %a, %lower;\n" GATHER("FEWER")
                          "    add.s64 %a, %upper, %offset;\n"
                          "    st.shared.v2.u64 [%a], {%d0, %d1};\n"
                          "WAIT:\n"
                          "    bar.sync 0;\n"
                          "    setp.ne.u32 %past, %thread, 0;\n"
                          "    @%past bra DONE;\n"
                          "    mov.u64 %a, %upper;\n" GATHER("ONE")
                          "    mul.wide.u32 %offset, %page, 16;\n"
                          "    add.s64 %digests, %digests, %offset;\n"
                          "    st.global.v2.u64 [%digests], {%d0, %d1};\n"
                          "DONE:\n"
                          "    ret;\n"
                          "}\n";

void page_digests_load(CUcontext context) { device_kernel_load(context, NAME, ptx); }

/* The key of this process, for as long as it or an image of it lives. */
static const uint64_t *key(void)
{
    static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;
    static uint64_t words[2];
    static bool made;
    pthread_mutex_lock(&making);
    made = made || getrandom(words, sizeof words, GRND_NONBLOCK) == sizeof words;
    const uint64_t *answer = made ? words : NULL;
    pthread_mutex_unlock(&making);
    return answer;
}

bool page_digests_compute(CUcontext context, CUstream stream, const CUdeviceptr *pages, struct digest *digests,
                          size_t number)
{
    const struct driver *cu = driver();
    CUfunction kernel = device_kernel(context, NAME);
    const uint64_t *words = key();
    CUdeviceptr pages_there, digests_there;
    unsigned count = (unsigned)number, blocks = number != 0 ? count : 1;
    if (kernel == NULL || words == NULL || number > MOST_PAGES || cu->cuMemHostGetDevicePointer_v2 == NULL ||
        cu->cuLaunchKernel == NULL ||
        cu->cuMemHostGetDevicePointer_v2(&pages_there, (void *)pages, 0) != CUDA_SUCCESS ||
        cu->cuMemHostGetDevicePointer_v2(&digests_there, digests, 0) != CUDA_SUCCESS)
        return false;
    void *arguments[] = {&pages_there, &digests_there, (void *)&words[0], (void *)&words[1], &count};
    return cu->cuLaunchKernel(kernel, blocks, 1, 1, THREADS, 1, 1, 0, stream, arguments, NULL) == CUDA_SUCCESS;
}
