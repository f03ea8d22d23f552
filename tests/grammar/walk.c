#include "tests/grammar/walk.h"

#include <stdlib.h>
#include <string.h>

#include "base/hash.h"

enum { FREE_TOKENS = 60, MOST_TOKENS = 6000 };

static const char *const several[] = {
    "{\"",
    "\":",
    "\": ",
    "\": \"",
    "\", \"",
    "\",\"",
    "\"}",
    "}}",
    "}]",
    "[{",
    "[[",
    "]]",
    "],[",
    "[]",
    "{}",
    "null",
    "tru",
    "true",
    "false",
    "se}",
    ", ",
    ",\n",
    "\n    ",
    "  ",
    "\\\"",
    "\\n",
    "\\u",
    "00",
    "12",
    "3.14",
    "e+",
    "-1",
    "0.",
    "the",
    " name",
    "name\":",
    "a",
    "b",
    "abc",
    "ABC",
    "\xc3\xa9",
    "\xc3",
    "\xa9"
    "a",
    "\xe2\x82",
    "\xe2\x82\xac",
    "\xf0\x9f\x98\x80",
    "\xf0\x9f",
    "x\"",
    "y\",",
    "2024-",
    "-02-",
    "T12",
    ":30",
    "Z",
    "@",
    ".com",
    "::",
    "127.",
    "/",
};
static const char *const special[] = {"<tool_call>", "</tool_call>", "<s>", "</s>"};

int cpa_walk_vocabulary_make(cpa_walk_vocabulary *v, int bytes_alone) {
    const int64_t n_several = bytes_alone ? 0 : (int64_t)(sizeof several / sizeof *several);
    const int64_t n_special = sizeof special / sizeof *special;
    static char bytes[256];
    cpa_error err;
    v->n = 256 + n_several + n_special;
    v->tokens = calloc((size_t)v->n, sizeof *v->tokens);
    if (!v->tokens) return 0;
    for (int64_t i = 0; i < v->n; i++) {
        const char *text = i < 256 ? NULL : i < 256 + n_several ? several[i - 256] : special[i - 256 - n_several];
        if (i < 256) bytes[i] = (char)i;
        v->tokens[i] = text ? (cpa_grammar_token){.text = text, .bytes = strlen(text)}
                            : (cpa_grammar_token){.text = &bytes[i], .bytes = 1};
        v->tokens[i].is_special = i >= 256 + n_several;
    }
    v->end_id = (uint32_t)v->n - 1;
    return cpa_constraints_open(v->tokens, v->n, &v->end_id, 1, 1 << 28, &v->constraints, &err) == CPA_OK;
}

void cpa_walk_vocabulary_release(cpa_walk_vocabulary *v) {
    cpa_constraints_close(v->constraints);
    free(v->tokens);
}

static int is_allowed(const uint32_t *words, uint32_t token) {
    return words[token / 32] >> token % 32 & 1;
}

/* One of the allowed tokens; late in a walk those that bring it to its end, if they are allowed. -1: there is none. */
static int64_t draw(const cpa_walk_vocabulary *v, const uint32_t *words, int64_t step, uint64_t *random) {
    int64_t n = 0;
    *random = cpa_mix64(*random + CPA_GOLDEN);
    if (is_allowed(words, v->end_id) && (step > FREE_TOKENS || *random % 4 == 0)) return v->end_id;
    static const char closing[] = "\"}]0n";
    for (int64_t i = 0; step > FREE_TOKENS && i < 5; i++) { /* each in its turn, since a text may hold brackets */
        const uint32_t byte = (uint8_t)closing[(step + i) % 5];
        if (is_allowed(words, byte)) return byte;
    }
    for (int64_t i = 0; i < v->n; i++) n += is_allowed(words, (uint32_t)i);
    if (n == 0) return -1;
    /* Mostly tokens of several bytes and special ones, which are few beside the bytes. */
    for (int64_t i = 256; i < v->n; i++) {
        *random = cpa_mix64(*random + CPA_GOLDEN);
        if (is_allowed(words, (uint32_t)i) && *random % 8 == 0) return i;
    }
    int64_t nth = (int64_t)(*random % (uint64_t)n);
    for (int64_t i = 0; i < v->n; i++) {
        if (is_allowed(words, (uint32_t)i) && nth-- == 0) return i;
    }
    return -1;
}

cpa_walk_result cpa_walk(const cpa_walk_vocabulary *v, const char *constraint, uint64_t seed, char text[CPA_WALK_TEXT],
                         cpa_error *err) {
    cpa_constraint *answer = NULL;
    if (cpa_constraint_open(v->constraints, constraint, strlen(constraint), &answer, err) != CPA_OK) {
        return CPA_WALK_REFUSED;
    }
    uint32_t *words = malloc((size_t)(v->n + 31) / 32 * sizeof *words);
    uint64_t random = cpa_mix64(seed + 1);
    cpa_walk_result result = words ? CPA_WALK_ENDLESS : CPA_WALK_DEAD_END;
    size_t n = 0;
    for (int64_t step = 0; result == CPA_WALK_ENDLESS && step < MOST_TOKENS; step++) {
        if (cpa_constraint_mask(answer, words, err) != CPA_OK) break;
        const int64_t token = draw(v, words, step, &random);
        if (token < 0) {
            result = CPA_WALK_DEAD_END;
        } else if (cpa_constraint_accept(answer, (uint32_t)token, err) != CPA_OK) {
            result = CPA_WALK_WRONG;
        } else if (token == v->end_id) {
            result = CPA_WALK_WHOLE;
        } else if (n + v->tokens[token].bytes < CPA_WALK_TEXT) {
            memcpy(text + n, v->tokens[token].text, v->tokens[token].bytes);
            n += v->tokens[token].bytes;
        } else {
            break;
        }
    }
    text[n] = 0;
    free(words);
    cpa_constraint_close(answer);
    return result;
}
