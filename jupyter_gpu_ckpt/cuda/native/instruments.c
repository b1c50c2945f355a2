#define _GNU_SOURCE
#include "instruments.h"

#include <link.h>
#include <stddef.h>
#include <string.h>

/* Of a library of compute-sanitizer, whichever way it has come (CUDA_INJECTION64_PATH, LD_PRELOAD). */
static int is_its_own(struct dl_phdr_info *info, size_t size, void *unused)
{
    (void)size, (void)unused;
    const char *slash = info->dlpi_name != NULL ? strrchr(info->dlpi_name, '/') : NULL;
    return slash != NULL && strncmp(slash + 1, "libsanitizer-", strlen("libsanitizer-")) == 0;
}

bool compute_sanitizer_is_loaded(void) { return dl_iterate_phdr(is_its_own, NULL) != 0; }
