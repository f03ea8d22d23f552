#include "base/struct_size.h"

#include <string.h>

#include "base/check.h"

/* A size beyond this was never written by a caller; what follows the struct is not looked at. */
enum { MOST_BYTES = 4096 };

int cpa_is_zero(const void *memory, size_t bytes) {
    const unsigned char *p = memory;
    for (size_t i = 0; i < bytes; i++) {
        if (p[i]) return 0;
    }
    return 1;
}

cpa_status cpa_struct_take(const char *where, const void *given, size_t least, size_t known, void *out,
                           cpa_error *err) {
    size_t size;
    if (!given) return cpa_fail(err, CPA_INVALID, "%s: the struct is NULL", where);
    memcpy(&size, given, sizeof size);
    if (size < least || size > MOST_BYTES || size % sizeof size != 0) {
        return cpa_fail(err, CPA_INVALID, "%s: struct size is %zu, expected %zu to %zu, a multiple of %zu", where, size,
                        least, known, sizeof size);
    }
    if (size > known && !cpa_is_zero((const char *)given + known, size - known)) {
        return cpa_fail(err, CPA_INVALID,
                        "%s: struct size is %zu, and what follows the %zu bytes that this library knows is not zero",
                        where, size, known);
    }
    memset(out, 0, known);
    memcpy(out, given, size < known ? size : known);
    memcpy(out, &known, sizeof known);
    return CPA_OK;
}

cpa_status cpa_struct_give(const void *from, size_t known, void *out, size_t size) {
    if (!out) return CPA_INVALID;
    memset(out, 0, size);
    memcpy(out, from, size < known ? size : known);
    return CPA_OK;
}
