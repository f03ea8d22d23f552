/* Chat templates: which a folder has, and what transformers makes of chats with it (tests/data/make_text.py). */
#include "src/text/chat_template.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <jansson.h>

#include "tests/fixtures/folder_fixture.h"
#include "tests/fixtures/unit.h"

enum { MAX_MESSAGES = 8 };

static void write_json(const cpa_test_folder *folder, const char *name, const json_t *value) {
    char *text = json_dumps(value, 0);
    cpa_test_folder_write(folder, name, text, strlen(text));
    free(text);
}

static size_t messages_of(const json_t *chat, cpa_chat_message out[MAX_MESSAGES]) {
    const size_t n = json_array_size(chat);
    for (size_t i = 0; i < n && i < MAX_MESSAGES; i++) {
        const json_t *pair = json_array_get(chat, i);
        out[i] =
            (cpa_chat_message){json_string_value(json_array_get(pair, 0)), json_string_value(json_array_get(pair, 1))};
    }
    return n;
}

/* What a template makes of all chats, with and without what an answer follows. */
static void check_texts(const cpa_chat_template *chat, const json_t *chats, const json_t *texts) {
    for (size_t i = 0; i < json_array_size(chats); i++) {
        cpa_chat_message messages[MAX_MESSAGES];
        const size_t n = messages_of(json_array_get(chats, i), messages);
        for (int ask = 0; ask < 2; ask++) {
            const char *expected = json_string_value(json_array_get(json_array_get(texts, i), (size_t)ask));
            char *text = NULL;
            cpa_error err = {CPA_OK, ""};
            const cpa_status status = cpa_chat_template_render(chat, messages, n, ask, &text, &err);
            CU_ASSERT_EQUAL(status, expected ? CPA_OK : CPA_INVALID);
            if (status == CPA_OK && expected) CU_ASSERT_STRING_EQUAL(text, expected);
            if (status != CPA_OK) CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "messages: found"));
            free(text);
        }
    }
}

static void templates_are_recognised_and_rendered(void) {
    json_t *file = json_load_file(CPA_TEST_DATA "/text/chat.json", 0, NULL);
    const json_t *templates = json_object_get(file, "templates"), *chats = json_object_get(file, "chats");
    cpa_test_folder folder = cpa_test_folder_make();
    CU_ASSERT(json_array_size(templates) >= 17 && json_array_size(chats) >= 9);
    for (size_t i = 0; i < json_array_size(templates); i++) {
        const json_t *entry = json_array_get(templates, i);
        json_t *config =
            json_pack("{s:O,s:{s:O},s:O}", "bos_token", json_object_get(file, "bos"), "eos_token", "content",
                      json_object_get(file, "eos"), "chat_template", json_object_get(entry, "template"));
        cpa_chat_template *chat = NULL;
        cpa_error err = {CPA_OK, ""};
        write_json(&folder, "tokenizer_config.json", config);
        CU_ASSERT_EQUAL(cpa_chat_template_open(folder.path, NULL, &chat, &err), CPA_OK);
        CU_ASSERT_STRING_EQUAL(err.message, "");
        CU_ASSERT_PTR_NOT_NULL_FATAL(chat);
        CU_ASSERT_STRING_EQUAL(cpa_chat_template_name(chat), json_string_value(json_object_get(entry, "name")));
        check_texts(chat, chats, json_object_get(entry, "texts"));
        cpa_chat_template_close(chat);
        json_decref(config);
    }
    cpa_test_folder_remove(&folder);
    json_decref(file);
}

/* chat_template.jinja goes before tokenizer_config.json, and a name before both. */
static void the_jinja_file_and_the_name_go_first(void) {
    static const char config[] =
        "{\"bos_token\": \"<s>\", \"chat_template\": [{\"name\": \"tools\", \"template\": \"x\"}, {\"name\": "
        "\"default\", \"template\": \"{{'<|im_start|>' + message.role + '\\\\n' + message.content + "
        "'<|im_end|>\\\\n'}}\"}]}";
    static const char jinja[] =
        "{{bos_token}}{% for message in messages %}{{ '<|start_header_id|>' + message.role +\n"
        "'<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}{% endfor %}";
    static const char *const names[] = {"chatml", "llama3", "gemma"};
    cpa_test_folder folder = cpa_test_folder_make();
    cpa_chat_template *chat = NULL;
    cpa_test_folder_write(&folder, "tokenizer_config.json", config, strlen(config));
    for (int i = 0; i < 3; i++) {
        if (i == 1) cpa_test_folder_write(&folder, "chat_template.jinja", jinja, strlen(jinja));
        CU_ASSERT_EQUAL_FATAL(cpa_chat_template_open(folder.path, i == 2 ? "gemma" : NULL, &chat, NULL), CPA_OK);
        CU_ASSERT_PTR_NOT_NULL_FATAL(chat);
        CU_ASSERT_STRING_EQUAL(cpa_chat_template_name(chat), names[i]);
        cpa_chat_template_close(chat);
    }
    cpa_test_folder_remove(&folder);
}

static void the_date_is_that_of_the_day(void) {
    static const char jinja[] =
        "{% set date_string = strftime_now('%d %b %Y') %}{{bos_token + 'Cutting Knowledge Date: December 2023\\n'}}"
        "{{'Today Date: ' + date_string + '\\n\\n'}}{{ '<|start_header_id|>' + message.role +\n"
        "'<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}";
    const cpa_chat_message message = {"user", "x"};
    cpa_test_folder folder = cpa_test_folder_make();
    cpa_chat_template *chat = NULL;
    const time_t now = time(NULL);
    char year[16], *text = NULL;
    cpa_test_folder_write(&folder, "chat_template.jinja", jinja, strlen(jinja));
    CU_ASSERT_EQUAL_FATAL(cpa_chat_template_open(folder.path, NULL, &chat, NULL), CPA_OK);
    CU_ASSERT_PTR_NOT_NULL_FATAL(chat);
    CU_ASSERT_EQUAL(cpa_chat_template_render(chat, &message, 1, 1, &text, NULL), CPA_OK);
    strftime(year, sizeof year, " %Y\n", localtime(&now));
    CU_ASSERT_PTR_NOT_NULL(strstr(text, year));
    free(text);
    cpa_chat_template_close(chat);
    cpa_test_folder_remove(&folder);
}

static void other_templates_are_refused(void) {
    static const struct {
        const char *config;
        cpa_status status;
        const char *message;
    } cases[] = {
        {"{\"chat_template\": \"{{ messages }}\"}", CPA_UNSUPPORTED, "expected one of qwen3, qwen, qwen2, chatml"},
        {"{\"chat_template\": \"{{'<|im_start|>' + message.role + '\\\\n' + message.content + '<|im_end|>\\\\n'}}"
         "{% if tools %}{% endif %}\"}",
         CPA_UNSUPPORTED, "chat_template: found one that is not known"},
        {"{\"chat_template\": \"{{ '\"}", CPA_UNSUPPORTED, "not known"},
        {"{\"chat_template\": \"{{'<|im_start|>system\\nYou are ' + name + '<|im_end|>\\n'}}"
         "{{'<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n'}}\"}",
         CPA_UNSUPPORTED, "chat_template: found one that is not known"},
        {"{\"chat_template\": 7}", CPA_INVALID, "chat_template: found 7, expected a template"},
        {"{\"chat_template\": [{\"name\": \"tools\"}]}", CPA_INVALID, "one named default"},
        {"{", CPA_INVALID, "tokenizer_config.json:1:"},
        {"{\"bos_token\": 3}", CPA_OK, ""},
    };
    cpa_test_folder folder = cpa_test_folder_make();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cpa_chat_template *chat = NULL;
        cpa_error err = {CPA_OK, ""};
        cpa_test_folder_write(&folder, "tokenizer_config.json", cases[i].config, strlen(cases[i].config));
        CU_ASSERT_EQUAL(cpa_chat_template_open(folder.path, NULL, &chat, &err), cases[i].status);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, cases[i].message));
        CU_ASSERT_PTR_NULL(chat);
    }
    cpa_chat_template *chat = NULL;
    cpa_error err = {CPA_OK, ""};
    CU_ASSERT_EQUAL(cpa_chat_template_open(folder.path, "llama3", &chat, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "bos_token: found 3, expected a token"));
    CU_ASSERT_EQUAL(cpa_chat_template_open(folder.path, "none", &chat, &err), CPA_UNSUPPORTED);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "found 'none', expected one of qwen3, "));
    cpa_test_folder_remove(&folder);
}

static void texts_are_checked(void) {
    const cpa_chat_message bad = {"user", "a\xff"}, role = {"tool", "a"};
    cpa_chat_template *chat = NULL;
    cpa_error err = {CPA_OK, ""};
    char *text = NULL;
    CU_ASSERT_EQUAL_FATAL(cpa_chat_template_open(CPA_TEST_DATA "/tiny-llama", NULL, &chat, &err), CPA_OK);
    CU_ASSERT_PTR_NOT_NULL_FATAL(chat);
    CU_ASSERT_EQUAL(cpa_chat_template_render(chat, &bad, 1, 1, &text, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "messages[0].content: the text is not UTF-8"));
    CU_ASSERT_EQUAL(cpa_chat_template_render(chat, &role, 1, 1, &text, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "a role that is none of system, user and assistant"));
    CU_ASSERT_EQUAL(cpa_chat_template_render(chat, &role, 0, 1, &text, &err), CPA_INVALID);
    CU_ASSERT_PTR_NULL(text);
    cpa_chat_template_close(chat);
    CU_ASSERT_EQUAL(cpa_chat_template_open(CPA_TEST_DATA "/tiny-yarn", NULL, &chat, &err), CPA_OK);
    CU_ASSERT_PTR_NULL(chat);
}

static const cpa_test TESTS[] = {
    {"templates are recognised and rendered", templates_are_recognised_and_rendered},
    {"the jinja file and the name go first", the_jinja_file_and_the_name_go_first},
    {"the date is that of the day", the_date_is_that_of_the_day},
    {"other templates are refused", other_templates_are_refused},
    {"texts are checked", texts_are_checked},
};
CPA_TEST_MAIN("chat templates", TESTS)
