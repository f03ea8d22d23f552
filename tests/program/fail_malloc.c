/* Put before a program by LD_PRELOAD: of its allocations, the one with the number in FAIL_MALLOC, counted from 1, fails;
 * FAIL_MALLOC=count says on stderr at the end how many there were. Those of the program itself count, from the beginning of
 * its main on, and of the libraries that are named here: others crash then, or end the process, and so does the CUDA
 * runtime, which registers kernels before main. */
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORTED __attribute__((visibility("default")))

/* glibc's own names of its functions. */
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t n, size_t bytes);
void *__libc_realloc(void *old, size_t bytes);
void *__libc_memalign(size_t alignment, size_t bytes);

static atomic_long count;
static atomic_int begun; /* main has */
static int (*program_main)(int, char **, char **);

/* Whether the address is in the program, or in a library that bears that its allocations fail. */
static int counts(const void *caller) {
    static const char *const names[] = {"libpcre2", "libyaml", "libopenblas"};
    struct dl_find_object found;
    if (_dl_find_object((void *)(uintptr_t)caller, &found) != 0) return 0;
    const char *path = found.dlfo_link_map->l_name, *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (strncmp(name, names[i], strlen(names[i])) == 0) return 1;
    }
    return !*name;
}

static int fails(const void *caller) {
    static atomic_long chosen = -1; /* getenv does not allocate */
    if (atomic_load(&chosen) < 0) {
        const char *text = getenv("FAIL_MALLOC");
        atomic_store(&chosen, text ? strtol(text, NULL, 10) : 0);
    }
    if (!atomic_load(&begun) || !counts(caller)) return 0;
    if (atomic_fetch_add(&count, 1) + 1 != atomic_load(&chosen)) return 0;
    errno = ENOMEM;
    return 1;
}

EXPORTED void *malloc(size_t bytes) {
    return fails(__builtin_return_address(0)) ? NULL : __libc_malloc(bytes);
}

EXPORTED void *calloc(size_t n, size_t bytes) {
    return fails(__builtin_return_address(0)) ? NULL : __libc_calloc(n, bytes);
}

EXPORTED void *realloc(void *old, size_t bytes) {
    return fails(__builtin_return_address(0)) ? NULL : __libc_realloc(old, bytes);
}

EXPORTED void *memalign(size_t alignment, size_t bytes) {
    return fails(__builtin_return_address(0)) ? NULL : __libc_memalign(alignment, bytes);
}

EXPORTED void *aligned_alloc(size_t alignment, size_t bytes) {
    return fails(__builtin_return_address(0)) ? NULL : __libc_memalign(alignment, bytes);
}

EXPORTED int posix_memalign(void **out, size_t alignment, size_t bytes) {
    void *memory = fails(__builtin_return_address(0)) ? NULL : __libc_memalign(alignment, bytes);
    if (!memory) return ENOMEM;
    *out = memory;
    return 0;
}

static int begin(int argc, char **argv, char **environment) {
    atomic_store(&begun, 1);
    return program_main(argc, argv, environment);
}

/* What a program calls first, which calls its main. */
EXPORTED int __libc_start_main(int (*main)(int, char **, char **), int argc, char **argv, void (*init)(void),
                               void (*fini)(void), void (*rtld_fini)(void), void *stack_end);
int __libc_start_main(int (*main)(int, char **, char **), int argc, char **argv, void (*init)(void), void (*fini)(void),
                      void (*rtld_fini)(void), void *stack_end) {
    int (*next)(int (*)(int, char **, char **), int, char **, void (*)(void), void (*)(void), void (*)(void), void *);
    *(void **)&next = dlsym(RTLD_NEXT, "__libc_start_main");
    program_main = main;
    return next(begin, argc, argv, init, fini, rtld_fini, stack_end);
}

__attribute__((destructor)) static void report(void) {
    const char *text = getenv("FAIL_MALLOC");
    if (text && strcmp(text, "count") == 0) fprintf(stderr, "allocations: %ld\n", atomic_load(&count));
}
