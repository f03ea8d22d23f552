#include "base/shared_library.h"

#include <dlfcn.h>
#include <string.h>

#include "base/check.h"

/* What a library brings with it goes before what the program has of the same names: wheels carry a protobuf of their
 * own beside the system's, say. Sanitizers do without: they stand in for functions of all. */
#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__
enum { OWN_SYMBOLS = 0 };
#else
enum { OWN_SYMBOLS = RTLD_DEEPBIND };
#endif

cpa_status cpa_library_open(const char *what, const char *file, void **out, cpa_error *err) {
    void *library = dlopen(file, RTLD_NOW | RTLD_LOCAL | OWN_SYMBOLS);
    if (!library)
        return cpa_fail(err, CPA_UNSUPPORTED,
                        "%s: cannot load its library (%s); install it or add its folder to LD_LIBRARY_PATH", what,
                        dlerror());
    *out = library;
    return CPA_OK;
}

cpa_status cpa_library_find(const char *what, void *library, const char *file, const char *name, void *function,
                            cpa_error *err) {
    void *found = dlsym(library, name);
    if (!found) return cpa_fail(err, CPA_UNSUPPORTED, "%s: %s has no function %s", what, file, name);
    memcpy(function, &found, sizeof found);
    return CPA_OK;
}
