#include "plot/cairo_library.h"

#include <dlfcn.h>
#include <string.h>

#include "base/check.h"

static const char SONAME[] = "libcairo.so.2";

static cpa_status find(void *library, const char *name, void *function, cpa_error *err) {
    void *symbol = dlsym(library, name);
    if (!symbol) return cpa_fail(err, CPA_UNSUPPORTED, "--png: %s has no %s", SONAME, name);
    memcpy(function, &symbol, sizeof symbol);
    return CPA_OK;
}

cpa_status cpa_cairo_load(cpa_cairo *out, cpa_error *err) {
    void *library = dlopen(SONAME, RTLD_NOW | RTLD_LOCAL);
    if (!library) return cpa_fail(err, CPA_UNSUPPORTED, "--png: cannot load cairo (%s)", dlerror());
#define CPA_CAIRO_FIND(name) CPA_TRY(find(library, "cairo_" #name, &out->name, err));
    CPA_CAIRO_FUNCTIONS(CPA_CAIRO_FIND)
#undef CPA_CAIRO_FIND
    return CPA_OK;
}
