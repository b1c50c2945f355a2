/* Small programs that do with processes, libraries and threads what this library must not disturb; they print what they
 * see.
 *
 * Run as ``no_harm PROGRAM [WORD ...]``, with and without the library: the output must be the same.  With -DLINKED the
 * program is linked with the driver, else it loads that. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define SERVED (7 * MIB + 77)

extern char **environ;

static const char *self; /* this program's file */
static char **words;

static struct {
    void *library;
    int (*init)(unsigned);
    int (*retain)(void **, int);
    int (*set_current)(void *);
    int (*allocate)(unsigned long long *, size_t);
    int (*release)(unsigned long long);
    int (*range)(unsigned long long *, size_t *, unsigned long long);
    int (*address)(const char *, void **, int, unsigned long long, int *);
    void *context;
} cu;

#define SAY(...) (printf(__VA_ARGS__), printf("\n"), fflush(stdout))

static void find_in(void *library)
{
    cu.library = library;
    *(void **)&cu.init = dlsym(library, "cuInit");
    *(void **)&cu.retain = dlsym(library, "cuDevicePrimaryCtxRetain");
    *(void **)&cu.set_current = dlsym(library, "cuCtxSetCurrent");
    *(void **)&cu.allocate = dlsym(library, "cuMemAlloc_v2");
    *(void **)&cu.release = dlsym(library, "cuMemFree_v2");
    *(void **)&cu.range = dlsym(library, "cuMemGetAddressRange_v2");
    *(void **)&cu.address = dlsym(library, "cuGetProcAddress_v2");
}

static int begin(void)
{
    int result = cu.init(0);
    if (result == 0)
        result = cu.retain(&cu.context, 0);
    return result != 0 ? result : cu.set_current(cu.context);
}

static void load(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == NULL) {
        SAY("no driver: %s", dlerror());
        exit(3);
    }
    find_in(library);
}

/* Allocates, asks and frees; a line of results. */
static void use(const char *title)
{
    unsigned long long small = 0, large = 0, base = 0;
    size_t size = 0;
    int results[] = {cu.allocate(&small, 1000), cu.allocate(&large, SERVED), 0, 0, 0, 0};
    results[2] = cu.range(&base, &size, large + 5);
    results[3] = cu.release(small);
    results[4] = cu.release(large);
    results[5] = large != 0 ? cu.release(large) : 0;
    SAY("%s: %d %d %d %d %d %d, %zu bytes %s", title, results[0], results[1], results[2], results[3], results[4],
        results[5], size, base == large ? "from its beginning" : "");
}

static void ended(const char *title, pid_t child)
{
    int status = 0;
    pid_t found = waitpid(child, &status, 0);
    SAY("%s: %d, exit %d, signal %d", title, found == child, WIFEXITED(status) ? WEXITSTATUS(status) : -1,
        WIFSIGNALED(status) ? WTERMSIG(status) : 0);
}

/* -- libraries */

/* The driver is used as it was linked, and by its names in what all libraries can see. */
#ifdef LINKED
int cuInit(unsigned);
int cuDevicePrimaryCtxRetain(void **, int);
int cuCtxSetCurrent(void *);
int cuMemAlloc_v2(unsigned long long *, size_t);
int cuMemFree_v2(unsigned long long);
int cuMemGetAddressRange_v2(unsigned long long *, size_t *, unsigned long long);

static void linked(void)
{
    cu.init = cuInit, cu.retain = cuDevicePrimaryCtxRetain, cu.set_current = cuCtxSetCurrent;
    cu.allocate = cuMemAlloc_v2, cu.release = cuMemFree_v2, cu.range = cuMemGetAddressRange_v2;
    SAY("begun %d", begin());
    use("linked");
    find_in(RTLD_DEFAULT);
    use("by default");
    find_in(RTLD_NEXT);
    use("next");
    find_in(dlopen(NULL, RTLD_NOW));
    use("of all");
}
#endif

static void names_without_a_driver(void)
{
    static const char *names[] = {"cuInit", "cuMemAlloc_v2", "cuMemFree_v2", "cuGetProcAddress", "cuLaunchKernel",
                                  "cuMemcpyHtoD_v2", "cuPointerGetAttribute", "cuNever", "cu", "malloc", "", "curses"};
    void *all = dlopen(NULL, RTLD_NOW), *c = dlopen("libc.so.6", RTLD_NOW);
    for (int loaded = 0; loaded < 3; loaded++) {
        for (size_t at = 0; at < sizeof names / sizeof *names; at++) {
            bool by_default = loaded != 1 && dlsym(RTLD_DEFAULT, names[at]) != NULL; /* see the text on what differs */
            SAY("%d %s: %d %d %d %d", loaded, names[at], by_default,
                loaded != 1 && dlsym(RTLD_NEXT, names[at]) != NULL, dlsym(all, names[at]) != NULL,
                dlsym(c, names[at]) != NULL);
            SAY("by version %d", dlvsym(c, names[at], "GLIBC_2.2.5") != NULL);
        }
        dlopen("libcuda.so.1", RTLD_NOW | (loaded == 1 ? RTLD_GLOBAL : RTLD_LOCAL));
    }
}

static void errors_of_lookups(void)
{
    load();
    static const char *names[] = {"cuNever", "never", "cuMemAlloc_v3"};
    for (size_t at = 0; at < 3; at++) {
        bool found = dlsym(cu.library, names[at]) != NULL;
        SAY("%s: %d, %s", names[at], found, dlerror());
        SAY("and then %s", dlerror() == NULL ? "none" : "one");
        found = dlsym(RTLD_DEFAULT, names[at]) != NULL;
        SAY("%s: %d, %s", names[at], found, dlerror());
    }
    dlsym(cu.library, "cuMemAlloc_v2");
    SAY("after a success %s", dlerror() == NULL ? "none" : "one");
    dlsym(cu.library, "cuLaunchKernelNever");
    dlsym(cu.library, "cuMemFree_v2");
    SAY("after another %s", dlerror() == NULL ? "none" : "one");
}

static void by_version(void)
{
    load();
    SAY("%d", dlvsym(cu.library, "cuMemAlloc_v2", "libcuda.so.1") != NULL);
    SAY("%d %s", dlvsym(RTLD_DEFAULT, "dlsym", "GLIBC_2.2.5") != NULL, "dlsym");
    SAY("%d %s", dlvsym(RTLD_NEXT, "dlsym", "GLIBC_1") != NULL, "dlsym of nobody");
}

static void in_a_namespace(void)
{
    void *library = dlmopen(LM_ID_NEWLM, "libcuda.so.1", RTLD_NOW);
    if (library == NULL) {
        SAY("no namespace: %s", dlerror());
        return;
    }
    find_in(library);
    SAY("begun %d", begin());
    use("in a namespace of its own");
}

static void bound_deeply(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_DEEPBIND);
    find_in(library);
    SAY("begun %d", begin());
    use("bound deeply");
}

static void loaded_twice(void)
{
    load();
    SAY("begun %d", begin());
    use("loaded");
    for (int turn = 0; turn < 3; turn++) {
        void *again = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
        SAY("the same %d", again == cu.library);
        find_in(again);
        use("again");
        SAY("closed %d", dlclose(again));
    }
}

/* Each version and flag gives a function that works. */
static void by_address(void)
{
    load();
    SAY("begun %d", begin());
    for (int version = 3000; version <= 13000; version += 500)
        for (unsigned long long flags = 0; flags < 3; flags++) {
            void *allocate = NULL, *release = NULL;
            int status[2] = {-1, -1};
            int results[] = {cu.address("cuMemAlloc", &allocate, version, flags, &status[0]),
                             cu.address("cuMemFree", &release, version, flags, &status[1])};
            SAY("%d %llu: %d %d %d %d", version, flags, results[0], results[1], status[0], status[1]);
            if (allocate != NULL && release != NULL) {
                *(void **)&cu.allocate = allocate;
                *(void **)&cu.release = release;
                use("by address");
            }
        }
}

/* Threads that look names up at the same time, the first ones of the process. */
static void *look_up(void *found)
{
    static atomic_int waiting;
    atomic_fetch_add(&waiting, 1);
    while (atomic_load(&waiting) < 8)
        sched_yield();
    for (int turn = 0; turn < 200; turn++)
        ((int *)found)[0] += dlsym(cu.library, "cuMemAlloc_v2") == (void *)cu.allocate &&
                             dlsym(cu.library, "cuNever") == NULL && dlsym(RTLD_DEFAULT, "qsort") == (void *)qsort;
    return NULL;
}

static void threads_that_look_up(void)
{
    load();
    pthread_t threads[8];
    int found[8] = {0};
    for (size_t at = 0; at < 8; at++)
        pthread_create(&threads[at], NULL, look_up, &found[at]);
    for (size_t at = 0; at < 8; at++) {
        pthread_join(threads[at], NULL);
        SAY("%d", found[at]);
    }
}

/* -- processes */

static void fork_before(void)
{
    for (int turn = 0; turn < 2; turn++) {
        pid_t child = fork();
        if (child == 0) {
            load();
            SAY("begun %d", begin());
            use("in the child");
            _exit(7);
        }
        ended("child", child);
    }
    load();
    SAY("begun %d", begin());
    use("in the parent");
}

static void fork_after(void)
{
    load();
    SAY("begun %d", begin());
    unsigned long long kept = 0;
    SAY("kept %d", cu.allocate(&kept, SERVED));
    for (int turn = 0; turn < 3; turn++) {
        pid_t child = fork();
        if (child == 0) {
            unsigned long long own = 0;
            SAY("in the child %d", cu.allocate(&own, SERVED));
            SAY("in the child %d", cu.release(kept));
            exit(8); /* with all that is done at an exit */
        }
        ended("child", child);
    }
    use("in the parent");
    SAY("kept %d", cu.release(kept));
}

/* Without the handlers that fork calls. */
static void raw_clone(void)
{
    load();
    SAY("begun %d", begin());
    use("before");
    pid_t child = (pid_t)syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL);
    if (child == 0) {
        unsigned long long own = 0;
        int result = cu.allocate(&own, SERVED);
        syscall(SYS_exit_group, result);
    }
    ended("child", child);
    use("in the parent");
}

static atomic_bool stops;

static void *allocate_always(void *unused)
{
    (void)unused;
    cu.set_current(cu.context);
    for (unsigned long long each; !atomic_load(&stops);) {
        if (cu.allocate(&each, SERVED) != 0 || cu.release(each) != 0)
            SAY("a thread failed");
        free(malloc(100000));
    }
    return NULL;
}

static void fork_while_others_allocate(void)
{
    load();
    SAY("begun %d", begin());
    pthread_t threads[3];
    for (size_t at = 0; at < 3; at++)
        pthread_create(&threads[at], NULL, allocate_always, NULL);
    int good = 0;
    for (int turn = 0; turn < 60; turn++) {
        pid_t child = fork();
        if (child == 0) {
            alarm(20);
            unsigned long long own = 0;
            int result = cu.allocate(&own, SERVED);
            void *found = dlsym(cu.library, "cuMemFree_v2");
            _exit(result == 0 || found == NULL);
        }
        int status;
        waitpid(child, &status, 0);
        good += status == 0;
    }
    SAY("good children %d", good);
    atomic_store(&stops, true);
    for (size_t at = 0; at < 3; at++)
        pthread_join(threads[at], NULL);
    use("in the parent");
}

/* Started by each way to start a program: shows what of ours is in its environment and its memory. */
static void show(void)
{
    for (char **each = environ; *each != NULL; each++)
        if (strstr(*each, "PRELOAD") != NULL || strstr(*each, "GPU_CKPT") != NULL || strstr(*each, "MARK=") == *each)
            SAY("%s", *each);
    char line[4096];
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps != NULL && fgets(line, sizeof line, maps) != NULL)
        if (strstr(line, "fastpath") != NULL)
            SAY("mapped");
    /* Descriptors that it was not meant to have. */
    for (int at = 3; at < 64; at++)
        if (fcntl(at, F_GETFD) >= 0 && (maps == NULL || at != fileno(maps)))
            SAY("descriptor %d", at);
    load();
    SAY("begun %d", begin());
    use(words[0] != NULL ? words[0] : "started");
}

static void each_way_to_start(void)
{
    load();
    SAY("begun %d", begin());
    use("before");
    setenv("MARK", "1", 1);
    char command[PATH_MAX + 32], *shown[] = {(char *)self, "show", "way", NULL};
    pid_t child = fork();
    if (child == 0) {
        execv(self, shown);
        _exit(1);
    }
    ended("fork and execv", child);
    child = vfork();
    if (child == 0) {
        execve(self, shown, environ);
        _exit(1);
    }
    ended("vfork and execve", child);
    int result = posix_spawn(&child, self, NULL, NULL, shown, environ);
    ended("posix_spawn", child);
    SAY("posix_spawn %d", result);
    result = posix_spawnp(&child, self, NULL, NULL, shown, environ);
    ended("posix_spawnp", child);
    SAY("posix_spawnp %d", result);
    snprintf(command, sizeof command, "%s show way", self);
    SAY("system %d", system(command));
    FILE *pipe = popen(command, "r");
    for (int each; pipe != NULL && (each = fgetc(pipe)) != EOF;)
        putchar(each);
    SAY("popen %d", pipe != NULL ? pclose(pipe) : -1);
    child = fork();
    if (child == 0) {
        execlp(self, self, "show", "way", (char *)NULL);
        _exit(1);
    }
    ended("fork and execlp", child);
    child = fork();
    if (child == 0) {
        int file = open(self, O_RDONLY | O_CLOEXEC);
        fexecve(file, shown, environ);
        _exit(1);
    }
    ended("fork and fexecve", child);
    use("after");
    fflush(stdout);
    execv(self, shown); /* this process itself */
}

static void programs_that_cannot_be_started(void)
{
    char *arguments[] = {"x", NULL}, *many[5000];
    for (size_t at = 0; at < 4999; at++)
        many[at] = "--multiprocessing-fork-not";
    many[4999] = NULL;
    static const char *files[] = {"/nowhere/at/all", "/etc/passwd", "/", ""};
    for (size_t at = 0; at < 4; at++) {
        int result = execv(files[at], arguments), error = errno;
        SAY("%s: %d %d", files[at], result, error);
        result = execv(files[at], many), error = errno;
        SAY("%s with many: %d %d", files[at], result, error);
    }
}

/* What the words name, with what they say. */
static void start(void)
{
    load();
    SAY("begun %d", begin());
    use("before");
    pid_t child;
    int result = posix_spawn(&child, words[0], NULL, NULL, words, environ);
    if (result != 0)
        SAY("not started %d", result);
    ended(words[1] != NULL ? words[1] : "it", child);
}

/* -- the process itself */

static void mappings(void)
{
    static const struct {
        size_t bytes;
        int protection, flags, file;
        off_t offset;
    } tries[] = {
        {0, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0},
        {4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0},
        {4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0},
        {64 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0},
        {64 * MIB + 5, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0},
        {64 * MIB, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0},
        {64 * MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0},
        {64 * MIB, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0},
        {64 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE | MAP_NORESERVE, -1, 0},
        {64 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_POPULATE, -1, 0},
        {64 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_POPULATE, 999, 0},
        {64 * MIB, PROT_READ | PROT_WRITE, MAP_ANONYMOUS | MAP_POPULATE, -1, 0},
        {4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 5},
        {(size_t)1 << 60, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0},
        {SIZE_MAX, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0},
    };
    load();
    SAY("begun %d", begin());
    use("before");
    for (size_t at = 0; at < sizeof tries / sizeof *tries; at++) {
        errno = 0;
        char *memory = mmap(NULL, tries[at].bytes, tries[at].protection, tries[at].flags, tries[at].file,
                            tries[at].offset);
        int error = errno;
        SAY("%zu: %d %d", at, memory != MAP_FAILED, error);
        if (memory == MAP_FAILED)
            continue;
        if (tries[at].flags & MAP_POPULATE && tries[at].protection & PROT_WRITE) {
            static unsigned char present[(64 * MIB + 5) / 4096 + 1];
            size_t count = 0, pages = (tries[at].bytes + 4095) / 4096;
            mincore(memory, tries[at].bytes, present);
            for (size_t page = 0; page < pages; page++)
                count += present[page] & 1;
            SAY("populated %d, zero %d", count == pages, memory[tries[at].bytes - 1] == 0);
        }
        SAY("unmapped %d", munmap(memory, tries[at].bytes));
    }
    char *fixed = mmap(NULL, 64 * MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (int flags = MAP_FIXED; flags != 0; flags = flags == MAP_FIXED ? MAP_FIXED_NOREPLACE : 0) {
        errno = 0;
        char *at = mmap(fixed, 64 * MIB, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE | flags, -1, 0);
        int error = errno;
        SAY("fixed %d %d", at == fixed, error);
    }
}

static void few_descriptors(void)
{
    load();
    SAY("begun %d", begin());
    struct rlimit limit = {3, 3};
    SAY("limited %d", setrlimit(RLIMIT_NOFILE, &limit));
    use("without descriptors");
    use("and again");
}

/* As a daemon does, which then opens files of its own under these numbers, and starts children.  The word is a socket's
 * name, somebody who connects to that. */
static void descriptors_that_are_closed(void)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX}, others = {.sun_family = AF_UNIX};
    load();
    SAY("begun %d", begin());
    use("before");
    for (int at = 3; at < 256; at++)
        close(at);
    int own[6];
    for (size_t at = 0; at < 5; at++) { /* of the server's sockets the name is chosen by the kernel */
        own[at] = socket(AF_UNIX, SOCK_STREAM, 0);
        SAY("server %d", bind(own[at], (struct sockaddr *)&name, sizeof name.sun_family) | listen(own[at], 4));
    }
    own[5] = open("/dev/null", O_RDWR);
    int client = socket(AF_UNIX, SOCK_STREAM, 0);
    strncpy(others.sun_path, words[0] != NULL ? words[0] : "", sizeof others.sun_path - 1);
    connect(client, (struct sockaddr *)&others, sizeof others);
    for (size_t at = 0; at < 5; at++) {
        socklen_t size = sizeof name;
        int caller = socket(AF_UNIX, SOCK_STREAM, 0);
        getsockname(own[at], (struct sockaddr *)&name, &size);
        SAY("called %d", connect(caller, (struct sockaddr *)&name, size));
        usleep(20000);
        struct pollfd waits = {.fd = own[at], .events = POLLIN};
        SAY("its caller %d", poll(&waits, 1, 1000));
    }
    pid_t child = fork();
    if (child == 0) {
        int left = 0;
        for (size_t at = 0; at < 6; at++)
            left += fcntl(own[at], F_GETFD) >= 0;
        _exit(left);
    }
    ended("its own files in the child", child);
    use("after");
}

static void *use_briefly(void *result)
{
    cu.set_current(cu.context);
    unsigned long long own = 0;
    *(int *)result = cu.allocate(&own, SERVED) * 1000 + cu.release(own);
    return NULL;
}

static void small_stacks(void)
{
    load();
    SAY("begun %d", begin());
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 65536);
    for (int turn = 0; turn < 3; turn++) {
        pthread_t thread;
        int result = -1;
        pthread_create(&thread, &attributes, use_briefly, &result);
        pthread_join(thread, NULL);
        SAY("%d", result);
    }
}

static int handled;

static void handle(int signal) { handled += signal == SIGALRM; }

/* Signals, their handlers and masks stay the program's, and errno does in calls that work. */
static void signals(void)
{
    load();
    SAY("begun %d", begin());
    struct sigaction action = {.sa_handler = handle}, found;
    sigaction(SIGALRM, &action, NULL);
    ualarm(500, 500);
    for (int turn = 0; turn < 2000; turn++) {
        unsigned long long own = 0;
        errno = 77;
        if (cu.allocate(&own, SERVED) != 0 || cu.release(own) != 0)
            SAY("failed");
    }
    ualarm(0, 0);
    SAY("handled %d", handled > 0);
    for (int signal = 1; signal < 65; signal++)
        if (sigaction(signal, NULL, &found) == 0 && found.sa_handler != SIG_DFL)
            SAY("handler of %d", signal);
    sigset_t mask;
    pthread_sigmask(SIG_BLOCK, NULL, &mask);
    for (int signal = 1; signal < 65; signal++)
        if (sigismember(&mask, signal))
            SAY("blocked %d", signal);
}

static void at_exit(void) { use("at the exit"); }

static void uses_at_the_exit(void)
{
    load();
    SAY("begun %d", begin());
    atexit(at_exit);
    use("before");
}

/* Waits to be looked at by a debugger. */
static void stays(void)
{
    load();
    SAY("begun %d", begin());
    use("before");
    char line[16];
    while (fgets(line, sizeof line, stdin) != NULL)
        use("meanwhile");
}

static const struct {
    const char *name;
    void (*run)(void);
} programs[] = {
#ifdef LINKED
    {"linked", linked},
#endif
#define PROGRAM(name) {#name, name}
    PROGRAM(names_without_a_driver), PROGRAM(errors_of_lookups), PROGRAM(by_version), PROGRAM(in_a_namespace),
    PROGRAM(bound_deeply), PROGRAM(loaded_twice), PROGRAM(by_address), PROGRAM(threads_that_look_up),
    PROGRAM(fork_before), PROGRAM(fork_after), PROGRAM(raw_clone), PROGRAM(fork_while_others_allocate), PROGRAM(show),
    PROGRAM(each_way_to_start), PROGRAM(programs_that_cannot_be_started), PROGRAM(start), PROGRAM(mappings),
    PROGRAM(few_descriptors), PROGRAM(descriptors_that_are_closed), PROGRAM(small_stacks), PROGRAM(signals),
    PROGRAM(uses_at_the_exit), PROGRAM(stays),
};

int main(int count, char **arguments)
{
    static char path[PATH_MAX];
    ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
    self = length > 0 ? path : arguments[0];
    words = arguments + 2;
    for (size_t at = 0; count > 1 && at < sizeof programs / sizeof *programs; at++)
        if (strcmp(programs[at].name, arguments[1]) == 0) {
            programs[at].run();
            return 0;
        }
    fprintf(stderr, "no_harm: no such program\n");
    return 2;
}
