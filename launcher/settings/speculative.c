#include "launcher/settings/speculative.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/ngram.h>

#include "base/check.h"
#include "program/field.h"

enum { MOST_DRAFTS = 1024 };

/* Reads `before`, then a number from low to high, at *at and moves it behind. */
static int read_number(const char **at, const char *before, long low, long high, int32_t *out) {
    const size_t length = strlen(before);
    if (strncmp(*at, before, length) != 0 || !isdigit((unsigned char)(*at)[length])) return 0;
    char *end;
    const long value = strtol(*at + length, &end, 10);
    if (value < low || value > high) return 0;
    *out = (int32_t)value;
    *at = end;
    return 1;
}

cpa_status cpa_speculative_parse(const char *where, const char *text, cpa_speculative *out, cpa_error *err) {
    cpa_speculative s = {.drafter = CPA_DRAFT_NGRAM};
    const char *at = text;
    int right = read_number(&at, "ngram:", 1, MOST_DRAFTS, &s.draft_tokens);
    if (right && *at == 'x') {
        right = read_number(&at, "x", 2, CPA_NGRAM_BRANCHES, &s.ngram_branches) &&
                s.draft_tokens * s.ngram_branches <= MOST_DRAFTS;
        s.draft_tokens *= s.ngram_branches;
    }
    if (right && *at)
        right = read_number(&at, ":", 1, CPA_NGRAM_MAX, &s.ngram_min) &&
                read_number(&at, "..", s.ngram_min, CPA_NGRAM_MAX, &s.ngram_max);
    if (strcmp(text, "off") == 0) {
        s.drafter = CPA_DRAFT_NONE;
    } else if (strcmp(text, "mtp:1") == 0) {
        s = (cpa_speculative){.drafter = CPA_DRAFT_MODEL, .draft_tokens = 1};
    } else if (!right || *at) {
        char found[64];
        cpa_text_quote(text, strlen(text), found, sizeof found);
        return cpa_fail(err, CPA_INVALID,
                        "%s: found '%s', expected off, mtp:1, ngram:K, ngram:KxB or these with :MIN..MAX, K of 1 to "
                        "%d, B of 2 to %d, K x B of at most %d and 1 <= MIN <= MAX <= %d",
                        where, found, MOST_DRAFTS, CPA_NGRAM_BRANCHES, MOST_DRAFTS, CPA_NGRAM_MAX);
    }
    *out = s;
    return CPA_OK;
}
