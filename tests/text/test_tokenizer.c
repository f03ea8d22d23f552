/* Tokenizers of tests/data/text, against what the packages tokenizers and sentencepiece made of the same strings: ids,
 * and texts of ids, at once and as a stream. */
#include "src/text/tokenizer.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "base/hash.h"
#include "src/text/text_stream.h"
#include "src/text/utf8.h"
#include "tests/fixtures/unit.h"
#include "tests/text/strings.h"

static cpa_tokenizer *open_tokenizer(const char *name) {
    char path[512];
    cpa_error err = {CPA_OK, ""};
    cpa_tokenizer *tokenizer = NULL;
    snprintf(path, sizeof path, CPA_TEST_DATA "/%s", name);
    CU_ASSERT_EQUAL(cpa_tokenizer_open(path, &tokenizer, &err), CPA_OK);
    CU_ASSERT_STRING_EQUAL(err.message, "");
    CU_ASSERT_PTR_NOT_NULL_FATAL(tokenizer);
    return tokenizer;
}

/* Whether a stream of the ids gives a text, each piece in whole characters. */
static int streams(const cpa_tokenizer *tokenizer, const cpa_token_list *ids, int skip_special, const char *text,
                   size_t bytes) {
    cpa_text_stream *stream;
    size_t at = 0, n;
    const char *piece;
    int ok = cpa_text_stream_open(tokenizer, skip_special ? CPA_TEXT_SKIP_SPECIAL : 0, &stream, NULL) == CPA_OK;
    for (int64_t i = 0; ok && i <= ids->count; i++) {
        ok = (i < ids->count ? cpa_text_stream_push(stream, ids->ids[i], &piece, &n, NULL)
                             : cpa_text_stream_finish(stream, &piece, &n, NULL)) == CPA_OK;
        ok = ok && at + n <= bytes && memcmp(piece, text + at, n) == 0 && cpa_utf8_valid(piece, n) == n;
        at += n;
    }
    cpa_text_stream_close(stream);
    return ok && at == bytes;
}

/* The text of ids, behind what a digest stands for. */
static uint64_t add_text(const cpa_tokenizer *tokenizer, const cpa_token_list *ids, int skip_special, uint64_t hash,
                         int *streamed) {
    char *text = NULL;
    size_t bytes = 0;
    CU_ASSERT_EQUAL_FATAL(cpa_tokenizer_decode(tokenizer, ids->ids, ids->count, skip_special, &text, &bytes, NULL),
                          CPA_OK);
    if (streamed) *streamed += streams(tokenizer, ids, skip_special, text, bytes);
    hash = cpa_hash_bytes(hash, text, bytes);
    free(text);
    return hash;
}

/* The digest of a group of strings, as digest() of make_text.py. */
static uint64_t digest(const cpa_tokenizer *tokenizer, const cpa_test_strings *strings, int first, int skip_special,
                       int *streamed) {
    uint64_t hash = CPA_HASH_START, random = cpa_mix64((uint64_t)first);
    cpa_token_list ids = {.count = 0};
    for (int i = first; i < first + CPA_TEST_STRINGS_GROUP; i++) {
        char text[CPA_TEST_STRING_BYTES];
        const size_t bytes = cpa_test_strings_make(strings, i, text);
        ids.count = 0;
        CU_ASSERT_EQUAL_FATAL(cpa_tokenizer_encode(tokenizer, text, bytes, 1, &ids, NULL), CPA_OK);
        hash = cpa_hash_bytes(hash, ids.ids, (size_t)ids.count * sizeof *ids.ids); /* little-endian machines alone */
        hash = add_text(tokenizer, &ids, skip_special, hash, streamed);
    }
    const uint64_t special = skip_special ? 3 : 0, others = (uint64_t)cpa_tokenizer_vocabulary(tokenizer) - special;
    ids.count = 0;
    for (int i = 0; i < CPA_TEST_STRINGS_GROUP; i++)
        CU_ASSERT(cpa_token_list_add(&ids, (uint32_t)(special + cpa_mix64(random += CPA_GOLDEN) % others)));
    hash = add_text(tokenizer, &ids, skip_special, hash, NULL);
    cpa_token_list_release(&ids);
    return hash;
}

/* Digests of all groups; says which differ. */
static void check(const char *name, const json_t *digests, const cpa_test_strings *strings) {
    char path[64];
    int wrong = 0, streamed = 0;
    const int skip_special = strncmp(name, "pieces", 6) == 0; /* which sentencepiece does */
    snprintf(path, sizeof path, "text/%s", name);
    cpa_tokenizer *tokenizer = open_tokenizer(path);
    CU_ASSERT_EQUAL(json_array_size(digests), CPA_TEST_STRINGS / CPA_TEST_STRINGS_GROUP);
    for (size_t group = 0; group < json_array_size(digests); group++) {
        char hex[20];
        const int first = (int)group * CPA_TEST_STRINGS_GROUP;
        snprintf(hex, sizeof hex, "%016llx",
                 (unsigned long long)digest(tokenizer, strings, first, skip_special, &streamed));
        if (strcmp(hex, json_string_value(json_array_get(digests, group))) == 0) continue;
        if (wrong++ == 0) printf("\n    %s: other ids or texts; make_text.py show %s %d\n    ", name, name, first);
    }
    CU_ASSERT_EQUAL(wrong, 0);
    CU_ASSERT_EQUAL(streamed, CPA_TEST_STRINGS);
    cpa_tokenizer_close(tokenizer);
}

static void ids_and_texts_are_those_of_tokenizers(void) {
    cpa_test_strings *strings = cpa_test_strings_open();
    json_t *expected = json_load_file(CPA_TEST_DATA "/text/expected.json", 0, NULL), *digests;
    const char *name;
    CPA_ASSERT_ORDER(json_object_size(expected), >=, 11);
    json_object_foreach(expected, name, digests) check(name, digests, strings);
    json_decref(expected);
    cpa_test_strings_close(strings);
}

/* Byte-level tokens give every text back. */
static void bytes_come_back(void) {
    cpa_test_strings *strings = cpa_test_strings_open();
    cpa_tokenizer *tokenizer = open_tokenizer("tiny-llama");
    int same = 0;
    for (int i = 0; i < CPA_TEST_STRINGS; i++) {
        char text[CPA_TEST_STRING_BYTES], *back = NULL;
        cpa_token_list ids = {.count = 0};
        size_t n = 0;
        const size_t bytes = cpa_test_strings_make(strings, i, text);
        CU_ASSERT_EQUAL(cpa_tokenizer_encode(tokenizer, text, bytes, 1, &ids, NULL), CPA_OK);
        CU_ASSERT(ids.count > 0 && ids.ids[0] == 1);
        CU_ASSERT_EQUAL(cpa_tokenizer_decode(tokenizer, ids.ids, ids.count, 1, &back, &n, NULL), CPA_OK);
        same += n == bytes && memcmp(back, text, n) == 0;
        free(back);
        cpa_token_list_release(&ids);
    }
    CU_ASSERT_EQUAL(same, CPA_TEST_STRINGS);
    cpa_tokenizer_close(tokenizer);
    cpa_test_strings_close(strings);
}

typedef struct shared {
    const cpa_tokenizer *tokenizer;
    const cpa_test_strings *strings;
} shared;

/* Encodes the same strings as the other threads; returns how many of them make the ids of the first time. */
static void *encode_again(void *ctx) {
    const shared *s = ctx;
    intptr_t same = 0;
    for (int i = 0; i < CPA_TEST_STRINGS_GROUP; i++) {
        char text[CPA_TEST_STRING_BYTES];
        cpa_token_list ids = {.count = 0};
        const size_t bytes = cpa_test_strings_make(s->strings, i, text);
        int ok = cpa_tokenizer_encode(s->tokenizer, text, bytes, 0, &ids, NULL) == CPA_OK;
        const int64_t n = ids.count;
        ok = ok && cpa_tokenizer_encode(s->tokenizer, text, bytes, 0, &ids, NULL) == CPA_OK && ids.count == 2 * n;
        same += ok && memcmp(ids.ids, ids.ids + n, (size_t)n * sizeof *ids.ids) == 0;
        cpa_token_list_release(&ids);
    }
    return (void *)same;
}

static void threads_share_a_tokenizer(void) {
    static const char *const names[] = {"text/qwen2", "text/pieces_bpe"};
    cpa_test_strings *strings = cpa_test_strings_open();
    for (int i = 0; i < 2; i++) {
        cpa_tokenizer *tokenizer = open_tokenizer(names[i]);
        shared s = {tokenizer, strings};
        pthread_t threads[4];
        for (int t = 0; t < 4; t++) CU_ASSERT_EQUAL_FATAL(pthread_create(&threads[t], NULL, encode_again, &s), 0);
        for (int t = 0; t < 4; t++) {
            void *same = NULL;
            CU_ASSERT_EQUAL(pthread_join(threads[t], &same), 0);
            CU_ASSERT_EQUAL((intptr_t)same, CPA_TEST_STRINGS_GROUP);
        }
        cpa_tokenizer_close(tokenizer);
    }
    cpa_test_strings_close(strings);
}

/* Words of any length take time in proportion to their length. */
static void long_words_are_quick(void) {
    enum { BYTES = 1 << 19 };
    char *text = malloc(BYTES);
    cpa_tokenizer *tokenizer = open_tokenizer("text/qwen2");
    static const char *const parts[] = {"a", " ", "hello", "\xcc\xa3\xcc\x81", "\xe6\xbc\xa2", "\n ", "'s"};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        const size_t n = strlen(parts[i]), bytes = BYTES / n * n;
        cpa_token_list ids = {.count = 0};
        for (size_t at = 0; at < bytes; at += n) memcpy(text + at, parts[i], n);
        CU_ASSERT_EQUAL(cpa_tokenizer_encode(tokenizer, text, bytes, 0, &ids, NULL), CPA_OK);
        CU_ASSERT(ids.count > 0 && ids.count <= (int64_t)bytes);
        cpa_token_list_release(&ids);
    }
    cpa_tokenizer_close(tokenizer);
    free(text);
}

static void what_is_not_utf8_is_refused(void) {
    static const struct {
        const char *text;
        size_t bytes;
        const char *message;
    } texts[] = {{"ab\xff", 3, "not UTF-8 at byte 2"},           {"\xc0\x80", 2, "not UTF-8 at byte 0"},
                 {"a\xed\xa0\x80z", 5, "not UTF-8 at byte 1"},   {"\xe4\xb8", 2, "not UTF-8 at byte 0"},
                 {"\xf4\x90\x80\x80", 4, "not UTF-8 at byte 0"}, {"\x80", 1, "not UTF-8 at byte 0"}};
    cpa_tokenizer *tokenizer = open_tokenizer("tiny-llama");
    cpa_token_list ids = {.count = 0};
    CU_ASSERT_EQUAL(cpa_tokenizer_encode(tokenizer, "before", 6, 1, &ids, NULL), CPA_OK);
    const int64_t before = ids.count;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        cpa_error err = {CPA_OK, ""};
        CU_ASSERT_EQUAL(cpa_tokenizer_encode(tokenizer, texts[i].text, texts[i].bytes, 1, &ids, &err), CPA_INVALID);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, texts[i].message));
        CU_ASSERT_EQUAL(ids.count, before);
    }
    cpa_token_list_release(&ids);
    cpa_tokenizer_close(tokenizer);
}

/* A character of three bytes in three tokens comes with the third; one that never ends, when the stream does. */
static void streams_wait_for_whole_characters(void) {
    static const char *const pieces[] = {"", "", "\xe2\x82\xac", "x", "", CPA_UTF8_REPLACEMENT "y", ""};
    cpa_tokenizer *tokenizer = open_tokenizer("tiny-llama");
    cpa_token_list ids = {.count = 0};
    cpa_text_stream *stream;
    const char *piece;
    size_t n;
    CU_ASSERT_EQUAL_FATAL(cpa_tokenizer_encode(tokenizer, "\xe2\x82\xacxy", 5, 0, &ids, NULL), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(ids.count, 5);
    const uint32_t given[] = {ids.ids[0], ids.ids[1], ids.ids[2], ids.ids[3], ids.ids[0], ids.ids[4], ids.ids[0]};
    CU_ASSERT_EQUAL(cpa_text_stream_open(tokenizer, CPA_TEXT_SKIP_SPECIAL, &stream, NULL), CPA_OK);
    for (size_t i = 0; i < sizeof given / sizeof *given; i++) {
        CU_ASSERT_EQUAL(cpa_text_stream_push(stream, given[i], &piece, &n, NULL), CPA_OK);
        CU_ASSERT(n == strlen(pieces[i]) && memcmp(piece, pieces[i], n) == 0);
        CU_ASSERT_EQUAL(cpa_text_stream_push(stream, 126, &piece, &n, NULL), CPA_OK); /* a special token */
        CU_ASSERT_EQUAL(n, 0);
        CU_ASSERT_EQUAL(cpa_text_stream_push(stream, 1 << 30, &piece, &n, NULL), CPA_OK); /* none at all */
        CU_ASSERT_EQUAL(n, 0);
    }
    CU_ASSERT_EQUAL(cpa_text_stream_finish(stream, &piece, &n, NULL), CPA_OK);
    CU_ASSERT(n == 3 && memcmp(piece, CPA_UTF8_REPLACEMENT, 3) == 0);
    cpa_text_stream_close(stream);
    cpa_token_list_release(&ids);
    cpa_tokenizer_close(tokenizer);
}

/* An answer keeps the space that it begins with, where the beginning of a text loses it. */
static void an_answer_keeps_its_first_space(void) {
    cpa_tokenizer *tokenizer = open_tokenizer("text/llama2");
    cpa_token_list ids = {.count = 0};
    CU_ASSERT_EQUAL(cpa_tokenizer_encode(tokenizer, "hello", 5, 0, &ids, NULL), CPA_OK);
    for (int continues = 0; continues < 2; continues++) {
        cpa_text_stream *stream;
        char text[64] = "";
        CU_ASSERT_EQUAL(cpa_text_stream_open(tokenizer, continues ? CPA_TEXT_CONTINUES : 0, &stream, NULL), CPA_OK);
        for (int64_t i = 0; i < ids.count; i++) {
            const char *piece;
            size_t n;
            CU_ASSERT_EQUAL(cpa_text_stream_push(stream, ids.ids[i], &piece, &n, NULL), CPA_OK);
            strncat(text, piece, n);
        }
        CU_ASSERT_STRING_EQUAL(text, continues ? " hello" : "hello");
        cpa_text_stream_close(stream);
    }
    cpa_token_list_release(&ids);
    cpa_tokenizer_close(tokenizer);
}

/* A model of sentencepiece takes a space from the beginning where it is part of a piece, and leaves one that is a byte:
 * so does its library. */
static void a_byte_that_is_a_space_stays(void) {
    static const uint32_t byte_first[] = {35, 264}, piece_first[] = {264, 35}; /* <0x20>, and a piece with U+2581 */
    cpa_tokenizer *tokenizer = open_tokenizer("text/pieces_bpe");
    char *text = NULL;
    size_t bytes = 0;
    CU_ASSERT_EQUAL(cpa_tokenizer_decode(tokenizer, byte_first, 2, 1, &text, &bytes, NULL), CPA_OK);
    CU_ASSERT_STRING_EQUAL(text, "  s");
    free(text);
    CU_ASSERT_EQUAL(cpa_tokenizer_decode(tokenizer, piece_first, 2, 1, &text, &bytes, NULL), CPA_OK);
    CU_ASSERT_STRING_EQUAL(text, "s ");
    free(text);
    cpa_tokenizer_close(tokenizer);
}

static void tokens_have_bytes(void) {
    cpa_tokenizer *tokenizer = open_tokenizer("tiny-llama");
    size_t n = 0;
    CU_ASSERT_EQUAL(cpa_tokenizer_vocabulary(tokenizer), 320);
    const char *token = cpa_tokenizer_token(tokenizer, 126, &n);
    CU_ASSERT(n == 10 && memcmp(token, "<|eot_id|>", n) == 0);
    CU_ASSERT(cpa_tokenizer_is_special(tokenizer, 126) && !cpa_tokenizer_is_special(tokenizer, 125));
    CU_ASSERT_PTR_NULL(cpa_tokenizer_token(tokenizer, 320, &n));
    cpa_tokenizer_close(tokenizer);
    CU_ASSERT_EQUAL(cpa_tokenizer_open(CPA_TEST_DATA "/tiny-yarn", &tokenizer, NULL), CPA_OK);
    CU_ASSERT_PTR_NULL(tokenizer);
}

static const cpa_test TESTS[] = {
    {"ids and texts are those of tokenizers", ids_and_texts_are_those_of_tokenizers},
    {"bytes come back", bytes_come_back},
    {"threads share a tokenizer", threads_share_a_tokenizer},
    {"long words are quick", long_words_are_quick},
    {"what is not UTF-8 is refused", what_is_not_utf8_is_refused},
    {"streams wait for whole characters", streams_wait_for_whole_characters},
    {"an answer keeps its first space", an_answer_keeps_its_first_space},
    {"a byte that is a space stays", a_byte_that_is_a_space_stays},
    {"tokens have bytes", tokens_have_bytes},
};
CPA_TEST_MAIN("tokenizers", TESTS)
