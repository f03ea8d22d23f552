/* Conversations as texts: what transformers makes of them with each template (tests/data/make_chats.py), by Jinja's
 * child, and by the functions of families. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "src/text/chat_template.h"
#include "tests/fixtures/folder_fixture.h"
#include "tests/fixtures/unit.h"

enum { LEAST_TEMPLATES = 40, LEAST_CHATS = 36 };

static const char *text_at(const json_t *object, const char *key) {
    const char *text = json_string_value(json_object_get(object, key));
    return text ? text : "";
}

static void write_text(const cpa_test_folder *folder, const char *name, const char *text) {
    cpa_test_folder_write(folder, name, text, strlen(text));
}

static cpa_chat chat_of(const json_t *file, const json_t *chat) {
    const json_t *asks = json_object_get(chat, "add_generation_prompt");
    const int continues = json_is_true(json_object_get(chat, "continue_final_message"));
    return (cpa_chat){.messages = json_object_get(chat, "messages"),
                      .tools = json_object_get(chat, "tools"),
                      .documents = json_object_get(chat, "documents"),
                      .kwargs = json_object_get(chat, "kwargs"),
                      .add_generation_prompt = asks ? json_is_true(asks) : !continues,
                      .continues_last = continues,
                      .now = json_integer_value(json_object_get(file, "now"))};
}

/* The digest of a text, or "" if it is refused. */
static void digest_of(const cpa_chat_template *chat, const cpa_chat *what, char out[20], cpa_error *err) {
    cpa_bytes text = {.count = 0};
    const cpa_status status = cpa_chat_template_render(chat, what, &text, err);
    CU_ASSERT(status == CPA_OK || (status == CPA_INVALID && err->message[0]));
    out[0] = 0;
    if (status == CPA_OK)
        snprintf(out, 20, "%016" PRIx64, cpa_hash_bytes(CPA_HASH_START, text.data, (size_t)text.count));
    cpa_bytes_release(&text);
}

/* Has its text, unless it lies in a file beside. */
static void write_template(const cpa_test_folder *folder, const json_t *entry) {
    char name[128], text[16384];
    if (json_object_get(entry, "text")) {
        write_text(folder, "chat_template.jinja", text_at(entry, "text"));
        return;
    }
    snprintf(name, sizeof name, CPA_TEST_DATA "/chats/%s.jinja", text_at(entry, "name"));
    FILE *file = fopen(name, "rb");
    CU_ASSERT_PTR_NOT_NULL_FATAL(file);
    const size_t n = fread(text, 1, sizeof text, file);
    fclose(file);
    CU_ASSERT_FATAL(n < sizeof text);
    cpa_test_folder_write(folder, "chat_template.jinja", text, n);
}

/* A family's function gives what the template of its name gives, or refuses. Returns how many it gives. */
static int check_family(const char *folder, const json_t *file, const json_t *entry) {
    const json_t *chats = json_object_get(file, "chats"), *digests = json_object_get(entry, "digests");
    cpa_chat_template *chat = NULL;
    int n = 0;
    CU_ASSERT_EQUAL_FATAL(cpa_chat_template_open(folder, text_at(entry, "family"), &chat, NULL), CPA_OK);
    CU_ASSERT_FALSE(cpa_chat_template_is_slow(chat));
    for (size_t i = 0; i < json_array_size(chats); i++) {
        const cpa_chat what = chat_of(file, json_array_get(chats, i));
        const char *expected = json_string_value(json_array_get(digests, i));
        char digest[20];
        cpa_error err = {CPA_OK, ""};
        digest_of(chat, &what, digest, &err);
        if (!digest[0]) continue;
        CU_ASSERT_PTR_NOT_NULL(expected);
        if (expected) CU_ASSERT_STRING_EQUAL(digest, expected);
        n++;
    }
    cpa_chat_template_close(chat);
    return n;
}

/* The same of Jinja's, without exceptions. Returns how many are wrong. */
static int check_jinja(const char *folder, const json_t *file, const json_t *entry) {
    const json_t *chats = json_object_get(file, "chats"), *digests = json_object_get(entry, "digests");
    cpa_chat_template *chat = NULL;
    cpa_error err = {CPA_OK, ""};
    int wrong = 0;
    CU_ASSERT_EQUAL(cpa_chat_template_open(folder, NULL, &chat, &err), CPA_OK);
    CU_ASSERT_STRING_EQUAL(err.message, "");
    CU_ASSERT_PTR_NOT_NULL_FATAL(chat);
    CU_ASSERT_EQUAL(json_array_size(digests), json_array_size(chats));
    for (size_t i = 0; i < json_array_size(chats); i++) {
        const cpa_chat what = chat_of(file, json_array_get(chats, i));
        const char *expected = json_string_value(json_array_get(digests, i));
        char digest[20];
        digest_of(chat, &what, digest, &err);
        if (strcmp(digest, expected ? expected : "") == 0) continue;
        fprintf(stderr, "%s, chat %zu: %s\n", text_at(entry, "name"), i, digest[0] ? "another text" : err.message);
        wrong++;
    }
    cpa_chat_template_close(chat);
    return wrong;
}

static void templates_give_what_transformers_gives(void) {
    json_t *file = json_load_file(CPA_TEST_DATA "/chats/expected.json", 0, NULL);
    const json_t *templates = json_object_get(file, "templates");
    char *tokens = json_dumps(json_object_get(file, "tokens"), 0);
    cpa_test_folder folder = cpa_test_folder_make();
    int families = 0;
    setenv("TZ", "UTC", 1);
    CPA_ASSERT_ORDER(json_array_size(templates), >=, LEAST_TEMPLATES);
    CPA_ASSERT_ORDER(json_array_size(json_object_get(file, "chats")), >=, LEAST_CHATS);
    write_text(&folder, "tokenizer_config.json", tokens);
    for (size_t i = 0; i < json_array_size(templates); i++) {
        const json_t *entry = json_array_get(templates, i);
        write_template(&folder, entry);
        CU_ASSERT_EQUAL(check_jinja(folder.path, file, entry), 0);
        if (!json_object_get(entry, "family")) continue;
        CPA_ASSERT_ORDER(check_family(folder.path, file, entry), >=, 6);
        families++;
    }
    CU_ASSERT_EQUAL(families, 14);
    cpa_test_folder_remove(&folder);
    free(tokens);
    json_decref(file);
}

static const cpa_test TESTS[] = {
    {"templates give what transformers gives", templates_give_what_transformers_gives},
};
CPA_TEST_MAIN("chats", TESTS)
