#include "src/text/normalizer.h"

#include <stdlib.h>
#include <string.h>

#include <uninorm.h>

#include "base/check.h"
#include "src/text/pattern.h"
#include "src/text/unicode.h"
#include "src/text/utf8.h"

struct cpa_normalizer_step {
    uninorm_t form;       /* a normal form; NULL: one of the two below */
    cpa_pattern *pattern; /* matches become `text`; NULL: `text` comes in front */
    cpa_bytes text;
    int shortens; /* `text` may have fewer characters than what it stands for */
};

/* ---- Reading ---- */

static cpa_status read_text(const cpa_json *json, const char *key, cpa_bytes *out, cpa_error *err) {
    const char *text = "";
    CPA_TRY(cpa_json_text(json, key, CPA_JSON_REQUIRED, &text, err));
    if (!cpa_bytes_add(out, text, strlen(text))) return cpa_fail(err, CPA_NO_MEMORY, "%s: no memory", json->path);
    return CPA_OK;
}

static int count_characters(const char *text) {
    int n = 0;
    for (; *text; text += cpa_utf8_length(*text)) n++;
    return n;
}

static cpa_status read_replace(const cpa_json *json, struct cpa_normalizer_step *step, cpa_error *err) {
    const char *from = json_string_value(json_object_get(cpa_json_get(json, "pattern"), "String")), *to = "";
    CPA_TRY(cpa_pattern_read(json, "pattern", &step->pattern, err));
    if (cpa_pattern_matches_nothing(step->pattern))
        return cpa_json_unsupported(json, "pattern", "one that matches at least a character", err);
    CPA_TRY(cpa_json_text(json, "content", CPA_JSON_REQUIRED, &to, err));
    step->shortens = !from || count_characters(to) < count_characters(from);
    return read_text(json, "content", &step->text, err);
}

static uninorm_t form_of(const char *type) {
    if (strcmp(type, "NFC") == 0) return UNINORM_NFC;
    if (strcmp(type, "NFD") == 0) return UNINORM_NFD;
    if (strcmp(type, "NFKC") == 0) return UNINORM_NFKC;
    return strcmp(type, "NFKD") == 0 ? UNINORM_NFKD : NULL;
}

static cpa_status read_step(const cpa_json_part *part, void *ctx, cpa_error *err) {
    cpa_normalizer *out = ctx;
    const cpa_json *json = &part->json;
    const uninorm_t form = form_of(part->type);
    const int is_prepend = strcmp(part->type, "Prepend") == 0, is_replace = strcmp(part->type, "Replace") == 0;
    if (!form && !is_prepend && !is_replace)
        return cpa_json_unsupported(json, "type", "NFC, NFD, NFKC, NFKD, Prepend, Replace or Sequence", err);
    if (out->count == CPA_NORMALIZER_STEPS) return cpa_json_unsupported(json, "type", "at most eight steps", err);
    struct cpa_normalizer_step *step = calloc(1, sizeof *step);
    if (!step) return cpa_fail(err, CPA_NO_MEMORY, "%s: no memory", json->path);
    out->steps[out->count++] = step;
    step->form = form;
    if (is_prepend) return read_text(json, "prepend", &step->text, err);
    return is_replace ? read_replace(json, step, err) : CPA_OK;
}

cpa_status cpa_normalizer_read(const cpa_json *file, cpa_normalizer *out, cpa_error *err) {
    static const cpa_json_parts parts = {"normalizer", "normalizers", "no sequences inside each other", read_step};
    return cpa_json_read_parts(file, &parts, out, err);
}

void cpa_normalizer_release(cpa_normalizer *normalizer) {
    for (int i = 0; i < normalizer->count; i++) {
        cpa_pattern_close(normalizer->steps[i]->pattern);
        cpa_bytes_release(&normalizer->steps[i]->text);
        free(normalizer->steps[i]);
    }
    *normalizer = (cpa_normalizer){.count = 0};
}

/* ---- Applying ---- */

/* Characters below U+0300 are the form C of themselves, those of ASCII all four forms. */
static int is_normal(uninorm_t form, const char *text, size_t bytes) {
    const unsigned char bound = form == UNINORM_NFC ? 0xcc : 0x80;
    size_t i = 0;
    while (i < bytes && (unsigned char)text[i] < bound) i++;
    return i == bytes;
}

static cpa_status add_normal(uninorm_t form, const char *text, size_t bytes, cpa_bytes *out, cpa_error *err) {
    if (is_normal(form, text, bytes)) return cpa_bytes_add(out, text, bytes) ? CPA_OK : CPA_NO_MEMORY;
    size_t n = 0;
    uint8_t *normal = u8_normalize(form, (const uint8_t *)text, bytes, NULL, &n);
    const int ok = normal && cpa_bytes_add(out, normal, n);
    free(normal);
    return ok ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "no memory for the normal form of a text");
}

/* Where a stretch of characters ends that are inert, or of such that are not. */
static size_t stretch_end(const char *text, size_t bytes, size_t at, int is_inert) {
    while (at < bytes && cpa_unicode_is_inert(cpa_utf8_code(text + at)) == is_inert) at += cpa_utf8_length(text[at]);
    return at;
}

/* What is inert stays, and what lies between is normalised by itself. */
static cpa_status normal_form(uninorm_t form, const char *text, size_t bytes, cpa_bytes *out, cpa_error *err) {
    for (size_t at = 0; at < bytes;) {
        const size_t inert = stretch_end(text, bytes, at, 0);
        CPA_TRY(add_normal(form, text + at, inert - at, out, err));
        at = stretch_end(text, bytes, inert, 1);
        if (!cpa_bytes_add(out, text + inert, at - inert)) return CPA_NO_MEMORY;
    }
    return CPA_OK;
}

static cpa_status replace(const struct cpa_normalizer_step *step, const char *text, size_t bytes, cpa_bytes *out,
                          cpa_error *err) {
    cpa_pattern_search search;
    int found = 1, ok = 1;
    size_t from = 0, begin = 0, end = 0;
    CPA_TRY(cpa_pattern_begin(step->pattern, text, bytes, &search, err));
    cpa_status status = cpa_pattern_next(&search, &found, &begin, &end, err);
    while (status == CPA_OK && found && ok) {
        ok = cpa_bytes_add(out, text + from, begin - from) &&
             cpa_bytes_add(out, step->text.data, (size_t)step->text.count);
        from = end;
        status = cpa_pattern_next(&search, &found, &begin, &end, err);
    }
    cpa_pattern_end(&search);
    if (status != CPA_OK) return status;
    ok = ok && cpa_bytes_add(out, text + from, bytes - from);
    return ok ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "no memory for the normal form of a text");
}

static cpa_status apply_step(const struct cpa_normalizer_step *step, const char *text, size_t bytes, cpa_bytes *out,
                             cpa_error *err) {
    if (step->form) return normal_form(step->form, text, bytes, out, err);
    if (step->pattern) return replace(step, text, bytes, out, err);
    if (bytes > 0 && !cpa_bytes_add(out, step->text.data, (size_t)step->text.count)) return CPA_NO_MEMORY;
    return cpa_bytes_add(out, text, bytes) ? CPA_OK : CPA_NO_MEMORY;
}

int cpa_normalizer_shortens(const cpa_normalizer *normalizer) {
    int shortens = 0;
    for (int i = 0; i < normalizer->count; i++) shortens |= normalizer->steps[i]->shortens;
    return shortens;
}

cpa_status cpa_normalizer_apply(const cpa_normalizer *normalizer, const char *text, size_t bytes, cpa_bytes *out,
                                cpa_error *err) {
    cpa_bytes before = {.count = 0};
    cpa_status status = CPA_OK;
    out->count = 0;
    if (!cpa_bytes_add(out, text, bytes)) status = CPA_NO_MEMORY;
    for (int i = 0; status == CPA_OK && i < normalizer->count; i++) {
        const cpa_bytes done = *out;
        *out = before;
        before = done;
        out->count = 0;
        status = apply_step(normalizer->steps[i], before.data, (size_t)before.count, out, err);
    }
    cpa_bytes_release(&before);
    return status == CPA_NO_MEMORY ? cpa_fail(err, status, "no memory for the normal form of a text") : status;
}
