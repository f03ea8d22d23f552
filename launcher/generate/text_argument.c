#include "launcher/generate/text_argument.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"

/* The content of a file. */
static cpa_status read_file(const char *where, const char *path, char **out, cpa_error *err) {
    enum { AT_ONCE = 1 << 16, MOST = 1 << 28 };
    FILE *file = fopen(path, "rb");
    char *text = NULL;
    int64_t used = 0, room = 0;
    if (!file) return cpa_fail(err, CPA_INVALID, "%s: %s: %s", where, path, strerror(errno));
    cpa_status status = CPA_OK;
    for (size_t n = 1; n > 0 && status == CPA_OK; used += (int64_t)n) {
        n = 0;
        if (used > MOST) {
            status = cpa_fail(err, CPA_INVALID, "%s: %s: found more than %d MiB", where, path, MOST >> 20);
        } else if (!cpa_array_reserve(&text, &room, used + AT_ONCE + 1, 1)) {
            status = cpa_fail(err, CPA_NO_MEMORY, "%s: %s: no memory for %lld bytes", where, path, (long long)used);
        } else {
            n = fread(text + used, 1, AT_ONCE, file);
        }
    }
    if (status == CPA_OK && ferror(file)) status = cpa_fail(err, CPA_INVALID, "%s: %s: could not be read", where, path);
    fclose(file);
    if (status != CPA_OK) {
        free(text);
        return status;
    }
    text[used] = 0;
    if ((int64_t)strlen(text) != used) {
        free(text);
        return cpa_fail(err, CPA_INVALID, "%s: %s: found a zero byte, expected text", where, path);
    }
    *out = text;
    return CPA_OK;
}

cpa_status cpa_text_argument_read(const char *where, const char *argument, char **out, cpa_error *err) {
    if (argument[0] == '@') return read_file(where, argument + 1, out, err);
    char *text = strdup(argument);
    if (!text) return cpa_fail(err, CPA_NO_MEMORY, "%s: no memory for it", where);
    *out = text;
    return CPA_OK;
}
