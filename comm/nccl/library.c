#include "comm/nccl/library.h"

#include <dlfcn.h>
#include <string.h>

#include "base/check.h"

/* Stores a function at *function, a pointer to a function. */
static cpa_status find(void *library, const char *soname, const char *name, void *function, cpa_error *err) {
    void *found = dlsym(library, name);
    if (!found) {
        return cpa_fail(err, CPA_COMM, "%s has no function %s: it is too old; install NCCL 2.18 or later", soname,
                        name);
    }
    memcpy(function, &found, sizeof found);
    return CPA_OK;
}

cpa_status cpa_nccl_load(const char *soname, cpa_nccl *out, cpa_error *err) {
    void *library = dlopen(soname, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        return cpa_fail(err, CPA_COMM, "cannot load NCCL (%s); install it or add its folder to LD_LIBRARY_PATH",
                        dlerror());
    }
    cpa_nccl nccl;
#define CPA_NCCL_FIND(name) CPA_TRY(find(library, soname, #name, &nccl.name, err));
    CPA_NCCL_FUNCTIONS(CPA_NCCL_FIND)
#undef CPA_NCCL_FIND
    *out = nccl;
    return CPA_OK;
}
