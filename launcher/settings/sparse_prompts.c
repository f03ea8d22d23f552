#include "launcher/settings/sparse_prompts.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "program/field.h"

enum { DEFAULT_STRIDE = 8 };

static int is_stride(long stride) {
    return stride == 4 || stride == 8 || stride == 16;
}

cpa_status cpa_sparse_prompts_parse(const char *where, const char *text, cpa_sparse_prompts *out, cpa_error *err) {
    const char *method = "xattn:";
    const size_t length = strlen(method);
    cpa_sparse_prompts s = {0, 0};
    if (strcmp(text, "off") != 0) {
        char *end = NULL, found[64];
        const int is_method = strncmp(text, method, length) == 0 && strchr("0123456789.", text[length]) && text[length];
        const double tau = is_method ? strtod(text + length, &end) : 0;
        const long stride = is_method && *end == ',' ? strtol(end + 1, &end, 10) : DEFAULT_STRIDE;
        cpa_text_quote(text, strlen(text), found, sizeof found);
        if (!is_method || *end || !(tau > 0 && tau <= 1) || !is_stride(stride))
            return cpa_fail(
                err, CPA_INVALID,
                "%s: found '%s', expected off, xattn:TAU or xattn:TAU,S, TAU above 0 and at most 1, S of 4, "
                "8 or 16",
                where, found);
        s = (cpa_sparse_prompts){(int32_t)stride, (float)tau};
    }
    *out = s;
    return CPA_OK;
}
