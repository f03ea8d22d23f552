/* Chat templates: where they are from, what they know of a folder, and what is refused. */
#include "src/text/chat_template.h"

#include <stdio.h>
#include <string.h>

#include "tests/fixtures/folder_fixture.h"
#include "tests/fixtures/unit.h"

static void write_text(const cpa_test_folder *folder, const char *name, const char *text) {
    cpa_test_folder_write(folder, name, text, strlen(text));
}

/* The text of one question, or the reason that there is none. */
static void check_text(const cpa_chat_template *chat, const char *tools, const char *expected) {
    json_t *messages = json_pack("[{s:s,s:s}]", "role", "user", "content", "Hi");
    json_t *listed = json_loads(tools, 0, NULL);
    const cpa_chat what = {.messages = messages, .tools = listed};
    cpa_bytes text = {.count = 0};
    cpa_error err = {CPA_OK, ""};
    const cpa_status status = cpa_chat_template_render(chat, &what, &text, &err);
    if (status == CPA_OK) {
        CU_ASSERT(cpa_bytes_add(&text, "", 1));
        CU_ASSERT_STRING_EQUAL(text.data, expected);
    } else {
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, expected));
    }
    cpa_bytes_release(&text);
    json_decref(messages);
    json_decref(listed);
}

static void check_folder(const cpa_test_folder *folder, const char *name, const char *says, const char *tools,
                         const char *expected) {
    cpa_chat_template *chat = NULL;
    cpa_error err = {CPA_OK, ""};
    CU_ASSERT_EQUAL(cpa_chat_template_open(folder->path, name, &chat, &err), CPA_OK);
    CU_ASSERT_STRING_EQUAL(err.message, "");
    CU_ASSERT_PTR_NOT_NULL_FATAL(chat);
    CU_ASSERT_STRING_EQUAL(cpa_chat_template_name(chat), says);
    check_text(chat, tools, expected);
    cpa_chat_template_close(chat);
}

/* chat_template.jinja goes before tokenizer_config.json, and a name or a file before both. */
static void names_and_files_go_first(void) {
    static const char config[] =
        "{\"bos_token\": \"<s>\", \"chat_template\": [{\"name\": \"tool_use\", \"template\": \"with "
        "{{tools|length}}\"}, {\"name\": \"default\", \"template\": \"{{bos_token}}of the configuration\"}]}";
    static const char tool[] = "[{\"type\": \"function\"}]";
    cpa_test_folder folder = cpa_test_folder_make();
    char path[512];
    snprintf(path, sizeof path, "%s/other.txt", folder.path);
    write_text(&folder, "tokenizer_config.json", config);
    check_folder(&folder, NULL, "tokenizer_config.json", "", "<s>of the configuration");
    check_folder(&folder, NULL, "tokenizer_config.json", tool, "with 1");
    write_text(&folder, "chat_template.jinja", "{{bos_token}}{{messages[0].content}} of the file");
    check_folder(&folder, NULL, "chat_template.jinja", tool, "<s>Hi of the file");
    check_folder(&folder, "gemma", "gemma", "", "<s><start_of_turn>user\nHi<end_of_turn>\n");
    check_folder(&folder, "gemma", "gemma", tool,
                 "tools: the chat template gemma, which was chosen by name, has texts");
    write_text(&folder, "other.txt", "{{eos_token}}{{messages[0].content}}{{raise_exception('no\\nway') if tools}}");
    check_folder(&folder, path, "other.txt", "", "Hi");
    check_folder(&folder, path, "other.txt", tool, "messages: the chat template: no\\nway");
    cpa_test_folder_remove(&folder);
}

/* Tokens that templates name: of the configuration, of an old one's other file, and by the class where both are silent. */
static void special_tokens_have_their_names(void) {
    static const char jinja[] = "{{bos_token}}|{{eos_token}}|{{unk_token}}|{{image_token}}|{{add_bos_token}}";
    cpa_test_folder folder = cpa_test_folder_make();
    write_text(&folder, "chat_template.jinja", jinja);
    check_folder(&folder, NULL, "chat_template.jinja", "", "||||");
    write_text(&folder, "tokenizer_config.json",
               "{\"bos_token\": {\"content\": \"<b>\"}, \"eos_token\": null, \"image_token\": \"<i>\", "
               "\"add_bos_token\": true, \"tokenizer_class\": \"LlamaTokenizerFast\"}");
    check_folder(&folder, NULL, "chat_template.jinja", "", "<b>||<unk>|<i>|");
    write_text(&folder, "special_tokens_map.json", "{\"eos_token\": {\"content\": \"<e>\"}, \"bos_token\": \"<B>\"}");
    check_folder(&folder, NULL, "chat_template.jinja", "", "<B>|<e>|<unk>|<i>|");
    write_text(&folder, "tokenizer_config.json", "{\"bos_token\": \"<b>\", \"added_tokens_decoder\": {}}");
    check_folder(&folder, NULL, "chat_template.jinja", "", "<b>||||");
    cpa_test_folder_remove(&folder);
}

static void what_is_no_template_is_refused(void) {
    static const struct {
        const char *config;
        cpa_status status;
        const char *message;
    } cases[] = {
        {"{\"chat_template\": \"{{ messages }\"}", CPA_UNSUPPORTED, "chat_template: line 1: unexpected '}'"},
        {"{\"chat_template\": \"{% for x in y %}\\n{{ x }}\"}", CPA_UNSUPPORTED,
         "chat_template: line 2: Unexpected end"},
        {"{\"chat_template\": \"{% include 'x' | bad %}\"}", CPA_UNSUPPORTED, "No filter named 'bad'"},
        {"{\"chat_template\": 7}", CPA_INVALID, "chat_template: found 7, expected a template"},
        {"{\"chat_template\": [{\"name\": \"tools\"}]}", CPA_INVALID, "one named default"},
        {"{", CPA_INVALID, "tokenizer_config.json:1:"},
        {"{\"bos_token\": 3}", CPA_INVALID, "bos_token: found 3, expected a token"},
        {"{\"bos_token\": null}", CPA_OK, ""},
    };
    cpa_test_folder folder = cpa_test_folder_make();
    cpa_chat_template *chat = NULL;
    cpa_error err = {CPA_OK, ""};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        err.message[0] = 0;
        write_text(&folder, "tokenizer_config.json", cases[i].config);
        CU_ASSERT_EQUAL(cpa_chat_template_open(folder.path, NULL, &chat, &err), cases[i].status);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, cases[i].message));
        if (!strstr(err.message, cases[i].message)) fprintf(stderr, "%s\n", err.message);
        CU_ASSERT_PTR_NULL(chat);
    }
    CU_ASSERT_EQUAL(cpa_chat_template_open(folder.path, "none", &chat, &err), CPA_UNSUPPORTED);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "found 'none', expected a file or one of qwen3, "));
    cpa_test_folder_write(&folder, "chat_template.jinja", "\xff", 1);
    CU_ASSERT_EQUAL(cpa_chat_template_open(folder.path, NULL, &chat, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "chat_template.jinja: found text that is not UTF-8"));
    cpa_test_folder_remove(&folder);
}

static void roles_that_a_function_does_not_know_are_refused(void) {
    static const char *const chats[] = {"[]", "[{\"role\": \"tool\", \"content\": \"x\"}]", "[{\"role\": \"user\"}]"};
    static const char *const messages[] = {"found none", "a role that is none of system, user and assistant",
                                           "a message without a text"};
    cpa_chat_template *chat = NULL;
    CU_ASSERT_EQUAL_FATAL(cpa_chat_template_open(CPA_TEST_DATA "/tiny-llama", "llama3", &chat, NULL), CPA_OK);
    for (int i = 0; i < 3; i++) {
        json_t *array = json_loads(chats[i], 0, NULL);
        const cpa_chat what = {.messages = array};
        cpa_bytes text = {.count = 0};
        cpa_error err = {CPA_OK, ""};
        CU_ASSERT_EQUAL(cpa_chat_template_render(chat, &what, &text, &err), CPA_INVALID);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, messages[i]));
        CU_ASSERT_EQUAL(text.count, 0);
        cpa_bytes_release(&text);
        json_decref(array);
    }
    cpa_chat_template_close(chat);
    CU_ASSERT_EQUAL(cpa_chat_template_open(CPA_TEST_DATA "/tiny-yarn", NULL, &chat, NULL), CPA_OK);
    CU_ASSERT_PTR_NULL(chat);
}

static const cpa_test TESTS[] = {
    {"names and files go first", names_and_files_go_first},
    {"special tokens have their names", special_tokens_have_their_names},
    {"what is no template is refused", what_is_no_template_is_refused},
    {"roles that a function does not know are refused", roles_that_a_function_does_not_know_are_refused},
};
CPA_TEST_MAIN("chat templates", TESTS)
