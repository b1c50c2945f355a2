/* libcuda.so.1 that has every function which passes the launch gate, and notes with what it was called. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "double.h"
#include "launch_gate_names.h"

/* More than there are registers for, of both kinds, in turns. */
#define PARAMETERS                                                                                                     \
    long a, double b, int c, float d, void *e, double f, unsigned long long g, double h, long i, double j, long k,     \
        double l, short m, double n, double o, double p, double q, long r
#define ARGUMENTS a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r
#define SHOWN "%ld %g %d %g %p %g %llu %g %ld %g %ld %g %d %g %g %g %g %ld"

static char noted[512];
static __thread uintptr_t above;

EXPORT const char *double_noted(void) { return noted; }

static CUresult note(const char *name, const void *stack, PARAMETERS)
{
    above = (uintptr_t)stack;
    snprintf(noted, sizeof noted, "%s " SHOWN, name, ARGUMENTS);
    return (CUresult)(strlen(name) * 1000 + (unsigned char)name[strlen(name) - 1] + (above % 16 != 0));
}

/* Two functions of each name: that of `dlsym`, and one that only cuGetProcAddress returns. */
#define FUNCTION(name)                                                                                                 \
    EXPORT CUresult name(PARAMETERS);                                                                                  \
    CUresult name(PARAMETERS) { return note(#name, __builtin_frame_address(0), ARGUMENTS); }                           \
    static CUresult inner_##name(PARAMETERS) { return note("inner " #name, __builtin_frame_address(0), ARGUMENTS); }
LAUNCH_GATE_NAMES(FUNCTION)
FUNCTION(cuLaunchKernel_v99)
FUNCTION(cuNotGated)

static const struct {
    const char *name;
    void *function, *inner;
} functions[] = {
#define ENTRY(name) {#name, (void *)name, (void *)inner_##name},
    LAUNCH_GATE_NAMES(ENTRY) ENTRY(cuLaunchKernel_v99) ENTRY(cuNotGated)};

EXPORT CUresult double_trivial(void) { return CUDA_SUCCESS; }

/* ``version``: which of the variants of that name, from 0; from 1000 on, those that are only found here. */
EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, int *status)
{
    size_t length = strlen(name);
    int wanted = version % 1000;
    (void)flags;
    *function = NULL;
    for (size_t at = 0; at < sizeof functions / sizeof *functions; at++) {
        const char *rest = functions[at].name + length;
        if (strncmp(functions[at].name, name, length) == 0 && (*rest == '\0' || *rest == '_') && wanted-- == 0)
            *function = version >= 1000 ? functions[at].inner : functions[at].function;
    }
    if (status != NULL)
        *status = *function == NULL;
    return *function != NULL || status != NULL ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuGetProcAddress(const char *name, void **function, int version, unsigned long long flags)
{
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
