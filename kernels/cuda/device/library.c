/* Libraries that are loaded at run time: a program that may use them also starts where they are missing. */
#include <dlfcn.h>
#include <string.h>

#include "base/check.h"
#include "kernels/cuda/device/cuda.h"

cpa_status cpa_cuda_library_open(const char *name, const char *const *sonames, int count, cpa_cuda_library *out,
                                 cpa_error *err) {
    for (int i = 0; i < count; i++) {
        out->soname = sonames[i];
        out->handle = dlopen(sonames[i], RTLD_NOW | RTLD_LOCAL);
        if (out->handle) return CPA_OK;
    }
    return cpa_fail(err, CPA_UNSUPPORTED, "cannot load %s (%s); install it or add its folder to LD_LIBRARY_PATH", name,
                    dlerror());
}

cpa_status cpa_cuda_library_find(const cpa_cuda_library *library, const char *name, void *function, cpa_error *err) {
    void *found = dlsym(library->handle, name);
    if (!found) return cpa_fail(err, CPA_UNSUPPORTED, "%s has no function %s", library->soname, name);
    memcpy(function, &found, sizeof found);
    return CPA_OK;
}
