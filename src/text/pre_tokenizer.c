#include "src/text/pre_tokenizer.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "src/text/byte_level.h"
#include "src/text/bytes.h"
#include "src/text/pattern.h"

/* What becomes of a match of the pattern: a piece of its own, nothing, or a part of one beside it. */
typedef enum merging { ISOLATED, REMOVED, MERGED_WITH_PREVIOUS, MERGED_WITH_NEXT, CONTIGUOUS } merging;
typedef enum presence { ALWAYS, FIRST, NEVER } presence;

/* In this order: a prefix comes in front, and in place of spaces; the text is cut; bytes become characters. */
struct cpa_pre_tokenizer_step {
    cpa_bytes prefix;  /* in front of what does not begin with it; "" for none */
    presence prefixed; /* pieces of a text that get the prefix */
    int replaces_spaces;
    cpa_pattern *pattern; /* NULL: not cut */
    merging behavior;
    int inverted; /* what does not match counts as a match, and the other way round */
    int byte_level;
};

/* ---- Reading ---- */

/* The words of GPT-2: contractions; letters, digits and others each with a space before; white space but for its
 * last. */
static const char GPT2_PATTERN[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

static cpa_status set_prefix(struct cpa_pre_tokenizer_step *step, const char *text, const cpa_json *json,
                             cpa_error *err) {
    if (!cpa_bytes_add(&step->prefix, text, strlen(text)))
        return cpa_fail(err, CPA_NO_MEMORY, "%s: no memory", json->path);
    return CPA_OK;
}

static cpa_status read_byte_level(const cpa_json *json, struct cpa_pre_tokenizer_step *step, cpa_error *err) {
    int add_prefix_space = 1, use_regex = 1;
    CPA_TRY(cpa_json_flag(json, "add_prefix_space", &add_prefix_space, err));
    CPA_TRY(cpa_json_flag(json, "use_regex", &use_regex, err));
    step->byte_level = 1;
    if (add_prefix_space) CPA_TRY(set_prefix(step, " ", json, err));
    return use_regex ? cpa_pattern_open(json, "use_regex", GPT2_PATTERN, 0, &step->pattern, err) : CPA_OK;
}

static cpa_status read_split(const cpa_json *json, struct cpa_pre_tokenizer_step *step, cpa_error *err) {
    static const char *const names[] = {"Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"};
    const char *name = "";
    size_t i = 0;
    CPA_TRY(cpa_json_text(json, "behavior", CPA_JSON_REQUIRED, &name, err));
    while (i < sizeof names / sizeof *names && strcmp(name, names[i]) != 0) i++;
    if (i == sizeof names / sizeof *names)
        return cpa_json_unsupported(json, "behavior",
                                    "Isolated, Removed, MergedWithPrevious, MergedWithNext or Contiguous", err);
    step->behavior = (merging)i;
    CPA_TRY(cpa_json_flag(json, "invert", &step->inverted, err));
    return cpa_pattern_read(json, "pattern", &step->pattern, err);
}

/* Digits of the package are those of Unicode 17: some more than those of patterns. */
#define DIGIT "[\\p{N}\\x{11de0}-\\x{11de9}\\x{16ff4}-\\x{16ff6}]"

static cpa_status read_digits(const cpa_json *json, struct cpa_pre_tokenizer_step *step, cpa_error *err) {
    int individual = 0;
    CPA_TRY(cpa_json_flag(json, "individual_digits", &individual, err));
    return cpa_pattern_open(json, "individual_digits", individual ? DIGIT : DIGIT "+", 0, &step->pattern, err);
}

/* Files of before prepend_scheme have add_prefix_space. */
static cpa_status read_metaspace(const cpa_json *json, struct cpa_pre_tokenizer_step *step, cpa_error *err) {
    const char *replacement = "", *scheme = "always";
    int add_prefix_space = 1, split = 1;
    CPA_TRY(cpa_json_text(json, "replacement", CPA_JSON_REQUIRED, &replacement, err));
    CPA_TRY(cpa_json_flag(json, "add_prefix_space", &add_prefix_space, err));
    CPA_TRY(cpa_json_flag(json, "split", &split, err));
    if (!add_prefix_space) scheme = "never";
    CPA_TRY(cpa_json_text(json, "prepend_scheme", CPA_JSON_OPTIONAL, &scheme, err));
    if (strcmp(scheme, "always") != 0 && strcmp(scheme, "first") != 0 && strcmp(scheme, "never") != 0)
        return cpa_json_unsupported(json, "prepend_scheme", "always, first or never", err);
    step->prefixed = scheme[0] == 'a' ? ALWAYS : scheme[0] == 'f' ? FIRST : NEVER;
    step->behavior = MERGED_WITH_NEXT;
    step->replaces_spaces = 1;
    CPA_TRY(set_prefix(step, replacement, json, err));
    return split ? cpa_pattern_open(json, "replacement", replacement, 1, &step->pattern, err) : CPA_OK;
}

static cpa_status read_step(const cpa_json_part *part, void *ctx, cpa_error *err) {
    cpa_pre_tokenizer *out = ctx;
    static const struct {
        const char *type;
        cpa_status (*read)(const cpa_json *json, struct cpa_pre_tokenizer_step *step, cpa_error *err);
    } types[] = {
        {"ByteLevel", read_byte_level}, {"Split", read_split}, {"Digits", read_digits}, {"Metaspace", read_metaspace}};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if (strcmp(part->type, types[i].type) != 0) continue;
        if (out->count == CPA_PRE_TOKENIZER_STEPS)
            return cpa_json_unsupported(&part->json, "type", "at most eight steps", err);
        struct cpa_pre_tokenizer_step *step = calloc(1, sizeof *step);
        if (!step) return cpa_fail(err, CPA_NO_MEMORY, "%s: no memory", part->json.path);
        out->steps[out->count++] = step;
        CPA_TRY(types[i].read(&part->json, step, err));
        if (step->prefixed == FIRST && out->count > 1)
            return cpa_json_unsupported(&part->json, "prepend_scheme", "always or never behind another step", err);
        return CPA_OK;
    }
    return cpa_json_unsupported(&part->json, "type", "ByteLevel, Split, Digits, Metaspace or Sequence", err);
}

cpa_status cpa_pre_tokenizer_read(const cpa_json *file, cpa_pre_tokenizer *out, cpa_error *err) {
    static const cpa_json_parts parts = {"pre_tokenizer", "pretokenizers", "no sequences inside each other", read_step};
    return cpa_json_read_parts(file, &parts, out, err);
}

int cpa_pre_tokenizer_knows_first(const cpa_pre_tokenizer *pre_tokenizer) {
    return pre_tokenizer->count > 0 && pre_tokenizer->steps[0]->prefixed == FIRST;
}

void cpa_pre_tokenizer_release(cpa_pre_tokenizer *pre_tokenizer) {
    for (int i = 0; i < pre_tokenizer->count; i++) {
        struct cpa_pre_tokenizer_step *step = pre_tokenizer->steps[i];
        cpa_pattern_close(step->pattern);
        cpa_bytes_release(&step->prefix);
        free(step);
    }
    *pre_tokenizer = (cpa_pre_tokenizer){.count = 0};
}

/* ---- Cutting ---- */

typedef struct cutting {
    const cpa_pre_tokenizer *pre_tokenizer;
    cpa_word_fn fn;
    void *ctx;
    cpa_error *err;
    cpa_bytes changed[CPA_PRE_TOKENIZER_STEPS]; /* text that a step has changed, before it is cut */
    cpa_bytes piece[CPA_PRE_TOKENIZER_STEPS];   /* a piece of `changed`, with characters in place of bytes */
} cutting;

static cpa_status take_step(cutting *c, int index, const char *text, size_t bytes, int is_first);

static cpa_status no_memory(const cutting *c) {
    return cpa_fail(c->err, CPA_NO_MEMORY, "no memory to cut a text into words");
}

/* A piece of step `index`, for the next one. */
static cpa_status give(cutting *c, int index, const char *text, size_t bytes, int is_first) {
    if (bytes == 0) return CPA_OK;
    if (c->pre_tokenizer->steps[index]->byte_level) {
        cpa_bytes *piece = &c->piece[index];
        piece->count = 0;
        if (!cpa_byte_level_write(text, bytes, piece)) return no_memory(c);
        text = piece->data, bytes = (size_t)piece->count;
    }
    return take_step(c, index + 1, text, bytes, is_first);
}

/* Whether a stretch and the next, each a match or what lies between matches, are one piece. */
static int are_one(merging behavior, int match, int next_match) {
    switch (behavior) {
        case MERGED_WITH_PREVIOUS: return !match && next_match;
        case MERGED_WITH_NEXT: return match && !next_match;
        case CONTIGUOUS: return match == next_match;
        case ISOLATED:
        case REMOVED: break;
    }
    return 0;
}

/* The piece that grows while a text is cut. */
typedef struct growing {
    const char *text;
    size_t begin, end;
    int match; /* the last stretch is a match */
    int is_first;
} growing;

static cpa_status give_piece(cutting *c, int index, const growing *g) {
    const int is_left_out = g->match && c->pre_tokenizer->steps[index]->behavior == REMOVED;
    return is_left_out ? CPA_OK : give(c, index, g->text + g->begin, g->end - g->begin, g->is_first && g->begin == 0);
}

/* The next stretch, up to `end`. */
static cpa_status add_stretch(cutting *c, int index, growing *g, size_t end, int matches) {
    const struct cpa_pre_tokenizer_step *step = c->pre_tokenizer->steps[index];
    const int match = matches != step->inverted;
    if (g->end > 0 && !are_one(step->behavior, g->match, match)) {
        CPA_TRY(give_piece(c, index, g));
        g->begin = g->end;
    }
    g->end = end;
    g->match = match;
    return CPA_OK;
}

static cpa_status cut(cutting *c, int index, const char *text, size_t bytes, int is_first) {
    cpa_pattern_search search;
    growing g = {.text = text, .is_first = is_first};
    size_t begin = 0, end = 0;
    int found = 1;
    CPA_TRY(cpa_pattern_begin(c->pre_tokenizer->steps[index]->pattern, text, bytes, &search, c->err));
    cpa_status status = cpa_pattern_next(&search, &found, &begin, &end, c->err);
    while (status == CPA_OK && found) {
        if (begin > g.end) status = add_stretch(c, index, &g, begin, 0);
        if (status == CPA_OK) status = add_stretch(c, index, &g, end, 1);
        if (status == CPA_OK) status = cpa_pattern_next(&search, &found, &begin, &end, c->err);
    }
    cpa_pattern_end(&search);
    if (status == CPA_OK && g.end < bytes) status = add_stretch(c, index, &g, bytes, 0);
    return status == CPA_OK ? give_piece(c, index, &g) : status;
}

/* Puts the prefix in front and in place of spaces. */
static cpa_status change(cutting *c, const struct cpa_pre_tokenizer_step *step, const char *text, size_t bytes,
                         int is_first, cpa_bytes *out) {
    const char *prefix = step->prefix.data, *end = text + bytes;
    const size_t n = (size_t)step->prefix.count;
    const int has_prefix = (bytes >= n && memcmp(text, prefix, n) == 0) || (step->replaces_spaces && text[0] == ' ');
    int ok = 1;
    out->count = 0;
    if (!has_prefix && (step->prefixed == ALWAYS || (step->prefixed == FIRST && is_first)))
        ok = cpa_bytes_add(out, prefix, n);
    while (ok && text < end) {
        const char *space = step->replaces_spaces ? memchr(text, ' ', (size_t)(end - text)) : NULL;
        ok = cpa_bytes_add(out, text, (size_t)((space ? space : end) - text)) &&
             (!space || cpa_bytes_add(out, prefix, n));
        text = space ? space + 1 : end;
    }
    return ok ? CPA_OK : no_memory(c);
}

static cpa_status take_step(cutting *c, int index, const char *text, size_t bytes, int is_first) {
    if (index == c->pre_tokenizer->count) return c->fn(c->ctx, text, bytes, c->err);
    const struct cpa_pre_tokenizer_step *step = c->pre_tokenizer->steps[index];
    if (step->prefix.count > 0) {
        CPA_TRY(change(c, step, text, bytes, is_first, &c->changed[index]));
        text = c->changed[index].data, bytes = (size_t)c->changed[index].count;
    }
    return step->pattern ? cut(c, index, text, bytes, is_first) : give(c, index, text, bytes, is_first);
}

cpa_status cpa_pre_tokenizer_cut(const cpa_pre_tokenizer *pre_tokenizer, const char *text, size_t bytes, int is_first,
                                 cpa_word_fn fn, void *ctx, cpa_error *err) {
    cutting c = {.pre_tokenizer = pre_tokenizer, .fn = fn, .ctx = ctx, .err = err};
    cpa_status status = bytes > 0 ? take_step(&c, 0, text, bytes, is_first) : CPA_OK;
    for (int i = 0; i < CPA_PRE_TOKENIZER_STEPS; i++) {
        cpa_bytes_release(&c.changed[i]);
        cpa_bytes_release(&c.piece[i]);
    }
    return status;
}
