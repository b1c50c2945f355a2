/* The root of a kernel's tree of processes: the kernel's parent, and the parent of every process whose own has ended.
 *
 * Its argument is the kernel's pid.  It has made itself the subreaper (prctl(2), PR_SET_CHILD_SUBREAPER) before it
 * became this program.  It reaps what ends, but not the kernel: when that has ended it ends, too, and the capsule's
 * init, which gets its children then, finds the kernel's exit status (`capsule/root_process.py`).
 *
 * It is in every image of its kernel, so that it is as small as can be: it uses no library, keeps no file open, and
 * writes to no memory but its stack.
 */

#include <linux/prctl.h>
#include <linux/wait.h>
#include <sys/syscall.h>

/* Of siginfo_t, which is longer, the fields that waitid(2) fills. */
struct ended {
    int signal, error, code, padding, pid, rest[27];
};

#if defined(__x86_64__)

__asm__(".globl _start\n_start:\n mov %rsp, %rdi\n and $-16, %rsp\n call run\n");

static long call(long number, long first, long second, void *third, long fourth) {
    long result;
    register long r10 __asm__("r10") = fourth;
    register long r8 __asm__("r8") = 0;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(first), "S"(second), "d"(third), "r"(r10), "r"(r8)
                     : "rcx", "r11", "memory");
    return result;
}

#elif defined(__aarch64__)

__asm__(".globl _start\n_start:\n mov x0, sp\n bl run\n");

static long call(long number, long first, long second, void *third, long fourth) {
    register long x8 __asm__("x8") = number;
    register long x0 __asm__("x0") = first;
    register long x1 __asm__("x1") = second;
    register void *x2 __asm__("x2") = third;
    register long x3 __asm__("x3") = fourth;
    register long x4 __asm__("x4") = 0;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4) : "memory");
    return x0;
}

#else
#error "no other machine has a capsule"
#endif

enum { INTERRUPTED = -4 };

static int number(const char *text) {
    int value = 0;
    while (*text >= '0' && *text <= '9') value = 10 * value + *text++ - '0';
    return value;
}

/* `stack`: as Linux begins a program: the number of arguments, then their addresses. */
__attribute__((noreturn, used, visibility("hidden"))) void run(long *stack) {
    call(SYS_prctl, PR_SET_NAME, (long)"gpu-ckpt-root", 0, 0);
    int kernel = stack[0] > 1 ? number((const char *)stack[2]) : 0;
    for (;;) {
        struct ended ended = {0};
        long result = call(SYS_waitid, P_ALL, 0, &ended, WEXITED | WNOWAIT);
        if (result == INTERRUPTED) continue;
        if (result != 0 || ended.pid == kernel) break;
        call(SYS_waitid, P_PID, ended.pid, 0, WEXITED);
    }
    for (;;) call(SYS_exit_group, 0, 0, 0, 0);
}
