#include "src/text/pattern.h"

#include <stdlib.h>
#include <string.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "base/check.h"
#include "src/text/unicode.h"
#include "src/text/utf8.h"

enum {
    MAX_STEPS = 50000000, /* of one match: a second or less */
    MAX_HEAP_KIB = 1 << 18
};

struct cpa_pattern {
    pcre2_code *code;
    pcre2_match_context *limits;
};

/* ---- From Oniguruma's syntax (Ruby's, with Unicode) to that of PCRE2 ---- */

typedef struct translation {
    const char *at;
    cpa_bytes out;
    int in_class;
    int lacks_memory;
} translation;

static int put(translation *t, const char *text, size_t n) {
    t->lacks_memory |= !cpa_bytes_add(&t->out, text, n);
    return !t->lacks_memory;
}

/* \p{NAME}: categories have the same names; Oniguruma's \p{Han} is a script, where PCRE2 takes script extensions. */
static int property(translation *t) {
    const char *name = t->at + 3, *end = t->at[2] == '{' ? strchr(name, '}') : NULL;
    const size_t inverted = *name == '^';
    if (!end || end == name + inverted) return 0;
    const int is_category = end - name - (ptrdiff_t)inverted <= 2;
    int ok = put(t, t->at, 3 + inverted) && put(t, "sc:", is_category ? 0 : 3);
    ok = ok && put(t, name + inverted, (size_t)(end - name) - inverted + 1);
    t->at = end + 1;
    return ok;
}

/* Whether a character of the expression is one that texts are searched without: what stands in for it is searched. */
static int is_replaced(uint32_t code) {
    return cpa_unicode_stand_in(code) != code;
}

/* What follows a backslash. \s of PCRE2 has one character more, U+180E; \v, \h, \w and others differ too. */
static int escape(translation *t) {
    const char c = t->at[1];
    int ok;
    if (c == 'p' || c == 'P') return property(t);
    if (c == 's' || c == 'S') {
        ok = put(t, c == 's' ? "\\p{White_Space}" : "\\P{White_Space}", 15);
    } else if (c == 'x' && t->at[2] == '{' && is_replaced((uint32_t)strtoul(t->at + 3, NULL, 16))) {
        return 0;
    } else if (c == 'u') {
        if (strspn(t->at + 2, "0123456789abcdefABCDEF") < 4) return 0;
        ok = put(t, "\\x{", 3) && put(t, t->at + 2, 4) && put(t, "}", 1);
        t->at += 4;
    } else if (c && (strchr("dDrntfx", c) ||
                     !((c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')))) {
        ok = put(t, t->at, 2);
    } else {
        return 0;
    }
    t->at += 2;
    return ok;
}

/* One more piece of the expression; 0 for what the two syntaxes do not say alike (sets in sets, options m and x, {,n}
 * and {n}+), and for characters that only one of them knows. */
static int piece(translation *t) {
    const char *at = t->at;
    if (*at == '\\') return escape(t);
    if ((unsigned char)*at >= 0xc0 && is_replaced(cpa_utf8_code(at))) return 0;
    if (t->in_class) {
        if (*at == '[' || (at[0] == '&' && at[1] == '&')) return 0;
        if (*at == ']') t->in_class = 0;
    } else if (*at == '[') {
        const size_t n = at[1] == '^' ? 2 : 1;
        if (at[n] == ']') return 0;
        t->in_class = 1;
        t->at += n;
        return put(t, at, n);
    } else if ((at[0] == '(' && at[1] == '*') || (at[0] == '{' && at[1] == ',') || (at[0] == '}' && at[1] == '+')) {
        return 0;
    } else if (at[0] == '(' && at[1] == '?') {
        const char *options = at + 2;
        if (!strchr(":=!>i-<", *options) || options[strspn(options, "-i")] == 'm' ||
            options[strspn(options, "-i")] == 'x')
            return 0;
    }
    t->at++;
    return put(t, at, 1);
}

static cpa_status translate(const char *expression, translation *out) {
    *out = (translation){.at = expression};
    while (*out->at) {
        if (!piece(out)) return out->lacks_memory ? CPA_NO_MEMORY : CPA_UNSUPPORTED;
    }
    return out->in_class ? CPA_UNSUPPORTED : CPA_OK;
}

/* ---- Patterns ---- */

static cpa_status lacks_memory(const cpa_json *json, cpa_error *err) {
    return cpa_fail(err, CPA_NO_MEMORY, "%s: no memory for a pattern", json->path);
}

static cpa_status compile(const cpa_json *json, const char *key, const char *expression, size_t bytes, uint32_t options,
                          cpa_pattern *out, cpa_error *err) {
    pcre2_compile_context *context = pcre2_compile_context_create(NULL);
    int code;
    PCRE2_SIZE at;
    if (!context) return lacks_memory(json, err);
    pcre2_set_newline(context, PCRE2_NEWLINE_LF);
    out->code = pcre2_compile((PCRE2_SPTR)expression, bytes, PCRE2_UTF | options, &code, &at, context);
    pcre2_compile_context_free(context);
    if (!out->code) {
        PCRE2_UCHAR why[120] = "";
        if (code == PCRE2_ERROR_HEAP_FAILED || code == PCRE2_ERROR_NOMEMORY) return lacks_memory(json, err);
        pcre2_get_error_message(code, why, sizeof why);
        return cpa_fail(err, CPA_UNSUPPORTED, "%s: %s%s: found a pattern that does not compile: %s", json->path,
                        json->prefix, key, (const char *)why);
    }
    pcre2_jit_compile(out->code, PCRE2_JIT_COMPLETE); /* without it patterns are interpreted */
    out->limits = pcre2_match_context_create(NULL);
    if (!out->limits) return lacks_memory(json, err);
    pcre2_set_match_limit(out->limits, MAX_STEPS);
    pcre2_set_heap_limit(out->limits, MAX_HEAP_KIB);
    return CPA_OK;
}

cpa_status cpa_pattern_open(const cpa_json *json, const char *key, const char *expression, int literal,
                            cpa_pattern **out, cpa_error *err) {
    const uint32_t options = PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NO_AUTO_CAPTURE | PCRE2_NEVER_BACKSLASH_C;
    cpa_pattern *pattern = calloc(1, sizeof *pattern);
    translation t = {.at = NULL};
    cpa_status status = literal ? CPA_OK : translate(expression, &t);
    if (!pattern || status == CPA_NO_MEMORY) {
        status = lacks_memory(json, err);
    } else if (literal) {
        status = compile(json, key, expression, strlen(expression), PCRE2_LITERAL, pattern, err);
    } else if (status != CPA_OK) {
        status = cpa_fail(err, status, "%s: %s%s: found a pattern with '%.16s', expected one without", json->path,
                          json->prefix, key, *t.at ? t.at : "[");
    } else {
        status = compile(json, key, t.out.data ? t.out.data : "", (size_t)t.out.count, options, pattern, err);
    }
    cpa_bytes_release(&t.out);
    if (status != CPA_OK) {
        cpa_pattern_close(pattern);
        return status;
    }
    *out = pattern;
    return CPA_OK;
}

cpa_status cpa_pattern_read(const cpa_json *json, const char *key, cpa_pattern **out, cpa_error *err) {
    cpa_json_part part;
    const char *text = NULL;
    CPA_TRY(cpa_json_part_of(json, key, CPA_JSON_NO_INDEX, &part, err));
    if (!part.json.object) return cpa_json_refuse(json, key, "an object with Regex or String", err);
    const int literal = cpa_json_get(&part.json, "Regex") == NULL;
    CPA_TRY(cpa_json_text(&part.json, literal ? "String" : "Regex", CPA_JSON_REQUIRED, &text, err));
    return cpa_pattern_open(&part.json, literal ? "String" : "Regex", text, literal, out, err);
}

void cpa_pattern_close(cpa_pattern *pattern) {
    if (!pattern) return;
    pcre2_code_free(pattern->code);
    pcre2_match_context_free(pattern->limits);
    free(pattern);
}

int cpa_pattern_matches_nothing(const cpa_pattern *pattern) {
    uint32_t matches = 0;
    return pcre2_pattern_info(pattern->code, PCRE2_INFO_MATCHEMPTY, &matches) == 0 && matches;
}

/* ---- Searching ---- */

cpa_status cpa_pattern_begin(const cpa_pattern *pattern, const char *text, size_t bytes, cpa_pattern_search *out,
                             cpa_error *err) {
    *out = (cpa_pattern_search){.pattern = pattern, .bytes = bytes, .last_end = -1};
    out->text = cpa_unicode_for_patterns(text, bytes, &out->copy);
    out->memory = out->text || bytes == 0 ? pcre2_match_data_create(1, NULL) : NULL;
    if (out->memory) return CPA_OK;
    cpa_bytes_release(&out->copy);
    return cpa_fail(err, CPA_NO_MEMORY, "no memory to search a text");
}

/* Matches from *at on; the interpreter takes over what the compiled code has no stack for. */
static int match(const cpa_pattern_search *search, size_t at) {
    const PCRE2_SPTR text = (PCRE2_SPTR)search->text;
    const cpa_pattern *p = search->pattern;
    int code = pcre2_match(p->code, text, search->bytes, at, PCRE2_NO_UTF_CHECK, search->memory, p->limits);
    if (code == PCRE2_ERROR_JIT_STACKLIMIT)
        code =
            pcre2_match(p->code, text, search->bytes, at, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, search->memory, p->limits);
    return code;
}

cpa_status cpa_pattern_next(cpa_pattern_search *search, int *found, size_t *begin, size_t *end, cpa_error *err) {
    *found = 0;
    while (search->at <= search->bytes) {
        const int code = match(search, search->at);
        if (code == PCRE2_ERROR_NOMATCH) return CPA_OK;
        if (code == PCRE2_ERROR_NOMEMORY) return cpa_fail(err, CPA_NO_MEMORY, "no memory to search a text");
        if (code < 0) {
            PCRE2_UCHAR why[120] = "";
            pcre2_get_error_message(code, why, sizeof why);
            return cpa_fail(err, CPA_INVALID, "the text cannot be cut into words at byte %zu: %s", search->at,
                            (const char *)why);
        }
        const PCRE2_SIZE *range = pcre2_get_ovector_pointer(search->memory);
        const int is_empty = range[0] == range[1], is_repeated = is_empty && (int64_t)range[1] == search->last_end;
        *begin = range[0], *end = range[1];
        search->at = range[1];
        if (is_empty) search->at += range[1] < search->bytes ? cpa_utf8_length(search->text[range[1]]) : 1;
        if (is_repeated) continue; /* nothing, right behind the last match */
        search->last_end = (int64_t)range[1];
        *found = 1;
        return CPA_OK;
    }
    return CPA_OK;
}

void cpa_pattern_end(cpa_pattern_search *search) {
    cpa_bytes_release(&search->copy);
    pcre2_match_data_free(search->memory);
}
