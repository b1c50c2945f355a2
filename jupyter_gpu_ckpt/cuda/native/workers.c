/* Worker processes that Python's multiprocessing starts preload this library too, for CUDA IPC (`ipc.h`); no other
 * program does that the kernel starts. */
#define _GNU_SOURCE
#include "workers.h"

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>

#include "driver.h"
#include "ipc.h"

#define PRELOAD "LD_PRELOAD="
#define MAX_VARIABLES 4096

extern char **environ;

static char library[PATH_MAX], variable[sizeof IPC_VARIABLE + 128];

void workers_preload(const char *name, const char *socket)
{
    if (strlen(name) >= sizeof library || strlen(socket) >= sizeof variable - sizeof IPC_VARIABLE - 1)
        return;
    strcpy(library, name);
    strcpy(variable, IPC_VARIABLE "=");
    strcat(variable, socket);
}

#define FORKSERVER "from multiprocessing.forkserver import main;"

/* As multiprocessing.spawn and multiprocessing.forkserver start them. */
static bool is_worker(char *const arguments[])
{
    for (; *arguments != NULL; arguments++)
        if (strcmp(*arguments, "--multiprocessing-fork") == 0 ||
            strncmp(*arguments, FORKSERVER, strlen(FORKSERVER)) == 0)
            return true;
    return false;
}

/* Runs between fork, or vfork, and exec: on the stack alone. */
static int execute(const char *path, char *const arguments[])
{
    char *variables[MAX_VARIABLES + 3], preload[2 * PATH_MAX];
    size_t count = 0;
    strcpy(preload, PRELOAD);
    strcat(preload, library);
    for (char **each = environ; each != NULL && *each != NULL; each++) {
        if (count == MAX_VARIABLES)
            return execve(path, arguments, environ);
        if (strncmp(*each, PRELOAD, strlen(PRELOAD)) != 0)
            variables[count++] = *each;
        else if (strlen(*each) < PATH_MAX && strlen(preload) + strlen(*each) < sizeof preload) {
            strcat(preload, ":");
            strcat(preload, *each + strlen(PRELOAD));
        } else
            return execve(path, arguments, environ);
    }
    variables[count++] = preload;
    variables[count++] = variable;
    variables[count] = NULL;
    return execve(path, arguments, variables);
}

EXPORT int execv(const char *path, char *const arguments[])
{
    if (library[0] == '\0' || !is_worker(arguments))
        return execve(path, arguments, environ);
    return execute(path, arguments);
}
