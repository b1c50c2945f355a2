/* A preloaded library like those of others: it stands before functions, and finds the next definition by RTLD_NEXT, some
 * of them in the middle of an allocation.  With OTHER_DLSYM it stands before dlsym, as a C function. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#pragma GCC visibility push(default)

#ifdef OTHER_DLSYM

static long lookups;

void *dlsym(void *library, const char *name)
{
    static void *(*real)(void *, const char *);
    if (real == NULL)
        *(void **)&real = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    lookups++;
    return real(library, name);
}

long neighbour_calls(void) { return lookups; }

#else

static long calls;

static void *next(const char *name, void *self)
{
    void *found = dlsym(RTLD_NEXT, name);
    if (found == NULL || found == self) {
        static const char message[] = "neighbour: RTLD_NEXT is not what comes next\n";
        if (write(2, message, sizeof message - 1) < 0 || 1)
            _exit(70);
    }
    calls++;
    return found;
}

void *malloc(size_t bytes)
{
    static void *(*real)(size_t);
    if (real == NULL)
        *(void **)&real = next("malloc", malloc);
    return real(bytes);
}

void *realloc(void *memory, size_t bytes)
{
    static void *(*real)(void *, size_t);
    if (real == NULL)
        *(void **)&real = next("realloc", realloc);
    return real(memory, bytes);
}

pid_t getppid(void) { return ((pid_t(*)(void))next("getppid", getppid))(); }

/* Begins like the driver's functions. */
int cuts_of(void);
int cuts_of(void) { return dlsym(RTLD_NEXT, "cuts_of") == NULL && dlsym(RTLD_DEFAULT, "cuts_of") == (void *)cuts_of; }

long neighbour_calls(void);
long neighbour_calls(void) { return cuts_of() ? calls : -1; }

#endif
