#include "launcher/generate/ids.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "launcher/generate/text_argument.h"
#include "program/field.h"

static int is_between(char c) {
    return c == ',' || isspace((unsigned char)c);
}

static cpa_status parse(const char *where, const char *text, int64_t vocabulary, cpa_ids *ids, cpa_error *err) {
    int64_t room = 0;
    for (const char *at = text;;) {
        while (is_between(*at)) at++;
        if (!*at) return CPA_OK;
        char *end;
        errno = 0;
        const long long id = strtoll(at, &end, 10);
        if (end == at || (*end && !is_between(*end)) || errno || id < 0 || id >= vocabulary) {
            char found[32];
            cpa_text_quote(at, strcspn(at, ", \t\r\n"), found, sizeof found);
            return cpa_fail(err, CPA_INVALID, "%s: found '%s', expected ids from 0 to %" PRId64, where, found,
                            vocabulary - 1);
        }
        if (!cpa_array_reserve(&ids->ids, &room, ids->count + 1, sizeof *ids->ids))
            return cpa_fail(err, CPA_NO_MEMORY, "%s: no memory for %" PRId64 " ids", where, ids->count + 1);
        ids->ids[ids->count++] = (uint32_t)id;
        at = end;
    }
}

cpa_status cpa_ids_read(const char *where, const char *text, int64_t vocabulary, cpa_ids *out, cpa_error *err) {
    cpa_ids ids = {NULL, 0};
    char *content;
    CPA_TRY(cpa_text_argument_read(where, text, &content, err));
    cpa_status status = parse(where, content, vocabulary, &ids, err);
    free(content);
    if (status != CPA_OK) {
        cpa_ids_release(&ids);
        return status;
    }
    *out = ids;
    return CPA_OK;
}

void cpa_ids_release(cpa_ids *ids) {
    free(ids->ids);
    *ids = (cpa_ids){NULL, 0};
}
