#define _GNU_SOURCE
#include "lookup.h"

#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

#include "driver.h"
#include "launch_gate.h"

/* The newest CUDA version whose functions have been compared with the signatures in `driver.h`. */
#define NEWEST_KNOWN 13999
/* cuGetProcAddress's flag for the functions whose default stream is the calling thread's own. */
#define PER_THREAD_DEFAULT_STREAM 2

static const struct stand_in {
    const char *name;
    int since;
    void *own;
    size_t member;
} stand_ins[] = {
#define STAND_IN(name, since, parameters) {#name, since, (void *)name, offsetof(struct driver, name)},
    STAND_INS(STAND_IN)
#undef STAND_IN
};
enum { COUNT = sizeof stand_ins / sizeof *stand_ins };

static void *original_of(const struct stand_in *stand_in, const struct driver *driver)
{
    void *function;
    memcpy(&function, (const char *)driver + stand_in->member, sizeof function);
    return function;
}

/* -- cuGetProcAddress */

static bool starts_with(const char **text, const char *prefix)
{
    size_t length = strlen(prefix);
    bool does = strncmp(*text, prefix, length) == 0;
    *text += does ? length : 0;
    return does;
}

/* Whether the name is that of the stand-in without its endings, and the flags fit. */
static bool is_meant(const struct stand_in *stand_in, const char *name, unsigned long long flags)
{
    const char *rest = stand_in->name;
    if (!starts_with(&rest, name))
        return false;
    if (!starts_with(&rest, "_v2") && !starts_with(&rest, "_v3"))
        starts_with(&rest, "_v4");
    bool per_thread = starts_with(&rest, "_ptsz");
    return *rest == '\0' && (!per_thread || flags == PER_THREAD_DEFAULT_STREAM);
}

/* The stand-in for a function that the driver has returned: by its address, or, where the driver returns another one
 * than dlsym does, by its name. */
static void *replace(void *found, const char *name, int version, unsigned long long flags)
{
    const struct driver *driver = any_driver();
    const struct stand_in *meant = NULL;
    for (size_t at = 0; at < COUNT && driver != NULL; at++) {
        if (original_of(&stand_ins[at], driver) == found)
            return stand_ins[at].own;
        /* Of two that fit the later one: it is the newer, or that of the thread's own stream. */
        if (stand_ins[at].since <= version && version <= NEWEST_KNOWN && is_meant(&stand_ins[at], name, flags) &&
            original_of(&stand_ins[at], driver) != NULL)
            meant = &stand_ins[at];
    }
    return meant != NULL ? meant->own : launch_gate_has(name) ? launch_gate_function(found) : found;
}

CUresult cuGetProcAddress(const char *name, void **function, int version, unsigned long long flags)
{
    const struct driver *original = any_driver();
    if (original == NULL || original->cuGetProcAddress == NULL)
        return CUDA_ERROR_NOT_INITIALIZED;
    CUresult result = original->cuGetProcAddress(name, function, version, flags);
    if (result == CUDA_SUCCESS && name != NULL && function != NULL && *function != NULL)
        *function = replace(*function, name, version, flags);
    return result;
}

CUresult cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, int *status)
{
    const struct driver *original = any_driver();
    if (original == NULL || original->cuGetProcAddress_v2 == NULL)
        return CUDA_ERROR_NOT_INITIALIZED;
    CUresult result = original->cuGetProcAddress_v2(name, function, version, flags, status);
    if (result == CUDA_SUCCESS && name != NULL && function != NULL && *function != NULL)
        *function = replace(*function, name, version, flags);
    return result;
}

/* -- dlsym */

#if HAS_DLSYM

typedef void *dlsym_function(void *, const char *);

#define FOR_ASSEMBLY __attribute__((used, visibility("hidden")))
/* Runs before the sanitizers' own runtimes, which look functions up, too, have begun. */
#define NOT_SANITIZED __attribute__((no_sanitize("address", "thread", "undefined")))

/* The next definition of dlsym after this library's: glibc's, or that of another library that stands in for it. */
FOR_ASSEMBLY dlsym_function *gpu_ckpt_next_dlsym;
FOR_ASSEMBLY dlsym_function *gpu_ckpt_find_dlsym(void);

static void *find_nothing(void *library, const char *name)
{
    (void)library, (void)name;
    return NULL;
}

/* By a version that glibc's dlsym has on x86-64 in every release: a lookup that fails would allocate, and an allocator
 * may be who asks. */
NOT_SANITIZED dlsym_function *gpu_ckpt_find_dlsym(void)
{
    dlsym_function *glibc, *next = NULL;
    *(void **)&glibc = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    if (glibc != NULL)
        *(void **)&next = glibc(RTLD_NEXT, "dlsym");
    if (next == NULL)
        next = glibc != NULL ? glibc : find_nothing;
    __atomic_store_n(&gpu_ckpt_next_dlsym, next, __ATOMIC_RELEASE);
    return next;
}

void *original_dlsym(void *library, const char *name)
{
    dlsym_function *next = __atomic_load_n(&gpu_ckpt_next_dlsym, __ATOMIC_ACQUIRE);
    return (next != NULL ? next : gpu_ckpt_find_dlsym())(library, name);
}

/* Where a lookup continues if ``function`` is NULL. */
struct answer {
    void *function, *library;
};
FOR_ASSEMBLY struct answer gpu_ckpt_stand_in(void *library, const char *name);

/* A library that has no function of the driver's that the driver lacks. */
static void *other_library(void)
{
    return any_driver() != NULL ? library_of_driver() : dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD);
}

/* Whether a lookup that finds this library's function would find none without it: there is no driver, or not in what all
 * libraries can see.  The scope of who looks by RTLD_DEFAULT, in which the driver may be, cannot be asked. */
static bool is_only_ours(void *library, const char *name)
{
    if (library == RTLD_DEFAULT || library == RTLD_NEXT ? any_driver() != NULL
                                                        : library != dlopen(NULL, RTLD_LAZY | RTLD_NOLOAD))
        return false;
    return original_dlsym(RTLD_NEXT, name) == NULL;
}

static struct answer nowhere(void) { return (struct answer){NULL, dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD)}; }

/* Of a function that passes the launch gate.  A lookup must not find what only this library has. */
static struct answer gated(void *library, const char *name)
{
    bool by_scope = library == RTLD_DEFAULT || library == RTLD_NEXT;
    void *found = original_dlsym(by_scope ? RTLD_DEFAULT : library, name);
    if (launch_gate_is_missing(found))
        return (struct answer){NULL, other_library()};
    if (launch_gate_has_function(found) && is_only_ours(library, name))
        return nowhere();
    if (by_scope || found == NULL || any_driver() == NULL || found != original_dlsym(library_of_driver(), name))
        return (struct answer){NULL, library};
    return (struct answer){launch_gate_function(found), library};
}

/* The library's own function if this lookup finds the driver's, else NULL. */
struct answer gpu_ckpt_stand_in(void *library, const char *name)
{
    size_t at = 0;
    while (at < COUNT && strcmp(stand_ins[at].name, name) != 0)
        at++;
    if (at == COUNT && launch_gate_has(name))
        return gated(library, name);
    if (at == COUNT)
        return (struct answer){NULL, library};
    bool by_scope = library == RTLD_DEFAULT || library == RTLD_NEXT;
    if (original_dlsym(by_scope ? RTLD_DEFAULT : library, name) == stand_ins[at].own && is_only_ours(library, name))
        return nowhere();
    if (by_scope)
        return (struct answer){NULL, library};
    const struct driver *driver = any_driver();
    void *original = driver != NULL ? original_of(&stand_ins[at], driver) : NULL;
    /* This lookup comes last: dlerror(3) speaks of it. */
    bool is_driver = original != NULL && original_dlsym(library, name) == original;
    return (struct answer){is_driver ? stand_ins[at].own : NULL, library};
}

/* void *dlsym(void *library, const char *name) */
__asm__(".pushsection .text\n"
        ".globl dlsym\n"
        ".type dlsym, @function\n"
        ".p2align 4\n"
        "dlsym:\n"
        "    .cfi_startproc\n"
        "    endbr64\n"
        "    testq %rsi, %rsi\n"
        "    je 1f\n"
        "    cmpb $'c', (%rsi)\n"
        "    jne 1f\n"
        "    cmpb $'u', 1(%rsi)\n"
        "    jne 1f\n"
        "    pushq %rdi\n"
        "    .cfi_adjust_cfa_offset 8\n"
        "    pushq %rsi\n"
        "    .cfi_adjust_cfa_offset 8\n"
        "    subq $8, %rsp\n"
        "    .cfi_adjust_cfa_offset 8\n"
        "    call gpu_ckpt_stand_in\n"
        "    addq $8, %rsp\n"
        "    .cfi_adjust_cfa_offset -8\n"
        "    popq %rsi\n"
        "    .cfi_adjust_cfa_offset -8\n"
        "    popq %rdi\n"
        "    .cfi_adjust_cfa_offset -8\n"
        "    movq %rdx, %rdi\n"
        "    testq %rax, %rax\n"
        "    je 1f\n"
        "    ret\n"
        "1:  movq gpu_ckpt_next_dlsym(%rip), %rax\n"
        "    testq %rax, %rax\n"
        "    je 2f\n"
        "    jmp *%rax\n"
        "2:  pushq %rdi\n"
        "    .cfi_adjust_cfa_offset 8\n"
        "    pushq %rsi\n"
        "    .cfi_adjust_cfa_offset 8\n"
        "    subq $8, %rsp\n"
        "    .cfi_adjust_cfa_offset 8\n"
        "    call gpu_ckpt_find_dlsym\n"
        "    addq $8, %rsp\n"
        "    .cfi_adjust_cfa_offset -8\n"
        "    popq %rsi\n"
        "    .cfi_adjust_cfa_offset -8\n"
        "    popq %rdi\n"
        "    .cfi_adjust_cfa_offset -8\n"
        "    jmp *%rax\n"
        "    .cfi_endproc\n"
        ".size dlsym, .-dlsym\n"
        ".popsection\n");

#else

void *original_dlsym(void *library, const char *name) { return dlsym(library, name); }

#endif
