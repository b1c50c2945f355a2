/* A library that is linked to libcuda.so.1, by all names that pass the launch gate. */
#include <stddef.h>
#include <string.h>

#include "launch_gate_names.h"

#define DECLARE(name) extern int name(void);
LAUNCH_GATE_NAMES(DECLARE)

static const struct {
    const char *name;
    int (*function)(void);
} functions[] = {
#define ENTRY(name) {#name, name},
    LAUNCH_GATE_NAMES(ENTRY)};

__attribute__((visibility("default"))) void *linked(const char *name);
void *linked(const char *name)
{
    for (size_t at = 0; at < sizeof functions / sizeof *functions; at++)
        if (strcmp(functions[at].name, name) == 0)
            return (void *)functions[at].function;
    return NULL;
}
