/* Loads the subject, and with it CUDA's runtime, into a scope of its own, as Python does with PyTorch. */
#include <dlfcn.h>
#include <stdio.h>

int main(int count, char **words)
{
    void *library = count == 2 ? dlopen(words[1], RTLD_NOW | RTLD_LOCAL) : NULL;
    int (*subject)(void);
    if (library == NULL || (*(void **)&subject = dlsym(library, "subject")) == NULL) {
        fprintf(stderr, "loader: %s\n", dlerror());
        return 3;
    }
    return subject();
}
