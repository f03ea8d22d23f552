/* Files of tokenizers that are not as they should be: each is refused in a line that says where, and none does harm. */
#include "src/text/tokenizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "base/hash.h"
#include "src/text/utf8.h"
#include "tests/fixtures/folder_fixture.h"
#include "tests/fixtures/unit.h"

/* All of a file of tests/data; aborts if there is none. */
static char *read_data(const char *name, size_t *bytes) {
    char path[512];
    snprintf(path, sizeof path, CPA_TEST_DATA "/%s", name);
    FILE *file = fopen(path, "rb");
    char *text = malloc(1 << 16);
    *bytes = file && text ? fread(text, 1, 1 << 16, file) : 0;
    if (*bytes == 0 || *bytes == 1 << 16) abort();
    fclose(file);
    return text;
}

static cpa_status open_json(const cpa_test_folder *folder, const json_t *file, cpa_tokenizer **out, cpa_error *err) {
    char *text = json_dumps(file, 0);
    cpa_test_folder_write(folder, "tokenizer.json", text, strlen(text));
    free(text);
    return cpa_tokenizer_open(folder->path, out, err);
}

/* The file with this value, a text of JSON, under a key, NULL: without the key, is refused so. */
static void expect_refused(const cpa_test_folder *folder, json_t *file, const char *key, const char *value,
                           cpa_status status, const char *message) {
    cpa_tokenizer *tokenizer = NULL;
    cpa_error err = {CPA_OK, ""};
    json_object_del(file, key);
    if (value) json_object_set_new(file, key, json_loads(value, 0, NULL));
    CU_ASSERT_EQUAL(open_json(folder, file, &tokenizer, &err), status);
    CU_ASSERT_EQUAL(err.status, status);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, message));
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "/tokenizer.json: "));
    CU_ASSERT_PTR_NULL(tokenizer);
}

/* A tokenizer that opens does no harm: what it makes of a text are ids of its own, and texts in UTF-8. */
static void use(cpa_tokenizer *tokenizer) {
    static const char text[] = "Hello,\n\n world's  \xe4\xbd\xa0 12345 <s> <|eot_id|> \xf0\x9f\x99\x82\t x ";
    cpa_token_list ids = {.count = 0};
    char *back = NULL;
    size_t bytes = 0;
    if (cpa_tokenizer_encode(tokenizer, text, sizeof text - 1, 1, &ids, NULL) == CPA_OK) {
        CU_ASSERT_EQUAL(cpa_tokenizer_decode(tokenizer, ids.ids, ids.count, 0, &back, &bytes, NULL), CPA_OK);
        CU_ASSERT_EQUAL(cpa_utf8_valid(back, bytes), bytes);
        free(back);
    }
    for (uint32_t id = 0; id < 500; id++) { /* all that there are in these files */
        CU_ASSERT_EQUAL(cpa_tokenizer_decode(tokenizer, &id, 1, 0, &back, &bytes, NULL), CPA_OK);
        CU_ASSERT_EQUAL(cpa_utf8_valid(back, bytes), bytes);
        free(back);
    }
    cpa_token_list_release(&ids);
    cpa_tokenizer_close(tokenizer);
}

static void what_is_not_there_is_refused(void) {
    static const struct {
        const char *key, *value; /* of the file, as JSON; NULL: removed */
        cpa_status status;
        const char *message;
    } cases[] = {
        {"model", NULL, CPA_INVALID, "model: found nothing, expected an object"},
        {"model", "{\"type\": \"Unigram\"}", CPA_UNSUPPORTED, "model.type: found \"Unigram\", expected BPE"},
        {"model", "{\"type\": \"BPE\", \"vocab\": {\"a\": -1}, \"merges\": []}", CPA_INVALID,
         "model.vocab.'a': expected an id from 0 to"},
        {"model", "{\"type\": \"BPE\", \"vocab\": {\"a\": 0}, \"merges\": [\"a a\"]}", CPA_INVALID,
         "model.merges[0]: expected two tokens of the vocabulary that join to a third"},
        {"model", "{\"type\": \"BPE\", \"vocab\": {\"a\": 0, \"aa\": 1}, \"merges\": [\"a a\", [\"a\"]]}", CPA_INVALID,
         "model.merges[1]: "},
        {"model", "{\"type\": \"BPE\", \"vocab\": {}, \"merges\": [], \"end_of_word_suffix\": \"</w>\"}",
         CPA_UNSUPPORTED, "model.end_of_word_suffix: found \"</w>\", expected nothing"},
        {"model", "{\"type\": \"BPE\", \"vocab\": {}, \"merges\": [], \"dropout\": 0.1}", CPA_UNSUPPORTED,
         "model.dropout"},
        {"model", "{\"type\": \"BPE\", \"vocab\": {}, \"merges\": [], \"unk_token\": \"u\"}", CPA_INVALID,
         "model.unk_token: found \"u\", expected a token of the vocabulary"},
        {"normalizer", "{\"type\": \"Lowercase\"}", CPA_UNSUPPORTED,
         "normalizer.type: found \"Lowercase\", expected NFC"},
        {"normalizer", "{\"type\": \"Sequence\", \"normalizers\": [{\"type\": \"NFC\"}, {\"type\": \"Strip\"}]}",
         CPA_UNSUPPORTED, "normalizer.normalizers[1].type: found \"Strip\""},
        {"pre_tokenizer", "{\"type\": \"Whitespace\"}", CPA_UNSUPPORTED, "pre_tokenizer.type: found \"Whitespace\""},
        {"pre_tokenizer", "{\"type\": \"Split\", \"pattern\": {\"Regex\": \"a\"}, \"behavior\": \"Other\"}",
         CPA_UNSUPPORTED, "pre_tokenizer.behavior: found \"Other\""},
        {"pre_tokenizer", "{\"type\": \"Split\", \"pattern\": {\"Regex\": \"[a[b]]\"}, \"behavior\": \"Isolated\"}",
         CPA_UNSUPPORTED, "pre_tokenizer.pattern.Regex: found a pattern with '[b]]'"},
        {"pre_tokenizer", "{\"type\": \"Split\", \"pattern\": {\"Regex\": \"a\\\\b\"}, \"behavior\": \"Isolated\"}",
         CPA_UNSUPPORTED, "Regex: found a pattern with '\\b'"},
        {"pre_tokenizer", "{\"type\": \"Split\", \"pattern\": {\"Regex\": \"(a\"}, \"behavior\": \"Isolated\"}",
         CPA_UNSUPPORTED, "Regex: found a pattern that does not compile: missing closing parenthesis"},
        {"pre_tokenizer", "{\"type\": \"Split\", \"behavior\": \"Isolated\"}", CPA_INVALID,
         "pre_tokenizer.pattern: found nothing, expected an object"},
        {"normalizer", "{\"type\": \"Replace\", \"pattern\": {\"Regex\": \"a*\"}, \"content\": \"b\"}", CPA_UNSUPPORTED,
         "normalizer.pattern: found {\"Regex\":\"a*\"}, expected one that matches at least a character"},
        {"pre_tokenizer",
         "{\"type\": \"Split\", \"pattern\": {\"Regex\": \"[\xf0\xb1\x8d\x90-\xf0\xb2\x8e\xaf]\"}, \"behavior\": "
         "\"Isolated\"}",
         CPA_UNSUPPORTED, "pre_tokenizer.pattern.Regex: found a pattern with '\xf0\xb1\x8d\x90"},
        {"pre_tokenizer",
         "{\"type\": \"Split\", \"pattern\": {\"Regex\": \"\\\\x{31350}\"}, \"behavior\": \"Isolated\"}",
         CPA_UNSUPPORTED, "pre_tokenizer.pattern.Regex: found a pattern with '\\x{31350}'"},
        {"pre_tokenizer",
         "{\"type\": \"Sequence\", \"pretokenizers\": [{\"type\": \"Digits\"}, "
         "{\"type\": \"Metaspace\", \"replacement\": \"_\", \"prepend_scheme\": \"first\"}]}",
         CPA_UNSUPPORTED,
         "pretokenizers[1].prepend_scheme: found \"first\", expected always or never behind another step"},
        {"post_processor", "{\"type\": \"BertProcessing\"}", CPA_UNSUPPORTED, "post_processor.type: found"},
        {"post_processor", "{\"type\": \"TemplateProcessing\", \"single\": []}", CPA_UNSUPPORTED,
         "post_processor.single: found [], expected special tokens around one Sequence"},
        {"decoder", NULL, CPA_UNSUPPORTED, "decoder: found nothing, expected an object"},
        {"decoder", "{\"type\": \"WordPiece\"}", CPA_UNSUPPORTED, "decoder.type: found \"WordPiece\""},
        {"decoder", "{\"type\": \"Strip\", \"content\": \" \", \"start\": 1, \"stop\": 0}", CPA_UNSUPPORTED,
         "decoder.type: found \"Strip\", expected one Strip, after Fuse"},
        {"decoder", "{\"type\": \"Sequence\", \"decoders\": [{\"type\": \"Fuse\"}, {\"type\": \"ByteFallback\"}]}",
         CPA_UNSUPPORTED,
         "decoder.decoders[1].type: found \"ByteFallback\", expected no step of single tokens behind Fuse"},
        {"decoder",
         "{\"type\": \"Sequence\", \"decoders\": [{\"type\": \"Replace\", \"pattern\": {\"String\": \"_\"}, "
         "\"content\": \" \"}, "
         "{\"type\": \"Metaspace\", \"replacement\": \"_\"}]}",
         CPA_UNSUPPORTED, "expected Metaspace without another, and without Replace"},
        {"added_tokens", "[{\"id\": 99999999, \"content\": \"x\"}]", CPA_INVALID, "added_tokens[0].id: found 99999999"},
        {"added_tokens", "[3]", CPA_INVALID, "added_tokens[0]: found no object"},
        {"added_tokens", "{}", CPA_INVALID, "added_tokens: found {}, expected a list"},
    };
    size_t bytes;
    char *text = read_data("tiny-llama/tokenizer.json", &bytes);
    cpa_test_folder folder = cpa_test_folder_make();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        json_t *file = json_loadb(text, bytes, 0, NULL);
        expect_refused(&folder, file, cases[i].key, cases[i].value, cases[i].status, cases[i].message);
        json_decref(file);
    }
    cpa_test_folder_remove(&folder);
    free(text);
}

/* Where a normalizer makes the beginning of a text shorter, the package does not take it for the beginning any more; and
 * a token of which nothing is left it finds everywhere. */
static void what_a_normalizer_takes_away_is_refused(void) {
    static const struct {
        const char *key, *value, *message;
    } cases[] = {
        {"pre_tokenizer", "{\"type\": \"Metaspace\", \"replacement\": \"_\", \"prepend_scheme\": \"first\"}",
         "expected no prepend_scheme first behind a normalizer that makes texts shorter"},
        {"added_tokens", "[{\"id\": 3, \"content\": \"  \", \"normalized\": true}]",
         "added_tokens[0].content: found \"  \", expected a text of which the normalizer leaves something"},
    };
    size_t bytes;
    char *text = read_data("tiny-llama/tokenizer.json", &bytes);
    cpa_test_folder folder = cpa_test_folder_make();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        json_t *file = json_loadb(text, bytes, 0, NULL);
        json_object_set_new(file, "normalizer",
                            json_pack("{s:s,s:{s:s},s:s}", "type", "Replace", "pattern", "String", " ", "content", ""));
        expect_refused(&folder, file, cases[i].key, cases[i].value, CPA_UNSUPPORTED, cases[i].message);
        json_decref(file);
    }
    cpa_test_folder_remove(&folder);
    free(text);
}

/* Spaces that a token of Metaspace's has itself stay, at the beginning too. */
static void a_first_token_keeps_spaces_of_its_own(void) {
    size_t bytes;
    char *text = read_data("text/metaspace/tokenizer.json", &bytes), *back = NULL;
    json_t *file = json_loadb(text, bytes, 0, NULL);
    const uint32_t spaced = 700, marked = (uint32_t)json_integer_value(json_object_get(
                                     json_object_get(json_object_get(file, "model"), "vocab"), "\xe2\x96\x81"));
    cpa_test_folder folder = cpa_test_folder_make();
    cpa_tokenizer *tokenizer = NULL;
    json_array_append_new(json_object_get(file, "added_tokens"), json_pack("{s:i,s:s}", "id", 700, "content", " x"));
    CU_ASSERT_EQUAL_FATAL(open_json(&folder, file, &tokenizer, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_tokenizer_decode(tokenizer, &spaced, 1, 0, &back, &bytes, NULL), CPA_OK);
    CU_ASSERT_STRING_EQUAL(back, " x");
    free(back);
    CU_ASSERT_EQUAL(cpa_tokenizer_decode(tokenizer, &marked, 1, 0, &back, &bytes, NULL), CPA_OK);
    CU_ASSERT_STRING_EQUAL(back, "");
    free(back);
    cpa_tokenizer_close(tokenizer);
    cpa_test_folder_remove(&folder);
    json_decref(file);
    free(text);
}

/* Every value of a file, those of large tables aside, becomes another in turn. */
static void replace_each(json_t *file, json_t *value, const cpa_test_folder *folder, int *opened, int *refused) {
    static const char *const others[] = {"null", "7", "\"x\"", "[]", "{}", "true", "\"\""};
    const char *key;
    json_t *member;
    size_t n = json_is_object(value) ? json_object_size(value) : json_array_size(value);
    char *keys[64];
    if (n > sizeof keys / sizeof *keys) return;
    n = 0;
    json_object_foreach(value, key, member) keys[n++] = strdup(key);
    if (json_is_array(value)) n = json_array_size(value);
    for (size_t i = 0; i < n; i++) {
        member = json_incref(json_is_array(value) ? json_array_get(value, i) : json_object_get(value, keys[i]));
        for (size_t o = 0; o < sizeof others / sizeof *others; o++) {
            json_t *other = json_loads(others[o], JSON_DECODE_ANY, NULL);
            cpa_tokenizer *tokenizer = NULL;
            cpa_error err = {CPA_OK, ""};
            if (json_is_array(value)) {
                json_array_set_new(value, i, other);
            } else {
                json_object_set_new(value, keys[i], other);
            }
            const cpa_status status = open_json(folder, file, &tokenizer, &err);
            CU_ASSERT(status == CPA_OK || (!tokenizer && strstr(err.message, "/tokenizer.json: ")));
            if (status == CPA_OK) use(tokenizer);
            *(status == CPA_OK ? opened : refused) += 1;
        }
        if (json_is_array(value)) {
            json_array_set(value, i, member);
        } else {
            json_object_set(value, keys[i], member);
        }
        replace_each(file, member, folder, opened, refused);
        json_decref(member);
        if (!json_is_array(value)) free(keys[i]);
    }
}

static void other_values_do_no_harm(void) {
    static const char *const names[] = {"tiny-llama/tokenizer.json", "text/llama2/tokenizer.json"};
    cpa_test_folder folder = cpa_test_folder_make();
    for (int i = 0; i < 2; i++) {
        size_t bytes;
        int opened = 0, refused = 0;
        char *text = read_data(names[i], &bytes);
        json_t *file = json_loadb(text, bytes, 0, NULL), *model = json_object_get(file, "model");
        json_object_set_new(model, "vocab", json_loads("{\"a\": 0, \"<unk>\": 1, \"aa\": 2}", 0, NULL));
        json_object_set_new(model, "merges", json_loads("[\"a a\"]", 0, NULL));
        replace_each(file, file, &folder, &opened, &refused);
        CU_ASSERT(opened > 100 && refused > 100);
        json_decref(file);
        free(text);
    }
    cpa_test_folder_remove(&folder);
}

/* Files that are cut off, or in which some bytes are others. */
static void change_bytes(const char *data, const char *name, int times) {
    cpa_test_folder folder = cpa_test_folder_make();
    uint64_t random = 7;
    size_t bytes;
    char *text = read_data(data, &bytes), *changed = malloc(bytes);
    for (int i = 0; i < times; i++) {
        cpa_tokenizer *tokenizer = NULL;
        cpa_error err = {CPA_OK, ""};
        const size_t n = i % 3 == 0 ? cpa_mix64(random += CPA_GOLDEN) % bytes : bytes;
        memcpy(changed, text, bytes);
        for (int k = 0; i % 3 != 0 && k <= i % 5; k++) {
            const uint64_t r = cpa_mix64(random += CPA_GOLDEN);
            changed[r % bytes] = i % 2 ? (char)(r >> 40) : text[(r >> 32) % bytes];
        }
        cpa_test_folder_write(&folder, name, changed, n);
        const cpa_status status = cpa_tokenizer_open(folder.path, &tokenizer, &err);
        CU_ASSERT(status == CPA_OK || (!tokenizer && err.message[0]));
        if (status == CPA_OK) use(tokenizer);
    }
    cpa_test_folder_remove(&folder);
    free(changed);
    free(text);
}

static void other_bytes_do_no_harm(void) {
    change_bytes("tiny-llama/tokenizer.json", "tokenizer.json", 600);
    change_bytes("text/pieces_bpe/tokenizer.model", "tokenizer.model", 300);
}

/* A pattern that takes forever on some text ends with an error. */
static void endless_patterns_end(void) {
    size_t bytes;
    char *text = read_data("tiny-llama/tokenizer.json", &bytes), as[64];
    json_t *file = json_loadb(text, bytes, 0, NULL);
    cpa_test_folder folder = cpa_test_folder_make();
    cpa_tokenizer *tokenizer = NULL;
    cpa_token_list ids = {.count = 0};
    cpa_error err = {CPA_OK, ""};
    json_object_set_new(
        file, "pre_tokenizer",
        json_pack("{s:s,s:{s:s},s:s}", "type", "Split", "pattern", "Regex", "(?:a|a)*[bc]", "behavior", "Isolated"));
    CU_ASSERT_EQUAL_FATAL(open_json(&folder, file, &tokenizer, &err), CPA_OK);
    memset(as, 'a', sizeof as);
    CU_ASSERT_EQUAL(cpa_tokenizer_encode(tokenizer, as, sizeof as, 0, &ids, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "cannot be cut into words at byte 0: match limit exceeded"));
    CU_ASSERT_EQUAL(ids.count, 0);
    cpa_token_list_release(&ids);
    cpa_tokenizer_close(tokenizer);
    cpa_test_folder_remove(&folder);
    json_decref(file);
    free(text);
}

static const cpa_test TESTS[] = {
    {"what is not there is refused", what_is_not_there_is_refused},
    {"what a normalizer takes away is refused", what_a_normalizer_takes_away_is_refused},
    {"a first token keeps spaces of its own", a_first_token_keeps_spaces_of_its_own},
    {"other values do no harm", other_values_do_no_harm},
    {"other bytes do no harm", other_bytes_do_no_harm},
    {"endless patterns end", endless_patterns_end},
};
CPA_TEST_MAIN("files of tokenizers", TESTS)
