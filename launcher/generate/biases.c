#include "launcher/generate/biases.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "launcher/generate/text_argument.h"
#include "program/field.h"

static const double MOST_BIAS = 1e6;

/* The number of characters of "ID:BIAS" at the beginning of a text, 0 if that is none. */
static size_t parse_one(const char *text, int64_t vocabulary, cpa_logit_bias *out) {
    char *colon, *end;
    errno = 0;
    const long long id = strtoll(text, &colon, 10);
    if (colon == text || *colon != ':' || errno || id < 0 || id >= vocabulary) return 0;
    const double bias = strtod(colon + 1, &end);
    if (end == colon + 1 || !(bias >= -MOST_BIAS && bias <= MOST_BIAS)) return 0;
    *out = (cpa_logit_bias){(uint32_t)id, (float)bias};
    return (size_t)(end - text);
}

static int is_there(const cpa_biases *biases, uint32_t token) {
    for (int64_t i = 0; i < biases->count; i++) {
        if (biases->biases[i].token == token) return 1;
    }
    return 0;
}

static cpa_status parse(const char *where, const char *text, int64_t vocabulary, cpa_biases *biases, cpa_error *err) {
    static const char between[] = ", \t\r\n";
    for (const char *at = text + strspn(text, between); *at; at += strspn(at, between)) {
        cpa_logit_bias bias;
        char found[32];
        const size_t bytes = strcspn(at, between);
        cpa_text_quote(at, bytes, found, sizeof found);
        if (parse_one(at, vocabulary, &bias) != bytes)
            return cpa_fail(err, CPA_INVALID, "%s: found '%s', expected ID:BIAS, of ids from 0 to %" PRId64, where,
                            found, vocabulary - 1);
        if (is_there(biases, bias.token))
            return cpa_fail(err, CPA_INVALID, "%s: found '%s', expected each token once", where, found);
        if (biases->count == CPA_MOST_LOGIT_BIASES)
            return cpa_fail(err, CPA_INVALID, "%s: found '%s', expected at most %d", where, found,
                            CPA_MOST_LOGIT_BIASES);
        biases->biases[biases->count++] = bias;
        at += bytes;
    }
    return CPA_OK;
}

cpa_status cpa_biases_read(const char *where, const char *text, int64_t vocabulary, cpa_biases *out, cpa_error *err) {
    char *content;
    out->count = 0;
    CPA_TRY(cpa_text_argument_read(where, text, &content, err));
    const cpa_status status = parse(where, content, vocabulary, out, err);
    free(content);
    return status;
}
