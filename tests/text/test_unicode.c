/* Every code point, pairs of combining marks and mixtures, in normal forms, words and beside added tokens, against what
 * the package tokenizers made of the same texts: tests/data/text/unicode.json, which make_unicode.py writes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "base/hash.h"
#include "src/text/added_tokens.h"
#include "src/text/normalizer.h"
#include "src/text/pre_tokenizer.h"
#include "src/text/utf8.h"
#include "src/text/vocabulary.h"
#include "tests/fixtures/unit.h"

enum { BLOCK = 0x4000, ROW = 64, LAST = 0x110000, MIXED = 20000, MAX_MARKS = 1200, MAX_LETTERS = 400 };

static json_t *open_expected(void) {
    json_t *expected = json_load_file(CPA_TEST_DATA "/text/unicode.json", 0, NULL);
    CU_ASSERT_PTR_NOT_NULL_FATAL(expected);
    return expected;
}

static int is_character(uint32_t code) {
    return code < 0xd800 || code >= 0xe000;
}

static char *put(char *out, uint32_t code) {
    return out + cpa_utf8_write(code, out);
}

/* The hash of what becomes of the code points from `first` on, ROW of them. */
typedef uint64_t (*row_fn)(void *ctx, uint64_t hash, uint32_t first);

/* Compares a digest for each block of code points; says the first that is wrong. */
static void check_blocks(const char *what, const char *digests, row_fn fn, void *ctx) {
    int wrong = 0;
    CU_ASSERT_EQUAL_FATAL(strlen(digests), 16 * (LAST / BLOCK));
    for (uint32_t block = 0; block < LAST / BLOCK; block++) {
        uint64_t hash = CPA_HASH_START;
        char hex[20];
        for (uint32_t first = block * BLOCK; first < (block + 1) * BLOCK; first += ROW)
            hash = is_character(first) ? fn(ctx, hash, first) : hash;
        snprintf(hex, sizeof hex, "%016llx", (unsigned long long)hash);
        if (memcmp(hex, digests + (size_t)16 * block, 16) == 0) continue;
        if (wrong++ == 0)
            printf("\n    %s: not as the package between U+%04X and the next block\n    ", what, block * BLOCK);
    }
    CU_ASSERT_EQUAL(wrong, 0);
}

static const char *digest_of(const json_t *expected, const char *key, const char *name) {
    return json_string_value(json_object_get(json_object_get(expected, key), name));
}

/* ---- Normal forms ---- */

typedef struct form {
    cpa_normalizer normalizer;
    cpa_bytes normal;
} form;

static const char *const forms[] = {"NFC", "NFD", "NFKC", "NFKD"};

static form open_form(const char *name) {
    form f = {.normal = {.count = 0}};
    json_t *file = json_pack("{s:{s:s}}", "normalizer", "type", name);
    const cpa_json json = {.path = name, .prefix = "", .object = file};
    CU_ASSERT_EQUAL_FATAL(cpa_normalizer_read(&json, &f.normalizer, NULL), CPA_OK);
    json_decref(file);
    return f;
}

static void close_form(form *f) {
    cpa_normalizer_release(&f->normalizer);
    cpa_bytes_release(&f->normal);
}

static void normalise(form *f, const char *text, const char *end) {
    CU_ASSERT_EQUAL_FATAL(cpa_normalizer_apply(&f->normalizer, text, (size_t)(end - text), &f->normal, NULL), CPA_OK);
}

/* Each alone, and where a mark would move to its other side; what stays as it was is not hashed. */
static uint64_t hash_forms(void *ctx, uint64_t hash, uint32_t first) {
    form *f = ctx;
    char text[ROW * 24], *end = text;
    for (uint32_t i = 0; i < ROW; i++) {
        const uint32_t code = first + i;
        end = put(put(end, code), ' ');
        end = put(put(put(put(end, 'a'), code), 0x334), ' ');
        end = put(put(put(put(end, 'a'), 0x345), code), ' ');
    }
    normalise(f, text, end);
    const int same = f->normal.count == end - text && memcmp(f->normal.data, text, (size_t)(end - text)) == 0;
    return same ? hash : cpa_hash_bytes(hash, f->normal.data, (size_t)f->normal.count);
}

static void all_code_points_have_their_forms(void) {
    json_t *expected = open_expected();
    for (int i = 0; i < 4; i++) {
        form f = open_form(forms[i]);
        check_blocks(forms[i], digest_of(expected, "forms", forms[i]), hash_forms, &f);
        close_form(&f);
    }
    json_decref(expected);
}

static void check_hash(const json_t *expected, const char *key, const char *name, uint64_t hash) {
    char hex[20];
    snprintf(hex, sizeof hex, "%016llx", (unsigned long long)hash);
    CU_ASSERT_STRING_EQUAL(hex, digest_of(expected, key, name));
}

static int read_marks(const json_t *expected, uint32_t marks[MAX_MARKS]) {
    size_t i;
    json_t *range;
    int n = 0;
    json_array_foreach(json_object_get(expected, "marks"), i, range) {
        json_int_t code = json_integer_value(json_array_get(range, 0));
        for (; code <= json_integer_value(json_array_get(range, 1)) && n < MAX_MARKS; code++)
            marks[n++] = (uint32_t)code;
    }
    CU_ASSERT(n > 900 && n < MAX_MARKS);
    return n;
}

static void all_pairs_of_marks_are_ordered(void) {
    json_t *expected = open_expected();
    uint32_t marks[MAX_MARKS];
    const int n = read_marks(expected, marks);
    char *text = malloc((size_t)n * 9);
    for (int i = 0; i < 4; i++) {
        form f = open_form(forms[i]);
        uint64_t hash = CPA_HASH_START;
        for (int first = 0; first < n; first++) {
            char *end = text;
            for (int second = 0; second < n; second++) end = put(put(put(end, 'a'), marks[first]), marks[second]);
            normalise(&f, text, end);
            hash = cpa_hash_bytes(hash, f.normal.data, (size_t)f.normal.count);
        }
        check_hash(expected, "pairs", forms[i], hash);
        close_form(&f);
    }
    free(text);
    json_decref(expected);
}

static uint64_t below(uint64_t *random, uint64_t n) {
    return cpa_mix64(*random += CPA_GOLDEN) % n;
}

static void mixtures_have_their_forms(void) {
    json_t *expected = open_expected();
    uint32_t letters[MAX_LETTERS];
    size_t n = 0;
    for (const char *at = json_string_value(json_object_get(expected, "alphabet")); *at && n < MAX_LETTERS;
         at += cpa_utf8_length(*at))
        letters[n++] = cpa_utf8_code(at);
    CU_ASSERT(n > 100 && n < MAX_LETTERS);
    for (int i = 0; i < 4; i++) {
        form f = open_form(forms[i]);
        uint64_t hash = CPA_HASH_START;
        for (uint64_t index = 0; index < MIXED; index++) {
            uint64_t random = cpa_mix64(index);
            char text[12 * CPA_UTF8_MAX], *end = text;
            for (uint64_t left = 1 + below(&random, 12); left > 0; left--) end = put(end, letters[below(&random, n)]);
            normalise(&f, text, end);
            hash = cpa_hash_bytes(hash, f.normal.data, (size_t)f.normal.count);
        }
        check_hash(expected, "mixed", forms[i], hash);
        close_form(&f);
    }
    json_decref(expected);
}

/* ---- Words ---- */

static cpa_status hash_word(void *ctx, const char *word, size_t bytes, cpa_error *err) {
    uint64_t *hash = ctx;
    const uint8_t length = bytes < 255 ? (uint8_t)bytes : 255;
    *hash = cpa_hash_bytes(*hash, &length, 1);
    (void)word, (void)err;
    return CPA_OK;
}

/* Whether a row is one of many without a character: of a plane that has none, and not the first of its block. */
static int is_empty(uint32_t first) {
    const uint32_t plane = first >> 16;
    return plane >= 4 && plane != 14 && first % BLOCK != 0;
}

static uint64_t hash_words(void *ctx, uint64_t hash, uint32_t first) {
    if (is_empty(first)) return hash;
    char text[ROW * 20], *end = text;
    for (uint32_t i = 0; i < ROW; i++) {
        const uint32_t code = first + i;
        end = put(put(put(end, 'a'), code), ' ');
        end = put(put(put(put(put(end, code), '1'), code), code), '!');
    }
    CU_ASSERT_EQUAL_FATAL(cpa_pre_tokenizer_cut(ctx, text, (size_t)(end - text), 1, hash_word, &hash, NULL), CPA_OK);
    return hash;
}

static void all_code_points_make_their_words(void) {
    json_t *expected = open_expected();
    const char *name;
    json_t *entry, *all = json_object_get(expected, "pre_tokenizers");
    CPA_ASSERT_ORDER(json_object_size(all), >=, 9);
    json_object_foreach(all, name, entry) {
        cpa_pre_tokenizer pre_tokenizer = {.count = 0};
        const cpa_json json = {.path = name, .prefix = "", .object = entry};
        CU_ASSERT_EQUAL_FATAL(cpa_pre_tokenizer_read(&json, &pre_tokenizer, NULL), CPA_OK);
        check_blocks(name, json_string_value(json_object_get(entry, "digests")), hash_words, &pre_tokenizer);
        cpa_pre_tokenizer_release(&pre_tokenizer);
    }
    json_decref(expected);
}

/* Whether a token of its own word is found beside a code point, before and behind it. */
static uint64_t hash_beside(void *ctx, uint64_t hash, uint32_t first) {
    if (is_empty(first)) return hash;
    for (uint32_t i = 0; i < ROW; i++) {
        const uint32_t code = first + i;
        for (int is_behind = 0; is_behind < 2; is_behind++) {
            char text[CPA_UTF8_MAX + 3], *end = is_behind ? text + 3 : put(text, code), found = 0;
            size_t begin, piece_end;
            uint32_t id;
            memcpy(is_behind ? text : end, "<w>", 3);
            end = is_behind ? put(end, code) : end + 3;
            cpa_added_search search = cpa_added_tokens_begin(ctx, text, (size_t)(end - text));
            while (cpa_added_tokens_next(&search, &begin, &piece_end, &id)) found += id != CPA_NO_ID;
            hash = cpa_hash_bytes(hash, &found, 1);
        }
    }
    return hash;
}

static void all_code_points_are_words_or_not(void) {
    json_t *expected = open_expected();
    cpa_added_tokens tokens = {.count = 0};
    CU_ASSERT(cpa_added_tokens_add(&tokens, "<w>", 3, 0, CPA_ADDED_SINGLE_WORD));
    check_blocks("words", json_string_value(json_object_get(expected, "words")), hash_beside, &tokens);
    cpa_added_tokens_release(&tokens);
    json_decref(expected);
}

static const cpa_test TESTS[] = {
    {"all code points have their forms", all_code_points_have_their_forms},
    {"all pairs of marks are ordered", all_pairs_of_marks_are_ordered},
    {"mixtures have their forms", mixtures_have_their_forms},
    {"all code points make their words", all_code_points_make_their_words},
    {"all code points are words or not", all_code_points_are_words_or_not},
};
CPA_TEST_MAIN("Unicode of tokenizers", TESTS)
