#define _GNU_SOURCE
#include "launch_gate.h"

#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "control.h"
#include "launch_gate_names.h"
#include "own_threads.h"
#include "published.h"
#include "seconds.h"

/* The C library's number of signals, which begin with 1. */
#define SIGNALS 64
/* Then they are counted anew. */
#define MAX_CLOSINGS (1u << 26)

static const char *const names[] = {
#define NAME(name) #name,
    LAUNCH_GATE_NAMES(NAME)
#undef NAME
};
enum { NAMES = sizeof names / sizeof *names };

/* Of the thread that serves requests; others read ``closings`` and ``closed_by``. */
static double opens_at; /* seconds of CLOCK_MONOTONIC, while it is leased */
static atomic_uint closings; /* how often the gate was closed */
static _Atomic pid_t closed_by; /* the process, which a child that was made without fork's handlers is not */

/* -- closing and opening */

void launch_gate_close(double seconds)
{
    atomic_int *gate = &gpu_ckpt_published.launch_gate;
    if (!HAS_LAUNCH_GATE)
        return;
    int bits = 0;
    if ((atomic_load(gate) & GATE_CLOSED) == 0) {
        atomic_store(&gpu_ckpt_published.touches, 0);
        closed_by = getpid();
        closings = (closings + 1) % MAX_CLOSINGS;
        bits = GATE_CLOSED | (int)closings * GATE_CLOSING;
    }
    opens_at = now() + seconds;
    atomic_fetch_or(gate, bits | (seconds > 0 ? GATE_LEASED : 0));
    if (seconds <= 0)
        atomic_fetch_and(gate, ~GATE_LEASED);
}

unsigned launch_gate_closings(void) { return atomic_load(&closings); }

void launch_gate_open(void)
{
    int before = atomic_fetch_and(&gpu_ckpt_published.launch_gate, GATE_UNPREPARED);
    if ((before & GATE_CLOSED) != 0)
        syscall(SYS_futex, &gpu_ckpt_published.launch_gate, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

void launch_gate_in_child(void) { atomic_fetch_and(&gpu_ckpt_published.launch_gate, GATE_UNPREPARED); }

static bool is_leased(void) { return (atomic_load(&gpu_ckpt_published.launch_gate) & GATE_LEASED) != 0; }

int launch_gate_remaining(void)
{
    double seconds = opens_at - now();
    if (!is_leased())
        return -1;
    return seconds <= 0 ? 0 : seconds >= INT_MAX / 1000 ? INT_MAX : (int)(seconds * 1000) + 1;
}

void launch_gate_expire(bool needed)
{
    if (!is_leased() || now() < opens_at)
        return;
    if (needed)
        atomic_fetch_and(&gpu_ckpt_published.launch_gate, ~GATE_LEASED);
    else
        launch_gate_open();
}

/* -- waiting */

/* Whether this thread is one of the driver's own or of this library: those that run while all others are stopped
 * (`process/freezer.py`).  Were one to wait here, the driver might wait for it.  The driver's are known by their names
 * alone: it starts them itself, and nothing that it calls or publishes says which they are. */
static bool is_internal_thread(void)
{
    char name[16] = "";
    if (is_own_thread())
        return true;
    prctl(PR_GET_NAME, name);
    return strcmp(name, "cuda-EvtHandlr") == 0 ||
           (strncmp(name, "cuda", 4) == 0 && strspn(name + 4, "0123456789abcdef") == 11);
}

/* The signals whose handlers would end the wait, SIGINT's and those of faults excepted: a program that lives on with
 * them (SIGCHLD's, a timer's) has not asked for an error of this call. */
static void find_others(sigset_t *others)
{
    sigemptyset(others);
    for (int signal = 1; signal <= SIGNALS; signal++) {
        struct sigaction action;
        if (sigaction(signal, NULL, &action) == 0 && action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN &&
            (action.sa_flags & SA_RESTART) == 0)
            sigaddset(others, signal);
    }
    for (const int *kept = (const int[]){SIGINT, SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, 0}; *kept; kept++)
        sigdelset(others, *kept);
}

/* A thread may find the gate closed again when it wakes, and is counted once more then; the word of each closing is
 * another, so that no thread sleeps through one.  Without a timeout: Linux and CRIU then begin the wait anew after a stop,
 * a tracer or a restore. */
static CUresult wait_until_open(void)
{
    atomic_int *gate = &gpu_ckpt_published.launch_gate;
    int counted = -1; /* the closing */
    sigset_t others, before;
    CUresult result = CUDA_SUCCESS;
    find_others(&others);
    pthread_sigmask(SIG_BLOCK, &others, &before);
    for (int seen; result == CUDA_SUCCESS && ((seen = atomic_load(gate)) & GATE_CLOSED) != 0;) {
        if (seen / GATE_CLOSING != counted)
            atomic_fetch_add(&gpu_ckpt_published.touches, 1);
        counted = seen / GATE_CLOSING;
        if (syscall(SYS_futex, gate, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0) != 0 && errno == EINTR &&
            (atomic_load(gate) & GATE_CLOSED) != 0)
            /* An error that frameworks neither take for a reason to try again (NOT_READY) or to free memory, nor for
             * the end of the context, which has none. */
            result = CUDA_ERROR_OPERATING_SYSTEM;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return result;
}

/* Of the process's first call: from now on its owner can close the gate. */
static CUresult prepare(void)
{
    if (any_driver() == NULL)
        return CUDA_ERROR_NOT_INITIALIZED;
    control_open();
    atomic_fetch_and(&gpu_ckpt_published.launch_gate, ~GATE_UNPREPARED);
    return CUDA_SUCCESS;
}

CUresult launch_gate_pass(void)
{
    int seen = atomic_load_explicit(&gpu_ckpt_published.launch_gate, memory_order_acquire);
    if (!HAS_LAUNCH_GATE || seen == 0)
        return CUDA_SUCCESS;
    if (seen == GATE_WATCHED) {
        atomic_fetch_and(&gpu_ckpt_published.launch_gate, ~GATE_WATCHED);
        return CUDA_SUCCESS;
    }
    int error = errno;
    CUresult result = (seen & GATE_UNPREPARED) != 0 ? prepare() : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS && (seen & GATE_CLOSED) != 0 && getpid() != closed_by)
        launch_gate_in_child();
    else if (result == CUDA_SUCCESS && (seen & GATE_CLOSED) != 0 && !is_internal_thread())
        result = wait_until_open();
    errno = error;
    return result;
}

bool launch_gate_watch(bool watch)
{
    int open = 0;
    if (!watch)
        atomic_fetch_and(&gpu_ckpt_published.launch_gate, ~GATE_WATCHED);
    return watch && HAS_LAUNCH_GATE &&
           atomic_compare_exchange_strong(&gpu_ckpt_published.launch_gate, &open, GATE_WATCHED);
}

bool launch_gate_is_watched(void) { return atomic_load(&gpu_ckpt_published.launch_gate) == GATE_WATCHED; }

void launch_gate_wait(void)
{
    while (launch_gate_pass() == CUDA_ERROR_OPERATING_SYSTEM)
        ;
}

/* -- names */

/* The length of a name without the endings of a variant: _v2, _ptsz and the like. */
static size_t base_length(const char *name)
{
    size_t length = strlen(name);
    if (length > 5 && (strcmp(name + length - 5, "_ptsz") == 0 || strcmp(name + length - 5, "_ptds") == 0))
        length -= 5;
    size_t digits = length;
    while (digits > 0 && name[digits - 1] >= '0' && name[digits - 1] <= '9')
        digits--;
    return digits < length && digits > 2 && name[digits - 1] == 'v' && name[digits - 2] == '_' ? digits - 2 : length;
}

static int compare(const char *name, size_t length, const char *other, size_t other_length)
{
    int order = memcmp(name, other, length < other_length ? length : other_length);
    return order != 0 ? order : (length > other_length) - (length < other_length);
}

/* The first of the names in order that is not before this one, without endings. */
static size_t find(const char *name)
{
    size_t first = 0, end = NAMES, length = base_length(name);
    while (first < end) {
        size_t middle = first + (end - first) / 2;
        if (compare(names[middle], base_length(names[middle]), name, length) < 0)
            first = middle + 1;
        else
            end = middle;
    }
    return first;
}

static bool is_variant(size_t at, const char *name)
{
    return at < NAMES && compare(names[at], base_length(names[at]), name, base_length(name)) == 0;
}

bool launch_gate_has(const char *name) { return HAS_LAUNCH_GATE && is_variant(find(name), name); }

/* -- the functions that programs call */

#if HAS_LAUNCH_GATE

/* Functions for the driver's that are not exported by name, or at another address than their name's. */
#define UNNAMED 256
/* Bytes from one of the functions to the next. */
#define FUNCTION_BYTES 32

#define FOR_ASSEMBLY __attribute__((used, visibility("hidden")))

/* Targets of the functions below, one for each.  Filled in order and never changed: two threads that look for the same
 * address find the same function, without a lock. */
FOR_ASSEMBLY _Atomic(void *) gpu_ckpt_originals[NAMES + UNNAMED];
extern const char gpu_ckpt_gated[] __attribute__((visibility("hidden")));

static CUresult missing(void) { return CUDA_ERROR_NOT_FOUND; }

void launch_gate_prepare(void *library)
{
    for (size_t at = 0; at < NAMES; at++) {
        void *original = original_dlsym(library, names[at]);
        atomic_store(&gpu_ckpt_originals[at], original != NULL ? original : (void *)missing);
    }
}

/* Which of the functions below it is; a larger number if it is none. */
static size_t index_of(const void *function)
{
    return ((uintptr_t)function - (uintptr_t)gpu_ckpt_gated) / FUNCTION_BYTES;
}

bool launch_gate_has_function(const void *function) { return index_of(function) < NAMES; }

bool launch_gate_is_missing(const void *function)
{
    size_t at = index_of(function);
    return at < NAMES && (any_driver() == NULL || atomic_load(&gpu_ckpt_originals[at]) == (void *)missing);
}

void *launch_gate_function(void *original)
{
    if (index_of(original) < NAMES + UNNAMED)
        return original;
    for (size_t at = 0; at < NAMES + UNNAMED; at++) {
        void *found = NULL;
        if (atomic_load(&gpu_ckpt_originals[at]) == original ||
            (at >= NAMES && (atomic_compare_exchange_strong(&gpu_ckpt_originals[at], &found, original) ||
                             found == original)))
            return (void *)(uintptr_t)(gpu_ckpt_gated + FUNCTION_BYTES * at);
    }
    return original;
}

struct passage {
    void *function; /* to continue with; or NULL */
    long error;
};

FOR_ASSEMBLY struct passage gpu_ckpt_pass(_Atomic(void *) *original);
struct passage gpu_ckpt_pass(_Atomic(void *) *original)
{
    CUresult result = launch_gate_pass();
    return (struct passage){result == CUDA_SUCCESS ? atomic_load(original) : NULL, result};
}

_Static_assert(offsetof(struct published, launch_gate) == 24, "as in the assembly");
_Static_assert(FUNCTION_BYTES == 32 && UNNAMED == 256, "as in the assembly");

/* Each function jumps to the driver's with the arguments, the stack and the return address of its caller, so it needs
 * no signature; only %r11 is changed, which belongs to nobody at a call. */
#define NAMED(name)                                                                                                    \
    ".globl " #name "\n"                                                                                               \
    ".type " #name ", @function\n"                                                                                     \
    #name ":\n"                                                                                                        \
    "    gpu_ckpt_next\n"                                                                                              \
    ".size " #name ", 32\n"

__asm__(".macro gpu_ckpt_next\n"
        "    .cfi_startproc\n"
        "    endbr64\n"
        "    cmpl $0, gpu_ckpt_published+24(%rip)\n"
        "    jne 1f\n"
        "    jmp *gpu_ckpt_originals+8*gpu_ckpt_at(%rip)\n"
        "1:  leaq gpu_ckpt_originals+8*gpu_ckpt_at(%rip), %r11\n"
        "    jmp gpu_ckpt_slow\n"
        "    .cfi_endproc\n"
        "    .set gpu_ckpt_at, gpu_ckpt_at+1\n"
        "    .org gpu_ckpt_gated+32*gpu_ckpt_at\n"
        ".endm\n"
        ".pushsection .text.gpu_ckpt_gated, \"ax\", @progbits\n"
        ".p2align 5\n"
        ".set gpu_ckpt_at, 0\n"
        ".hidden gpu_ckpt_gated\n"
        ".globl gpu_ckpt_gated\n"
        "gpu_ckpt_gated:\n" LAUNCH_GATE_NAMES(NAMED) ".rept 256\n"
                                                     "    gpu_ckpt_next\n"
                                                     ".endr\n"
        /* With the address of the original in %r11. */
        "gpu_ckpt_slow:\n"
        "    .cfi_startproc\n"
        "    pushq %rbp\n"
        "    .cfi_def_cfa_offset 16\n"
        "    .cfi_offset %rbp, -16\n"
        "    movq %rsp, %rbp\n"
        "    .cfi_def_cfa_register %rbp\n"
        "    subq $192, %rsp\n"
        "    movaps %xmm0, (%rsp)\n"
        "    movaps %xmm1, 16(%rsp)\n"
        "    movaps %xmm2, 32(%rsp)\n"
        "    movaps %xmm3, 48(%rsp)\n"
        "    movaps %xmm4, 64(%rsp)\n"
        "    movaps %xmm5, 80(%rsp)\n"
        "    movaps %xmm6, 96(%rsp)\n"
        "    movaps %xmm7, 112(%rsp)\n"
        "    movq %rdi, 128(%rsp)\n"
        "    movq %rsi, 136(%rsp)\n"
        "    movq %rdx, 144(%rsp)\n"
        "    movq %rcx, 152(%rsp)\n"
        "    movq %r8, 160(%rsp)\n"
        "    movq %r9, 168(%rsp)\n"
        "    movq %r10, 176(%rsp)\n"
        "    movq %rax, 184(%rsp)\n"
        "    movq %r11, %rdi\n"
        "    call gpu_ckpt_pass\n"
        "    testq %rax, %rax\n"
        "    je 1f\n"
        "    movq %rax, %r11\n"
        "    movaps (%rsp), %xmm0\n"
        "    movaps 16(%rsp), %xmm1\n"
        "    movaps 32(%rsp), %xmm2\n"
        "    movaps 48(%rsp), %xmm3\n"
        "    movaps 64(%rsp), %xmm4\n"
        "    movaps 80(%rsp), %xmm5\n"
        "    movaps 96(%rsp), %xmm6\n"
        "    movaps 112(%rsp), %xmm7\n"
        "    movq 128(%rsp), %rdi\n"
        "    movq 136(%rsp), %rsi\n"
        "    movq 144(%rsp), %rdx\n"
        "    movq 152(%rsp), %rcx\n"
        "    movq 160(%rsp), %r8\n"
        "    movq 168(%rsp), %r9\n"
        "    movq 176(%rsp), %r10\n"
        "    movq 184(%rsp), %rax\n"
        "    leave\n"
        "    .cfi_remember_state\n"
        "    .cfi_def_cfa %rsp, 8\n"
        "    jmp *%r11\n"
        "    .cfi_restore_state\n"
        "1:  movl %edx, %eax\n"
        "    leave\n"
        "    .cfi_def_cfa %rsp, 8\n"
        "    ret\n"
        "    .cfi_endproc\n"
        ".popsection\n");

#else

void launch_gate_prepare(void *library) { (void)library; }
bool launch_gate_has_function(const void *function) { return (void)function, false; }
bool launch_gate_is_missing(const void *function) { return (void)function, false; }
void *launch_gate_function(void *original) { return original; }

#endif
