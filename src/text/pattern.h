/* Patterns of tokenizers, by PCRE2: regular expressions as the package tokenizers takes them (Oniguruma's syntax), and
 * plain strings. */
#ifndef CPA_TEXT_PATTERN_H
#define CPA_TEXT_PATTERN_H

#include "src/text/bytes.h"
#include "src/text/json_part.h"

/* Does not change: any number of threads may search for one at once. */
typedef struct cpa_pattern cpa_pattern;

/* A regular expression or, with `literal`, a string. CPA_UNSUPPORTED for what is not said alike in both syntaxes, or
 * does not compile; the line has *json and key in front. */
cpa_status cpa_pattern_open(const cpa_json *json, const char *key, const char *expression, int literal,
                            cpa_pattern **out, cpa_error *err);
/* The pattern under a key: {"Regex": ...} or {"String": ...}. */
cpa_status cpa_pattern_read(const cpa_json *json, const char *key, cpa_pattern **out, cpa_error *err);
void cpa_pattern_close(cpa_pattern *pattern);

/* Whether it matches where there is nothing. */
int cpa_pattern_matches_nothing(const cpa_pattern *pattern);

/* A search through a text from its beginning to its end: matches that do not overlap, from left to right. */
typedef struct cpa_pattern_search {
    const cpa_pattern *pattern;
    const char *text;
    size_t bytes, at;
    int64_t last_end; /* end of the last match; -1 before the first */
    cpa_bytes copy;   /* copy of a text that needs stand-ins (unicode.h) */
    void *memory;     /* for matches */
} cpa_pattern_search;

/* A valid text, which must outlive the search. CPA_NO_MEMORY. */
cpa_status cpa_pattern_begin(const cpa_pattern *pattern, const char *text, size_t bytes, cpa_pattern_search *out,
                             cpa_error *err);
/* The next match, *found is 0 if there is none. CPA_INVALID if the search takes more steps than any sensible text
 * needs. */
cpa_status cpa_pattern_next(cpa_pattern_search *search, int *found, size_t *begin, size_t *end, cpa_error *err);
void cpa_pattern_end(cpa_pattern_search *search);

#endif
