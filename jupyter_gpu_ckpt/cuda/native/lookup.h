/* How programs find the driver's functions: by name at link time, by `dlsym`, and by cuGetProcAddress.
 *
 * This library defines `dlsym` itself, so that lookups of a function of libcuda that it stands in for (`STAND_INS`)
 * find its own.  All other lookups continue with the next definition by a jump: glibc finds out by the return address who
 * asks (RTLD_NEXT, RTLD_DEFAULT).  That is written for x86-64; elsewhere only names that are linked are found, and
 * `runtime.c` serves the CUDA runtime's own functions.
 */
#pragma once

#include <stdbool.h>

#if defined(__x86_64__) && !defined(GPU_CKPT_WITHOUT_DLSYM)
#define HAS_DLSYM 1
#else
#define HAS_DLSYM 0
#endif

/* `dlsym` as it is without this library; for RTLD_DEFAULT with the scope of this library, for RTLD_NEXT what comes after
 * it. */
void *original_dlsym(void *library, const char *name);
